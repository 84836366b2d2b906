"""The training loop, for any task: builds a run and takes its steps.

What happens between the steps, such as a save or an evaluation, is in `hooks`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mod_jax import config as config_lib
from mod_jax import optimizer as optimizer_lib
from mod_jax import parallel, peaks
from mod_jax.errors import UserError
from mod_jax.runs import checkpoints as checkpoints_lib
from mod_jax.runs import lock as lock_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import Checkpointer
from mod_jax.runs.run_config import RunConfig
from mod_jax.train import hooks as hooks_lib
from mod_jax.train import profile as profile_lib
from mod_jax.train import state as state_lib
from mod_jax.train.hooks import TrainingDiverged as TrainingDiverged
from mod_jax.train.progress import Progress
from mod_jax.train.step import jit_step
from mod_jax.train.task import Method


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended.

  Attributes:
    step: steps taken since the run began.
    steps: steps taken in this call.
    finished: False if a signal or `max_steps` stopped the run before its end.
    metrics: held-out metrics at the end; empty if the run did not finish.
    state: the last state.
  """

  step: int
  steps: int
  finished: bool
  metrics: dict[str, float]
  # Keep the arrays out of the repr: a notebook prints a cell's last Result.
  state: Any = dataclasses.field(repr=False)


def train(
  task: Method,
  config: RunConfig,
  workdir,
  *,
  max_steps: int | None = None,
  allow_changed_data: bool = False,
  allow_changed_config: bool = False,
  profile: range | None = None,
) -> Result:
  """Trains a new run or continues one, until it ends or a signal stops it.

  SIGTERM, SIGHUP and SIGUSR1 save and return; Ctrl-C saves and then raises
  KeyboardInterrupt (`stop.listening`).

  Args:
    task: the model with its data and losses.
    config: config of the run.
    workdir: directory of config, checkpoints, metrics and pictures.
    max_steps: stop after this many steps in this call, as after a signal.
    allow_changed_data: only warn if the data differ from the checkpoint's.
    allow_changed_config: continue from the last checkpoint, optimiser state
      included, with other steps, learning rates or capacities.
    profile: steps to trace (`profile.Profiler`).

  Raises:
    UserError: bad input of any kind, or another process writes to `workdir`;
      nothing written before is lost.
    TrainingDiverged: the loss, a gradient, a value to be saved or the final
      held-out loss is NaN or infinite.
  """
  with (
    stop_lib.listening(),
    lock_lib.held(workdir),
    build(
      *(task, config, workdir),
      allow_changed_data=allow_changed_data,
      allow_changed_config=allow_changed_config,
      profile=profile,
    ) as run,
    profile_lib.Profiler(run, profile) as profiler,
  ):
    state, step, num_steps = run.state, run.start, config.train.num_steps
    end = num_steps
    if max_steps is not None:
      end = min(end, step + max_steps)
    _greet(run)
    log = hooks_lib.Log(run)
    evaluate, save = hooks_lib.Evaluate(run, log), hooks_lib.Save(run, log)
    judge = hooks_lib.Judge(run, evaluate, save)
    report = hooks_lib.Report(run, evaluate)
    hooks = (profiler, log, evaluate, save, judge, report)
    try:
      for hook in hooks:
        hook.begin(step, state)
      while step < end and not judge.ended and not stop_lib.requested():
        try:
          batch = next(run.iterator)
        except Exception:
          # Ctrl-C and some schedulers also end the processes that read data.
          if stop_lib.requested():
            break
          raise
        batch = parallel.put_batch(batch, run.mesh)
        for hook in hooks:
          hook.before(step + 1)
        train_step = run.compiled_step(static_args=task.static_args(step))
        # The teacher is an argument: closed over, its arrays would become
        # constants of the compiled program.
        state, metric_sums = train_step(state, batch, run.teacher)
        step += 1
        for hook in hooks:
          hook.after(step, state, metric_sums)
        if stop_lib.after_step():
          break
      if step == num_steps or judge.ended:
        for hook in hooks:
          hook.finish(step, state)
        return Result(step, step - run.start, True, evaluate.metrics, state)
    except stop_lib.Stopped:
      pass  # A continued run repeats the work that was aborted.
    if step:
      save.now(step, state)
    run.checkpointer.wait()
    run.writer.event('end', step)
    run.progress.close()  # Prints the last line of progress.
    if run.first:
      print(
        f'stopped at step {step} of {num_steps},'
        f' {"saved" if step else "nothing to save"}; the same command'
        ' continues.',
        file=sys.stderr,
      )
    return Result(step, step - run.start, False, {}, state)


