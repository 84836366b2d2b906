"""Batches of pictures: format, order, resuming, shards, evaluation, TFDS."""

import dataclasses
import functools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys

from batch_checks import (
  assert_resumed,
  assert_same,
  assert_sharded,
  colored,
  fingerprint_of,
  take,
)
import numpy as np
from PIL import Image
import pytest

from mod_jax import errors
from mod_jax.data import augment, digits, fingerprint, images, tfds_images

AUGMENTED = augment.AugmentConfig(
  crop='random_resized',
  flip=0.5,
  randaugment_ops=2,
  randaugment_noise=0.5,
  erase=0.25,
  mixup=0.8,
  cutmix=1.0,
  label_smoothing=0.1,
)


def train(config, batch_size=4, seed=0, **kwargs):
  return images.train_iterator(
    config, batch_size=batch_size, seed=seed, **kwargs
  )


def check(batch, shapes):
  assert set(batch) == set(shapes)
  for key, shape in shapes.items():
    assert isinstance(batch[key], np.ndarray)
    assert batch[key].dtype == (np.int32 if key == 'label' else np.float32)
    assert batch[key].shape == shape


# Digits.


def test_digits_split_is_fixed_stratified_and_whole():
  config = images.ImageDataConfig()
  names = images.class_names(config)
  assert names == tuple('0123456789')
  sizes = [len(images.open_split(config, s)) for s in ('train', 'eval')]
  assert sum(sizes) == 1797
  labels = [digits.DigitImages(s).labels for s in ('train', 'eval')]
  assert [len(part) for part in labels] == sizes
  held_out = np.bincount(labels[1]) / np.bincount(np.concatenate(labels))
  np.testing.assert_allclose(held_out, 0.2, atol=0.005)


def test_training_batches_of_digits():
  config = images.ImageDataConfig(
    image_size=8, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
  )
  batch = next(train(config))
  check(batch, {'image': (4, 8, 8, 3), 'target': (4, 10)})
  assert set(batch['target'].flat) == {0, 1}
  assert (batch['target'].sum(-1) == 1).all()
  # At their own size the pixels are scikit-learn's, 0 to 16, grey.
  values = 16 * (batch['image'] * config.std + config.mean)
  np.testing.assert_allclose(values, np.round(values), atol=0.04)
  assert values.max() > 15
  np.testing.assert_allclose(values[..., 0], values[..., 2], atol=1e-4)
  source = digits.DigitImages('train')
  digit_images = {
    (np.asarray(decode()).tobytes(), label)
    for _, decode, label in map(source.entry, range(len(source)))
  }
  for image, target in zip(batch['image'], batch['target'], strict=True):
    pixels = images.denormalize(config, image)
    assert pixels.dtype == np.uint8
    assert (pixels.tobytes(), int(target.argmax())) in digit_images


# Order, state, shards.


@pytest.fixture
def folder(tmp_path):
  """22 training and 11 held-out pictures, each of a colour of its own."""
  for split, count in (('train', 22), ('val', 11)):
    names = (f'{split}/{"ab"[i % 2]}/{i}.png' for i in range(count))
    colored(tmp_path, *names)
  return images.ImageDataConfig(
    source='folder', path=str(tmp_path), image_size=4
  )


def test_fingerprint(folder):
  told = fingerprint_of(folder)
  assert fingerprint_of(folder) == json.loads(json.dumps(told)) == told
  Image.new('RGB', (5, 5), (0, 0, 0)).save(f'{folder.path}/val/a/0.png')
  assert fingerprint.differences(told, fingerprint_of(folder)) == [
    'the held-out file a/0.png is changed'
  ]


def ids(config, batches):
  """Returns the number of every picture with weight, in order."""
  return [
    int(pixels[0, 0, 0])
    for batch in batches
    for pixels, weight in zip(
      images.denormalize(config, batch['image']),
      batch.get('weight', np.ones(len(batch['image']))),
      strict=True,
    )
    if weight
  ]


def test_every_epoch_has_each_picture_once_in_another_order(folder):
  batches = take(train(folder, batch_size=2), 22)
  seen = ids(folder, batches)
  first, second = seen[:22], seen[22:]
  assert sorted(first) == sorted(second) == list(range(22))
  assert first != second
  assert first != sorted(first)
  labels = np.concatenate([b['target'].argmax(-1) for b in batches])
  np.testing.assert_array_equal(labels, np.array(seen) % 2)
  assert ids(folder, take(train(folder, 2, seed=1), 11)) != first


@pytest.mark.parametrize('stop', [0, 5])
def test_resume_with_augmentation_across_an_epoch(folder, stop):
  config = dataclasses.replace(folder, augment=AUGMENTED)
  expected = assert_resumed(lambda: train(config, seed=3), stop, 8)
  for batch in expected:
    check(batch, {'image': (4, 4, 4, 3), 'target': (4, 2)})
    np.testing.assert_allclose(batch['target'].sum(-1), 1, rtol=1e-5)
  (other,) = take(train(config, seed=4), 1)
  assert not np.array_equal(other['image'], expected[0]['image'])


