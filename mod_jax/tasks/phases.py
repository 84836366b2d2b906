"""Runs that are made of several: each phase is a run that starts from the last.

So each has the loop, the checkpoints and the metrics of any run, stops and
resumes anywhere, and can be skipped or run alone.
"""

import dataclasses
import sys

from etils import epath
import jax

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.models import acm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ACMObjective, ExperimentConfig
from mod_jax.train import checkpoints as checkpoints_lib
from mod_jax.train import evaluation as evaluation_lib
from mod_jax.train import lock as lock_lib
from mod_jax.train import loop
from mod_jax.train import metrics as metrics_lib
from mod_jax.train import origin as origin_lib
from mod_jax.train import stop as stop_lib
from mod_jax.train import workdir as workdir_lib
from mod_jax.train.profile import Profiler

_FINAL_RATE = 1e-6  # Learning rate at the end of every phase.


def _rules(config: ExperimentConfig, phase: str):
  """Returns what trains in a phase, and at which rate; the rest is frozen."""
  # What decides which patches are dropped has no gradient where they really
  # are, and weight decay alone must not move it.
  pruning = ()
  if isinstance(config.model, DynamicViTConfig) and config.model.learned:
    pruning = (('^(prediction|pattern)_', 0.0, 0),)
  return {
    'learners': (
      (acm.GATES, 0.0, 0),
      (acm.PARAMETERS, 1.0, 0),
      ('.*', 0.0, 0),
    ),
    'gates': ((acm.GATES, 1.0, 0), ('.*', 0.0, 0)),
    'end_to_end': (
      *pruning,
      (acm.GATES, config.objective.gate_rate, 0),
      ('.*', 1.0, 0),
    ),
  }[phase]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What an experiment came to.

  Attributes:
    metrics: the last held-out metrics; empty if it diverged.
    diverged: what it said when it diverged, or ''.
  """

  metrics: dict[str, float]
  diverged: str = ''


def complete(
  config: ExperimentConfig, workdir, *, allow_changed_data: bool = False
) -> Outcome | None:
  """Trains what is not finished; for one experiment of many.

  Arguments and errors are those of `train`, but that a divergence is noted in
  what is returned. None stands for one that a signal stopped.
  """
  directory, last = expand(config, workdir)[-1]
  data = {'allow_changed_data': allow_changed_data}
  metrics = finished(directory, last, **data)
  if metrics is not None:
    return Outcome(metrics)
  try:
    result = train(config, workdir, **data)
  except loop.TrainingDiverged as error:
    return Outcome({}, str(error))
  return Outcome(result.metrics) if result.finished else None


def expand(
  config: ExperimentConfig, workdir
) -> list[tuple[epath.Path, ExperimentConfig]]:
  """Returns directory and config of each run that an experiment is made of.

  The last lies in `workdir` itself, the phases before it in `phase_<name>`
  below. An experiment without phases is one run.

  Raises:
    UserError: no phase is left, or none to start from.
  """
  config = _in_steps(config, workdir)
  # The configs name directories below it, and must not change when a run is
  # continued from elsewhere.
  workdir = paths.absolute(workdir)
  objective = config.objective
  if config.dense is not None and config.dense.num_steps:
    first = workdir / f'{workdir_lib.PHASE}dense'
    rest = dataclasses.replace(config, dense=None, init=str(first))
    return [(first, _dense(config)), *expand(rest, workdir)]
  if not isinstance(objective, ACMObjective):
    return [(workdir, config)]
  phases = objective.phases
  if objective.phase != 'all':
    return [(workdir, _phase(config, objective.phase, _alone(config)))]
  if not phases:
    raise UserError(
      'objective: all phases have num_steps=0, so there is nothing to train.'
    )
  if config.init is None:
    raise UserError(
      'init is missing: an adaptive model is made of another, dense, routed or'
      ' pruned; give its workdir or checkpoint by --config.init.'
    )
  runs, init = [], config.init
  last = list(phases)[-1]
  for name in phases:
    directory = workdir
    if name != last:
      directory = workdir / f'{workdir_lib.PHASE}{name}'
    runs.append((directory, _phase(config, name, init)))
    init = str(directory)
  return runs


def _in_steps(config: ExperimentConfig, workdir) -> ExperimentConfig:
  """Returns the config with steps in place of epochs, as runs are saved."""
  epochs, data = config.train.num_epochs, config.data
  if epochs is None:
    return config
  rows = make_task(config, workdir).modality.rows_per_epoch()
  changes = {
    'train.num_epochs': None,
    'train.num_steps': max(1, int(epochs * rows / config.train.batch_size)),
  }
  if isinstance(data, TextDataConfig):
    changes['data.max_epochs'] = max(epochs, data.max_epochs)
  return config_lib.replace(config, changes)


def _alone(config: ExperimentConfig) -> str:
  """Returns what a phase by itself starts from, which must be its predecessor.

  Raises:
    UserError: it is not.
  """
  objective = config.objective
  if objective.phase not in objective.phases:
    raise UserError(
      f'objective.{objective.phase}.num_steps=0 skips the phase that'
      f' objective.phase={objective.phase!r} asks for.'
    )
  before = list(objective.phases)
  before = before[: before.index(objective.phase)]
  if config.init is None:
    raise UserError(
      f'init is missing: phase {objective.phase!r} starts from'
      + (
        f' the run of phase {before[-1]!r}.'
        if before
        else ' the model that is converted.'
      )
    )
  if before:
    found = _objective_at(config.init)
    if found is None or found.phase != before[-1]:
      raise UserError(
        f'init={config.init} is no run of phase {before[-1]!r}, which phase'
        f' {objective.phase!r} starts from: train that first, or skip it by'
        f' objective.{before[-1]}.num_steps=0.'
      )
  return config.init


def _dense(config: ExperimentConfig) -> ExperimentConfig:
  """Returns the run that trains the dense model."""
  changes = {
    'name': f'{config.name} dense',
    'model': config.model.dense_twin(),
    'objective': None,
    'dense': None,
    'optimizer': dataclasses.replace(
      config.optimizer,
      learning_rate=config.dense.learning_rate,
      warmup_steps=config.dense.warmup_steps,
      rules=(),
    ),
    'train': dataclasses.replace(
      config.train,
      num_steps=config.dense.num_steps,
      batch_size=config.dense.batch_size,
      capacity_warmup_steps=0,
    ),
  }
  return dataclasses.replace(config, **changes)


def _phase(config: ExperimentConfig, name: str, init: str) -> ExperimentConfig:
  """Returns the run of one phase."""
  phase = getattr(config.objective, name)
  optimizer = dataclasses.replace(
    config.optimizer,
    learning_rate=phase.learning_rate,
    warmup_steps=phase.warmup_steps,
    final_fraction=min(1.0, _FINAL_RATE / phase.learning_rate),
    rules=_rules(config, name),
  )
  return dataclasses.replace(
    config_lib.replace(
      config,
      {
        'name': f'{config.name} {name}',
        'objective.phase': name,
        'objective.teacher': config.objective.teacher or _teacher(config),
        'train.num_steps': phase.num_steps,
        'train.batch_size': phase.batch_size,
      },
    ),
    init=init,
    optimizer=optimizer,
  )


def _objective_at(init: str) -> ACMObjective | None:
  """Returns what the run at a path minimised, if there is an adaptive one."""
  if not workdir_lib.holds_run(init):
    return None
  found = workdir_lib.read_config(init, ExperimentConfig).objective
  return found if isinstance(found, ACMObjective) else None


def _teacher(config: ExperimentConfig) -> str:
  """Returns where the weights lie that a conversion began with."""
  found = _objective_at(config.init)
  return (found and found.teacher) or config.init


def train(
  config: ExperimentConfig,
  workdir,
  *,
  max_steps: int | None = None,
  allow_changed_data: bool = False,
  **kwargs,
) -> loop.Result:
  """Trains, or continues, all phases; see `loop.train`.

  Args:
    config: the experiment.
    workdir: directory of its last run.
    max_steps: stop after so many steps of this call, over all phases.
    allow_changed_data: as for `loop.train`.
    **kwargs: what else `loop.train` takes, for each phase.

  Returns:
    How the last run ended, or else the phase during or after which it stopped.
  """
  *before, last = expand(config, workdir)
  with stop_lib.listening(), lock_lib.held(last[0]):
    return _train(before, last, max_steps, allow_changed_data, kwargs)


def _train(before, last, max_steps, allow_changed_data, kwargs):
  data = {'allow_changed_data': allow_changed_data}
  before = [phase for phase in before if finished(*phase, **data) is None]
  for directory, run in (*before, last):
    # Refuses steps that a later phase does not have, before any is trained.
    Profiler(directory, kwargs.get('profile'), run.train.num_steps)

  def train_one(directory, run):
    task = make_task(run, directory)
    return loop.train(
      task, run, directory, max_steps=max_steps, **data, **kwargs
    )

  for directory, run in before:
    result = train_one(directory, run)
    if not result.finished:
      return result
    if stop_lib.requested():
      if jax.process_index() == 0:
        print(
          f'stopped after {directory.name.replace("_", " ")}, saved; the same'
          ' command continues.',
          file=sys.stderr,
        )
      return dataclasses.replace(result, finished=False, metrics={})
    if max_steps is not None:
      max_steps -= result.steps
    del result  # The next phase needs the memory of its state.
  return train_one(*last)


def finished(
  workdir, config: ExperimentConfig, *, allow_changed_data: bool = False
) -> dict[str, float] | None:
  """Returns the last held-out metrics of a run that needs nothing more.

  None stands for a run that is missing, not finished, or of another config.

  Raises:
    UserError: it was finished over other data than are there now.
  """
  if not workdir_lib.holds_run(workdir):
    return None
  last = config.train.num_steps
  if (
    # The settings of the evaluation may have changed since.
    workdir_lib.read_config(workdir, ExperimentConfig) != config
    or last not in checkpoints_lib.steps(workdir_lib.checkpoints(workdir))
    # This is the last file that a run writes.
    or evaluation_lib.last_step(workdir) != last
  ):
    return None
  saved = checkpoints_lib.peek(workdir_lib.checkpoints(workdir), last)
  if saved is None:
    return None
  data = make_task(config, workdir).data_fingerprint()
  origin_lib.check_data(saved, data, allow=allow_changed_data)
  for line in reversed(metrics_lib.read(workdir)):
    if line['kind'] == 'eval' and line['step'] == last:
      return {k: v for k, v in line.items() if k not in ('step', 'kind')}
  return None
