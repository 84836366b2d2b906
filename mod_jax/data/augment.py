"""Augments images at random, and mixes them.

Images are RGB `PIL.Image`s until they are normalised, S x S pixels (`size`).
What is not random (`resize.center_crop`, or `reduce` before random crops) is
done first, so that its result can be cached. All randomness comes from the
NumPy generator `rng` that is passed in, one for each image or batch. `images`
makes it from the seed and the position in the data, so that a continued run
draws the same numbers. A batch has 'image', float32 [B, S, S, 3], and 'target',
float32 [B, V].
"""

import dataclasses
import math
from typing import Annotated, Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from mod_jax import config as config_lib
from mod_jax.data.resize import center_crop, normalize

Color = tuple[int, int, int]

_MAX_MAGNITUDE = 10.0
_Magnitude = Annotated[float, config_lib.Range(ge=0, le=_MAX_MAGNITUDE)]
# Probability of skipping a drawn operation, as in timm and so DeiT's recipe.
_SKIPPED_OPERATIONS = 0.5
# Most draws of a random rectangle to find one that fits into the image.
_ATTEMPTS = 10
_CROP_ASPECT = (3 / 4, 4 / 3)
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig:
  """Augmentation of training images; all off by default.

  Attributes:
    crop: 'none' is the largest centred square, or the whole image if it is
      squashed; 'pad' shifts that square by up to `padding` pixels;
      'random_resized' takes a random part of the image (Szegedy et al., 2015).
    min_scale: smallest part of the image's area, for 'random_resized'.
    padding: pixels on each side after resizing, for 'pad'.
    flip: probability of a horizontal flip.
    randaugment_ops: operations drawn per image (Cubuk et al., 2020); each is
      applied with probability 1/2.
    randaugment_magnitude: strength of the operations, from 0 to 10.
    randaugment_noise: standard deviation of that strength.
    three_augment: whether to make each image grey, solarised or blurred, one of
      these at random (DeiT III, Touvron et al., 2022).
    color_jitter: largest relative change of brightness, contrast and
      saturation.
    erase: probability of erasing a random rectangle (Zhong et al., 2020).
    mixup: alpha of the Beta distribution from which the weights of two mixed
      images are drawn (Zhang et al., 2018); 0 is off.
    cutmix: alpha of the Beta distribution of the part of an image's area that
      is kept; another image fills the rest (Yun et al., 2019); 0 is off.
    switch: probability that a batch gets cutmix and not mixup, if both are on.
    label_smoothing: part of the target that is spread over all classes; with a
      table of labels, over true and false of each label.
  """

  crop: Literal['none', 'pad', 'random_resized'] = 'none'
  min_scale: config_lib.Fraction = 0.08
  padding: config_lib.Pixels = 4
  flip: config_lib.Probability = 0.0
  randaugment_ops: Annotated[int, config_lib.Range(ge=0, le=100)] = 0
  randaugment_magnitude: _Magnitude = 9.0
  randaugment_noise: _Magnitude = 0.0
  three_augment: bool = False
  color_jitter: config_lib.Probability = 0.0
  erase: config_lib.Probability = 0.0
  mixup: config_lib.Weight = 0.0
  cutmix: config_lib.Weight = 0.0
  switch: config_lib.Probability = 0.5
  label_smoothing: config_lib.BelowOne = 0.0

  def __post_init__(self):
    config_lib.validate(self)


# Single images.


def reduce(image: Image.Image, size: int, *, min_scale: float) -> Image.Image:
  """Reduces an image by the largest whole factor that costs no resolution.

  The smallest crop that `random_resized_crop` may take keeps `size` pixels a
  side. Blocks of pixels are averaged.
  """
  smallest = math.sqrt(min_scale * _CROP_ASPECT[0] * image.width * image.height)
  factor = int(min(smallest, *image.size) / size)
  return image.reduce(factor) if factor > 1 else image


def _rectangle(rng, sides, scale, aspect, margin=0):
  """Draws a part of two `sides`: (start, start, length, length), in pixels.

  Returns None if no draw fits. A length is at most the side less `margin`.
  """
  for _ in range(_ATTEMPTS):
    area = math.prod(sides) * rng.uniform(*scale)
    ratio = math.exp(rng.uniform(*map(math.log, aspect)))
    drawn = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    pairs = list(zip(drawn, sides, strict=True))
    if all(0 < length <= side - margin for length, side in pairs):
      starts = [int(rng.integers(side - length + 1)) for length, side in pairs]
      return *starts, *drawn
  return None


