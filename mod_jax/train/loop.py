"""The training loop, for any `Task`: restores, steps, evaluates and saves."""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mod_jax import config as config_lib
from mod_jax import optimizer as optimizer_lib
from mod_jax import parallel, peaks, trees
from mod_jax.errors import UserError
from mod_jax.runs import checkpoints as checkpoints_lib
from mod_jax.runs import history as history_lib
from mod_jax.runs import lock as lock_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import Checkpointer
from mod_jax.runs.run_config import RunConfig
from mod_jax.train import evaluation
from mod_jax.train import profile as profile_lib
from mod_jax.train import state as state_lib
from mod_jax.train.progress import Progress
from mod_jax.train.step import jit_step
from mod_jax.train.task import Task


class TrainingDiverged(UserError):
  """A loss, a gradient or a parameter stopped being a finite number."""


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended.

  Attributes:
    step: steps taken.
    steps: how many of them in this call.
    finished: False if a signal stopped it before its last step.
    metrics: held-out metrics at the end; empty if it did not finish.
    state: the last state.
  """

  step: int
  steps: int
  finished: bool
  metrics: dict[str, float]
  # Otherwise a notebook prints all arrays when a cell ends with a Result.
  state: Any = dataclasses.field(repr=False)


def train(
  task: Task,
  config: RunConfig,
  workdir,
  *,
  max_steps: int | None = None,
  allow_changed_data: bool = False,
  allow_changed_config: bool = False,
  profile: range | None = None,
) -> Result:
  """Trains, or continues the run in `workdir`, to the end or to a signal.

  SIGTERM, SIGHUP and SIGUSR1 save and return; Ctrl-C saves and then raises
  KeyboardInterrupt (`stop.listening`).

  Args:
    task: what is trained.
    config: the run.
    workdir: its directory: config, checkpoints, metrics and pictures.
    max_steps: stop after this many steps of this call, as a signal would.
    allow_changed_data: only warn if the data differ from those so far.
    allow_changed_config: continue from the last checkpoint, optimiser state
      included, with other steps, learning rates or capacities.
    profile: steps to trace (`profile.Profiler`).

  Raises:
    UserError: bad input of any kind, or another process writes to `workdir`;
      nothing written before is lost.
    TrainingDiverged: the loss, a gradient, a value to be saved or the final
      held-out loss is NaN or infinite.
  """
  with stop_lib.listening(), lock_lib.held(workdir):
    run = _Run(
      task,
      config,
      workdir,
      allow_changed_config=allow_changed_config,
      profile=profile,
    )
    return run.run(max_steps, allow_changed_data)


class _Run:
  """The parts and the state of one call of `train`."""

  def __init__(
    self, task, config, workdir, *, allow_changed_config=False, profile=None
  ):
    if config.train.num_epochs is not None:
      raise UserError(
        f'train.num_epochs={config.train.num_epochs}: a single run is counted'
        ' in steps, which tasks.phases.train derives; set train.num_steps.'
      )
    self.began = time.time()
    self.config = config
    self.workdir = workdir_lib.expand(workdir)
    self.task = task
    self.mesh = parallel.make_mesh(config.mesh)
    # All checks come before the first write.
    self.task.check()
    parallel.check_batch(
      config.train.rows, self.mesh, 'train.batch_size / grad_accum_steps'
    )
    parallel.check_batch(
      config.evaluation.batch_size, self.mesh, 'evaluation.batch_size'
    )
    index, count = parallel.row_shard(self.mesh)
    self.iterator = self.task.train_iterator(
      shard_index=index, shard_count=count
    )
    self.origin = origin_lib.describe(config, self.task)
    with jax.set_mesh(self.mesh):
      self.optimizer, self.abstract = state_lib.of_run(self.task, self.mesh)
    optimizer_lib.check_rules(config.optimizer, self.abstract.params)
    metrics_lib.check_wandb(config.log.wandb)
    self.profiler = profile_lib.Profiler(
      self.workdir, profile, config.train.num_steps
    )
    self.first = jax.process_index() == 0
    self.history = history_lib.History(self.workdir, enabled=self.first)
    changes = workdir_lib.check(
      self.workdir, config, allow_changes=allow_changed_config
    )
    saved = checkpoints_lib.steps(workdir_lib.checkpoints(self.workdir))
    reached = max(saved, default=0)
    if changes and reached > config.train.num_steps:
      raise UserError(
        f'train.num_steps={config.train.num_steps}: the run in {self.workdir}'
        f' has taken {reached} steps already; give at least as many.'
      )
    with jax.set_mesh(self.mesh):
      self.teacher = self._place_teacher()
      self.adapted = None
      if config.init is not None and not saved:
        self.adapted = self._adapted_state(config.init)
    self._jitted = {}
    shapes = self.task.batch_shapes()
    if shapes is not None and not saved:
      # Some errors only show when the step is traced. The trace is cached, so
      # that the first step does not repeat it.
      batch = parallel.abstract_batch(shapes, self.mesh)
      with jax.set_mesh(self.mesh):
        first = self._step(self.task.static_args(0))
        first.trace(self.abstract, batch, self.teacher)
    self.changed = bool(changes)
    if changes:
      # Before the config is replaced, since it explains to later readers why
      # older checkpoints have another config.
      self.history.add('changed', reached, fields=changes)
    if self.first:
      workdir_lib.claim(self.workdir, config)
      for name, text in self.task.files().items():
        workdir_lib.write_text(self.workdir / name, text)
    self.pending = []
    self.last_saved = None
    self.saved_at = time.monotonic()

  def run(self, max_steps, allow_changed_data):
    config = self.config
    num_steps = config.train.num_steps
    with contextlib.ExitStack() as stack:
      stack.enter_context(jax.set_mesh(self.mesh))
      self.checkpointer = stack.enter_context(
        Checkpointer(workdir_lib.checkpoints(self.workdir), config.checkpoint)
      )
      restored = self.checkpointer.restore(
        self.abstract,
        self.iterator,
        check=functools.partial(self._check_origin, allow_changed_data),
      )
      if restored is None:
        state, start = self._first_state(), 0
      else:
        state, start = restored.state, restored.step
        self.last_saved = start
      self._note_start(start)
      stack.enter_context(self.profiler)
      self.writer = stack.enter_context(
        metrics_lib.MetricWriter(
          self.workdir,
          tensorboard=config.log.tensorboard,
          wandb=config.log.wandb,
          resume_step=None if restored is None else start,
          config_json=config_lib.to_json(config),
          name=config.name,
        )
      )
      self.progress = stack.enter_context(
        Progress(
          num_steps,
          start,
          tokens_per_step=self.task.tokens_per_step,
          flops_of_step=self._flops_of_step(),
          peak=self._peak(),
          unit=self.task.unit,
          enabled=self.first,
        )
      )
      self.progress.message(self._opening(start, state))
      if summary := self.task.data_summary():
        self.progress.message(summary)
      if message := self.profiler.begin(start):
        self.progress.message(message)
      step, end = start, num_steps
      if max_steps is not None:
        end = min(end, start + max_steps)
      try:
        self._evaluate_first(start, state, fresh=restored is None)
        if not stop_lib.requested():
          state, step = self._steps(state, start, end)
        if step == num_steps:
          metrics = self._finish(step, state)
          return Result(step, step - start, True, metrics, state)
      except stop_lib.Stopped:
        pass  # A continued run catches up on the rest.
      self._stop(step, state)
      return Result(step, step - start, False, {}, state)

  def _flops_of_step(self):
    flops = functools.cache(self.task.flops_per_step)
    return lambda step: flops(self.task.static_args(step - 1))

  def _peak(self):
    devices = self.mesh.devices.flat
    of_each = [peaks.of(device, self.task.dtype) for device in devices]
    return None if None in of_each else sum(of_each)

  def _note_start(self, step):
    reached = max(
      (x['step'] for x in metrics_lib.read(self.workdir)), default=0
    )
    self.history.add(
      'start',
      step,
      time=self.began,
      lost_steps=max(0, reached - step),
      devices=f'{self.mesh.size} {jax.devices()[0].device_kind}',
      processes=jax.process_count(),
      jax=jax.__version__,
    )

  def _stop(self, step, state):
    saved = 'nothing to save'
    if step:
      self._save(step, state)
      saved = 'saved'
    self.checkpointer.wait()
    self.history.add('end', step)
    self.progress.close()  # Prints its last line, before ours.
    if self.first:
      print(
        f'stopped at step {step} of {self.config.train.num_steps}, {saved}; the'
        ' same command continues.',
        file=sys.stderr,
      )

  def _evaluate_first(self, start, state, *, fresh):
    """Evaluates initial weights, or catches up on an interrupted evaluation."""
    settings = self.config.evaluation
    if fresh and self.config.init is not None:
      weights = (state.eval_params, state.model_state)
      if beginning := self.task.beginning(*weights, self.mesh):
        self.progress.message(beginning)
      # On as much held-out data as the final evaluation, for comparison.
      self._evaluate(0, state, batches=settings.final_batches)
    elif not fresh and self._evaluation_due(start):
      missing = not any(
        line['step'] == start and line['kind'] == 'eval'
        for line in metrics_lib.read(self.workdir)
      )
      if parallel.first_says(missing):
        self._evaluate(start, state)

  def _evaluation_due(self, step):
    num_steps = self.config.train.num_steps
    every = config_lib.steps_of(self.config.evaluation.every, num_steps)
    last = step == num_steps
    return bool(every) and step % every == 0 and not last

  def _check_origin(self, allow_changed_data, saved):
    origin_lib.check_config(
      self.workdir, self.config, saved, changed=self.changed
    )
    data = self.origin['data']
    origin_lib.check_data(saved, data, allow=allow_changed_data)

  def _fresh_state(self):
    return state_lib.create_state(
      self.config.seed, self.task, self.optimizer, self.abstract
    )

  def _adapted_state(self, init):
    """Returns the initial state with the weights that `init` names."""
    workdir_lib.find(init)  # Fails early: a fresh state takes a while.
    state = self._fresh_state()
    params, model_state = self.task.start(state.params, state.model_state, init)
    return state_lib.with_weights(state, self.abstract, params, model_state)

  def _first_state(self):
    # Drop our reference: the first step donates these buffers.
    state, self.adapted = self.adapted, None
    return self._fresh_state() if state is None else state

  def _place_teacher(self):
    """Returns the teacher's arrays, replicated over the mesh."""
    everywhere = NamedSharding(self.mesh, PartitionSpec())

    def place(x):
      sharding = getattr(x, 'sharding', None)
      if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
        return x
      return parallel.place(x, everywhere)

    return jax.tree.map(place, self.task.teacher(self.mesh))

  def _opening(self, start, state):
    params = sum(x.size for x in jax.tree.leaves(state.params))
    shape = ', '.join(f'{k} {v}' for k, v in self.mesh.shape.items())
    action = f'continues at step {start}' if start else 'starts'
    return (
      f'{self.config.name} {action}: {params:,} parameters on'
      f' {self.mesh.size} {jax.default_backend()} device(s) ({shape}),'
      f' {self.config.train.num_steps} steps, in {self.workdir}'
    )

  def _steps(self, state, start, end):
    """Takes the steps; returns the state and the number of the last one."""
    config = self.config
    self.saved_at = time.monotonic()
    for step in range(start + 1, end + 1):
      try:
        batch = next(self.iterator)
      except Exception:
        # Ctrl-C and some schedulers also end the processes that read data.
        if stop_lib.requested():
          return state, step - 1
        raise
      batch = parallel.put_batch(batch, self.mesh)
      self.profiler.before(step)
      # The teacher is an argument of each call: closed over, its arrays would
      # become constants of the compiled program.
      state, metric_sums = self._step(self.task.static_args(step - 1))(
        state, batch, self.teacher
      )
      if traced := self.profiler.after(step, metric_sums):
        self.progress.message(traced)
      self.pending.append((step, metric_sums))
      last = step == config.train.num_steps
      if step == start + 1 or step % config.log.every == 0 or last:
        self._flush()
      if step == start + 1:
        self.history.add('first_step', step)
      if self._evaluation_due(step):
        self._flush()
        with contextlib.suppress(stop_lib.Stopped):  # `after_step` stops.
          self._evaluate(step, state)
      if self._save_due(step):
        self._save(step, state)
      if stop_lib.after_step():
        return state, step
    return state, end if end > start else start

  def _step(self, static_args):
    """Returns the compiled step of these static arguments, from a cache."""
    if static_args not in self._jitted:
      self._jitted[static_args] = self._make_step(static_args)
    return self._jitted[static_args]

  def _make_step(self, static_args):
    return jit_step(
      self.abstract,
      task=self.task,
      optimizer=self.optimizer,
      static_args=static_args,
      config=self.config.train,
    )

  def _flush(self):
    """Writes and checks the metrics of the steps since the last flush."""
    for step, metric_sums in self.pending:
      values = metrics_lib.finalize(metric_sums)
      self.writer.write(step, 'train', values)
      self._check_numbers(
        step,
        # A batch of padding alone has no loss.
        {k: values[k] for k in ('loss', 'grad_norm') if k in values},
      )
    if self.pending:
      step, values = self.pending[-1][0], values
      shown = {k: values[k] for k in ('loss', 'accuracy') if k in values}
      self.progress.update(step, shown)
    self.pending.clear()

  def _check_numbers(self, step, values, prefix=''):
    for name, value in values.items():
      if not math.isfinite(value):
        raise self._diverged(step, f'{prefix}{name} is {value}')

  def _diverged(self, step, what):
    """Returns the error, which names the last checkpoint before this step."""
    self.checkpointer.wait()  # The newest checkpoint may be half written.
    # A checkpoint of this step would diverge again.
    steps = [s for s in self.checkpointer.steps() if s < step]
    last_good = (
      f'the last good checkpoint is step {steps[-1]}'
      if steps
      else 'there is no checkpoint yet'
    )
    return TrainingDiverged(
      f'{what} at step {step}; {last_good} in'
      f' {workdir_lib.checkpoints(self.workdir)}. Try a lower'
      ' optimizer.learning_rate, a longer warmup_steps, a smaller clip_norm, or'
      ' model.dtype=float32, in a new workdir.'
    )

  def _save_due(self, step):
    if self.checkpointer.due(step):
      return True
    minutes = self.config.checkpoint.every_minutes
    # Clocks of hosts differ, so the first host decides. That takes
    # communication, so it is not done at every step.
    several = jax.process_count() > 1
    if not minutes or (several and step % self.config.log.every):
      return False
    late = time.monotonic() - self.saved_at >= 60 * minutes
    return parallel.first_says(late)

  def _save(self, step, state):
    self._flush()  # Raises for NaN, so that no such state is saved.
    if step == self.last_saved:
      return
    self._check_finite(step, state)
    lock_lib.check(self.workdir)
    self.writer.flush()
    self.checkpointer.save(step, state, self.iterator, self.origin)
    self.last_saved = step
    self.saved_at = time.monotonic()

  def _check_finite(self, step, state):
    """Raises TrainingDiverged if the state holds NaN or infinite values.

    A step's loss is computed before its update, so a finite loss does not mean
    that the updated state is finite.
    """
    names = ('params', 'ema', 'opt_state', 'model_state')
    saved = {name: getattr(state, name) for name in names}
    leaves = {
      name: leaf
      for name, leaf in trees.by_path(saved).items()
      if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    finite = jax.device_get(_all_finite(list(leaves.values())))
    for name, is_finite in zip(leaves, finite, strict=True):
      if not is_finite:
        raise self._diverged(step, f'{name} is not finite')

  def _evaluate(self, step, state, batches=None):
    metrics = evaluation.held_out(
      *(self.task, state.eval_params, state.model_state, self.mesh),
      batches=batches,
    )
    # Running a finished run again must not repeat its line.
    if step < self.config.train.num_steps or not metrics_lib.holds(
      self.workdir, step, 'eval', metrics
    ):
      self.writer.write(step, 'eval', metrics)
    shown = ', '.join(
      f'{name} {value:.4f}'
      for name, value in self.task.main_metrics(metrics).items()
    )
    self.progress.message(f'step {step}: held-out {shown}')
    return metrics

  def _finish(self, step, state):
    self._save(step, state)
    metrics = self._evaluate(
      step, state, batches=self.config.evaluation.final_batches
    )
    self._check_numbers(step, self.task.main_metrics(metrics), 'held-out ')
    self.history.add('end', step)
    if restarts := self.history.report():
      self.progress.message(restarts)
    self.progress.close()
    if self.first:
      stop_lib.check()
      # All files are written before the first print, which fails if stdout is
      # closed.
      texts = self._write_texts(state)
      trained = evaluation.Trained(
        step, self.task, state.eval_params, state.model_state, self.mesh
      )
      evaluation.report(trained, metrics, self.workdir)
      for path, text in texts.items():
        print(f'sample, also in {path}:\n{text}')
    return metrics

  def _write_texts(self, state):
    """Writes the sample texts of the task; returns them by path."""
    if jax.process_count() > 1:  # The parameters are spread over the hosts.
      return {}
    samples = self.task.finish(state.eval_params, state.model_state)
    texts = {
      f'{self.workdir}/sample_{i}.txt': text
      for i, text in enumerate(stop_lib.each(samples))
    }
    for path, text in texts.items():
      workdir_lib.write_text(path, text)
    return texts


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> list[jax.Array]:
  return [jnp.isfinite(leaf).all() for leaf in leaves]
