"""Attention in plain JAX: the truth, and what CPUs run."""

import jax
import jax.numpy as jnp

# Queries are taken in blocks of this many, so that a causal block multiplies
# only the keys it can see: half the products, half the softmax.
_BLOCK = 128


def attention(q_BQHC, k_BSGC, v_BSGC, mask_BQS=None, causal=False):
  """As `mod_jax_kernels.attention`; softmax in float32."""
  batch, queries, heads, channels = q_BQHC.shape
  groups = k_BSGC.shape[2]
  q_BQGRC = q_BQHC.reshape(batch, queries, groups, heads // groups, channels)
  if not causal or queries <= _BLOCK:
    blocks = [(0, queries, k_BSGC.shape[1])]
  else:
    starts = range(0, queries, _BLOCK)
    ends = [min(start + _BLOCK, queries) for start in starts]
    blocks = [(start, end, end) for start, end in zip(starts, ends)]
  out = []
  for start, end, keys in blocks:
    mask_BQK = None if mask_BQS is None else mask_BQS[:, start:end, :keys]
    if causal:
      position_Q1 = jnp.arange(start, end)[:, None]
      causal_1QK = (position_Q1 >= jnp.arange(keys))[None]
      mask_BQK = causal_1QK if mask_BQK is None else mask_BQK & causal_1QK
    out.append(
      _attend(
        q_BQGRC[:, start:end], k_BSGC[:, :keys], v_BSGC[:, :keys], mask_BQK
      )
    )
  out_BQGRC = out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)
  return out_BQGRC.reshape(q_BQHC.shape)


def _attend(q_BQGRC, k_BSGC, v_BSGC, mask_BQS):
  score_BGRQS = jnp.einsum(
    'BQGRC,BSGC->BGRQS', q_BQGRC, k_BSGC, preferred_element_type=jnp.float32
  )
  score_BGRQS *= q_BQGRC.shape[-1] ** -0.5
  if mask_BQS is not None:
    # Finite, so that a query without any key gives no NaN, even in gradients.
    lowest = jnp.finfo(jnp.float32).min / 2
    score_BGRQS = jnp.where(mask_BQS[:, None, None], score_BGRQS, lowest)
  weight_BGRQS = jax.nn.softmax(score_BGRQS, axis=-1)
  return jnp.einsum(
    'BGRQS,BSGC->BQGRC', weight_BGRQS.astype(v_BSGC.dtype), v_BSGC
  )
