"""Tables as CSV and as aligned text."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import io
import itertools


def csv_text(rows: Iterable[Iterable]) -> str:
  """Returns rows as the text of a file of comma-separated values."""
  file = io.StringIO()
  csv.writer(file, lineterminator='\n').writerows(rows)
  return file.getvalue()


def csv_of(records: Sequence[Mapping]) -> str:
  """Returns records, one or more with the same keys, as CSV with a header."""
  return csv_text([records[0], *(record.values() for record in records)])


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
  """Returns a line per row; only the first `left` columns are left-aligned."""
  columns = itertools.zip_longest(*rows, fillvalue='')
  widths = [max(map(len, column)) for column in columns]
  return [
    '  '.join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=False))
    ).rstrip()
    for row in rows
  ]
