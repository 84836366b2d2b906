"""Scikit-learn's bundled handwritten digits: images without a download."""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np
from PIL import Image

from mod_jax.data import fingerprint as fingerprints

CLASSES = tuple(str(digit) for digit in range(10))
# Every fifth image of each digit is held out.
_HELD_OUT_EVERY = 5


class DigitImages:
  """The digits with random access: a fixed fifth of each is held out.

  Attributes:
    images: uint8 [N, 8, 8], white on black.
    labels: int32 [N].
  """

  class_names = CLASSES

  def __init__(self, split: str):
    images, labels, held_out = _read()
    chosen = held_out if split == 'eval' else ~held_out
    self.images = images[chosen]
    self.labels = labels[chosen]

  def __len__(self) -> int:
    return len(self.labels)

  def fingerprint(self) -> dict[str, Any]:
    """Returns the fingerprint of images and labels (`data/fingerprint.py`)."""
    return {'content': fingerprints.of_value([self.images, self.labels])}

  def name(self, index: int) -> str:
    return f'digit {index}'

  def entry(self, index: int) -> tuple[None, Callable[[], Image.Image], int]:
    """Returns the key None, a function that makes the image, and its label."""
    image = Image.fromarray(self.images[index])
    return None, lambda: image.convert('RGB'), int(self.labels[index])


@functools.cache
def _read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns images uint8 [N, 8, 8], labels [N] and the held-out mask [N]."""
  # Imported here, since it takes a second and other data do not need it.
  from sklearn import datasets

  data = datasets.load_digits()
  # Scikit-learn's values are 0 to 16.
  images = np.round(data.images * (255 / 16)).astype(np.uint8)
  labels = data.target.astype(np.int32)
  held_out = np.zeros(len(labels), bool)
  for digit in range(len(CLASSES)):
    indices = np.flatnonzero(labels == digit)
    held_out[indices[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]] = True
  return images, labels, held_out
