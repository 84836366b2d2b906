"""Scores that do not look at the tokens: the controls of an experiment."""

import fractions
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
  """Returns 1 at a fraction `capacity` of the positions, evenly spread, else 0.

  Where 1 / capacity is a whole number, those are its multiples; elsewhere two
  strides alternate, so that the fraction still holds. A fixed pattern, hence
  causal by itself: a token is chosen where the score exceeds 0.5.
  """
  # Integers, because float32 would misplace late positions, and small ones, so
  # that their product below fits an int32.
  most = 2**15
  ratio = fractions.Fraction(capacity).limit_denominator(most)
  ratio = max(ratio, fractions.Fraction(1, most))
  chosen, of = ratio.numerator, ratio.denominator
  return ((position_BL % of) * chosen % of < chosen).astype(jnp.float32)
