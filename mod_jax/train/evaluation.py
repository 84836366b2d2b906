"""Evaluating a run that was trained, or is still training."""

import dataclasses
import json
from typing import Any

import jax

from mod_jax import parallel
from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.train import metrics as metrics_lib
from mod_jax.train import optimizer as optimizer_lib
from mod_jax.train import state as state_lib
from mod_jax.train import workdir as workdir_lib
from mod_jax.train.checkpoints import restore_subtree
from mod_jax.train.task import Task
from mod_jax.train.tasks import make_task


@dataclasses.dataclass(frozen=True)
class Trained:
  """A task with the parameters that a run has reached.

  Attributes:
    step: of the checkpoint.
    task: says how to evaluate, sample and draw.
    params: the parameters.
    mutables: other collections of the model.
    mesh: where they lie.
  """

  step: int
  task: Task
  params: Any
  mutables: Any
  mesh: jax.sharding.Mesh


def load(workdir, *, step: int | None = None) -> Trained:
  """Returns what a run has learnt; changes nothing on disk.

  Args:
    workdir: the run's directory.
    step: the checkpoint to read; the newest usable one by default.

  Raises:
    UserError: no run there, no such checkpoint, or one that does not fit the
      run's config.
  """
  workdir = workdir_lib.expand(workdir)
  config = workdir_lib.read_config(workdir)
  task = make_task(config)
  try:
    mesh = parallel.make_mesh(config.mesh)
  except UserError:  # Trained on other devices than these.
    mesh = parallel.make_mesh(parallel.MeshConfig())
  optimizer = optimizer_lib.make_optimizer(
    config.optimizer, config.train.num_steps
  )
  with jax.set_mesh(mesh):
    abstract = state_lib.abstract_state(task, optimizer, mesh)
    restored = restore_subtree(
      workdir_lib.checkpoints(workdir),
      {'params': abstract.params, 'mutables': abstract.mutables},
      step=step,
    )
  if restored is None:
    raise UserError(
      f'--workdir={workdir} holds no checkpoint yet: train it for longer.'
    )
  return Trained(
    restored.step,
    task,
    restored.state['params'],
    restored.state['mutables'],
    mesh,
  )


def evaluate(
  trained: Trained, workdir, *, batches: int | None = None
) -> dict[str, float]:
  """Evaluates, prints the table, draws the pictures, writes `eval.json`.

  Args:
    trained: from `load`.
    workdir: the run's directory.
    batches: held-out batches; 0 for all, None for the config's.
  """
  with jax.set_mesh(trained.mesh):
    if batches is None:
      batches = trained.task.config.evaluation.final_batches
    metrics = trained.task.evaluate(
      trained.params, trained.mutables, trained.mesh, batches=batches
    )
    if jax.process_index() == 0:
      report(trained, metrics, workdir)
  return metrics


def report(trained: Trained, metrics: dict[str, float], workdir) -> None:
  """Prints held-out metrics, keeps them in `eval.json`, draws the pictures.

  Pictures of the model are drawn by one host alone, so they are left out
  where its parameters are spread over several.
  """
  workdir = workdir_lib.expand(workdir)
  print(f'held-out, at step {trained.step}:')
  print(trained.task.summary(metrics))
  workdir_lib.write_text(
    f'{workdir}/eval.json',
    json.dumps({'step': trained.step, **metrics}, indent=2) + '\n',
  )
  figures = {}
  if jax.process_count() == 1:
    figures = trained.task.pictures(trained.params, trained.mutables)
  figures['curves'] = viz.loss_curves(
    metrics_lib.read(workdir), title='Loss over training'
  )
  for name, figure in figures.items():
    path = workdir_lib.pictures(workdir) / f'{name}.png'
    viz.save(figure, path)
    print(f'picture: {path}')
