"""The warm-up of routed models, in which the capacity falls from 1."""

import dataclasses

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.runs.run_config import TrainConfig


def floor(model_config, train: TrainConfig, step: int) -> float:
  """Returns the minimum capacity of routed layers after `step` steps."""
  if model_config.routing is None:
    return 0.0
  return routing.capacity_floor(
    step,
    warmup_steps=config_lib.steps_of(
      train.capacity_warmup_steps, train.num_steps
    ),
    stages=train.capacity_warmup_stages,
  )


def at_floor(model_config, floor: float):
  """Returns the model's config with no capacity lower than `floor`."""
  if not floor:
    return model_config
  routed = dataclasses.replace(model_config.routing, capacity_floor=floor)
  return model_config.with_parts(routing=routed)
