"""Pictures with objects: batches for detection."""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Annotated, Literal

import grain
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import errors
from mod_jax.data import batches, common
from mod_jax.data import images as images_lib
from mod_jax.data import resize as resize_lib
from mod_jax.data.coco import Coco, Objects, box_between
from mod_jax.data.scenes import SceneConfig, Scenes

# Carion et al. 2020, section 4: a picture to crop is first resized to one of
# `_CROP_SHORT_SIDES`; then a window is cut out, whose sides are drawn between
# the two of `_CROP_SIDES`. All are in pixels.
_CROP_SHORT_SIDES = (400, 500, 600)
_CROP_SIDES = (384, 600)

_Side = config_lib.Pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionPreprocess:
  """Converts pictures to a detector's input as in evaluation.

  Attributes:
    image_size: height and width in pixels to which all pictures are padded.
    short_side: the shorter side of a picture after resizing, if the picture
      then fits `image_size`; None for as large as fits.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
  """

  image_size: tuple[int, int]
  short_side: int | None
  mean: tuple[float, float, float]
  std: tuple[float, float, float]

  def apply_to(self, data: 'DetectionDataConfig') -> 'DetectionDataConfig':
    """Returns a copy of the config whose pictures are prepared this way."""
    return dataclasses.replace(data, **vars(self))

  def fit(
    self, image: Image.Image, short_side: int | None = None
  ) -> Image.Image:
    """Returns an RGB picture resized to fit `image_size`, its aspect kept.

    `short_side`, if not None, replaces the attribute.
    """
    short_side = short_side or self.short_side
    sides = image.height, image.width
    low, square = min(sides), len(set(self.image_size)) == 1
    limits = [*zip(self.image_size, sides, strict=True)]
    short = min(limit * low / side for limit, side in limits)
    # The sides are rounded, and pictures of nearly the wanted size are left as
    # they are, both as in Hugging Face transformers.
    if short_side is not None and (square or short_side <= short):
      short = min(short_side, short)
      if round(short) == low and max(sides) <= max(self.image_size):
        short = low
      height, width = (
        max(1, round(short)) if side == low else int(short * side / low)
        for side in sides
      )
    else:
      factor = min(limit / side for limit, side in limits)
      height, width = (max(1, int(factor * side)) for side in sides)
    if (width, height) == image.size:
      return image
    return image.resize((width, height), Image.Resampling.BILINEAR)

  def pad(self, image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Returns a fitted picture, normalised and padded with 0, and its size.

    The size is (height, width) before the padding.
    """
    array = np.zeros((*self.image_size, 3), np.float32)
    pixels = resize_lib.normalize(np.asarray(image), self.mean, self.std)
    array[: image.height, : image.width] = pixels
    return array, np.int32([image.height, image.width])

  def __call__(self, pictures) -> tuple[np.ndarray, np.ndarray]:
    """Returns image_BHWC and size_B2 for paths, Pillow images or arrays."""
    padded = [
      self.pad(self.fit(images_lib.as_image(picture))) for picture in pictures
    ]
    images, sizes = zip(*padded, strict=True)
    return np.stack(images), np.stack(sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionDataConfig:
  """Where pictures with objects come from and how they become arrays.

  Attributes:
    source: 'scenes' draws pictures of handwritten digits among clutter; 'coco'
      is a folder in COCO's format (`data.coco.Coco`).
    scenes: what scenes are made of, for 'scenes'.
    path: the folder, for 'coco'.
    train_split: name of the pictures to train on, for 'coco'.
    eval_split: name of the held-out pictures, for 'coco'.
    image_size: height and width in pixels to which all pictures are padded.
    short_side: see `DetectionPreprocess`.
    train_short_sides: least and greatest shorter side in training, drawn for
      each picture; None for `short_side`.
    flip: probability that a picture to train on is mirrored.
    crop: probability that a window is cut out of a picture to train on, with
      the sizes of DETR's recipe; boxes are cut off at the window's edge.
    most: number of objects, and crowds, to which the targets of a picture are
      padded.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
    workers: processes that read pictures; 0 uses threads in this process. The
      batches do not depend on it.
  """

  source: Literal['scenes', 'coco'] = 'scenes'
  scenes: SceneConfig = SceneConfig()
  path: str = ''
  train_split: str = 'train2017'
  eval_split: str = 'val2017'
  image_size: tuple[_Side, _Side] = (64, 64)
  short_side: _Side | None = None
  train_short_sides: tuple[_Side, _Side] | None = None
  flip: config_lib.Probability = 0.0
  crop: config_lib.Probability = 0.0
  most: Annotated[int, config_lib.Range(ge=1, le=1000)] = 10
  mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
  std: config_lib.Positives = (0.5, 0.5, 0.5)
  workers: config_lib.Workers = 0

  def __post_init__(self):
    check = config_lib.validate(self)
    common.check_source(self, needed={'coco': ['path']}, own={'path': ['coco']})
    sides = self.train_short_sides or (1, 1)
    check(sides[0] <= sides[1], 'the least side first', 'train_short_sides')
    check(
      self.source != 'scenes' or len(set(self.image_size)) == 1,
      'one side twice, as scenes are square',
      'image_size',
    )

  @property
  def pads(self) -> bool:
    """Whether pictures may be smaller than `image_size`."""
    resized = self.short_side, self.train_short_sides, self.crop
    return self.source != 'scenes' or any(resized)

  @property
  def preprocess(self) -> DetectionPreprocess:
    names = ('image_size', 'short_side', 'mean', 'std')
    return DetectionPreprocess(**{name: getattr(self, name) for name in names})


class _SceneObjects:
  """Scenes, with the part of the interface of `Coco` that batches need."""

  def __init__(self, config: DetectionDataConfig, split: str):
    self._scenes = Scenes(config.scenes, config.image_size[0], split)
    self.class_names = tuple(map(str, range(10)))
    self.most = config.scenes.most
    self.fingerprint = self._scenes.fingerprint

  def __len__(self) -> int:
    return len(self._scenes)

  def load(self, index: int) -> tuple[Image.Image, Objects]:
    scene = self._scenes.scene(index)
    image = Image.fromarray(scene.image_SSC)
    return image, Objects(scene.digits_N, scene.boxes_N4)


@functools.lru_cache(maxsize=4)  # Annotations take long to read.
def open_split(config: DetectionDataConfig, split: Literal['train', 'eval']):
  """Returns a split: a `Coco`, or scenes with its interface.

  Raises UserError if the splits name a class differently, or if a picture has
  more objects than `config.most`.
  """
  if config.source == 'scenes':
    source = _SceneObjects(config, split)
  else:
    named = config.train_split if split == 'train' else config.eval_split
    source = Coco(config.path, named)
  if split == 'eval':
    names = open_split(config, 'train').class_names
    for i, name in enumerate(source.class_names):
      if name and name not in names[i : i + 1]:
        raise errors.UserError(
          f'eval_split={config.eval_split!r}: its category {i} is {name!r}, and'
          f' {"".join(names[i : i + 1]) or "none"!r} in'
          f' train_split={config.train_split!r}: number both alike.'
        )
  if source.most > config.most:
    raise errors.UserError(
      f'most={config.most}: a picture has {source.most} objects; set'
      f' data.most={source.most}.'
    )
  return source


def train_iterator(
  config: DetectionDataConfig, **kwargs
) -> grain.DatasetIterator:
  """Returns an endless iterator; keywords are those of `batches.endless`."""
  source = open_split(config, 'train')
  make_row = functools.partial(_train_row, config, source)
  return batches.endless(
    make_row, len(source), config.workers, what='pictures', **kwargs
  )


def eval_batches(
  config: DetectionDataConfig, **kwargs
) -> Iterator[batches.Batch]:
  """Returns held-out batches; keywords are those of `batches.held_out`."""
  source = open_split(config, 'eval')
  make_row = functools.partial(_eval_row, config, source)
  return batches.held_out(make_row, len(source), config.workers, **kwargs)


def _train_row(
  config, source, index, rng: np.random.Generator
) -> batches.Batch:
  image, objects = source.load(int(index))
  short_side = None
  if config.train_short_sides is not None:
    short_side = int(rng.integers(*config.train_short_sides, endpoint=True))
  if rng.random() < config.flip:
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    box_N4 = objects.box_N4
    box_N4 = np.concatenate([1 - box_N4[:, :1], box_N4[:, 1:]], axis=1)
    objects = objects._replace(box_N4=box_N4)
  if rng.random() < config.crop:
    image, objects = _cropped(image, objects, rng)
  return _row(config, image, objects, short_side)


def _cropped(
  image: Image.Image, objects: Objects, rng: np.random.Generator
) -> tuple[Image.Image, Objects]:
  """Returns a window of a picture, and the objects of which it shows a part."""
  size_2 = np.array(image.size)
  # Cut the window out of the original, so that pixels are resized only once.
  factor = rng.choice(_CROP_SHORT_SIDES) / size_2.min()
  low, high = _CROP_SIDES
  largest_2 = np.minimum(size_2 * factor, high)
  side_2 = np.round(rng.uniform(low, largest_2) / factor).astype(int)
  side_2 = np.clip(side_2, 1, size_2)
  corner_2 = rng.integers(0, size_2 - side_2, endpoint=True)
  window = (*corner_2.tolist(), *(corner_2 + side_2).tolist())
  middle_N2, half_N2 = objects.box_N4[:, :2], objects.box_N4[:, 2:] / 2

  def within(point_N2):  # Fractions of the picture -> fractions of the window.
    return np.clip((point_N2 * size_2 - corner_2) / side_2, 0, 1)

  box_N4 = box_between(within(middle_N2 - half_N2), within(middle_N2 + half_N2))
  shown_N = (box_N4[:, 2:] > 0).all(axis=1)
  return image.crop(window), Objects(
    objects.label_N[shown_N], np.float32(box_N4[shown_N])
  )


def _eval_row(config, source, index: np.integer) -> batches.Batch:
  real = index != batches.PADDING
  image, objects = source.load(int(index) if real else 0)
  return _row(config, image, objects) | {'weight': np.float32(real)}


def _row(config, image, objects: Objects, short_side=None) -> batches.Batch:
  preprocess = config.preprocess
  array, size = preprocess.pad(preprocess.fit(image, short_side))
  label_T = np.full(config.most, -1, np.int32)
  box_T4 = np.full((config.most, 4), 0.5, np.float32)
  count = len(objects.label_N)
  label_T[:count], box_T4[:count] = objects
  return {'image': array, 'size': size, 'label': label_T, 'box': box_T4}
