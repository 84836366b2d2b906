"""Parameters by name, and their replacement by the parameters of a source."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import re
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from mod_jax.errors import UserError

_NUMBER = re.compile(r'(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])')


def flatten(tree) -> dict[str, Any]:
  """Returns a nested dictionary's leaves by path: `block_0/mlp/up/kernel`."""
  return traverse_util.flatten_dict(tree, sep='/')


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested dictionary; the inverse of `flatten`."""
  return traverse_util.unflatten_dict(dict(flat), sep='/')


def join(*parts) -> dict[str, Any]:
  """Returns the union of nested dictionaries, of which some may be None."""
  flat = {}
  for part in filter(None, parts):
    flat |= flatten(part)
  return unflatten(flat)


def by_path(tree) -> dict[str, Any]:
  """Returns the leaves of any tree by path, in the order of the tree.

  Structs are treated as dictionaries.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def merge(
  fresh,
  source,
  *,
  new: Sequence[str] = (),
  dropped: Sequence[str] = (),
  describe: str = 'the source',
):
  """Returns `fresh` with the source's values of all names that the source has.

  Args:
    fresh: nested dictionary of initialised parameters. Leaves that the source
      replaces may be `jax.ShapeDtypeStruct`s.
    source: nested dictionary of parameters with the same names and shapes, or
      `compare` raises UserError; values are cast to the dtype of `fresh`.
    new: regular expressions of paths, matched whole, that may be missing from
      the source; their parameters keep the values of `fresh`.
    dropped: regular expressions of paths, matched whole, that only the source
      may have.
    describe: name of the source, for messages.
  """
  fresh, source = flatten(fresh), flatten(source)
  compare(
    {path: leaf.shape for path, leaf in fresh.items()},
    {path: leaf.shape for path, leaf in source.items()},
    new=new,
    dropped=dropped,
    describe=describe,
  )
  merged = {}
  for path, leaf in fresh.items():
    value = source.get(path, leaf)
    # Cast only if needed: other values stay on the host, or unread in a file.
    if value.dtype != leaf.dtype:
      value = jnp.asarray(value, leaf.dtype)
    merged[path] = value
  return unflatten(merged)


def compare(
  expected: Mapping[str, tuple[int, ...]],
  found: Mapping[str, tuple[int, ...]],
  *,
  new: Sequence[str] = (),
  dropped: Sequence[str] = (),
  describe: str = 'the source',
) -> None:
  """Raises UserError unless the names and shapes `found` in a source fit.

  `new` and `dropped` are exceptions, as in `merge`.
  """
  missing = [
    (name, '')
    for name in expected
    if name not in found and not _matches(name, new)
  ]
  unexpected = [
    (name, '')
    for name in found
    if name not in expected and not _matches(name, dropped)
  ]
  wrong = [
    (name, f': {tuple(found[name])} instead of {tuple(expected[name])}')
    for name in expected
    if name in found and tuple(found[name]) != tuple(expected[name])
  ]
  differences = {
    'missing': missing,
    'unexpected': unexpected,
    'wrong shape': wrong,
  }
  if not any(differences.values()):
    return
  lines = [
    f'  {kind}: {line}'
    for kind, named in differences.items()
    for line in _grouped(named)
  ]
  raise UserError(
    f'{describe} does not fit the model; change the config to match, or start'
    ' from other weights:\n' + '\n'.join(lines)
  )


def _matches(name: str, patterns: Sequence[str]) -> bool:
  # Accept a single pattern, which would be taken for a sequence of letters.
  patterns = (patterns,) if isinstance(patterns, str) else patterns
  return any(re.fullmatch(pattern, name) for pattern in patterns)


def _grouped(named: Iterable[tuple[str, str]]) -> list[str]:
  """Returns lines of the names, each followed by its remark.

  `named` are (name, remark). Names that differ only in their first number, and
  have the same remark, share a line.
  """
  groups: dict[tuple[str, str, str], list[int]] = {}
  for name, remark in named:
    number = _NUMBER.search(name)
    if number is None:
      groups[name, '', remark] = []
      continue
    key = (name[: number.start()], name[number.end() :], remark)
    groups.setdefault(key, []).append(int(number[0]))
  return [
    before + _runs(numbers) + after + remark
    for (before, after, remark), numbers in sorted(groups.items())
  ]


def _runs(numbers: Iterable[int]) -> str:
  """Formats numbers as `3`, or `{0..2,5}` for several; '' for none."""
  runs = []
  ordered = enumerate(sorted(numbers))
  # Consecutive numbers have a constant difference from their index.
  for _, run in itertools.groupby(ordered, lambda pair: pair[1] - pair[0]):
    run = [number for _, number in run]
    runs.append(str(run[0]) if len(run) == 1 else f'{run[0]}..{run[-1]}')
  several = len(runs) > 1 or any('..' in run for run in runs)
  return '{' + ','.join(runs) + '}' if several else ''.join(runs)
