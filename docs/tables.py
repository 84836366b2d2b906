"""Writes the tables with measured figures into README.md and the docs.

    python docs/tables.py
    python docs/tables.py README.md docs/performance.md

A page holds a table between two lines, and the command writes it anew:

    <!-- table: train_step -->
    <!-- end -->

Each function with `@table` in `table_parts/` makes the table of its name, from
the JSON, JSONL or CSV that a script in `benchmarks/` or `results/` has left, or
by counting FLOPs. A test asserts that the pages hold what is made here.
"""

import importlib
import pathlib
import re
import sys

from table_parts.common import ROOT, TABLES

from mod_jax.errors import UserError

for _part in ('speed', 'decoding', 'gpu', 'quality', 'laptop', 'cost', 'proof'):
  importlib.import_module(f'table_parts.{_part}')

_START = re.compile(r'^<!-- table: (.*) -->$', re.MULTILINE)
_BLOCK = re.compile(
  r'^(<!-- table: (\w+) -->\n).*?^(<!-- end -->)$', re.MULTILINE | re.DOTALL
)


def pages() -> list[pathlib.Path]:
  """Returns the files whose tables are kept up to date."""
  folders = (ROOT / 'docs', ROOT / 'results')
  return [
    ROOT / 'README.md',
    *(page for folder in folders for page in sorted(folder.rglob('*.md'))),
  ]


def filled(text: str) -> str:
  """Returns a page's text with each table as its function makes it.

  Raises:
    UserError: there is no table of a name, or a table's end is missing.
  """

  def fill(block):
    start, name, end = block.groups()
    return f'{start}\n{TABLES[name]()}\n\n{end}'

  for name in _START.findall(text):
    if name not in TABLES:
      known = ', '.join(TABLES)
      raise UserError(f'table {name!r}: expected one of {known}.')
  blocks = list(_BLOCK.finditer(text))
  whole = [b[2] for b in blocks if len(_START.findall(b[0])) == 1]
  if whole != _START.findall(text):
    raise UserError(
      'each line <!-- table: NAME --> needs a line <!-- end --> of its own.'
    )
  return _BLOCK.sub(fill, text)


def main(names: list[str]) -> None:
  for path in map(pathlib.Path, names) if names else pages():
    try:
      text = path.read_text()
      new = filled(text)
    except (OSError, UserError) as error:
      raise SystemExit(f'error: {path}: {error}') from error
    if new != text:
      path.write_text(new)
      print(f'{path}: written')


if __name__ == '__main__':
  main(sys.argv[1:])
