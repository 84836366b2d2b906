"""Names and layouts of arrays in another library and here."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Entry:
  """Maps one array of another library to our parameters.

  Attributes:
    theirs: the array's name in the other library.
    ours: name of our parameter; several if the other library concatenates them
      along the first axis.
    layout: the other library's layout: `same` as ours; `vector`, flattened;
      `token` and `position`, with two or one leading axes of length 1;
      `inward`, our [D, ...] as [..., D], flattened to a matrix; `outward`, our
      [..., D] as [D, ...], flattened to a matrix; `patch`, our [P·P·C, D] as
      [D, C, P, P]; `convolution`, our [P, P, C, D] as [D, C, P, P].
    channels: C of `patch`.
  """

  theirs: str
  ours: tuple[str, ...]
  layout: Literal[
    'same',
    'vector',
    'token',
    'position',
    'inward',
    'outward',
    'patch',
    'convolution',
  ]
  channels: int = 3

  def to_theirs(self, *arrays):
    """Returns their array from ours."""
    converted = [self._to_theirs(array) for array in arrays]
    return converted[0] if len(converted) == 1 else np.concatenate(converted)

  def _to_theirs(self, x):
    match self.layout:
      case 'same':
        return x
      case 'vector':
        return x.reshape(-1)
      case 'token':
        return x[None, None]
      case 'position':
        return x[None]
      case 'inward':
        return x.reshape(x.shape[0], -1).T
      case 'outward':
        return x.reshape(-1, x.shape[-1]).T
      case 'patch':
        side = math.isqrt(x.shape[0] // self.channels)
        x = x.reshape(side, side, self.channels, -1)
        return x.transpose(3, 2, 0, 1)
      case 'convolution':
        return x.transpose(3, 2, 0, 1)

  def to_ours(self, x, shape: tuple[int, ...]):
    """Returns our arrays, each of the given shape, from their array."""
    return [self._to_ours(part, shape) for part in np.split(x, len(self.ours))]

  def _to_ours(self, x, shape):
    match self.layout:
      case 'same' | 'vector' | 'token' | 'position':
        return x.reshape(shape)
      case 'inward' | 'outward':
        return x.T.reshape(shape)
      case 'patch' | 'convolution':
        return x.transpose(2, 3, 1, 0).reshape(shape)

  def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of their array, given all shapes of ours by name."""
    abstract = jax.ShapeDtypeStruct(shapes[self.ours[0]], jnp.float32)
    first, *rest = jax.eval_shape(self._to_theirs, abstract).shape
    return (first * len(self.ours), *rest)


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
  """A float32 parameter that is read when it is converted to a NumPy array.

  Thus a model can be moved to devices array by array, without ever being in the
  host's memory as a whole.

  Attributes:
    shape: shape of the array.
    read: reads and returns the array.
  """

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]
  dtype = np.dtype(np.float32)

  def __array__(self, dtype=None, copy=None):
    return np.array(self.read(), dtype, copy=copy)