def random_resized_crop(
  image: Image.Image,
  size: int,
  rng: np.random.Generator,
  *,
  min_scale: float,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> Image.Image:
  """Returns a random crop of aspect ratio 3:4 to 4:3, resized to S by S.

  Its area is drawn between `min_scale` and 1 of the image's area. If no draw
  fits, the crop is the centred square (Szegedy et al., 2015).
  """
  part = _rectangle(rng, image.size, (min_scale, 1), _CROP_ASPECT)
  if part is None:
    return center_crop(image, size, resample=resample)
  left, top, width, height = part
  box = (left, top, left + width, top + height)
  return image.resize((size, size), resample, box=box)


def shift(
  image: Image.Image, rng: np.random.Generator, *, padding: int, fill: Color
) -> Image.Image:
  """Pads the image and crops it to its original size at a random place."""
  width, height = image.size
  padded = ImageOps.expand(image, border=padding, fill=fill)
  left, top = (int(n) for n in rng.integers(2 * padding + 1, size=2))
  return padded.crop((left, top, left + width, top + height))


def _affine(matrix):
  """Returns the affine operation of a `matrix(level, width, height)`."""
  return lambda image, level, fill: image.transform(
    image.size,
    Image.Transform.AFFINE,
    matrix(level, *image.size),
    resample=Image.Resampling.BICUBIC,
    fillcolor=fill,
  )


def _enhance(kind):
  return lambda image, level, fill: kind(image).enhance(
    max(0.1, 1 + 0.9 * level)
  )


# Name -> (operation of image, level and fill colour; whether the level gets a
# random sign). The level is the magnitude over 10, and no operation gets weaker
# with it. These are all of timm's "increasing" set, which DeiT's recipe takes.
OPERATIONS = {
  'auto_contrast': (
    lambda image, level, fill: ImageOps.autocontrast(image),
    False,
  ),
  'equalize': (lambda image, level, fill: ImageOps.equalize(image), False),
  'invert': (lambda image, level, fill: ImageOps.invert(image), False),
  'posterize': (
    # Keep at least one bit, since without any the image would be black.
    lambda image, level, fill: ImageOps.posterize(
      image, max(1, 4 - int(4 * level))
    ),
    False,
  ),
  'solarize': (
    lambda image, level, fill: ImageOps.solarize(image, 256 - int(256 * level)),
    False,
  ),
  'solarize_add': (  # Brightens dark tones alone.
    lambda image, level, fill: image.point(
      3 * [min(255, x + (x < 128) * int(110 * level)) for x in range(256)]
    ),
    False,
  ),
  'color': (_enhance(ImageEnhance.Color), True),
  'contrast': (_enhance(ImageEnhance.Contrast), True),
  'brightness': (_enhance(ImageEnhance.Brightness), True),
  'sharpness': (_enhance(ImageEnhance.Sharpness), True),
  'rotate': (
    lambda image, level, fill: image.rotate(
      30 * level, resample=Image.Resampling.BICUBIC, fillcolor=fill
    ),
    True,
  ),
  'shear_x': (_affine(lambda x, width, height: (1, 0.3 * x, 0, 0, 1, 0)), True),
  'shear_y': (_affine(lambda x, width, height: (1, 0, 0, 0.3 * x, 1, 0)), True),
  'translate_x': (
    _affine(lambda x, width, height: (1, 0, 0.45 * x * width, 0, 1, 0)),
    True,
  ),
  'translate_y': (
    _affine(lambda x, width, height: (1, 0, 0, 0, 1, 0.45 * x * height)),
    True,
  ),
}


def rand_augment(
  image: Image.Image,
  rng: np.random.Generator,
  config: AugmentConfig,
  fill: Color,
) -> Image.Image:
  """Applies a sequence of random operations (Cubuk et al., 2020).

  Each is drawn from all of `OPERATIONS`, and applied with probability 1/2.
  """
  names = list(OPERATIONS)
  for _ in range(config.randaugment_ops):
    operation, signed = OPERATIONS[names[int(rng.integers(len(names)))]]
    level = rng.normal(config.randaugment_magnitude, config.randaugment_noise)
    level = float(np.clip(level, 0, _MAX_MAGNITUDE) / _MAX_MAGNITUDE)
    if signed and rng.random() < 0.5:
      level = -level
    if rng.random() >= _SKIPPED_OPERATIONS:
      image = operation(image, level, fill)
  return image


def three_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
  """Makes the image grey, solarised or blurred (Touvron et al., 2022)."""
  match int(rng.integers(3)):
    case 0:
      return ImageOps.grayscale(image).convert('RGB')
    case 1:
      return ImageOps.solarize(image)
  return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2)))


