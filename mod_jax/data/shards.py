"""Shards of tokens: made of documents once, and read by ranges.

A shard is a file of two NumPy arrays, one after the other. The first has the
tokens of whole documents, in the smallest unsigned type that holds every id;
`np.load(path, mmap_mode='r')` reads it. The second, int64, has the index of
each document's first token.
"""

import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import glob
import itertools
import os
import time
import weakref

from absl import logging
import numpy as np

from mod_jax import errors, paths
from mod_jax.data import corpus, tokenizers

_DTYPES = (np.uint8, np.uint16, np.uint32)
# The usual limit for a process is 1024 open files.
_MAX_OPEN = 128
# Seconds after which an unchanged temporary file has no writer any more.
_DEAD_S = 600


class Shard:
  """A shard, whose ranges any thread can read.

  It is not memory-mapped: if a mapped file is truncated, access kills the
  process by SIGBUS, whereas a short read can be reported.
  """

  def __init__(self, path: str):
    """Opens a shard; raises UserError if the file is not a complete shard."""
    self._path = path
    try:
      self._file = open(path, 'rb', buffering=0)  # noqa: SIM115
      weakref.finalize(self, self._file.close).atexit = False
      self.tokens, self._dtype, self._begin = self._header(_DTYPES)
      self._file.seek(self._begin + self.tokens * self._dtype.itemsize)
      self.documents, _, self._starts = self._header((np.int64,))
      size = os.fstat(self._file.fileno()).st_size
      if size != self._starts + 8 * self.documents:
        raise ValueError(f'size {size}')
    except OSError as e:
      raise corpus.cannot_read(path, e) from e
    except Exception as e:  # NumPy's parser of headers raises many types.
      raise errors.UserError(
        f'{path!r} is no whole shard of tokens: restore it, or prepare it again'
      ) from e

  def _header(self, dtypes) -> tuple[int, np.dtype, int]:
    """Returns size, dtype and offset of the array at the file's position."""
    if np.lib.format.read_magic(self._file) != (1, 0):
      raise ValueError('version')
    (size,), _, dtype = np.lib.format.read_array_header_1_0(self._file)
    if size < 0 or dtype not in dtypes:
      raise ValueError(f'{size} {dtype}')
    return size, dtype, self._file.tell()

  def read(self, begin: int, count: int) -> np.ndarray:
    """Returns tokens [begin, begin + count)."""
    offset = self._begin + begin * self._dtype.itemsize
    return self._read(offset, count, self._dtype)

  def starts(self) -> np.ndarray:
    """Returns the index of each document's first token."""
    return self._read(self._starts, self.documents, np.dtype(np.int64))

  def _read(self, offset, count, dtype):
    size = count * dtype.itemsize
    try:
      data = os.pread(self._file.fileno(), size, offset)
    except OSError as e:
      raise corpus.cannot_read(self._path, e) from e
    if len(data) < size:
      raise errors.UserError(
        f'{self._path!r} is shorter than when the run began; restore it or '
        'start a new run'
      )
    return np.frombuffer(data, dtype)


