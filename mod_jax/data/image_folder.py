"""Folders of images, one subfolder per class, and decoding by Pillow.

A folder has either `train/CLASS/...` and `eval/CLASS/...` (or val, validation,
test), or `CLASS/...` directly. Without an evaluation folder, those files of a
class are held out whose names have the smallest hashes: at least one image, if
the class has two. Hidden files and files without an image's extension are
ignored. Images are not compared: of two copies under different names, one may
be held out and the other trained on, so remove copies first.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import os
import pathlib
from typing import Any

from absl import logging
import numpy as np
from PIL import Image, ImageOps

from mod_jax import config as config_lib
from mod_jax import errors, paths
from mod_jax.data import fingerprint as fingerprints

_EVAL_FOLDERS = ('eval', 'val', 'validation', 'test')
SPLITS = ('train', *_EVAL_FOLDERS)
_EXTENSIONS = frozenset(
  f'.{name}'
  for name in (
    *('jpg', 'jpeg', 'jpe', 'jfif', 'png', 'webp', 'bmp', 'gif'),
    *('tif', 'tiff', 'ppm', 'pgm', 'pbm', 'pnm'),
  )
)
# For security: some of Pillow's readers for other formats run programs.
_FORMATS = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'PPM')
MAX_PIXELS = 100_000_000  # Most pixels of an image; decoded, they take 300 MB.
_NAMED = 3  # Items that a message names; it only counts the rest.
_CHECK_THREADS = 16
_CHECK_CHUNK = 256


class UnreadableImageError(errors.UserError):
  """A UserError about an image that cannot be read or decoded."""


@dataclasses.dataclass(frozen=True)
class FolderImages:
  """Images of a folder, with random access."""

  root: str  # Directory to which the names are relative.
  class_names: tuple[str, ...]
  names: list[str]  # Paths with '/' between the parts.
  # Indices of `class_names`, int32 [files]; if a table has the labels, bool
  # [files, classes].
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.names)

  def fingerprint(self) -> dict[str, Any]:
    files = fingerprints.of_files(
      [(name, os.path.join(self.root, name)) for name in self.names]
    )
    if self.labels.ndim == 1:  # The names of the files hold the labels.
      return files
    return files | {
      'labels': fingerprints.of_value([*self.class_names, self.labels])
    }

  def name(self, index: int) -> str:
    """Returns a picture's path relative to the root."""
    return self.names[index]

  def entry(self, index: int) -> tuple[Any, Callable[[], Image.Image], Any]:
    """Returns the file's key, a function that decodes it, and its label."""
    path, key = os.path.join(self.root, self.names[index]), None
    # A missing file has no key; decoding it raises an error.
    with contextlib.suppress(OSError):
      status = os.stat(path)
      key = (os.fsencode(path), status.st_size, status.st_mtime_ns)
    decoding = functools.partial(decode, path, f'image {path!r}')
    return key, decoding, self.labels[index]


def decode(
  source: str | bytes, what: str, most: int = MAX_PIXELS
) -> Image.Image:
  """Returns an image as RGB, rotated as its EXIF data says.

  Animations give their first frame. Transparency is dropped; of 16-bit values
  the upper 8 bits are kept; floating-point values must lie between 0 and 1.
  `source` is a path or the bytes of a file, and `what` the image's name in an
  `UnreadableImageError`, such as "image 'a.png'". An image of more than `most`
  pixels is refused before it is decoded.
  """
  file = io.BytesIO(source) if isinstance(source, bytes) else source
  try:
    with Image.open(file, formats=_FORMATS) as image:
      _require_readable(image, most)
      image.load()
      return to_rgb(image)
  except MemoryError:
    raise
  except (FileNotFoundError, IsADirectoryError, PermissionError) as e:
    raise UnreadableImageError(
      f'{what} cannot be read ({e.strerror}): name a file with a picture'
    ) from e
  except Exception as e:
    # For damaged files, Pillow raises many types of exceptions.
    raise UnreadableImageError(
      f'{what} cannot be decoded ({_reason(e)}): repair, shrink or remove it'
    ) from e


