"""Scenes: digits of several sizes among clutter, drawn from a seed.

Most of a scene is background, so a model that chooses its tokens well can save
most of its work; and any number of scenes can be drawn. Held-out scenes show
held-out images of `data.digits`, which no training scene shows.

A scene has targets for several tasks: the largest digit, the sum of all digits,
and which digits are where.
"""

from collections.abc import Callable, Hashable
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import errors
from mod_jax.data import digits
from mod_jax.data import fingerprint as fingerprints

# Places that are tried for a digit before it is left out.
_TRIES = 30
# Largest overlap of two digits, intersection over union of their boxes.
_MOST_OVERLAP = 0.1
# Least ratio of the side of a scene's largest digit to the next largest side.
_LARGER = 1.3
_SIDE = 8  # Side of scikit-learn's digits in pixels.


class Scene(NamedTuple):
  """A picture, and its digits with their boxes.

  Attributes:
    image_SSC: uint8 [S, S, 3].
    boxes_N4: float32 centre x, centre y, width and height of each digit, as
      fractions of the picture; the largest digit comes first.
    digits_N: int32 digits.
  """

  image_SSC: np.ndarray
  boxes_N4: np.ndarray
  digits_N: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneConfig:
  """What scenes are made of.

  Attributes:
    label: the class of a scene: 'largest' is its largest digit; 'sum' is the
      sum of its digits.
    least: least number of digits in a scene; fewer where there is no room.
    most: greatest number of digits.
    scales: least and greatest factor on the eight pixels of a digit's side.
    clutter: number of pieces of digits and of lines in the background.
    num_train: number of training scenes.
    num_eval: number of held-out scenes.
    seed: seed of all scenes.
  """

  label: Literal['largest', 'sum'] = 'largest'
  least: config_lib.Size = 2
  most: config_lib.Size = 4
  scales: tuple[config_lib.Positive, config_lib.Positive] = (1.0, 2.5)
  clutter: config_lib.Count = 12
  num_train: config_lib.PositiveCount = 20_000
  num_eval: config_lib.PositiveCount = 1_000
  seed: config_lib.Seed = 0

  def __post_init__(self):
    check = config_lib.validate(self)
    low, high = self.scales
    check(self.least <= self.most, 'least <= most', 'least')
    check(_LARGER * low <= high, f'{_LARGER} times the least', 'scales')

  @property
  def classes(self) -> tuple[str, ...]:
    """Names of the classes, in the order of labels."""
    if self.label == 'largest':
      return digits.CLASSES
    return tuple(map(str, range(9 * self.most + 1)))