@contextlib.contextmanager
def build(
  task: Method,
  config: RunConfig,
  workdir,
  *,
  allow_changed_data: bool = False,
  allow_changed_config: bool = False,
  profile: range | None = None,
) -> Iterator[hooks_lib.OpenRun]:
  """Context manager: sets a run's mesh, and yields the new or restored run.

  Arguments are those of `train`. All checks come before the first write, but
  for the check that a restored checkpoint has this config and these data.
  """
  began, modality = time.time(), task.modality
  workdir = workdir_lib.expand(workdir)
  profile_lib.check(workdir, profile, config.train.num_steps)
  mesh = parallel.make_mesh(config.mesh)
  _check(config, modality, mesh)
  best = config.checkpoint.best
  direction = 1 if best is None else task.direction(best)
  index, count = parallel.row_shard(mesh)
  iterator = modality.train_iterator(shard_index=index, shard_count=count)
  origin = origin_lib.describe(config, modality)
  first = jax.process_index() == 0
  changed = workdir_lib.check(
    workdir, config, allow_changes=allow_changed_config
  )
  checkpoints = workdir_lib.checkpoints(workdir)
  saved = checkpoints_lib.steps(checkpoints)
  start = max(saved, default=0)
  if not saved and config.init is not None:
    task.check_init(config.init)
  if changed and start > config.train.num_steps:
    raise UserError(
      f'train.num_steps={config.train.num_steps}: the run in {workdir} has'
      f' taken {start} steps already; give at least as many.'
    )
  with jax.set_mesh(mesh):
    optimizer, abstract = state_lib.of_run(task, mesh)
    optimizer_lib.check_rules(config.optimizer, abstract.all_params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    teacher = task.teacher(mesh)
    if teacher is not None:
      origin[origin_lib.TEACHER] = origin_lib.of_teacher(teacher)
    teacher = jax.tree.map(lambda x: parallel.place(x, everywhere), teacher)
    compiled_step = functools.cache(
      functools.partial(
        jit_step, abstract, task=task, optimizer=optimizer, config=config.train
      )
    )
    shapes = modality.batch_shapes()
    if shapes is not None and not saved:
      # Trace the first step before anything is written, since some errors only
      # show in tracing. JAX caches the trace, which is not repeated later.
      first_step = compiled_step(static_args=task.static_args(0))
      first_step.trace(abstract, parallel.abstract_batch(shapes, mesh), teacher)
    frozen = None
    if not saved:
      state = _new_state(task, config, optimizer, abstract, origin)
    elif abstract.frozen is not None:
      frozen, digest = state_lib.read_frozen(task, abstract)
      origin[origin_lib.FROZEN] = digest
    if changed and first:
      # Add the event before `claim` replaces the saved config: the event tells
      # later readers why older checkpoints have another config.
      metrics_lib.add_event(workdir, 'changed', start, fields=changed)
    if first:
      workdir_lib.claim(workdir, config)
      for name, text in modality.files().items():
        workdir_lib.write_text(workdir / name, text)
    with Checkpointer(checkpoints, config.checkpoint) as checkpointer:

      def check(restored):
        origin_lib.check_config(
          workdir, config, restored, changed=bool(changed)
        )
        origin_lib.check_data(
          restored, origin['data'], allow=allow_changed_data
        )
        origin_lib.check_frozen(restored, origin, config.init)
        origin_lib.check_teacher(restored, origin)

      if saved:
        restored = checkpointer.restore(abstract.saved, iterator, check=check)
        state, start = restored.state.replace(frozen=frozen), restored.step
      # Read this first: the writer removes lines of steps that were not saved.
      records = metrics_lib.read(workdir)
      reached = max((record['step'] for record in records), default=0)
      with (
        metrics_lib.MetricWriter(
          workdir,
          tensorboard=config.log.tensorboard,
          wandb=config.log.wandb,
          resume_step=start if saved else None,
          config_json=config_lib.to_json(config),
          name=config.name,
        ) as writer,
        _progress(task, config, mesh, start) as progress,
      ):
        writer.event(
          'start',
          start,
          time=began,
          lost_steps=max(0, reached - start),
          devices=f'{mesh.size} {jax.devices()[0].device_kind}',
          processes=jax.process_count(),
          jax=jax.__version__,
        )
        yield hooks_lib.OpenRun(
          task=task,
          config=config,
          workdir=workdir,
          mesh=mesh,
          iterator=iterator,
          origin=origin,
          checkpointer=checkpointer,
          writer=writer,
          progress=progress,
          first=first,
          direction=direction,
          start=start,
          restored=bool(saved),
          state=state,
          teacher=teacher,
          compiled_step=compiled_step,
        )


def _check(config, modality, mesh):
  """Raises UserError for errors that show before anything is computed."""
  if config.train.num_epochs is not None:
    raise UserError(
      f'train.num_epochs={config.train.num_epochs}: a single run is counted in'
      ' steps, which tasks.phases.train derives; set train.num_steps.'
    )
  if config.train.frozen is not None and config.init is None:
    raise UserError(
      f'train.frozen={config.train.frozen} and init=None: frozen weights are'
      ' read from init, so name a model there, or set train.frozen to None.'
    )
  metrics_lib.check_wandb(config.log.wandb)
  modality.check()
  for rows, what in (
    (config.train.rows, 'train.batch_size / grad_accum_steps'),
    (config.evaluation.batch_size, 'evaluation.batch_size'),
  ):
    parallel.check_batch(rows, mesh, what)
  # Raises if held-out data are missing: now, not at the first evaluation.
  modality.eval_batches(batch_size=1, num_batches=1)


def _progress(task, config, mesh, start) -> Progress:
  flops_of = functools.cache(task.flops_per_step)
  tokens = task.modality.tokens_per_step

  def flops_of_step(step):
    return flops_of(task.static_args(step - 1))

  return Progress(
    config.train.num_steps,
    start,
    tokens_per_step=tokens,
    # `flops_per_step` counts the longest batch, so hide it if batches differ.
    flops_of_step=None if tokens is None else flops_of_step,
    peak=peaks.total(mesh.devices.flat, task.dtype),
    unit=task.modality.unit,
    enabled=jax.process_index() == 0,
  )


def _new_state(task, config, optimizer, abstract, origin):
  """Returns a new run's state, with the weights of `config.init` if it is set.

  Adds the fingerprint of frozen weights, if any, to the dictionary `origin`.
  """
  state = state_lib.create_state(config.seed, task, optimizer, abstract)
  if config.init is None:
    return state
  params = state_lib.with_frozen(state.params, abstract.frozen)
  params, model_state = task.start(params, state.model_state, config.init)
  if abstract.frozen is not None:
    origin[origin_lib.FROZEN] = state_lib.frozen_fingerprint(
      abstract, params, config.init
    )
  return state_lib.with_weights(state, abstract, params, model_state)


def _greet(run):
  state = run.state
  trained, params = (
    sum(x.size for x in jax.tree.leaves(tree))
    for tree in (state.params, state.all_params)
  )
  part = '' if trained == params else f' ({trained:,} of them trained)'
  shape = ', '.join(f'{k} {v}' for k, v in run.mesh.shape.items())
  action = f'continues at step {run.start}' if run.start else 'starts'
  run.progress.message(
    f'{run.config.name} {action}: {params:,} parameters{part} on'
    f' {run.mesh.size}'
    f' {jax.default_backend()} device(s) ({shape}),'
    f' {run.config.train.num_steps} steps, in {run.workdir}'
  )
  if summary := run.task.modality.data_summary():
    run.progress.message(summary)
