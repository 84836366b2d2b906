"""Caches pictures, decoded and resized, for later epochs.

The key of a picture has all that its pixels depend on: for a file, the path,
size and time of modification, so that a changed file is decoded anew. On disk,
each picture is a file with a checksum that is renamed when complete, so that
any number of processes and runs can share a directory.
"""

from collections.abc import Callable, Hashable
import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
import struct
import threading
from typing import Literal
import uuid
import zlib

from PIL import Image
from PIL import __version__ as pillow_version

from mod_jax import errors
from mod_jax.data import common

Kind = Literal['memory', 'disk', 'none']

MEMORY = 2 * 2**30  # Bytes for the pictures of one owner.
_FREE = 0.1  # Part of the disk that is left free.
_HEADER = struct.Struct('<III')  # Width, height, and CRC-32 of the pixels.
_VERSION = 1  # Version of the header and of the functions that fit pictures.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
  """Returns fitted pictures; decodes and fits those that are not kept yet."""

  fit: functools.partial  # Resizes a decoded picture before it is kept.
  kind: Kind
  directory: str = ''  # For 'disk'; created if missing.
  owner: Hashable = None  # For 'memory', which serves the last two owners.
  processes: int = 1  # Number of processes that share `MEMORY`.

  def __post_init__(self):
    if self.kind == 'disk':
      try:
        os.makedirs(self.directory, exist_ok=True)
      except OSError as e:
        raise errors.UserError(
          f'cache_dir={self.directory!r} cannot hold pictures ({e.strerror}): '
          "choose another, or cache='memory'"
        ) from e

  def load(
    self, key: Hashable, decode: Callable[[], Image.Image]
  ) -> Image.Image:
    """Returns a fitted picture, and keeps it for later unless `key` is None."""
    if key is None or self.kind == 'none':
      return self.fit(decode())
    about = (_VERSION, pillow_version, self.fit.func.__name__)
    about += (self.fit.keywords, key)
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:40]
    if self.kind == 'disk':
      store = _Disk(self.directory)
    else:
      store = _memory(self.owner, MEMORY // self.processes)
    if (image := _unpack(store.get(name))) is None:
      image = self.fit(decode())
      pixels = image.tobytes()
      header = _HEADER.pack(*image.size, zlib.crc32(pixels))
      store.put(name, header + pixels)
    return image


def _unpack(data: bytes) -> Image.Image | None:
  """Returns an RGB image, or None if the data are missing or damaged."""
  if len(data) > _HEADER.size:
    width, height, checksum = _HEADER.unpack_from(data)
    pixels = data[_HEADER.size :]
    if len(pixels) == 3 * width * height and zlib.crc32(pixels) == checksum:
      return Image.frombytes('RGB', (width, height), pixels)
  return None


class _Memory:
  """Keeps the first pictures that it is given, up to `limit` bytes in all."""

  def __init__(self, limit: int):
    self._free, self._kept, self._lock = limit, {}, threading.Lock()

  def get(self, name: str) -> bytes:
    return self._kept.get(name, b'')

  def put(self, name: str, data: bytes) -> None:
    # Nothing is replaced: each picture is used once an epoch, so the least
    # recently used one is often the next.
    with self._lock:
      if name not in self._kept and len(data) <= self._free:
        self._kept[name] = data
        self._free -= len(data)


@functools.lru_cache(maxsize=2)  # One for training, one for held-out pictures.
def _memory(owner: Hashable, limit: int) -> _Memory:
  return _Memory(limit)


class _Disk:
  """Keeps each picture in a file, as long as `_FREE` of the disk is free."""

  def __init__(self, directory: str):
    self._directory = directory

  def get(self, name: str) -> bytes:
    with contextlib.suppress(OSError), open(self._path(name), 'rb') as file:
      return file.read()
    return b''

  def put(self, name: str, data: bytes) -> None:
    path = self._path(name)
    partial = f'{path}.{uuid.uuid4().hex}'
    try:
      disk = shutil.disk_usage(self._directory)
      if disk.free < _FREE * disk.total:
        return _warn_full(f'less than {_FREE:.0%} of the disk is free')
      os.makedirs(os.path.dirname(path), exist_ok=True)
      with open(partial, 'wb') as file:
        file.write(data)
      os.replace(partial, path)
    except OSError as e:
      with contextlib.suppress(OSError):
        os.unlink(partial)
      _warn_full(e.strerror)

  def _path(self, name: str) -> str:
    return os.path.join(self._directory, name[:2], name)


def _warn_full(reason: str) -> None:
  common.warn_once(f'No more pictures are kept in cache_dir: {reason}')
