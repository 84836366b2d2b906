"""Attention and the column sums of its map in Pallas, for TPUs.

Arrays are transposed to [batch, heads, channels, length], so that lanes are
full whatever the width of a head. Logits are [keys, queries], so that values
per query are along lanes, as in memory. Queries that see no key, and those that
pad the last block, have a log-sum-exp so large (`reference.BLIND`) that their
weights are 0 in all later passes.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.pallas_parts import LANES, as_column, of_present, product
from mod_jax_kernels.route_scores import pallas_rows, reference
from mod_jax_kernels.route_scores.tiles import TILES

_LOWEST = -1e30


@dispatch.jit(static_argnames='causal')
def forward(q_BLHC, k_BLHC, v_BLHC, mask_BL, *, causal):
  """See `reference.forward`; the mask is None or valid_BL, never mask_BQS."""
  if pallas_rows.fits(q_BLHC):
    return pallas_rows.forward(q_BLHC, k_BLHC, v_BLHC, mask_BL, causal=causal)
  batch, length, heads, channels = q_BLHC.shape
  block, padded = _block(length)
  q_BHCL, k_BHCL, v_BHCL = (
    _pad(_turn(x), padded) for x in (q_BLHC, k_BLHC, v_BLHC)
  )
  valid_B1L = _valid(mask_BL, batch, length, padded)
  grid = batch, heads, padded // block, padded // block
  # Repeating the previous index avoids fetching key blocks that are not seen.
  along = _along(block, lambda b, h, i, j: i)
  beside = _along(block, lambda b, h, i, j: jnp.minimum(i, j) if causal else j)
  out_BHCL, lse_BH1L = _call(
    functools.partial(_forward_kernel, causal=causal),
    grid,
    [
      (q_BHCL, along),
      (k_BHCL, beside),
      (v_BHCL, beside),
      (valid_B1L, along),
      (valid_B1L, beside),
    ],
    [
      (q_BHCL.shape, q_BHCL.dtype, along),
      ((batch, heads, 1, padded), jnp.float32, along),
    ],
    scratch=[(1, block), (1, block), (channels, block)],
  )

  def head(b, i, h, j):
    return h

  along = _along(block, lambda b, i, h, j: i, head)
  beside = _along(
    block, lambda b, i, h, j: jnp.maximum(i, j) if causal else j, head
  )
  (column_B1L,) = _call(
    functools.partial(_score_kernel, causal=causal),
    (batch, padded // block, heads, padded // block),
    [
      (q_BHCL, beside),
      (k_BHCL, along),
      (lse_BH1L, beside),
      (valid_B1L, along),
    ],
    [((batch, 1, padded), jnp.float32, along)],
    scratch=[(block, LANES)],
    parallel=2,
  )
  return (
    _turn_back(out_BHCL, length),
    column_B1L[:, 0, :length],
    lse_BH1L[:, :, 0, :length],
  )


@dispatch.jit(static_argnames='causal')
def backward(dout_BLHC, dcolumn_BL, residuals, *, causal):
  """See `reference.backward`; the mask is None or valid_BL, never mask_BQS."""
  q_BLHC, k_BLHC, v_BLHC, mask_BL, out_BLHC, lse_BHL = residuals
  if pallas_rows.fits(q_BLHC):
    return pallas_rows.backward(dout_BLHC, dcolumn_BL, residuals, causal=causal)
  batch, length, heads, channels = q_BLHC.shape
  block, padded = _block(length)
  blocks = padded // block
  q_BHCL, k_BHCL, v_BHCL, dout_BHCL = (
    _pad(_turn(x), padded) for x in (q_BLHC, k_BLHC, v_BLHC, dout_BLHC)
  )
  lse_BH1L = _pad(lse_BHL[:, :, None], padded, reference.BLIND)
  mean_BH1L = _pad(reference.dot(dout_BLHC, out_BLHC)[:, :, None], padded)
  valid_B1L = _valid(mask_BL, batch, length, padded)
  scored = dcolumn_BL is not None
  dcolumn_B1L = _pad(dcolumn_BL[:, None], padded) if scored else None
  # One pass over the keys for the mean and one for the gradient: accumulating
  # both at once would subtract large sums and lose digits.
  passes = 2 if scored else 1
  along = _along(block, lambda b, h, i, j: i)
  beside = _along(
    block,
    lambda b, h, i, j: jnp.minimum(i, j % blocks) if causal else j % blocks,
  )
  dq_BHCL, mean_BH1L = _call(
    functools.partial(_dq_kernel, causal=causal, blocks=blocks),
    (batch, heads, blocks, passes * blocks),
    [
      (q_BHCL, along),
      (k_BHCL, beside),
      (v_BHCL, beside),
      (dout_BHCL, along),
      (lse_BH1L, along),
      (mean_BH1L, along),
      (valid_B1L, beside),
      (dcolumn_B1L, beside),
    ],
    [
      (q_BHCL.shape, q_BHCL.dtype, along),
      (mean_BH1L.shape, jnp.float32, along),
    ],
    scratch=[(1, block), (channels, block)],
  )
  beside = _along(block, lambda b, h, i, j: jnp.maximum(i, j) if causal else j)
  dk_BHCL, dv_BHCL = _call(
    functools.partial(_dkv_kernel, causal=causal),
    (batch, heads, blocks, blocks),
    [
      (q_BHCL, beside),
      (k_BHCL, along),
      (v_BHCL, along),
      (dout_BHCL, beside),
      (lse_BH1L, beside),
      (mean_BH1L, beside),
      (valid_B1L, along),
      (dcolumn_B1L, along),
    ],
    [
      (k_BHCL.shape, k_BHCL.dtype, along),
      (v_BHCL.shape, v_BHCL.dtype, along),
    ],
    scratch=[(block, LANES), (channels, block), (channels, block)],
  )
  return tuple(_turn_back(x, length) for x in (dq_BHCL, dk_BHCL, dv_BHCL))


def _block(length):
  """Returns the block size, and the length padded to whole blocks."""
  largest = tiles.choose(TILES, 'pallas')['block']
  sizes = range(LANES, largest + 1, LANES)
  # Choose the least padding, then the fewest blocks.
  block = min(sizes, key=lambda size: (-length % size, -size))
  return block, length + -length % block


def _turn(x_BLHC):
  return x_BLHC.transpose(0, 2, 3, 1)


def _turn_back(x_BHCL, length):
  return x_BHCL[..., :length].transpose(0, 3, 1, 2)


def _pad(x, length, value=0):
  widths = [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])]
  return jnp.pad(x, widths, constant_values=value)


def _valid(mask_BL, batch, length, padded):
  """Returns valid_B1L: 1 for visible tokens; None without mask and padding."""
  if mask_BL is None:
    if length == padded:
      return None
    mask_BL = jnp.ones((batch, length), bool)
  return _pad(mask_BL[:, None].astype(jnp.float32), padded)


def _along(block, index, heads=lambda b, h, *_: h):
  """Returns a function from an array's shape to its `BlockSpec`.

  Args:
    block: number of tokens of a block.
    index: maps a program's indices to the index of its block of tokens.
    heads: maps a program's indices to the index of its head.
  """

  def spec(shape):
    if len(shape) == 3:
      return pl.BlockSpec(
        (None, 1, block), lambda *ids: (ids[0], 0, index(*ids))
      )
    return pl.BlockSpec(
      (None, None, shape[2], block),
      lambda *ids: (ids[0], heads(*ids), 0, index(*ids)),
    )

  return spec


def _call(kernel, grid, inputs, outputs, *, scratch, parallel=3):
  """Calls a kernel with None for absent inputs, and returns its outputs."""
  present = [(x, spec) for x, spec in inputs if x is not None]
  return pl.pallas_call(
    of_present(kernel, [x for x, _ in inputs]),
    grid=grid,
    in_specs=[spec(x.shape) for x, spec in present],
    out_specs=[spec(shape) for shape, _, spec in outputs],
    out_shape=[jax.ShapeDtypeStruct(*kind) for *kind, _ in outputs],
    scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',) * parallel
      + ('arbitrary',) * (len(grid) - parallel)
    ),
    # The plain interpreter also fills outputs with NaN, and is faster than
    # `InterpretParams`.
    interpret=dispatch.interpreting(),
  )(*(x for x, _ in present))


def _logits(q, k, query_block, key_block, causal):
  """Returns logit_KQ; in causal calls very low for keys after the query."""
  logit_KQ = product(k[...], q[...], (0, 0)) * q.shape[0] ** -0.5
  if causal:
    size = logit_KQ.shape[0]
    key = jax.lax.broadcasted_iota(jnp.int32, logit_KQ.shape, 0)
    query = jax.lax.broadcasted_iota(jnp.int32, logit_KQ.shape, 1)
    later = key - query > (query_block - key_block) * size
    logit_KQ = jnp.where(later, _LOWEST, logit_KQ)
  return logit_KQ


def _hide(logit_KQ, valid):
  """Returns the logits, very low for hidden keys."""
  if valid is None:
    return logit_KQ
  return jnp.where(as_column(valid[...]) > 0, logit_KQ, _LOWEST)


def _forward_kernel(
  q, k, v, seeing, valid, out, lse, top, total, acc, *, causal
):
  i, j = pl.program_id(2), pl.program_id(3)

  @pl.when(j == 0)
  def _():
    top[...] = jnp.full_like(top, _LOWEST)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  @pl.when(j <= i if causal else True)
  def _():
    logit_KQ = _hide(_logits(q, k, i, j, causal), valid)
    # Until a query sees a key, hidden keys have weight exp(0) = 1. The first
    # visible key then scales these by exp(-1e30) = 0.
    top_1Q = top[...]
    new_top_1Q = jnp.maximum(top_1Q, logit_KQ.max(axis=0, keepdims=True))
    weight_KQ = jnp.exp(logit_KQ - new_top_1Q)
    decay_1Q = jnp.exp(top_1Q - new_top_1Q)
    total[...] = total[...] * decay_1Q + weight_KQ.sum(axis=0, keepdims=True)
    acc[...] = acc[...] * decay_1Q + product(
      v[...], weight_KQ.astype(v.dtype), (1, 0)
    )
    top[...] = new_top_1Q

  @pl.when(j == pl.num_programs(3) - 1)
  def _():
    sees_any_1Q = top[...] > _LOWEST / 10
    if seeing is not None:
      sees_any_1Q &= seeing[...] > 0
    out_CQ = jnp.where(sees_any_1Q, acc[...] / total[...], 0)
    out[...] = out_CQ.astype(out.dtype)
    lse_1Q = top[...] + jnp.log(total[...])
    lse[...] = jnp.where(sees_any_1Q, lse_1Q, reference.BLIND)


def _score_kernel(q, k, lse, valid, column, acc, *, causal):
  i, h, j = (pl.program_id(axis) for axis in (1, 2, 3))

  @pl.when((h == 0) & (j == 0))
  def _():
    acc[...] = jnp.zeros_like(acc)

  @pl.when(j >= i if causal else True)
  def _():
    weight_KQ = jnp.exp(_logits(q, k, j, i, causal) - lse[...])
    # Reduce over lanes only once, at the end.
    for start in range(0, weight_KQ.shape[1], LANES):
      acc[...] += weight_KQ[:, start : start + LANES]

  @pl.when((h == pl.num_programs(2) - 1) & (j == pl.num_programs(3) - 1))
  def _():
    column_1K = acc[...].T.sum(axis=0, keepdims=True)
    if valid is not None:
      # Hidden keys can be masked at the end: each key has its own sum.
      column_1K = jnp.where(valid[...] > 0, column_1K, 0)
    column[...] = column_1K


def _dq_kernel(*refs, causal, blocks):
  """Writes dq, and Σ_j P_ij dP_ij of each query i: see `reference.backward`."""
  q, k, v, dout, lse, initial_mean, valid, dcolumn, dq, mean, mean_acc, acc = (
    refs
  )
  i, j = pl.program_id(2), pl.program_id(3)
  key_block = j % blocks
  inside = key_block <= i if causal else True
  last_pass = j >= pl.num_programs(3) - blocks

  @pl.when(j == 0)
  def _():
    mean_acc[...] = initial_mean[...]
    acc[...] = jnp.zeros_like(acc)

  def weights():
    logit_KQ = _logits(q, k, i, key_block, causal) - lse[...]
    return jnp.exp(_hide(logit_KQ, valid))

  if dcolumn is not None:

    @pl.when(inside & jnp.logical_not(last_pass))
    def _():
      dcolumn_K1 = as_column(dcolumn[...])
      mean_acc[...] += (weights() * dcolumn_K1).sum(axis=0, keepdims=True)

  @pl.when(inside & last_pass)
  def _():
    dweight_KQ = product(v[...], dout[...], (0, 0))
    if dcolumn is not None:
      dweight_KQ += as_column(dcolumn[...])
    dlogit_KQ = weights() * (dweight_KQ - mean_acc[...])
    acc[...] += product(k[...], dlogit_KQ.astype(k.dtype), (1, 0))

  @pl.when(j == pl.num_programs(3) - 1)
  def _():
    scale = q.shape[0] ** -0.5
    dq[...] = (acc[...] * scale).astype(dq.dtype)
    mean[...] = mean_acc[...]


def _dkv_kernel(*refs, causal):
  """Writes gradients of keys and values."""
  q, k, v, dout, lse, mean, valid, dcolumn, dk, dv, *scratch = refs
  dcolumn_KN, dk_acc, dv_acc = scratch
  i, j = pl.program_id(2), pl.program_id(3)

  @pl.when(j == 0)
  def _():
    dk_acc[...] = jnp.zeros_like(dk_acc)
    dv_acc[...] = jnp.zeros_like(dv_acc)
    if dcolumn is not None:
      column_K1 = as_column(dcolumn[...])
      dcolumn_KN[...] = jnp.broadcast_to(column_K1, dcolumn_KN.shape)

  @pl.when(j >= i if causal else True)
  def _():
    weight_KQ = jnp.exp(_logits(q, k, j, i, causal) - lse[...])
    dout_CQ = dout[...]
    dv_acc[...] += product(dout_CQ, weight_KQ.astype(dout_CQ.dtype), (1, 1))
    dweight_KQ = product(v[...], dout_CQ, (0, 0))
    if dcolumn is not None:
      dweight_KQ += dcolumn_KN[:, :1]
    dlogit_KQ = weight_KQ * (dweight_KQ - mean[...])
    dk_acc[...] += product(q[...], dlogit_KQ.astype(q.dtype), (1, 1))

  @pl.when(j == pl.num_programs(3) - 1)
  def _():
    dk_CK = dk_acc[...] * q.shape[0] ** -0.5
    dv_CK = dv_acc[...]
    if valid is not None:
      # Weights of hidden keys may be infinite, but affect only their own rows.
      dk_CK = jnp.where(valid[...] > 0, dk_CK, 0)
      dv_CK = jnp.where(valid[...] > 0, dv_CK, 0)
    dk[...] = dk_CK.astype(dk.dtype)
    dv[...] = dv_CK.astype(dv.dtype)
