"""Shards of tokens: written, cached, read across seams, damaged."""

import os
import pathlib
import subprocess
import sys

from batch_checks import write
import numpy as np
import pytest

from mod_jax.data import corpus, shards, tokenizers


class Words(tokenizers.Tokenizer):
  """One token per character, and an end token: enough to see the seams."""

  def __init__(self, eos_id=None, fingerprint='words', vocab_size=300):
    self.calls = 0
    super().__init__(
      surfaces=[b'x'] * vocab_size,
      names={},
      eos_id=eos_id,
      bos_id=None,
      fingerprint=fingerprint,
    )

  def encode(self, text):
    self.calls += 1
    return [ord(c) % 256 for c in text]

  def _decode(self, ids):
    return ''.join(map(chr, ids))


def test_tokens_are_read_across_shards(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, '_MAX_OPEN', 2)
  documents = [[bytes([i]) * (i + 1)] for i in range(6)]
  paths = {}
  # The third shard has no token.
  for i, part in enumerate((documents[:2], documents[2:5], [], documents[5:])):
    path = str(tmp_path / f'{i}.npy')
    shard = shards.open_or_write(path, part, tokenizers.make('bytes'))
    assert shard.documents == len(part)
    paths[path] = shard.tokens
  whole = b''.join(d for (d,) in documents)
  tokens = shards.Tokens(paths, 256)
  assert len(tokens) == len(whole)
  assert tokens.starts.tolist() == [0, 1, 3, 6, 10, 15]
  for start in range(len(whole) + 1):
    for stop in range(start, len(whole) + 1):
      ids = tokens.read(start, stop)
      assert ids.dtype == np.int32
      assert ids.tolist() == list(whole[start:stop])
  assert tokens._open.cache_info().currsize == 2
  mapped = np.load(next(iter(paths)), mmap_mode='r')
  assert mapped.tolist() == [0, 1, 1]


_TRUNCATED = """
import os, sys
from mod_jax import errors
from mod_jax.data import corpus, shards, tokenizers

file, cache = sys.argv[1:]
tokens = shards.open_cache(
  corpus.list_files(file), tokenizers.make('bytes'), cache
)
tokens.read(0, len(tokens))
os.truncate(os.path.join(cache, os.listdir(cache)[0]), 4096)
try:
  tokens.read(len(tokens) - 9, len(tokens))
except errors.UserError as e:
  print(e)
"""


def test_a_shard_that_is_truncated_while_open_is_one_sentence(tmp_path):
  # In a process of its own: a mapped file would end it by SIGBUS.
  write(tmp_path, {'a': 'x' * 100_000})
  command = [sys.executable, '-c', _TRUNCATED]
  result = subprocess.run(
    [*command, str(tmp_path / 'a'), str(tmp_path / 'cache')],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  assert ".npy' is shorter than when the run began" in result.stdout


@pytest.mark.parametrize(
  ('vocab_size', 'dtype', 'eos_id'),
  [(256, 'u1', 255), (300, 'u2', None), (70000, 'u4', 255)],
)
def test_cache_holds_the_documents(tmp_path, vocab_size, dtype, eos_id):
  write(tmp_path, {'a': 'abc', 'b': 'de'})
  files = corpus.list_files(f'{tmp_path}/*')
  tok = Words(eos_id, vocab_size=vocab_size)
  stream = shards.open_cache(files, tok, str(tmp_path / 'cache'))
  end = [] if eos_id is None else [eos_id]
  expected = [*b'abc', *end, *b'de', *end]
  assert stream.read(0, len(stream)).tolist() == expected
  assert stream.starts.tolist() == [0, 3 + len(end)]
  (path,) = (tmp_path / 'cache').iterdir()
  assert np.load(path, mmap_mode='r').dtype == dtype


def test_cache_is_reused_until_something_changes(tmp_path):
  write(tmp_path, {'a': 'abc', 'b': 'de'})
  cache = tmp_path / 'cache'

  def read(fingerprint='words'):
    tok = Words(fingerprint=fingerprint)
    files = corpus.list_files(f'{tmp_path}/?')
    stream = shards.open_cache(files, tok, str(cache))
    return bytes(stream.read(0, len(stream)).tolist()), tok.calls

  assert read() == (b'abcde', 2)
  assert read() == (b'abcde', 0)
  write(tmp_path, {'a': 'xyz'})
  os.utime(tmp_path / 'a', ns=(1, 1))
  assert read() == (b'xyzde', 2)
  assert read('other') == (b'xyzde', 2)
  write(tmp_path, {'c': 'f'})
  assert read() == (b'xyzdef', 3)
  assert read() == (b'xyzdef', 0)


def test_cache_survives_a_kill_and_damage(tmp_path):
  write(tmp_path, {'a': 'abc'})
  cache = tmp_path / 'cache'
  files = corpus.list_files(f'{tmp_path}/a')

  class Killed(Words):
    def encode(self, text):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    shards.open_cache(files, Killed(), str(cache))
  assert list(cache.iterdir()) == []

  shards.open_cache(files, Words(), str(cache))
  (path,) = cache.iterdir()
  whole = path.read_bytes()
  damaged = [whole[:size] for size in (0, 10, 130, 200, len(whole) - 1)]
  damaged += [
    whole + b'x',
    whole.replace(b"'<u2'", b"'|O' "),
    whole.replace(b'(3,)', b'(-3,)'),
    whole.replace(b'(3,)', b'(3,3)'),
    whole.replace(b'(3,)', b'(' + b'9' * 30 + b',)'),
    whole.replace(b'(3,)', b'(((('),
  ]
  for data in damaged:
    assert data != whole
    path.write_bytes(data)
    stream = shards.open_cache(files, Words(), str(cache))
    assert stream.read(0, 3).tolist() == [*b'abc']
    assert path.read_bytes() == whole

  # What a killed builder left is not taken for a cache, and goes in time.
  leftover = cache / f'.{path.name}.zzz.tmp'
  leftover.write_bytes(whole[:10])
  os.utime(leftover, (0, 0))
  path.unlink()
  assert len(shards.open_cache(files, Words(), str(cache))) == 3
  assert not leftover.exists()


def test_two_builders_at_once(tmp_path):
  write(tmp_path, {'a': 'abc'})
  cache = str(tmp_path / 'cache')
  files = corpus.list_files(f'{tmp_path}/a')

  class Nested(Words):
    """Another process finishes the same cache while this one builds."""

    def encode(self, text):
      other = shards.open_cache(files, Words(), cache)
      assert other.read(0, 3).tolist() == [*b'abc']
      return super().encode(text)

  stream = shards.open_cache(files, Nested(), cache)
  assert stream.read(0, 3).tolist() == [*b'abc']
  assert len(os.listdir(cache)) == 1
