"""Capacity, the fraction of tokens that a layer routes, by depth and step."""

import math

from mod_jax.errors import require


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
    decay: ratio of the last routed layer's capacity to the first one's; in
      between, capacities fall geometrically with depth, in the spirit of p-MoD
      (Zhang et al. 2024). Their mean stays `capacity`: layers that would exceed
      1 have 1, and in return the other layers have more. It applies to a single
      fraction only; 1 is no decay.
  """
  if isinstance(capacity, tuple):
    require(
      len(capacity) == num_routed,
      'a number, or a list with one for each routed layer',
      capacity=capacity,
      routed_layers=num_routed,
    )
    return capacity
  if num_routed < 2 or decay == 1:
    return (capacity,) * num_routed
  weight = [decay ** (i / (num_routed - 1)) for i in range(num_routed)]
  # Find the smallest number `full` of layers with capacity 1. They have the
  # largest weights; the others share the rest of the budget by weight.
  largest = sorted(weight, reverse=True)
  for full in range(num_routed):
    budget = capacity * num_routed - full
    scale = budget / math.fsum(largest[full:])
    if scale * largest[full] <= 1:
      break
  return tuple(min(1.0, scale * w) for w in weight)


def shifted_cosine(num_layers: int) -> tuple[float | None, ...]:
  """Returns each layer's capacity by p-MoD (Zhang et al. 2024); None for dense.

  The formula is `½ cos(πl / (L - 1)) + ½` for layer l of L. It falls from 1 at
  the first to 0 at the last. Layers for which it is above .85 are dense, and
  the capacity of all others is at least .15.
  """
  ratios = [
    0.5 * math.cos(math.pi * i / max(1, num_layers - 1)) + 0.5
    for i in range(num_layers)
  ]
  return tuple(None if r > 0.85 else max(r, 0.15) for r in ratios)


def capacity_floor(step: int, *, warmup_steps: int, stages: int) -> float:
  """Returns the lower bound of the routed layers' capacities at a step.

  Training may begin with capacity 1, and lower it in `stages` equal parts of
  `warmup_steps`: 1, 1 - 1/stages, …, 1/stages. After that the bound is 0, and
  the configured capacities apply. Use few stages: each compiles a program.
  """
  if step >= warmup_steps:
    return 0.0
  return 1.0 - (step * stages // warmup_steps) / stages
