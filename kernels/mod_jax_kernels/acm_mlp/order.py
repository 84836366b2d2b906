"""Order of the tokens by their number of learners, the largest first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
  """Order of tokens; the first `count_N[n]` are the tokens that run learner n.

  Attributes:
    num_learners_T: int32 number of learners of each token, 0..N.
    token_T: int32 token at each slot (place in the order).
    slot_T: int32 slot of each token, the inverse of `token_T`.
    count_N: int32 number of tokens that run each learner; never increasing.
  """

  num_learners_T: jax.Array
  token_T: jax.Array
  slot_T: jax.Array
  count_N: jax.Array


def order(num_learners_T: jax.Array, learners: int) -> Order:
  """Returns the order of tokens, of which there must be at least one.

  `learners` is N. Numbers of learners are clipped to 0..N.
  """
  # Clip before casting, which makes large unsigned numbers negative.
  most = min(learners, jnp.iinfo(num_learners_T.dtype).max)
  k_T = jnp.clip(num_learners_T, 0, most).astype(jnp.int32)
  slot_T = slots(k_T, learners)
  tokens_T = jnp.arange(k_T.size, dtype=jnp.int32)
  token_T = jnp.zeros_like(tokens_T)
  token_T = token_T.at[slot_T].set(
    tokens_T, unique_indices=True, mode='promise_in_bounds'
  )
  runs_TN = k_T[:, None] > jnp.arange(learners, dtype=jnp.int32)
  return Order(k_T, token_T, slot_T, runs_TN.sum(axis=0, dtype=jnp.int32))


def slots(k_XT, learners):
  """Returns each number's rank along the last axis, 0 for the largest.

  Equal numbers keep their order. Ranks are found by counting, since there are
  few different numbers: 0 to `learners`.
  """
  levels_K1 = jnp.arange(learners, -1, -1, dtype=jnp.int32)[:, None]
  same_XKT = (k_XT[..., None, :] == levels_K1).astype(jnp.int32)
  rank_XKT = jnp.cumsum(same_XKT, axis=-1)
  count_XK = rank_XKT[..., -1]
  first_XK = jnp.cumsum(count_XK, axis=-1) - count_XK
  slot_XT = same_XKT * (rank_XKT + first_XK[..., None]) - same_XKT
  return slot_XT.sum(axis=-2, dtype=jnp.int32)
