"""Splash attention, the flash attention for TPUs that comes with JAX."""

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
import jax.numpy as jnp

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.attention import RESIDUALS
from mod_jax_kernels.attention.tiles import TILES
from mod_jax_kernels.pallas_parts import LANES, block_of


def attention(q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL, *, causal):
  """See `mod_jax_kernels.attention`; takes no mask, and pads any lengths.

  Padded keys get a segment of their own. A causal call without segments needs
  none, because no real query sees the padding after it.
  """
  del mask_BQS  # None, see `choice.splash_lacks`.
  queries, keys = q_BQHC.shape[1], k_BSGC.shape[1]
  padding_q, padding_k = -queries % LANES, -keys % LANES
  segment_BQ = segment_BS = segment_BL
  if segment_BL is not None:
    segment_BL = segment_BL.astype(jnp.int32)
    # Padded queries join the last segment: each query must see some key.
    segment_BQ = jnp.pad(segment_BL, ((0, 0), (0, padding_q)), mode='edge')
    segment_BS = _fill(segment_BL, padding_k, segment_BL.max() + 1)
  elif padding_k and not causal:
    batch = q_BQHC.shape[0]
    segment_BQ = jnp.zeros((batch, queries + padding_q), jnp.int32)
    segment_BS = _fill(jnp.zeros((batch, keys), jnp.int32), padding_k, 1)

  # Splash does not scale the logits.
  scale = q_BQHC.shape[-1] ** -0.5
  q_BQHC = (q_BQHC.astype(jnp.float32) * scale).astype(q_BQHC.dtype)
  q_BHQC, k_BGSC, v_BGSC = (
    jnp.moveaxis(_fill(x, padding, 0), 1, 2)
    for x, padding in (
      (q_BQHC, padding_q),
      (k_BSGC, padding_k),
      (v_BSGC, padding_k),
    )
  )
  kernel = _kernel(
    q_BHQC.shape[1], queries + padding_q, keys + padding_k, causal
  )
  segments = None
  if segment_BQ is not None:
    segments = splash.SegmentIds(segment_BQ, segment_BS)
  out_BHQC = jax.vmap(kernel)(q_BHQC, k_BGSC, v_BGSC, segments)
  return jnp.moveaxis(out_BHQC, 1, 2)[:, :queries]


def _fill(x, padding, value):
  if not padding:
    return x
  widths = ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)
  return jnp.pad(x, widths, constant_values=value)


def _kernel(heads, queries, keys, causal):
  sizes = tiles.choose(TILES, 'pallas')
  block_q = block_of(queries, sizes['block_q'])
  block_k = block_of(keys, sizes['block_k'])
  shape = queries, keys
  mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
  return splash.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block_q,
      block_kv=block_k,
      block_q_dkv=block_q,
      block_kv_dkv=block_k,
      block_q_dq=block_q,
      block_kv_dq=block_k,
    ),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=RESIDUALS,
    interpret=dispatch.interpreting(),
  )
