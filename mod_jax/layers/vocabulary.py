"""Choices among the many logits of a vocabulary.

A choice has two steps: first a block of tokens, then a token in it. XLA for
CPUs is slow to find the index of the largest of many numbers, and slower to
make random numbers for all of them (`benchmarks/choose_token.py`).
"""

import jax
import jax.numpy as jnp

_BLOCK = 256


def argmax(x: jax.Array) -> jax.Array:
  """Returns `x.argmax(axis=-1)`: the first index of the largest number."""
  x_NK = _blocks(x, -jnp.inf)
  return _token(x_NK, x_NK.max(axis=-1).argmax(axis=-1), jnp.argmax)


def draw(key: jax.Array, weight_V: jax.Array) -> jax.Array:
  """Returns a token, drawn with probabilities in proportion to weights >= 0."""
  block_key, token_key = jax.random.split(key)

  def drawn(key, weight):
    return jax.random.categorical(key, jnp.log(weight))

  weight_NK = _blocks(weight_V, 0)
  block = drawn(block_key, weight_NK.sum(axis=-1))
  return _token(weight_NK, block, lambda weight, axis: drawn(token_key, weight))


def _blocks(x, fill):
  """Returns [..., V] as N blocks [..., N, K], padded with `fill` at the end."""
  missing = -x.shape[-1] % _BLOCK
  if missing:
    widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    x = jnp.pad(x, widths, constant_values=fill)
  return x.reshape(*x.shape[:-1], -1, _BLOCK)


def _token(x_NK, block, choose):
  """Returns the token that `choose` finds in the block of index `block`."""
  x_1K = jnp.take_along_axis(x_NK, block[..., None, None], axis=-2)
  token = block * _BLOCK + choose(x_1K[..., 0, :], axis=-1)
  return token.astype(jnp.int32)
