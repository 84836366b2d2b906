"""Resizing and cropping of pictures, as in evaluation."""

import numpy as np
from PIL import Image
import pytest

from mod_jax.data import resize


def test_center_crop_is_resizing_the_shorter_side_and_cutting():
  ramp = np.tile(np.arange(64, dtype=np.uint8)[:, None, None], (1, 96, 3))
  image = Image.fromarray(ramp)
  cropped = np.asarray(resize.center_crop(image, 28, fraction=0.875))
  # Of 64 rows the middle 56, two for each of 28.
  expected = 4 + 2 * np.arange(28) + 0.5
  np.testing.assert_allclose(cropped[:, 0, 0], expected, atol=1.0)
  assert not np.array_equal(cropped, np.asarray(resize.center_crop(image, 28)))


@pytest.mark.parametrize(
  # The second are the columns that torchvision's CenterCrop leaves out.
  ('rounding', 'left'),
  [('down', [0, 0, 1, 1, 2, 2, 3, 3]), ('even', [0, 0, 1, 2, 2, 2, 3, 4])],
)
def test_where_a_crop_begins_between_two_pixels(rounding, left):
  for width, start in enumerate(left, start=12):
    pixels = np.arange(12 * width, dtype=np.uint8).reshape(12, width)
    image = Image.fromarray(pixels)
    cropped = resize.center_crop(image, 12, rounding=rounding)
    expected = pixels[:, start : start + 12]
    np.testing.assert_array_equal(np.asarray(cropped), expected)


@pytest.mark.parametrize(
  # The second are the columns that torchvision's CenterCrop pads at the left.
  ('rounding', 'left'),
  [('down', [0, 1, 1, 2, 2, 3, 3, 4]), ('even', [0, 0, 1, 1, 2, 2, 3, 3])],
)
def test_where_the_border_of_a_small_image_ends(rounding, left):
  for missing, border in enumerate(left):
    image = Image.fromarray(np.full((12, 12 - missing), 255, np.uint8))
    cropped = resize.center_crop(image, 12, resize='none', rounding=rounding)
    row = np.asarray(cropped)[0]
    assert row.argmax() == border
