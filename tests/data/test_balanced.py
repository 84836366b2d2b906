"""Balanced draws and class weights of folders with classes of unequal size."""

import dataclasses
import functools
import itertools

from batch_checks import assert_sharded, colored, take
import numpy as np
import pytest

from mod_jax import errors
from mod_jax.data import augment, images

pytestmark = pytest.mark.slow

SIZES = {'a': 1, 'b': 12, 'c': 3}
MIXED = augment.AugmentConfig(crop='pad', padding=1, erase=0.5, mixup=0.8)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Pictures to train on, each of a colour of its own, and one held out."""
  root = tmp_path_factory.mktemp('unequal')
  train = (f'{c}/{i}.png' for c, count in SIZES.items() for i in range(count))
  colored(root / 'train', *train)
  colored(root / 'eval', *(f'{c}/0.png' for c in SIZES))
  return images.ImageDataConfig(
    source='folder', path=str(root), image_size=4, sampling='balanced'
  )


def train(config, batch_size=4, seed=0, **shard):
  return images.train_iterator(
    config, batch_size=batch_size, seed=seed, **shard
  )


def drawn(config, count, **kwargs):
  """Returns the class and the picture of each draw."""
  batches = take(train(config, batch_size=1, **kwargs), count)
  pixels = (images.denormalize(config, batch['image'])[0] for batch in batches)
  ids = [int(x[0, 0, 0]) for x in pixels]
  return [int(b['target'].argmax()) for b in batches], ids


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_every_class_is_drawn_equally_often(folder, seed):
  labels, ids = drawn(folder, 3 * 24, seed=seed)
  # In each three draws, and in more than one order.
  orders = [*itertools.batched(labels, 3)]
  assert all(sorted(order) == [0, 1, 2] for order in orders)
  assert len(set(orders)) > 3
  # Within a class, each picture once before any comes again.
  by_class = {
    v: [i for c, i in zip(labels, ids, strict=True) if c == v] for v in range(3)
  }
  for v, count in enumerate(SIZES.values()):
    epochs = [*itertools.batched(by_class[v], count)]
    assert {len(set(epoch)) for epoch in epochs} == {count}
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
  assert len(set(itertools.batched(by_class[1], 12))) == 2


def test_any_number_of_hosts_gets_the_same_batches(folder):
  config = dataclasses.replace(folder, augment=MIXED)
  assert_sharded(functools.partial(train, config, seed=2), 6, (2, 3, 6))


def test_weights(folder):
  assert images.class_weights(folder) is None
  balanced = dataclasses.replace(folder, class_weights='balanced')
  # Inversely proportional to 1, 12 and 3, so that the mean picture weighs 1.
  weight_V = images.class_weights(balanced)
  np.testing.assert_allclose(weight_V, [16 / 3, 16 / 36, 16 / 9], rtol=1e-6)
  count_V = np.array([*SIZES.values()])
  assert (weight_V * count_V).sum() / count_V.sum() == pytest.approx(1)
  table = dataclasses.replace(folder, class_weights=(('c', 2), ('a', 0.5)))
  np.testing.assert_array_equal(images.class_weights(table), [0.5, 1, 2])
  wrong = dataclasses.replace(folder, class_weights=(('A', 2),))
  with pytest.raises(errors.UserError, match="'A' among .*mean 'a'"):
    images.class_weights(wrong)
