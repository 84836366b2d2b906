"""The manifest of a sweep: the list of its runs, written by `plan`.

`manifest.jsonl` has a line per run. Every line also holds the hash of all
lines, so that edited, added or missing lines are noticed. Results of runs
repeat this hash (see `run`). Once a run has begun, `write` refuses to replace
the manifest by another one.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
from typing import Any

from mod_jax import config as config_lib
from mod_jax.errors import UserError
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks.experiment import ExperimentConfig

FILE = 'manifest.jsonl'
RUNS, RESULTS = 'runs', 'results'  # Directories; absent before a run begins.
_HASH = 'manifest'  # The key of the hash over all lines, in each line.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One run of a sweep."""

  id: str  # Name of the run in the sweep, and of its directory.
  group: str  # The curve that the run belongs to, such as 'dense' or 'mod'.
  budget: float  # Training FLOPs that the run is planned for.
  seed: int
  config: ExperimentConfig
  facts: dict[str, Any]  # Numbers computed beforehand; see `plan.facts`.


def write(workdir, entries: Sequence[Entry]) -> str:
  """Writes the manifest of a sweep; returns the hash over all its lines.

  Raises UserError if runs of another manifest have begun in `workdir`.
  """
  lines = [
    vars(entry) | {'config': json.loads(config_lib.to_json(entry.config))}
    for entry in entries
  ]
  digest = _digest(lines)
  folder = workdir_lib.expand(workdir)
  text = ''.join(json.dumps(line | {_HASH: digest}) + '\n' for line in lines)
  # Look for both: an old sweep may have kept only its results.
  begun = any((folder / name).exists() for name in (RUNS, RESULTS))
  if begun and (folder / FILE).exists() and read(workdir)[1] != digest:
    raise UserError(
      f'{folder} holds runs of another manifest: name another --workdir.'
    )
  workdir_lib.write_text(folder / FILE, text)
  return digest


def read(workdir) -> tuple[list[Entry], str]:
  """Returns the runs of a sweep in the order of the plan, and the hash.

  Raises:
    UserError: there is no manifest, or it was changed after it was written.
  """
  path = workdir_lib.expand(workdir) / FILE
  if not path.is_file():
    raise UserError(
      f'--workdir={workdir} holds no sweep ({FILE} is missing): plan one by'
      ' `python -m mod_jax.sweeps plan`, or name the directory of one.'
    )
  try:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (digest,) = {line.pop(_HASH) for line in lines}
    if digest != _digest(lines):
      raise ValueError
  except (ValueError, KeyError, AttributeError, TypeError) as error:
    raise UserError(
      f'{path} is not as it was planned: plan the sweep again, in another'
      ' directory if runs were begun in this one.'
    ) from error
  return [_decoded(path, line) for line in lines], digest


def _digest(lines) -> str:
  text = '\n'.join(json.dumps(line, sort_keys=True) for line in lines)
  return hashlib.sha256(text.encode()).hexdigest()


def _decoded(path, line) -> Entry:
  try:
    config = config_lib.from_dict(ExperimentConfig, line['config'])
  except UserError as error:
    raise UserError(
      f'{path}, run {line["id"]}: {error} If another version of this library'
      ' has planned it, use that version, or plan the sweep again.'
    ) from error
  return Entry(**line | {'config': config})
