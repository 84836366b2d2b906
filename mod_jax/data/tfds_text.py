"""Documents of TensorFlow Datasets, read without TensorFlow.

Only data that is already prepared on disk, in a format with random access
(ArrayRecord), is read; nothing is downloaded.
"""

from collections.abc import Sequence
import difflib
import os
import re
from typing import Any

from mod_jax import errors


def open_documents(
  name: str, split: str, *, data_dir: str = '', text_key: str = 'text'
) -> Sequence[dict[str, Any]]:
  """Returns the records of a split, with random access.

  Args:
    name: a TFDS name such as 'lm1b' or 'wikipedia/20230601.en', or a directory
      that holds a prepared data set (its dataset_info.json).
    split: for example 'train' or 'train[:1%]'.
    data_dir: where prepared data sets stand; '' for TFDS's own default.
    text_key: the feature that holds the text; it must be in every record.

  Raises:
    errors.UserError: unknown name, split or key; not prepared; no random
      access.
  """
  # Imported late: it is slow, and most runs read files.
  import tensorflow_datasets as tfds

  builder = _builder(tfds, name, data_dir)
  splits = builder.info.splits
  if not splits:
    raise errors.UserError(
      f'tfds_name={name!r} is not prepared under '
      f'{str(builder.data_path)!r}: run `python -c "import '
      f'tensorflow_datasets as tfds; tfds.builder({name!r}, '
      f'data_dir={data_dir or None!r}, '
      "file_format='array_record').download_and_prepare()\"` once, or set "
      'tfds_dir to where it stands'
    )
  try:
    documents = builder.as_data_source(split)
  except NotImplementedError:
    raise errors.UserError(
      f'tfds_name={name!r} is prepared as '
      f'{builder.info.file_format.value}, which has no random access: prepare '
      "it again with file_format='array_record'"
    ) from None
  except (ValueError, KeyError) as e:
    why = str(e).partition('\n')[0].strip()
    raise errors.UserError(
      f'split {split!r} of tfds_name={name!r} cannot be read ({why}): choose '
      f'from {", ".join(sorted(splits))}, or a part such as '
      f'{min(splits)}[:10%]'
    ) from None
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


def _builder(tfds, name: str, data_dir: str):
  if os.path.isdir(os.path.expanduser(name)):
    directory = os.path.expanduser(name)
    try:
      return tfds.builder_from_directory(directory)
    except (OSError, ValueError):
      raise errors.UserError(
        f'tfds_name={name!r} is a directory without a prepared data set: give '
        'the one with dataset_info.json in it, such as …/lm1b/1.1.0'
      ) from None
  # 'namespace:name' would ask a server; 'name:1.2.3' is a version.
  if re.match(r'\w+:(?!\d|experimental_latest)', name):
    raise errors.UserError(
      f'tfds_name={name!r} is a community data set, which TFDS looks up on the '
      'network: prepare it first and give its directory'
    )
  data_dir = os.path.expanduser(data_dir) if data_dir else None
  try:
    return tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    # Community names would be fetched, by a function that needs TensorFlow.
    known = tfds.list_builders(with_community_datasets=False)
    base = name.split('/')[0].split(':')[0].lower()
    near = difflib.get_close_matches(base, known, n=1, cutoff=0)
    raise errors.UserError(
      f'tfds_name={name!r} is neither known to TFDS (the nearest name is '
      f'{near[0]!r}) nor prepared under tfds_dir: correct it, or give the '
      'directory of a prepared data set'
    ) from None
  except Exception as e:
    # TFDS has many exception types for a bad config or version in the name.
    # The rest of a long message lists what there is.
    why = ' '.join(str(e).partition('. Here are')[0].split())[:200]
    raise errors.UserError(
      f'tfds_name={name!r} cannot be loaded ({why}); check its config and '
      'version'
    ) from e
