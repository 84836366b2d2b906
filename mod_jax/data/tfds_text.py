"""Documents of TensorFlow Datasets, see `tfds_builder`."""

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
    name: as of a `tfds_builder.Location`.
    split: for example 'train' or 'train[:1%]'.
    data_dir: as of a `tfds_builder.Location`, or ''.
    text_key: the feature that holds the text; it must be in every record.

  Raises:
    errors.UserError: unknown name, split or key; not prepared; no random
      access.
  """
  at = _location(name, data_dir)
  documents = tfds_builder.open_split(at, tfds_builder.load(at), split)
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
  """Returns what identifies a split; see `open_documents`."""
  at = _location(name, data_dir)
  builder = tfds_builder.load(at)
  records = tfds_builder.open_split(at, builder, split)
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
