"""Text files: listing them, holding some out, and reading their contents.

A document is a file. Files are ordered by their relative names, so that the
stream of tokens, and thus every batch, is the same wherever the directory is
mounted.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import hashlib
import os
import sysconfig

import numpy as np

from mod_jax import errors, paths

_SKIPPED_DIRS = frozenset(('site-packages', 'dist-packages', '__pycache__'))
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFile:
  """A file with its size and modification time when it was listed."""

  name: str  # Relative to the root of the search, with '/'.
  path: str
  size: int
  mtime_ns: int


def list_files(patterns: str, field: str = 'files') -> list[TextFile]:
  """Returns the non-empty files that match globs, sorted by relative name.

  Names are relative to the directory of each glob before its first wildcard or
  brace. `field` names the globs in messages.
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
      # Keep one name of each file: a file with two names (links) would appear
      # twice, possibly once for training and once held out.
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
  """Returns the Python standard library's source files on this machine."""
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
  files: Sequence[TextFile], others: Sequence[TextFile] | None = None
) -> list[TextFile]:
  """Returns the files whose content no file of `others` has.

  If `others` is None, of files with equal content the first one is returned.
  Only files of equal size are read.
  """
  sizes = collections.Counter(f.size for f in (*files, *(others or ())))

  def content(f: TextFile):
    return f.size, whole_hash(f.path) if sizes[f.size] > 1 else ''

  seen = set(map(content, others or ()))
  kept = []
  for f in files:
    if (found := content(f)) not in seen:
      kept.append(f)
      if others is None:
        seen.add(found)
  return kept


def whole_hash(path: str) -> str:
  """Returns the SHA-256 of a file."""
  try:
    with open(path, 'rb') as file:
      return hashlib.file_digest(file, 'sha256').hexdigest()
  except OSError as e:
    raise cannot_read(path, e) from e


def cannot_read(path: str, error: OSError) -> errors.UserError:
  """Returns the error for a file that cannot be read."""
  return errors.UserError(
    f'{path!r} cannot be read: {error.strerror}; check its permissions, '
    'restore it, or leave it out of the data'
  )


def listing_digest(files: Sequence[TextFile], salt: str = '') -> str:
  """Returns a hash of `salt` and of the fields of each `TextFile`."""
  listing = hashlib.sha256(salt.encode())
  for f in files:
    for part in (f.path, f.name, str(f.size), str(f.mtime_ns)):
      listing.update(os.fsencode(part) + b'\0')
  return listing.hexdigest()


def chunks(path: str) -> Iterator[bytes]:
  """Yields a file's content in pieces, up to about 2 MiB, that end with a line.

  Pieces of a longer line end with a character of UTF-8.
  """
  try:
    with open(path, 'rb') as f:
      while chunk := f.read(_CHUNK):
        chunk += f.readline(_CHUNK)
        for _ in range(3):  # A character has at most 3 continuation bytes.
          if f.peek(1)[:1] and 0x80 <= f.peek(1)[0] < 0xC0:
            chunk += f.read(1)
        yield chunk
  except OSError as e:
    raise cannot_read(path, e) from e
