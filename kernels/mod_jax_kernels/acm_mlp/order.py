"""Order of the tokens by their number of learners, most first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
  """Tokens ordered so that those of learner n are the first `count_N[n]`.

  Attributes:
    token_T: int32 token at each slot.
    slot_T: int32 slot of each token, the inverse.
    count_N: int32 number of tokens that run each learner; never increasing.
  """

  token_T: jax.Array
  slot_T: jax.Array
  count_N: jax.Array


def order(num_learners_T: jax.Array, learners: int) -> Order:
  """Returns the order of at least one token.

  Args:
    num_learners_T: integers, clipped to 0..N.
    learners: N.
  """
  k_T = jnp.clip(num_learners_T.astype(jnp.int32), 0, learners)
  # A counting sort, as there are only N + 1 different keys. It is stable, so
  # that tokens with equal keys are read from memory in order.
  levels_K = jnp.arange(learners, -1, -1, dtype=jnp.int32)
  same_KT = (k_T == levels_K[:, None]).astype(jnp.int32)
  rank_KT = jnp.cumsum(same_KT, axis=1)
  at_least_K = jnp.cumsum(rank_KT[:, -1])
  first_K = at_least_K - rank_KT[:, -1]
  slot_T = jnp.sum(same_KT * (rank_KT + first_K[:, None]), axis=0) - 1
  tokens_T = jnp.arange(k_T.size, dtype=jnp.int32)
  token_T = jnp.zeros_like(tokens_T)
  token_T = token_T.at[slot_T].set(
    tokens_T, unique_indices=True, mode='promise_in_bounds'
  )
  # Learner n runs where k > n, that is on levels N, N - 1, …, n + 1.
  return Order(token_T, slot_T, at_least_K[-2::-1])
