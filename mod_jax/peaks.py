"""Peak FLOP/s of devices, as published by their makers."""

import re

import jax

# FLOP/s of dense matrix products in bfloat16, by a pattern that matches all of
# JAX's `device_kind`. Sources: for TPUs https://docs.cloud.google.com/tpu/docs/v4
# and likewise v5e, v5p and v6e; for GPUs NVIDIA's data sheets, whose figures
# with sparsity are twice these.
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
  """Returns the peak FLOP/s of a device, or None if unknown.

  Args:
    device: any device.
    dtype: type of the factors of matrix products. JAX rounds float32 factors to
      bfloat16 on TPUs, and to TF32, at half the speed, on GPUs.
  """
  for pattern, peak in BFLOAT16.items():
    if re.fullmatch(pattern, device.device_kind):
      slower = dtype == 'float32' and pattern.startswith('NVIDIA')
      return peak / 2 if slower else peak
  return None


def total(devices, dtype: str) -> float | None:
  """Returns the peak FLOP/s of devices together; None if one is unknown."""
  of_each = [of(device, dtype) for device in devices]
  return None if None in of_each else sum(of_each)