def open_split(
  path: str, split: str, *, eval_fraction: float, unreadable: str
) -> FolderImages:
  """Returns the files of the split 'train' or 'eval'.

  Checks once per process that files are not empty and begin with a valid header
  of an image. For bad files, `unreadable` 'refuse' raises UserError, and 'skip'
  leaves them out. `eval_fraction` is held out if there is no evaluation folder.
  """
  root, eval_root, classes = _layout(path)
  if split == 'eval' and eval_root is not None:
    if unknown := sorted(set(_subfolders(eval_root)) - set(classes)):
      raise errors.UserError(
        f'path={path!r}: {eval_root!r} has {_some(unknown)}, which '
        f'{root!r} lacks: classes to evaluate must be among those trained on'
        + config_lib.nearest(unknown[0], classes)
      )
    names, labels = _list_images(eval_root, classes, unreadable)
    if not names:
      raise errors.UserError(
        f'path={path!r}: {eval_root!r} holds no pictures: add some, or remove '
        'the folder so that a part of the training pictures is held out'
      )
    return FolderImages(eval_root, classes, names, labels)
  names, labels = _list_images(root, classes, unreadable)
  counts = np.bincount(labels, minlength=len(classes))
  if empty := [c for c, n in zip(classes, counts, strict=True) if not n]:
    raise errors.UserError(
      f'path={path!r}: of {len(classes)} classes, {len(empty)} have no '
      f'pictures to train on ({_some(empty)}): add some or remove the folders'
    )
  if eval_root is not None:
    return FolderImages(root, classes, names, labels)
  is_held_out = held_out(names, labels, eval_fraction)
  if split == 'eval' and not is_held_out.any():
    raise errors.UserError(
      f'path={path!r} has one picture per class, so that none can be held out: '
      'add some, or a folder eval/'
    )
  chosen = np.flatnonzero(is_held_out if split == 'eval' else ~is_held_out)
  return FolderImages(root, classes, [names[i] for i in chosen], labels[chosen])


def _layout(path: str) -> tuple[str, str | None, tuple[str, ...]]:
  """Returns the training folder, the evaluation folder or None, and classes."""
  paths.require_local(path, 'path')
  root = os.path.abspath(os.path.expanduser(path))
  if not os.path.isdir(root):
    raise errors.UserError(
      f'path={path!r} is no directory: give one that holds train/ and eval/, '
      'or a folder per class'
    )
  train, eval_root = os.path.join(root, 'train'), None
  if os.path.isdir(train) and _subfolders(train):
    candidates = [os.path.join(root, name) for name in _EVAL_FOLDERS]
    root, eval_root = train, next(filter(os.path.isdir, candidates), None)
  classes = _subfolders(root)
  if classes and root != train and set(classes) <= set(SPLITS):
    raise errors.UserError(
      f'path={path!r} has {_some(classes)} but no train/ with a folder per '
      'class: add it, or give the folder of the classes itself'
    )
  if len(classes) < 2:
    raise errors.UserError(
      f'path={path!r}: expected a folder for each of two classes or more in '
      f'{root!r}, which has {_some(classes) or "none"}'
    )
  return root, eval_root, classes


def _subfolders(root: str) -> tuple[str, ...]:
  with os.scandir(root) as entries:
    names = (e.name for e in entries if e.is_dir())
    return tuple(sorted(name for name in names if not name.startswith('.')))


def _some(names, show=repr) -> str:
  shown = ', '.join(map(show, names[:_NAMED]))
  more = len(names) - _NAMED
  return f'{shown} and {more} more' if more > 0 else shown


@functools.lru_cache(maxsize=8)
def _list_images(
  root: str, classes: tuple[str, ...], unreadable: str
) -> tuple[list[str], np.ndarray]:
  """Returns names and labels of the readable files, in the order of classes.

  Cached, since every evaluation calls it and it can take a minute. Files that
  are damaged later are detected when they are decoded.
  """
  # Real paths of folders not to enter: through a link to a class, or to a
  # folder above it, pictures would count twice, possibly once as held out.
  seen = set()
  for folder in (root, *(os.path.join(root, name) for name in classes)):
    real = pathlib.Path(os.path.realpath(folder))
    seen |= {real, *real.parents}
  names, labels = [], []
  for label, name in enumerate(classes):
    files = sorted(_walk(root, name, seen))
    names += files
    labels += [label] * len(files)
  good, labels = readable(root, names, unreadable), np.array(labels, np.int32)
  return [names[i] for i in good], labels[good]


