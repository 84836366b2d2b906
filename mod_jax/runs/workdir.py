"""The files of a run's directory, and checks of its config.

`holds_run` tells a run's directory from a folder of another library.
"""

import functools

from absl import logging
from etils import epath

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.errors import UserError
from mod_jax.runs.run_config import CHANGEABLE, RESUMABLE, RunConfig

PHASE = 'phase_'  # Prefix of the directories of a run's earlier phases.
_CONFIG = 'config.json'
# Fields of a config that name runs or files of weights.
_WEIGHTS = ('init', 'objective.teacher')
# Keys of a config.json that Hugging Face or timm wrote.
_THEIRS = {'architecture', 'architectures', 'model_type', 'num_attention_heads'}

expand = paths.expand


def checkpoints(workdir) -> epath.Path:
  return expand(workdir) / 'checkpoints'


def pictures(workdir) -> epath.Path:
  return expand(workdir) / 'pictures'


def holds_run(path) -> bool:
  """Returns whether a run was begun in this directory."""
  path = expand(path) / _CONFIG
  # A file that cannot be parsed counts: it may be a run's, and damaged.
  return path.is_file() and not _THEIRS & paths.read_object(path).keys()


def find(init: str) -> epath.Path:
  """Returns the path `config.init`; raises UserError if it cannot be read."""
  path = expand(init)
  if not path.exists():
    raise paths.missing(init, 'init', on_hub=True)
  if paths.is_remote(path) and not holds_run(path):
    raise UserError(
      f'init={init} is not the workdir of a run, and files of weights are'
      ' read on this machine only: copy it here first.'
    )
  return path


def read_config(workdir, cls: type[RunConfig]) -> RunConfig:
  """Returns the config of the run in a directory, as an instance of `cls`.

  Raises UserError if there is no run, or its config cannot be read.
  """
  path = expand(workdir) / _CONFIG
  if not path.is_file():
    raise UserError(
      f'--workdir={workdir} holds no run ({_CONFIG} is missing): train one'
      ' there first, or name the directory of one.'
    )
  try:
    return config_lib.from_json(cls, path.read_text(encoding='utf-8'))
  except UserError as error:
    raise UserError(f'{path}: {error}') from error
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(
      f'{path} cannot be read ({error}): restore it from a copy, or name'
      ' another workdir.'
    ) from error


def check(
  workdir, config: RunConfig, *, allow_changes: bool = False
) -> list[str]:
  """Checks that a directory holds no run, or one that `config` continues.

  Returns a line for each `CHANGEABLE` field that differs, which
  `allow_changes` permits. Raises UserError if other fields differ.
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
  """Raises UserError if `config` cannot continue the run with config `held`.

  `what` and `way_out` begin and end the message. Returns a line for each
  `CHANGEABLE` field that differs, which `allow_changes` permits.
  """
  allowed, refused = [], []
  changeable = set()
  if allow_changes:
    before, after = held.optimizer.switches, config.optimizer.switches
    # Other values may not switch a part of the optimiser's state on or off.
    changeable = {f for f in CHANGEABLE if before.get(f) == after.get(f)}
  for line in config_lib.diff(held, config):
    field = line.split(':')[0]
    if field in changeable:
      allowed.append(line)
    elif not (
      {field, field.split('.')[0]} & set(RESUMABLE)
      or (field in _WEIGHTS and _same_weights(field, held, config))
    ):
      refused.append(line)
  if refused:
    raise UserError(f'{what} ({listed(refused)}): {way_out}')
  return allowed


def listed(differences: list[str]) -> str:
  """Returns the first five differences in one line, and how many follow."""
  more = len(differences) - 5
  return '; '.join(differences[:5]) + (f'; and {more} more' if more > 0 else '')


def _same_weights(field, held, config) -> bool:
  """Returns whether a field with a path names the same weights in both configs.

  It does if the paths are equal. It also does if both are directories of the
  same phase and the one in `held` no longer exists: the run was moved.
  """
  paths_of_both = [
    functools.reduce(getattr, field.split('.'), c) for c in (held, config)
  ]
  if not all(paths_of_both):
    return False
  before, after = map(paths.absolute, paths_of_both)
  moved = (
    before.name == after.name
    and before.name.startswith(PHASE)
    and not before.exists()
  )
  return before == after or moved


def claim(workdir, config: RunConfig) -> None:
  """Writes the config of a run that passed `check` into its directory."""
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
  """Writes a text file atomically."""
  paths.write_bytes(path, text.encode())
