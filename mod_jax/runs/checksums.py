"""The manifest of a checkpoint: size and SHA-256 of every file of its items.

When saving, each host hashes the files that it wrote itself; when checking,
each hashes an equal share of all files.
"""

from concurrent import futures
import hashlib
import json

import jax

MANIFEST = 'manifest.json'
# The directory of the arrays that a process wrote, as Orbax names it.
_OWN_FILES = 'ocdbt.process_{}'
_OWN_DIGESTS = 'sha256.process_{}.json'  # Until the manifest is written.


def hash_own_files(item) -> None:
  """Writes the digests of this process's files into the item's directory."""
  directory = item / _OWN_FILES.format(jax.process_index())
  names = _files(directory, f'{directory.name}/') if directory.exists() else []
  path = item / _OWN_DIGESTS.format(jax.process_index())
  path.write_text(json.dumps(_digests(item, names)))


def write(checkpoint, item: str) -> None:
  """Writes a checkpoint's manifest, on one host.

  Args:
    checkpoint: its directory, with all items.
    item: name of the item for which `hash_own_files` was called.
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
  """Describes the damage in this host's share of the files; None if none.

  Raises:
    OSError: the files cannot be read.
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
  share = sorted(manifest)[jax.process_index() :: jax.process_count()]
  for name, (size, digest) in _digests(directory, share).items():
    if size != manifest[name][0]:
      return f'{name} has {size} bytes instead of {manifest[name][0]}'
    if digest != manifest[name][1]:
      return f'the checksum of {name} is wrong'
  return None


def _own_digests(state) -> dict[str, tuple[int, str]]:
  """Reads and deletes the digests that each process wrote for its files."""
  digests = {}
  for i in range(jax.process_count()):
    path = state / _OWN_DIGESTS.format(i)
    for name, entry in json.loads(path.read_text()).items():
      digests[f'{state.name}/{name}'] = tuple(entry)
    path.unlink()
  return digests


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

  Files beside the items are left out: Orbax changes them at the commit.
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
