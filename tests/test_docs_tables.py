"""The tables in README.md and the docs are those of what was measured."""

import pathlib
import re
import sys

import pytest

from mod_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def tables():
  sys.path.insert(0, str(ROOT / 'docs'))  # As Python does for a script.
  import tables

  return tables


def test_pages_hold_what_is_generated(tables):
  texts = {path: path.read_text() for path in tables.pages()}
  assert ROOT / 'README.md' in texts
  old = [path for path, text in texts.items() if tables.filled(text) != text]
  assert not old, 'run: python docs/tables.py'
  used = re.findall(r'^<!-- table: (\w+) -->$', '\n'.join(texts.values()), re.M)
  assert set(used) == set(tables.TABLES)


def test_a_figure_by_hand_is_written_over(tables):
  page = 'Before.\n\n<!-- table: compile_time -->\n{}<!-- end -->\n\nAfter.\n'
  once = tables.filled(page.format('| scanned | 0.1 |\n'))
  assert '| scanned |' in once
  assert '0.1 |' not in once
  assert once.endswith('<!-- end -->\n\nAfter.\n')
  assert tables.filled(once) == once == tables.filled(page.format(''))
  with pytest.raises(UserError, match='needs a line <!-- end -->'):
    tables.filled(once.replace('<!-- end -->', ''))


def test_tests_that_pages_name_exist(tables):
  names = set()
  for path in tables.pages():
    names |= set(
      re.findall(r'\btests/\w[\w/]*\.py(?:::\w+)+', path.read_text())
    )
  missing = []
  for name in names:
    file, *parts = name.split('::')
    text = (ROOT / file).read_text()
    if not all(re.search(rf'^ *(class|def) {p}\b', text, re.M) for p in parts):
      missing.append(name)
  assert len(names) > 30
  assert not missing


def test_the_laptop_sweeps_fit_is_of_all_its_results(tables):
  from table_parts import laptop

  folder = ROOT / 'results' / 'isoflop_laptop' / 'results'
  runs = sum(
    curve['runs'] + curve['diverged'] for curve in laptop.laptop_fit()['curves']
  )
  assert runs == len(list(folder.glob('*.json'))) > 0
