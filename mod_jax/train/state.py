"""The state that each training step updates."""

from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mod_jax import optimizer as optimizer_lib
from mod_jax import parallel, trees
from mod_jax.data import fingerprint
from mod_jax.errors import UserError


@flax.struct.dataclass
class TrainState:
  """Step, parameters, optimiser state, random key and other collections.

  Attributes:
    step: int32 number of steps taken.
    params: the parameters, without partitioning boxes; if `frozen` is set, only
      the trained parameters.
    opt_state: the optimiser's state.
    rng: the run's PRNG key; each step folds its number into it.
    model_state: other collections of the model, by name.
    ema: moving averages of the parameters, or None if none are kept.
    frozen: parameters that steps pass on unchanged and checkpoints do not hold;
      None if `params` has all of them (`TrainConfig.frozen`).
  """

  step: jax.Array
  params: Any
  opt_state: Any
  rng: jax.Array
  model_state: Any
  ema: Any = None
  frozen: Any = None

  @property
  def all_params(self):
    """All parameters of the model."""
    return with_frozen(self.params, self.frozen)

  @property
  def eval_params(self):
    """All parameters to evaluate: the moving averages if there are any."""
    params = self.params if self.ema is None else self.ema
    return with_frozen(params, self.frozen)

  @property
  def saved(self) -> 'TrainState':
    """The part of the state that checkpoints hold."""
    return self.replace(frozen=None)


def with_frozen(params, frozen):
  """Returns trained and frozen parameters in one tree; `frozen` may be None."""
  return params if frozen is None else trees.join(params, frozen)


def _create(key, task, optimizer):
  params_key, rng = jax.random.split(key)
  variables = dict(task.init(params_key))
  params, frozen = task.config.split(variables.pop('params'))
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    rng=rng,
    model_state=variables,
    ema=params if task.config.train.ema_decay else None,
    frozen=frozen,
  )


def abstract_state(
  task, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns a state of shapes, dtypes and shardings; computes no arrays."""
  # The key is created inside `eval_shape`, so nothing is computed, and the mesh
  # may consist of devices that this machine does not have.
  boxed = jax.eval_shape(lambda: _create(jax.random.key(0), task, optimizer))
  abstract = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    nn.unbox(boxed),
    parallel.shardings(boxed, mesh),
  )
  if abstract.frozen is None:
    return abstract
  frozen = {
    name: x.update(dtype=jnp.dtype(task.config.frozen_dtype(name)))
    for name, x in trees.flatten(abstract.frozen).items()
  }
  return abstract.replace(frozen=trees.unflatten(frozen))


def of_run(task, mesh: jax.sharding.Mesh):
  """Returns a run's optimiser and its `abstract_state`."""
  config = task.config
  optimizer = optimizer_lib.make_optimizer(
    config.optimizer, config.train.num_steps
  )
  return optimizer, abstract_state(task, optimizer, mesh)


def create_state(
  seed: int, task, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
  """Returns an initial state, each array created with its sharding.

  Frozen parameters are not created: `with_weights` adds them.
  """
  create = jax.jit(
    # The compiler removes the computation of the frozen parameters.
    lambda key: nn.unbox(_create(key, task, optimizer)).saved,
    out_shardings=jax.tree.map(lambda x: x.sharding, abstract.saved),
  )
  return create(jax.random.key(seed))


def with_weights(
  state: TrainState, abstract: TrainState, params, model_state
) -> TrainState:
  """Returns an initial state with other parameters and model_state.

  `params` include the frozen ones. `params` and `model_state` may be on the
  host or on any devices; `abstract` gives structure, sharding and dtype.
  """
  frozen = None
  if abstract.frozen is not None:
    frozen = _placed_like(_part(params, abstract.frozen), abstract.frozen)
    params = _part(params, abstract.params)
  params = _placed_like(params, abstract.params)
  return state.replace(
    params=params,
    frozen=frozen,
    model_state=_placed_like(model_state, abstract.model_state),
    # Copies: a step donates `params` and `ema`, which must not share buffers.
    ema=None if state.ema is None else jax.tree.map(jnp.copy, params),
  )


def _placed_like(tree, like):
  return jax.tree.map(
    lambda x, y: parallel.place(x, y.sharding, y.dtype), tree, like
  )


def _part(params, like):
  """Returns the subtree of `params` that has the names in `like`."""
  flat = trees.flatten(params)
  return trees.unflatten({name: flat[name] for name in trees.flatten(like)})


def frozen_fingerprint(abstract: TrainState, params, init: str) -> str:
  """Fingerprints frozen parameters; raises UserError if `init` lacks one."""
  frozen = trees.flatten(_part(params, abstract.frozen))
  for name, x in frozen.items():
    if isinstance(x, jax.ShapeDtypeStruct):
      raise UserError(
        f'init={init} has no {name}, which optimizer.rules freeze: give it a'
        ' factor above 0, or set train.frozen to None.'
      )
  types = {name: x.dtype for name, x in trees.flatten(abstract.frozen).items()}
  # A generator, so that few arrays are in memory at a time.
  return fingerprint.of_arrays(
    (name, np.asarray(x, types[name])) for name, x in frozen.items()
  )


def read_frozen(task, abstract: TrainState) -> tuple[Any, str]:
  """Returns a run's frozen parameters, read from `init`, and a fingerprint."""
  params, _ = task.start(
    abstract.all_params, abstract.model_state, task.config.init
  )
  digest = frozen_fingerprint(abstract, params, task.config.init)
  frozen = _placed_like(_part(params, abstract.frozen), abstract.frozen)
  return frozen, digest