def readable(root: str, names: list[str], unreadable: str) -> np.ndarray:
  """Returns the indices of the files that begin with an image's header.

  Others raise UserError if `unreadable` is 'refuse', else log a warning.
  """
  chunks = itertools.batched(names, _CHECK_CHUNK)
  with futures.ThreadPoolExecutor(_CHECK_THREADS) as pool:
    faults = pool.map(
      lambda chunk: [_fault(os.path.join(root, n)) for n in chunk], chunks
    )
    faults = [*itertools.chain.from_iterable(faults)]
  bad = [f'{n} ({f})' for n, f in zip(names, faults, strict=True) if f]
  if not bad:
    return np.arange(len(names))
  report = (
    f'{len(bad)} of the {len(names)} files under {root!r} cannot be read as'
    f' pictures: {_some(bad, str)}'
  )
  if unreadable == 'refuse':
    raise errors.UserError(
      f"{report}; repair or remove them, or set unreadable='skip'"
    )
  logging.warning('%s; left out', report)
  return np.flatnonzero([not fault for fault in faults])


def _walk(root: str, name: str, seen: set[pathlib.Path]):
  """Yields the names of a class's images; adds entered folders to `seen`."""

  def left_out(path, real):
    logging.warning(
      '%r leads to %r, whose pictures are counted already; left out',
      *(path, str(real)),
    )

  for folder, files in paths.walk(os.path.join(root, name), seen, left_out):
    parts = os.path.relpath(folder, root).split(os.sep)
    for file in files:
      extension = os.path.splitext(file)[1].lower()
      if extension in _EXTENSIONS and not file.startswith('.'):
        yield '/'.join([*parts, file])


def _fault(path: str) -> str:
  """Returns what is wrong with the beginning of a file, or ''."""
  try:
    if not os.path.getsize(path):
      return 'empty'
    # This reads only the header.
    with Image.open(path, formats=_FORMATS) as image:
      _require_readable(image)
  except MemoryError:
    raise
  except Exception as e:
    return _reason(e)
  return ''


def _reason(error: Exception) -> str:
  if isinstance(error, Image.UnidentifiedImageError):
    return 'no picture in a format that is read here'
  # `strerror` lacks the path, which the message names already.
  text = getattr(error, 'strerror', None) or str(error) or type(error).__name__
  return ' '.join(text.split())[:100]


def held_out(names: list[str], labels: np.ndarray, fraction: float):
  """Returns a mask, bool [N]: about `fraction` of each class is held out.

  Adding or removing files affects the split of their own class only.
  """
  encoded = (name.encode('utf-8', 'surrogateescape') for name in names)
  hashes = (hashlib.blake2b(e, digest_size=8).digest() for e in encoded)
  draws = np.array([int.from_bytes(digest, 'big') for digest in hashes])
  chosen = np.zeros(len(names), bool)
  for label in np.unique(labels):
    indices = np.flatnonzero(labels == label)
    count = min(max(1, round(fraction * len(indices))), len(indices) - 1)
    chosen[indices[np.argsort(draws[indices])[:count]]] = True
  return chosen


def _require_readable(image: Image.Image, most: int = MAX_PIXELS) -> None:
  if image.width * image.height > most:
    raise ValueError(
      f'it has {image.width:,} x {image.height:,} pixels, and at most'
      f' {most:,} are read'
    )
  require_white(image)


def require_white(image: Image.Image) -> None:
  """Raises ValueError if nothing says which value is white."""
  # Integers of mode I are measurements, for example heights, which Pillow would
  # clip at 255. Among our formats, only PGM stores 16-bit images in mode I.
  if image.mode == 'I' and image.format != 'PPM':
    raise ValueError(
      'nothing says which of its 32-bit or signed integers is white: convert it'
      ' to 8 or 16 bits'
    )


def to_rgb(image: Image.Image) -> Image.Image:
  """Returns RGB as `decode` does; ValueError if floats are not in [0, 1]."""
  try:
    image = ImageOps.exif_transpose(image)
  except MemoryError:
    raise
  except Exception:
    pass  # The EXIF data are damaged; the pixels can still be read.
  # Keep the upper 8 bits; Pillow would clip at 255. Mode I is a 16-bit PGM.
  if image.mode == 'I' or image.mode.startswith('I;16'):
    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
  elif image.mode == 'F':
    values = np.asarray(image)
    # Written such that NaN is refused.
    if not (values.min() >= 0 and values.max() <= 1):
      raise ValueError(
        f'its floating-point values, {values.min():g} to {values.max():g}, go'
        ' beyond 0 to 1'
      )
    image = Image.fromarray(np.round(255 * values).astype(np.uint8))
  elif image.mode == 'P' and 'transparency' in image.info:
    image = image.convert('RGBA')
  return image.convert('RGB')
