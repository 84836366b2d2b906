"""Rotary position embedding (Su et al. 2021), the half-split kind of Llama."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Longer wavelengths, for texts longer than those of the original training.

  They apply to texts of any length.
  """

  # `linear` divides all frequencies (Chen et al. 2023); `llama3` only those
  # whose wavelength is long relative to `original_length` (Llama 3.1).
  kind: Literal['linear', 'llama3'] = 'llama3'
  factor: config_lib.Positive = 8.0  # Divisor of the frequencies.
  # For `llama3`: wavelengths above `original_length / low_frequency` are scaled
  # in full.
  low_frequency: config_lib.Positive = 1.0
  # For `llama3`: wavelengths below `original_length / high_frequency` are not
  # scaled.
  high_frequency: config_lib.Positive = 4.0
  original_length: config_lib.Size = 8192  # Tokens of the original training.

  def __post_init__(self):
    check = config_lib.validate(self)
    check(
      self.low_frequency < self.high_frequency,
      'low_frequency < high_frequency',
      *('low_frequency', 'high_frequency'),
    )

  def scaled(self, frequency_C: jax.Array) -> jax.Array:
    """Returns the scaled frequencies, in radians per token."""
    slow_C = frequency_C / self.factor
    if self.kind == 'linear':
      return slow_C
    turns_C = self.original_length * frequency_C / (2 * math.pi)
    weight_C = (turns_C - self.low_frequency) / (
      self.high_frequency - self.low_frequency
    )
    weight_C = jnp.clip(weight_C, 0, 1)
    return (1 - weight_C) * slow_C + weight_C * frequency_C


def frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
  """Returns frequency_C of the C/2 pairs of channels, in radians per token."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequency_C = theta**-exponent
  return frequency_C if scaling is None else scaling.scaled(frequency_C)


def rotation(
  position_BL: jax.Array,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
) -> jax.Array:
  """Returns rotation_BLC: C/2 cosines, then C/2 sines, float32."""
  frequency_C = frequencies(head_dim, theta, scaling)
  angle = position_BL[..., None].astype(jnp.float32) * frequency_C
  return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def rotate(x_BLHC: jax.Array, rotation_BLC: jax.Array) -> jax.Array:
  """Rotates each pair of channels (c, c + C/2) by its token's angle."""
  cos, sin = jnp.split(rotation_BLC[:, :, None], 2, axis=-1)
  first, second = jnp.split(x_BLHC, 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BLHC.dtype)
