"""Matrices of parameters in int8, and products with them, for inference.

Each output of a linear map has its own scale, which makes its largest weight
127. In a product, each feature becomes two int8 numbers: the rounded value and
the rounding error. With the rounded value alone, rounding the features would
raise the loss by more than rounding the weights does. Products of int8 weights
read a quarter of the bytes of float32 weights.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

_LARGEST = 127


@flax.struct.dataclass
class Quantized:
  """An int8 matrix of parameters in place of a float matrix.

  The inputs are the last axis, since a CPU then computes products for a few
  tokens faster (`benchmarks/one_row.py`). The matrix is stored in that order,
  because XLA would widen it to int32 for a transpose before a product.

  Attributes:
    values: int8 integers.
    scale: float32 factors on `values`, of size 1 along the inputs' axis.
  """

  values: jax.Array
  scale: jax.Array

  @classmethod
  def of(cls, array: jax.Array, inputs: Sequence[int]) -> 'Quantized':
    """Returns `array` in int8; products contract its axes `inputs`."""
    array = jnp.moveaxis(
      jnp.asarray(array, jnp.float32), inputs, range(-len(inputs), 0)
    )
    return cls(*_rounded(array.reshape(*array.shape[: -len(inputs)], -1)))

  def __getitem__(self, rows) -> 'Quantized':
    return Quantized(self.values[rows], self.scale[rows])

  def astype(self, dtype) -> jax.Array:
    """Returns the dequantised array."""
    return (self.values * self.scale).astype(dtype)

  @property
  def T(self) -> jax.Array:
    """The dequantised matrix [I, O], float32; only for matrices."""
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
  """Returns the largest magnitude along the last axis, divided by 127."""
  largest = jnp.max(jnp.abs(array), axis=-1, keepdims=True)
  return jnp.maximum(largest, jnp.finfo(jnp.float32).tiny) / _LARGEST


@jax.jit
def _rounded(array):
  """Returns an array's int8 integers, and their scale along the last axis."""
  scale = _scale(array)
  return jnp.round(array / scale).astype(jnp.int8), scale
