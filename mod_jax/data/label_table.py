"""Tables of labels: pictures of a folder, each with any number of labels.

A table is a CSV file whose first column names the pictures, relative to the
folder. Then comes either one column of lists, whose items are separated by `;`,
`|` or `,`, or a column of 0 and 1 for each label:

  file,labels            file,cat,dog,split
  a/1.jpg,cat;dog        a/1.jpg,1,1,train
  a/2.jpg,               a/2.jpg,0,0,eval

A column `split` tells training pictures (`train`) from held-out ones (`eval`,
`val`, `validation` or `test`). Without that column, a part is held out by a
hash of the names. Pictures that the table does not name are not used.
"""

import csv
import functools
import os
import re

import numpy as np

from mod_jax import errors, paths
from mod_jax.data import image_folder

_SPLIT = 'split'  # The column that tells training from held-out pictures.
_FLAGS = {'0': False, '': False, '1': True}


def open_split(
  path: str, table: str, split: str, *, eval_fraction: float, unreadable: str
) -> image_folder.FolderImages:
  """Returns the pictures of 'train' or 'eval'; their labels are bool [N, V].

  `table` is the CSV file's path, from `path` or from /. The pictures' headers
  are checked as in `image_folder.open_split`.
  """
  paths.require_local(path, 'path')
  root = os.path.abspath(os.path.expanduser(path))
  classes, names, labels, held_out = _read(root, table, unreadable)
  if held_out is None:
    held_out = image_folder.held_out(names, _rarest(labels), eval_fraction)
  for of, chosen in (('train on', ~held_out), ('hold out', held_out)):
    if not chosen.any():
      raise errors.UserError(
        f'label_table={table!r} names no picture to {of}: add some'
      )
  seen = labels[~held_out].any(axis=0)
  if not seen.all():
    raise errors.UserError(
      f'label_table={table!r}: the label {classes[seen.argmin()]!r} has no'
      ' picture to train on: add some, or leave the label out'
    )
  chosen = np.flatnonzero(held_out if split == 'eval' else ~held_out)
  return image_folder.FolderImages(
    root, classes, [names[i] for i in chosen], labels[chosen]
  )


def _rarest(labels: np.ndarray) -> np.ndarray:
  """Returns each picture's rarest label, or V for a picture without labels.

  Holding out a part of each of these groups keeps rare labels in both parts.
  """
  count = np.where(labels, labels.sum(axis=0), len(labels) + 1)
  return np.where(labels.any(axis=1), count.argmin(axis=1), labels.shape[1])


def _read(root: str, table: str, unreadable: str):
  file = os.path.join(root, os.path.expanduser(table))
  try:
    modified = os.stat(file).st_mtime_ns
  except OSError as e:
    raise errors.UserError(
      f'label_table={table!r} is not there ({file!r}: {e.strerror}): give a CSV'
      ' file, by its path from the folder or from /'
    ) from e
  return _readable(root, file, modified, unreadable)


# Cached, since every evaluation calls it and it opens every file.
@functools.lru_cache(maxsize=8)
def _readable(root: str, file: str, modified: int, unreadable: str):
  """Returns what `_parse` does, without the rows of unreadable pictures."""
  del modified  # Only a key of the cache: a changed table is read again.
  classes, names, labels, splits = _parse(file)
  good = image_folder.readable(root, names, unreadable)
  splits = None if splits is None else splits[good]
  return classes, [names[i] for i in good], labels[good], splits


def _parse(file: str):
  """Returns label and picture names, labels [N, V], held-out mask or None."""
  lines, names, columns = _columns(file)
  splits = columns.pop(_SPLIT, None)
  if splits is not None:
    expected = f'one of {", ".join(image_folder.SPLITS)}'
    _check_cells(file, lines, _SPLIT, splits, image_folder.SPLITS, expected)
    splits = np.array([split != 'train' for split in splits])
  if len(columns) > 1:
    for title, cells in columns.items():
      _check_cells(file, lines, title, cells, _FLAGS, '0 or 1')
    classes = tuple(columns)
    labels = [[_FLAGS[cell] for cell in cells] for cells in columns.values()]
    return classes, names, np.array(labels).T, splits
  (cells,) = columns.values()
  lists = [
    {item.strip() for item in re.split('[;|,]', cell)} - {''} for cell in cells
  ]
  classes = tuple(sorted(set().union(*lists)))
  if len(classes) < 2 or set(classes) <= set(_FLAGS):
    problem = f'expected two labels or more, and there is {classes or "none"}'
    raise _refusal(file, 1, problem)
  labels = np.array([[name in items for name in classes] for items in lists])
  return classes, names, labels, splits


def _columns(file: str) -> tuple[list[int], list[str], dict[str, list[str]]]:
  """Returns the rows' line numbers and pictures, and other columns by title."""
  try:
    with open(file, encoding='utf-8-sig', newline='') as text:
      reader = csv.reader(text)
      # Keep each row's last line number, since there may be empty lines.
      rows = [(reader.line_num, row) for row in reader if row]
  except (OSError, UnicodeDecodeError, csv.Error) as e:
    raise errors.UserError(
      f'{file!r} cannot be read as CSV ({e}): save it as CSV in UTF-8'
    ) from e
  lines, rows = zip(*rows or [(1, [])], strict=True)
  header, lines, rows = [x.strip() for x in rows[0]], lines[1:], rows[1:]
  problem = None
  if not {*header[1:]} - {_SPLIT} or not rows:
    problem = (
      'expected a header, `file` and labels, and a row per picture, with commas'
      ' between the columns'
    )
  elif len(set(header)) < len(header):
    problem = f'expected each title once, and there are {", ".join(header)}'
  if problem:
    raise _refusal(file, 1, problem)
  for line, row in zip(lines, rows, strict=True):
    if len(row) != len(header):
      problem = f'{len(row)} cells, where the header has {len(header)}'
      raise _refusal(file, line, problem)
  names, *columns = (
    [cell.strip() for cell in cells] for cells in zip(*rows, strict=True)
  )
  if len(set(names)) < len(names):
    twice = next(i for i, name in enumerate(names) if name in names[:i])
    problem = f'{names[twice]!r} stands above already: keep one row'
    raise _refusal(file, lines[twice], problem)
  return lines, names, dict(zip(header[1:], columns, strict=True))


def _check_cells(file, lines, title, cells, allowed, expected):
  for line, cell in zip(lines, cells, strict=True):
    if cell not in allowed:
      raise _refusal(file, line, f'{title}={cell!r}: expected {expected}')


def _refusal(file: str, line: int, problem: str) -> errors.UserError:
  return errors.UserError(f'{file!r}, line {line}: {problem}')
