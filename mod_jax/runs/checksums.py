"""The manifest of a checkpoint: size and SHA-256 of every file of its items.

When saving, each host hashes the files that it wrote itself; when checking,
each host hashes an equal share of all files.
"""

from concurrent import futures
import hashlib
import json

import jax

MANIFEST = 'manifest.json'
# The directory of the arrays that a process wrote, as Orbax names it.
_OWN_FILES = 'ocdbt.process_{}'
_OWN_DIGESTS = 'sha256.process_{}.json'  # The manifest replaces these files.


def hash_own_files(item) -> None:
  """Writes the digests of this process's files into the item's directory."""
  directory = item / _OWN_FILES.format(jax.process_index())
  names = _files(directory) if directory.exists() else []
  path = item / _OWN_DIGESTS.format(jax.process_index())
  path.write_text(json.dumps(_digests(item, names)))


def write(checkpoint, item: str) -> None:
  """Writes a checkpoint's manifest; call on one host.

  All hosts must have called `hash_own_files` for the item of this name. Deletes
  the digests that these calls wrote.
  """
  manifest = {}
  for i in range(jax.process_count()):
    path = checkpoint / item / _OWN_DIGESTS.format(i)
    for name, digest in json.loads(path.read_text()).items():
      manifest[f'{item}/{name}'] = digest
    path.unlink()
  rest = [name for name in _item_files(checkpoint) if name not in manifest]
  manifest |= _digests(checkpoint, rest)
  text = json.dumps(manifest, indent=1, sort_keys=True)
  (checkpoint / MANIFEST).write_text(text)


def damage(directory) -> str | None:
  """Returns a message about the first damage that this host finds, or None.

  Each host compares the list of all files with the manifest, and the checksums
  of its own share of the files. Raises OSError if the files cannot be read.
  """
  try:
    manifest = dict(json.loads((directory / MANIFEST).read_text()))
  except (FileNotFoundError, NotADirectoryError):
    return f'its {MANIFEST} is missing, so nothing vouches for it'
  except (ValueError, TypeError, RecursionError):
    return f'{MANIFEST} is damaged'
  present = set(_item_files(directory))
  for name in sorted(manifest.keys() ^ present):
    return f'{name} is ' + (
      f'not in {MANIFEST}' if name in present else 'missing'
    )
  share = sorted(manifest)[jax.process_index() :: jax.process_count()]
  for name, digest in _digests(directory, share).items():
    if digest != manifest[name]:
      return f'the checksum of {name} is wrong'
  return None


def _digests(directory, names) -> dict[str, dict]:
  """Returns size and SHA-256 of each file by name, as the manifest has them."""

  def digest(name):
    value, size = hashlib.sha256(), 0
    with (directory / name).open('rb') as file:
      while chunk := file.read(2**20):
        value.update(chunk)
        size += len(chunk)
    return {'bytes': size, 'sha256': value.hexdigest()}

  with futures.ThreadPoolExecutor(max_workers=8) as pool:
    return dict(zip(names, pool.map(digest, names), strict=True))


def _item_files(directory) -> list[str]:
  """Returns the paths of all files of a checkpoint's items.

  Files beside the items are left out: Orbax changes them at the commit.
  """
  items = [path for path in directory.iterdir() if path.is_dir()]
  return [name for item in items for name in _files(item)]


def _files(directory) -> list[str]:
  """Returns paths of all files below a directory, beginning with its name."""
  names = []
  for path in directory.iterdir():
    names += _files(path) if path.is_dir() else [path.name]
  return [f'{directory.name}/{name}' for name in names]
