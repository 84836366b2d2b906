"""Capacity over depth and over training, as functions of layer and step."""

import math

from mod_jax.errors import UserError


def layer_capacities(
  capacity: float | tuple[float, ...],
  num_routed: int,
  *,
  decay: float = 1.0,
) -> tuple[float, ...]:
  """Returns the capacity of each routed layer, first to last.

  Args:
    capacity: one fraction for all, or one for each routed layer.
    num_routed: number of routed layers.
    decay: capacity of the last routed layer over that of the first; between
      them it falls geometrically with depth, in the spirit of p-MoD (Zhang et
      al. 2024). The mean over layers stays `capacity`: where layers would
      exceed 1 they have 1, and the others more for it. 1 keeps it constant.

  Raises:
    UserError: a list of the wrong length.
  """
  if isinstance(capacity, tuple):
    if len(capacity) != num_routed:
      raise UserError(
        f'capacity lists {len(capacity)} fractions for {num_routed} routed'
        ' layers: give one for each, or a single number for all.'
      )
    return capacity
  if num_routed < 2 or decay == 1:
    return (capacity,) * num_routed
  weight = [decay ** (i / (num_routed - 1)) for i in range(num_routed)]
  # The layers of the largest weight have capacity 1, and the others share the
  # rest of the budget by weight; the loop finds the fewest such layers.
  largest = sorted(weight, reverse=True)
  for full in range(num_routed):
    left = capacity * num_routed - full
    scale = left / math.fsum(largest[full:])
    if scale * largest[full] <= 1:
      break
  return tuple(min(1.0, scale * w) for w in weight)


def shifted_cosine(num_layers: int) -> tuple[float | None, ...]:
  """Returns each layer's capacity by p-MoD (Zhang et al. 2024); None for dense.

  `½ cos(πl / (L - 1)) + ½` for layer l of L, from 1 at the first to 0 at the
  last. Layers of more than .85 are dense, and none has less than .15.
  """
  ratios = [
    0.5 * math.cos(math.pi * i / max(1, num_layers - 1)) + 0.5
    for i in range(num_layers)
  ]
  return tuple(None if r > 0.85 else max(r, 0.15) for r in ratios)


def capacity_floor(step: int, *, warmup_steps: int, stages: int) -> float:
  """Returns the least capacity that a routed layer has at a training step.

  Training may begin with capacity 1 and come down in `stages` equal stretches
  of `warmup_steps` steps: 1, 1 - 1/stages, …, 1/stages, and then 0, where the
  configured capacity rules. Few stages, because each is a compiled program.
  """
  if step >= warmup_steps:
    return 0.0
  return 1.0 - (step * stages // warmup_steps) / stages
