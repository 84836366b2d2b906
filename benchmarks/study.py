"""Studies of many small runs, whose results are lines of one file.

A run that has a line is not trained again, one that was stopped continues in
its workdir, and several processes may share the work.
"""

from collections.abc import Callable, Mapping
import fcntl
import json
import os
import pathlib
import re
import time
from typing import Any

from absl import flags
import machine

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.errors import UserError
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig

# Absl then attributes flags defined here to the calling script.
flags.disclaim_key_flags()


def read(path: pathlib.Path) -> dict[str, dict]:
  """Returns the results of the finished runs, by name."""
  if not path.exists():
    return {}
  lines = map(json.loads, path.read_text().splitlines())
  return {line['run']: line for line in lines}


def forward_flops(config: ExperimentConfig, load: float | None) -> float:
  """Returns the FLOPs of an example if the share `load` of learners runs."""
  total = flops.forward(config.model)
  if load is None:
    return total
  table = config.model.flops_table()
  return total - (1 - load) * sum(x.get('learners', 0) for _, x in table)


def of_images(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a vision model's run."""
  return {
    'accuracy': metrics['accuracy'],
    'loss': metrics['loss'],
    'load': metrics.get('load'),
    'forward_flops': forward_flops(config, metrics.get('load')),
    'params': flops.num_params(config.model),
    'steps': config.train.num_steps,
    'batch': config.train.batch_size,
  }


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
    'fixed_rule': metrics.get('fixed/loss'),
    'experts': _of_experts(metrics),
    'steps': config.train.num_steps,
    'forward_flops': flops.forward(config.model, length),
    'train_flops': flops.train(config.model, length) * rows,
    'params': flops.num_params(config.model),
  }


class Study:
  """The runs of a script; results are lines of the JSONL file beside it.

  It defines the flags `workdir`, `runs`, `table` and `tiny`. The files of a
  trial, by --tiny, are in the directory of its runs.
  """

  def __init__(self, script: str, workdir: str):
    self._script = script
    self._workdir = flags.DEFINE_string('workdir', workdir, 'For the runs.')
    self._runs = flags.DEFINE_string(
      'runs', '', 'Regular expression; only these runs.'
    )
    self._table = flags.DEFINE_bool(
      'table', False, 'Only print, or draw, what is there.'
    )
    self._tiny = flags.DEFINE_bool(
      'tiny', False, 'Small models and few steps: a trial.'
    )

  @property
  def tiny(self) -> bool:
    """Whether this is a trial."""
    return self._tiny.value

  @property
  def only_table(self) -> bool:
    """Whether nothing is trained."""
    return self._table.value

  def workdir(self, run: str) -> pathlib.Path:
    """Returns the directory of a run."""
    return pathlib.Path(
      self._workdir.value, re.sub('[^A-Za-z0-9_./]+', '_', run)
    )

  def path(self, suffix: str = '.jsonl') -> pathlib.Path:
    """Returns the path of a result; the suffix replaces `.py`."""
    trial = self._workdir.value if self.tiny else None
    return machine.result_path(self._script, suffix, trial)

  def results(self) -> dict[str, dict]:
    """Returns the results of the finished runs, by name."""
    return read(self.path())

  def train(
    self,
    planned: Mapping[str, ExperimentConfig],
    tell: Callable[[ExperimentConfig, dict], dict] = of_language,
    train: Callable[[ExperimentConfig, pathlib.Path], Any] = phases.train,
  ) -> None:
    """Trains runs in order, unless --table, and records their results.

    Runs that another process trains are skipped, and so are those that begin
    with a run that is not finished.

    Args:
      planned: configs by name, of which those that --runs matches are trained.
      tell: returns a run's result, given its config and held-out metrics.
      train: trains a run in its directory, and returns a `loop.Result`.

    Raises:
      UserError: a signal stopped one.
    """
    places = {os.path.abspath(self.workdir(name)): name for name in planned}
    for name, config in planned.items():
      if self.only_table or not re.search(self._runs.value, name):
        continue
      first = places.get(config.init and os.path.abspath(config.init))
      # Another process may still be training it.
      if first is not None and first not in self.results():
        print(f'{name} begins with {first}, which is not finished: skipped')
        continue
      self._train(config_lib.replace(config, {'name': name}), tell, train)

  def _train(self, config, tell, train):
    """Trains a run, unless another process trains it."""
    name, directory = config.name, self.workdir(config.name)
    directory.mkdir(parents=True, exist_ok=True)
    continued = any(directory.iterdir())
    with (directory / 'busy').open('w') as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        return
      if name in self.results():
        return
      started, worked = time.monotonic(), time.process_time()
      result = train(config, directory)
      if not result.finished:
        raise UserError(f'{name} was stopped: the same command continues.')
      took = {
        'seconds': round(time.monotonic() - started),
        # Of all cores: other processes do not count.
        'cpu_seconds': round(time.process_time() - worked),
      }
      # What a run took that was stopped and continued is not known.
      took = {} if continued else took
      self.record(name, {**tell(config, result.metrics), **took})

  def record(self, name: str, result: dict) -> None:
    """Adds a run's line to the results."""
    line = {'run': name, **result, **machine.environment()}
    self.path().parent.mkdir(parents=True, exist_ok=True)
    with self.path().open('a') as file:
      file.write(json.dumps(line) + '\n')


def _of_experts(metrics: dict[str, float]) -> dict[str, float]:
  """Returns the metrics of experts without their prefix; see `losses`."""
  return {
    name.split('experts/')[1]: value
    for name, value in metrics.items()
    if re.fullmatch('(top_k/)?experts/.*', name)
  }