@pytest.mark.slow
def test_workers_change_nothing():
  config = images.ImageDataConfig(image_size=8, augment=AUGMENTED)
  alone = train(config, seed=5)
  expected = take(alone, 5)
  iterator = train(dataclasses.replace(config, workers=1), seed=5)
  # A state of threads goes on in processes.
  iterator.set_state({'next_batch': 2})
  batches = take(iterator, 1)
  # What asks the whole run to stop does not end its workers first.
  (worker,) = multiprocessing.active_children()
  for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    os.kill(worker.pid, number)
  batches += take(iterator, 1)
  assert worker.is_alive()
  state = iterator.get_state()
  worker.kill()
  with pytest.raises(errors.UserError, match='was killed, as the system does'):
    take(iterator, 99)
  iterator.close()
  assert_same(batches, expected[2:4])
  alone.set_state(json.loads(json.dumps(state)))
  assert_same(take(alone, 1), expected[4:])


@pytest.mark.slow
def test_workers_end_with_a_killed_run(tmp_path):
  script = tmp_path / 'run.py'
  script.write_text(
    'import time\n'
    'from mod_jax.data import images\n'
    "if __name__ == '__main__':\n"
    '  config = images.ImageDataConfig(image_size=8, workers=1)\n'
    '  iterator = images.train_iterator(config, batch_size=2, seed=0)\n'
    '  next(iterator)\n'
    "  print('read', flush=True)\n"
    '  time.sleep(600)\n'
  )
  with subprocess.Popen(
    [sys.executable, script],
    stdout=subprocess.PIPE,
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
  ) as process:
    assert process.stdout.readline() == b'read\n'
    process.kill()
    # The output has an end when nobody is left who could write to it.
    assert process.communicate(timeout=60) == (b'', None)


def test_batches_do_not_depend_on_the_number_of_shards(folder):
  # Neither does anything that is random for a picture or a batch.
  config = dataclasses.replace(folder, augment=AUGMENTED)
  assert_sharded(functools.partial(train, config, seed=2), 6, (2, 6))


# Evaluation.


def test_eval_counts_each_picture_once(folder):
  (*batches,) = images.eval_batches(folder, batch_size=2)
  assert len(batches) == 6
  for batch in batches:
    check(batch, {'image': (2, 4, 4, 3), 'label': (2,), 'weight': (2,)})
  seen = ids(folder, batches)
  # The order of evaluation is by class, then by name.
  assert sorted(seen) == list(range(11))
  weights, labels = (
    np.concatenate([b[name] for b in batches]) for name in ('weight', 'label')
  )
  np.testing.assert_array_equal(labels[weights > 0], np.array(seen) % 2)
  limited = images.eval_batches(folder, batch_size=2, num_batches=2)
  assert ids(folder, limited) == [seen[i] for i in (0, 2, 5, 8)]


# TensorFlow Datasets.


def tfds_config(name, **kwargs):
  kwargs = {'source': 'tfds', 'name': name, 'image_size': 4, **kwargs}
  return images.ImageDataConfig(**kwargs)


@pytest.mark.parametrize('kind', ['Files', 'Arrays', 'Grey'])
def test_tfds(tfds_pictures, kind):
  config = tfds_config(tfds_pictures[kind])
  assert images.class_names(config) == ('cat', 'dog', 'emu')
  assert len(images.open_split(config, 'train')) == 12
  assert len(images.open_split(config, 'eval')) == 5
  batches = take(train(config), 3)
  check(batches[0], {'image': (4, 4, 4, 3), 'target': (4, 3)})
  seen = ids(config, batches)
  assert sorted(seen) == list(range(12))
  labels = np.concatenate([b['target'].argmax(-1) for b in batches])
  np.testing.assert_array_equal(labels, np.array(seen) % 3)
  pixel = images.denormalize(config, batches[0]['image'])[0, 1, 1].tolist()
  assert pixel[1:] == ([100, 7] if kind != 'Grey' else [pixel[0]] * 2)
  told = fingerprint_of(config)
  assert told['train']['version'].endswith('/1.0.0')
  assert (told['train']['count'], told['held_out']['count']) == (12, 5)
  part = dataclasses.replace(config, eval_split='train[:50%]')
  assert fingerprint_of(part)['held_out'] != told['held_out']
  assert len(ids(part, images.eval_batches(part, batch_size=4))) == 6


def test_tfds_goes_to_worker_processes(tfds_pictures):
  source = tfds_images.TfdsImages(tfds_pictures['Files'], 'train[50%:]')
  copy = pickle.loads(pickle.dumps(source))
  assert copy.class_names == source.class_names
  for i in range(6):
    key, decode, label = source.entry(i)
    same_key, decode_copy, same_label = copy.entry(i)
    assert (key, label) == (same_key, same_label)
    np.testing.assert_array_equal(decode(), decode_copy())


def test_tfds_files_that_do_not_decode(tfds_pictures):
  config = tfds_config(tfds_pictures['Files'], unreadable='skip')
  seen = ids(config, images.eval_batches(config, batch_size=5))
  assert sorted(seen) == [20, 21, 22, 23]


def test_tfds_features_of_others_are_not_imported(
  tfds_pictures, tmp_path, monkeypatch
):
  folder = shutil.copytree(tfds_pictures['Arrays'], tmp_path / 'tiny')
  file = folder / 'features.json'
  text = file.read_text()
  assert 'tensorflow_datasets.core.features.tensor_feature.Tensor' in text
  file.write_text(text.replace('tensorflow_datasets.core.features.tensor', 'x'))
  (tmp_path / 'x_feature.py').write_text('raise SystemExit("it was run")')
  monkeypatch.syspath_prepend(tmp_path)
  config = tfds_config(str(folder))
  with pytest.raises(errors.UserError, match="'x_feature.Tensor'.*not of TFDS"):
    next(train(config, batch_size=1))
