"""What the tests of several data sources ask of them and of batches."""

import itertools

import numpy as np

from mod_jax.data import images


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
