"""Augmentation: geometry, areas, weights of mixed pictures, determinism."""

import numpy as np
from PIL import Image
import pytest

from mod_jax.data import augment, resize


def noise(width=20, height=12, seed=0):
  rng = np.random.default_rng(seed)
  pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
  return Image.fromarray(pixels)


def make(image, rng=0, size=8, mean=(0.5,) * 3, std=(0.5,) * 3, **kwargs):
  return augment.augment(
    resize.center_crop(image, size),
    np.random.default_rng(rng),
    augment.AugmentConfig(**kwargs),
    size=size,
    mean=mean,
    std=std,
  )


def test_nothing_by_default_but_the_centred_square_normalised():
  image = noise(20, 12)
  mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
  array = make(image, size=12, mean=mean, std=std)
  assert array.dtype == np.float32
  middle = np.asarray(image)[:, 4:16] / 255
  np.testing.assert_allclose(array, (middle - mean) / std, atol=1e-6)


@pytest.mark.parametrize('shape', [(64, 64), (30, 77), (400, 4)])
def test_random_resized_crop_has_the_area_and_aspect_asked_for(shape):
  # Pixels carry their place, so that the crop's borders can be read off.
  width, height = shape
  x, y = np.meshgrid(np.arange(width), np.arange(height))
  pixels = np.stack([x * 255 / width, y * 255 / height, 0 * x], -1)
  image = Image.fromarray(pixels.astype(np.uint8))
  areas = []
  for seed in range(60):
    crop = augment.random_resized_crop(
      image,
      16,
      np.random.default_rng(seed),
      min_scale=0.25,
      resample=Image.Resampling.BOX,
    )
    assert crop.size == (16, 16)
    array = np.asarray(crop, np.float64)
    w = np.ptp(array[0, :, 0]) / 255 * 16 / 15
    h = np.ptp(array[:, 0, 1]) / 255 * 16 / 15
    areas.append(w * h)
    if min(shape) > 16:
      assert 0.62 < w * width / (h * height) < 1.6
  if shape == (64, 64):
    assert 0.2 < min(areas) < 0.4
    assert 0.8 < max(areas) < 1.1
  if shape == (400, 4):  # No such part fits: the centred square.
    np.testing.assert_allclose(areas, 0.01, atol=0.01)


@pytest.mark.parametrize(
  ('shape', 'expected'),
  [
    ((8, 8), (8, 8)),
    # The smallest part has .25 * .75 of 40 x 40 pixels, 17 a side.
    ((40, 40), (20, 20)),
    ((121, 81), (25, 17)),
    ((900, 12), (900, 12)),  # The centred square would be too small.
  ],
)
def test_reduction_keeps_what_the_smallest_part_needs(shape, expected):
  image = noise(*shape)
  reduced = augment.reduce(image, 8, min_scale=0.25)
  assert reduced.size == expected
  if shape == (40, 40):
    blocks = np.asarray(image, float).reshape(20, 2, 20, 2, 3)
    np.testing.assert_allclose(reduced, blocks.mean((1, 3)), atol=0.51)


def test_shift_moves_by_at_most_the_padding():
  pixels = np.zeros((8, 8, 3), np.uint8)
  pixels[4, 4] = 255
  image, fill = Image.fromarray(pixels), (9, 8, 7)
  places, colors = set(), set()
  for seed in range(200):
    rng = np.random.default_rng(seed)
    array = np.asarray(augment.shift(image, rng, padding=2, fill=fill))
    assert array.shape == (8, 8, 3)
    ((row, column),) = np.argwhere(array[..., 0] == 255)
    places.add((int(row), int(column)))
    colors |= {tuple(p.tolist()) for p in array.reshape(-1, 3)}
  assert places == {(i, j) for i in range(2, 7) for j in range(2, 7)}
  assert colors == {(0, 0, 0), (255, 255, 255), fill}