class Tokens:
  """The tokens of several shards, joined; a shard is opened when it is read."""

  def __init__(
    self,
    shards: Mapping[str, int],
    vocab_size: int,
    check: Callable[[], None] = lambda: None,
  ):
    """Takes the number of tokens of each shard, by path; opens none.

    `check` is called before each read; it should raise if a shard is damaged.
    """
    self._shards = tuple(shards.items())
    self._vocab_size = vocab_size
    self._check = check
    counts = np.fromiter(shards.values(), np.int64)
    self._begins = np.concatenate([[0], np.cumsum(counts)])
    self._open = functools.lru_cache(_MAX_OPEN)(
      functools.partial(_open, self._shards)
    )

  def __len__(self) -> int:
    return int(self._begins[-1])

  @functools.cached_property
  def starts(self) -> np.ndarray:
    """Index of each document's first token, int64 [documents], ascending."""
    numbers = range(len(self._shards))
    starts = [self._open(i).starts() + self._begins[i] for i in numbers]
    return np.concatenate(starts)

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns tokens [start, stop) as int32; refuses ids >= `vocab_size`."""
    self._check()
    first = int(np.searchsorted(self._begins, start, 'right')) - 1
    last = int(np.searchsorted(self._begins, stop, 'left'))
    parts = [np.zeros(0, np.int32)]
    for i in range(first, last):
      begin = max(start, int(self._begins[i]))
      count = min(stop, int(self._begins[i + 1])) - begin
      ids = self._open(i).read(begin - int(self._begins[i]), count)
      if ids.size and ids.max() >= self._vocab_size:
        raise errors.UserError(
          f'{self._shards[i][0]!r} is damaged: it holds the token {ids.max()}, '
          f'and its tokenizer has {self._vocab_size}; restore it from a copy, '
          'or delete it and make it again'
        )
      parts.append(ids.astype(np.int32))
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _open(shards: Sequence[tuple[str, int]], i: int) -> Shard:
  path, tokens = shards[i]
  shard = Shard(path)
  if shard.tokens != tokens:
    raise errors.UserError(
      f'{path!r} holds {shard.tokens} tokens, and its index says {tokens}: '
      'restore it, or prepare it again'
    )
  return shard


def open_or_write(
  path: str,
  documents: Iterable[Iterable[bytes]],
  tokenizer: tokenizers.Tokenizer,
  separator: Sequence[int] = (),
) -> Shard:
  """Opens the shard at a path; if there is no complete one, writes it first.

  Args:
    path: path of the shard, where the complete file appears in one step.
    documents: UTF-8 texts, each in pieces that are tokenised separately.
    tokenizer: its end token, if it has one, ends every document.
    separator: tokens that end each document if there is no end token.
  """
  if os.path.exists(path):
    try:
      return Shard(path)
    except errors.UserError as e:
      logging.warning('Writing a shard again: %s', e)
  dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
  end = separator if tokenizer.eos_id is None else [tokenizer.eos_id]
  starts, count = array.array('q'), 0

  def write_header():
    fields = {'descr': dtype.str, 'fortran_order': False, 'shape': (count,)}
    np.lib.format.write_array_header_1_0(out, fields)

  with paths.replacing(path) as out:
    write_header()
    for document in documents:
      start = count
      for ids in itertools.chain(map(tokenizer.encode_bytes, document), [end]):
        out.write(np.asarray(ids, dtype).tobytes())
        count += len(ids)
      if count > start:
        starts.append(start)
    np.lib.format.write_array(out, np.array(starts, np.int64))
    out.seek(0)
    write_header()  # Its size is the same: NumPy leaves space for the number.
  return Shard(path)


def open_cache(
  files: Sequence[corpus.TextFile],
  tokenizer: tokenizers.Tokenizer,
  cache_dir: str,
) -> Tokens:
  """Returns the tokens of files, tokenising them if they are not cached.

  The cache is keyed by the files' paths, names, sizes and modification times,
  and by the tokeniser. Several processes may build it at the same time.
  """
  key = corpus.listing_digest(files, tokenizer.fingerprint)
  path = os.path.join(cache_dir, f'{key[:32]}.npy')
  try:
    remove_leftovers(cache_dir, '*.npy')
    shard = open_or_write(path, _documents(files), tokenizer)
  except OSError as e:
    raise errors.UserError(
      f'cache_dir={cache_dir!r} cannot hold the token cache: {e.strerror}; '
      'choose a writable directory with enough space'
    ) from e
  if not shard.tokens:
    raise errors.UserError(
      f'the {len(files)} matching files hold no token at all; point the '
      'glob at files with text in them'
    )
  return Tokens({path: shard.tokens}, tokenizer.vocab_size)


def _documents(files: Sequence[corpus.TextFile]) -> Iterator[Iterator[bytes]]:
  """Yields the content of each file in pieces, and logs the progress."""
  done = reported = 0
  total = sum(f.size for f in files)
  for f in files:
    yield corpus.chunks(f.path)
    done += f.size
    if done - reported > 2**28:
      reported = done
      logging.info('Tokenised %.1f of %.1f GB.', done / 1e9, total / 1e9)


def remove_leftovers(folder: str, name: str) -> None:
  """Deletes a folder's partial files whose final names match the glob `name`.

  Interrupted writers left them.
  """
  partial = os.path.join(glob.escape(folder), f'.{name}.*.tmp')
  for leftover in glob.glob(partial):
    try:
      if time.time() - os.path.getmtime(leftover) > _DEAD_S:
        os.unlink(leftover)
    except FileNotFoundError:  # Another process deleted it.
      pass
