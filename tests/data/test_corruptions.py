"""Corruptions hurt by severity, alike at every size, and reproducibly."""

import numpy as np
from PIL import Image
import pytest
from scipy import ndimage

from mod_jax.data import corruptions

KINDS = corruptions.CORRUPTIONS


@pytest.fixture(scope='module')
def photos():
  """Pictures with detail at all scales, uint8 [3, 224, 224, 3]."""
  rng = np.random.default_rng(0)
  total = np.zeros((3, 224, 224, 3))
  # No divisors of any side: cells that meet edges of the picture would stand
  # out among the others.
  for cells in (3, 5, 9, 17, 33, 65, 129):
    field = rng.normal(size=(3, cells, cells, 3))
    total += (
      ndimage.zoom(field, (1, *[224 / cells] * 2, 1), order=1) / cells**0.5
    )
  total = 128 + 55 * total / total.std()
  return total.round().clip(0, 255).astype(np.uint8)


def resized(images_BHWC, side):
  return np.stack(
    [
      np.asarray(Image.fromarray(image).resize((side, side), Image.BOX))
      for image in images_BHWC
    ]
  )


def squared_change(one, other):
  return float(np.square(one.astype(float) - other.astype(float)).mean())


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('side', [16, 224])
def test_change_rises_with_severity(photos, kind, side):
  pictures = resized(photos, side)
  before = pictures.copy()
  found = []
  for severity in range(6):
    changed = corruptions.corrupt(pictures, kind, severity)
    assert changed.shape == pictures.shape
    assert changed.dtype == np.uint8
    found.append(squared_change(changed, pictures))
  np.testing.assert_array_equal(pictures, before)
  assert found[0] == 0
  assert (np.diff(found) > 0).all(), found


@pytest.mark.parametrize('side', [32, 224])
def test_noise_is_imagenets_at_its_size_and_near_cifars(side):
  grey = np.full((1, side, side, 3), 128, np.uint8)
  published = {224: 0.12, 32: 0.06}[side]
  found = (corruptions.corrupt(grey, 'noise', 2) / 255 - 128 / 255).std()
  assert found == pytest.approx(published, rel=0.02 if side == 224 else 0.3)


def test_contrast_keeps_the_mean_of_each_channel(photos):
  pictures = photos[:, ::7, ::7]
  changed = corruptions.corrupt(pictures, 'contrast', 2)
  mean = pictures.mean(axis=(1, 2), keepdims=True)
  np.testing.assert_allclose(changed, mean + 0.3 * (pictures - mean), atol=0.51)
  assert not np.allclose(mean[..., 0], mean[..., 1], atol=1)


def test_blur_is_gaussian_and_not_across_channels():
  spot = np.zeros((1, 100, 100, 3), np.uint8)
  spot[0, 30:70, 30:70, 1] = 255
  changed = corruptions.corrupt(spot, 'blur', 5)[0].astype(float)
  assert not changed[..., [0, 2]].any()
  # The edge's derivative is the kernel: its standard deviation is 4% of 100.
  step = np.diff(changed[50, :50, 1])
  place = np.arange(49)
  mean = (step * place).sum() / step.sum()
  width = np.sqrt((step * (place - mean) ** 2).sum() / step.sum())
  assert width == pytest.approx(4, rel=0.05)
  # A flat picture stays flat up to its border.
  flat = np.full((1, 9, 9, 3), 77, np.uint8)
  assert (corruptions.corrupt(flat, 'blur', 5) == 77).all()


def test_pixelation_averages_cells(photos):
  pictures = resized(photos, 64)
  changed = corruptions.corrupt(pictures, 'pixelation', 4)  # 16 cells.
  blocks = changed.reshape(3, 16, 4, 16, 4, 3)
  assert (blocks == blocks[:, :, :1, :, :1]).all()
  mean = pictures.reshape(blocks.shape).mean(axis=(2, 4))
  np.testing.assert_allclose(blocks[:, :, 0, :, 0], mean, atol=0.51)


def test_noise_has_a_seed_and_differs_between_images():
  grey = np.full((2, 16, 16, 3), 128, np.uint8)
  one = corruptions.corrupt(grey, 'noise', 3, seed=1)
  np.testing.assert_array_equal(
    one, corruptions.corrupt(grey, 'noise', 3, seed=1)
  )
  assert (one != corruptions.corrupt(grey, 'noise', 3, seed=2)).mean() > 0.9
  assert (one[0] != one[1]).mean() > 0.9
  # The same field, only stronger.
  more = corruptions.corrupt(grey, 'noise', 5, seed=1)
  fields = [x.ravel().astype(float) for x in (one, more)]
  assert np.corrcoef(*fields)[0, 1] > 0.98
