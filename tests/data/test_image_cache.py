"""Kept pictures: equal to decoding anew, bounded, shared, never stale."""

import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import time

from batch_checks import assert_same, take
import numpy as np
from PIL import Image
import pytest
import tiny

from mod_jax.data import common, image_cache, image_folder, images
from mod_jax.data.augment import AugmentConfig


@pytest.fixture
def folder(tmp_path):
  """8 training and 4 held-out pictures, far larger than the model's."""
  counts = {'train': 4, 'val': 2}
  tiny.pictures(tmp_path / 'photos', 'ab', counts, size=(60, 90))
  return images.ImageDataConfig(
    source='folder', path=str(tmp_path / 'photos'), image_size=8, cache='none'
  )


def cached(config, kind, tmp_path):
  directory = str(tmp_path / 'kept') if kind == 'disk' else ''
  return dataclasses.replace(config, cache=kind, cache_dir=directory)


def epochs(config, count=2):
  iterator = images.train_iterator(config, batch_size=4, seed=3)
  batches = take(iterator, 2 * count)
  iterator.close()
  return batches


@pytest.fixture
def decoded(monkeypatch):
  """Counts how often each file is decoded in this process."""
  counts = collections.Counter()
  decode = image_folder.decode

  def count(source, what):
    counts[os.path.relpath(source, pathlib.Path(source).parents[2])] += 1
    return decode(source, what)

  monkeypatch.setattr(image_folder, 'decode', count)
  return counts


@pytest.mark.parametrize(
  ('kind', 'crop'),
  [('disk', 'none'), ('memory', 'pad'), ('disk', 'random_resized')],
)
def test_batches_are_the_same_and_pictures_decoded_once(
  folder, tmp_path, decoded, kind, crop
):
  augmented = AugmentConfig(
    crop=crop, flip=0.5, min_scale=0.25, randaugment_ops=2, mixup=0.8, erase=0.3
  )
  plain = dataclasses.replace(folder, augment=augmented)
  expected = epochs(plain)
  held_out = list(images.eval_batches(plain, batch_size=3))
  config = cached(plain, kind, tmp_path)
  assert_same(epochs(config), expected)
  assert_same(list(images.eval_batches(config, batch_size=3)), held_out)
  decoded.clear()
  assert_same(epochs(config), expected)
  assert_same(list(images.eval_batches(config, batch_size=3)), held_out)
  assert not decoded


@pytest.mark.parametrize('kind', ['memory', 'disk'])
def test_a_changed_file_is_decoded_anew(folder, tmp_path, decoded, kind):
  config = cached(folder, kind, tmp_path)
  before = epochs(config)
  path = pathlib.Path(folder.path) / 'train/a/0.png'
  size = path.stat().st_size
  Image.new('RGB', (90, 60), (1, 2, 3)).save(path, compress_level=0)
  with open(path, 'ab') as file:
    file.write(bytes(max(0, size - path.stat().st_size)))
  decoded.clear()
  after = epochs(config)
  assert set(decoded) == {'train/a/0.png'}
  assert any(
    not np.array_equal(old['image'], new['image'])
    for old, new in zip(before, after, strict=True)
  )
  # The same size at another time is another picture.
  os.utime(path, ns=(0, 123))
  decoded.clear()
  epochs(config)
  assert set(decoded) == {'train/a/0.png'}
  assert_same(after, epochs(folder))


def test_sizes_share_a_directory(folder, tmp_path):
  large = dataclasses.replace(folder, image_size=12)
  for config in (folder, large):
    assert_same(epochs(cached(config, 'disk', tmp_path)), epochs(config))


def test_damaged_files_are_written_again(folder, tmp_path, decoded):
  config = cached(folder, 'disk', tmp_path)
  expected = epochs(config)
  files = [p for p in (tmp_path / 'kept').rglob('*') if p.is_file()]
  whole = {file: file.read_bytes() for file in files}
  file, data = files[3], whole[files[3]]
  for damaged in (
    b'',
    data[:7],
    data[:-1],
    data[:-1] + bytes([data[-1] ^ 1]),
    bytes(len(data)),
  ):
    # Cleared first: what has read ahead may mend the file at once.
    decoded.clear()
    file.write_bytes(damaged)
    assert_same(epochs(config), expected)
    assert len(decoded) == 1
    assert {file: file.read_bytes() for file in files} == whole


def test_memory_is_bounded(folder, decoded, monkeypatch):
  one = 3 * 8 * 8 + image_cache._HEADER.size
  monkeypatch.setattr(image_cache, 'MEMORY', 3 * one + 1)
  config = dataclasses.replace(folder, cache='memory', mean=(0.4,) * 3)
  expected = epochs(dataclasses.replace(config, cache='none'))
  assert_same(epochs(config), expected)
  decoded.clear()
  assert_same(epochs(config, 1), expected[:2])
  assert len(decoded) == 8 - 3


def test_a_full_disk_is_told_once(folder, tmp_path, monkeypatch, caplog):
  usage = type(shutil.disk_usage(tmp_path))
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage(100, 95, 5))
  common._warned.clear()
  config = cached(folder, 'disk', tmp_path)
  assert_same(epochs(config), epochs(folder))
  assert caplog.text.count('less than 10% of the disk is free') == 1
  assert not list((tmp_path / 'kept').rglob('*'))


def test_threads_that_warn_at_once_do_so_once(monkeypatch):
  told = []

  def warning(*args):
    time.sleep(0.05)  # The other threads arrive while this one still logs.
    told.append(args)

  monkeypatch.setattr(common.logging, 'warning', warning)
  common._warned.clear()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(common.warn_once, ['full'] * 4))
  assert len(told) == 1
