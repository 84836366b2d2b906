"""Batches of text: coverage, order, resuming, shards, segments, errors."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import tempfile

from batch_checks import (
  assert_resumed,
  assert_same,
  assert_sharded,
  take,
  write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from mod_jax import errors
from mod_jax.data import (
  fingerprint,
  prepare,
  shards,
  text,
  tfds_text,
  tokenizers,
)


def numbered(count, start=0):
  """Bytes in which the pair at every place is unique."""
  values = [(start + i) % 2**16 for i in range(count)]
  return np.array(values, '>u2').tobytes()


def files_config(root, **kwargs):
  kwargs = {
    'source': 'files',
    'files': f'{root}/train/**',
    'eval_files': f'{root}/eval/**',
    'length': 8,
    'cache_dir': f'{root}/cache',
    **kwargs,
  }
  return text.TextDataConfig(**kwargs)


@pytest.fixture
def root(tmp_path):
  """Ten training files and two held out, 880 and 176 bytes."""
  for i in range(10):
    write(tmp_path, {f'train/{i}.bin': numbered(44, 1000 * i)})
  for i in range(2):
    write(tmp_path, {f'eval/{i}.bin': numbered(44, 20000 + 1000 * i)})
  return tmp_path


def rows_of(batches, key='tokens'):
  return [bytes(r.astype(np.uint8)) for b in batches for r in b[key]]


def check_format(batch, batch_size, length, segments, held_out=False):
  kinds = {'tokens': np.int32, 'targets': np.int32, 'weights': np.float32}
  if segments:
    kinds['segments'] = np.int32
  elif held_out:
    kinds['valid'] = np.bool_
  assert set(batch) == set(kinds)
  for key, dtype in kinds.items():
    assert isinstance(batch[key], np.ndarray)
    assert batch[key].dtype == dtype
    assert batch[key].shape == (batch_size, length)


# Windows.


@settings(max_examples=60, deadline=None)
@given(
  sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
  length=st.integers(2, 17),
  segments=st.booleans(),
)
def test_each_token_is_a_target_exactly_once(sizes, length, segments):
  with tempfile.TemporaryDirectory() as directory:
    root = pathlib.Path(directory)
    documents = [bytes([i] * size) for i, size in enumerate(sizes)]
    path = str(root / 'tokens.npy')
    shard = shards.open_or_write(
      path, [[d] for d in documents], tokenizers.make('bytes')
    )
    stream = shards.Tokens({path: shard.tokens}, 256)
    whole = np.frombuffer(b''.join(documents), np.uint8)

    full = text.Windows(stream, length, segments=segments)
    padded = text.Windows(stream, length, segments=segments, partial=True)
    assert len(full) == (len(whole) - 1) // length
    rows = [padded[i] for i in range(len(padded))]
    for i in range(len(full)):
      assert_same([full[i]], [rows[i]])
    # What full rows leave out is less than a row.
    assert len(whole) - 1 - len(full) * length < length

    flat = {
      k: np.concatenate([r[k] for r in rows]) if rows else np.zeros(0)
      for k in padded.empty_row()
    }
    count = len(whole) - 1
    np.testing.assert_array_equal(flat['tokens'][:count], whole[:-1])
    np.testing.assert_array_equal(flat['targets'][:count], whole[1:])
    # Documents are constant here, so a change of value is a new document.
    same = whole[1:] == whole[:-1]
    expected = same if segments else np.ones(count)
    np.testing.assert_array_equal(flat['weights'][:count], expected)
    for key in flat:
      assert not flat[key][count:].any()
    if segments:
      for row in rows:
        valid = row['segments'] > 0
        ids = row['segments'][valid]
        assert ids[0] == 1
        np.testing.assert_array_equal(
          np.diff(ids), np.diff(row['tokens'][valid]) != 0
        )


# Training batches.


def test_every_epoch_has_each_row_once_in_another_order(root):
  config = files_config(root)
  rows = rows_of(take(text.train_iterator(config, batch_size=1, seed=3), 218))
  first, second = rows[:109], rows[109:]
  assert len(set(first)) == 109  # 879 targets in rows of 8.
  assert sorted(first) == sorted(second)
  assert first != second
  assert first != sorted(first)
  other = text.train_iterator(config, batch_size=1, seed=4)
  assert rows_of(take(other, 109)) != first


@pytest.mark.parametrize(
  ('stop', 'segments', 'read_threads'),
  [(0, False, 2), (26, True, 0), (27, False, 0), (28, True, 2)],
)
def test_resume_at_and_across_an_epoch_boundary(
  root, stop, segments, read_threads
):
  # 109 rows in batches of 4: the 28th batch crosses into the second epoch.
  config = files_config(root, segments=segments, read_threads=read_threads)
  make = functools.partial(text.train_iterator, config, batch_size=4, seed=5)
  for batch in assert_resumed(make, stop, 40):
    check_format(batch, 4, 8, segments)


def test_batches_do_not_depend_on_the_number_of_shards(root):
  def make(batch_size, **shard):
    config = files_config(root)
    return text.train_iterator(config, batch_size=batch_size, seed=2, **shard)

  assert_sharded(make, 12, (2, 3, 4))


# Epochs.


def test_more_epochs_than_allowed_are_refused(root, caplog):
  config = files_config(root)
  assert text.num_train_tokens(config) == 109 * 8  # Of 880 bytes.

  def make(num_batches, **changes):
    return text.train_iterator(
      dataclasses.replace(config, **changes),
      batch_size=2,
      shard_count=2,
      seed=0,
      num_batches=num_batches,
    )

  with caplog.at_level('WARNING'):
    make(27)
    assert not caplog.messages
    message = 'take 896 tokens, .* has 872, .*max_epochs=1: .* at most 27 steps'
    with pytest.raises(errors.UserError, match=message):
      make(28)
    make(28, max_epochs=1.03)
    assert 'take 896 tokens' in caplog.text
  # Small text is no fault where nobody says how much a run takes.
  take(make(None), 60)


# Held-out batches.


def test_held_out_files_are_never_trained_on(tmp_path):
  for i in range(40):
    write(tmp_path, {f'd{i % 3}/{i}.txt': bytes([i]) * 50})
  config = text.TextDataConfig(
    source='files', files=f'{tmp_path}/**/*.txt', length=7, eval_fraction=0.2
  )
  train, held_out = text.split_files(config)
  assert len(train) + len(held_out) == 40
  assert len(held_out) > 1
  ids = {int(pathlib.Path(f.name).stem) for f in held_out}
  batches = take(text.train_iterator(config, batch_size=4, seed=0), 150)
  seen = {int(t) for b in batches for t in b['tokens'].flat}
  assert seen == set(range(40)) - ids
  evaluated = np.concatenate(
    [
      b['tokens'][b['weights'] > 0]
      for b in text.eval_batches(config, batch_size=4)
    ]
  )
  assert set(evaluated.tolist()) == ids


@pytest.mark.parametrize(
  ('segments', 'count'), [(False, 1), (False, 3), (True, 2)]
)
def test_eval_counts_each_target_once(root, segments, count):
  config = files_config(root, segments=segments)
  shards = [
    list(
      text.eval_batches(config, batch_size=4, shard_index=i, shard_count=count)
    )
    for i in range(count)
  ]
  # 175 targets in 22 rows, the last of 7; and so many batches on every shard.
  assert {len(s) for s in shards} == {math.ceil(22 / (4 * count))}
  for shard in shards:
    for batch in shard:
      check_format(batch, 4, 8, segments, held_out=True)
  weights = sum(b['weights'].sum() for s in shards for b in s)
  assert weights == (174 if segments else 175)
  pairs = [
    (t, n)
    for s in shards
    for b in s
    for t, n, w in zip(
      b['tokens'].flat, b['targets'].flat, b['weights'].flat, strict=True
    )
    if w
  ]
  whole = b''.join((root / f'eval/{i}.bin').read_bytes() for i in range(2))
  expected = list(itertools.pairwise(whole))
  if segments:
    del expected[87]
  assert sorted(pairs) == sorted(expected)
  again = list(text.eval_batches(config, batch_size=4, shard_count=count))
  assert_same(shards[0], again)


@pytest.mark.parametrize('count', [1, 2])
def test_limited_eval_is_spread_over_the_held_out_files(root, count):
  config = files_config(root)
  everything = rows_of(text.eval_batches(config, batch_size=1))
  shards = [
    list(
      text.eval_batches(
        config,
        batch_size=2,
        num_batches=2,
        shard_index=i,
        shard_count=count,
      )
    )
    for i in range(count)
  ]
  assert {len(s) for s in shards} == {2}
  chosen = sorted(everything.index(r) for s in shards for r in rows_of(s))
  rows = 4 * count
  assert chosen == [i * 22 // rows for i in range(rows)]
  assert_same(
    list(text.eval_batches(config, batch_size=4, num_batches=99)),
    list(text.eval_batches(config, batch_size=4)),
  )


# Data sets of documents.


def tfds_config(directory, **kwargs):
  kwargs = {'source': 'tfds', 'tfds_name': directory, 'length': 16, **kwargs}
  return text.TextDataConfig(**kwargs)


def test_tfds_prepared(tfds_documents, tmp_path):
  source = tfds_config(tfds_documents)
  prepare.prepare(source, str(tmp_path), shard_bytes=400)
  assert len(list(tmp_path.glob('train-*'))) > 1
  config = text.TextDataConfig(source='prepared', path=str(tmp_path), length=16)
  for group, split in (('train', 'train'), ('held_out', 'test')):
    records = tfds_text.open_documents(source, split)
    documents = [records[i]['text'] for i in range(len(records))]
    assert len(records) > 16
    expected = b''.join(t + b'\n' for t in documents if t)
    stream = text.open_stream(config, group)
    assert bytes(stream.read(0, len(stream)).tolist()) == expected


def test_fingerprint_of_files(root):
  told = text.fingerprint(files_config(root))
  assert json.loads(json.dumps(told)) == told
  write(root, {'eval/0.bin': numbered(44, 31000)})
  assert fingerprint.differences(
    told, text.fingerprint(files_config(root))
  ) == ['the held-out file 0.bin is changed']
  # Whatever makes other ids of the same text.
  stdlib = text.fingerprint(text.TextDataConfig())
  assert {'python', 'tokenizer'} < stdlib.keys()
