"""Corpora that are tokenised once: made, resumed, read, and what is refused."""

import dataclasses
import os
import shutil
import time

from batch_checks import assert_same, take
import command_line
import numpy as np
import pyarrow as pa
from pyarrow import parquet
import pytest
import tiny

from mod_jax import errors
from mod_jax.data import (
  bpe,
  corpus,
  fingerprint,
  prepare,
  shards,
  tables,
  text,
  tokenizers,
)

KIB = 2**10


def words(seed, count):
  rng = np.random.default_rng(seed)
  return ' '.join(str(n) for n in rng.integers(0, 200, count)) + '\n'


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Twelve files to train on and two held out, of .3 to 4 KiB; a tokenizer."""
  root = tmp_path_factory.mktemp('text')
  for name in ('train', 'eval'):
    (root / name).mkdir()
  for i in range(12):
    (root / f'train/{i:02}.txt').write_text(words(i, 100 + 90 * i))
  for i in range(2):
    (root / f'eval/{i}.txt').write_text(words(100 + i, 300))
  files = corpus.list_files(f'{root}/train/*')
  learned = bpe.open_tokenizer(files, 300, str(root / 'cache'))
  (root / 'tokenizer.json').write_bytes(learned.read_bytes())
  return root


def files_config(root, **kwargs):
  kwargs = {
    'source': 'files',
    'files': f'{root}/train/*.txt',
    'eval_files': f'{root}/eval/*.txt',
    'tokenizer': 'huggingface',
    'tokenizer_path': str(root / 'tokenizer.json'),
    'cache_dir': str(root / 'cache'),
    'length': 16,
    'read_threads': 0,
    **kwargs,
  }
  return text.TextDataConfig(**kwargs)


def prepared_config(path, **kwargs):
  kwargs = {'length': 16, 'read_threads': 0, **kwargs}
  return text.TextDataConfig(source='prepared', path=str(path), **kwargs)


def whole(stream):
  return stream.read(0, len(stream)).tolist()


def contents(path):
  return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize('tokenizer', ['huggingface', 'bytes', 'bpe'])
def test_batches_are_those_of_the_files(root, tmp_path, tokenizer, monkeypatch):
  monkeypatch.setattr(shards, '_MAX_OPEN', 2)
  source = files_config(root, segments=True)
  if tokenizer != 'huggingface':
    other = {'tokenizer': tokenizer, 'tokenizer_path': ''}
    source = dataclasses.replace(source, tokenizer_vocab_size=300, **other)
  index = prepare.prepare(source, str(tmp_path), shard_bytes=4 * KIB)
  # What it says of a tokenizer is not asked.
  config = prepared_config(tmp_path, segments=True, tokenizer='sentencepiece')
  assert len(index['train']['shards']) > 3
  assert index['train']['documents'] == 12
  sizes = sum(p.stat().st_size for p in (root / 'train').iterdir())
  assert index['train']['bytes'] == sizes
  assert index['train']['tokens'] == len(text.open_stream(source, 'train'))
  assert text.num_train_tokens(config) == text.num_train_tokens(source)
  for seed, count in ((0, 1), (3, 2)):
    kwargs = {'batch_size': 4, 'seed': seed, 'shard_count': count}
    mine, theirs = (
      text.train_iterator(c, shard_index=count - 1, **kwargs)
      for c in (config, source)
    )
    take(mine, 5)
    state = mine.get_state()
    take(theirs, 5)
    expected = take(theirs, 70)  # More than an epoch.
    assert_same(take(mine, 70), expected)
    mine.set_state(state)
    assert_same(take(mine, 3), expected[:3])
  assert_same(
    list(text.eval_batches(config, batch_size=3)),
    list(text.eval_batches(source, batch_size=3)),
  )
  assert (
    text.make_tokenizer(config).fingerprint
    == text.make_tokenizer(source).fingerprint
  )


def test_it_goes_on_after_a_kill(root, tmp_path, monkeypatch):
  source = files_config(root)
  prepare.prepare(source, str(tmp_path / 'calm'), shard_bytes=4 * KIB)
  out = tmp_path / 'killed'
  calls = []
  encode = tokenizers.HuggingFaceTokenizer.encode

  def killed(self, text):
    calls.append(text)
    if len(calls) == 8:
      raise KeyboardInterrupt
    return encode(self, text)

  monkeypatch.setattr(tokenizers.HuggingFaceTokenizer, 'encode', killed)
  with pytest.raises(KeyboardInterrupt):
    prepare.prepare(source, str(out), shard_bytes=4 * KIB)
  done = {p.name: p.stat().st_mtime_ns for p in out.glob('*.npy')}
  assert 0 < len(done) < len(list((tmp_path / 'calm').glob('*.npy')))
  with pytest.raises(errors.UserError, match='not finished: give the command'):
    text.train_iterator(prepared_config(out), batch_size=1, seed=0)
  leftover = out / '.train-00000.npy.killed.tmp'  # By SIGKILL.
  leftover.write_bytes(b'')
  os.utime(leftover, (0, 0))
  calls.extend('ended')  # From here on, nothing interrupts.
  prepare.prepare(source, str(out), shard_bytes=4 * KIB)
  assert contents(out) == contents(tmp_path / 'calm')
  for name, changed in done.items():
    assert (out / name).stat().st_mtime_ns == changed
  before = len(calls)
  prepare.prepare(source, str(out), shard_bytes=4 * KIB)
  assert len(calls) == before


def test_another_corpus_takes_the_place_of_a_deleted_one(root, tmp_path):
  source, out = files_config(root), tmp_path / 'out'
  prepare.prepare(source, str(out))
  shutil.rmtree(out)
  files = corpus.list_files(source.files)
  other = bpe.open_tokenizer(files, 290, source.cache_dir)
  source = dataclasses.replace(source, tokenizer_path=str(other))
  prepare.prepare(source, str(out))
  streams = [
    text.open_stream(config, 'train')
    for config in (prepared_config(out), source)
  ]
  assert whole(streams[0]) == whole(streams[1])


@pytest.mark.slow
def test_several_workers_make_the_same(root, tmp_path):
  source = files_config(root)
  outs = [tmp_path / str(workers) for workers in (1, 2)]
  for workers, out in enumerate(outs, 1):
    prepare.prepare(source, str(out), workers=workers, shard_bytes=4 * KIB)
  assert contents(outs[0]) == contents(outs[1])


def swap(path):
  shards = sorted(path.glob('train-*'))
  moved = path / 'moved'
  shards[0].rename(moved)
  shards[1].rename(shards[0])
  moved.rename(shards[1])


def cut(path):
  shard = max(path.glob('train-*'))
  os.truncate(shard, shard.stat().st_size - 8)


def flip(path):
  tiny.flip(path / 'held_out-00000.npy')


def make_old(path):
  index = path / 'index.json'
  index.write_text(index.read_text().replace('"format": 2', '"format": 1'))


def learn_another(path):
  files = [f for f in corpus.list_files(f'{path}/*.json') if f.size > 2000]
  learned = bpe.open_tokenizer(files, 290, str(path / 'cache'))
  learned.rename(path / 'tokenizer.json')


@pytest.mark.parametrize(
  ('damage', 'said'),
  [
    (swap, 'not as it was prepared .* training files are changed'),
    (cut, 'not as it was prepared .*the training file train-.* is changed'),
    (flip, 'the held-out file held_out-00000.npy is changed'),
    (learn_another, 'tokenizer in path=.* is not the one'),
    (lambda p: (p / 'train-00001.npy').unlink(), 'cannot be read: No such'),
    (lambda p: (p / 'index.json').unlink(), 'holds no prepared corpus'),
    (lambda p: (p / 'index.json').write_text('{'), 'is no index of a prepared'),
    (make_old, 'that this version can read: prepare it again, by the same'),
  ],
)
def test_damage_is_one_sentence(root, tmp_path, damage, said):
  prepare.prepare(files_config(root), str(tmp_path), shard_bytes=4 * KIB)
  config = prepared_config(tmp_path)
  text.fingerprint(config)
  damage(tmp_path)
  with pytest.raises(errors.UserError, match=said):
    text.fingerprint(config)
  if damage is not learn_another:
    with pytest.raises(errors.UserError, match=said):
      [text.open_stream(config, group) for group in ('train', 'held_out')]


def test_what_no_sample_sees(root, tmp_path, monkeypatch):
  monkeypatch.setattr(fingerprint, '_BYTES', KIB)
  source = files_config(root)
  prepare.prepare(source, str(tmp_path), shard_bytes=4 * KIB)
  token = np.load(tmp_path / 'train-00000.npy', mmap_mode='r+')[400:401]
  before = text.fingerprint(prepared_config(tmp_path))
  token[0] ^= 1
  token.flush()
  assert text.fingerprint(prepared_config(tmp_path)) == before
  stream = text.open_stream(prepared_config(tmp_path), 'train')

  def read():
    until = time.monotonic() + 120
    while time.monotonic() < until:  # A thread checks the shards meanwhile.
      whole(stream)

  message = 'train-00000.* is not as it was .*SHA-256'
  with pytest.raises(errors.UserError, match=message):
    read()
  with pytest.raises(errors.UserError, match=message):
    prepare.prepare(source, str(tmp_path), shard_bytes=4 * KIB)
  token[0] ^= 1
  token.flush()
  whole(text.open_stream(prepared_config(tmp_path), 'train'))


def test_ids_of_no_vocabulary(root, tmp_path):
  prepare.prepare(files_config(root), str(tmp_path))
  path = str(tmp_path / 'train-00000.npy')
  stream = shards.Tokens({path: len(np.load(path))}, 100)
  with pytest.raises(errors.UserError, match='train-00000.* holds the token'):
    whole(stream)


def test_a_shard_that_changes_while_it_is_read(root, tmp_path):
  prepare.prepare(files_config(root), str(tmp_path), shard_bytes=4 * KIB)
  stream = text.open_stream(prepared_config(tmp_path), 'train')
  swap(tmp_path)
  # Whoever comes first: this read, or the thread that checks the shards.
  message = 'tokens, and its index says|is not as it was prepared'
  with pytest.raises(errors.UserError, match=message):
    whole(stream)


# Tables.

ROWS = [words(i, 5 + i % 20).strip() for i in range(60)]


def write_table(path, rows, **columns):
  table = pa.table({'text': rows, 'n': list(range(len(rows))), **columns})
  if path.suffix == '.parquet':
    parquet.write_table(table, path, row_group_size=7)
  else:
    new = pa.ipc.new_file if 'file' in path.stem else pa.ipc.new_stream
    with new(path, table.schema) as writer:
      writer.write_table(table, max_chunksize=7)


def test_few_bytes_of_parquet_stay_few(tmp_path):
  path = tmp_path / 'a.parquet'
  texts = pa.array(['x' * 10**5])
  texts = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), texts)
  # Without the schema, the texts are no dictionary to a reader.
  parquet.write_table(pa.table({'text': texts}), path, store_schema=False)
  pool = pa.default_memory_pool()
  before = pool.max_memory()
  assert sum(map(len, tables.read_column(str(path), 'text'))) == 2 * 10**8
  assert pool.max_memory() - before < 10**7


def test_damaged_tables_are_refused(tmp_path):
  rows = ['a', 'b' * 40, 'c' * 40]
  arrow, parquets = tmp_path / 'a.arrow', tmp_path / 'a.parquet'
  write_table(arrow, rows)
  # Where the second text begins: far outside of the file.
  ends = np.array([0, 1, 41, 81], np.int32)
  data = arrow.read_bytes()
  assert data.count(ends.tobytes()) == 1
  far = np.array([0, -(2**28), 41, 81], np.int32)
  arrow.write_bytes(data.replace(ends.tobytes(), far.tobytes()))
  table = pa.table({'text': rows})
  parquet.write_table(
    table, parquets, write_page_checksum=True, compression='none'
  )
  data = parquets.read_bytes()
  parquets.write_bytes(data.replace(b'c' * 40, b'c' * 39 + b'd', 1))
  for path in (arrow, parquets):
    with pytest.raises(errors.UserError, match='cannot be read as Arrow'):
      list(tables.read_column(str(path), 'text'))


@pytest.mark.parametrize('name', ['a.parquet', 'stream.arrow', 'file.arrow'])
def test_tables(tmp_path, name):
  write_table(tmp_path / name, [*ROWS[:50], ''])
  write_table(tmp_path / f'eval_{name}', ROWS[50:])
  source = text.TextDataConfig(
    source='huggingface',
    files=f'{tmp_path}/{name}',
    eval_files=f'{tmp_path}/eval_{name}',
  )
  out = tmp_path / 'out'
  index = prepare.prepare(source, str(out))
  assert index['train']['documents'] == 50
  for group, rows in (('train', ROWS[:50]), ('held_out', ROWS[50:])):
    stream = text.open_stream(prepared_config(out), group)
    assert bytes(whole(stream)).decode().split('\n')[:-1] == rows


def test_documents_are_held_out_by_their_text(root, tmp_path):
  write_table(tmp_path / '1.parquet', ROWS[:40])
  write_table(tmp_path / '2.parquet', ROWS[20:])
  source = text.TextDataConfig(
    source='huggingface', files=f'{tmp_path}/*.parquet', eval_fraction=0.2
  )
  out = tmp_path / 'out'
  prepare.prepare(source, str(out), shard_bytes=1)
  sides = []
  for group in ('train', 'held_out'):
    stream = text.open_stream(prepared_config(out), group)
    sides.append(bytes(whole(stream)).decode().split('\n')[:-1])
  assert sorted(sides[0] + sides[1]) == sorted(ROWS[:40] + ROWS[20:])
  assert not set(sides[0]) & set(sides[1])
  assert 4 < len(sides[1]) < 30


def test_the_command(root, tmp_path):
  flags = [
    f'--out={tmp_path}/out',
    '--workers=1',
    '--config.source=files',
    f'--config.files={root}/train/*.txt',
    f'--config.eval_files={root}/eval/*.txt',
  ]
  ended = command_line.call(prepare.main, ['prepare', *flags])
  assert not ended.status
  size = sum(p.stat().st_size for p in (root / 'train').iterdir())
  said = f'train: {size:,} tokens of 12 documents, {size:,} byte'
  assert said in ended.out
