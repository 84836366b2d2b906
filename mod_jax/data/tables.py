"""Reads Arrow and Parquet files, such as those of Hugging Face `datasets`.

`Dataset.save_to_disk` and the library's cache write Arrow files; the hub has
Parquet files. Both are read sequentially in batches of rows; `datasets` itself
is not needed.
"""

from collections.abc import Iterator, Sequence
import contextlib
import os
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from mod_jax import errors

_ROWS = 1024  # Rows per batch.


def read_column(path: str, column: str) -> Iterator[str]:
  """Yields the non-empty texts of a file's column."""
  try:
    with contextlib.ExitStack() as stack:
      schema, batches = _open(path, column, stack)
      if column not in schema.names:
        raise errors.UserError(
          f'text_column={column!r} is not in {path!r}, which has '
          f'{", ".join(schema.names)}'
        )
      kind = schema.field(column).type
      if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise errors.UserError(
          f'text_column={column!r} of {path!r} holds {kind}, not text: choose '
          f'another of {", ".join(schema.names)}'
        )
      for batch in batches:
        texts = batch.column(column)
        # Offsets in a damaged file may be out of bounds; using them unchecked
        # would crash the process.
        texts.validate(full=True)
        # Convert one at a time: with compression, a small batch may hold many
        # long texts.
        yield from filter(None, (text.as_py() for text in texts))
  except (OSError, UnicodeDecodeError, pa.ArrowException) as e:
    reason = ' '.join(str(e).split())[:200]
    raise errors.UserError(
      f'{path!r} cannot be read as Arrow or Parquet ({reason}): restore it, or '
      'leave it out of the glob'
    ) from e


def read_rows(
  path: str | os.PathLike, columns: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
  """Returns a Parquet file's column names and its rows, cut to `columns`."""
  try:
    names = parquet.read_schema(path).names
    wanted = [name for name in columns if name in names]
    table = parquet.read_table(
      path, columns=wanted, page_checksum_verification=True
    )
    table.validate(full=True)
    return names, table.to_pylist()
  except (OSError, ValueError, pa.ArrowException) as e:
    reason = ' '.join(str(e).split())[:200]
    raise errors.UserError(
      f'{os.fspath(path)!r} cannot be read as Parquet ({reason}): write it anew'
    ) from e


def _open(path, column, stack):
  """Returns a file's schema and record batches; `stack` closes the file."""
  if path.endswith('.parquet'):
    schema = parquet.read_schema(path)
    columns = [column] if column in schema.names else []
    file = parquet.ParquetFile(
      path,
      # Keep repeated texts dictionary-encoded, to bound the memory of a batch.
      read_dictionary=columns,
      page_checksum_verification=True,
    )
    stack.enter_context(file)
    return schema, file.iter_batches(_ROWS, columns=columns)
  # Not memory-mapped: truncating a mapped file would kill the process.
  source = stack.enter_context(pa.OSFile(path))
  try:
    file = stack.enter_context(pa.ipc.open_file(source))
    batches = map(file.get_batch, range(file.num_record_batches))
  except pa.ArrowInvalid:  # Not the file format: try the stream format.
    source.seek(0)
    file = batches = stack.enter_context(pa.ipc.open_stream(source))
  return file.schema, batches
