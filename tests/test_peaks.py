"""The table of devices, by the names that JAX has for them."""

import types

import pytest

from mod_jax import peaks


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H100 NVL', None),
    ('cpu', None),
  ],
)
def test_by_name(kind, tera):
  device = types.SimpleNamespace(device_kind=kind)
  assert peaks.of(device) == (tera and tera * 1e12)
  half = 2 if kind.startswith('NVIDIA') else 1  # Where it is TF32.
  assert peaks.of(device, 'float32') == (tera and tera * 1e12 / half)
