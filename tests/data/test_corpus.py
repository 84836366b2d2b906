"""Files as token streams: listing, holding out, reading, caching."""

import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

from mod_jax import errors
from mod_jax.data import corpus, tokenizers


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


def write(root, texts):
  for name, text in texts.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def names(files):
  return [f.name for f in files]


def test_links_in_a_circle(tmp_path):
  inner, outside = tmp_path / 'root/a/b', tmp_path / 'outside'
  for folder in (inner, outside):
    folder.mkdir(parents=True)
    (folder / f'{folder.name}.txt').write_text('x')
  for i in range(2):
    (inner / f'up{i}').symlink_to(tmp_path / 'root', target_is_directory=True)
  (inner / 'out').symlink_to(outside, target_is_directory=True)
  files = corpus.list_files(f'{tmp_path}/root/**/*.txt')
  assert [f.name for f in files] == ['a/b/b.txt', 'a/b/out/outside.txt']


def test_listing_is_sorted_relative_and_without_repeats(tmp_path):
  write(tmp_path, {'b.txt': 'b', 'a/z.txt': 'z', 'a/y.txt': 'y', 'e.txt': ''})
  (tmp_path / 'link.txt').symlink_to(tmp_path / 'b.txt')
  files = corpus.list_files(f'{tmp_path}/**/*.txt, {tmp_path}/a/*.txt')
  assert [os.path.realpath(f.path) for f in files] == [
    str(tmp_path / n) for n in ('a/y.txt', 'a/z.txt', 'b.txt')
  ]
  assert names(files)[:2] == ['a/y.txt', 'a/z.txt']


def test_of_two_names_the_first_counts_in_any_order(tmp_path, monkeypatch):
  write(tmp_path, {'b/file.txt': 'text'})
  (tmp_path / 'a').symlink_to(tmp_path / 'b', target_is_directory=True)
  found = [f'{tmp_path}/{name}/file.txt' for name in 'ab']
  for order in (found, found[::-1]):
    monkeypatch.setattr(corpus.paths, 'glob', lambda _, order=order: order)
    assert names(corpus.list_files(f'{tmp_path}/*/*.txt')) == ['a/file.txt']


def test_listing_takes_braces_and_commas_in_names(tmp_path):
  write(tmp_path, {n: n for n in ('a/x.txt', 'b/x.txt', 'b/y.md', 'c, d.txt')})

  def found(patterns):
    return names(corpus.list_files(patterns))

  # Names say which of the directories, as where a wildcard matched it.
  assert found(f'{tmp_path}/{{a,b}}/x.txt') == ['a/x.txt', 'b/x.txt']
  assert found(f'{tmp_path}/{{a,b}}/*.{{txt,md}}') == [
    *('a/x.txt', 'b/x.txt', 'b/y.md')
  ]
  assert found(f'{tmp_path}/c, d.txt') == ['c, d.txt']
  assert found(f'{tmp_path}/c[,]*, {tmp_path}/a/{{x,y{{1,2}}}}.txt') == [
    *('c, d.txt', 'x.txt')
  ]
  with pytest.raises(errors.UserError, match=r'\{c,d\}.*matches no file'):
    found(f'{tmp_path}/{{c,d}}/*')


def test_listing_one_file_without_wildcard(tmp_path):
  write(tmp_path, {'b.txt': 'b'})
  (only,) = corpus.list_files(str(tmp_path / 'b.txt'))
  assert (only.name, only.size) == ('b.txt', 1)


def test_listing_errors(tmp_path):
  write(tmp_path, {'e.txt': '', 'f.md': 'x'})
  with pytest.raises(errors.UserError, match=r'files=.*nope.*matches no file'):
    corpus.list_files(f'{tmp_path}/f.md,{tmp_path}/nope*')
  with pytest.raises(errors.UserError, match='eval_files=.*is a directory'):
    corpus.list_files(str(tmp_path), 'eval_files')
  with pytest.raises(errors.UserError, match='only empty files'):
    corpus.list_files(f'{tmp_path}/*.txt')


def test_stdlib_is_source_of_the_library_only():
  files = corpus.list_stdlib()
  assert 'dataclasses.py' in names(files)
  assert all(n.endswith('.py') for n in names(files))
  assert not [n for n in names(files) if 'site-packages' in n]
  assert names(files) == sorted(names(files), key=os.fsencode)


