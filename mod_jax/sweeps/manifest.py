"""The list of a sweep's runs: written once by `plan`, read by all that follows.

`manifest.jsonl` has a line per run. Every line also holds the hash of all
lines, so that one that was edited, added or lost is noticed. The first run that
begins notes this hash beside the manifest: from then on, another manifest in
the same directory is refused.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
from typing import Any

from mod_jax import config as config_lib
from mod_jax.errors import UserError
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import workdir as workdir_lib

FILE = 'manifest.jsonl'
_BEGUN = 'begun.json'  # Which manifest the runs here are of.
_HASH = 'manifest'  # The key of the hash over all lines, in each line.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One run of a sweep.

  Attributes:
    id: its name in the sweep, and that of its directory.
    group: the curve that it is a point of, such as 'dense' or 'mod'.
    budget: training FLOPs that the run is planned for.
    seed: the run's seed.
    config: the whole run.
    facts: what is known of it beforehand, by name; see `plan.facts`.
  """

  id: str
  group: str
  budget: float
  seed: int
  config: ExperimentConfig
  facts: dict[str, Any]


def write(workdir, entries: Sequence[Entry]) -> str:
  """Writes the manifest of a sweep; returns the hash over all its lines.

  Raises:
    UserError: runs were begun here by another manifest, or the directory cannot
      be written.
  """
  lines = [_encode(entry) for entry in entries]
  found = _digest(lines)
  _check_begun(workdir, found)
  text = ''.join(json.dumps(line | {_HASH: found}) + '\n' for line in lines)
  path = workdir_lib.expand(workdir) / FILE
  try:
    workdir_lib.write_text(path, text)
  except OSError as error:
    raise UserError(
      f'--workdir={workdir} cannot be written ({error.strerror}): name a'
      ' directory that can.'
    ) from error
  return found


def read(workdir) -> list[Entry]:
  """Returns the runs of the sweep in a directory, in the order of the plan.

  Raises:
    UserError: there is no manifest, or it is not as it was written.
  """
  return read_with_hash(workdir)[0]


def begin(workdir) -> tuple[list[Entry], str]:
  """Notes that runs are begun by the manifest that is here.

  Returns:
    What `read_with_hash` does.

  Raises:
    UserError: as `read`; or runs were begun here by another manifest.
  """
  entries, found = read_with_hash(workdir)
  _check_begun(workdir, found)
  path = workdir_lib.expand(workdir) / _BEGUN
  if not path.exists():
    # Several workers may do this at once: they all write the same.
    workdir_lib.write_text(path, json.dumps({_HASH: found}) + '\n')
  return entries, found


def read_with_hash(workdir) -> tuple[list[Entry], str]:
  """Returns what `read` does, and the hash over all lines."""
  path = workdir_lib.expand(workdir) / FILE
  if not path.is_file():
    raise UserError(
      f'--workdir={workdir} holds no sweep ({FILE} is missing): plan one by'
      ' `python -m mod_jax.sweeps plan`, or name the directory of one.'
    )
  try:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    hashes = {line.pop(_HASH) for line in lines}
  except (ValueError, KeyError, AttributeError, TypeError) as error:
    raise _edited(path) from error
  if hashes != {_digest(lines)}:
    raise _edited(path)
  return [_decode(path, line) for line in lines], hashes.pop()


def _check_begun(workdir, found):
  path = workdir_lib.expand(workdir) / _BEGUN
  if not path.exists():
    return
  try:
    begun = json.loads(path.read_text())[_HASH]
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f'{path} is damaged: delete it, if the runs in that directory are of the'
      f' {FILE} that is there.'
    ) from error
  if begun != found:
    raise UserError(
      f'{path.parent} holds runs of another manifest: name another --workdir,'
      ' or restore the manifest that they were begun with.'
    )


def _edited(path):
  return UserError(
    f'{path} is not as it was planned: plan the sweep again, in another'
    ' directory if runs were begun in this one.'
  )


def _digest(lines) -> str:
  text = '\n'.join(json.dumps(line, sort_keys=True) for line in lines)
  return hashlib.sha256(text.encode()).hexdigest()


def _encode(entry):
  fields = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
  return fields | {'config': json.loads(config_lib.to_json(entry.config))}


def _decode(path, line):
  try:
    config = config_lib.from_dict(ExperimentConfig, line['config'])
  except UserError as error:
    raise UserError(
      f'{path}, run {line["id"]}: {error} The manifest is of another version of'
      ' this library: use that version, or plan the sweep again.'
    ) from error
  return Entry(**line | {'config': config})
