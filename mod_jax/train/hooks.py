"""Hooks between the steps of a run: they log, evaluate, save and report."""

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
from mod_jax.runs import best as best_lib
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
  """A loss, a gradient or a value of the state is NaN or infinite."""


@dataclasses.dataclass(kw_only=True)
class OpenRun:
  """A run that `loop.build` yields: its parts, its state and its open files."""

  task: Method
  config: RunConfig
  workdir: epath.Path
  mesh: jax.sharding.Mesh
  iterator: Any  # Yields training batches.
  origin: dict[str, Any]  # Metadata of each checkpoint.
  teacher: Any
  state: Any
  start: int  # Steps that were taken before this call.
  restored: bool  # Whether the state was read from a checkpoint.
  compiled_step: Callable[..., Any]  # Returns `jit_step` of `static_args`.
  first: bool  # Whether this is the first host.
  direction: int  # 1 if more of `checkpoint.best` is better, -1 if less is.
  checkpointer: Checkpointer
  writer: metrics_lib.MetricWriter
  progress: Progress

  def diverged(self, step: int, what: str) -> TrainingDiverged:
    """Returns an error that names the last checkpoint before this step."""
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
  """Work between the steps; subclasses override the methods that they need."""

  def begin(self, step: int, state) -> None:
    """Is called once, before the first step of a call of `train`."""

  def before(self, step: int) -> None:
    """Is called before each step, with its number."""

  def after(self, step: int, state, metric_sums) -> None:
    """Is called after each step; devices may still be computing its arrays."""

  def finish(self, step: int, state) -> None:
    """Is called after the last step of the run, unless a signal came before."""


class Log(Hook):
  """Writes and checks the metrics of steps, and shows the progress."""

  def __init__(self, run: OpenRun):
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
        # The loss is missing if a batch is only padding.
        if name in values and not math.isfinite(values[name]):
          raise self.run.diverged(step, f'{name} is {values[name]}')
    if self.pending:
      shown = {k: values[k] for k in ('loss', 'accuracy') if k in values}
      self.run.progress.update(step, shown)
    self.pending.clear()


class Evaluate(Hook):
  """Evaluates on held-out data every few steps and at the end.

  A new run begins with an evaluation of the weights of `config.init`, on as
  much data as at the end; a continued run repeats an evaluation that was
  interrupted. If the best checkpoint is kept, the last step is also evaluated
  on the same data as the steps before it, to compare them.
  """

  def __init__(self, run: OpenRun, log: Log):
    self.run, self.log = run, log
    self.metrics = {}  # Results of the last evaluation.
    self.step = None  # Step of the last evaluation.

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
      with contextlib.suppress(stop_lib.Stopped):  # The loop checks for stops.
        self._evaluate(step, state)

  def finish(self, step, state):
    final = self.run.config.evaluation.final_batches
    self._evaluate(step, state, final, finish=True)
    for name, value in self.run.task.main_metrics(self.metrics).items():
      # Other metrics are NaN if the held-out data have no example for them.
      if name.split('/')[-1] == 'loss' and not math.isfinite(value):
        raise self.run.diverged(step, f'held-out {name} is {value}')

  def _due(self, step):
    num_steps = self.run.config.train.num_steps
    every = self.run.config.evaluation.every
    if step == num_steps:
      return self.run.config.checkpoint.best is not None
    if not every:
      return False
    # A fraction that rounds to 0 steps evaluates after each step.
    return step % max(1, config_lib.steps_of(every, num_steps)) == 0

  def _evaluate(self, step, state, batches=None, *, finish=False):
    run = self.run
    metrics = evaluation.held_out(
      *(run.task, state.eval_params, state.model_state, run.mesh),
      batches=batches,
    )
    # If a finished run is started again, do not add its last line again.
    if not finish or not metrics_lib.holds(run.workdir, step, 'eval', metrics):
      run.writer.write(step, 'eval', metrics)
    shown = ', '.join(
      f'{name} {value:.4f}'
      for name, value in run.task.main_metrics(metrics).items()
    )
    run.progress.message(f'step {step}: held-out {shown}')
    self.metrics, self.step = metrics, step


class Save(Hook):
  """Saves checkpoints by steps, by time and after the last step."""

  def __init__(self, run: OpenRun, log: Log):
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
    """Saves, unless this step is saved; raises TrainingDiverged for NaN."""
    self.log.flush()  # Raises for NaN, so that no such state is saved.
    if step == self.last_saved:
      return
    self._check_finite(step, state)
    run = self.run
    lock_lib.check(run.workdir)
    run.writer.flush()
    run.checkpointer.save(step, state.saved, run.iterator, run.origin)
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


