"""Tables as CSV and as aligned text."""

from collections.abc import Mapping, Sequence
import csv
import io
import itertools


def csv_text(rows: Sequence[Mapping]) -> str:
  """Returns rows with the same keys as a file of comma-separated values."""
  file = io.StringIO()
  writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return file.getvalue()


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
