"""Resizes, crops and normalises images, as evaluation needs them.

Nothing here is random; `augment` is. Images are RGB `PIL.Image`s of any size
until they are cropped to S x S pixels (`size`), with Pillow's filter
`resample`, and then normalised.
"""

import math
from typing import Literal

import numpy as np
from PIL import Image

# 'shorter_side' resizes the shorter side to a number of pixels and keeps the
# aspect ratio; 'squash' resizes both sides to it; 'none' does not resize.
Resize = Literal['shorter_side', 'squash', 'none']
# Where a centred crop begins if that is between two pixels: Hugging Face rounds
# 'down'; torchvision, and so timm, rounds to 'even' numbers, and towards the
# image if that is smaller than the crop.
Rounding = Literal['down', 'even']

# Images of a larger aspect ratio are cropped to this one before resizing.
_LONGEST = 32


def center_crop(
  image: Image.Image,
  size: int,
  *,
  fraction: float = 1.0,
  resample: Image.Resampling = Image.Resampling.BICUBIC,
  resize: Resize = 'shorter_side',
  rounding: Rounding = 'down',
) -> Image.Image:
  """Returns a centred square crop of a resized image, `size` pixels a side.

  `resize` says which sides are first resized to `size / fraction` pixels. The
  pixels equal those of Hugging Face's image processors or, if `rounding` is
  'even', of timm. Pixels outside of the image are black.
  """
  full = max(1, round(size / fraction))
  if resize == 'squash':
    image = image.resize((full, full), resample)
  elif resize == 'shorter_side':
    shorter = min(image.size)
    # Resizing an image of extreme aspect ratio could exhaust the memory.
    image = _middle(image, *(min(n, _LONGEST * shorter) for n in image.size))
    image = image.resize([full * n // shorter for n in image.size], resample)
  return _middle(image, size, size, rounding)


def _middle(image, width, height, rounding: Rounding = 'down') -> Image.Image:

  def begin(excess):
    if rounding == 'down':
      return math.floor(excess / 2)
    # Of the border around an image that is too small, torchvision puts the
    # smaller half first.
    return round(excess / 2) if excess > 0 else math.ceil(excess / 2)

  left, top = begin(image.width - width), begin(image.height - height)
  return image.crop((left, top, left + width, top + height))


def normalize(
  image: Image.Image | np.ndarray,
  mean: tuple[float, float, float],
  std: tuple[float, float, float],
) -> np.ndarray:
  """Returns `(image / 255 - mean) / std` as float32 [..., 3]."""
  scaled = np.asarray(image, np.float32) / np.float32(255)
  return (scaled - np.float32(mean)) / np.float32(std)
