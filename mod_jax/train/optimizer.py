"""The optimiser: AdamW, warm-up and cosine over exactly the run's steps."""

import dataclasses

import jax
import optax

from mod_jax import config as config_lib
from mod_jax import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  learning_rate: float = 3e-3  # At its peak.
  warmup_steps: int = 100  # Linear from 0.
  final_fraction: float = 0.1  # Learning rate after the last step / the peak.
  weight_decay: float = 0.1  # On kernels and embeddings; not on routers.
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  clip_norm: float = 1.0  # Global gradient norm; 0 = no clipping.

  def __post_init__(self):
    config_lib.validate(self)
    errors.require_positive(self, 'learning_rate', 'epsilon')
    for name in ('beta1', 'beta2', 'final_fraction'):
      if not 0 <= getattr(self, name) <= 1:
        raise errors.UserError(
          f'optimizer.{name}={getattr(self, name)}: expected a number in'
          ' [0, 1].'
        )
    for name in ('warmup_steps', 'weight_decay', 'clip_norm'):
      if getattr(self, name) < 0:
        raise errors.UserError(
          f'optimizer.{name}={getattr(self, name)}: expected 0 or more.'
        )


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """Returns step -> learning rate, for a run of exactly `num_steps`.

  Raises:
    UserError: the warm-up is longer than the run.
  """
  if config.warmup_steps >= num_steps:
    raise errors.UserError(
      f'optimizer.warmup_steps={config.warmup_steps} leaves nothing of a run'
      f' of {num_steps} steps: shorten the warm-up or lengthen the run.'
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.learning_rate,
    warmup_steps=config.warmup_steps,
    decay_steps=num_steps,
    end_value=config.learning_rate * config.final_fraction,
  )


def make_optimizer(
  config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
  """Returns AdamW (Loshchilov & Hutter 2019) for a run of `num_steps`."""
  steps = []
  if config.clip_norm:
    clip = optax.clip_by_global_norm(config.clip_norm)
    # Apart, so that a predictor cannot scale the language model's gradients:
    # it must leave them untouched.
    steps = [
      optax.masked(clip, lambda tree: _where(tree, lambda n: not _predicts(n))),
      optax.masked(clip, lambda tree: _where(tree, _predicts)),
    ]
  return optax.chain(
    *steps,
    optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
    optax.add_decayed_weights(
      config.weight_decay, lambda tree: _where(tree, _decays)
    ),
    optax.scale_by_learning_rate(schedule(config, num_steps)),
  )


def _where(tree, predicate):
  """Returns a tree of booleans by the names along each leaf's path."""

  def names(path):
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]

  return jax.tree_util.tree_map_with_path(
    lambda path, _: predicate(names(path)), tree
  )


def _predicts(names) -> bool:
  return 'predictor' in names


def _decays(names) -> bool:
  return names[-1] in ('kernel', 'embedding') and 'router' not in names
