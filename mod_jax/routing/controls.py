"""Scores that do not look at the tokens: the controls of an experiment."""

import statistics

import jax
import jax.numpy as jnp


def gaussian_scores(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns independent N(0, 1) scores: the paper's stochastic routing."""
  return jax.random.normal(key, shape, jnp.float32)


def gaussian_threshold(capacity: float) -> float:
  """Returns the score that a fraction `capacity` of N(0, 1) draws exceeds."""
  if capacity >= 1:
    return -float('inf')
  return statistics.NormalDist().inv_cdf(1 - capacity)


def stride_scores(position_BL: jax.Array, capacity: float) -> jax.Array:
  """Returns 1 at every `round(1 / capacity)`-th position, else 0.

  A fixed pattern, hence causal by itself: a token is chosen where the score
  exceeds 0.5.
  """
  stride = max(1, round(1 / capacity))
  return (position_BL % stride == 0).astype(jnp.float32)
