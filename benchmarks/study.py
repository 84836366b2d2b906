"""Studies of many small runs, whose results are lines of one file.

A run that has a line is not trained again, one that was stopped continues in
its workdir, and several processes may share the work.
"""

from collections.abc import Callable, Mapping
import fcntl
import json
import pathlib
import re
import time

from absl import flags
import machine

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.errors import UserError
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig

# Absl then attributes flags defined here to the calling script.
flags.disclaim_key_flags()


def define_flags(workdir: str) -> tuple[flags.FlagHolder, ...]:
  """Defines and returns flags: `workdir`, `runs`, `table` and `tiny`."""
  return (
    flags.DEFINE_string('workdir', workdir, 'For the runs.'),
    flags.DEFINE_string('runs', '', 'Regular expression; only these runs.'),
    flags.DEFINE_bool('table', False, 'Only print, or draw, what is there.'),
    flags.DEFINE_bool('tiny', False, 'Small models and few steps: a trial.'),
  )


def read(path: pathlib.Path) -> dict[str, dict]:
  """Returns the results of the finished runs, by name."""
  if not path.exists():
    return {}
  lines = map(json.loads, path.read_text().splitlines())
  return {line['run']: line for line in lines}


def workdir(root, name: str) -> pathlib.Path:
  """Returns the directory of a run."""
  return pathlib.Path(root, re.sub('[^A-Za-z0-9_./]+', '_', name))


def forward_flops(config: ExperimentConfig, load: float | None) -> float:
  """Returns the FLOPs of an example if the share `load` of learners runs."""
  total = flops.forward(config.model)
  if load is None:
    return total
  table = config.model.flops_table()
  return total - (1 - load) * sum(x.get('learners', 0) for _, x in table)


def of_language(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a language model's run."""

  def held_out(name):  # Metrics of dense models have no rule as prefix.
    return metrics.get(f'top_k/{name}', metrics.get(name))

  length = config.data.length
  rows = config.train.batch_size * config.train.num_steps
  return {
    'loss': held_out('loss'),
    'bits_per_byte': held_out('bits_per_byte'),
    'without_routed_blocks': metrics.get('never/loss'),
    'router_rule': metrics.get('router/loss'),
    'threshold_rule': metrics.get('threshold/loss'),
    'experts': _of_experts(metrics),
    'steps': config.train.num_steps,
    'forward_flops': flops.forward(config.model, length),
    'train_flops': flops.train(config.model, length) * rows,
    'params': flops.num_params(config.model),
  }


def train(
  name: str,
  config: ExperimentConfig,
  root,
  path: pathlib.Path,
  tell: Callable[[ExperimentConfig, dict], dict] = of_language,
) -> None:
  """Trains a run, unless another process trains it, and records the result.

  Args:
    name: name of the run.
    config: config of the run.
    root: parent directory of the runs.
    path: file of the results.
    tell: returns a run's result, given its config and held-out metrics.

  Raises:
    UserError: a signal stopped it.
  """
  directory = workdir(root, name)
  directory.mkdir(parents=True, exist_ok=True)
  with (directory / 'busy').open('w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return
    if name in read(path):
      return
    started, worked = time.monotonic(), time.process_time()
    result = phases.train(config_lib.replace(config, {'name': name}), directory)
    if not result.finished:
      raise UserError(f'{name} was stopped: the same command continues.')
    line = {
      'run': name,
      **tell(config, result.metrics),
      'seconds': round(time.monotonic() - started),
      # Of all cores: other processes do not count.
      'cpu_seconds': round(time.process_time() - worked),
      **machine.environment(),
    }
    with path.open('a') as file:
      file.write(json.dumps(line) + '\n')


def train_all(
  planned: Mapping[str, ExperimentConfig],
  pattern: str,
  root,
  path: pathlib.Path,
  tell: Callable[[ExperimentConfig, dict], dict] = of_language,
) -> None:
  """Trains the runs whose names match a regular expression; see `train`."""
  for name, config in planned.items():
    if re.search(pattern, name):
      train(name, config, root, path, tell)


def _of_experts(metrics: dict[str, float]) -> dict[str, float]:
  """Returns the metrics of experts without their prefix; see `losses`."""
  return {
    name.split('experts/')[1]: value
    for name, value in metrics.items()
    if re.fullmatch('(top_k/)?experts/.*', name)
  }
