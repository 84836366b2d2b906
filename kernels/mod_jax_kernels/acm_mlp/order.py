"""Order of the tokens by their number of learners, most first."""

import functools
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
  # A TPU writes scalars one by one, and sorts fast.
  token_T, slot_T = jax.lax.platform_dependent(
    k_T,
    tpu=by_sorting,
    default=functools.partial(counted, learners=learners),
  )
  runs_TN = k_T[:, None] > jnp.arange(learners, dtype=jnp.int32)
  return Order(token_T, slot_T, runs_TN.sum(axis=0, dtype=jnp.int32))


def by_sorting(k_T):
  """Returns token_T and slot_T, which XLA sorts by the same code."""
  # Of the same type as by counting, with `jax_enable_x64` too.
  token_T = jnp.argsort(-k_T, stable=True).astype(jnp.int32)
  return token_T, jnp.argsort(token_T).astype(jnp.int32)


def counted(k_T, learners):
  """Returns token_T and slot_T by counting, as there are few different keys.

  It is stable as well: tokens with equal keys are read from memory in order.
  """
  levels_K = jnp.arange(learners, -1, -1, dtype=jnp.int32)
  same_KT = (k_T == levels_K[:, None]).astype(jnp.int32)
  rank_KT = jnp.cumsum(same_KT, axis=1)
  first_K = jnp.cumsum(rank_KT[:, -1]) - rank_KT[:, -1]
  slot_T = jnp.sum(same_KT * (rank_KT + first_K[:, None]), axis=0) - 1
  tokens_T = jnp.arange(k_T.size, dtype=jnp.int32)
  token_T = jnp.zeros_like(tokens_T)
  token_T = token_T.at[slot_T].set(
    tokens_T, unique_indices=True, mode='promise_in_bounds'
  )
  return token_T, slot_T
