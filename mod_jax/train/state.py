"""What training carries from step to step."""

from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from mod_jax import parallel


@flax.struct.dataclass
class TrainState:
  """Step, parameters, optimiser state, rng, and what else changes.

  Attributes:
    step: int32 number of steps taken.
    params: the parameters, without partitioning boxes.
    opt_state: the optimiser's state.
    rng: the one key; each step folds its number into it.
    mutables: other collections of the model, by name.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  rng: jax.Array
  mutables: Any


def _create(key, task, optimizer):
  params_key, rng = jax.random.split(key)
  variables = dict(task.init(params_key))
  params = variables.pop('params')
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    rng=rng,
    mutables=variables,
  )


def abstract_state(
  task, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the state's shapes, dtypes and shardings; computes nothing.

  Raises:
    UserError: a parameter does not divide over the mesh.
  """
  # The key is made inside, for then nothing runs, and the mesh may be one of
  # devices that are not here.
  boxed = jax.eval_shape(lambda: _create(jax.random.key(0), task, optimizer))
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    nn.unbox(boxed),
    parallel.shardings(boxed, mesh),
  )


def create_state(
  seed: int, task, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
  """Returns a fresh state, each array born in its place on the mesh."""
  out_shardings = jax.tree.map(lambda x: x.sharding, abstract)
  create = jax.jit(
    lambda key: nn.unbox(_create(key, task, optimizer)),
    out_shardings=out_shardings,
  )
  return create(jax.random.key(seed))
