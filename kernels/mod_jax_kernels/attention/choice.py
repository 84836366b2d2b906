"""Which attention backend suits a process and its arrays."""

import contextvars

import jax
from jax.extend import backend

from mod_jax_kernels import dispatch

_MADE_FOR = contextvars.ContextVar('made_for', default=None)


def made_for(platform: str):
  """Returns a context in which programs are traced for another platform.

  For compiling ahead of time: if no backend is named, the choice is that of a
  process on that platform.
  """
  return dispatch.setting(_MADE_FOR, platform)


def splash_suits(q_BQHC, k_BSGC, *_) -> bool:
  """Returns whether tracing is for a TPU, and lengths are whole tiles."""
  # Other lengths need padding, whose cost has not been measured.
  is_tiled = q_BQHC.shape[1] % 128 == k_BSGC.shape[1] % 128 == 0
  return platform() == 'tpu' and is_tiled and not _split_by_compiler()


def cudnn_suits(q_BQHC, k_BSGC, _, mask_BQS, segment_BL) -> bool:
  """Returns whether tracing is for a GPU, and lengths are supported."""
  # With a mask, cuDNN's gradients need even lengths.
  masked = segment_BL is not None or mask_BQS is not None
  even = q_BQHC.shape[1] % 2 == k_BSGC.shape[1] % 2 == 0
  suits = even or not masked
  return platform() == 'cuda' and suits and not _split_by_compiler()


def _split_by_compiler() -> bool:
  """Returns whether the compiler shards arrays over several devices.

  It cannot shard splash at all, and cuDNN only if q, k and v are sharded alike.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  )


def splash_lacks(q_BQHC, k_BSGC, v_BSGC, mask_BQS, _) -> str | None:
  """Returns why splash does not support the arrays, with a remedy, or None."""
  if mask_BQS is not None:
    return "takes no mask_BQS: use causal=True and segment_BL, or use 'xla'"
  return _wrong_types((q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float32'))


def cudnn_lacks(q_BQHC, k_BSGC, v_BSGC, *_) -> str | None:
  """Returns why cuDNN does not support the arrays, with a remedy, or None."""
  channels, version = q_BQHC.shape[-1], capability()
  if version < 8:
    return (
      f'needs a GPU of compute capability 8.0, and this one has {version}:'
      " use None, or use 'xla'"
    )
  limit = 256 if version >= 9 else 128
  if channels % 8 or channels > limit:
    return (
      f'takes heads of a multiple of 8 channels up to {limit}, not {channels}:'
      " use other heads, or use 'xla'"
    )
  return _wrong_types((q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float16'))


def _wrong_types(arrays, types) -> str | None:
  names = [x.dtype.name for x in arrays]
  if names[0] in types and len(set(names)) == 1:
    return None
  return (
    f'takes q, k and v all {" or ".join(types)}, not {", ".join(names)}: cast'
    " them, or use 'xla'"
  )


def platform() -> str:
  """Returns the platform for which programs are traced: `cpu`, `cuda`, …

  It is that of this process unless `made_for` sets another.
  """
  if (platform := _MADE_FOR.get()) is not None:
    return platform
  version = backend.get_backend().platform_version
  return 'cuda' if 'cuda' in version else jax.default_backend()


def capability() -> float:
  """Returns this GPU's compute capability; infinity without a GPU."""
  if platform() != 'cuda':
    return float('inf')
  return float(jax.devices()[0].compute_capability)