@pytest.mark.parametrize('option', ['flip', 'erase'])
def test_as_often_as_asked(option):
  image = noise(32, 32)
  plain = make(image, size=32)
  arrays = [make(image, seed, size=32, **{option: 0.3}) for seed in range(200)]
  changed = [a for a in arrays if not np.array_equal(a, plain)]
  assert len(changed) / 200 == pytest.approx(0.3, abs=0.1)
  if option == 'flip':
    np.testing.assert_array_equal(changed[0], plain[:, ::-1])


@pytest.mark.parametrize('name', augment.OPERATIONS)
def test_operations_grow_with_the_magnitude(name):
  operation, signed = augment.OPERATIONS[name]
  # Lopsided, of few tones and with an edge, so that every operation shows.
  x, y = np.meshgrid(np.arange(24), np.arange(24))
  pixels = np.stack([60 + 5 * x, 40 + 6 * y, 50 + 3 * x + 2 * y], -1)
  pixels[5:9, 4:15] += 25
  image = Image.fromarray(pixels.astype(np.uint8))
  image = image.transpose(Image.Transpose.ROTATE_90)

  def distance(level):
    changed = operation(image, level, (128, 128, 128))
    assert changed.size == image.size
    assert changed.mode == 'RGB'
    difference = np.float64(changed) - np.float64(image)
    return np.abs(difference).mean()

  strong, weak = distance(0.9), distance(0.3)
  assert strong > 0.3
  if name in ('auto_contrast', 'equalize', 'invert'):
    assert strong == weak
    assert not signed
  else:
    assert strong > weak
  if signed:
    assert distance(-0.9) > 0.3
    assert distance(0.0) < 0.01


def test_rand_augment_draws_from_the_operations_of_deit():
  """Those of timm's `rand-m9-mstd0.5-inc1`."""
  of_tones = {'auto_contrast', 'equalize', 'invert', 'posterize', 'solarize'}
  of_tones |= {'solarize_add'}
  enhancing = {'color', 'contrast', 'brightness', 'sharpness'}
  moving = {'rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y'}
  assert augment.OPERATIONS.keys() == of_tones | enhancing | moving
  image = Image.fromarray(np.uint8([[[0, 127, 128], [50, 200, 255]]]))
  added, inverted = (
    np.asarray(augment.OPERATIONS[name][0](image, 0.9, (0, 0, 0))).tolist()
    for name in ('solarize_add', 'invert')
  )
  assert added == [[[99, 226, 128], [149, 200, 255]]]
  assert inverted == [[[255, 128, 127], [205, 55, 0]]]


def test_rand_augment_magnitude_and_noise(monkeypatch):
  levels = []

  def record(image, level, fill):
    levels.append(level)
    return image

  monkeypatch.setattr(augment, 'OPERATIONS', {'x': (record, True)})

  def run(**kwargs):
    levels.clear()
    for seed in range(4):
      make(noise(), seed, randaugment_ops=100, **kwargs)
    return np.array(levels)

  fixed = run(randaugment_magnitude=4.0)
  assert 150 < len(fixed) < 250
  assert set(np.round(fixed, 9)) == {0.4, -0.4}
  noisy = np.abs(run(randaugment_magnitude=5.0, randaugment_noise=1.0))
  assert noisy.std() == pytest.approx(0.1, rel=0.3)
  wild = np.abs(run(randaugment_magnitude=9.0, randaugment_noise=9.0))
  assert wild.max() == 1


def test_three_augment_does_one_of_three():
  image = noise(24, 24)
  pixels = np.asarray(image).astype(int)
  seen = set()
  for seed in range(30):
    rng = np.random.default_rng(seed)
    changed = np.asarray(augment.three_augment(image, rng)).astype(int)
    assert changed.shape == pixels.shape
    if (changed == changed[..., :1]).all():
      seen.add('grey')
    elif np.array_equal(changed, np.where(pixels < 128, pixels, 255 - pixels)):
      seen.add('solarised')
    else:
      # Neighbours grow alike; the mean stays.
      assert abs(changed.mean() - pixels.mean()) < 2
      assert (
        np.abs(np.diff(changed, axis=0)).mean()
        < np.abs(np.diff(pixels, axis=0)).mean()
      )
      seen.add('blurred')
  assert seen == {'grey', 'solarised', 'blurred'}


