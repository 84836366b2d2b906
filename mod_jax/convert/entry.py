"""One array of another library, and ours: names and layouts."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Entry:
  """One array of another library, and ours.

  Attributes:
    theirs: its name there.
    ours: path of our parameter, or of several that are one there, joined along
      the first axis.
    layout: how it lies there: `same`; `vector`, flat; `token` and `position`
      with leading axes of length 1; `inward`, our [D, ...] as [..., D];
      `outward`, our [..., D] as [D, ...]; `patch`, our [P·P·C, D] as
      [D, C, P, P]; `convolution`, our [P, P, C, D] likewise.
    channels: C of patches.
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
    given = [self._to_theirs(array) for array in arrays]
    return given[0] if len(given) == 1 else np.concatenate(given)

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
    """Returns our arrays, as many as `ours`, each of a `shape`, from theirs."""
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
    """Returns the shape of their array from the shapes of ours."""
    abstract = jax.ShapeDtypeStruct(shapes[self.ours[0]], jnp.float32)
    first, *rest = jax.eval_shape(self._to_theirs, abstract).shape
    return (first * len(self.ours), *rest)


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
  """A float32 parameter of ours that is read whenever NumPy asks for it.

  So a model is placed array by array, and never is on the host as a whole.

  Attributes:
    shape: its shape.
    read: returns it.
  """

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]
  dtype = np.dtype(np.float32)

  def __array__(self, dtype=None, copy=None):
    return np.array(self.read(), dtype, copy=copy)
