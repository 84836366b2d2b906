"""The state that each training step updates."""

from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from mod_jax import optimizer as optimizer_lib
from mod_jax import parallel


@flax.struct.dataclass
class TrainState:
  """Step, parameters, optimiser state, random key and other collections.

  Attributes:
    step: int32 number of steps taken.
    params: the parameters, without partitioning boxes.
    opt_state: the optimiser's state.
    rng: the run's PRNG key; each step folds its number into it.
    model_state: other collections of the model, by name.
    ema: moving averages of the parameters, or None if none are kept.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  rng: jax.Array
  model_state: Any
  ema: Any = None

  @property
  def eval_params(self):
    """The parameters to evaluate: the moving averages if there are any."""
    return self.params if self.ema is None else self.ema


def _create(key, task, optimizer, ema):
  params_key, rng = jax.random.split(key)
  variables = dict(task.init(params_key))
  params = variables.pop('params')
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    rng=rng,
    model_state=variables,
    ema=params if ema else None,
  )


def abstract_state(
  task,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  *,
  ema: bool = False,
) -> TrainState:
  """Returns the state's shapes, dtypes and shardings; computes nothing.

  `ema` says whether averages of the parameters are kept.

  Raises:
    UserError: a parameter does not divide over the mesh.
  """
  # With the key created inside, nothing is computed, so the mesh may consist of
  # devices that this machine does not have.
  boxed = jax.eval_shape(
    lambda: _create(jax.random.key(0), task, optimizer, ema)
  )
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    nn.unbox(boxed),
    parallel.shardings(boxed, mesh),
  )


def of_run(task, mesh: jax.sharding.Mesh):
  """Returns a run's optimiser and its `abstract_state`."""
  config = task.config
  optimizer = optimizer_lib.make_optimizer(
    config.optimizer, config.train.num_steps
  )
  ema = config.train.ema_decay > 0
  return optimizer, abstract_state(task, optimizer, mesh, ema=ema)


def create_state(
  seed: int, task, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
  """Returns an initial state, each array created with its sharding."""
  ema = abstract.ema is not None
  create = jax.jit(
    lambda key: nn.unbox(_create(key, task, optimizer, ema)),
    out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
  )
  return create(jax.random.key(seed))


def with_weights(
  state: TrainState, abstract: TrainState, params, model_state
) -> TrainState:
  """Returns an initial state with other parameters and model_state.

  Both must have the structure of those in `state`, and may be on the host or on
  any devices; `abstract` gives the sharding and dtype of the result.
  """

  def place(x, like):
    if isinstance(x, jax.Array) and x.sharding == like.sharding:
      return x
    return parallel.place(x, like.sharding, like.dtype)

  params = jax.tree.map(place, params, abstract.params)
  return state.replace(
    params=params,
    model_state=jax.tree.map(place, model_state, abstract.model_state),
    # Copies, since a step donates both.
    ema=None if state.ema is None else jax.tree.map(jnp.copy, params),
  )