def color_jitter(
  image: Image.Image, rng: np.random.Generator, *, most: float
) -> Image.Image:
  """Changes brightness, contrast and saturation, in random order.

  Each of these is multiplied by a random number from 1 - most to 1 + most.
  """
  kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
  for i in rng.permutation(len(kinds)):
    image = kinds[i](image).enhance(rng.uniform(1 - most, 1 + most))
  return image


def erase(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns a copy in which one rectangle is Gaussian noise.

  The rectangle has 2% to 1/3 of the image's area, and an aspect ratio of 0.3 to
  1/0.3 (Zhong et al., 2020). In the rare case that none of ten draws fits, the
  image itself is returned. The image is normalised, float32 [S, S, 3].
  """
  sides = image.shape[:2]
  part = _rectangle(rng, sides, _ERASED_AREA, _ERASED_ASPECT, margin=1)
  if part is None:
    return image
  top, left, height, width = part
  image = image.copy()
  image[top : top + height, left : left + width] = rng.standard_normal(
    (height, width, image.shape[-1]), np.float32
  )
  return image


def augment(
  image: Image.Image,
  rng: np.random.Generator,
  config: AugmentConfig,
  *,
  size: int,
  mean: tuple[float, float, float],
  std: tuple[float, float, float],
  resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> np.ndarray:
  """Returns a randomly augmented and normalised image, float32 [S, S, 3].

  The image comes from `center_crop`, or from `reduce` for 'random_resized'.
  Pixels from outside of it get the colour `mean`. Mixing and label smoothing
  are applied elsewhere.
  """
  fill = tuple(min(255, max(0, round(255 * m))) for m in mean)
  if config.crop == 'random_resized':
    image = random_resized_crop(
      image, size, rng, min_scale=config.min_scale, resample=resample
    )
  elif config.crop == 'pad':
    image = shift(image, rng, padding=config.padding, fill=fill)
  if rng.random() < config.flip:
    image = ImageOps.mirror(image)
  image = rand_augment(image, rng, config, fill)
  if config.three_augment:
    image = three_augment(image, rng)
  if config.color_jitter:
    image = color_jitter(image, rng, most=config.color_jitter)
  array = normalize(image, mean, std)
  if rng.random() < config.erase:
    array = erase(array, rng)
  return array


# Targets and batches.


def soft_target(label: int, classes: int, smoothing: float = 0.0) -> np.ndarray:
  """Returns a smoothed one-hot target, float32 [V], that sums to 1."""
  target = np.full(classes, smoothing / classes, np.float32)
  target[label] += 1 - smoothing
  return target


def soft_labels(label_V: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
  """Returns smoothed targets of independent labels, float32 [V]."""
  return np.float32(smoothing / 2) + np.float32(1 - smoothing) * label_V


def mixup(batch: dict[str, np.ndarray], weight: float) -> dict[str, np.ndarray]:
  """Blends every image with the preceding one in the batch.

  Each image and its target have the given weight, in [0, 1]. The preceding
  image and its target have 1 - weight.
  """
  kept, added = np.float32(weight), np.float32(1 - weight)
  return {
    key: kept * batch[key] + added * np.roll(batch[key], 1, axis=0)
    for key in ('image', 'target')
  }


def cutmix(
  batch: dict[str, np.ndarray], weight: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Pastes into every image a rectangle of the preceding one in the batch.

  The weight, in [0, 1], is the intended part of the area to keep. Targets are
  weighted by the actual area, since the rectangle is clipped at the border.
  """
  image, target = batch['image'], batch['target']
  height, width = image.shape[1:3]
  spans = []
  for length in (height, width):
    half = int(length * math.sqrt(1 - weight)) // 2
    center = int(rng.integers(length))
    spans.append((max(0, center - half), min(length, center + half)))
  (top, bottom), (left, right) = spans
  mixed = image.copy()
  mixed[:, top:bottom, left:right] = np.roll(image, 1, axis=0)[
    :, top:bottom, left:right
  ]
  pasted = np.float32((bottom - top) * (right - left) / (height * width))
  return {
    'image': mixed,
    'target': (1 - pasted) * target + pasted * np.roll(target, 1, axis=0),
  }


def mix(
  batch: dict[str, np.ndarray], rng: np.random.Generator, config: AugmentConfig
) -> dict[str, np.ndarray]:
  """Applies mixup or cutmix, if on, with one random weight for the batch."""
  if not (config.mixup or config.cutmix):
    return batch
  both = config.mixup and config.cutmix
  cut = rng.random() < config.switch if both else bool(config.cutmix)
  alpha = config.cutmix if cut else config.mixup
  weight = float(rng.beta(alpha, alpha))
  return cutmix(batch, weight, rng) if cut else mixup(batch, weight)
