"""The manifest of a checkpoint: size and SHA-256 of every file of its items.

Each host hashes the files that it wrote itself, and an equal part of all when
they are checked.
"""

from concurrent import futures
import hashlib
import json

import jax

MANIFEST = 'manifest.json'
# Orbax puts the arrays below a directory for each process that wrote them.
_OWN_FILES = 'ocdbt.process_{}'
_OWN_DIGESTS = 'sha256.process_{}.json'  # Until they stand in the manifest.


def hash_own_files(item) -> None:
  """Notes, in an item's directory, the digests of this process's files."""
  own = item / _OWN_FILES.format(jax.process_index())
  names = _files(own, f'{own.name}/') if own.exists() else []
  path = item / _OWN_DIGESTS.format(jax.process_index())
  path.write_text(json.dumps(_digests(item, names)))


def write(checkpoint, item: str) -> None:
  """Writes a checkpoint's manifest, on one host.

  Args:
    checkpoint: its directory, with all items.
    item: the name of the one of which the processes hashed their own files.
  """
  manifest = _own_digests(checkpoint / item)
  rest = [name for name in _item_files(checkpoint) if name not in manifest]
  manifest |= _digests(checkpoint, rest)
  (checkpoint / MANIFEST).write_text(
    json.dumps(
      {
        name: {'bytes': size, 'sha256': digest}
        for name, (size, digest) in sorted(manifest.items())
      },
      indent=1,
    )
  )


def damage(directory) -> str | None:
  """Says what is wrong with this host's part of the files, or returns None.

  Raises:
    OSError: they cannot be read.
  """
  try:
    manifest = {
      name: (int(entry['bytes']), str(entry['sha256']))
      for name, entry in json.loads((directory / MANIFEST).read_text()).items()
    }
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return f'{MANIFEST} is damaged'
  present = set(_item_files(directory))
  for name in manifest:
    if name not in present:
      return f'{name} is missing'
  for name in sorted(present):
    if name not in manifest:
      return f'{name} is not in {MANIFEST}'
  mine = sorted(manifest)[jax.process_index() :: jax.process_count()]
  for name, (size, digest) in _digests(directory, mine).items():
    if size != manifest[name][0]:
      return f'{name} has {size} bytes instead of {manifest[name][0]}'
    if digest != manifest[name][1]:
      return f'the checksum of {name} is wrong'
  return None


def _own_digests(state) -> dict[str, tuple[int, str]]:
  """Collects, and takes away, what each process noted of its own files."""
  found = {}
  for i in range(jax.process_count()):
    path = state / _OWN_DIGESTS.format(i)
    for name, entry in json.loads(path.read_text()).items():
      found[f'{state.name}/{name}'] = tuple(entry)
    path.unlink()
  return found


def _digests(directory, names) -> dict[str, tuple[int, str]]:
  """Returns the size and the SHA-256 of each file."""

  def digest(name):
    value, size = hashlib.sha256(), 0
    with (directory / name).open('rb') as file:
      while chunk := file.read(2**20):
        value.update(chunk)
        size += len(chunk)
    return size, value.hexdigest()

  with futures.ThreadPoolExecutor(max_workers=8) as pool:
    return dict(zip(names, pool.map(digest, names), strict=True))


def _item_files(directory) -> list[str]:
  """Returns the paths of all files of a checkpoint's items.

  Files beside the items are left out: Orbax still changes them at the commit.
  """
  return [
    name
    for item in sorted(directory.iterdir())
    if item.is_dir()
    for name in _files(item, f'{item.name}/')
  ]


def _files(directory, prefix) -> list[str]:
  """Returns the paths of all files below a directory, in a fixed order."""
  names = []
  for path in sorted(directory.iterdir()):
    if path.is_dir():
      names += _files(path, f'{prefix}{path.name}/')
    else:
      names.append(f'{prefix}{path.name}')
  return names
