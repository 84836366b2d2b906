"""Folders of images, one subfolder per class, and decoding by Pillow.

A folder has either `train/CLASS/...` and `eval/CLASS/...` (or val, validation,
test), or `CLASS/...` directly. In the latter case a part of each class is held
out, the files whose names have the smallest hashes; at least one image, if the
class has two or more. Hidden files and files without an image's extension are
ignored. Images are not compared: of two copies under different names, one may
be held out and the other trained on, so remove copies first.
"""

from concurrent import futures
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
_SPLIT_FOLDERS = ('train', *_EVAL_FOLDERS)
_EXTENSIONS = frozenset(
  (
    *('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.bmp', '.gif'),
    *('.tif', '.tiff', '.ppm', '.pgm', '.pbm', '.pnm'),
  )
)
# For security: some of Pillow's readers for other formats run programs.
_FORMATS = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'PPM')
MAX_PIXELS = 100_000_000  # Of one image; decoded, these take 300 MB.
_NAMED = 3  # Items that a message names; it only counts the rest.
_CHECK_THREADS = 16
_CHECK_CHUNK = 256


class UnreadableImageError(errors.UserError):
  """An image cannot be decoded."""


@dataclasses.dataclass(frozen=True)
class FolderImages:
  """Images of a folder, with random access.

  Attributes:
    root: directory that the names are relative to.
    class_names: sorted names of the class folders, indexed by labels.
    names: of the files, '/' between the parts.
    labels: int32 [files].
  """

  root: str
  class_names: tuple[str, ...]
  names: list[str]
  labels: np.ndarray

  def __len__(self) -> int:
    """Returns the number of files."""
    return len(self.names)

  def fingerprint(self) -> dict[str, Any]:
    """Returns a fingerprint of the files."""
    return fingerprints.of_files(
      [(name, os.path.join(self.root, name)) for name in self.names]
    )

  def load(self, index: int) -> tuple[Image.Image, int]:
    """Returns a decoded RGB image and its label.

    Raises:
      UnreadableImageError: the file cannot be decoded.
    """
    path = os.path.join(self.root, self.names[index])
    return decode(path, f'image {path!r}'), int(self.labels[index])


def decode(source: str | bytes, what: str) -> Image.Image:
  """Returns an image as RGB, rotated as its EXIF data says.

  Animations give their first frame. Transparency is dropped; of 16-bit values
  the upper 8 bits are kept; floating-point values must lie between 0 and 1.

  Args:
    source: a path, or the bytes of a file.
    what: the image's name in errors, such as "image 'a.png'".

  Raises:
    UnreadableImageError: the image cannot be decoded, or it has a mode without
      a defined value for white.
  """
  file = io.BytesIO(source) if isinstance(source, bytes) else source
  try:
    with Image.open(file, formats=_FORMATS) as image:
      if reason := _refused(image):
        raise ValueError(reason)
      image.load()
      return to_rgb(_upright(image))
  except MemoryError:
    raise
  except Exception as e:
    # For damaged files, Pillow raises many types of exceptions.
    raise UnreadableImageError(
      f'{what} cannot be decoded ({_reason(e)}): repair or remove it'
    ) from e


def class_names(path: str) -> tuple[str, ...]:
  """Returns the sorted names of the class folders; opens no file.

  Raises:
    errors.UserError: there is no such directory, or fewer than two classes.
  """
  root, _ = _layout(path)
  return _class_folders(path, root)


def open_split(
  path: str, split: str, *, eval_fraction: float, unreadable: str
) -> FolderImages:
  """Returns the files for training or evaluation.

  Checks once per process that files are not empty and begin with a valid header
  of an image.

  Args:
    path: the folder, with a layout as described at the top of this module.
    split: 'train' or 'eval'.
    eval_fraction: part to hold out if the folder has no evaluation split.
    unreadable: 'refuse' raises for bad files; 'skip' leaves them out with a
      warning.

  Raises:
    errors.UserError: there is no such directory, fewer than two classes, a
      class without training images, an evaluation class without a training
      class, nothing to evaluate, or bad files.
  """
  root, eval_root = _layout(path)
  classes = _class_folders(path, root)
  if split == 'eval' and eval_root is not None:
    eval_classes = _subfolders(eval_root)
    if unknown := sorted(set(eval_classes) - set(classes)):
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
  if not counts.all():
    empty = [c for c, n in zip(classes, counts, strict=True) if not n]
    raise errors.UserError(
      f'path={path!r}: of {len(classes)} classes, {len(empty)} have no '
      f'pictures to train on ({_some(empty)}): add some or remove the folders'
    )
  if eval_root is not None:
    return FolderImages(root, classes, names, labels)
  held_out = _held_out(names, labels, eval_fraction)
  if split == 'eval' and not held_out.any():
    raise errors.UserError(
      f'path={path!r} has one picture per class, so that none can be held out: '
      'add some, or a folder eval/'
    )
  chosen = np.flatnonzero(held_out if split == 'eval' else ~held_out)
  return FolderImages(root, classes, [names[i] for i in chosen], labels[chosen])


def _layout(path: str) -> tuple[str, str | None]:
  """Returns the folders of the training and, if any, evaluation classes."""
  paths.require_local(path, 'path')
  root = os.path.abspath(os.path.expanduser(path))
  if not os.path.isdir(root):
    raise errors.UserError(
      f'path={path!r} is no directory: give one that holds train/ and eval/, '
      'or a folder per class'
    )
  train = os.path.join(root, 'train')
  if os.path.isdir(train) and _subfolders(train):
    for name in _EVAL_FOLDERS:
      if os.path.isdir(os.path.join(root, name)):
        return train, os.path.join(root, name)
    return train, None
  folders = _subfolders(root)
  if folders and set(folders) <= set(_SPLIT_FOLDERS):
    raise errors.UserError(
      f'path={path!r} has {_some(folders)} but no train/ with a folder per '
      'class: add it, or give the folder of the classes itself'
    )
  return root, None


