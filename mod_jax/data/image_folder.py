"""Folders of pictures, one subfolder per class, and decoding by Pillow.

Either `train/CLASS/...` beside `eval/CLASS/...` (or val, validation, test), or
`CLASS/...` directly, of which a part of each class is held out: at least one
picture where there are two, those whose names have the smallest hashes.
Files whose names begin with a dot or end otherwise than a picture's are not
looked at. Pictures are not compared: of two copies under different names, one
may be held out and the other trained on, so remove copies before.
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
# Only these, whatever a file claims to be: some of Pillow's other readers start
# programs.
_FORMATS = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'PPM')
MAX_PIXELS = 100_000_000  # Of a picture, which take 300 MB once decoded.
_NAMED = 3  # Bad files that a message names; it counts the rest.
_CHECK_THREADS = 16
_CHECK_CHUNK = 256


class UnreadableImageError(errors.UserError):
  """A picture that cannot be decoded."""


@dataclasses.dataclass(frozen=True)
class FolderImages:
  """Some files of a folder, with random access.

  Attributes:
    root: directory that the names are relative to.
    class_names: names of the class folders, sorted; labels count in this order.
    names: of the files, '/' between the parts.
    labels: int32, as many.
  """

  root: str
  class_names: tuple[str, ...]
  names: list[str]
  labels: np.ndarray

  def __len__(self) -> int:
    """Returns the number of files."""
    return len(self.names)

  def fingerprint(self) -> dict[str, Any]:
    """Returns what identifies the files."""
    return fingerprints.of_files(
      [(name, os.path.join(self.root, name)) for name in self.names]
    )

  def load(self, index: int) -> tuple[Image.Image, int]:
    """Returns a decoded RGB picture and its label.

    Raises:
      UnreadableImageError: the file cannot be decoded.
    """
    path = os.path.join(self.root, self.names[index])
    return decode(path, f'image {path!r}'), int(self.labels[index])


def decode(source: str | bytes, what: str) -> Image.Image:
  """Returns a picture as RGB, upright as its EXIF data says.

  Of an animation it is the first frame. Transparency is dropped; values of 16
  bits keep their upper 8; floating-point ones run from 0 to 1.

  Args:
    source: a path, or the bytes of a file.
    what: the picture's name in errors, such as "image 'a.png'".

  Raises:
    UnreadableImageError: it cannot be decoded, or nothing says which of its
      values is white.
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
    # Pillow's readers let through many kinds for damaged files.
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

  Every file is looked at once per process: that it is not empty, and that it
  begins as a picture does.

  Args:
    path: the folder, see the module.
    split: 'train' or 'eval'.
    eval_fraction: part held out where the folder has no split of its own.
    unreadable: 'refuse' raises for bad files, 'skip' leaves them out and logs a
      warning.

  Raises:
    errors.UserError: there is no such directory, fewer than two classes, a
      class without training pictures, a class in the evaluation that training
      lacks, nothing to evaluate, or bad files.
  """
  root, eval_root = _layout(path)
  classes = _class_folders(path, root)
  if split == 'eval' and eval_root is not None:
    found = _subfolders(eval_root)
    if unknown := sorted(set(found) - set(classes)):
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
    without = [c for c, n in zip(classes, counts, strict=True) if not n]
    raise errors.UserError(
      f'path={path!r}: of {len(classes)} classes, {len(without)} have no '
      f'pictures to train on ({_some(without)}): add some or remove the folders'
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
  """Returns the folder of the training classes and, if any, of the others."""
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
  """Returns the good files' names and labels, in the order of classes.

  Cached, since every evaluation asks again and an answer can take a minute; a
  file that changes later is found out when it is decoded.
  """
  names, labels = [], []
  seen = set()
  for folder in (root, *(os.path.join(root, name) for name in classes)):
    real = pathlib.Path(os.path.realpath(folder))
    seen |= {real, *real.parents}
  for label, name in enumerate(classes):
    found = sorted(_walk(os.path.join(root, name), name, seen))
    names += found
    labels += [label] * len(found)
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
  """Yields the names of pictures below a directory, '/' between the parts.

  Args:
    directory: of a class.
    name: of the class.
    seen: directories, links resolved, whose pictures are not looked for again;
      those that are walked are added. So a link back to a class or above it
      does not multiply pictures, of which some would be held out and others
      trained on.
  """
  if not os.path.isdir(directory):
    return
  for folder, inner, files in os.walk(directory, followlinks=True):
    found = sorted(d for d in inner if not d.startswith('.'))
    inner.clear()
    for child in found:
      path = os.path.join(folder, child)
      real = pathlib.Path(os.path.realpath(path))
      if real in seen:
        logging.warning(
          '%r leads to %r, whose pictures are counted already; left out',
          *(path, str(real)),
        )
      else:
        seen.add(real)
        inner.append(child)
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
    # Reads the header alone.
    with Image.open(path, formats=_FORMATS) as image:
      return _refused(image)
  except MemoryError:
    raise
  except Exception as e:
    return _reason(e)


def _reason(error: Exception) -> str:
  if isinstance(error, Image.UnidentifiedImageError):
    return 'no picture in a format that is read here'
  # The path that some messages end in stands in the sentence already.
  why = getattr(error, 'strerror', None) or str(error) or type(error).__name__
  return ' '.join(why.split())[:100]


def _held_out(names: list[str], labels: np.ndarray, fraction: float):
  """Returns a mask of the files to hold out, as large a part of each class.

  A file goes to the other side only where its class grows or shrinks.
  """
  draws = np.array([_draw(name) for name in names])
  held_out = np.zeros(len(names), bool)
  for label in np.unique(labels):
    places = np.flatnonzero(labels == label)
    count = min(max(1, round(fraction * len(places))), len(places) - 1)
    held_out[places[np.argsort(draws[places])[:count]]] = True
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
    # Damaged EXIF data do not make the pixels unreadable.
    return image


def _refused(image: Image.Image) -> str:
  """Returns why a picture, of which the header is read, is not read, or ''."""
  if image.width * image.height > MAX_PIXELS:
    return (
      f'it has {image.width:,} x {image.height:,} pixels, and at most'
      f' {MAX_PIXELS:,} are read'
    )
  return without_white(image)


def without_white(image: Image.Image) -> str:
  """Returns why a picture, of which the header is read, has no scale, or ''."""
  # Measurements, such as counts or heights; Pillow would clip them at 255.
  # Of the formats that are read, PGM alone has 16 bits in this mode.
  if image.mode == 'I' and image.format != 'PPM':
    return (
      'nothing says which of its 32-bit or signed integers is white: convert it'
      ' to 8 or 16 bits'
    )
  return ''


def to_rgb(image: Image.Image) -> Image.Image:
  """Returns a picture in RGB; see `decode`.

  Raises:
    ValueError: it has floating-point values beyond 0 to 1.
  """
  # Pillow would clip these at 255 instead. Mode I is PGM's 16 bits.
  if image.mode == 'I' or image.mode.startswith('I;16'):
    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
  elif image.mode == 'F':
    values = np.asarray(image)
    # So written that a NaN is refused.
    if not (values.min() >= 0 and values.max() <= 1):
      raise ValueError(
        f'its floating-point values, {values.min():g} to {values.max():g}, go'
        ' beyond 0 to 1'
      )
    image = Image.fromarray(np.round(255 * values).astype(np.uint8))
  elif image.mode == 'P' and 'transparency' in image.info:
    image = image.convert('RGBA')
  return image.convert('RGB')
