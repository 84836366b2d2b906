"""Compares config and data of a checkpoint with those of its run."""

import json
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from mod_jax import config as config_lib
from mod_jax.data import fingerprint
from mod_jax.errors import UserError
from mod_jax.runs import history
from mod_jax.runs.run_config import RunConfig
from mod_jax.runs.workdir import refuse_differences

_CONFIG, _DATA = 'config', 'data'  # Keys of a checkpoint's metadata.


def describe(config: RunConfig, task) -> dict[str, Any]:
  """Returns the metadata of each checkpoint: config and data fingerprint.

  Raises:
    UserError: the hosts of a run do not see the same data.
  """
  data = task.data_fingerprint()
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
  """Checks that a checkpoint of a run in `workdir` was saved with this config.

  They may differ in `CHANGEABLE` fields if the user has allowed that, either
  now (`changed`) or, as the run's history tells, after the checkpoint.

  Raises:
    UserError: the configs differ in other fields, as where `config.json` was
      edited.
  """
  saved_config = saved.metadata.get(_CONFIG)
  if saved_config is None:
    return
  saved_config = config_lib.from_json(type(config), json.dumps(saved_config))
  refuse_differences(
    saved_config,
    config,
    f'the checkpoint at step {saved.step} in {workdir} was saved with a'
    ' different config',
    'undo what was changed in config.json or on the command line, or use'
    ' another workdir',
    allow_changes=changed or saved.step <= history.changed_at(workdir),
  )


def check_data(saved, data: dict[str, Any], *, allow: bool) -> None:
  """Checks that a run continues on the data that it began with.

  `data` is the fingerprint of the present data; with `allow`, a difference only
  causes a warning.

  Raises:
    UserError: the data differ.
  """
  diff = changed_data(saved, data)
  if diff and not allow:
    raise UserError(
      f'{diff}: put them back, use another workdir, or go on with what is there'
      ' by --allow_changed_data.'
    )
  if diff:
    logging.warning('%s: going on with what is there now.', diff)


def changed_data(saved, data: dict[str, Any]) -> str:
  """Returns how data differ from those of a checkpoint, or ''."""
  before = saved.metadata.get(_DATA)
  differences = [] if before is None else fingerprint.differences(before, data)
  if not differences:
    return ''
  shown = '; '.join(differences[:5])
  if len(differences) > 5:
    shown += f'; and {len(differences) - 5} more'
  return f'the data changed since step {saved.step} ({shown})'
