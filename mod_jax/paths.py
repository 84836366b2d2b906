"""Paths of runs: on this machine, or in an object store (`gs://…`).

etils.epath, which Orbax uses as well, handles both. An object store has no
directories, no renaming and no appending, and an object becomes visible when
its writer closes it.
"""

from collections.abc import Callable, Iterator
import contextlib
import glob as glob_lib
import itertools
import json
import os
import pathlib
import re
from typing import Any
import uuid

from etils import epath
import fsspec

from mod_jax import config as config_lib
from mod_jax.errors import UserError

# Innermost braces that have a comma in them.
_BRACES = re.compile(r'\{([^{}]*,[^{}]*)\}')
# `**`, or several in a row, which match any number of directories.
_CROSSING = re.compile(r'(?:\A|(?<=/))(?:\*\*/+)*\*\*(?:/+|\Z)')
# Stores to which Orbax can write. Others may be mounted as file systems.
_STORES = ('gs://',)
# A path that may be a name on the Hugging Face Hub.
_HUB = re.compile(r'[\w-][\w.-]*/[\w.-]+')


def expand(path) -> epath.Path:
  """Returns a path with `~` expanded; refuses URLs that cannot be read."""
  text = os.fspath(path)
  if '://' in text and not text.startswith(_STORES):
    raise UserError(
      f'{text}: runs live in directories or in {", ".join(_STORES)} (with'
      ' gcsfs installed); mount other stores as a file system.'
    )
  if is_remote(text):
    try:
      fsspec.get_filesystem_class('gs')
    except ImportError as error:
      raise UserError(
        f'{text} is in a bucket, which needs packages that are not installed:'
        ' pip install gcsfs google-cloud-storage google-cloud-storage-control.'
      ) from error
  return epath.Path(text).expanduser()


def absolute(path) -> epath.Path:
  """Returns an absolute path, with `~` expanded."""
  path = expand(path)
  return path if is_remote(path) else path.absolute()


def missing(path, field='', *, on_hub=False) -> UserError:
  """Returns the error for a missing path.

  Args:
    path: the path.
    field: the config's field that names it, if there is one.
    on_hub: whether it is that of a model, which the Hugging Face Hub may have.
  """
  name, folder = os.fspath(path), expand(path)
  parent_exists = folder.parent.is_dir()
  siblings = folder.parent.iterdir() if parent_exists else ()
  if near := config_lib.nearest(folder, siblings, os.path.basename):
    way_out = f'.{near}'
  elif not on_hub:
    way_out = ': give the path of one that is.'
  else:
    named = _HUB.fullmatch(name) and not parent_exists
    hub = name if named else 'OWNER/NAME'
    local = hub.rpartition('/')[2]
    use = f'`--config.{field}={local}`' if field else f'give {local!r}'
    way_out = f'. Try `hf download {hub} --local-dir {local}`, then {use}.'
  where = f'{field}={name}' if field else name
  return UserError(
    f'{where}: no such file or folder here, and nothing is downloaded{way_out}'
  )


def is_remote(path) -> bool:
  """Whether a path is in an object store."""
  return os.fspath(path).startswith(_STORES)


def require_local(path: str, field: str) -> None:
  """Raises UserError if a field that needs a local path holds a URL."""
  if '://' in path:
    raise UserError(
      f'{field}={path!r} is a URL, and files are read from file systems: mount'
      ' the store, or copy them here.'
    )


def split_globs(text: str) -> list[str]:
  """Splits a text of globs at commas.

  Commas within braces or brackets do not separate. A text that matches files as
  a whole is a single glob, since file names may hold commas; in a list of
  several globs, such a comma is written `[,]`.
  """
  parts = config_lib.split(text, '{[}]')
  if parts != [text] and glob(text):
    return [text]
  return [part.strip() for part in parts]


def is_glob(path: str) -> bool:
  """Whether a path has wildcards or alternatives that `glob` expands."""
  return glob_lib.has_magic(path) or bool(_BRACES.search(path))


def glob(pattern: str) -> list[str]:
  """Returns the paths that a glob matches, without duplicates, in no order.

  It works as `glob.glob`, except that `**` crosses directories, visiting each
  once even if links form cycles, and `{jpg,png}` matches either, as in a shell.
  """
  pattern = os.path.expanduser(pattern)
  if matches := _crossing_glob(pattern):
    return matches  # Braces may be part of a file name.
  braces = _BRACES.search(pattern)
  if not braces:
    return []
  before, after = pattern[: braces.start()], pattern[braces.end() :]
  matches = [glob(before + choice + after) for choice in braces[1].split(',')]
  return list(dict.fromkeys(itertools.chain(*matches)))


def _crossing_glob(pattern: str) -> list[str]:
  crossing = _CROSSING.search(pattern)
  if not crossing:
    return glob_lib.glob(pattern)
  before, after = pattern[: crossing.start()], pattern[crossing.end() :]
  matches = [
    path
    for top in (glob_lib.glob(before) if before else [''])
    for folder in _folders(top)
    for path in _crossing_glob(glob_lib.escape(folder) + (after or '*'))
  ]
  return list(dict.fromkeys(matches))


def _folders(top: str) -> Iterator[str]:
  """Yields a folder and the visible folders below it, each ending with `/`."""
  real = pathlib.Path(os.path.realpath(top))
  for folder, _ in walk(top or os.curdir, {real, *real.parents}):
    yield os.path.join(folder, '') if top else f'{folder}/'[2:]


def walk(
  top: str,
  seen: set[pathlib.Path],
  repeated: Callable[[str, pathlib.Path], None] = lambda path, real: None,
) -> Iterator[tuple[str, list[str]]]:
  """Yields (path, names of files) of a folder and of visible ones below it.

  Links are followed, but each folder is entered only once: folders whose real
  path is in `seen` are left out, and the real paths of entered folders are
  added to `seen`. `repeated(path, real_path)` is called for each one left out.
  """
  for folder, inner, files in os.walk(top, followlinks=True):
    children = sorted(name for name in inner if not name.startswith('.'))
    inner.clear()
    for child in children:
      path = os.path.join(folder, child)
      real = pathlib.Path(os.path.realpath(path))
      if real in seen:
        repeated(path, real)
      else:
        seen.add(real)
        inner.append(child)
    yield folder, files


def read_object(path) -> dict[str, Any]:
  """Returns the object in a JSON file; {} if no object can be read."""
  fields = {}
  with contextlib.suppress(OSError, ValueError, RecursionError):
    fields = json.loads(expand(path).read_text('utf-8'))
  return fields if isinstance(fields, dict) else {}


def write_bytes(path, data: bytes) -> None:
  """Writes a file atomically; creates missing directories."""
  path = expand(path)
  if is_remote(path):
    path.write_bytes(data)
    return
  with replacing(path) as file:
    file.write(data)


@contextlib.contextmanager
def replacing(path):
  """Context manager: yields a binary file, which in the end replaces `path`.

  If its body fails, the file at `path` is unchanged. Missing directories are
  created.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # The partial file is in the same directory, so that a rename replaces the
  # final one. Unlike tempfile, `open` sets permissions by the umask.
  partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.tmp')
  try:
    with open(partial, 'wb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(partial)
    raise
