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

  Attributes:
    values: int8 integers of the array's shape.
    scale: float32 factors on them, of size 1 along the inputs' axes.
  """

  values: jax.Array
  scale: jax.Array

  @classmethod
  def of(cls, array: jax.Array, inputs: Sequence[int]) -> 'Quantized':
    """Rounds a float array, whose axes `inputs` are contracted in products."""
    array = jnp.asarray(array, jnp.float32)
    values, scale = _rounded(array, tuple(inputs))
    return cls(values, scale)

  @property
  def T(self) -> 'Quantized':
    return Quantized(self.values.T, self.scale.T)

  def __getitem__(self, rows) -> 'Quantized':
    return Quantized(self.values[rows], self.scale[rows])

  def astype(self, dtype) -> jax.Array:
    """Returns the float array that the integers stand for."""
    return (self.values * self.scale).astype(dtype)

  def reshape(self, num_inputs: int, num_outputs: int) -> 'Quantized':
    """Returns the matrix of an array whose first axes are the inputs."""
    values = self.values.reshape(num_inputs, num_outputs)
    return Quantized(values, self.scale.reshape(1, -1))

  def product(self, x: jax.Array, out_dtype) -> jax.Array:
    """Returns features [..., I] times this matrix, in `out_dtype`."""
    axis = self.scale.shape.index(1)
    x_TI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    high_TI, scale_T1 = _rounded(x_TI, (1,))
    rest_TI = x_TI - high_TI * scale_T1
    low_scale_T1 = scale_T1 / (2 * _LARGEST)
    low_TI = jnp.round(rest_TI / low_scale_T1).astype(jnp.int8)
    sums = jax.lax.dot_general(
      *(jnp.concatenate([high_TI, low_TI]), self.values),
      (((1,), (axis,)), ((), ())),
      preferred_element_type=jnp.int32,
    )
    high_TO, low_TO = jnp.split(sums, 2)
    y_TO = scale_T1 * high_TO + low_scale_T1 * low_TO
    y_TO *= self.scale.reshape(1, -1)
    return y_TO.reshape(*x.shape[:-1], -1).astype(out_dtype)


def _rounded(array, axes):
  """Returns int8 integers and their scale, which is common to the axes."""
  largest = jnp.max(jnp.abs(array), axis=axes, keepdims=True)
  scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny) / _LARGEST
  return jnp.round(array / scale).astype(jnp.int8), scale