def _subfolders(root: str) -> tuple[str, ...]:
  with os.scandir(root) as entries:
    return tuple(
      sorted(
        e.name for e in entries if e.is_dir() and not e.name.startswith('.')
      )
    )


def _class_folders(path: str, root: str) -> tuple[str, ...]:
  classes = _subfolders(root)
  if not classes:
    raise errors.UserError(
      f'path={path!r}: {root!r} has no folders: expected one per class'
    )
  if len(classes) == 1:
    raise errors.UserError(
      f'path={path!r} has a single class, {classes[0]!r}, and there is nothing '
      'to tell apart: expected a folder for each of at least two'
    )
  return classes


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
  names, labels = [], []
  seen = set()
  for folder in (root, *(os.path.join(root, name) for name in classes)):
    real = pathlib.Path(os.path.realpath(folder))
    seen |= {real, *real.parents}
  for label, name in enumerate(classes):
    files = sorted(_walk(os.path.join(root, name), name, seen))
    names += files
    labels += [label] * len(files)
  chunks = itertools.batched(names, _CHECK_CHUNK)
  with futures.ThreadPoolExecutor(_CHECK_THREADS) as pool:
    faults = pool.map(
      lambda c: [_fault(os.path.join(root, n)) for n in c], chunks
    )
    faults = [*itertools.chain.from_iterable(faults)]
  bad = [f'{n} ({f})' for n, f in zip(names, faults, strict=True) if f]
  labels = np.array(labels, np.int32)
  if not bad:
    return names, labels
  report = (
    f'{len(bad)} of the {len(names)} files under {root!r} cannot be read as'
    f' pictures: {_some(bad, str)}'
  )
  if unreadable == 'refuse':
    raise errors.UserError(
      f"{report}; repair or remove them, or set unreadable='skip'"
    )
  logging.warning('%s; left out', report)
  good = np.array([not fault for fault in faults])
  return [names[i] for i in np.flatnonzero(good)], labels[good]


def _walk(directory: str, name: str, seen: set[pathlib.Path]):
  """Yields the names of images below a directory, '/' between the parts.

  Args:
    directory: of a class.
    name: of the class.
    seen: real paths of directories not to descend into; those that are visited
      are added. Otherwise links to a class or its parent would duplicate
      images, of which some would be held out and others trained on.
  """
  if not os.path.isdir(directory):
    return

  def left_out(path, real):
    logging.warning(
      '%r leads to %r, whose pictures are counted already; left out',
      *(path, str(real)),
    )

  for folder, files in paths.walk(directory, seen, left_out):
    relative = os.path.relpath(folder, directory)
    parts = [] if relative == os.curdir else relative.split(os.sep)
    for file in files:
      extension = os.path.splitext(file)[1].lower()
      if extension in _EXTENSIONS and not file.startswith('.'):
        yield '/'.join([name, *parts, file])


def _fault(path: str) -> str:
  """Returns what is wrong with the beginning of a file, or ''."""
  try:
    if not os.path.getsize(path):
      return 'empty'
    # This reads only the header.
    with Image.open(path, formats=_FORMATS) as image:
      return _refused(image)
  except MemoryError:
    raise
  except Exception as e:
    return _reason(e)


def _reason(error: Exception) -> str:
  if isinstance(error, Image.UnidentifiedImageError):
    return 'no picture in a format that is read here'
  # `strerror` without the path, which the message names already.
  text = getattr(error, 'strerror', None) or str(error) or type(error).__name__
  return ' '.join(text.split())[:100]


def _held_out(names: list[str], labels: np.ndarray, fraction: float):
  """Returns a mask of the files to hold out, the same fraction of each class.

  Adding or removing files affects the split of their own class only.
  """
  draws = np.array([_draw(name) for name in names])
  held_out = np.zeros(len(names), bool)
  for label in np.unique(labels):
    indices = np.flatnonzero(labels == label)
    count = min(max(1, round(fraction * len(indices))), len(indices) - 1)
    held_out[indices[np.argsort(draws[indices])[:count]]] = True
  return held_out


def _draw(name: str) -> int:
  encoded = name.encode('utf-8', 'surrogateescape')
  return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), 'big')


def _upright(image: Image.Image) -> Image.Image:
  try:
    return ImageOps.exif_transpose(image)
  except MemoryError:
    raise
  except Exception:
    # Ignore damaged EXIF data; the pixels can still be read.
    return image


def _refused(image: Image.Image) -> str:
  """Returns why an opened image is refused, or ''; needs only its header."""
  if image.width * image.height > MAX_PIXELS:
    return (
      f'it has {image.width:,} x {image.height:,} pixels, and at most'
      f' {MAX_PIXELS:,} are read'
    )
  return without_white(image)


def without_white(image: Image.Image) -> str:
  """Returns why an opened image has no defined white, or ''.

  Needs only the header.
  """
  # Such integers are measurements, for example heights, which Pillow would clip
  # at 255. Of our formats, only PGM stores 16-bit images in mode I.
  if image.mode == 'I' and image.format != 'PPM':
    return (
      'nothing says which of its 32-bit or signed integers is white: convert it'
      ' to 8 or 16 bits'
    )
  return ''


def to_rgb(image: Image.Image) -> Image.Image:
  """Converts an image to RGB as `decode` does.

  Raises:
    ValueError: floating-point values are not between 0 and 1.
  """
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
