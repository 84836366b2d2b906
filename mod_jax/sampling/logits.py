"""Temperature, top-k and nucleus filters of logits for sampling."""

import math

import jax
import jax.numpy as jnp

from mod_jax.errors import require


def check(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
  """Raises UserError if a sampling parameter is out of range."""
  require(
    0 <= temperature < math.inf,
    '0 (the likeliest token) or a positive number',
    temperature=temperature,
  )
  require(
    0 <= top_k < 2**31 and not top_k % 1,
    'a whole number from 0 (no limit) to 2**31 - 1',
    top_k=top_k,
  )
  require(0 < top_p <= 1, 'a probability in (0, 1]', top_p=top_p)
  require(0 <= min_p <= 1, 'a share from 0 (no limit) to 1', min_p=min_p)


def filter_logits(
  logits_BV: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  top_k: jax.Array | int = 0,
  top_p: jax.Array | float = 1.0,
  min_p: jax.Array | float = 0.0,
) -> jax.Array:
  """Returns logits of the distribution to sample from, -inf for excluded ones.

  The settings are numbers, or arrays [B] with one per row.

  Args:
    logits_BV: the model's logits.
    temperature: divisor of the logits; 0 keeps only the likeliest token.
    top_k: number of the likeliest tokens to keep; 0 = all.
    top_p: keeps the smallest set of likeliest tokens whose total probability
      reaches this, and at least one (nucleus sampling, Holtzman et al. 2020).
    min_p: keeps tokens of at least this share of the likeliest one's
      probability (Nguyen et al. 2024); 0 = all.
  """
  logits_BV = logits_BV.astype(jnp.float32)
  batch, size = logits_BV.shape
  temperature_B1, top_k_B1, top_p_B1, min_p_B1 = (
    jnp.broadcast_to(x, (batch,))[:, None]
    for x in (temperature, top_k, top_p, min_p)
  )
  best_B1 = logits_BV.argmax(axis=-1, keepdims=True)
  best_BV = jnp.where(jnp.arange(size) == best_B1, 0.0, -jnp.inf)
  divided_BV = logits_BV / jnp.where(temperature_B1 == 0, 1.0, temperature_B1)
  limited_B1 = (top_k_B1 > 0) & (top_k_B1 < size)
  # Skip the sort if possible: it dominates the time.
  filtered_BV = jax.lax.cond(
    (limited_B1 | (top_p_B1 < 1)).any(),
    _filtered,
    lambda logits_BV, *_: logits_BV,
    *(divided_BV, jnp.where(limited_B1, top_k_B1, size), top_p_B1),
  )
  # A share of the largest probability is a distance from the largest logit.
  least_B1 = divided_BV.max(axis=-1, keepdims=True) + jnp.log(min_p_B1)
  filtered_BV = jnp.where(divided_BV >= least_B1, filtered_BV, -jnp.inf)
  return jnp.where(temperature_B1 == 0, best_BV, filtered_BV)


def _filtered(logits_BV, top_k_B1, top_p_B1):
  size = logits_BV.shape[-1]
  order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
  sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
  sorted_BV = jnp.where(jnp.arange(size) < top_k_B1, sorted_BV, -jnp.inf)
  probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
  preceding_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
  # Rounding: with top_p = 1 the sum may reach 1 too early, and a tiny top_p may
  # round to 0.
  kept_BV = (preceding_BV < top_p_B1) | (top_p_B1 >= 1)
  kept_BV |= jnp.arange(size) == 0
  sorted_BV = jnp.where(kept_BV, sorted_BV, -jnp.inf)
  inverse_BV = jnp.argsort(order_BV, axis=-1)
  return jnp.take_along_axis(sorted_BV, inverse_BV, axis=-1)
