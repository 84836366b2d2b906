"""Attention and its column means in Pallas, for rows that fit on the chip.

A program holds one row of the batch with all its heads, as the projections
write it: [length, heads · channels]. Nothing is transposed, padded or cut
outside the kernel, every array is read or written once, and the whole map of a
head exists on the chip, so that its columns are summed as it is made. Logits
are [queries, keys].
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.pallas_parts import VMEM_BYTES, product
from mod_jax_kernels.route_scores import reference
from mod_jax_kernels.route_scores.tiles import TILES

_LOWEST = -1e30


def fits(q_BLHC) -> bool:
  """Returns whether a program can hold a row, forward and backward."""
  _, length, heads, channels = q_BLHC.shape
  # Seven arrays, each with a second buffer, and four maps in float32.
  arrays = 14 * length * heads * channels * q_BLHC.dtype.itemsize
  longest = tiles.choose(TILES, 'pallas')['row']
  return length <= longest and arrays + 16 * length**2 < VMEM_BYTES


def forward(q_BLHC, k_BLHC, v_BLHC, mask_BL, *, causal):
  """See `reference.forward`; the mask is valid_BL."""
  batch, length, heads, channels = q_BLHC.shape
  out_BLD, column_B1L, lse_BLH = _call(
    functools.partial(_forward_kernel, heads=heads, causal=causal),
    [*map(_flat, (q_BLHC, k_BLHC, v_BLHC)), _row(mask_BL)],
    [
      ((batch, length, heads * channels), q_BLHC.dtype),
      ((batch, 1, length), jnp.float32),
      ((batch, length, heads), jnp.float32),
    ],
  )
  return (
    out_BLD.reshape(q_BLHC.shape),
    column_B1L[:, 0],
    lse_BLH.swapaxes(1, 2),
  )


def backward(dout_BLHC, dcolumn_BL, residuals, *, causal):
  """See `reference.backward`; the mask is valid_BL."""
  q_BLHC, k_BLHC, v_BLHC, mask_BL, _, lse_BHL = residuals
  gradients = _call(
    functools.partial(_backward_kernel, heads=lse_BHL.shape[1], causal=causal),
    [
      *map(_flat, (q_BLHC, k_BLHC, v_BLHC, dout_BLHC)),
      lse_BHL.swapaxes(1, 2),
      _row(mask_BL),
      _row(dcolumn_BL),
    ],
    [(_flat(x).shape, x.dtype) for x in (q_BLHC, k_BLHC, v_BLHC)],
  )
  return tuple(x.reshape(q_BLHC.shape) for x in gradients)


def _flat(x_BLHC):
  return x_BLHC.reshape(*x_BLHC.shape[:2], -1)


def _row(x_BL):
  return None if x_BL is None else x_BL[:, None].astype(jnp.float32)


def _call(kernel, inputs, outputs):
  """Calls a kernel once for each row; absent inputs are passed as None."""
  present = [x for x in inputs if x is not None]

  def kernel_of_present(*refs):
    remaining = iter(refs)
    kernel(
      *(None if x is None else next(remaining) for x in inputs), *remaining
    )

  def spec(shape):
    return pl.BlockSpec((None, *shape[1:]), lambda b: (b, 0, 0))

  return pl.pallas_call(
    kernel_of_present,
    grid=present[0].shape[:1],
    in_specs=[spec(x.shape) for x in present],
    out_specs=[spec(shape) for shape, _ in outputs],
    out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',), vmem_limit_bytes=VMEM_BYTES
    ),
    # The plain interpreter also fills outputs with NaN, and is faster than
    # `InterpretParams`.
    interpret=dispatch.interpreting(),
  )(*present)


def _seen(length, valid, causal):
  """Returns seen_QK, or None if every query sees every key."""
  # Broadcast numbers: Mosaic may not broadcast truth values.
  seen_QK = None if valid is None else _every_query(valid) > 0
  if causal:
    earlier_QK = _iota(length, 0) >= _iota(length, 1)
    seen_QK = earlier_QK if seen_QK is None else earlier_QK & seen_QK
  return seen_QK


def _every_query(row):
  """Returns the row [1, K] for each query: [K, K]."""
  return jnp.broadcast_to(row[...], (row.shape[1], row.shape[1]))


def _iota(length, axis):
  return jax.lax.broadcasted_iota(jnp.int32, (length, length), axis)


def _logits(q_QC, k_KC, seen_QK):
  logit_QK = product(q_QC, k_KC, (1, 1)) * q_QC.shape[-1] ** -0.5
  return logit_QK if seen_QK is None else jnp.where(seen_QK, logit_QK, _LOWEST)


def _forward_kernel(q, k, v, valid, out, column, lse, *, heads, causal):
  length, width = q.shape
  channels = width // heads
  seen_QK = _seen(length, valid, causal)
  if valid is not None:
    # Turn the row of tokens into a column of queries.
    same_QK = _iota(length, 0) == _iota(length, 1)
    own_QK = jnp.where(same_QK, _every_query(valid), 0)
    valid_Q1 = own_QK.max(axis=1, keepdims=True)
  map_QK = jnp.zeros((length, length), jnp.float32)
  for h in range(heads):
    of_head = slice(h * channels, (h + 1) * channels)
    logit_QK = _logits(q[:, of_head], k[:, of_head], seen_QK)
    top_Q1 = logit_QK.max(axis=1, keepdims=True)
    weight_QK = jnp.exp(logit_QK - top_Q1)
    total_Q1 = weight_QK.sum(axis=1, keepdims=True)
    lse_Q1 = top_Q1 + jnp.log(total_Q1)
    inverse_Q1 = 1 / total_Q1
    if valid is not None:
      sees_any_Q1 = (top_Q1 > _LOWEST / 10) & (valid_Q1 > 0)
      lse_Q1 = jnp.where(sees_any_Q1, lse_Q1, reference.BLIND)
      inverse_Q1 = jnp.where(sees_any_Q1, inverse_Q1, 0)
    weight_QK *= inverse_Q1
    map_QK += weight_QK
    out_QC = product(weight_QK.astype(v.dtype), v[:, of_head])
    out[:, of_head] = out_QC.astype(out.dtype)
    lse[:, h : h + 1] = lse_Q1
  column[...] = map_QK.sum(axis=0, keepdims=True)


def _backward_kernel(
  q, k, v, dout, lse, valid, dcolumn, dq, dk, dv, *, heads, causal
):
  length, width = q.shape
  channels = width // heads
  seen_QK = _seen(length, valid, causal)
  for h in range(heads):
    of_head = slice(h * channels, (h + 1) * channels)
    q_QC, k_KC, v_KC, dout_QC = (x[:, of_head] for x in (q, k, v, dout))
    weight_QK = jnp.exp(_logits(q_QC, k_KC, seen_QK) - lse[:, h : h + 1])
    dweight_QK = product(dout_QC, v_KC, (1, 1))
    if dcolumn is not None:
      dweight_QK += dcolumn[...]
    mean_Q1 = (weight_QK * dweight_QK).sum(axis=1, keepdims=True)
    dlogit_QK = weight_QK * (dweight_QK - mean_Q1) * channels**-0.5
    dlogit_QK = dlogit_QK.astype(q.dtype)
    dq_QC = product(dlogit_QK, k_KC)
    dk_KC = product(dlogit_QK, q_QC, (0, 0))
    dv_KC = product(weight_QK.astype(dout.dtype), dout_QC, (0, 0))
    dq[:, of_head] = dq_QC.astype(dq.dtype)
    dk[:, of_head] = dk_KC.astype(dk.dtype)
    dv[:, of_head] = dv_KC.astype(dv.dtype)
