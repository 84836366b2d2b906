"""Finds prepared TensorFlow Datasets by name and reads them without TensorFlow.

Data must already be prepared on disk in a format with random access
(ArrayRecord); nothing is downloaded.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import re
from typing import Any

from mod_jax import config as config_lib
from mod_jax import errors


def load(name: str, data_dir: str | None = None, field: str = 'name') -> Any:
  """Returns the builder of a data set; reads no record.

  The name is one of TFDS, looked up in `data_dir`, or the directory of a
  prepared data set; in messages it is the value of `field`.
  """
  # Imported here, since it is slow to import and other data do not need it.
  import tensorflow_datasets as tfds

  at, directory = f'{field}={name!r}', os.path.expanduser(name)
  if os.path.isdir(directory):
    _check_features(at, directory)
    try:
      return tfds.builder_from_directory(directory)
    except (OSError, ValueError):
      raise errors.UserError(
        f'{at} is a directory without a prepared data set: give the one with'
        ' dataset_info.json in it, such as …/cars196/2.1.0'
      ) from None
  # 'namespace:name' would use the network; 'name:1.2.3' is a version.
  if re.match(r'\w+:(?!\d|experimental_latest)', name):
    raise errors.UserError(
      f'{at} is a community data set, which TFDS looks up on the network: '
      'prepare it first and give its directory'
    )
  base = name.split('/')[0].split(':')[0]
  data_dir = os.path.expanduser(data_dir) if data_dir else None
  if data_dir:
    _check_features(at, os.path.join(data_dir, base))
  try:
    return tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    # Listing community data sets would need the network and TensorFlow.
    names = tfds.list_builders(with_community_datasets=False)
    raise errors.UserError(
      f'{at} is neither known to TFDS nor prepared in its directory: correct it'
      f' or give the directory itself.{config_lib.nearest(base, names)}'
    ) from None
  except Exception as e:
    # TFDS raises many types for a bad config or version in the name. Drop the
    # list of available ones from the message.
    reason = ' '.join(str(e).partition('. Here are')[0].split())[:200]
    raise errors.UserError(
      f'{at} cannot be loaded ({reason}); check its config and version'
    ) from e


def _check_features(at: str, directory: str) -> None:
  """Refuses data sets with features that are neither registered nor of TFDS.

  TFDS imports any module that features.json names, and so would run the code of
  whoever wrote that file.
  """
  from tensorflow_datasets.core import features

  def check(fields):
    for key in ('pythonClassName', 'type'):
      name = str(fields.get(key, 'tensorflow_datasets.'))
      registered = features.FeatureConnector._registered_features
      if not (name in registered or name.startswith('tensorflow_datasets.')):
        raise errors.UserError(
          f'{at} is of the feature {name!r}, which is not of TFDS: reading it'
          ' would run its code. If you trust it, import its module before'
          ' (--trust=MODULE).'
        )
    return fields

  for file in pathlib.Path(directory).rglob('features.json'):
    try:
      json.loads(file.read_bytes(), object_hook=check)
    except errors.UserError:
      raise
    except (OSError, ValueError, TypeError, RecursionError) as e:
      raise errors.UserError(
        f'{at}: {file} cannot be read ({e}): prepare it again'
      ) from e


def open_split(
  builder: Any, split: str, *, decoders: Any = None
) -> Sequence[dict[str, Any]]:
  """Returns the records of a split, with random access, or raises UserError."""
  splits, at = builder.info.splits, builder.info.full_name
  if not splits:
    raise errors.UserError(
      f'{at} is not prepared under {str(builder.data_path)!r}: run'
      f' tfds.builder({builder.name!r},'
      " file_format='array_record').download_and_prepare() once, or set its"
      ' directory'
    )
  try:
    return builder.as_data_source(split, decoders=decoders)
  except NotImplementedError:
    raise errors.UserError(
      f'{at} is prepared as {builder.info.file_format.value}, which has no '
      "random access: prepare it again with file_format='array_record'"
    ) from None
  except (ValueError, KeyError) as e:
    reason = str(e).partition('\n')[0].strip()
    raise errors.UserError(
      f'split {split!r} of {at} cannot be read ({reason}): choose from '
      f'{", ".join(sorted(splits))}, or a part such as {min(splits)}[:10%]'
    ) from None
