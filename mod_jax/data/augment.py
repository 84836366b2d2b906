"""From decoded pictures to arrays: crops, augmentation and mixing.

Pictures are RGB `PIL.Image`s of any size until they are cropped to `size`, S,
pixels a side, by Pillow's filter `resample`, and then normalised. Every random
choice comes from the numpy generator `rng` that is passed in, one for each
picture or batch, so the same generator state gives the same bytes. A batch has
'image', float32 [B, S, S, 3], and 'target', float32 [B, V].
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Annotated, Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from mod_jax import config as config_lib

Color = tuple[int, int, int]
# What is resized to a number of pixels: the shorter side, and the longer one by
# as much; each side, so that the aspect changes; or nothing.
Resize = Literal['shorter_side', 'squash', 'none']

_MAX_MAGNITUDE = 10.0
_Magnitude = Annotated[float, config_lib.Range(ge=0, le=_MAX_MAGNITUDE)]
# A drawn operation is left out this often, as in timm and so in DeiT's recipe.
_SKIPPED_OPERATIONS = 0.5
# Attempts at a rectangle that fits, before giving up.
_ATTEMPTS = 10
_CROP_ASPECT = (3 / 4, 4 / 3)
# Shorter sides of a picture that its longer side may have before it is cut.
_LONGEST = 32
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig:
  """What happens to training pictures; all off by default.

  Attributes:
    crop: 'none' is the largest centred square, or all of a picture that is
      squashed; 'pad' moves that square by up to `padding` pixels;
      'random_resized' takes a random part of the picture (Szegedy et al.,
      2015).
    min_scale: smallest part of the picture's area, for 'random_resized'.
    padding: pixels on each side after resizing, for 'pad'.
    flip: probability of a horizontal flip.
    randaugment_ops: operations per picture (Cubuk et al., 2020); each drawn one
      is applied with probability 1/2.
    randaugment_magnitude: their strength, of 10.
    randaugment_noise: standard deviation of that strength.
    three_augment: whether each picture is made grey, solarised or blurred, one
      of these at random (DeiT III, Touvron et al., 2022).
    color_jitter: largest change of brightness, contrast and saturation, each as
      a part of what they are.
    erase: probability of erasing a random rectangle (Zhong et al., 2020).
    mixup: alpha of the Beta distribution of the weight of a picture against
      another of its batch (Zhang et al., 2018); 0 is off.
    cutmix: alpha of that of the area kept, the rest being a rectangle of
      another picture (Yun et al., 2019); 0 is off.
    switch: probability that a batch gets cutmix, if both are on.
    label_smoothing: part of the target that is spread over all classes.
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
    """Refuses values out of range."""
    config_lib.validate(self)


# One picture.


