"""Text documents of prepared TensorFlow Datasets."""

from collections.abc import Sequence
from typing import Any

from mod_jax import errors
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data import tfds_builder


def open_documents(
  name: str, split: str, *, data_dir: str = '', text_key: str = 'text'
) -> Sequence[dict[str, Any]]:
  """Returns the records of a split, with random access.

  Args:
    name: a TFDS name, or the directory of a prepared data set.
    split: for example 'train' or 'train[:1%]'.
    data_dir: directory of all prepared data sets; '' for TFDS's own default.
    text_key: the feature with the text, in every record.

  Raises:
    errors.UserError: the name, split or key is unknown, or the data set is not
      prepared or has no random access.
  """
  location = _location(name, data_dir)
  documents = tfds_builder.open_split(
    location, tfds_builder.load(location), split
  )
  first = documents[0]
  if text_key not in first:
    raise errors.UserError(
      f'tfds_text_key={text_key!r} is not in tfds_name={name!r}, whose records '
      f'have {", ".join(sorted(first))}'
    )
  if not isinstance(first[text_key], (bytes, str)):
    raise errors.UserError(
      f'tfds_text_key={text_key!r} of tfds_name={name!r} holds '
      f'{type(first[text_key]).__name__}, not text: choose another of '
      f'{", ".join(sorted(first))}'
    )
  return documents


def fingerprint(name: str, split: str, *, data_dir: str = '') -> dict[str, Any]:
  """Returns a fingerprint of a split; arguments as for `open_documents`."""
  location = _location(name, data_dir)
  builder = tfds_builder.load(location)
  records = tfds_builder.open_split(location, builder, split)
  version = {'version': builder.info.full_name, 'split': split}
  return version | fingerprints.of_records(records)


def _location(name: str, data_dir: str) -> tfds_builder.Location:
  return tfds_builder.Location(
    name=name,
    data_dir=data_dir or None,
    name_field='tfds_name',
    data_dir_field='tfds_dir',
    example='…/lm1b/1.1.0',
  )