class Judge(Hook):
  """Keeps the best checkpoint, and ends a run that gets no better.

  Both decisions follow from the evaluations in `metrics.jsonl`, so that a
  continued run decides as one that was never interrupted. If `checkpoint.best`
  is set or changed in a continuation, only checkpoints that are still there can
  be the best.
  """

  def __init__(self, run: OpenRun, evaluate: Evaluate, save: Save):
    self.run, self.evaluate, self.save = run, evaluate, save
    self.metric = run.config.checkpoint.best
    self.best = None  # Step and value of the best evaluation.
    self.since = 0  # Number of evaluations after the best one.
    self.ended = False  # Whether the run ends now, before its last step.

  def begin(self, step, state):
    run = self.run
    if self.metric is None:
      self._forget()
      return
    if self.evaluate.metrics:  # Of the weights at `init`, or repeated.
      self._known()
    # The weights at `init`, at step 0, are no checkpoint of this run.
    lines = {}
    for line in metrics_lib.read(run.workdir):
      if line['kind'] == 'eval' and 0 < line['step'] <= step:
        # A second line of a step is the final evaluation, on other batches.
        lines.setdefault(line['step'], line)
    # Other hosts may not see a line yet that the first host has just written.
    if step and self.evaluate.step == step:
      lines[step] = self.evaluate.metrics
    saved = run.checkpointer.steps()
    for at in sorted(lines):
      self._judge(at, lines[at], saved=at in saved)
    if self.best is None:
      self._forget()
    else:
      self._keep()
    patience = run.config.train.early_stop
    self.ended = history_lib.ended_early(run.workdir, patience) == step
    self._end_if_due(step)

  def after(self, step, state, metric_sums):
    if self.metric is None or self.evaluate.step != step:
      return
    if self._judge(step, self._known()):
      self.save.now(step, state)
      self._keep()
    self._end_if_due(step)
    if self.ended:
      self.save.now(step, state)

  def finish(self, step, state):
    if self.metric is None:
      return
    if self.ended:
      self.run.progress.message(
        f'ends early, at step {step}: no better {self.metric} in'
        f' {self.run.config.train.early_stop} evaluations'
      )
    if self.best is not None:
      best, value = self.best
      self.run.progress.message(
        f'best held-out {self.metric} {value:.4f}, at step {best}'
      )

  def _known(self):
    metrics = self.evaluate.metrics
    if self.metric not in metrics:
      raise UserError(
        f'checkpoint.best={self.metric!r}: this run measures'
        f' {", ".join(metrics)}.{config_lib.nearest(self.metric, metrics)}'
      )
    return metrics

  def _judge(self, step, metrics, *, saved: bool = True) -> bool:
    """Notes an evaluation, and returns whether it is the best; NaN never is.

    `saved` is False if the checkpoint of this step is gone.
    """
    value, sign = metrics.get(self.metric, math.nan), self.run.direction
    least = -math.inf if self.best is None else sign * self.best[1]
    if not sign * value > least:
      self.since += 1
      return False
    if saved:
      self.best, self.since = (step, value), 0
    return saved

  def _end_if_due(self, step):
    patience = self.run.config.train.early_stop
    if patience and self.since >= patience and not self.ended:
      self.run.writer.event('early_stop', step, patience=patience)
      self.ended = True

  def _keep(self):
    step, value = self.best
    # Keep the previous best checkpoint until this one is complete.
    self.run.checkpointer.wait()
    self.run.checkpointer.spare(step)
    if self.run.first:
      best_lib.write(self.run.workdir, step, self.metric, value)

  def _forget(self):
    # The best by another metric is no longer kept.
    if self.run.first:
      best_lib.forget(self.run.workdir)


class Report(Hook):
  """Draws pictures, writes and prints texts and metrics after the last step."""

  def __init__(self, run: OpenRun, evaluate: Evaluate):
    self.run, self.evaluate = run, evaluate

  def finish(self, step, state):
    run = self.run
    run.writer.event('end', step)
    events = metrics_lib.read_events(run.workdir)
    if restarts := history_lib.cost_of_restarts(events):
      run.progress.message(restarts)
    run.progress.close()
    if not run.first:
      return
    stop_lib.check()
    texts = {}
    if jax.process_count() == 1:  # Of several hosts, none has all parameters.
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
