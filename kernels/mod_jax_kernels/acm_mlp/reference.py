"""Learners in plain JAX: the truth, and what CPUs run."""

import jax
import jax.numpy as jnp

# Tokens that a product takes together. Smaller tiles follow k more closely,
# larger ones use the matrix units better.
TILE = 256


def acm_mlp(
  x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T, activation='gelu', tile=TILE
):
  """As `mod_jax_kernels.acm_mlp`; sums in float32.

  Tokens are ordered by their number of learners. A tile of them loops over the
  learners up to the largest number in it; a tile of zeros does nothing.
  """
  tokens = x_TD.shape[0]
  learners, _, outputs = w2_NFD.shape
  if not tokens:
    return jnp.zeros((0, outputs), x_TD.dtype)
  tile = min(tile, tokens)
  k_T = jnp.clip(num_learners_T, 0, learners).astype(jnp.int32)
  order_T = jnp.argsort(-k_T, stable=True).astype(jnp.int32)
  padding = -tokens % tile
  # Slots past the end are out of range: read clipped, written nowhere.
  order_S = jnp.pad(order_T, (0, padding), constant_values=tokens)
  k_S = jnp.pad(k_T[order_T], (0, padding))

  def one_tile(start, y_TD):
    index_P = jax.lax.dynamic_slice(order_S, (start,), (tile,))
    k_P1 = jax.lax.dynamic_slice(k_S, (start,), (tile,))[:, None]
    x_PD = x_TD.at[index_P].get(mode='clip')

    def one_learner(n, sum_PD):
      learner_PD = _learner(x_PD, w1_NDF[n], b1_NF[n], w2_NFD[n], activation)
      return sum_PD + jnp.where(n < k_P1, learner_PD, 0.0)

    sum_PD = jnp.zeros((tile, outputs), jnp.float32)
    sum_PD = jax.lax.fori_loop(0, k_P1[0, 0], one_learner, sum_PD)
    return y_TD.at[index_P].set(
      sum_PD.astype(y_TD.dtype), mode='drop', unique_indices=True
    )

  # Only tiles with any work: the rest of the result is zero already.
  busy = (jnp.sum(k_T > 0) + tile - 1) // tile
  return jax.lax.fori_loop(
    0,
    busy,
    lambda i, y_TD: one_tile(i * tile, y_TD),
    jnp.zeros((tokens, outputs), x_TD.dtype),
  )


def _learner(x_PD, w1_DF, b1_F, w2_FD, activation):
  hidden_PF = jnp.dot(x_PD, w1_DF, preferred_element_type=jnp.float32) + b1_F
  if activation == 'gelu':
    hidden_PF = jax.nn.gelu(hidden_PF, approximate=False)
  return jnp.dot(
    hidden_PF.astype(x_PD.dtype), w2_FD, preferred_element_type=jnp.float32
  )
