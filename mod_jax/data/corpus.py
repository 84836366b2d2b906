"""Files as one long stream of tokens, read from disk on access.

A document is a file. Files are ordered by their relative names, so that the
stream, and thus every batch, is the same wherever the directory is mounted.
"""

import array
import codecs
import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import glob
import hashlib
import os
import struct
import sysconfig
import time
from typing import Any, BinaryIO, Protocol

from absl import logging
import numpy as np

from mod_jax import errors, paths
from mod_jax.data import tokenizers

_SKIPPED_DIRS = frozenset(('site-packages', 'dist-packages', '__pycache__'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFile:
  """A file with its size and modification time when it was listed.

  Attributes:
    name: path relative to the root of the search, '/' between the parts.
    path: where to open it.
    size: bytes.
    mtime_ns: time of the last modification, nanoseconds.
  """

  name: str
  path: str
  size: int
  mtime_ns: int


def list_files(patterns: str, field: str = 'files') -> list[TextFile]:
  """Returns the non-empty files that match, sorted by relative name.

  Args:
    patterns: globs separated by commas, in the syntax of `paths.split_globs`
      and `paths.glob`. Names are relative to the directory of each glob before
      its first wildcard or brace.
    field: name of the setting, for error messages.

  Raises:
    errors.UserError: a glob matches no file, or all that match are empty.
  """
  by_real_path = {}
  paths.require_local(patterns, field)
  for pattern in paths.split_globs(patterns):
    full = os.path.abspath(os.path.expanduser(pattern))
    root = full
    while root != os.path.dirname(root) and (
      paths.is_glob(root) or root == full
    ):
      root = os.path.dirname(root)
    matched = [p for p in paths.glob(full) if os.path.isfile(p)]
    if not matched:
      hint = (
        f'it is a directory, so write {os.path.join(pattern, "**", "*.txt")!r}'
        if os.path.isdir(full)
        else 'quote it on the command line and use ** to cross directories'
      )
      raise errors.UserError(f'{field}={pattern!r} matches no file: {hint}')
    for path in sorted(matched):
      # A file under two names (links) would appear twice, perhaps both in the
      # training and in the held-out files.
      file = text_file(path, _relative(path, root))
      by_real_path.setdefault(os.path.realpath(path), file)
  files = sorted_non_empty(by_real_path.values())
  if not files:
    raise errors.UserError(
      f'{field}={patterns!r} matches only empty files: point it at files with '
      'text in them'
    )
  return files


def list_stdlib() -> list[TextFile]:
  """Returns the Python standard library's source files on this machine.

  Raises:
    errors.UserError: this Python was installed without its sources.
  """
  root = sysconfig.get_paths()['stdlib']
  files = []
  for folder, subfolders, names in os.walk(root):
    subfolders[:] = sorted(d for d in subfolders if d not in _SKIPPED_DIRS)
    for name in names:
      path = os.path.join(folder, name)
      if name.endswith('.py') and os.path.isfile(path):
        files.append(text_file(path, _relative(path, root)))
  files = sorted_non_empty(files)
  if not files:
    raise errors.UserError(
      f"source='stdlib': no *.py files under {root!r}, this Python was "
      "installed without its sources; use source='files' with your own text"
    )
  return files


def _relative(path: str, root: str) -> str:
  return os.path.relpath(path, root).replace(os.sep, '/')


def text_file(path: str, name: str) -> TextFile:
  """Returns the file at a path with its present size and modification time."""
  stat = os.stat(path)
  return TextFile(
    name=name, path=path, size=stat.st_size, mtime_ns=stat.st_mtime_ns
  )


def sorted_non_empty(files: Iterable[TextFile]) -> list[TextFile]:
  """Returns the non-empty files, sorted by name."""
  return sorted(
    (f for f in files if f.size), key=lambda f: (os.fsencode(f.name), f.path)
  )


def draw(name: str | bytes) -> float:
  """Returns a hash of the name as a number in [0, 1)."""
  digest = hashlib.sha256(os.fsencode(name)).digest()
  return int.from_bytes(digest[:8], 'big') / 2**64


def hold_out(
  files: Sequence[TextFile], fraction: float
) -> tuple[list[TextFile], list[TextFile]]:
  """Splits whole files into (training, held-out) by a hash of their names.

  Adding or removing other files does not move a file to the other side, unless
  one side would be empty: of two or more files, at least one is on each side. A
  single file is for training.
  """
  draw_N = np.array([draw(f.name) for f in files])
  held_N = draw_N < fraction
  if len(files) and held_N.all():
    held_N[draw_N.argmax()] = False
  elif len(files) > 1 and not held_N.any():
    held_N[draw_N.argmin()] = True
  sides = [], []
  for file, held in zip(files, held_N, strict=True):
    sides[int(held)].append(file)
  return sides


def without_copies(
  train: Sequence[TextFile], held_out: Sequence[TextFile]
) -> list[TextFile]:
  """Returns the training files whose content is not also held out.

  Only files of equal size are read, and beyond the first 64 KiB only if those
  are equal.
  """
  by_size = collections.defaultdict(list)
  for f in held_out:
    by_size[f.size].append(f)
  same = _same_content()
  return [
    f for f in train if not any(same(f, g) for g in by_size.get(f.size, ()))
  ]


def distinct(files: Sequence[TextFile]) -> list[TextFile]:
  """Returns the files except copies of earlier ones.

  Only files of equal size are read, and beyond the first 64 KiB only if those
  are equal.
  """
  kept = collections.defaultdict(list)
  same = _same_content()
  for f in files:
    if not any(same(f, g) for g in kept[f.size]):
      kept[f.size].append(f)
  kept = {f for group in kept.values() for f in group}
  return [f for f in files if f in kept]


def _same_content() -> Callable[[TextFile, TextFile], bool]:
  """Returns a function that compares files of equal size by cached hashes."""
  digest = functools.cache(_digest)

  def same(f: TextFile, g: TextFile) -> bool:
    if os.path.realpath(f.path) == os.path.realpath(g.path):
      return True
    return digest(f, 2**16) == digest(g, 2**16) and (
      f.size <= 2**16 or digest(f, None) == digest(g, None)
    )

  return same


def _digest(f: TextFile, limit: int | None) -> bytes:
  try:
    with open(f.path, 'rb') as stream:
      if limit is not None:
        return hashlib.sha256(stream.read(limit)).digest()
      return hashlib.file_digest(stream, 'sha256').digest()
  except OSError as e:
    raise _cannot_read(f.path, e) from e


def _cannot_read(path: str, error: OSError) -> errors.UserError:
  return errors.UserError(
    f'{path!r} cannot be read: {error.strerror}; check its permissions or '
    'leave it out of the glob'
  )


class TokenStream(Protocol):
  """Tokens of all documents, one after another, with random access.

  Attributes:
    starts: int64 [documents], the index of each document's first token,
      strictly increasing from 0.
  """

  starts: np.ndarray

  def __len__(self) -> int:
    """Returns the number of tokens."""

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns tokens [start, stop) as int32."""


class _OpenFile:
  """A file to read ranges of, from any thread; closed when garbage-collected.

  Not memory-mapped: if a mapped file is truncated, access kills the process by
  SIGBUS, whereas a short read can be reported.
  """

  def __init__(self, path: str, size: int):
    """Opens a file of `size` bytes; raises UserError if that fails."""
    self._path = path
    self._size = size
    self._descriptor = -1  # For __del__, if opening fails.
    self._close = os.close  # `os` may be unloaded before __del__ at exit.
    try:
      self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
      raise _cannot_read(path, e) from e

  def __del__(self):
    """Closes the file; no thread can be reading it without a reference."""
    if self._descriptor >= 0:
      self._close(self._descriptor)

  def read(self, begin: int, count: int) -> bytes:
    """Returns bytes [begin, begin + count); UserError if there are fewer."""
    parts = []
    while count:
      try:
        part = os.pread(self._descriptor, count, begin)
      except OSError as e:
        raise _cannot_read(self._path, e) from e
      if not part:
        raise errors.UserError(
          f'{self._path!r} had {self._size} bytes when the run began and is '
          'shorter now; restore it or start a new run'
        )
      if len(part) == count and not parts:
        return part  # The usual case, without a copy.
      parts.append(part)
      begin += len(part)
      count -= len(part)
    return b''.join(parts)


class _Joined:
  """A stream that concatenates pieces, each opened on first access."""

  # The usual limit for a process is 1024 open files.
  MAX_OPEN = 128

  def __init__(self, lengths: Sequence[int], open_piece: Callable[[int], Any]):
    """Takes the pieces' lengths in tokens; `open_piece(i)` opens the i-th."""
    self._ends = np.cumsum(lengths, dtype=np.int64)
    self._begins = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])
    self._piece = functools.lru_cache(self.MAX_OPEN)(open_piece)

  def __len__(self) -> int:
    """Returns the number of tokens."""
    return int(self._ends[-1]) if len(self._ends) else 0

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns tokens [start, stop) as int32."""
    i = int(np.searchsorted(self._begins, start, side='right')) - 1
    parts, at = [np.zeros(0, np.int32)], start
    while at < stop:
      count = min(stop, int(self._ends[i])) - at
      if count:
        parts.append(self._read(i, at - int(self._begins[i]), count))
      at += count
      i += 1
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


class ByteStream(_Joined):
  """The bytes of files, concatenated."""

  def __init__(self, files: Sequence[TextFile]):
    """Takes the files in stream order; opens none."""
    self._files = files = tuple(files)
    super().__init__(
      [f.size for f in files], lambda i: _OpenFile(files[i].path, files[i].size)
    )
    self.starts = self._begins

  def __reduce__(self):
    """Pickles without the open files, for worker processes."""
    return type(self), (self._files,)

  def _read(self, i: int, begin: int, count: int) -> np.ndarray:
    data = self._piece(i).read(begin, count)
    return np.frombuffer(data, np.uint8).astype(np.int32)


# A token cache is a single file, so that one rename replaces all of it. Its
# parts: header, tokens (padded to a multiple of 8 bytes), document starts.
_MAGIC = b'MODJAXT1'
_HEADER = struct.Struct('<8sQQQ')  # magic, bytes per token, tokens, documents
_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # By bytes per token.
_CHUNK = 2**20


class CachedStream:
  """Tokens that were written by `write_cache`, read on access.

  Attributes:
    documents: number of documents.
  """

  def __init__(self, path: str, vocab_size: int):
    """Opens the cache at `path`, of tokens below `vocab_size`.

    Raises:
      ValueError: the file is not a complete token cache.
    """
    with open(path, 'rb') as f:
      head = f.read(_HEADER.size)
      if len(head) < _HEADER.size:
        raise ValueError(f'{path!r} is too short for a header')
      magic, width, tokens, documents = _HEADER.unpack(head)
      if magic != _MAGIC or width not in _DTYPES:
        raise ValueError(f'{path!r} is not a token cache')
      self._starts_at = _HEADER.size + _padded(tokens * width)
      size = self._starts_at + 8 * documents
      if os.fstat(f.fileno()).st_size != size:
        raise ValueError(f'{path!r} is incomplete')
    self.documents = documents
    self._path = path
    self._tokens = tokens
    self._vocab_size = vocab_size
    self._dtype = np.dtype(_DTYPES[width])
    self._file = _OpenFile(path, size)

  @functools.cached_property
  def starts(self) -> np.ndarray:
    """int64 [documents], index of each document's first token."""
    data = self._file.read(self._starts_at, 8 * self.documents)
    return np.frombuffer(data, np.int64)

  def __reduce__(self):
    """Pickles the path alone; a worker process opens the file again."""
    return type(self), (self._path, self._vocab_size)

  def __len__(self) -> int:
    """Returns the number of tokens."""
    return self._tokens

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns tokens [start, stop) as int32.

    Raises:
      errors.UserError: the file was truncated, or holds ids outside of the
        vocabulary.
    """
    width = self._dtype.itemsize
    data = self._file.read(_HEADER.size + start * width, (stop - start) * width)
    ids = np.frombuffer(data, self._dtype)
    if ids.size and ids.max() >= self._vocab_size:
      raise errors.UserError(
        f'{self._path!r} is damaged: it holds the token {ids.max()}, and its '
        f'tokenizer has {self._vocab_size}; restore it from a copy, or delete '
        'it and make it again'
      )
    return ids.astype(np.int32)


class ShardStream(_Joined):
  """The tokens of several caches, concatenated.

  `starts` are read on first access: only rows with segments need them.
  """

  def __init__(
    self,
    shards: Sequence[tuple[str, int]],
    vocab_size: int,
    check: Callable[[], None] = lambda: None,
  ):
    """Takes caches in stream order; opens none.

    Args:
      shards: (path, number of tokens) of each cache.
      vocab_size: all tokens must be smaller.
      check: called before each read; should raise if a cache is damaged.
    """
    self._shards, self._vocab_size = tuple(shards), vocab_size
    self._check = check
    super().__init__(
      [tokens for _, tokens in shards],
      functools.partial(_open_shard, self._shards, vocab_size),
    )

  def __reduce__(self):
    """Pickles the paths alone; a worker process opens the files again."""
    return type(self), (self._shards, self._vocab_size)

  @functools.cached_property
  def starts(self) -> np.ndarray:
    """int64 [documents], index of each document's first token."""
    return np.concatenate(
      [
        self._piece(i).starts + self._begins[i]
        for i in range(len(self._shards))
      ]
    )

  def _read(self, i: int, begin: int, count: int) -> np.ndarray:
    self._check()
    return self._piece(i).read(begin, begin + count)