def test_holding_out_is_stable_and_close_to_the_fraction():
  files = [
    corpus.TextFile(name=f'{i}.txt', path=f'/{i}', size=1, mtime_ns=0)
    for i in range(1000)
  ]
  train, held_out = corpus.hold_out(files, 0.1)
  assert 60 < len(held_out) < 140
  assert sorted(names(train + held_out)) == sorted(names(files))
  _, fewer = corpus.hold_out(files[:500], 0.1)
  assert set(names(fewer)) <= set(names(held_out))


@pytest.mark.parametrize('fraction', [1e-9, 1 - 1e-9])
def test_holding_out_leaves_neither_side_empty(fraction):
  files = [
    corpus.TextFile(name=f'{i}', path=f'/{i}', size=1, mtime_ns=0)
    for i in range(3)
  ]
  train, held_out = corpus.hold_out(files, fraction)
  assert {len(train), len(held_out)} == {1, 2}
  assert corpus.hold_out(files[:1], fraction) == (files[:1], [])


def test_copies_of_held_out_files_are_not_trained_on(tmp_path):
  long = bytes(2**16)
  write(
    tmp_path,
    {
      't/copy': 'same',
      't/size': 'sane',
      't/long': long + b'1',
      't/longcopy': long + b'2',
      'h/a': 'same',
      'h/b': long + b'2',
    },
  )
  train = corpus.list_files(f'{tmp_path}/t/*')
  held_out = corpus.list_files(f'{tmp_path}/h/*')
  assert names(corpus.without_copies(train, held_out)) == ['long', 'size']
  assert corpus.without_copies(held_out, held_out) == []
  every = corpus.distinct([*train, *held_out])
  assert names(every) == ['copy', 'long', 'longcopy', 'size']


def test_byte_stream_reads_across_files(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus.ByteStream, 'MAX_OPEN', 2)
  texts = {f'{i}': bytes([i]) * (i + 1) for i in range(6)}
  write(tmp_path, texts)
  whole = b''.join(texts.values())
  stream = corpus.ByteStream(corpus.list_files(f'{tmp_path}/*'))
  assert len(stream) == len(whole)
  assert stream.starts.tolist() == [0, 1, 3, 6, 10, 15]
  for start in range(len(whole)):
    for stop in range(start, len(whole) + 1):
      assert stream.read(start, stop).tolist() == list(whole[start:stop])
  assert stream._piece.cache_info().currsize == 2
  again = pickle.loads(pickle.dumps(stream))
  np.testing.assert_array_equal(again.read(2, 9), stream.read(2, 9))


def test_a_file_that_shrank_is_reported(tmp_path):
  write(tmp_path, {'a': 'abcdef'})
  stream = corpus.ByteStream(corpus.list_files(f'{tmp_path}/a'))
  write(tmp_path, {'a': 'ab'})
  with pytest.raises(errors.UserError, match='had 6 bytes'):
    stream.read(0, 3)


_TRUNCATED = """
import os, sys
from mod_jax import errors
from mod_jax.data import corpus
from mod_jax.data import tokenizers

file, cache = sys.argv[1:]
files = corpus.list_files(file)
tokenizer = tokenizers.make('bytes', '')
streams = [
  corpus.ByteStream(files), corpus.open_cache(files, tokenizer, cache)
]
for stream in streams:
  stream.read(0, len(stream))
for path in (file, os.path.join(cache, os.listdir(cache)[0])):
  os.truncate(path, 4096)
for stream in streams:
  try:
    stream.read(len(stream) - 9, len(stream))
  except errors.UserError as e:
    print(e)
"""


def test_a_file_that_is_truncated_while_open_is_one_sentence(tmp_path):
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
  first, second = result.stdout.splitlines()
  assert "a' had 100000 bytes when the run began and is shorter now" in first
  assert ".tokens' had 100040 bytes when the run began" in second


def test_files_that_were_put_aside_can_still_be_read(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus.ByteStream, 'MAX_OPEN', 1)
  write(tmp_path, {'a': 'abc', 'b': 'def'})
  stream = corpus.ByteStream(corpus.list_files(f'{tmp_path}/*'))
  first = stream._piece(0)  # As another thread would hold it.
  number = first._descriptor
  stream.read(3, 6)
  assert first.read(0, 3) == b'abc'
  del first
  with pytest.raises(OSError, match='Bad file descriptor'):
    os.fstat(number)


