"""One training step, as a pure function of state and batch."""

import functools

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses import sums
from mod_jax.runs.run_config import TrainConfig
from mod_jax.train.state import TrainState, with_frozen


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
    teacher: constant arrays that the losses need (`Method.teacher`).
    task: computes the losses of a batch (`task.Method`).
    optimizer: turns gradients into updates.
    static_args: static choices of this step, from `task.static_args`.
    grad_accum_steps: microbatches whose gradients are added before the update.
    ema_decay: decay of the parameters' moving averages, if the state has any.
  """
  rng = jax.random.fold_in(state.rng, state.step)

  def gradients(model_state, batch, rng, weights=None):
    def loss(params):
      losses, aux = task.losses(
        with_frozen(params, state.frozen),
        *(model_state, batch, rng, static_args, teacher),
      )
      return sums.sum_of_means(losses, weights), aux

    return jax.grad(loss, has_aux=True)(state.params)

  if grad_accum_steps == 1:
    grads, (metric_sums, model_state) = gradients(state.model_state, batch, rng)
  else:
    micro = jax.tree.map(lambda x: _split(x, grad_accum_steps), batch)
    rngs = jax.random.split(rng, grad_accum_steps)

    def weigh(model_state, inputs):
      losses, (_, model_state) = task.losses(
        *(state.all_params, model_state, *inputs, static_args, teacher)
      )
      return model_state, [weight for _, weight in losses]

    # Each loss is a mean over the whole batch. Its divisor is the sum of its
    # weights over all microbatches, so compute the weights first. This is
    # usually cheap: the compiler leaves out what the weights do not depend on,
    # such as the whole model.
    _, weights = jax.lax.scan(weigh, state.model_state, (micro, rngs))
    weights = [weight.sum(axis=0) for weight in weights]

    def add(carry, inputs):
      grads, model_state = carry
      term, (metric_sums, model_state) = gradients(
        model_state, *inputs, weights
      )
      grads = jax.tree.map(jnp.add, grads, term)
      return (grads, model_state), metric_sums

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    (grads, model_state), metric_sums = jax.lax.scan(
      add, (zeros, state.model_state), (micro, rngs)
    )
    metric_sums = jax.tree.map(lambda x: x.sum(axis=0), metric_sums)

  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  metric_sums['grad_norm'] = (optax.tree.norm(grads), jnp.ones(()))
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema is not None:
    rate = ema_rate(ema_decay, state.step)
    # In this form, the average of a constant parameter does not change at all.
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
  """Returns the jitted `train_step` of a run, which donates the state.

  Its arguments are a state as described by `abstract`, a batch, the teacher.
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
  """Returns the weight of the new parameters in their moving averages.

  It is 1 - min(decay, (1 + t) / (10 + t)), with t the steps taken before: early
  averages follow quickly, so that the initial parameters do not dominate.
  """
  t = jnp.asarray(step, jnp.float32)
  return 1 - jnp.minimum(decay, (1 + t) / (10 + t))


def _split(x: jax.Array, parts: int) -> jax.Array:
  """Reshapes [B, …] to [parts, B / parts, …]; all devices share each part."""
  return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
