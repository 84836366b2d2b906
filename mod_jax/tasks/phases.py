"""Experiments of several phases: each phase starts from the one before.

A phase is a run with its own loop, checkpoints and metrics. It can be stopped
and resumed anywhere, and can be skipped or run alone.
"""

import dataclasses
import sys

from etils import epath
import jax

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.models import acm, wav2vec2
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs import checkpoints as checkpoints_lib
from mod_jax.runs import history as history_lib
from mod_jax.runs import lock as lock_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import (
  ACMObjective,
  ExperimentConfig,
  PhaseConfig,
)
from mod_jax.train import evaluation as evaluation_lib
from mod_jax.train import loop
from mod_jax.train import profile as profile_lib

_FINAL_RATE = 1e-6  # Learning rate at the end of every phase.
# Phases before the last ignore these settings: they may not measure the metric
# that `checkpoint.best` names.
_WITHOUT_BEST = {'checkpoint.best': None, 'train.early_stop': 0}


def _rules(config: ExperimentConfig, phase: str):
  """Returns the optimiser's rules of a phase: what it trains and freezes."""
  # Here training removes patches instead of masking them, so the modules that
  # predict which to drop get no gradient. Freeze these against weight decay.
  frozen = ()
  if isinstance(config.model, DynamicViTConfig) and config.model.learned:
    frozen = (('^(prediction|pattern)_', 0.0, 0),)
  # Fine-tuning of a speech recogniser usually freezes its convolutions.
  if isinstance(config.model, Wav2Vec2Config):
    frozen = ((wav2vec2.CONVOLUTIONS, 0.0, 0),)
  return {
    'learners': (
      (acm.GATES, 0.0, 0),
      (acm.PARAMETERS, 1.0, 0),
      ('.*', 0.0, 0),
    ),
    'gates': ((acm.GATES, 1.0, 0), ('.*', 0.0, 0)),
    'end_to_end': (
      *frozen,
      (acm.GATES, config.objective.gate_rate, 0),
      ('.*', 1.0, 0),
    ),
  }[phase]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What `complete` returns: final metrics, or why training diverged."""

  metrics: dict[str, float]  # Final held-out metrics; empty if it diverged.
  diverged: str = ''  # Error message of a training that diverged, else ''.


def complete(
  config: ExperimentConfig, workdir, *, allow_changed_data: bool = False
) -> Outcome | None:
  """Trains an experiment unless it is finished; returns its outcome.

  This is for sweeps: if a run diverges, an outcome is returned and no error is
  raised. Returns None if a signal stopped the experiment. Arguments and other
  errors are those of `train`.
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
  """Returns directory and config of each run of an experiment.

  The last run is in `workdir` itself; earlier phases are in subdirectories
  `phase_<name>` of `workdir`. An experiment without phases is one run.

  Raises:
    UserError: all phases are skipped, or the run to start from is missing or is
      not of the previous phase.
  """
  config = _in_steps(_with_objective(config), workdir)
  # The configs hold paths below `workdir`. These are absolute, so that a run
  # can be continued from another current directory.
  workdir = paths.absolute(workdir)
  objective = config.objective
  if config.dense is not None and config.dense.num_steps:
    dense_dir = workdir / f'{workdir_lib.PHASE}dense'
    remaining = dataclasses.replace(config, dense=None, init=str(dense_dir))
    return [(dense_dir, _dense(config)), *expand(remaining, workdir)]
  if not isinstance(objective, ACMObjective):
    return [(workdir, config)]
  phases = list(objective.phases)
  if not phases:
    raise UserError(
      'objective: all phases have num_steps=0, so there is nothing to train.'
    )
  if config.init is None:
    raise UserError(
      'init is missing: an adaptive model is made of another, dense, routed or'
      ' pruned, and a phase alone starts from the run of the one before; give'
      ' its workdir or checkpoint by --config.init.'
    )
  if objective.phase != 'all':
    _check_alone(config)
    phases = [objective.phase]
  runs, init = [], config.init
  for name in phases:
    directory, run = workdir, _phase(config, name, init)
    if name != phases[-1]:
      directory = workdir / f'{workdir_lib.PHASE}{name}'
      run = config_lib.replace(run, _WITHOUT_BEST)
    runs.append((directory, run))
    init = str(directory)
  return runs


def last(config: ExperimentConfig) -> ExperimentConfig:
  """Returns the config of an experiment's last run.

  Unlike for `expand`, the run or the weights at `init` need not exist.
  """
  config = _with_objective(config)
  objective = config.objective
  if not isinstance(objective, ACMObjective) or not objective.phases:
    return config
  name = objective.phase
  if name == 'all':
    *_, name = objective.phases
  return _phase(config, name, config.init)


def _with_objective(config: ExperimentConfig) -> ExperimentConfig:
  """Returns the config; an adaptive model gets an objective if it has none."""
  if config.model.adaptive is None or config.objective is not None:
    return config
  return dataclasses.replace(config, objective=ACMObjective())


def _in_steps(config: ExperimentConfig, workdir) -> ExperimentConfig:
  """Converts `num_epochs` to `num_steps`, by counting the rows of the data."""
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


