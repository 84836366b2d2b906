"""Rotary position embedding (Su et al. 2021), the half-split kind of Llama."""

import jax
import jax.numpy as jnp


def rotation(position_BL: jax.Array, head_dim: int, theta: float) -> jax.Array:
  """Returns rotation_BLC: C/2 cosines, then C/2 sines, float32.

  Args:
    position_BL: integer positions.
    head_dim: channels per head C, even.
    theta: base of the geometric progression of wavelengths.
  """
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  angle = position_BL[..., None].astype(jnp.float32) * theta**-exponent
  return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def rotate(x_BLHC: jax.Array, rotation_BLC: jax.Array) -> jax.Array:
  """Rotates each pair of channels (c, c + C/2) by its token's angle."""
  cos, sin = jnp.split(rotation_BLC[:, :, None], 2, axis=-1)
  first, second = jnp.split(x_BLHC, 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BLHC.dtype)
