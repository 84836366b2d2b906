"""Evaluates a run, finished or still training, and reports the results."""

import collections
from collections.abc import Callable, Iterable
import contextlib
import dataclasses
import functools
import math
from typing import Any

from absl import logging
import jax

from mod_jax import config as config_lib
from mod_jax import parallel, paths, viz
from mod_jax.errors import UserError
from mod_jax.losses import sums as sums_lib
from mod_jax.runs import best as best_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import restore_subtree
from mod_jax.runs.run_config import RunConfig
from mod_jax.train import state as state_lib
from mod_jax.train.task import Method, Study

_METRICS = 'eval.json'
# Maximum number of dispatched steps whose results are not read yet. Each keeps
# a batch in memory, and simulated devices deadlock if over 32 programs wait.
_AHEAD = 3


@dataclasses.dataclass(frozen=True)
class Trained:
  """A task with the parameters of a checkpoint or of the end of training."""

  step: int
  task: Method
  params: Any  # The moving averages, if the run keeps any.
  model_state: Any
  mesh: jax.sharding.Mesh  # The arrays are on its devices.


def mesh_of(config: RunConfig) -> jax.sharding.Mesh:
  """Returns a run's mesh or, if it does not fit the devices here, another mesh.

  The other mesh replicates the parameters over the largest number of devices
  that divides both a held-out batch and the number of devices here; with
  several hosts, over all devices.
  """
  rows, devices = config.evaluation.batch_size, jax.devices()
  try:
    mesh = parallel.make_mesh(config.mesh)
    parallel.check_batch(rows, mesh, 'evaluation.batch_size')
  except UserError:
    if jax.process_count() == 1:  # Several hosts must all be in the mesh.
      devices = devices[: math.gcd(rows, len(devices))]
    mesh = parallel.make_mesh(parallel.MeshConfig(), devices)
  return mesh


def load(task: Method, workdir, *, step: best_lib.Step = None) -> Trained:
  """Returns the task with a checkpoint's parameters; changes nothing on disk.

  `step` is the step of the checkpoint, or 'best' for the step in `best.json`;
  None loads the newest usable checkpoint.

  Raises:
    UserError: there is no such checkpoint, or it does not fit the run's config,
      which may have been edited since the checkpoint was saved.
  """
  workdir, config = workdir_lib.expand(workdir), task.config
  task.modality.check()
  mesh = mesh_of(config)
  with jax.set_mesh(mesh):
    _, abstract = state_lib.of_run(task, mesh)
    name = 'params' if abstract.ema is None else 'ema'
    frozen = None
    if abstract.frozen is not None:
      frozen, digest = state_lib.read_frozen(task, abstract)

    def check(saved):
      origin_lib.check_config(workdir, config, saved)
      if frozen is not None:
        origin_lib.check_frozen(saved, {origin_lib.FROZEN: digest}, config.init)

    restored = restore_subtree(
      workdir_lib.checkpoints(workdir),
      {name: abstract.saved.eval_params, 'model_state': abstract.model_state},
      step=best_lib.resolve(workdir, step),
      check=check,
    )
  if restored is None:
    raise UserError(
      f'--workdir={workdir} holds no checkpoint yet: train it for longer.'
    )
  # Missing data are no error here: sampling needs none, and an evaluation
  # reports them itself.
  with contextlib.suppress(UserError):
    data = task.modality.data_fingerprint()
    if changes := origin_lib.changed_data(restored, data):
      logging.warning('%s: judging by what is there now.', changes)
  return Trained(
    restored.step,
    task,
    state_lib.with_frozen(restored.state[name], frozen),
    restored.state['model_state'],
    mesh,
  )


