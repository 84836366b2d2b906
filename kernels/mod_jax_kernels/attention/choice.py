"""Which attention backend suits a process and its arrays."""

import contextvars

import jax
from jax.extend import backend

from mod_jax_kernels import dispatch
from mod_jax_kernels.route_scores import lacks as scores_lack

_MADE_FOR = contextvars.ContextVar('made_for', default=None)


def made_for(device: jax.Device):
  """Returns a context manager; programs traced in it are for another device.

  For compiling ahead of time: if no backend is named, the choice is as in a
  process that has this device.
  """
  return dispatch.setting(_MADE_FOR, device)


def splash_suits(q_BQHC, k_BSGC, *_) -> bool:
  """Returns whether tracing is for a TPU, and lengths and mesh suit splash."""
  # Other lengths need padding, whose cost has not been measured.
  is_tiled = q_BQHC.shape[1] % 128 == k_BSGC.shape[1] % 128 == 0
  return platform() == 'tpu' and is_tiled and not _split_by_compiler()


def cudnn_suits(*_) -> bool:
  """Returns whether tracing is for a GPU, and no compiler divides the call."""
  return platform() == 'cuda' and not _split_by_compiler()


def triton_suits(q_BQHC, *_) -> bool:
  """Returns whether `cudnn_suits` is true, but these kernels are faster.

  They are for bfloat16 of an odd length below 1024, which cuDNN pads: with
  scores, they take .74 of cuDNN's time for 197 tokens and .96 for 577
  (`results/h100`). From 1024 tokens on, padding costs little.
  """
  length, dtype = q_BQHC.shape[1], q_BQHC.dtype.name
  padded = length % 2 == 1 and length < 1024
  return cudnn_suits() and padded and dtype == 'bfloat16'


def _split_by_compiler() -> bool:
  """Returns whether the compiler, not `shard_map`, would divide arrays.

  It would if a mesh axis of several devices is not manual. The compiler cannot
  divide splash at all, and cuDNN only if q, k and v are sharded alike.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    kind != jax.sharding.AxisType.Manual and mesh.shape[name] > 1
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  )


def splash_lacks(q_BQHC, k_BSGC, v_BSGC, mask_BQS, _) -> str | None:
  """Returns why splash does not support the arrays; None if it does."""
  if mask_BQS is not None:
    return "takes no mask_BQS: use causal=True and segment_BL, or use 'xla'"
  return dispatch.wrong_types('q, k and v', (q_BQHC, k_BSGC, v_BSGC))


def cudnn_lacks(q_BQHC, k_BSGC, v_BSGC, *_) -> str | None:
  """Returns why cuDNN does not support the arrays; None if it does."""
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
  return dispatch.wrong_types(
    *('q, k and v', (q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float16'))
  )


def triton_lacks(q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL) -> str | None:
  """Returns why `triton` does not support the arrays; None if it does."""
  if mask_BQS is not None or segment_BL is not None:
    return "takes no mask_BQS and no segment_BL: use None or 'xla'"
  if q_BQHC.shape != k_BSGC.shape:
    return (
      f'takes q and k of one shape, not {q_BQHC.shape} and {k_BSGC.shape}: use'
      " None or 'xla'"
    )
  return scores_lack(q_BQHC, k_BSGC, v_BSGC, None)


def platform() -> str:
  """Returns the platform for which programs are traced: `cpu`, `cuda`, …

  This is the platform of the process, unless `made_for` sets another device.
  """
  if (device := _MADE_FOR.get()) is not None:
    return 'cuda' if device.platform == 'gpu' else device.platform
  version = backend.get_backend().platform_version
  return 'cuda' if 'cuda' in version else jax.default_backend()


def capability() -> float:
  """Returns the compute capability of the target GPU; infinity without one."""
  if platform() != 'cuda':
    return float('inf')
  device = _MADE_FOR.get() or jax.devices()[0]
  return float(device.compute_capability)
