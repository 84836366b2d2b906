"""One training step, as a pure function of state and batch."""

import functools

import jax
import jax.numpy as jnp
import optax

from mod_jax.train.run_config import TrainConfig
from mod_jax.train.state import TrainState


def train_step(
  state: TrainState,
  batch: dict[str, jax.Array],
  teacher=None,
  *,
  task,
  optimizer: optax.GradientTransformation,
  static_args,
  grad_accum_steps: int = 1,
  ema_decay: float = 0.0,
) -> tuple[TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
  """Returns the state after one step, and metrics as (total, weight) pairs.

  Args:
    state: the state before.
    batch: arrays of B rows; `grad_accum_steps` divides B.
    teacher: arrays that the task uses and no step changes; see `Task.teacher`.
    task: says how a batch becomes a loss; see `task.Task`.
    optimizer: turns gradients into updates.
    static_args: static choices of this step, as `task.static_args` returns.
    grad_accum_steps: microbatches whose gradients are added before the update.
    ema_decay: how much of the parameters' averages stays, where the state has
      any; see `ema_rate`.
  """
  rng = jax.random.fold_in(state.rng, state.step)

  def gradients(params, model_state, batch, rng):
    """Gradients of the mean, times the weight that the mean was over."""
    grad_fn = jax.value_and_grad(task.loss, has_aux=True)
    (_, (metric_sums, model_state)), grads = grad_fn(
      params, model_state, batch, rng, static_args, teacher
    )
    weight = metric_sums['loss'][1]
    return jax.tree.map(lambda g: g * weight, grads), metric_sums, model_state

  if grad_accum_steps == 1:
    grads, metric_sums, model_state = gradients(
      state.params, state.model_state, batch, rng
    )
  else:
    micro = jax.tree.map(lambda x: _split(x, grad_accum_steps), batch)
    rngs = jax.random.split(rng, grad_accum_steps)

    def add(carry, inputs):
      grads, model_state = carry
      batch, rng = inputs
      more, metric_sums, model_state = gradients(
        state.params, model_state, batch, rng
      )
      return (jax.tree.map(jnp.add, grads, more), model_state), metric_sums

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    (grads, model_state), metric_sums = jax.lax.scan(
      add, (zeros, state.model_state), (micro, rngs)
    )
    metric_sums = jax.tree.map(lambda x: x.sum(axis=0), metric_sums)
  weight = jnp.maximum(metric_sums['loss'][1], 1e-9)
  grads = jax.tree.map(lambda g: g / weight, grads)

  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  metric_sums['grad_norm'] = (optax.tree.norm(grads), jnp.ones(()))
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema is not None:
    rate = ema_rate(ema_decay, state.step)
    # Written in this way, the average of a constant stays exactly the same.
    ema = jax.tree.map(lambda e, p: e + (rate * (p - e)), ema, params)
  return state.replace(
    step=state.step + 1,
    params=params,
    opt_state=opt_state,
    model_state=model_state,
    ema=ema,
  ), metric_sums


def jit_step(
  abstract: TrainState,
  *,
  task,
  optimizer: optax.GradientTransformation,
  static_args,
  config: TrainConfig,
):
  """Returns `train_step` for a run, to be called or compiled.

  It takes the state, which it uses up, a batch and the teacher.

  Args:
    abstract: the state's shapes and shardings.
    task: as of `train_step`, and so are the next two.
    optimizer: see there.
    static_args: see there.
    config: how a step of the run is taken.
  """
  return jax.jit(
    functools.partial(
      train_step,
      task=task,
      optimizer=optimizer,
      static_args=static_args,
      grad_accum_steps=config.grad_accum_steps,
      ema_decay=config.ema_decay,
    ),
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda x: x.sharding, abstract), None),
  )


def ema_rate(decay: float, step: jax.Array) -> jax.Array:
  """Returns how much of the new parameters enters their averages.

  That is 1 - min(decay, (1 + t) / (10 + t)) with t the steps taken before:
  early averages follow quickly, so that where they started does not linger.
  """
  t = jnp.asarray(step, jnp.float32)
  return 1 - jnp.minimum(decay, (1 + t) / (10 + t))


def _split(x: jax.Array, parts: int) -> jax.Array:
  """[B, …] -> [parts, B / parts, …], each part spread over all devices."""
  return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
