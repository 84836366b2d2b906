"""Selection in plain JAX: the reference, and the backend for CPUs.

All backends take sort keys: int32 numbers with the same order as the scores.
"""

import jax
import jax.numpy as jnp

# Padding key: below the key of any score, even of -inf.
LOWEST = -(2**31)


def token_select(key_BL, k):
  """See `mod_jax_kernels.token_select`; takes sort keys instead of scores."""

  def count(mask_BL):
    return mask_BL.sum(axis=-1, keepdims=True, dtype=jnp.int32)

  def bisect(step, kth_B1):
    # XOR: the first step clears the sign bit, the others set a bit.
    higher_B1 = kth_B1 ^ (jnp.int32(1) << (31 - step))
    return jnp.where(count(key_BL >= higher_B1) >= k, higher_B1, kth_B1)

  kth_B1 = jnp.full((key_BL.shape[0], 1), LOWEST, jnp.int32)
  kth_B1 = jax.lax.fori_loop(0, 32, bisect, kth_B1)
  above_BL, equal_BL = key_BL > kth_B1, key_BL == kth_B1
  rank_BL = jnp.cumsum(equal_BL, axis=-1, dtype=jnp.int32)
  chosen_BL = above_BL | equal_BL & (rank_BL <= k - count(above_BL))
  total_BL = jnp.cumsum(chosen_BL, axis=-1, dtype=jnp.int32)
  # The n-th chosen position is the first where the running count reaches n.
  return jax.vmap(
    lambda total_L: jnp.searchsorted(total_L, jnp.arange(1, k + 1))
  )(total_BL).astype(jnp.int32)
