"""Block sizes of kernels: a small table per device, and a way to try others.

An operation's `TILES` maps a backend to a dictionary from prefixes of device
kinds, such as `NVIDIA H200` or `TPU v5`, to sizes by name. The longest matching
prefix applies; '' matches all. `benchmarks/tune.py` measures candidates on the
current device and prints entries.
"""

from collections.abc import Mapping

import jax

from mod_jax_kernels import dispatch

Sizes = Mapping[str, int]


def choose(table: Mapping[str, Mapping[str, Sizes]], backend: str) -> Sizes:
  """Returns the sizes for the device for which a program is traced.

  `table` is an operation's `TILES`. Sizes set by `trying` take precedence.
  """
  rows = table[backend]
  kind = device_kind(dispatch.PLATFORMS[backend])
  sizes = rows[max((r for r in rows if kind.startswith(r)), key=len)]
  return {**sizes, **dict(dispatch.TRIED.get())}


def trying(**sizes: int):
  """Returns a context manager; programs traced in it have these sizes."""
  return dispatch.setting(dispatch.TRIED, tuple(sizes.items()))


def device_kind(platform: str) -> str:
  """Returns the kind of device for which programs are traced, '' if unknown."""
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return abstract.device_kind
  if jax.default_backend() == {'cuda': 'gpu'}.get(platform, platform):
    return jax.devices()[0].device_kind
  return ''
