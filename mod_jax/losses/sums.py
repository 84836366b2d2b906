"""Losses and metrics as sums that are divided once, at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]  # (total, weight); their quotient is a mean.


@flax.struct.dataclass
class Rows:
  """Values of every row, for metrics that are not sums, such as ranks.

  Attributes:
    batches: for each batch a tree of arrays [B, …].
  """

  batches: tuple[Any, ...]


MetricSums = dict[str, Pair | Rows]  # Keyed by the metric's name.


def add(a: Mapping[str, Pair], b: Mapping[str, Pair]) -> MetricSums:
  """Adds pairs, and joins `Rows`, of the same name; keeps all other values."""
  sums = dict(a)
  for name, value in b.items():
    if name not in sums:
      sums[name] = value
    elif isinstance(value, Rows):
      sums[name] = Rows(sums[name].batches + value.batches)
    else:
      sums[name] = tuple(x + y for x, y in zip(sums[name], value, strict=True))
  return sums


def sum_of_means(
  pairs: Sequence[Pair], weights: Sequence[jax.Array] | None = None
) -> jax.Array:
  """Returns Σ total / weight, the sum of several mean losses.

  If the pairs are of a part of the batch, `weights` has the weights of the
  whole batch, which replace the pairs' own.
  """
  if weights is None:
    weights = [weight for _, weight in pairs]
  return sum(
    total / jnp.maximum(weight, 1e-9)
    for (total, _), weight in zip(pairs, weights, strict=True)
  )


def weighted_sum(value_B: jax.Array, weight_B: jax.Array | None = None) -> Pair:
  """Returns Σ value · weight over rows and Σ weight; None weighs each row 1."""
  if weight_B is None:
    return jnp.sum(value_B), jnp.float32(value_B.shape[0])
  return jnp.sum(value_B * weight_B), jnp.sum(weight_B)
