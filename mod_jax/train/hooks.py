"""What a run does beside its steps: logs, evaluates, saves and reports."""

from collections.abc import Callable
import contextlib
import dataclasses
import math
import time
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import parallel, trees
from mod_jax.errors import UserError
from mod_jax.runs import history as history_lib
from mod_jax.runs import lock as lock_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import Checkpointer
from mod_jax.runs.run_config import RunConfig
from mod_jax.train import evaluation
from mod_jax.train.progress import Progress
from mod_jax.train.task import Method


class TrainingDiverged(UserError):
  """A loss, a gradient or a parameter stopped being a finite number."""


@dataclasses.dataclass(kw_only=True)
class Run:
  """A run as `loop.build` makes it: its parts, its state and its open files."""

  task: Method
  config: RunConfig
  workdir: epath.Path
  mesh: jax.sharding.Mesh
  iterator: Any  # Of training batches.
  origin: dict[str, Any]  # Metadata of each checkpoint.
  teacher: Any
  state: Any
  start: int  # Steps that the state has taken.
  restored: bool  # Whether the state is that of a checkpoint.
  compiled_step: Callable[..., Any]  # Returns `jit_step` of `static_args`.
  first: bool  # Whether this is the first host.
  checkpointer: Checkpointer
  writer: metrics_lib.MetricWriter
  progress: Progress

  def diverged(self, step: int, what: str) -> TrainingDiverged:
    """Returns the error, which names the last checkpoint before this step."""
    self.checkpointer.wait()  # The newest checkpoint may be half written.
    # A checkpoint of this step would diverge again.
    steps = [s for s in self.checkpointer.steps() if s < step]
    last_good = 'there is no checkpoint yet'
    if steps:
      last_good = f'the last good checkpoint is step {steps[-1]}'
    return TrainingDiverged(
      f'{what} at step {step}; {last_good} in'
      f' {workdir_lib.checkpoints(self.workdir)}. Try a lower'
      ' optimizer.learning_rate, a longer warmup_steps, a smaller clip_norm, or'
      ' model.dtype=float32, in a new workdir.'
    )


class Hook:
  """Work beside the steps; a hook implements the methods that it needs."""

  def begin(self, step: int, state) -> None:
    """Is called once, before the first step of a call of `train`."""

  def before(self, step: int) -> None:
    """Is called before each step, with its number."""

  def after(self, step: int, state, metric_sums) -> None:
    """Is called after each step, perhaps before its arrays are computed."""

  def finish(self, step: int, state) -> None:
    """Is called after the last step of the run, unless a signal came before."""


class Log(Hook):
  """Writes and checks the metrics of steps, and shows the progress."""

  def __init__(self, run: Run):
    self.run = run
    self.pending = []

  def after(self, step, state, metric_sums):
    config = self.run.config
    self.pending.append((step, metric_sums))
    first, last = step == self.run.start + 1, step == config.train.num_steps
    if first or last or step % config.log.every == 0:
      self.flush()
    if first:
      self.run.writer.event('first_step', step)

  def flush(self) -> None:
    """Writes and checks the metrics of the steps since the last flush."""
    for step, metric_sums in self.pending:
      values = metrics_lib.finalize(metric_sums)
      self.run.writer.write(step, 'train', values)
      for name in ('loss', 'grad_norm'):
        # A batch of padding alone has no loss.
        if name in values and not math.isfinite(values[name]):
          raise self.run.diverged(step, f'{name} is {values[name]}')
    if self.pending:
      shown = {k: values[k] for k in ('loss', 'accuracy') if k in values}
      self.run.progress.update(step, shown)
    self.pending.clear()


