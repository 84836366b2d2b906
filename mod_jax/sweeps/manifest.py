"""The manifest of a sweep: the list of its runs, written by `plan`.

`manifest.jsonl` has a line per run. Every line also holds the hash of all
lines, so that edited, added or missing lines are noticed. The first run to
begin records this hash in `begun.json`: from then on, another manifest in the
same directory is refused.
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
_BEGUN = 'begun.json'  # Holds the hash of the manifest that the runs are from.
_HASH = 'manifest'  # The key of the hash over all lines, in each line.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One run of a sweep.

  Attributes:
    id: the run's name in the sweep, and that of its directory.
    group: name of the curve that it belongs to, such as 'dense' or 'mod'.
    budget: training FLOPs that the run is planned for.
    seed: the run's seed.
    config: the run's config.
    facts: numbers computed before the run, by name; see `plan.facts`.
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
    UserError: runs of another manifest were begun here, or the directory cannot
      be written.
  """
  lines = [_encode(entry) for entry in entries]
  digest = _digest(lines)
  _check_begun(workdir, digest)
  text = ''.join(json.dumps(line | {_HASH: digest}) + '\n' for line in lines)
  path = workdir_lib.expand(workdir) / FILE
  try:
    workdir_lib.write_text(path, text)
  except OSError as error:
    raise UserError(
      f'--workdir={workdir} cannot be written ({error.strerror}): name a'
      ' directory that can.'
    ) from error
  return digest


def read(workdir) -> list[Entry]:
  """Returns the runs of the sweep in a directory, in the order of the plan.

  Raises:
    UserError: there is no manifest, or it was changed after it was written.
  """
  return read_with_hash(workdir)[0]


def begin(workdir) -> tuple[list[Entry], str]:
  """Records that runs of the manifest have begun.

  Returns:
    The runs, and the hash over all lines, as from `read_with_hash`.

  Raises:
    UserError: as `read`; or runs of another manifest were begun here.
  """
  entries, digest = read_with_hash(workdir)
  _check_begun(workdir, digest)
  path = workdir_lib.expand(workdir) / _BEGUN
  if not path.exists():
    # Workers may race here, but they all write the same content.
    workdir_lib.write_text(path, json.dumps({_HASH: digest}) + '\n')
  return entries, digest


def read_with_hash(workdir) -> tuple[list[Entry], str]:
  """Returns the runs, as `read` does, and the hash over all lines."""
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
