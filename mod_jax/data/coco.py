"""Detection data in COCO's format: a JSON file beside the pictures."""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any, NamedTuple

from absl import logging
import numpy as np
from PIL import Image

from mod_jax import errors, paths
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data import image_folder


class Objects(NamedTuple):
  """The objects of a picture.

  Attributes:
    label_N: int32 classes, which are ids of categories; of a crowd, `of_crowd`
      of its class.
    box_N4: float32 centre x, centre y, width and height, as fractions of the
      picture.
  """

  label_N: np.ndarray
  box_N4: np.ndarray


def box_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
  """Returns centre and size [..., 4] of boxes from two corners [..., 2]."""
  return np.concatenate([(low + high) / 2, high - low], axis=-1)


def of_crowd(label):
  """Returns the label of a crowd of a class, or the class of such a label.

  Labels of crowds are -2 or less: losses take no negative label for an object.
  """
  return -2 - label


class Coco:
  """A split of a data set: random access to pictures and their objects.

  Classes are the ids of categories, which may have gaps. Boxes without an area
  within the picture are left out. Other boxes are cut off at the picture's
  edge. Pictures without objects remain.

  Attributes:
    class_names: names by id; '' for ids that no category has.
  """

  def __init__(self, path: str | os.PathLike, split: str):
    """Reads `annotations/instances_SPLIT.json` of the folder `path`.

    The pictures are in the folder `SPLIT` of `path`.
    """
    folder = paths.expand(path)
    self._folder = folder / split
    self._file = folder / 'annotations' / f'instances_{split}.json'
    data = self._read()
    self.class_names = self._names(data['categories'])
    self._pictures = self._by_id(data['images'], 'images')
    rows = {i: [] for i in self._pictures}
    cut = left_out = 0
    for place, row in enumerate(data['annotations']):
      image, label, box_4, crowd = self._annotation(place, row)
      size = self._pictures[image]['width'], self._pictures[image]['height']
      low = np.clip(box_4[:2], 0, size)
      high = np.clip(box_4[:2] + box_4[2:], 0, size)
      if (high <= low).any():
        left_out += 1
        continue
      cut += bool(np.abs(high - low - box_4[2:]).max() > 1)
      box_4 = box_between(low / size, high / size)
      rows[image].append((of_crowd(label) if crowd else label, *box_4))
    if cut or left_out:
      logging.warning(
        '%s: %d boxes reach beyond their picture by over a pixel and are cut'
        ' off; %d have no area within it and are left out.',
        *(self._file, cut, left_out),
      )
    if not rows:
      raise self._fault('images is empty')
    self._ids = list(rows)
    self._objects = [
      Objects(
        np.array([row[0] for row in picture], np.int32),
        np.array([row[1:] for row in picture], np.float32).reshape(-1, 4),
      )
      for picture in rows.values()
    ]

  def __len__(self) -> int:
    return len(self._ids)

  @property
  def most(self) -> int:
    """The largest number of objects, and crowds, in a picture."""
    return max(len(objects.label_N) for objects in self._objects)

  def name(self, index: int) -> str:
    return self._pictures[self._ids[index]]['file_name']

  def load(self, index: int) -> tuple[Image.Image, Objects]:
    """Returns a picture, RGB and upright by its EXIF data, and its objects."""
    path = self._folder / self.name(index)
    image = image_folder.decode(os.fspath(path), f'image {str(path)!r}')
    told, objects = self._pictures[self._ids[index]], self._objects[index]
    turned = (image.width - image.height) * (told['width'] - told['height']) < 0
    if turned and len(objects.label_N):
      raise errors.UserError(
        f'{path} has {image.width} x {image.height} pixels when it is turned as'
        f' its EXIF data say, and {self._file} has {told["width"]} x'
        f' {told["height"]}, so that its boxes would lie elsewhere: store it'
        ' upright, with boxes as it is seen.'
      )
    return image, objects

  def fingerprint(self) -> dict[str, Any]:
    """Returns a fingerprint of the pictures and their objects."""
    names = [self.name(i) for i in range(len(self))]
    objects = [(x.label_N.tolist(), x.box_N4.tolist()) for x in self._objects]
    return fingerprints.of_files(
      [(name, os.fspath(self._folder / name)) for name in names]
    ) | {'objects': fingerprints.of_value(objects)}

  def _fault(self, what: str) -> errors.UserError:
    return errors.UserError(
      f'{self._file}: {what}; COCO has images with id, file_name, width and'
      ' height, categories with id and name, and annotations with image_id,'
      ' category_id and bbox (left, top, width, height in pixels).'
    )

  def _read(self) -> Mapping[str, Any]:
    if not self._file.is_file():
      raise paths.missing(self._file)
    try:
      data = json.loads(self._file.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
      raise self._fault(f'no JSON ({error})') from error
    for name in ('images', 'categories', 'annotations'):
      if not isinstance(data, dict) or not isinstance(data.get(name), list):
        raise self._fault(f'there is no list {name!r}')
    return data

  def _by_id(self, rows: list, kind: str) -> dict[int, Mapping[str, Any]]:
    wanted = {'images': {'file_name': str, 'width': int, 'height': int}}.get(
      kind, {'name': str}
    )
    by_id = {}
    for place, row in enumerate(rows):
      for name, type_ in ({'id': int} | wanted).items():
        value = row.get(name) if isinstance(row, dict) else None
        if type(value) is not type_ or (type_ is int and value < 0):
          raise self._fault(f'{kind}[{place}] has {name}={value!r}')
      if row['id'] in by_id:
        raise self._fault(f'{kind}[{place}] has id={row["id"]} once more')
      if kind == 'images':
        self._check_picture(place, row)
      by_id[row['id']] = row
    return by_id

  def _check_picture(self, place: int, row) -> None:
    if not row['width'] or not row['height']:
      raise self._fault(f'images[{place}] has no area')
    name = pathlib.PurePosixPath(row['file_name'])
    if name.is_absolute() or '..' in name.parts:
      raise self._fault(
        f'images[{place}] has file_name={row["file_name"]!r}, which is outside'
        ' of the folder'
      )

  def _names(self, rows: list) -> tuple[str, ...]:
    by_id = self._by_id(rows, 'categories')
    if not by_id or max(by_id) > 10_000:
      raise self._fault('categories need ids from 0 to 10,000')
    names = [''] * (max(by_id) + 1)
    for i, row in by_id.items():
      names[i] = row['name']
    return tuple(names)

  def _annotation(self, place: int, row):
    """Returns image and category id, (left, top, width, height), `iscrowd`."""
    row = row if isinstance(row, dict) else {}
    image, label = row.get('image_id'), row.get('category_id')
    if type(image) is not int or image not in self._pictures:
      raise self._fault(
        f'annotations[{place}] has image_id={image!r}, which no image has'
      )
    known = type(label) is int and 0 <= label < len(self.class_names)
    if not known or not self.class_names[label]:
      raise self._fault(
        f'annotations[{place}] has category_id={label!r}, which no category has'
      )
    try:
      box_4 = np.array(row.get('bbox'), np.float64)
    except (TypeError, ValueError, OverflowError):
      box_4 = np.zeros(0)
    if box_4.shape != (4,) or not np.isfinite(box_4).all():
      raise self._fault(f'annotations[{place}] has bbox={row.get("bbox")!r}')
    crowd = row.get('iscrowd') or 0
    if crowd not in (0, 1):  # Such as '0', which is true.
      raise self._fault(f'annotations[{place}] has iscrowd={crowd!r}')
    return image, label, box_4, bool(crowd)
