"""Evaluates a run, finished or still training."""

from collections.abc import Iterable
import contextlib
import dataclasses
import functools
import json
from typing import Any

from absl import logging
import jax

from mod_jax import config as config_lib
from mod_jax import parallel, viz
from mod_jax.errors import UserError
from mod_jax.losses import sums as sums_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import restore_subtree
from mod_jax.train import state as state_lib
from mod_jax.train.task import Task

_METRICS = 'eval.json'


@dataclasses.dataclass(frozen=True)
class Trained:
  """A task with the parameters that a run has reached.

  Attributes:
    step: of the checkpoint.
    task: says how to evaluate, sample and draw.
    params: the parameters to use: averages, if the run keeps any.
    model_state: other collections of the model.
    mesh: the device mesh that holds them.
  """

  step: int
  task: Task
  params: Any
  model_state: Any
  mesh: jax.sharding.Mesh


def load(task: Task, workdir, *, step: int | None = None) -> Trained:
  """Returns the parameters of a run's checkpoint; changes nothing on disk.

  Args:
    task: of the run.
    workdir: the run's directory.
    step: the checkpoint to read; the newest usable one by default.

  Raises:
    UserError: there is no such checkpoint, or it does not fit the run's config,
      which may have been edited since.
  """
  workdir, config = workdir_lib.expand(workdir), task.config
  task.check()
  try:
    mesh = parallel.make_mesh(config.mesh)
  except UserError:  # It was trained on other devices.
    mesh = parallel.make_mesh(parallel.MeshConfig())
  with jax.set_mesh(mesh):
    _, abstract = state_lib.of_run(task, mesh)
    params = 'params' if abstract.ema is None else 'ema'
    restored = restore_subtree(
      workdir_lib.checkpoints(workdir),
      {params: abstract.eval_params, 'model_state': abstract.model_state},
      step=step,
      check=functools.partial(origin_lib.check_config, workdir, config),
    )
  if restored is None:
    raise UserError(
      f'--workdir={workdir} holds no checkpoint yet: train it for longer.'
    )
  # Missing data are no error here: sampling needs none, and an evaluation
  # reports them itself.
  with contextlib.suppress(UserError):
    if changes := origin_lib.changed_data(restored, task.data_fingerprint()):
      logging.warning('%s: judging by what is there now.', changes)
  return Trained(
    restored.step,
    task,
    restored.state[params],
    restored.state['model_state'],
    mesh,
  )


def held_out(
  task: Task,
  params,
  model_state,
  mesh,
  *,
  batches: int | None = None,
  more: bool = False,
) -> dict[str, float]:
  """Returns a task's held-out metrics, by prefix of the mode and name.

  Args:
    task: defines the batches, and the metrics of each.
    params: the parameters, on the mesh.
    model_state: other collections of the model, on the mesh.
    mesh: the device mesh.
    batches: how many; 0 for all, None for `config.evaluation.batches`.
    more: whether to use the modes that only `eval.py` reports.
  """
  modes = task.eval_modes(more=more)
  if not modes:
    return {}
  settings = task.config.evaluation
  batches = settings.batches if batches is None else batches
  batch_size = settings.batch_size
  parallel.check_batch(batch_size, mesh, 'evaluation.batch_size')
  index, count = parallel.row_shard(mesh)
  held_out_batches = task.eval_batches(
    batch_size=batch_size // count,
    num_batches=batches or None,
    shard_index=index,
    shard_count=count,
  )
  sums = {}
  key = jax.random.key(task.config.seed)
  for i, batch in enumerate(stop_lib.each(held_out_batches)):
    batch = parallel.put_batch(batch, mesh)
    for prefix, mode in modes.items():
      more_sums = _eval_step(task)(
        params, model_state, batch, jax.random.fold_in(key, i), mode=mode
      )
      sums[prefix] = sums_lib.add(sums.get(prefix, {}), more_sums)
  return task.finish_metrics(
    {
      prefix + name: value
      for prefix, mode_sums in sums.items()
      for name, value in metrics_lib.finalize(mode_sums).items()
    }
  )