class Scenes:
  """The training or the held-out scenes, with random access.

  Scenes are drawn when they are read, `size` pixels a side.
  """

  def __init__(self, config: SceneConfig, size: int, split: str):
    if _SIDE * config.scales[1] > size / 2:
      raise errors.UserError(
        f'scenes.scales: digits of up to {_SIDE * config.scales[1]:.0f} pixels'
        f' do not fit pictures of {size}: take at most {size / 2 / _SIDE:.1f},'
        ' or a larger image_size.'
      )
    self.class_names = config.classes
    self._config, self._size, self._split = config, size, split
    self._digits = digits.DigitImages(split)
    held_out = split == 'eval'
    self._count = config.num_eval if held_out else config.num_train

  def __len__(self) -> int:
    return self._count

  def fingerprint(self) -> dict[str, Any]:
    """Returns the fingerprint of all scenes; see `data/fingerprint.py`."""
    return {
      **{'config': fingerprints.of_value(repr(self._config))},
      **{'size': self._size, 'digits': self._digits.fingerprint()},
    }

  def name(self, index: int) -> str:
    return f'scene {index}'

  @functools.cached_property
  def labels(self) -> np.ndarray:
    """The class of each scene, int32 [N]; draws the layout of all scenes."""
    return np.int32([self._label(self._layout(i)) for i in range(len(self))])

  def entry(
    self, index: int
  ) -> tuple[Hashable, Callable[[], Image.Image], int]:
    """Returns the picture's key, a function that paints it, and its class."""
    key = (repr(self._config), self._size, self._split, int(index))

    def decode():
      # Painting continues the layout's random numbers, so make a new layout.
      return Image.fromarray(self._paint(self._layout(index)))

    return key, decode, self._label(self._layout(index))

  def scene(self, index: int) -> Scene:
    """Returns a scene, the same at each call."""
    layout = self._layout(index)
    objects = self._boxes(layout), layout.digits_N
    return Scene(self._paint(layout), *objects)

  def objects(self, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `boxes_N4` and `digits_N` of a scene, and paints nothing."""
    layout = self._layout(index)
    return self._boxes(layout), layout.digits_N

  def _boxes(self, layout: '_Layout') -> np.ndarray:
    corner_N2 = np.float32([corner for corner, _ in layout.places])
    side_N1 = np.float32([[side] for _, side in layout.places])
    boxes_N4 = np.concatenate([corner_N2 + side_N1 / 2, side_N1, side_N1], 1)
    return boxes_N4 / self._size

  def _layout(self, index: int) -> '_Layout':
    config = self._config
    held_out = int(self._split == 'eval')
    rng = np.random.default_rng((config.seed, held_out, int(index)))
    count = rng.integers(config.least, config.most, endpoint=True)
    low, high = config.scales
    # Place the largest digit first, so that the others find room around it.
    largest = rng.uniform(_LARGER * low, high)
    scales = [largest, *rng.uniform(low, largest / _LARGER, count - 1)]
    places = []
    for scale in scales:
      side = round(_SIDE * scale)
      corner = _free_corner(places, side, self._size, rng)
      if corner is not None:
        places.append((corner, side))
    chosen_N = rng.integers(len(self._digits), size=len(places))
    digits_N = self._digits.labels[chosen_N].astype(np.int32)
    return _Layout(rng, places, chosen_N.tolist(), digits_N)

  def _label(self, layout: '_Layout') -> int:
    digits_N = layout.digits_N
    largest = self._config.label == 'largest'
    return int(digits_N[0] if largest else digits_N.sum())

  def _paint(self, layout: '_Layout') -> np.ndarray:
    rng, size = layout.rng, self._size
    place_S = np.linspace(-1, 1, size)
    slope_2 = rng.uniform(-20, 20, 2)
    shade_SS = slope_2[0] * place_S[:, None] + slope_2[1] * place_S
    canvas_SSC = rng.uniform(0, 90, 3) + shade_SS[:, :, None]
    for _ in range(self._config.clutter):
      self._add_clutter(canvas_SSC, rng)
    for (corner, side), i in zip(layout.places, layout.chosen, strict=True):
      image_88 = self._digits.images[i]
      _add(canvas_SSC, image_88, corner, side, rng.uniform(150, 255, 3))
    canvas_SSC += rng.normal(0, 8, canvas_SSC.shape)
    return np.uint8(np.clip(np.round(canvas_SSC), 0, 255))

  def _add_clutter(self, canvas_SSC, rng):
    """Adds a line, or a piece of a digit that is too small to be read."""
    if rng.random() < 0.5:
      piece = np.zeros((4, 4), np.uint8)
      piece[:, rng.integers(4)] = 255
      piece = piece.T if rng.random() < 0.5 else piece
    else:
      row, column = rng.integers(0, _SIDE - 3, 2)
      image_88 = self._digits.images[rng.integers(len(self._digits))]
      piece = image_88[row : row + 4, column : column + 4]
    side = round(rng.uniform(0.25, 0.5) * _SIDE * self._config.scales[1])
    x, y = rng.integers(0, self._size - side, 2)
    _add(canvas_SSC, piece, (x, y), side, rng.uniform(100, 230, 3))


class _Layout(NamedTuple):
  """Where the digits of a scene are, before it is painted.

  Attributes:
    rng: the random generator for the rest of the scene.
    places: (x and y of the corner, side) of each digit, in pixels.
    chosen: index of each digit's image among the source's images.
    digits_N: int32 digits.
  """

  rng: np.random.Generator
  places: list[tuple[tuple[int, int], int]]
  chosen: list[int]
  digits_N: np.ndarray


def _free_corner(places, side, size, rng) -> tuple[int, int] | None:
  """Returns a random corner where a digit hardly overlaps `places`, or None."""
  for _ in range(_TRIES):
    x, y = rng.integers(0, size - side, 2, endpoint=True).tolist()
    place = (x, y), side
    if all(_overlap(place, other) <= _MOST_OVERLAP for other in places):
      return x, y
  return None


def _overlap(a, b) -> float:
  """Returns the intersection over union of two squares (corner, side)."""
  (corner_a, side_a), (corner_b, side_b) = a, b
  shared = 1
  for x_a, x_b in zip(corner_a, corner_b, strict=True):
    shared *= max(0, min(x_a + side_a, x_b + side_b) - max(x_a, x_b))
  return shared / (side_a**2 + side_b**2 - shared)


def _add(canvas_SSC, image, corner, side, colour_C):
  """Paints an image, as strokes of a colour, into a square of the canvas."""
  stroke_PP1 = _resized(image.tobytes(), len(image), side)
  x, y = corner
  window_PPC = canvas_SSC[y : y + side, x : x + side]
  window_PPC += stroke_PP1 * (colour_C - window_PPC)


# Cached, since Pillow takes longer than all else, and most images are reused.
@functools.lru_cache(maxsize=1 << 15)
def _resized(pixels: bytes, before: int, side: int) -> np.ndarray:
  """Returns a square image resized to [side, side, 1], from 0 to 1."""
  image = Image.frombytes('L', (before, before), pixels)
  resized = image.resize((side, side), Image.Resampling.BILINEAR)
  return np.asarray(resized, float)[:, :, None] / 255