def test_erasing_is_one_rectangle_of_the_area_asked_for():
  image = np.full((32, 32, 3), 7, np.float32)
  areas = []
  for seed in range(200):
    erased = augment.erase(image, np.random.default_rng(seed))
    assert erased.dtype == np.float32
    changed = (erased != 7).all(-1)
    rows, columns = np.nonzero(changed.any(1))[0], np.nonzero(changed.any(0))[0]
    assert changed.sum() == len(rows) * len(columns)
    assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    areas.append(changed.mean())
    assert 0.2 < len(rows) / len(columns) < 5
  assert (image == 7).all()
  assert min(areas) > 0.01
  assert max(areas) < 0.36
  assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.04)
  values = erased[changed]
  assert abs(values.mean()) < 0.5
  assert values.std() == pytest.approx(1, abs=0.3)


def test_soft_target():
  np.testing.assert_allclose(
    augment.soft_target(1, 4, 0.2), [0.05, 0.85, 0.05, 0.05], rtol=1e-6
  )
  np.testing.assert_array_equal(augment.soft_target(2, 3), [0, 0, 1])


@pytest.fixture
def batch():
  """Five pictures of constant value i, of class i."""
  values = np.arange(5, dtype=np.float32)[:, None, None, None]
  return {
    'image': np.tile(values, (1, 9, 9, 3)),
    'target': np.eye(5, dtype=np.float32),
  }


def test_mixup_weighs_targets_as_pixels(batch):
  mixed = augment.mixup(batch, 0.75)
  for key in mixed:
    assert mixed[key].dtype == np.float32
  np.testing.assert_allclose(mixed['target'].sum(-1), 1, rtol=1e-6)
  # Of constant pictures, the pixel is the target's mean class.
  expected = mixed['target'] @ np.arange(5)
  for i in range(5):
    np.testing.assert_allclose(mixed['image'][i], expected[i], rtol=1e-6)
  np.testing.assert_allclose(np.diag(mixed['target']), 0.75)


@pytest.mark.parametrize('weight', [0.0, 0.5, 1.0])
def test_cutmix_targets_are_the_exact_areas(batch, weight):
  kept = []
  for seed in range(60):
    mixed = augment.cutmix(batch, weight, np.random.default_rng(seed))
    own = (mixed['image'] == batch['image']).all(-1)
    other = (mixed['image'] == np.roll(batch['image'], 1, axis=0)).all(-1)
    assert (own ^ other).all()
    assert (other == other[0]).all()
    area = own.mean((1, 2))
    np.testing.assert_allclose(np.diag(mixed['target']), area, atol=1e-6)
    np.testing.assert_allclose(
      np.roll(mixed['target'], -1, axis=0)[range(5), range(5)],
      1 - area,
      atol=1e-6,
    )
    rows, columns = other[0].any(1), other[0].any(0)
    np.testing.assert_array_equal(other[0], np.outer(rows, columns))
    kept.append(area[0])
  # The border only ever cuts the rectangle off.
  assert min(kept) >= weight - 1e-6
  if weight == 0.5:
    assert len(set(kept)) > 3
  assert (batch['image'][3] == 3).all()  # The input is left as it was.


def test_mix_chooses_by_what_is_on(batch):
  def kinds(**kwargs):
    config = augment.AugmentConfig(**kwargs)
    found = []
    for seed in range(100):
      mixed = augment.mix(batch, np.random.default_rng(seed), config)
      if mixed is batch:
        found.append('none')
      else:
        whole = (mixed['image'] == np.round(mixed['image'])).all()
        found.append('cutmix' if whole else 'mixup')
    return found

  assert set(kinds()) == {'none'}
  assert set(kinds(mixup=1.0)) == {'mixup'}
  assert set(kinds(cutmix=1.0)) == {'cutmix'}
  assert 30 < kinds(mixup=1.0, cutmix=1.0).count('cutmix') < 70
  assert 10 < kinds(mixup=1.0, cutmix=1.0, switch=0.2).count('cutmix') < 32
