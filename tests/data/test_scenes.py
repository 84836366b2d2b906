"""Scenes of digits: drawn from a seed, held-out digits in held-out scenes."""

import dataclasses
import itertools

from batch_checks import fingerprint_of
import numpy as np
import pytest

from mod_jax.data import digits, images, scenes
from mod_jax.errors import UserError

SIZE = 64


def draw(count, split='train', **fields):
  config = scenes.SceneConfig(**fields)
  source = scenes.Scenes(config, SIZE, split)
  return [source.scene(i) for i in range(count)]


def test_scenes_depend_on_seed_split_and_index_alone():
  first, again = draw(3), draw(3)
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a.image_SSC, b.image_SSC)
    np.testing.assert_array_equal(a.boxes_N4, b.boxes_N4)
  others = [*first, *draw(3, seed=1), *draw(3, 'eval')]
  assert len({scene.image_SSC.tobytes() for scene in others}) == 9


def test_the_largest_digit_is_first_and_digits_hardly_overlap():
  for scene in draw(50):
    side_N = scene.boxes_N4[:, 2]
    np.testing.assert_array_equal(scene.boxes_N4[:, 3], side_N)
    assert (side_N[1:] < 0.9 * side_N[0]).all()
    low_N2 = scene.boxes_N4[:, :2] - side_N[:, None] / 2
    high_N2 = low_N2 + side_N[:, None]
    assert (low_N2 > -1e-6).all()
    assert (high_N2 < 1 + 1e-6).all()
    for i, j in itertools.combinations(range(len(side_N)), 2):
      sides = np.minimum(high_N2[i], high_N2[j]) - np.maximum(
        low_N2[i], low_N2[j]
      )
      shared = np.prod(np.maximum(sides, 0))
      union = side_N[i] ** 2 + side_N[j] ** 2 - shared
      assert shared / union <= 0.1 + 1e-6


def test_where_a_box_is_there_is_the_digit():
  """Without clutter, what is bright lies in the boxes."""
  for scene in draw(20, clutter=0):
    inside_SS = np.zeros((SIZE, SIZE), bool)
    for x, y, width, height in scene.boxes_N4 * SIZE:
      rows = slice(round(y - height / 2), round(y + height / 2))
      inside_SS[rows, round(x - width / 2) : round(x + width / 2)] = True
    image_SS = scene.image_SSC.astype(float).mean(axis=-1)
    typical = np.median(image_SS[~inside_SS])
    assert (image_SS[inside_SS] > typical + 45).mean() > 0.15
    assert (image_SS[~inside_SS] > typical + 60).mean() < 0.01


def test_held_out_scenes_show_held_out_digits(monkeypatch):
  opened = []
  real = digits.DigitImages

  def spy(split):
    opened.append(split)
    return real(split)

  monkeypatch.setattr(digits, 'DigitImages', spy)
  draw(1, 'eval')
  assert opened == ['eval']


@pytest.mark.parametrize(
  ('label', 'last', 'of_digits'),
  [('largest', '9', lambda digits_N: digits_N[0]), ('sum', '36', np.sum)],
)
def test_batches_of_scenes(label, last, of_digits):
  config = images.ImageDataConfig(
    source='scenes',
    image_size=SIZE,
    scenes=scenes.SceneConfig(label=label, num_train=8, num_eval=6),
  )
  assert images.class_names(config)[-1] == last
  source = scenes.Scenes(config.scenes, SIZE, 'train')
  true = {}
  for scene in map(source.scene, range(8)):
    true[scene.image_SSC.tobytes()] = of_digits(scene.digits_N)
  batch = next(images.train_iterator(config, batch_size=8, seed=0))
  pictures = (x.tobytes() for x in images.denormalize(config, batch['image']))
  targets = batch['target'].argmax(axis=-1)
  assert dict(zip(pictures, targets, strict=True)) == true
  *_, last = images.eval_batches(config, batch_size=4)
  assert last['weight'].tolist() == [1, 1, 0, 0]
  changed = dataclasses.replace(
    config, scenes=dataclasses.replace(config.scenes, clutter=3)
  )
  assert fingerprint_of(changed) != fingerprint_of(config)


def test_refusals():
  with pytest.raises(UserError, match='scenes.scales.*larger image_size'):
    scenes.Scenes(scenes.SceneConfig(scales=(1, 5)), SIZE, 'train')
  with pytest.raises(UserError, match='least <= most'):
    scenes.SceneConfig(least=5, most=3)
  with pytest.raises(UserError, match='scales'):
    scenes.SceneConfig(scales=(2.0, 2.1))
