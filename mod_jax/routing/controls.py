"""Scores that ignore the tokens, as controls of experiments."""

import fractions
import statistics

import jax
import jax.numpy as jnp


def gaussian_scores(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns independent N(0, 1) scores: Raposo et al.'s stochastic routing."""
  return jax.random.normal(key, shape, jnp.float32)


def gaussian_threshold(capacity: float) -> float:
  """Returns the score that a fraction `capacity` of N(0, 1) samples exceeds."""
  if capacity >= 1:
    return -float('inf')
  return statistics.NormalDist().inv_cdf(1 - capacity)


def stride_scores(position_BL: jax.Array, capacity: float) -> jax.Array:
  """Returns 1 at a fraction `capacity` of the positions, evenly spread, else 0.

  If 1 / capacity is a whole number, the chosen positions are its multiples;
  else two strides alternate to give the right fraction. The pattern is fixed
  and so causal: a token is chosen if its score exceeds 0.5.
  """
  # The computation is in integers, because float32 is inexact at late
  # positions, and in small ones, so that the product below fits in int32.
  max_denominator = 2**15
  ratio = fractions.Fraction(capacity).limit_denominator(max_denominator)
  ratio = max(ratio, fractions.Fraction(1, max_denominator))
  chosen, period = ratio.numerator, ratio.denominator
  return ((position_BL % period) * chosen % period < chosen).astype(jnp.float32)
