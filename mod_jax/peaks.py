"""How much arithmetic devices can do at most, as their makers say."""

import re

import jax

# FLOP/s of dense matrix products in bfloat16, by a pattern of the name that JAX
# has for the device, matched whole. Of TPUs by
# https://docs.cloud.google.com/tpu/docs/v4, and /v5e, /v5p and /v6e there; of
# GPUs by NVIDIA's data sheets, whose figures with sparsity are twice these.
BFLOAT16 = {
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5p?': 459e12,
  'TPU v6 lite': 918e12,
  'NVIDIA A100[ -].*': 312e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA (H100 80GB HBM3|H200)( .*)?': 989e12,
  'NVIDIA L4': 121e12,
}


def of(device: jax.Device, dtype: str = 'bfloat16') -> float | None:
  """Returns the FLOP/s that a device reaches at most; None if nobody said.

  Args:
    device: of any kind.
    dtype: of the factors. JAX rounds those in float32: on a TPU to bfloat16,
      and on a GPU to TF32, at half the speed.
  """
  for pattern, peak in BFLOAT16.items():
    if re.fullmatch(pattern, device.device_kind):
      slower = dtype == 'float32' and pattern.startswith('NVIDIA')
      return peak / 2 if slower else peak
  return None
