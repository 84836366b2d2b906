"""Attention and the column sums of its map in Triton, for NVIDIA GPUs.

Arrays stay [batch, length, heads, channels]: a program reads the rows of its
head in place. A query that sees no key has a log-sum-exp so large
(`reference.BLIND`) that its weights are 0 in all later passes. Queries beyond
the end get the same number, so `_score_kernel` and `_dkv_kernel` do not mask
them.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.route_scores.tiles import TILES
from mod_jax_kernels.triton_call import block_of, triton_call


@dispatch.jit(static_argnames='causal')
def forward(q_BLHC, k_BLHC, v_BLHC, mask_BL, *, causal):
  """See `reference.forward`; the mask is None or valid_BL, never mask_BQS."""
  batch, length, heads, _ = q_BLHC.shape
  per_query = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
  valid_BL = _or_any(mask_BL, q_BLHC)
  meta = _meta(q_BLHC, mask_BL, causal)
  sizes = _sizes('forward', q_BLHC, 'queries')
  out_BLHC, lse_BHL = triton_call(
    _forward_kernel,
    *(q_BLHC, k_BLHC, v_BLHC, valid_BL),
    out_type=(jax.ShapeDtypeStruct(q_BLHC.shape, q_BLHC.dtype), per_query),
    **meta,
    **sizes,
  )
  column_BHL = triton_call(
    _score_kernel,
    *(q_BLHC, k_BLHC, valid_BL, lse_BHL),
    out_type=per_query,
    **meta,
    **_sizes('score', q_BLHC, 'keys'),
  )
  # Sum over heads here: atomic sums in the kernel would not be deterministic.
  return out_BLHC, column_BHL.sum(axis=1), lse_BHL


@dispatch.jit(static_argnames='causal')
def backward(dout_BLHC, dcolumn_BL, residuals, *, causal):
  """See `reference.backward`; the mask is None or valid_BL, never mask_BQS."""
  q_BLHC, k_BLHC, v_BLHC, mask_BL, out_BLHC, lse_BHL = residuals
  valid_BL = _or_any(mask_BL, q_BLHC)
  like_q = jax.ShapeDtypeStruct(q_BLHC.shape, q_BLHC.dtype)
  meta = {
    **_meta(q_BLHC, mask_BL, causal),
    'SCORED': dcolumn_BL is not None,
  }
  if dcolumn_BL is None:
    dcolumn_BL = q_BLHC
  dq_BLHC, mean_BHL = triton_call(
    _dq_kernel,
    *(q_BLHC, k_BLHC, v_BLHC, valid_BL, out_BLHC, lse_BHL),
    *(dout_BLHC, dcolumn_BL),
    out_type=(like_q, jax.ShapeDtypeStruct(lse_BHL.shape, jnp.float32)),
    **meta,
    **_sizes('dq', q_BLHC, 'queries'),
  )
  dk_BLHC, dv_BLHC = triton_call(
    _dkv_kernel,
    *(q_BLHC, k_BLHC, v_BLHC, valid_BL, lse_BHL, mean_BHL),
    *(dout_BLHC, dcolumn_BL),
    out_type=(like_q, like_q),
    **meta,
    **_sizes('dkv', q_BLHC, 'keys'),
  )
  return dq_BLHC, dk_BLHC, dv_BLHC


def _or_any(mask_BL, instead):
  """Returns the mask as int8; if it is None, an array that is never read."""
  return instead if mask_BL is None else mask_BL.astype(jnp.int8)


def _meta(q_BLHC, mask_BL, causal):
  _, length, heads, channels = q_BLHC.shape
  return {
    'LENGTH': length,
    'HEADS': heads,
    'CHANNELS': channels,
    'BLOCK_C': max(16, triton.next_power_of_2(channels)),
    'SCALE': channels**-0.5,
    'MASKED': mask_BL is not None,
    'CAUSAL': causal,
  }


def _sizes(name, q_BLHC, held):
  """Returns launch options of a kernel whose programs hold blocks of `held`."""
  batch, length, heads, _ = q_BLHC.shape
  table = tiles.choose(TILES, 'triton')
  # Blocks are smaller for float32, whose products are unrolled.
  most = 32 if q_BLHC.dtype.itemsize > 2 else 256
  queries, keys = (
    block_of(length, min(table[f'{name}_{kind}'], most))
    for kind in ('queries', 'keys')
  )
  blocks = triton.cdiv(length, queries if held == 'queries' else keys)
  return {
    # Programs of a head have neighbouring indices, since they read the same
    # rows. The grid has one dimension, because CUDA limits others to 65535.
    'grid': (blocks * heads * batch,),
    'num_warps': table[f'{name}_warps'],
    'num_stages': table[f'{name}_stages'],
    'BLOCK_Q': queries,
    'BLOCK_K': keys,
    # Whether all blocks of rows are full.
    'EVEN': length % queries == 0 and length % keys == 0,
  }


# Not `tl.sum` and `tl.max`, which Triton can interpret only if TRITON_INTERPRET
# is set for the whole process. Tests interpret single kernels.
@triton.jit
def _sum(x):
  return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def _largest(x):
  return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def _place(LENGTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
  """Returns a program's first token, its head, and its row of the batch."""
  blocks: tl.constexpr = (LENGTH + BLOCK - 1) // BLOCK
  pid = tl.program_id(0)
  first = pid % blocks * BLOCK
  head = pid // blocks % HEADS
  # 64 bits, because arrays may have more than 2³¹ elements.
  row = (pid // (blocks * HEADS)).to(tl.int64)
  return first, head, row


@triton.jit
def _load_rows(
  pointer,
  index,
  LENGTH: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  BLOCK_C: tl.constexpr,
  EVEN: tl.constexpr,
):
  """Returns tokens' rows in one head, [rows, BLOCK_C]; 0 beyond the ends."""
  channel = tl.arange(0, BLOCK_C)
  pointers = pointer + index[:, None] * (HEADS * CHANNELS) + channel[None, :]
  if EVEN and BLOCK_C == CHANNELS:
    rows = tl.load(pointers)
  else:
    inside = (index[:, None] < LENGTH) & (channel[None, :] < CHANNELS)
    rows = tl.load(pointers, mask=inside, other=0.0)
  return rows


@triton.jit
def _store_rows(
  pointer,
  rows,
  index,
  LENGTH: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  BLOCK_C: tl.constexpr,
):
  channel = tl.arange(0, BLOCK_C)
  pointers = pointer + index[:, None] * (HEADS * CHANNELS) + channel[None, :]
  inside = (index[:, None] < LENGTH) & (channel[None, :] < CHANNELS)
  tl.store(pointers, rows.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _hide(
  logit,
  query,
  key,
  valid_ptr,
  LENGTH: tl.constexpr,
  MASKED: tl.constexpr,
  CAUSAL: tl.constexpr,
  EVEN: tl.constexpr,
):
  """Returns logits [queries, keys], very low for keys that are not seen."""
  if MASKED:
    valid = tl.load(valid_ptr + key, mask=key < LENGTH, other=0)
    logit = tl.where(valid[None, :] != 0, logit, -1e30)
  elif not EVEN:
    logit = tl.where(key[None, :] < LENGTH, logit, -1e30)
  if CAUSAL:
    logit = tl.where(query[:, None] >= key[None, :], logit, -1e30)
  return logit


@triton.jit
def _forward_kernel(
  q_ptr,
  k_ptr,
  v_ptr,
  valid_ptr,
  out_ptr,
  lse_ptr,
  LENGTH: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  BLOCK_C: tl.constexpr,
  SCALE: tl.constexpr,
  MASKED: tl.constexpr,
  CAUSAL: tl.constexpr,
  BLOCK_Q: tl.constexpr,
  BLOCK_K: tl.constexpr,
  EVEN: tl.constexpr,
):
  first, head, row = _place(LENGTH, HEADS, BLOCK_Q)
  base = (row * LENGTH * HEADS + head) * CHANNELS
  valid_ptr += row * LENGTH
  query = first + tl.arange(0, BLOCK_Q)
  q = _load_rows(q_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
  # Running maximum of each query's logits, divided by log 2 because the
  # hardware computes exp2. The initial value is below any real logit and far
  # above the logits of hidden keys, so that hidden keys have weight 0.
  top = tl.full([BLOCK_Q], -1e20, tl.float32)
  total = tl.full([BLOCK_Q], 0.0, tl.float32)
  acc = tl.full([BLOCK_Q, BLOCK_C], 0.0, tl.float32)
  end = LENGTH
  if CAUSAL:
    end = tl.minimum(first + BLOCK_Q, LENGTH)
  for start in range(0, end, BLOCK_K):
    key = start + tl.arange(0, BLOCK_K)
    k = _load_rows(k_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
    logit = tl.dot(q, tl.trans(k), input_precision='ieee')
    logit = _hide(logit, query, key, valid_ptr, LENGTH, MASKED, CAUSAL, EVEN)
    higher = tl.maximum(top, _largest(logit) * (SCALE * 1.4426950408889634))
    weight = tl.exp2(logit * (SCALE * 1.4426950408889634) - higher[:, None])
    older = tl.exp2(top - higher)
    total = total * older + _sum(weight)
    v = _load_rows(v_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
    acc = acc * older[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision='ieee')
    top = higher
  seeing = total > 0
  if MASKED:
    valid = tl.load(valid_ptr + query, mask=query < LENGTH, other=0)
    seeing = seeing & (valid != 0)
  total = tl.where(seeing, total, 1.0)
  out = tl.where(seeing[:, None], acc / total[:, None], 0.0)
  _store_rows(out_ptr + base, out, query, LENGTH, HEADS, CHANNELS, BLOCK_C)
  lse = (top + tl.log2(total)) * 0.6931471805599453
  tl.store(
    lse_ptr + (row * HEADS + head) * LENGTH + query,
    tl.where(seeing, lse, 1e30),
    mask=query < LENGTH,
  )


@triton.jit
def _score_kernel(
  q_ptr,
  k_ptr,
  valid_ptr,
  lse_ptr,
  column_ptr,
  LENGTH: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  BLOCK_C: tl.constexpr,
  SCALE: tl.constexpr,
  MASKED: tl.constexpr,
  CAUSAL: tl.constexpr,
  BLOCK_Q: tl.constexpr,
  BLOCK_K: tl.constexpr,
  EVEN: tl.constexpr,
):
  """Writes a block of column sums of one head's attention map."""
  first, head, row = _place(LENGTH, HEADS, BLOCK_K)
  base = (row * LENGTH * HEADS + head) * CHANNELS
  lse_ptr += (row * HEADS + head) * LENGTH
  key = first + tl.arange(0, BLOCK_K)
  k = _load_rows(k_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
  column = tl.full([BLOCK_K], 0.0, tl.float32)
  begin = 0
  if CAUSAL:
    begin = first // BLOCK_Q * BLOCK_Q
  for start in range(begin, LENGTH, BLOCK_Q):
    query = start + tl.arange(0, BLOCK_Q)
    q = _load_rows(q_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
    lse = tl.load(lse_ptr + query, mask=query < LENGTH, other=1e30)
    lse *= 1.4426950408889634
    logit = tl.dot(k, tl.trans(q), input_precision='ieee')
    logit = logit * (SCALE * 1.4426950408889634) - lse[None, :]
    if CAUSAL:
      logit = tl.where(query[None, :] >= key[:, None], logit, -1e30)
    column += _sum(tl.exp2(logit))
  if MASKED:
    # Hidden keys can be masked at the end: each key has its own sum.
    valid = tl.load(valid_ptr + row * LENGTH + key, mask=key < LENGTH, other=0)
    column = tl.where(valid != 0, column, 0.0)
  tl.store(
    column_ptr + (row * HEADS + head) * LENGTH + key,
    column,
    mask=key < LENGTH,
  )


@triton.jit
def _dq_kernel(
  q_ptr,
  k_ptr,
  v_ptr,
  valid_ptr,
  out_ptr,
  lse_ptr,
  dout_ptr,
  dcolumn_ptr,
  dq_ptr,
  mean_ptr,
  LENGTH: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  BLOCK_C: tl.constexpr,
  SCALE: tl.constexpr,
  MASKED: tl.constexpr,
  CAUSAL: tl.constexpr,
  SCORED: tl.constexpr,
  BLOCK_Q: tl.constexpr,
  BLOCK_K: tl.constexpr,
  EVEN: tl.constexpr,
):
  """Writes dq, and Σ_j P_ij dP_ij of each query i: see `reference.backward`."""
  first, head, row = _place(LENGTH, HEADS, BLOCK_Q)
  base = (row * LENGTH * HEADS + head) * CHANNELS
  per_query = (row * HEADS + head) * LENGTH
  valid_ptr += row * LENGTH
  query = first + tl.arange(0, BLOCK_Q)
  q = _load_rows(q_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
  dout = _load_rows(
    dout_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN
  )
  out = _load_rows(
    out_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN
  )
  mean = _sum(dout.to(tl.float32) * out.to(tl.float32))
  lse = tl.load(lse_ptr + per_query + query, mask=query < LENGTH, other=1e30)
  lse *= 1.4426950408889634
  end = LENGTH
  if CAUSAL:
    end = tl.minimum(first + BLOCK_Q, LENGTH)
  if SCORED:
    dcolumn_ptr += row * LENGTH
    # Complete the mean first: subtracting large sums would lose digits.
    for start in range(0, end, BLOCK_K):
      key = start + tl.arange(0, BLOCK_K)
      k = _load_rows(k_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
      logit = tl.dot(q, tl.trans(k), input_precision='ieee')
      logit = logit * (SCALE * 1.4426950408889634) - lse[:, None]
      logit = _hide(logit, query, key, valid_ptr, LENGTH, MASKED, CAUSAL, EVEN)
      dcolumn = tl.load(dcolumn_ptr + key, mask=key < LENGTH, other=0.0)
      mean += _sum(tl.exp2(logit) * dcolumn[None, :])
  dq = tl.full([BLOCK_Q, BLOCK_C], 0.0, tl.float32)
  for start in range(0, end, BLOCK_K):
    key = start + tl.arange(0, BLOCK_K)
    k = _load_rows(k_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
    logit = tl.dot(q, tl.trans(k), input_precision='ieee')
    logit = logit * (SCALE * 1.4426950408889634) - lse[:, None]
    logit = _hide(logit, query, key, valid_ptr, LENGTH, MASKED, CAUSAL, EVEN)
    v = _load_rows(v_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
    dweight = tl.dot(dout, tl.trans(v), input_precision='ieee')
    if SCORED:
      dcolumn = tl.load(dcolumn_ptr + key, mask=key < LENGTH, other=0.0)
      dweight += dcolumn[None, :]
    dlogit = tl.exp2(logit) * (dweight - mean[:, None])
    dq = tl.dot(dlogit.to(k.dtype), k, dq, input_precision='ieee')
  _store_rows(
    dq_ptr + base, dq * SCALE, query, LENGTH, HEADS, CHANNELS, BLOCK_C
  )
  tl.store(mean_ptr + per_query + query, mean, mask=query < LENGTH)


@triton.jit
def _dkv_kernel(
  q_ptr,
  k_ptr,
  v_ptr,
  valid_ptr,
  lse_ptr,
  mean_ptr,
  dout_ptr,
  dcolumn_ptr,
  dk_ptr,
  dv_ptr,
  LENGTH: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  BLOCK_C: tl.constexpr,
  SCALE: tl.constexpr,
  MASKED: tl.constexpr,
  CAUSAL: tl.constexpr,
  SCORED: tl.constexpr,
  BLOCK_Q: tl.constexpr,
  BLOCK_K: tl.constexpr,
  EVEN: tl.constexpr,
):
  """Writes gradients of keys and values."""
  first, head, row = _place(LENGTH, HEADS, BLOCK_K)
  base = (row * LENGTH * HEADS + head) * CHANNELS
  per_query = (row * HEADS + head) * LENGTH
  key = first + tl.arange(0, BLOCK_K)
  k = _load_rows(k_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
  v = _load_rows(v_ptr + base, key, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
  if SCORED:
    dcolumn = tl.load(
      dcolumn_ptr + row * LENGTH + key, mask=key < LENGTH, other=0.0
    )
  dk = tl.full([BLOCK_K, BLOCK_C], 0.0, tl.float32)
  dv = tl.full([BLOCK_K, BLOCK_C], 0.0, tl.float32)
  begin = 0
  if CAUSAL:
    begin = first // BLOCK_Q * BLOCK_Q
  for start in range(begin, LENGTH, BLOCK_Q):
    query = start + tl.arange(0, BLOCK_Q)
    q = _load_rows(q_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN)
    dout = _load_rows(
      dout_ptr + base, query, LENGTH, HEADS, CHANNELS, BLOCK_C, EVEN
    )
    inside = query < LENGTH
    lse = tl.load(lse_ptr + per_query + query, mask=inside, other=1e30)
    lse *= 1.4426950408889634
    mean = tl.load(mean_ptr + per_query + query, mask=inside, other=0.0)
    logit = tl.dot(k, tl.trans(q), input_precision='ieee')
    logit = logit * (SCALE * 1.4426950408889634) - lse[None, :]
    if CAUSAL:
      logit = tl.where(query[None, :] >= key[:, None], logit, -1e30)
    weight = tl.exp2(logit)
    dv = tl.dot(weight.to(dout.dtype), dout, dv, input_precision='ieee')
    dweight = tl.dot(v, tl.trans(dout), input_precision='ieee')
    if SCORED:
      dweight += dcolumn[:, None]
    dlogit = weight * (dweight - mean[None, :])
    dk = tl.dot(dlogit.to(q.dtype), q, dk, input_precision='ieee')
  dk *= SCALE
  if MASKED:
    # Weights of hidden keys may be infinite, but affect only their own rows.
    valid = tl.load(valid_ptr + row * LENGTH + key, mask=key < LENGTH, other=0)
    dk = tl.where(valid[:, None] != 0, dk, 0.0)
    dv = tl.where(valid[:, None] != 0, dv, 0.0)
  _store_rows(dk_ptr + base, dk, key, LENGTH, HEADS, CHANNELS, BLOCK_C)
  _store_rows(dv_ptr + base, dv, key, LENGTH, HEADS, CHANNELS, BLOCK_C)
