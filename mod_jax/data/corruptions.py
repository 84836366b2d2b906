"""Image corruptions, to measure a model's robustness.

Modelled on ImageNet-C (Hendrycks & Dietterich, 2019): kinds of corruption at
severities 1 to 5. Its strengths are for 224 x 224 images, and the authors'
CIFAR-10-C has other strengths for 32 x 32. Here one table fits all sizes:

  noise       Gaussian, whose standard deviation grows with the square root of
              the side; equal to ImageNet-C's at 224 pixels. With a constant
              deviation, larger patches of large images would average it out.
  blur        Gaussian, with a width proportional to the side.
  contrast    the same strengths for all sizes.
  pixelation  into the same number of cells at all sizes from 32 pixels up. A
              pixel that overlaps two cells is averaged by area.

Images are not compressed again as JPEG, which would be another corruption.
"""

import math

import numpy as np
import scipy

# One entry for each severity, from 1 to 5.
_NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)  # Standard deviation at _SIDE pixels.
_BLUR = (0.0125, 0.0175, 0.0225, 0.03, 0.04)  # Standard deviation / side.
_CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)  # Part of the contrast that remains.
_CELLS = (0.875, 0.75, 0.625, 0.5, 0.375)  # Cells / min(side, _SMALL).

_SIDE = 224  # Side of ImageNet-C's images, in pixels.
_SMALL = 32


def corrupt(
  images_BHWC: np.ndarray, kind: str, severity: int, *, seed: int = 0
) -> np.ndarray:
  """Returns corrupted copies of uint8 RGB images of any size.

  The kind 'noise' draws from the seed and the image's index only, so a higher
  severity scales the same noise. Severities are 1 to 5; 0 returns the input.
  Where a strength depends on an image's side, the shorter one is meant.
  """
  if severity == 0:
    return images_BHWC
  changed_BHWC = np.empty_like(images_BHWC)
  for b, image_HWC in enumerate(images_BHWC):
    value_HWC = _KINDS[kind](image_HWC, severity - 1, (seed, b))
    changed_BHWC[b] = np.rint(value_HWC).clip(0, 255)
  return changed_BHWC


def _noise(image_HWC, level, key):
  strength = 255 * _NOISE[level] * math.sqrt(_shorter(image_HWC) / _SIDE)
  rng = np.random.default_rng(key)
  return image_HWC + strength * rng.standard_normal(image_HWC.shape, np.float32)


def _blur(image_HWC, level, _):
  width = _BLUR[level] * _shorter(image_HWC)
  # The discrete analogue of the Gaussian (Lindeberg, 1990). A sampled Gaussian
  # has the wrong width below a pixel and would blur small images too little.
  reach = math.ceil(4 * width) + 1
  kernel = scipy.special.ive(np.arange(-reach, reach + 1), width**2)
  kernel /= kernel.sum()
  blurred_HWC = image_HWC.astype(np.float32)
  for axis in (0, 1):
    blurred_HWC = scipy.ndimage.correlate1d(
      blurred_HWC, kernel, axis=axis, mode='nearest'
    )
  return blurred_HWC


def _contrast(image_HWC, level, _):
  mean_C = image_HWC.mean(axis=(0, 1))
  return mean_C + _CONTRAST[level] * (image_HWC - mean_C)


def _pixelation(image_HWC, level, _):
  shorter = _shorter(image_HWC)
  cells = math.floor(_CELLS[level] * min(shorter, _SMALL) + 0.5)
  rows, columns = (
    _averaging(side, max(1, round(cells * side / shorter)))
    for side in image_HWC.shape[:2]
  )
  image_CHW = image_HWC.transpose(2, 0, 1)
  return (rows @ image_CHW @ columns.T).transpose(1, 2, 0)


def _averaging(side: int, cells: int) -> np.ndarray:
  """Returns the matrix [side, side] that averages a line of pixels by cell."""
  # Pillow's box filter would assign each pixel to a single cell, which also
  # shifts the image, by an amount unrelated to the severity.
  pixel_S1 = np.arange(side)[:, None]
  cell_N = np.arange(cells) * side / cells
  overlap_SN = np.minimum(pixel_S1 + 1, cell_N + side / cells)
  overlap_SN = (overlap_SN - np.maximum(pixel_S1, cell_N)).clip(0)
  mean_SN = overlap_SN / overlap_SN.sum(axis=0)
  # A pixel's overlaps sum to its area, 1, so the rows sum to 1.
  return (overlap_SN @ mean_SN.T).astype(np.float32)


def _shorter(image_HWC) -> int:
  return min(image_HWC.shape[:2])


_KINDS = {
  'noise': _noise,
  'blur': _blur,
  'contrast': _contrast,
  'pixelation': _pixelation,
}
CORRUPTIONS = tuple(_KINDS)
