"""Pictures of Open Clip Art, for benchmarks on real pictures.

    apt-get download openclipart-png && dpkg -x openclipart-png_*.deb clipart

has them in `clipart/usr/share/openclipart/png`, which is given as `--data`:
8,121 pictures (public domain, a package of Debian) in folders, which are the
classes. They are laid on white and reduced to 96 pixels. Duplicates and
near-duplicates are dropped, of those that lie in two classes every copy, then
classes of fewer than 60 pictures. A fifth is held out, by a hash of the
picture.
"""

from concurrent import futures
import hashlib
import json
import pathlib
import shutil
import sys
import warnings

from absl import flags
import numpy as np
from PIL import Image

_DATA = flags.DEFINE_string('data', None, 'Directory with a folder per class.')
# Absl then attributes the flag to the calling script.
flags.disclaim_key_flags()

_NO_CLASS = 'unsorted'  # A folder of what has no class yet.
_LEAST = 60  # Pictures of a class.
_HELD_OUT = 5  # Every fifth picture.
_SIDE = 96  # Pixels of the longer side.
_MOST_PIXELS = 25_000_000
_THUMBNAIL = 16  # Pixels a side of what is compared.
# Pictures are nearly the same if the squared distance of their thumbnails is
# less than this part of their mean contrast.
_ALIKE = 0.02


def on_white(path: pathlib.Path) -> Image.Image | None:
  """Returns a picture, reduced, with white where it was transparent.

  None if it is damaged or of more than 25 million pixels, which a few are.
  """
  try:
    with Image.open(path) as image:
      if image.width * image.height > _MOST_PIXELS:
        return None
      image = image.convert('RGBA')
  except (OSError, SyntaxError, Image.DecompressionBombError):
    return None
  image.thumbnail((_SIDE, _SIDE))
  white = Image.new('RGBA', image.size, 'white')
  return Image.alpha_composite(white, image).convert('RGB')


def distinct(thumbnails_NP: np.ndarray, classes: list[str]) -> np.ndarray:
  """Returns which pictures to keep: the first of those that are nearly alike.

  None of them, if they are not all of one class.
  """
  centred_NP = thumbnails_NP - thumbnails_NP.mean(axis=1, keepdims=True)
  contrast_N = np.square(centred_NP).sum(axis=1)
  size_N = np.square(thumbnails_NP).sum(axis=1)
  keep_N = np.ones(len(classes), bool)
  ambiguous_N = np.zeros(len(classes), bool)
  class_N = np.array(classes)
  for i in np.arange(len(classes)):
    if not keep_N[i]:
      continue
    distance_M = (
      size_N[i] + size_N[i:] - 2 * thumbnails_NP[i:] @ thumbnails_NP[i]
    )
    alike = i + np.flatnonzero(
      distance_M <= _ALIKE * (contrast_N[i] + contrast_N[i:]) / 2 + 1e-3
    )
    keep_N[alike] = False
    keep_N[i] = True
    ambiguous_N[i] = np.any(class_N[alike] != class_N[i])
  return keep_N & ~ambiguous_N


def prepare(target: pathlib.Path) -> dict[str, list[int]]:
  """Writes pictures of --data to train on and to hold out, and prints how many.

  Nothing is written if they are there already.

  Args:
    target: directory for them.

  Returns:
    The two numbers of each class.
  """
  if _DATA.value is None:
    sys.exit('--data is missing: give the directory with the folders.')
  counts = _prepare(pathlib.Path(_DATA.value), target)
  for name, (train, held_out) in counts.items():
    print(f'{name:20}{train:7,} to train on {held_out:6,} held out')
  return counts


def _prepare(source, target):
  # The pictures that it warns of are left out.
  warnings.simplefilter('ignore', Image.DecompressionBombWarning)
  done = target / 'counts.json'
  if done.exists():
    return json.loads(done.read_text())
  shutil.rmtree(target, ignore_errors=True)
  paths = sorted(
    path
    for path in source.glob('*/**/*.png')
    if path.relative_to(source).parts[0] != _NO_CLASS
  )
  if not paths:
    sys.exit(f'--data={source}: there are no folders with PNG files.')
  with futures.ThreadPoolExecutor() as pool:
    images = [*pool.map(on_white, paths)]
  paths = [x for x, image in zip(paths, images, strict=True) if image]
  images = [image for image in images if image]
  hashes = [
    hashlib.sha256(f'{image.size}'.encode() + image.tobytes()).hexdigest()
    for image in images
  ]
  # In the order of the hashes, so that the choice depends on pictures alone.
  order = np.argsort(hashes, kind='stable')
  classes = [paths[i].relative_to(source).parts[0] for i in order]
  thumbnails_NP = (
    np.stack(
      [
        np.ravel(
          images[i].resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
        )
        for i in order
      ]
    ).astype(np.float64)
    / 255
  )
  kept = np.flatnonzero(distinct(thumbnails_NP, classes))
  counts = {}
  for n in kept:
    counts.setdefault(classes[n], [0, 0])
    counts[classes[n]][int(hashes[order[n]], 16) % _HELD_OUT == 0] += 1
  counts = {
    name: split
    for name, split in sorted(counts.items())
    if sum(split) >= _LEAST
  }
  for n in kept:
    name = hashes[order[n]]
    split = ('train', 'eval')[int(name, 16) % _HELD_OUT == 0]
    if classes[n] in counts:
      folder = target / split / classes[n]
      folder.mkdir(parents=True, exist_ok=True)
      images[order[n]].save(folder / f'{name[:16]}.png')
  done.write_text(json.dumps(counts, indent=1) + '\n')
  return counts
