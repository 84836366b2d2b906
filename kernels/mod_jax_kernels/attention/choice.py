"""Which library's attention fits a process and its arrays."""

import jax
from jax.extend import backend


def fitting(platform, q_BQHC, k_BSGC, v_BSGC, mask_BQS, *, segmented):
  """Returns the backend for a platform: never one that has to refuse."""
  if _split_by_compiler():
    # Neither can be split by it for sure: cuDNN wants q, k and v split alike.
    return 'xla'
  arrays = q_BQHC, k_BSGC, v_BSGC, mask_BQS
  lengths = q_BQHC.shape[1], k_BSGC.shape[1]
  if platform == 'tpu' and splash_lacks(*arrays) is None:
    # Other lengths would be filled up, and what that costs is not measured.
    whole = all(length % 128 == 0 for length in lengths)
    return 'splash' if whole else 'xla'
  if platform == 'cuda' and cudnn_lacks(*arrays) is None:
    # With a mask, its gradients want even lengths.
    masked = segmented or mask_BQS is not None
    even = all(length % 2 == 0 for length in lengths)
    return 'cudnn' if even or not masked else 'xla'
  return 'xla'


def _split_by_compiler() -> bool:
  """Returns whether arrays lie on several devices as the compiler likes."""
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  )


def splash_lacks(q_BQHC, k_BSGC, v_BSGC, mask_BQS) -> str | None:
  """Returns why splash attention cannot take the arrays, and a way out."""
  if mask_BQS is not None:
    return 'takes no mask_BQS: use causal=True and segment_BL'
  return _wrong_types((q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float32'))


def cudnn_lacks(q_BQHC, k_BSGC, v_BSGC, mask_BQS) -> str | None:
  """Returns why cuDNN cannot take the arrays, and a way out."""
  del mask_BQS  # It takes any.
  channels, version = q_BQHC.shape[-1], capability()
  if version < 8:
    return (
      f'needs a GPU of compute capability 8.0, and this one has {version}:'
      ' use None'
    )
  most = 256 if version >= 9 else 128
  if channels % 8 or channels > most:
    return (
      f'takes heads of a multiple of 8 channels up to {most}, not {channels}:'
      ' use other heads'
    )
  return _wrong_types((q_BQHC, k_BSGC, v_BSGC), ('bfloat16', 'float16'))


def _wrong_types(arrays, types) -> str | None:
  given = [x.dtype.name for x in arrays]
  if given[0] in types and len(set(given)) == 1:
    return None
  return (
    f'takes q, k and v all {" or ".join(types)}, not {", ".join(given)}: cast'
    ' them'
  )


def platform() -> str:
  """Returns what this process computes on: `cpu`, `cuda`, `tpu`, …"""
  version = backend.get_backend().platform_version
  return 'cuda' if 'cuda' in version else jax.default_backend()


def capability() -> float:
  """Returns this GPU's compute capability; without one, the best."""
  if platform() != 'cuda':
    return float('inf')
  return float(jax.devices()[0].compute_capability)
