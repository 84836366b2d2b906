"""Compares a checkpoint's config, data and other weights with the run's."""

import json
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.data import fingerprint
from mod_jax.errors import UserError
from mod_jax.runs import history
from mod_jax.runs.run_config import RunConfig
from mod_jax.runs.workdir import listed, refuse_differences

_CONFIG, _DATA = 'config', 'data'  # Keys of a checkpoint's metadata.
FROZEN = 'frozen'  # Key of the fingerprint of the frozen weights, if any.
TEACHER = 'teacher'  # Key of the fingerprint of the teacher's weights, if any.


def describe(config: RunConfig, modality) -> dict[str, Any]:
  """Returns the metadata of a run's checkpoints: config and data fingerprint.

  Raises UserError if the hosts of a run do not see the same data.
  """
  data = modality.data_fingerprint()
  if jax.process_count() > 1:
    digest = np.frombuffer(fingerprint.digest(data).encode(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    other = np.flatnonzero(np.any(digests != digests[0], axis=1))
    if other.size:
      raise UserError(
        f'host {other[0]} does not see the same data as host 0: give all hosts'
        ' the same files.'
      )
  return {_CONFIG: json.loads(config_lib.to_json(config)), _DATA: data}


def check_config(
  workdir, config: RunConfig, saved, *, changed: bool = False
) -> None:
  """Raises UserError if a checkpoint was saved with another config.

  `CHANGEABLE` fields may differ if the user has allowed that, now (`changed`)
  or, according to the run's history, after the checkpoint was saved. Other
  differences come from an edited `config.json`.
  """
  if _CONFIG not in saved.metadata:
    return
  text = json.dumps(saved.metadata[_CONFIG])
  saved_config = config_lib.from_json(type(config), text)
  if saved_config == config:
    return  # Do not read the history, which may be long.
  refuse_differences(
    saved_config,
    config,
    f'the checkpoint at step {saved.step} in {workdir} was saved with a'
    ' different config',
    'undo what was changed in config.json or on the command line, or use'
    ' another workdir',
    allow_changes=changed or saved.step <= history.changed_at(workdir),
  )


def check_frozen(saved, origin: dict[str, Any], init: str) -> None:
  """Raises UserError if a checkpoint was trained with other frozen weights.

  `origin` has the fingerprint of the frozen weights that are at `init`, if any.
  """
  if saved.metadata.get(FROZEN) != origin.get(FROZEN):
    raise UserError(
      f'init={init} holds other weights than those that were frozen while the'
      f' checkpoint at step {saved.step} was trained: put them back there.'
    )


def of_teacher(teacher) -> str:
  """Returns the fingerprint of a teacher's variables."""
  return fingerprint.of_arrays(
    (name, np.asarray(x)) for name, x in trees.by_path(teacher).items()
  )


def check_teacher(saved, origin: dict[str, Any]) -> None:
  """Raises UserError if a checkpoint was trained with another teacher.

  `origin` has the fingerprint of the run's teacher, if any. A checkpoint that
  has none may be from before such fingerprints were saved.
  """
  teacher = origin.get(TEACHER)
  if saved.metadata.get(TEACHER, teacher) != teacher:
    raise UserError(
      'the teacher, at objective.teacher or else at init, has other weights'
      f' than while the checkpoint at step {saved.step} was trained: put them'
      " back there, or start another run from this one's weights, in another"
      ' workdir.'
    )


def check_data(saved, data: dict[str, Any], *, allow: bool) -> None:
  """Raises UserError, or warns if `allow`, if `data` are not a checkpoint's."""
  changes = changed_data(saved, data)
  if changes and not allow:
    raise UserError(
      f'{changes}: put them back, use another workdir, or go on with what is'
      ' there by --allow_changed_data.'
    )
  if changes:
    logging.warning('%s: going on with what is there now.', changes)


def changed_data(saved, data: dict[str, Any]) -> str:
  """Returns how the fingerprint `data` differs from a checkpoint's, or ''."""
  before = saved.metadata.get(_DATA)
  differences = [] if before is None else fingerprint.differences(before, data)
  if not differences:
    return ''
  return f'the data changed since step {saved.step} ({listed(differences)})'


def held_out(saved) -> Any:
  """Returns a checkpoint's fingerprint of held-out data; None without any."""
  return saved.metadata.get(_DATA, {}).get('held_out')