def held_out(
  task: Method,
  params,
  model_state,
  mesh,
  *,
  batches: int | None = None,
  more: bool = False,
) -> dict[str, float]:
  """Returns a task's held-out metrics, by name with the prefix of the mode.

  `params` and `model_state` are on the mesh. `batches` is the number of
  held-out batches; 0 for all, None for `config.evaluation.batches`. With
  `more`, only the modes are evaluated that only `eval.py` reports.
  """
  modes = task.eval_modes(more=more)
  if not modes:
    return {}
  settings = task.config.evaluation
  batches = settings.batches if batches is None else batches
  parallel.check_batch(settings.batch_size, mesh, 'evaluation.batch_size')
  index, count = parallel.row_shard(mesh)
  held_out_batches = task.modality.eval_batches(
    batch_size=settings.batch_size // count,
    num_batches=batches or None,
    shard_index=index,
    shard_count=count,
  )
  sums = {prefix: {} for prefix in modes}
  waiting = collections.deque()

  def read_all_but(newest: int):
    while len(waiting) > newest:
      prefix, found = waiting.popleft()
      sums[prefix] = sums_lib.add(sums[prefix], metrics_lib.on_host(found))

  key = jax.random.key(task.config.seed)
  for i, batch in enumerate(stop_lib.each(held_out_batches)):
    batch = parallel.put_batch(batch, mesh)
    key_of_batch = jax.random.fold_in(key, i)
    for prefix, mode in modes.items():
      found = _eval_step(task)(
        params, model_state, batch, key_of_batch, mode=mode
      )
      waiting.append((prefix, found))
      read_all_but(_AHEAD)
  read_all_but(0)
  return task.finish_metrics(
    {
      prefix + name: value
      for prefix, sums_of_mode in sums.items()
      for name, value in metrics_lib.finalize(sums_of_mode).items()
    }
  )


@functools.lru_cache(maxsize=8)
def _eval_step(task: Method):
  """Returns the jitted `task.eval_step`, which all evaluations share."""
  return jax.jit(task.eval_step, static_argnames='mode')


def evaluate(
  trained: Trained, workdir, *, batches: int | None = None
) -> dict[str, float]:
  """Evaluates a run in all modes, reports the metrics, and returns them.

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

  With several hosts, pictures of the model are left out: one host draws them,
  and the parameters are spread over all hosts.
  """
  figures = {}
  if jax.process_count() == 1:
    figures = trained.task.pictures(trained.params, trained.model_state)
  figures |= trained.task.curves(metrics_lib.read(workdir))
  text = trained.task.summary(metrics)
  record = {'step': trained.step, **metrics}
  _publish(workdir, _METRICS, record, figures, 'held-out', text)


def last_step(workdir) -> int | None:
  """Returns the step of the last report in `eval.json`, or None."""
  return paths.read_object(workdir_lib.expand(workdir) / _METRICS).get('step')


def find_studies(
  task: Method, names: Iterable[str]
) -> dict[str, Callable[..., Study]]:
  """Returns the studies of these names; raises UserError if one is unknown."""
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

  Metrics go to `study_NAME.json` in the run's directory, files of the study
  beside them as `study_NAME_FILE`, and figures to the run's pictures.

  Raises:
    UserError: a study does not exist; raised before any study is run.
  """
  for name, run in find_studies(trained.task, names).items():
    with jax.set_mesh(trained.mesh):
      result = run(trained.params, trained.model_state, trained.mesh)
    if jax.process_index() == 0:
      record = {'step': trained.step, **result.metrics}
      figures = {f'study_{name}_{k}': v for k, v in result.figures.items()}
      for file, text in result.files.items():
        path = workdir_lib.expand(workdir) / f'study_{name}_{file}'
        paths.write_bytes(path, text.encode('utf-8', 'backslashreplace'))
      file = f'study_{name}.json'
      _publish(workdir, file, record, figures, name, result.text)


def _publish(workdir, file, record, figures, title, text):
  """Saves pictures, then a record, then prints the text.

  The order matters: `eval.json` marks a run as complete, and printing may fail.
  """
  workdir = workdir_lib.expand(workdir)
  paths = [workdir_lib.pictures(workdir) / f'{name}.png' for name in figures]
  for path, figure in stop_lib.each(zip(paths, figures.values(), strict=True)):
    viz.save(figure, path)
  metrics_lib.write_json(workdir / file, record)
  print(f'{title}, at step {record["step"]}:')
  print(text)
  for path in paths:
    print(f'picture: {path}')