class Evaluate(Hook):
  """Evaluates on held-out data every few steps and at the end.

  Also at the begin: the weights of `config.init`, on as much data as at the
  end; or what an interruption of the run prevented.
  """

  def __init__(self, run: Run, log: Log):
    self.run, self.log = run, log
    self.metrics = {}  # Of the last evaluation.

  def begin(self, step, state):
    run = self.run
    if run.restored and self._due(step):
      missing = not any(
        line['step'] == step and line['kind'] == 'eval'
        for line in metrics_lib.read(run.workdir)
      )
      if parallel.first_says(missing):
        self._evaluate(step, state)
    elif not run.restored and run.config.init is not None:
      weights = (state.eval_params, state.model_state)
      if beginning := run.task.beginning(*weights, run.mesh):
        run.progress.message(beginning)
      self._evaluate(step, state, run.config.evaluation.final_batches)

  def after(self, step, state, metric_sums):
    if self._due(step):
      self.log.flush()
      with contextlib.suppress(stop_lib.Stopped):  # The loop stops by itself.
        self._evaluate(step, state)

  def finish(self, step, state):
    self._evaluate(step, state, self.run.config.evaluation.final_batches)
    for name, value in self.run.task.main_metrics(self.metrics).items():
      if not math.isfinite(value):
        raise self.run.diverged(step, f'held-out {name} is {value}')

  def _due(self, step):
    num_steps = self.run.config.train.num_steps
    every = config_lib.steps_of(self.run.config.evaluation.every, num_steps)
    return bool(every) and step % every == 0 and step < num_steps

  def _evaluate(self, step, state, batches=None):
    run = self.run
    metrics = evaluation.held_out(
      *(run.task, state.eval_params, state.model_state, run.mesh),
      batches=batches,
    )
    # Running a finished run again must not repeat its line.
    if step < run.config.train.num_steps or not metrics_lib.holds(
      run.workdir, step, 'eval', metrics
    ):
      run.writer.write(step, 'eval', metrics)
    shown = ', '.join(
      f'{name} {value:.4f}'
      for name, value in run.task.main_metrics(metrics).items()
    )
    run.progress.message(f'step {step}: held-out {shown}')
    self.metrics = metrics


class Save(Hook):
  """Saves checkpoints by steps, by time and after the last step."""

  def __init__(self, run: Run, log: Log):
    self.run, self.log = run, log
    self.last_saved = run.start if run.restored else None

  def begin(self, step, state):
    self.saved_at = time.monotonic()

  def after(self, step, state, metric_sums):
    config = self.run.config
    due = step == config.train.num_steps or self.run.checkpointer.due(step)
    minutes = config.checkpoint.every_minutes
    # Clocks of hosts differ, so the first host decides. That takes
    # communication, so it is not done at every step.
    several = jax.process_count() > 1
    if not due and minutes and not (several and step % config.log.every):
      late = time.monotonic() - self.saved_at >= 60 * minutes
      due = parallel.first_says(late)
    if due:
      self.now(step, state)

  def now(self, step: int, state) -> None:
    """Saves, unless the state was saved already."""
    self.log.flush()  # Raises for NaN, so that no such state is saved.
    if step == self.last_saved:
      return
    self._check_finite(step, state)
    run = self.run
    lock_lib.check(run.workdir)
    run.writer.flush()
    run.checkpointer.save(step, state, run.iterator, run.origin)
    self.last_saved = step
    self.saved_at = time.monotonic()

  def _check_finite(self, step, state):
    """Raises TrainingDiverged if the state holds NaN or infinite values.

    A step's loss is computed before its update, so a finite loss does not mean
    that the updated state is finite.
    """
    names = ('params', 'ema', 'opt_state', 'model_state')
    finite = _are_finite({name: getattr(state, name) for name in names})
    for name, is_finite in trees.by_path(jax.device_get(finite)).items():
      if not is_finite:
        raise self.run.diverged(step, f'{name} is not finite')


class Report(Hook):
  """Draws the pictures and writes texts and metrics after the last step."""

  def __init__(self, run: Run, evaluate: Evaluate):
    self.run, self.evaluate = run, evaluate

  def finish(self, step, state):
    run = self.run
    run.writer.event('end', step)
    events = history_lib.read(run.workdir)
    if restarts := history_lib.cost_of_restarts(events):
      run.progress.message(restarts)
    run.progress.close()
    if not run.first:
      return
    stop_lib.check()
    texts = {}
    if jax.process_count() == 1:  # Else the parameters are spread over hosts.
      samples = run.task.finish(state.eval_params, state.model_state)
      for i, text in enumerate(stop_lib.each(samples)):
        texts[f'{run.workdir}/sample_{i}.txt'] = text
    # All files are written before the first print, which fails if stdout is
    # closed.
    for path, text in texts.items():
      workdir_lib.write_text(path, text)
    trained = evaluation.Trained(
      step, run.task, state.eval_params, state.model_state, run.mesh
    )
    evaluation.report(trained, self.evaluate.metrics, run.workdir)
    for path, text in texts.items():
      print(f'sample, also in {path}:\n{text}')


@jax.jit
def _are_finite(tree):
  return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)