def _check_alone(config: ExperimentConfig) -> None:
  """Raises UserError if the phase `objective.phase` cannot be trained alone.

  Its steps must not be 0 and, unless it is the first phase, `init` must be a
  run of the phase before.
  """
  phase, phases = config.objective.phase, list(config.objective.phases)
  if phase not in phases:
    raise UserError(
      f'objective.{phase}.num_steps=0 skips the phase that objective.phase='
      f'{phase!r} asks for.'
    )
  if phase == phases[0]:
    return
  before = phases[phases.index(phase) - 1]
  previous = _objective_at(config.init)
  if previous is None or previous.phase != before:
    raise UserError(
      f'init={config.init} is no run of phase {before!r}, which phase'
      f' {phase!r} starts from: train that first, or skip it by'
      f' objective.{before}.num_steps=0.'
    )


def _run_of(config, name: str, phase: PhaseConfig, changes):
  """Returns the config of one phase's run; `changes` are further fields."""
  changes = {
    'name': f'{config.name} {name}',
    'train.num_steps': phase.num_steps,
    'train.batch_size': phase.batch_size,
    'optimizer.learning_rate': phase.learning_rate,
    'optimizer.warmup_steps': phase.warmup_steps,
    **changes,
  }
  return config_lib.replace(config, changes)


def _dense(config: ExperimentConfig) -> ExperimentConfig:
  """Returns the config of the run that trains the dense model."""
  changes = {
    'model': config.model.dense_twin(),
    'objective': None,
    'dense': None,
    'optimizer.rules': (),
    'train.frozen': None,
    'train.capacity_warmup_steps': 0,
    **_WITHOUT_BEST,
  }
  return _run_of(config, 'dense', config.dense, changes)


def _phase(
  config: ExperimentConfig, name: str, init: str | None
) -> ExperimentConfig:
  """Returns the config of the run of one phase, which starts from `init`."""
  phase, rules = getattr(config.objective, name), _rules(config, name)
  # The config of a phase's own run has the phase's rules already.
  if config.optimizer.rules not in ((), rules):
    raise UserError(
      f'objective.phase={config.objective.phase!r} and optimizer.rules: each'
      ' phase says by itself what it trains, so leave the rules out.'
    )
  changes = {
    'init': init,
    'objective.phase': name,
    'objective.teacher': config.objective.teacher or _teacher(config),
    'optimizer.final_fraction': min(1.0, _FINAL_RATE / phase.learning_rate),
    'optimizer.rules': rules,
  }
  return _run_of(config, name, phase, changes)


def _objective_at(init: str) -> ACMObjective | None:
  """Returns the objective of the adaptive run at a path, or None."""
  if not workdir_lib.holds_run(init):
    return None
  objective = workdir_lib.read_config(init, ExperimentConfig).objective
  return objective if isinstance(objective, ACMObjective) else None


def _teacher(config: ExperimentConfig) -> str | None:
  """Returns the path of the original model's weights; None without `init`."""
  objective = config.init and _objective_at(config.init)
  return (objective and objective.teacher) or config.init


def train(
  config: ExperimentConfig,
  workdir,
  *,
  max_steps: int | None = None,
  allow_changed_data: bool = False,
  **kwargs,
) -> loop.Result:
  """Trains, or continues, all phases by `loop.train`.

  Args:
    config: the experiment.
    workdir: directory of its last run.
    max_steps: stop after this many steps in this call, counted over all phases;
      None trains to the end.
    allow_changed_data: only warn if the data differ from a checkpoint's.
    **kwargs: further arguments of `loop.train`, for each phase.

  Returns:
    The result of the last run, or of the phase during or after which training
    was stopped.
  """
  *before, last = expand(config, workdir)
  data = {'allow_changed_data': allow_changed_data}
  with stop_lib.listening(), lock_lib.held(last[0]):
    before = [phase for phase in before if finished(*phase, **data) is None]
    for directory, run in (*before, last):
      # Fail before the first phase if a later one cannot trace these steps.
      profile_lib.check(directory, kwargs.get('profile'), run.train.num_steps)
    if (best := last[1].checkpoint.best) is not None:
      make_task(last[1], last[0]).direction(best)
    for directory, run in (*before, last):
      result = None  # Frees the memory of the previous phase's state.
      task = make_task(run, directory)
      result = loop.train(
        task, run, directory, max_steps=max_steps, **data, **kwargs
      )
      if not result.finished or directory == last[0]:
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


def finished(
  workdir, config: ExperimentConfig, *, allow_changed_data: bool = False
) -> dict[str, float] | None:
  """Returns the final held-out metrics of a finished run.

  Returns None if the run is missing, not finished, or has another config.

  Raises:
    UserError: the data have changed since the run was finished; with
      `allow_changed_data` this is only a warning.
  """
  if not workdir_lib.holds_run(workdir):
    return None
  last = history_lib.ended_early(workdir, config.train.early_stop)
  if last is None:
    last = config.train.num_steps
  if (
    # Any field counts, such as changed settings of the evaluation.
    workdir_lib.read_config(workdir, ExperimentConfig) != config
    or last not in checkpoints_lib.steps(workdir_lib.checkpoints(workdir))
    # `eval.json` is the last file that a run writes.
    or evaluation_lib.last_step(workdir) != last
  ):
    return None
  saved = checkpoints_lib.peek(workdir_lib.checkpoints(workdir), last)
  if saved is None:
    return None
  data = make_task(config, workdir).modality.data_fingerprint()
  origin_lib.check_data(saved, data, allow=allow_changed_data)
  for line in reversed(metrics_lib.read(workdir)):
    if line['kind'] == 'eval' and line['step'] == last:
      return {k: v for k, v in line.items() if k not in ('step', 'kind')}
  return None
