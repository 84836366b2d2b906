"""Matrices of parameters in int8, and products with them, for inference.

Each output of a linear map has a scale, so that its largest weight is 127. In
a product each token's features become two int8 numbers, the second of which is
what the first has rounded off: a single one would cost more loss than the
weights do. Products of integers read a quarter of the bytes.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

_LARGEST = 127


@flax.struct.dataclass
class Quantized:
  """Takes the place of a float matrix of parameters.

  The last axis is that of inputs, since products for a few tokens then take a
  CPU less time (`benchmarks/one_row.py`). A transpose before a product would
  make XLA widen the matrix to int32.

  Attributes:
    values: int8 integers.
    scale: float32 factors on them, of size 1 along the inputs' axis.
  """

  values: jax.Array
  scale: jax.Array

  @classmethod
  def of(cls, array: jax.Array, inputs: Sequence[int]) -> 'Quantized':
    """Rounds a float array, whose axes `inputs` are contracted in products."""
    array = jnp.moveaxis(
      jnp.asarray(array, jnp.float32), inputs, range(-len(inputs), 0)
    )
    return cls(*_rounded(array.reshape(*array.shape[: -len(inputs)], -1)))

  def __getitem__(self, rows) -> 'Quantized':
    return Quantized(self.values[rows], self.scale[rows])

  def astype(self, dtype) -> jax.Array:
    """Returns the float array that the integers stand for."""
    return (self.values * self.scale).astype(dtype)

  @property
  def T(self) -> jax.Array:
    """The float matrix [I, O] that a matrix stands for."""
    return self.astype(jnp.float32).T

  def product(self, x: jax.Array, out_dtype) -> jax.Array:
    """Returns features [..., I] times this matrix, in `out_dtype`."""
    x_TI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    scale_T1 = _scale(x_TI)
    x_TI /= scale_T1
    high_TI = jnp.round(x_TI)
    low_TI = jnp.round((x_TI - high_TI) * (2 * _LARGEST))
    sums = jnp.einsum(
      'TI,OI->TO',
      jnp.concatenate([high_TI, low_TI]).astype(jnp.int8),
      self.values.reshape(-1, x.shape[-1]),
      preferred_element_type=jnp.int32,
    )
    high_TO, low_TO = jnp.split(sums, 2)
    y_TO = (high_TO + low_TO / (2 * _LARGEST)) * scale_T1
    y_TO *= self.scale.reshape(1, -1)
    return y_TO.reshape(*x.shape[:-1], -1).astype(out_dtype)


def _scale(array):
  """Returns the factors with which integers stand for the last axis."""
  largest = jnp.max(jnp.abs(array), axis=-1, keepdims=True)
  return jnp.maximum(largest, jnp.finfo(jnp.float32).tiny) / _LARGEST


@jax.jit
def _rounded(array):
  """Returns int8 integers, and their scale."""
  scale = _scale(array)
  return jnp.round(array / scale).astype(jnp.int8), scale
