"""Labelled images of prepared TensorFlow Datasets."""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np
from PIL import Image

from mod_jax import errors
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data import image_folder, tfds_builder

_IMAGE = 'image'
_LABEL = 'label'


class TfdsImages:
  """A split of a prepared data set, with random access.

  Its records have a `label`, and an `image` that is an encoded file or a uint8
  array.
  """

  def __init__(self, name: str, split: str, *, data_dir: str | None = None):
    """Opens a split such as 'train[:1%]'; raises UserError if it cannot."""
    # Imported here, since it is slow to import and other data do not need it.
    import tensorflow_datasets as tfds

    builder = tfds_builder.load(name, data_dir)
    self.class_names = _label_names(builder, name)
    self._what = f'of split {split!r} of name={name!r}'
    self._version = {'version': builder.info.full_name, 'split': split}
    # Decode no image while reading: `entry` decodes the one that is needed.
    encoded = {
      key: tfds.decode.SkipDecoding()
      for key, feature in builder.info.features.items()
      if isinstance(feature, tfds.features.Image)
    }
    self._records = tfds_builder.open_split(
      builder, split, decoders=encoded or None
    )
    image = self._records[0][_IMAGE]
    if not (
      isinstance(image, (bytes, str))
      or isinstance(image, np.ndarray)
      and image.dtype == np.uint8
      and (image.ndim == 2 or image.ndim == 3 and image.shape[-1] in (1, 3, 4))
    ):
      kind = getattr(image, 'dtype', type(image).__name__)
      shape = list(getattr(image, 'shape', ()))
      raise errors.UserError(
        f'the feature {_IMAGE!r} of name={name!r} is {kind} {shape}: expected '
        'an encoded file, or uint8 [height, width, 1, 3 or 4]'
      )

  def __len__(self) -> int:
    return len(self._records)

  def fingerprint(self) -> dict[str, Any]:
    return {**self._version, **fingerprints.of_records(self._records)}

  @functools.cached_property
  def labels(self) -> np.ndarray:
    """The labels, int32 [N]; reads all records."""
    labels = [self._label(i, x) for i, x in enumerate(self._records)]
    return np.array(labels, np.int32)

  def name(self, index: int) -> str:
    return f'record {index}'

  def entry(self, index: int) -> tuple[Any, Callable[[], Image.Image], int]:
    """Returns the image's key, a function that decodes it, and its label."""
    record = self._records[index]
    label = self._label(index, record)
    # The key is a hash of the content: records have no time of modification.
    key = fingerprints.of_value(record[_IMAGE])
    what = f'record {index} {self._what}'
    return key, functools.partial(_to_image, record[_IMAGE], what), label

  def _label(self, index: int, record) -> int:
    # Records of unlabelled splits have the label -1.
    label = int(record[_LABEL])
    if not 0 <= label < len(self.class_names):
      raise errors.UserError(
        f'record {index} {self._what} has the label {label}, outside of '
        f'0..{len(self.class_names) - 1}: choose a split with labels'
      )
    return label


def class_names(name: str, data_dir: str | None) -> tuple[str, ...]:
  """Returns the names of a data set's labels; reads no record."""
  return _label_names(tfds_builder.load(name, data_dir), name)


def _to_image(value: Any, what: str) -> Image.Image:
  if isinstance(value, np.ndarray):
    if value.ndim == 3 and value.shape[-1] == 1:
      value = value[..., 0]
    return Image.fromarray(value).convert('RGB')
  if isinstance(value, str):
    value = value.encode('utf-8', 'surrogateescape')
  return image_folder.decode(value, what)


def _label_names(builder, name: str) -> tuple[str, ...]:
  import tensorflow_datasets as tfds

  features = builder.info.features
  for key in (_IMAGE, _LABEL):
    if key not in features:
      raise errors.UserError(
        f'name={name!r} has no feature {key!r}, only '
        f'{", ".join(sorted(features))}: choose a data set of labelled pictures'
      )
  label = features[_LABEL]
  if not isinstance(label, tfds.features.ClassLabel) or not label.num_classes:
    raise errors.UserError(
      f'the feature {_LABEL!r} of name={name!r} is a {type(label).__name__} '
      'without a number of classes: choose a data set with a ClassLabel'
    )
  return tuple(label.names)
