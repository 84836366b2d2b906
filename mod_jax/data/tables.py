"""Documents of Hugging Face `datasets` on disk: Arrow and Parquet files.

Arrow files are what `Dataset.save_to_disk` and the library's cache write, as
streams; Parquet files are what the hub holds. Both are read from beginning to
end, a batch of rows at a time; `datasets` itself is not needed.
"""

from collections.abc import Iterator
import contextlib

import pyarrow as pa
from pyarrow import parquet

from mod_jax import errors

_ROWS = 1024  # Of a batch.


def read_column(path: str, column: str) -> Iterator[str]:
  """Yields the texts of a file's column, without those that are empty.

  Raises:
    errors.UserError: the file is of neither kind, or has no such text.
  """
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
        # Places in a damaged file may lie outside of it: read as they are, they
        # would end the process.
        texts.validate(full=True)
        # One at a time: few bytes of a file may stand for many long texts.
        yield from filter(None, (text.as_py() for text in texts))
  except (OSError, UnicodeDecodeError, pa.ArrowException) as e:
    why = ' '.join(str(e).split())[:200]
    raise errors.UserError(
      f'{path!r} cannot be read as Arrow or Parquet ({why}): restore it, or '
      'leave it out of the glob'
    ) from e


def _open(path, column, stack):
  """Returns schema and record batches of a file that `stack` closes."""
  if path.endswith('.parquet'):
    schema = parquet.read_schema(path)
    known = [column] if column in schema.names else []
    file = parquet.ParquetFile(
      path,
      # Texts that recur stay indices, so a batch is no larger than the file.
      read_dictionary=known,
      page_checksum_verification=True,
    )
    stack.enter_context(file)
    return schema, file.iter_batches(_ROWS, columns=known)
  # Not mapped: a file that another truncates would end the process.
  source = stack.enter_context(pa.OSFile(path))
  try:
    file = stack.enter_context(pa.ipc.open_file(source))
    batches = map(file.get_batch, range(file.num_record_batches))
  except pa.ArrowInvalid:  # It is no file of Arrow, which ends with an index.
    source.seek(0)
    file = batches = stack.enter_context(pa.ipc.open_stream(source))
  return file.schema, batches
