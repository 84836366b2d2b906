"""Paths of runs: on this machine, or in an object store (`gs://…`).

One library, etils.epath, knows both; it is what Orbax goes through, too. An
object store has no directories, no renaming and no appending, and an object
appears whole when its writer closes it.
"""

import contextlib
import os
import pathlib
import uuid

from etils import epath

from mod_jax.errors import UserError

# Where Orbax can write arrays. Others may be mounted as file systems.
_STORES = ('gs://',)


def expand(path) -> epath.Path:
  """Returns a path with `~` resolved, as a shell may not have done.

  Raises:
    UserError: a URL of a kind that runs cannot live in.
  """
  text = os.fspath(path)
  if '://' in text and not text.startswith(_STORES):
    raise UserError(
      f'{text}: runs live in directories or in {", ".join(_STORES)} (with'
      ' gcsfs installed); mount other stores as a file system.'
    )
  return epath.Path(text).expanduser()


def is_remote(path) -> bool:
  """Whether a path is of an object store."""
  return os.fspath(path).startswith(_STORES)


def require_local(path: str, field: str) -> None:
  """Raises UserError for a setting's URL where only local files are read."""
  if '://' in path:
    raise UserError(
      f'{field}={path!r} is a URL, and files are read from file systems: mount'
      ' the store, or copy them here.'
    )


def write_bytes(path, data: bytes) -> None:
  """Writes a file whole or not at all; makes missing directories."""
  path = expand(path)
  if is_remote(path):
    path.write_bytes(data)
    return
  with replacing(path) as file:
    file.write(data)


@contextlib.contextmanager
def replacing(path):
  """Opens a file of this machine that appears whole, or not at all.

  Args:
    path: of the file; missing directories are made.

  Yields:
    A binary file to write to. What was at the path stays if writing fails.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # In the same directory, so that the replacement is one rename; a plain open
  # leaves the permissions to the umask, as tempfile does not.
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