@pytest.mark.parametrize(('vocab_size', 'width'), [(300, 2), (70000, 4)])
@pytest.mark.parametrize('eos_id', [None, 299])
def test_cache_holds_the_documents(tmp_path, vocab_size, width, eos_id):
  write(tmp_path, {'a': 'abc', 'b': 'de'})
  files = corpus.list_files(f'{tmp_path}/*')
  tok = Words(eos_id, vocab_size=vocab_size)
  stream = corpus.open_cache(files, tok, str(tmp_path / 'cache'))
  end = [] if eos_id is None else [eos_id]
  expected = [*b'abc', *end, *b'de', *end]
  assert stream.read(0, len(stream)).tolist() == expected
  assert stream.starts.tolist() == [0, 3 + len(end)]
  (path,) = (tmp_path / 'cache').iterdir()
  size = 32 + -(-len(expected) * width // 8) * 8 + 2 * 8
  assert path.stat().st_size == size


def test_cache_is_reused_until_something_changes(tmp_path):
  write(tmp_path, {'a': 'abc', 'b': 'de'})
  cache = tmp_path / 'cache'

  def read(fingerprint='words'):
    tok = Words(fingerprint=fingerprint)
    files = corpus.list_files(f'{tmp_path}/?')
    stream = corpus.open_cache(files, tok, str(cache))
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


def test_cache_survives_a_kill_and_a_truncation(tmp_path):
  write(tmp_path, {'a': 'abc'})
  cache = tmp_path / 'cache'
  files = corpus.list_files(f'{tmp_path}/a')

  class Killed(Words):
    def encode(self, text):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    corpus.open_cache(files, Killed(), str(cache))
  assert list(cache.iterdir()) == []

  corpus.open_cache(files, Words(), str(cache))
  (path,) = cache.iterdir()
  whole = path.read_bytes()
  for size in (0, 10, len(whole) - 1):
    path.write_bytes(whole[:size])
    stream = corpus.open_cache(files, Words(), str(cache))
    assert stream.read(0, 3).tolist() == [*b'abc']
    assert path.read_bytes() == whole

  # What a killed builder left is not taken for a cache, and goes in time.
  leftover = cache / f'.{path.name}.zzz.tmp'
  leftover.write_bytes(whole[:10])
  os.utime(leftover, (0, 0))
  path.unlink()
  assert len(corpus.open_cache(files, Words(), str(cache))) == 3
  assert not leftover.exists()


def test_two_builders_at_once(tmp_path):
  write(tmp_path, {'a': 'abc'})
  cache = str(tmp_path / 'cache')
  files = corpus.list_files(f'{tmp_path}/a')

  class Nested(Words):
    """Another process finishes the same cache while this one builds."""

    def encode(self, text):
      other = corpus.open_cache(files, Words(), cache)
      assert other.read(0, 3).tolist() == [*b'abc']
      return super().encode(text)

  stream = corpus.open_cache(files, Nested(), cache)
  assert stream.read(0, 3).tolist() == [*b'abc']
  assert len(os.listdir(cache)) == 1


def test_long_files_are_tokenised_in_pieces_at_line_ends(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, '_CHUNK', 8)
  text = 'abcdé\n' * 5 + 'é' * 21 + '\nend'
  write(tmp_path, {'a': text.encode() + b'\xc3'})
  chunks = list(corpus.text_chunks(str(tmp_path / 'a')))
  assert ''.join(chunks) == text + '\ufffd'
  assert len(chunks) > 4
  assert all(len(c) <= 16 for c in chunks)
  assert chunks[0].endswith('\n')


def test_cache_errors(tmp_path):
  write(tmp_path, {'a': 'abc', 'not_a_dir': 'x'})
  files = corpus.list_files(f'{tmp_path}/a')
  with pytest.raises(errors.UserError, match='cannot hold the token cache'):
    corpus.open_cache(files, Words(), str(tmp_path / 'not_a_dir'))

  class Nothing(Words):
    def encode(self, text):
      return []

  with pytest.raises(errors.UserError, match='no token at all'):
    corpus.open_cache(files, Nothing(), str(tmp_path / 'cache'))
  gone = [
    corpus.TextFile(name='g', path=str(tmp_path / 'g'), size=1, mtime_ns=0)
  ]
  with pytest.raises(errors.UserError, match='cannot be read'):
    corpus.open_cache(gone, Words(), str(tmp_path / 'cache'))
  with pytest.raises(errors.UserError, match='cannot be read'):
    corpus.ByteStream(gone).read(0, 1)