def center_crop(
  image: Image.Image,
  size: int,
  *,
  fraction: float = 1.0,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
  resize: Resize = 'shorter_side',
) -> Image.Image:
  """Returns the middle of a resized picture, `size` pixels a side.

  The picture is resized to `size / fraction` pixels, and a square of `size`
  cut from its middle, with the very pixels that transformers gets. What lies
  outside of the picture is black.

  Args:
    image: RGB.
    size: of the result.
    fraction: side of the square over that of the resized picture.
    resample: Pillow's filter.
    resize: see `Resize`.
  """
  whole = max(1, round(size / fraction))
  if resize == 'squash':
    image = image.resize((whole, whole), resample)
  elif resize == 'shorter_side':
    shorter = min(image.size)
    # All of a very long picture would fill the memory once it is resized.
    image = _middle(image, *(min(n, _LONGEST * shorter) for n in image.size))
    image = image.resize([whole * n // shorter for n in image.size], resample)
  return _middle(image, size, size)


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
  left, top = (image.width - width) // 2, (image.height - height) // 2
  return image.crop((left, top, left + width, top + height))


def random_resized_crop(
  image: Image.Image,
  size: int,
  rng: np.random.Generator,
  *,
  min_scale: float,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> Image.Image:
  """Returns a random part of the picture, of aspect 3:4 to 4:3, as S by S.

  Its area is from `min_scale` to 1 of the whole. Where no such part fits, the
  centred square (Szegedy et al., 2015).
  """
  width, height = image.size
  for _ in range(_ATTEMPTS):
    area = width * height * rng.uniform(min_scale, 1)
    aspect = math.exp(rng.uniform(*map(math.log, _CROP_ASPECT)))
    w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < w <= width and 0 < h <= height:
      left = int(rng.integers(width - w + 1))
      top = int(rng.integers(height - h + 1))
      box = (left, top, left + w, top + h)
      return image.resize((size, size), resample, box=box)
  return center_crop(image, size, resample=resample)


def shift(
  image: Image.Image, rng: np.random.Generator, *, padding: int, fill: Color
) -> Image.Image:
  """Pads the picture and cuts its size out again at a random place."""
  width, height = image.size
  padded = ImageOps.expand(image, border=padding, fill=fill)
  left, top = (int(n) for n in rng.integers(2 * padding + 1, size=2))
  return padded.crop((left, top, left + width, top + height))


def _affine(image: Image.Image, matrix, fill: Color) -> Image.Image:
  return image.transform(
    image.size,
    Image.Transform.AFFINE,
    matrix,
    resample=Image.Resampling.BICUBIC,
    fillcolor=fill,
  )


def _enhance(kind):
  return lambda image, level, fill: kind(image).enhance(
    max(0.1, 1 + 0.9 * level)
  )


def _auto_contrast(image, level, fill):
  return ImageOps.autocontrast(image)


def _equalize(image, level, fill):
  return ImageOps.equalize(image)


def _posterize(image, level, fill):
  # Zero bits would be a black picture, which Pillow can make and nobody learn.
  return ImageOps.posterize(image, max(1, 4 - int(4 * level)))


def _solarize(image, level, fill):
  return ImageOps.solarize(image, 256 - int(256 * level))


def _rotate(image, level, fill):
  return image.rotate(
    30 * level, resample=Image.Resampling.BICUBIC, fillcolor=fill
  )


def _shear_x(image, level, fill):
  return _affine(image, (1, 0.3 * level, 0, 0, 1, 0), fill)


def _shear_y(image, level, fill):
  return _affine(image, (1, 0, 0, 0.3 * level, 1, 0), fill)


def _translate_x(image, level, fill):
  return _affine(image, (1, 0, 0.45 * level * image.width, 0, 1, 0), fill)


def _translate_y(image, level, fill):
  return _affine(image, (1, 0, 0, 0, 1, 0.45 * level * image.height), fill)


# Name -> (operation, whether its level has a random sign). The level is the
# magnitude over 10; all grow stronger with it, as timm's "increasing" set.
OPERATIONS: dict[
  str, tuple[Callable[[Image.Image, float, Color], Image.Image], bool]
] = {
  'auto_contrast': (_auto_contrast, False),
  'equalize': (_equalize, False),
  'posterize': (_posterize, False),
  'solarize': (_solarize, False),
  'color': (_enhance(ImageEnhance.Color), True),
  'contrast': (_enhance(ImageEnhance.Contrast), True),
  'brightness': (_enhance(ImageEnhance.Brightness), True),
  'sharpness': (_enhance(ImageEnhance.Sharpness), True),
  'rotate': (_rotate, True),
  'shear_x': (_shear_x, True),
  'shear_y': (_shear_y, True),
  'translate_x': (_translate_x, True),
  'translate_y': (_translate_y, True),
}


def rand_augment(
  image: Image.Image,
  rng: np.random.Generator,
  *,
  ops: int,
  magnitude: float,
  noise: float = 0.0,
  fill: Color = (128, 128, 128),
) -> Image.Image:
  """Applies random operations in a row (Cubuk et al., 2020).

  Args:
    image: RGB.
    rng: makes the choices.
    ops: operations drawn, with replacement, each applied with probability 1/2.
    magnitude: strength, of 10.
    noise: standard deviation of the strength, which stays within 0 and 10.
    fill: colour of what comes in from outside.
  """
  names = list(OPERATIONS)
  for _ in range(ops):
    operation, signed = OPERATIONS[names[int(rng.integers(len(names)))]]
    level = np.clip(rng.normal(magnitude, noise), 0, _MAX_MAGNITUDE)
    level = float(level / _MAX_MAGNITUDE)
    if signed and rng.random() < 0.5:
      level = -level
    if rng.random() >= _SKIPPED_OPERATIONS:
      image = operation(image, level, fill)
  return image


def three_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
  """Returns the picture grey, solarised or blurred (Touvron et al., 2022)."""
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

  Each is multiplied by a number between 1 - most and 1 + most.
  """
  kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
  for i in rng.permutation(len(kinds)):
    image = kinds[i](image).enhance(rng.uniform(1 - most, 1 + most))
  return image


def normalize(
  image: Image.Image | np.ndarray,
  mean: tuple[float, float, float],
  std: tuple[float, float, float],
) -> np.ndarray:
  """Returns bytes [..., 3] as float32, `(value / 255 - mean) / std`."""
  scaled = np.asarray(image, np.float32) / np.float32(255)
  return (scaled - np.float32(mean)) / np.float32(std)


def erase(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns a copy in which one rectangle is normal noise.

  Its area is 2% to 1/3 of the picture's and its aspect 0.3 to 1/0.3 (Zhong et
  al., 2020); in the rare case that none of ten draws fits, nothing is erased.
  The image is normalised, float32 [S, S, 3].
  """
  height, width, channels = image.shape
  for _ in range(_ATTEMPTS):
    area = height * width * rng.uniform(*_ERASED_AREA)
    aspect = math.exp(rng.uniform(*map(math.log, _ERASED_ASPECT)))
    h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < h < height and 0 < w < width:
      top = int(rng.integers(height - h + 1))
      left = int(rng.integers(width - w + 1))
      image = image.copy()
      image[top : top + h, left : left + w] = rng.standard_normal(
        (h, w, channels), np.float32
      )
      return image
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
  resize: Resize = 'shorter_side',
) -> np.ndarray:
  """Returns a training picture: crop, flip, operations, normalise, erase.

  Args:
    image: RGB, any size.
    rng: of this picture.
    config: what to do; mixing and smoothing are for whole batches.
    size: S.
    mean: of each channel, in [0, 1]; what comes in from outside has this
      colour.
    std: of each channel, likewise.
    resample: Pillow's filter of the crop.
    resize: what is resized where the crop is not random.

  Returns:
    float32 [S, S, 3].
  """
  fill = tuple(min(255, max(0, round(255 * m))) for m in mean)
  if config.crop == 'random_resized':
    image = random_resized_crop(
      image, size, rng, min_scale=config.min_scale, resample=resample
    )
  else:
    image = center_crop(image, size, resample=resample, resize=resize)
    if config.crop == 'pad':
      image = shift(image, rng, padding=config.padding, fill=fill)
  if rng.random() < config.flip:
    image = ImageOps.mirror(image)
  image = rand_augment(
    image,
    rng,
    ops=config.randaugment_ops,
    magnitude=config.randaugment_magnitude,
    noise=config.randaugment_noise,
    fill=fill,
  )
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
  """Returns float32 [V] that sums to 1: one-hot, a part of it spread evenly."""
  target = np.full(classes, smoothing / classes, np.float32)
  target[label] += 1 - smoothing
  return target


def mixup(batch: dict[str, np.ndarray], weight: float) -> dict[str, np.ndarray]:
  """Returns every picture blended with the one before it in the batch.

  The weight, in [0, 1], is that of the picture itself and of its target.
  """
  own, other = np.float32(weight), np.float32(1 - weight)
  return {
    key: own * batch[key] + other * np.roll(batch[key], 1, axis=0)
    for key in ('image', 'target')
  }


def cutmix(
  batch: dict[str, np.ndarray], weight: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Returns every picture with a rectangle of the one before it in the batch.

  The weight, in [0, 1], is the part of the area that a picture would keep.
  Targets are weighted by the area that the rectangle really has: it is cut off
  at the border.
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
  other = np.float32((bottom - top) * (right - left) / (height * width))
  return {
    'image': mixed,
    'target': (1 - other) * target + other * np.roll(target, 1, axis=0),
  }


def mix(
  batch: dict[str, np.ndarray], rng: np.random.Generator, config: AugmentConfig
) -> dict[str, np.ndarray]:
  """Returns the batch after mixup or cutmix, if either is on.

  One weight holds for a whole batch.
  """
  if not (config.mixup or config.cutmix):
    return batch
  both = config.mixup and config.cutmix
  cut = rng.random() < config.switch if both else bool(config.cutmix)
  alpha = config.cutmix if cut else config.mixup
  weight = float(rng.beta(alpha, alpha))
  return cutmix(batch, weight, rng) if cut else mixup(batch, weight)
