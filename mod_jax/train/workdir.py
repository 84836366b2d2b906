"""What lies where in a run's directory."""

import contextlib
import functools
import json

from absl import logging
from etils import epath

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.errors import UserError
from mod_jax.train.run_config import CHANGEABLE, RESUMABLE, RunConfig

PHASE = 'phase_'  # How the directories of a run's earlier phases begin.
_CONFIG = 'config.json'
# Fields of a config that name runs or files of weights.
_WEIGHTS = ('init', 'objective.teacher')
# What the file of this name has where Hugging Face or timm wrote it.
_THEIRS = {'architecture', 'architectures', 'model_type', 'num_attention_heads'}

expand = paths.expand


def checkpoints(workdir) -> epath.Path:
  return expand(workdir) / 'checkpoints'


def pictures(workdir) -> epath.Path:
  return expand(workdir) / 'pictures'


def holds_run(path) -> bool:
  """Whether a run was begun in this directory."""
  path = expand(path) / _CONFIG
  if not path.is_file():
    return False
  fields = {}
  with contextlib.suppress(OSError, ValueError, RecursionError):
    fields = json.loads(path.read_text(encoding='utf-8'))
  # A file that cannot be read may be a damaged one of ours.
  return not (isinstance(fields, dict) and _THEIRS & fields.keys())


def find(init: str) -> epath.Path:
  """Returns the path that `config.init` names.

  Raises:
    UserError: there is nothing there.
  """
  path = expand(init)
  if path.exists():
    if paths.is_remote(path) and not holds_run(path):
      raise UserError(
        f'init={init} is not the workdir of a run, and files of weights are'
        ' read on this machine only: copy it here first.'
      )
    return path
  raise paths.missing(init, 'init')


def read_config(workdir, cls: type[RunConfig]) -> RunConfig:
  """Returns the config, of class `cls`, of the run in a directory.

  Raises:
    UserError: there is no run, or its config cannot be read.
  """
  path = expand(workdir) / _CONFIG
  if not path.is_file():
    raise UserError(
      f'--workdir={workdir} holds no run ({_CONFIG} is missing): train one'
      ' there first, or name the directory of one.'
    )
  try:
    text = path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    why = error.strerror if isinstance(error, OSError) else 'it is not UTF-8'
    raise UserError(
      f'{path} cannot be read ({why}): restore it from a copy, or name another'
      ' workdir.'
    ) from error
  try:
    return config_lib.from_json(cls, text)
  except UserError as error:
    raise UserError(f'{path}: {error}') from error


def check(
  workdir, config: RunConfig, *, allow_changes: bool = False
) -> list[str]:
  """Checks that a directory holds no run, or one that `config` continues.

  Args:
    workdir: the directory.
    config: of the run that is to be there.
    allow_changes: whether the fields that are `CHANGEABLE` may differ.

  Returns:
    Which of them do, and how.

  Raises:
    UserError: the directory holds a run with another config.
  """
  if not holds_run(workdir):
    return []
  return refuse_differences(
    read_config(workdir, type(config)),
    config,
    f'--workdir={workdir} holds a run with a different config',
    'continue that run with its own config; or with other steps, learning rates'
    ' or capacities by --allow_changed_config; or start another run from its'
    f' weights, in another workdir by --config.init={workdir}.',
    allow_changes=allow_changes,
  )


def refuse_differences(
  held: RunConfig,
  config: RunConfig,
  what: str,
  way_out: str,
  *,
  allow_changes: bool = False,
) -> list[str]:
  """Raises UserError where `config` cannot continue the run that is there.

  Args:
    held: config of the run that is there.
    config: of the run that is to continue it.
    what: how the message begins, before it names the differences.
    way_out: how it ends.
    allow_changes: as of `check`, and so is what is returned.
  """
  differences = []
  for line in config_lib.diff(held, config):
    field = line.split(':')[0]
    if field in RESUMABLE or field.split('.')[0] in RESUMABLE:
      continue
    if field in _WEIGHTS and _same_weights(
      *(functools.reduce(getattr, field.split('.'), c) for c in (held, config))
    ):
      continue
    differences.append(line)
  allowed = []
  if allow_changes:
    before, after = held.optimizer.switches, config.optimizer.switches
    # What is switched on or off makes another state, which would not load.
    changeable = {f for f in CHANGEABLE if before.get(f) == after.get(f)}
    allowed = [d for d in differences if d.split(':')[0] in changeable]
    differences = [d for d in differences if d not in allowed]
  if differences:
    shown = '; '.join(differences[:5])
    if len(differences) > 5:
      shown += f'; and {len(differences) - 5} more'
    raise UserError(f'{what} ({shown}): {way_out}')
  return allowed


def _same_weights(held: str | None, now: str | None) -> bool:
  """Whether two paths are one, or of a run's phase before and after a move."""
  if not held or not now:
    return False
  before, after = paths.absolute(held), paths.absolute(now)
  moved = (
    before.name == after.name
    and before.name.startswith(PHASE)
    and not before.exists()
  )
  return before == after or moved


def claim(workdir, config: RunConfig) -> None:
  """Makes a directory the home of a run that passes `check` there.

  Raises:
    UserError: the directory cannot be written.
  """
  if not holds_run(workdir) and checkpoints(workdir).exists():
    logging.warning(
      '%s was missing in %s, where there are checkpoints: it is written anew.',
      *(_CONFIG, workdir),
    )
  try:
    write_text(expand(workdir) / _CONFIG, config_lib.to_json(config))
  except OSError as error:
    raise UserError(
      f'--workdir={workdir} cannot be written ({error.strerror}): name a'
      ' directory that can.'
    ) from error


def write_text(path, text: str) -> None:
  """Writes a file whole or not at all."""
  paths.write_bytes(path, text.encode())
