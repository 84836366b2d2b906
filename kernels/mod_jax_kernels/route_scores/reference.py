"""Attention and its column means in plain JAX: the truth, and what CPUs run."""

import jax
import jax.numpy as jnp


def route_scores(q_BLHC, k_BLHC, v_BLHC, mask_BQS=None):
  """As `mod_jax_kernels.route_scores`; softmax and scores in float32."""
  length, heads, channels = q_BLHC.shape[1:]
  logit_BHQS = jnp.einsum(
    'BQHC,BSHC->BHQS', q_BLHC, k_BLHC, preferred_element_type=jnp.float32
  )
  logit_BHQS *= channels**-0.5
  if mask_BQS is not None:
    # Finite, so that a query without any key gives no NaN, even in gradients.
    lowest = jnp.finfo(jnp.float32).min / 2
    logit_BHQS = jnp.where(mask_BQS[:, None], logit_BHQS, lowest)
  top_BHQ1 = jax.lax.stop_gradient(logit_BHQS.max(axis=-1, keepdims=True))
  weight_BHQS = jnp.exp(logit_BHQS - top_BHQ1)
  # Both results divide afterwards: fewer numbers than the map has.
  share_BHQ = 1 / weight_BHQS.sum(axis=-1)
  out_BQHC = jnp.einsum(
    'BHQS,BSHC->BQHC',
    weight_BHQS.astype(v_BLHC.dtype),
    v_BLHC,
    preferred_element_type=jnp.float32,
  )
  out_BQHC *= jnp.swapaxes(share_BHQ, 1, 2)[..., None]
  if mask_BQS is None:
    share_BHQ /= heads * length
  else:
    # Only queries that see a key take part in the mean.
    seeing_BQ = mask_BQS.any(axis=-1)
    count_B = jnp.maximum(seeing_BQ.sum(axis=-1), 1)
    share_BHQ *= (seeing_BQ / (heads * count_B[:, None]))[:, None]
  # Exactly: accelerators would round both factors, and tie what is near.
  score_BS = jnp.einsum(
    'BHQS,BHQ->BS', weight_BHQS, share_BHQ, precision='highest'
  )
  return out_BQHC.astype(q_BLHC.dtype), score_BS
