"""What the tables share: where their figures lie, and how they are written."""

import csv
import functools
import json
import pathlib

import study

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLES = {}


def table(function):
  """Makes a function's text available to the pages under its name."""
  TABLES[function.__name__] = function
  return function


@functools.cache
def measured(name: str) -> dict:
  """Returns what the script `benchmarks/NAME.py` has measured."""
  return json.loads((ROOT / 'benchmarks' / f'{name}.json').read_text())


def studied(name: str) -> dict[str, dict]:
  """Returns the runs of the study `benchmarks/NAME.py`, by name."""
  return study.read(ROOT / 'benchmarks' / f'{name}.jsonl')


@functools.cache
def read_csv(path: str) -> list[dict[str, str]]:
  """Returns the rows of a file below `results/`."""
  with (ROOT / 'results' / path).open() as file:
    return list(csv.DictReader(file))


def between(low: float, high: float, digits: int = 3) -> str:
  return f'{low:.{digits}f}–{high:.{digits}f}'
