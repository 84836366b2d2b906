"""Filters of logits for sampling: temperature, top-k, top-p and min-p."""

import math

import jax
import jax.numpy as jnp

from mod_jax.errors import require
from mod_jax.layers import vocabulary


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
  """Returns logits of the distribution to sample from; -inf excludes a token.

  The settings are numbers, or arrays [B] with a number for each row.

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
  divided_BV = logits_BV / jnp.where(temperature_B1 == 0, 1.0, temperature_B1)
  limited_B1 = (top_k_B1 > 0) & (top_k_B1 < size)
  count_B1 = jnp.where(limited_B1, top_k_B1, size).astype(jnp.float32)
  # Skip searches if possible: they dominate the time.
  filtered_BV = jax.lax.cond(
    limited_B1.any(),
    lambda x_BV: _likeliest(x_BV, jnp.ones_like(x_BV), count_B1),
    lambda x_BV: x_BV,
    divided_BV,
  )
  # With top_p = 1 keep all tokens: a rounded sum may reach 1 too early.
  nucleus_B1 = jnp.where(top_p_B1 < 1, top_p_B1, jnp.inf)
  filtered_BV = jax.lax.cond(
    (top_p_B1 < 1).any(),
    lambda x_BV: _likeliest(x_BV, jax.nn.softmax(x_BV), nucleus_B1),
    lambda x_BV: x_BV,
    filtered_BV,
  )
  # A fraction of the largest probability is a distance below the largest logit.
  least_B1 = divided_BV.max(axis=-1, keepdims=True) + jnp.log(min_p_B1)
  filtered_BV = jnp.where(divided_BV >= least_B1, filtered_BV, -jnp.inf)
  best_B1 = vocabulary.argmax(logits_BV)[:, None]
  best_BV = jnp.where(jnp.arange(size) == best_B1, 0.0, -jnp.inf)
  return jnp.where(temperature_B1 == 0, best_BV, filtered_BV)


def _likeliest(logits_BV, weight_BV, enough_B1):
  """Keeps the logits of the likeliest tokens; all other logits become -inf.

  As few tokens are kept as reach a total weight of `enough_B1`: at least one,
  and all if the weight of all is less. Of equal logits the first are kept.
  Bisection for the least kept logit, and for the last kept token if several
  have that logit, takes a tenth of the time of sorting.
  """
  enough_B1 = jnp.maximum(enough_B1, jnp.finfo(jnp.float32).tiny)

  def is_enough(kept_BV):
    weight_B1 = jnp.where(kept_BV, weight_BV, 0).sum(axis=-1, keepdims=True)
    return weight_B1 >= enough_B1

  least_B1 = _float(
    _largest(
      lambda code_B1: is_enough(logits_BV >= _float(code_B1)),
      _code(jnp.full_like(enough_B1, -jnp.inf)),
      _code(logits_BV.max(axis=-1, keepdims=True)),
      steps=32,
    )
  )
  is_least_BV = logits_BV == least_B1

  def first():
    """Returns the mask of kept tokens, with the first of those that tie."""
    size = logits_BV.shape[-1]

    def kept(before_B1):
      is_first_BV = is_least_BV & (jnp.arange(size) <= -before_B1)
      return (logits_BV > least_B1) | is_first_BV

    before_B1 = _largest(
      lambda before_B1: is_enough(kept(before_B1)),
      jnp.full(enough_B1.shape, 1 - size),
      jnp.zeros(enough_B1.shape, jnp.int32),
      steps=size.bit_length(),
    )
    return kept(before_B1)

  are_tied = (is_least_BV.sum(axis=-1) > 1).any()
  kept_BV = jax.lax.cond(are_tied, first, lambda: logits_BV >= least_B1)
  return jnp.where(kept_BV, logits_BV, -jnp.inf)


def _largest(holds, low, high, steps):
  """Returns the largest integers, from `low` to `high`, for which `holds`.

  `holds` is True up to some integer and False above it; the result is `low` if
  `holds` is True for no larger integer. `high - low` is less than 2**steps.
  """

  def halve(_, bounds):
    low, high = bounds
    middle = (low | high) - ((low ^ high) >> 1)  # Rounded up; cannot overflow.
    is_low = holds(middle)
    return (
      jnp.where(is_low, middle, low),
      jnp.where(is_low, high, middle - 1),
    )

  return jax.lax.fori_loop(0, steps, halve, (low, high))[0]


def _code(x):
  """Maps float32 numbers to int32 numbers in the same order."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _float(code):
  """Inverts `_code`."""
  bits = jnp.where(code < 0, code ^ 0x7FFFFFFF, code)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
