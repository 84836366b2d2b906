"""Text documents of prepared TensorFlow Datasets."""

from collections.abc import Sequence
from typing import Any

from mod_jax import errors
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data import text, tfds_builder


def open_documents(
  config: text.TextDataConfig, split: str
) -> Sequence[dict[str, Any]]:
  """Returns the records of a split, whose `tfds_text_key` is their text."""
  _, records = _open(config, split)
  first, key = records[0], config.tfds_text_key
  keys = ', '.join(sorted(first))
  if key not in first:
    raise errors.UserError(
      f'tfds_text_key={key!r} is not in tfds_name={config.tfds_name!r}, whose '
      f'records have {keys}'
    )
  if not isinstance(first[key], (bytes, str)):
    raise errors.UserError(
      f'tfds_text_key={key!r} of tfds_name={config.tfds_name!r} holds '
      f'{type(first[key]).__name__}, not text: choose another of {keys}'
    )
  return records


def fingerprint(config: text.TextDataConfig, split: str) -> dict[str, Any]:
  """Returns a split's fingerprint, from a sample of its records."""
  builder, records = _open(config, split)
  version = {'version': builder.info.full_name, 'split': split}
  return version | fingerprints.of_records(records)


def _open(config, split):
  builder = tfds_builder.load(
    config.tfds_name, config.tfds_dir or None, 'tfds_name'
  )
  return builder, tfds_builder.open_split(builder, split)
