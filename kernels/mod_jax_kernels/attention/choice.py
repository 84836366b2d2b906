"""Which library's attention fits a process and its arrays."""

import contextvars

import jax
from jax.extend import backend

from mod_jax_kernels import dispatch

_MADE_FOR = contextvars.ContextVar('made_for', default=None)


def made_for(platform: str):
  """Returns a context in which programs are traced for another platform.

  For compiling ahead: where no backend is named, the one is taken that suits a
  process of that platform.
  """
  return dispatch.setting(_MADE_FOR, platform)


def splash_suits(q_BQHC, k_BSGC, *_) -> bool:
  """Returns whether this is for a TPU, and in whole tiles."""
  # Other lengths would be filled up, and what that costs is not measured.
  whole = q_BQHC.shape[1] % 128 == k_BSGC.shape[1] % 128 == 0
  return platform() == 'tpu' and whole and not _split_by_compiler()


def cudnn_suits(q_BQHC, k_BSGC, _, mask_BQS, segment_BL) -> bool:
  """Returns whether this process computes on a GPU, with fitting lengths."""
  # With a mask, its gradients want even lengths.
  masked = segment_BL is not None or mask_BQS is not None
  even = q_BQHC.shape[1] % 2 == k_BSGC.shape[1] % 2 == 0
  suits = even or not masked
  return platform() == 'cuda' and suits and not _split_by_compiler()


def _split_by_compiler() -> bool:
  """Returns whether arrays lie on several devices as the compiler likes.

  Neither backend can be split by it for sure: cuDNN wants q, k and v split
  alike.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  )


def splash_lacks(q_BQHC, k_BSGC, v_BSGC, mask_BQS, _) -> str | None:
  """Returns why splash attention cannot take the arrays, and a way out."""
  if mask_BQS is not None:
    return "takes no mask_BQS: use causal=True and segment_BL, or use 'xla'"
  return _wrong_types((q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float32'))


def cudnn_lacks(q_BQHC, k_BSGC, v_BSGC, *_) -> str | None:
  """Returns why cuDNN cannot take the arrays, and a way out."""
  channels, version = q_BQHC.shape[-1], capability()
  if version < 8:
    return (
      f'needs a GPU of compute capability 8.0, and this one has {version}:'
      " use None, or use 'xla'"
    )
  most = 256 if version >= 9 else 128
  if channels % 8 or channels > most:
    return (
      f'takes heads of a multiple of 8 channels up to {most}, not {channels}:'
      " use other heads, or use 'xla'"
    )
  return _wrong_types((q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float16'))


def _wrong_types(arrays, types) -> str | None:
  given = [x.dtype.name for x in arrays]
  if given[0] in types and len(set(given)) == 1:
    return None
  return (
    f'takes q, k and v all {" or ".join(types)}, not {", ".join(given)}: cast'
    " them, or use 'xla'"
  )


def platform() -> str:
  """Returns what programs are traced for: `cpu`, `cuda`, `tpu`, …

  That is what this process computes on, unless `made_for` says otherwise.
  """
  if (platform := _MADE_FOR.get()) is not None:
    return platform
  version = backend.get_backend().platform_version
  return 'cuda' if 'cuda' in version else jax.default_backend()


def capability() -> float:
  """Returns this GPU's compute capability; without one, the best."""
  if platform() != 'cuda':
    return float('inf')
  return float(jax.devices()[0].compute_capability)