def _open_shard(
  shards: Sequence[tuple[str, int]], vocab_size: int, i: int
) -> CachedStream:
  path, tokens = shards[i]
  try:
    stream = CachedStream(path, vocab_size)
  except OSError as e:
    raise _cannot_read(path, e) from e
  except ValueError as e:
    raise errors.UserError(f'{e}: restore it, or prepare it again') from e
  if len(stream) != tokens:
    raise errors.UserError(
      f'{path!r} holds {len(stream)} tokens, and its index says {tokens}: '
      'restore it, or prepare it again'
    )
  return stream


def listing_digest(files: Sequence[TextFile], salt: str = '') -> str:
  """Returns a hash of the files' paths, names, sizes and modification times.

  Args:
    files: in stream order.
    salt: anything else that the cached result depends on.
  """
  listing = hashlib.sha256(salt.encode())
  for f in files:
    for part in (f.path, f.name, str(f.size), str(f.mtime_ns)):
      listing.update(os.fsencode(part) + b'\0')
  return listing.hexdigest()


def _padded(size: int) -> int:
  return -(-size // 8) * 8


def open_cache(
  files: Sequence[TextFile], tokenizer: tokenizers.Tokenizer, cache_dir: str
) -> CachedStream:
  """Returns the tokens of `files`, tokenising them if they are not cached.

  The cache is keyed by the files' paths, names, sizes and modification times
  and by the tokeniser. It is written to a temporary file and renamed when
  complete, so that an interruption leaves no partial cache and two processes
  can build it at once. Every document ends with the tokeniser's end token, if
  it has one.

  Args:
    files: in stream order.
    tokenizer: a subword tokeniser.
    cache_dir: directory for caches; created if missing.

  Raises:
    errors.UserError: a file or the directory cannot be used, or the files
      hold no token.
  """
  key = listing_digest(files, tokenizer.fingerprint)
  path = os.path.join(cache_dir, f'{key[:32]}.tokens')
  try:
    return CachedStream(path, tokenizer.vocab_size)
  except FileNotFoundError:
    pass
  except (OSError, ValueError) as e:
    logging.warning('Building the token cache again: %s', e)
  try:
    os.makedirs(cache_dir, exist_ok=True)
    with replacing(path) as out:
      if not write_cache(out, _documents(files), tokenizer):
        raise errors.UserError(
          f'the {len(files)} matching files hold no token at all; point the '
          'glob at files with text in them'
        )
    return CachedStream(path, tokenizer.vocab_size)
  except OSError as e:
    raise errors.UserError(
      f'cache_dir={cache_dir!r} cannot hold the token cache: {e.strerror}; '
      'choose a writable directory with enough space'
    ) from e


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
  """Like `paths.replacing`, but first removes old temporary files of `path`."""
  folder, name = os.path.split(path)
  remove_leftovers(folder, glob.escape(name))
  with paths.replacing(path) as out:
    yield out


def remove_leftovers(folder: str, name: str, max_age_s: float = 24 * 3600):
  """Deletes temporary files that interrupted writers of `replacing` left.

  Args:
    folder: directory of the files.
    name: glob for the names of the final files.
    max_age_s: files modified more recently than this many seconds are kept,
      since they may still be being written.
  """
  partial = os.path.join(glob.escape(folder), f'.{name}.*.tmp')
  for leftover in glob.glob(partial):
    try:
      if time.time() - os.path.getmtime(leftover) > max_age_s:
        os.unlink(leftover)
    except FileNotFoundError:  # Another process deleted it.
      pass


def _documents(files: Sequence[TextFile]) -> Iterator[Iterator[str]]:
  """Yields the text of each file in pieces, and logs the progress."""
  done = reported = 0
  total = sum(f.size for f in files)
  for f in files:
    yield text_chunks(f.path)
    done += f.size
    if done - reported > 2**28:
      reported = done
      logging.info('Tokenised %.1f of %.1f GB.', done / 1e9, total / 1e9)


def write_cache(
  out: BinaryIO,
  documents: Iterable[Iterable[str]],
  tokenizer: tokenizers.Tokenizer,
  separator: Sequence[int] = (),
) -> int:
  """Writes a whole token cache; returns its number of tokens.

  Args:
    out: an empty file.
    documents: texts, each in pieces that are tokenised separately.
    tokenizer: its end token, if it has one, ends every document.
    separator: tokens that end each document if there is no end token.
  """
  dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
  if tokenizer.eos_id is not None:
    separator = [tokenizer.eos_id]
  end = np.array(separator, dtype)
  starts = array.array('q')
  count = 0
  out.write(bytes(_HEADER.size))
  for document in documents:
    start = count
    for text in document:
      ids = tokenizer.encode(text)
      out.write(np.array(ids, dtype).tobytes())
      count += len(ids)
    out.write(end.tobytes())
    count += len(end)
    if count > start:
      starts.append(start)
  out.write(bytes(_padded(count * dtype.itemsize) - count * dtype.itemsize))
  out.write(np.frombuffer(starts, np.int64).tobytes() if starts else b'')
  out.seek(0)
  out.write(_HEADER.pack(_MAGIC, dtype.itemsize, count, len(starts)))
  return count


def text_chunks(path: str) -> Iterator[str]:
  """Yields a file's text in pieces of 1 to 2 MiB that end at a line's end."""
  decoder = codecs.getincrementaldecoder('utf-8')('replace')
  try:
    with open(path, 'rb') as f:
      while chunk := f.read(_CHUNK):
        # Read to the end of the line, so that no subword is cut in two. The
        # limit is for files without line ends.
        yield decoder.decode(chunk + f.readline(_CHUNK))
  except OSError as e:
    raise _cannot_read(path, e) from e
  if tail := decoder.decode(b'', True):
    yield tail
