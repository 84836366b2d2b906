"""Attention in plain JAX: the reference, and the backend for CPUs."""

import jax
import jax.numpy as jnp

# Number of blocks of queries in a causal call, and their minimum size. Each
# block multiplies only the keys that it can see, which saves 3/8 of the work.
# More blocks would save little more and take longer to compile.
_BLOCKS, _LEAST = 4, 64


def attention(q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL, *, causal):
  """See `mod_jax_kernels.attention`; the softmax is in float32."""
  batch, queries, heads, channels = q_BQHC.shape
  keys, groups = k_BSGC.shape[1:3]
  mask_BQS = seen(mask_BQS, segment_BL, queries)
  q_BQGRC = q_BQHC.reshape(batch, queries, groups, heads // groups, channels)
  # Put heads first, so that each block is a plain batch of matrix products.
  q_BGRQC = jnp.moveaxis(q_BQGRC, 1, 3)
  k_BGSC, v_BGSC = jnp.moveaxis(k_BSGC, 1, 2), jnp.moveaxis(v_BSGC, 1, 2)
  size = max(_LEAST, -(-queries // _BLOCKS)) if causal else queries
  out = []
  for start in range(0, queries, size):
    end = min(start + size, queries)
    visible = end if causal else keys
    mask_BQK = None if mask_BQS is None else mask_BQS[:, start:end, :visible]
    if causal:
      causal_QK = jnp.arange(start, end)[:, None] >= jnp.arange(visible)
      mask_BQK = causal_QK[None] if mask_BQK is None else mask_BQK & causal_QK
    out.append(
      _attend(
        q_BGRQC[:, :, :, start:end],
        k_BGSC[:, :, :visible],
        v_BGSC[:, :, :visible],
        mask_BQK,
      )
    )
  out_BGRQC = out[0] if len(out) == 1 else jnp.concatenate(out, axis=3)
  return jnp.moveaxis(out_BGRQC, 3, 1).reshape(q_BQHC.shape)


def seen(mask_BQS, segment_BL, queries):
  """Joins mask and segments to one mask_BQS; None if all keys are seen."""
  if mask_BQS is not None:
    # Broadcast a mask that all queries share: cuDNN does not take it, and
    # `attention` above slices masks by queries.
    batch, _, keys = mask_BQS.shape
    mask_BQS = jnp.broadcast_to(mask_BQS, (batch, queries, keys))
  if segment_BL is None:
    return mask_BQS
  same_BQS = segment_BL[:, :, None] == segment_BL[:, None, :]
  return same_BQS if mask_BQS is None else mask_BQS & same_BQS


def _attend(q_BGRQC, k_BGSC, v_BGSC, mask_BQS):
  batch, groups, _, queries, channels = q_BGRQC.shape
  # Put all queries of a group on one axis: on CPUs, XLA then fuses the products
  # with the softmax; otherwise it copies the scores.
  q_BGTC = q_BGRQC.reshape(batch, groups, -1, channels)
  score_BGTS = jnp.einsum(
    'BGTC,BGSC->BGTS', q_BGTC, k_BGSC, preferred_element_type=jnp.float32
  )
  score_BGTS *= channels**-0.5
  if mask_BQS is not None:
    keys = k_BGSC.shape[2]
    score_BGRQS = score_BGTS.reshape(batch, groups, -1, queries, keys)
    # A finite number, so that queries without any key give no NaN, even in
    # gradients.
    lowest = jnp.finfo(jnp.float32).min / 2
    score_BGRQS = jnp.where(mask_BQS[:, None, None], score_BGRQS, lowest)
    score_BGTS = score_BGRQS.reshape(score_BGTS.shape)
  top_BGT1 = jax.lax.stop_gradient(score_BGTS.max(axis=-1, keepdims=True))
  weight_BGTS = jnp.exp(score_BGTS - top_BGT1)
  # Divide after the product: C numbers per query instead of S.
  total_BGT1 = weight_BGTS.sum(axis=-1, keepdims=True)
  out_BGTC = jnp.einsum(
    'BGTS,BGSC->BGTC',
    weight_BGTS.astype(v_BGSC.dtype),
    v_BGSC,
    preferred_element_type=jnp.float32,
  )
  out_BGTC = (out_BGTC / total_BGT1).astype(q_BGRQC.dtype)
  return out_BGTC.reshape(q_BGRQC.shape)