@functools.lru_cache(maxsize=8)
def _eval_step(task: Task):
  """Returns the jitted step, cached so that evaluations share it."""
  return jax.jit(task.eval_step, static_argnames='mode')


def evaluate(
  trained: Trained, workdir, *, batches: int | None = None
) -> dict[str, float]:
  """Evaluates, prints the table, draws the pictures, writes `eval.json`.

  `batches` is the number of held-out batches; 0 for all, None for
  `config.evaluation.final_batches`.
  """
  with jax.set_mesh(trained.mesh):
    if batches is None:
      batches = trained.task.config.evaluation.final_batches
    run = (trained.task, trained.params, trained.model_state, trained.mesh)
    metrics = held_out(*run, batches=batches)
    metrics |= held_out(*run, batches=batches, more=True)
    if jax.process_index() == 0:
      report(trained, metrics, workdir)
  return metrics


def report(trained: Trained, metrics: dict[str, float], workdir) -> None:
  """Draws the pictures, writes metrics to `eval.json`, then prints them.

  In this order, since `eval.json` marks a run as complete, and printing may
  fail. Pictures of the model are drawn by one host alone, so they are left out
  if its parameters are spread over several.
  """
  workdir = workdir_lib.expand(workdir)
  figures = {}
  if jax.process_count() == 1:
    figures = trained.task.pictures(trained.params, trained.model_state)
  figures |= trained.task.curves(metrics_lib.read(workdir))
  _save_pictures(figures, workdir)
  _write_json(workdir / _METRICS, {'step': trained.step, **metrics})
  print(f'held-out, at step {trained.step}:')
  print(trained.task.summary(metrics))
  _print_pictures(figures, workdir)


def last_step(workdir) -> int | None:
  """Returns the step of the last report in `eval.json`, or None."""
  path = workdir_lib.expand(workdir) / _METRICS
  try:
    return json.loads(path.read_text())['step']
  except (OSError, ValueError, KeyError, TypeError):
    return None


def find_studies(task: Task, names: Iterable[str]) -> dict[str, Any]:
  """Returns the studies of these names.

  Raises:
    UserError: the task has no study of a name.
  """
  studies = task.studies()
  names = list(names)
  if names and not studies:
    raise UserError(
      f'--study={names[0]}: there are no studies of this kind of model; leave'
      ' --study out.'
    )
  return {name: config_lib.choose(name, studies, 'study') for name in names}


def study(trained: Trained, names: Iterable[str], workdir) -> None:
  """Runs studies of `task.studies()`, by name; prints and saves their results.

  Metrics go to `study_NAME.json` in the run's directory, beside the pictures.

  Raises:
    UserError: a study does not exist; then none is run.
  """
  workdir = workdir_lib.expand(workdir)
  for name, run in find_studies(trained.task, names).items():
    with jax.set_mesh(trained.mesh):
      result = run(trained.params, trained.model_state, trained.mesh)
    if jax.process_index() != 0:
      continue
    _write_json(
      workdir / f'study_{name}.json', {'step': trained.step, **result.metrics}
    )
    figures = {f'study_{name}_{k}': v for k, v in result.figures.items()}
    _save_pictures(figures, workdir)
    print(f'{name}, at step {trained.step}:')
    print(result.text)
    _print_pictures(figures, workdir)


def _write_json(path, value):
  workdir_lib.write_text(path, metrics_lib.to_json(value, indent=2) + '\n')


def _save_pictures(figures, workdir):
  for name, figure in stop_lib.each(figures.items()):
    viz.save(figure, workdir_lib.pictures(workdir) / f'{name}.png')


def _print_pictures(figures, workdir):
  for name in figures:
    print(f'picture: {workdir_lib.pictures(workdir)}/{name}.png')
