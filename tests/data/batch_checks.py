"""What the tests of several data sources ask of them and of batches."""

import itertools
import json

import numpy as np
from PIL import Image

from mod_jax.data import images


def write(root, contents):
  """Writes files: bytes or text by the path below `root`."""
  for name, content in contents.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    is_text = isinstance(content, str)
    path.write_bytes(content.encode() if is_text else content)


def colored(root, *names, size=(5, 5)):
  """Writes even pictures, the red of each by its place in `names`."""
  for i, name in enumerate(names):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size, (i, 100, 7)).save(path)


def fingerprint_of(config):
  """Returns the fingerprint of labelled pictures, as a run keeps it."""
  splits = {'train': 'train', 'held_out': 'eval'}
  return {
    key: images.open_split(config, name).fingerprint()
    for key, name in splits.items()
  }


def take(iterator, count):
  return list(itertools.islice(iterator, count))


def assert_same(batches, others):
  assert len(batches) == len(others)
  for batch, other in zip(batches, others, strict=True):
    assert batch.keys() == other.keys()
    for key in batch:
      assert batch[key].dtype == other[key].dtype
      np.testing.assert_array_equal(batch[key], other[key])


def joined(shards):
  """Global batches: each shard's part behind that of the one before."""
  return [
    {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    for parts in zip(*shards, strict=True)
  ]


def assert_resumed(make, stop, count):
  """Returns what comes after `stop` batches, however an iterator got there."""
  iterator = make()
  take(iterator, stop)
  state = json.loads(json.dumps(iterator.get_state()))
  expected = take(iterator, count)
  # One that is already under way can go back, too.
  for other in (make(), iterator):
    other.set_state(state)
    assert_same(take(other, count), expected)
  return expected


def assert_sharded(make, rows, counts):
  """Asserts that any number of hosts gets, and goes on with, the same batches.

  `make` takes how many rows a host has of each batch, and which host it is.
  """
  alone = make(rows)
  whole, state = take(alone, 20), alone.get_state()
  after = take(alone, 3)
  for count in counts:
    shards = [
      make(rows // count, shard_index=i, shard_count=count)
      for i in range(count)
    ]
    assert_same(joined([take(shard, 20) for shard in shards]), whole)
    # One position for all, whoever wrote it.
    assert [shard.get_state() for shard in shards] == [state] * count
    for shard in shards:
      take(shard, 1)
      shard.set_state(json.loads(json.dumps(state)))
    assert_same(joined([take(shard, 3) for shard in shards]), after)
