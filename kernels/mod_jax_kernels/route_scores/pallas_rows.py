"""Attention and its map's column sums, for rows that fit on the chip of a TPU.

A row is a sequence of the batch, if not said otherwise.

The kernels take arrays [batch, length, heads · channels], as projections write
them: nothing is transposed, padded or cut outside, and every array is read or
written once. The whole attention map of a head is on the chip, where its
columns are summed. A program processes some rows of the batch, and lanes that
hold whole heads. If the length does not fill whole tiles of memory but the
batch does, XLA stores arrays as [length, batch, ..]; then the kernels read and
write rows that are interleaved in this way.

Logits are [keys, queries], so that a softmax reduces over sublanes. To select a
head, the other lanes of one factor are set to zero: matrix units contract all
lanes in any case, and no lanes need to be moved.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.pallas_parts import (
  LANES,
  VMEM_BYTES,
  as_column,
  of_present,
  product,
)
from mod_jax_kernels.route_scores import reference
from mod_jax_kernels.route_scores.tiles import TILES

_LOWEST = -1e30


def fits(q_BLHC) -> bool:
  """Returns whether rows are short enough for both kernels of this module."""
  blocks = _Blocks(q_BLHC)
  length = q_BLHC.shape[1]
  # Count seven arrays with two buffers and a copy each, and eight float32 maps.
  block = blocks.rows * length * blocks.lanes * q_BLHC.dtype.itemsize
  longest = tiles.choose(TILES, 'pallas')['row']
  return length <= longest and 21 * block + 32 * length**2 < VMEM_BYTES


def forward(q_BLHC, k_BLHC, v_BLHC, mask_BL, *, causal):
  """See `reference.forward`; the mask is None or valid_BL, never mask_BQS."""
  batch, length, heads, _ = q_BLHC.shape
  blocks = _Blocks(q_BLHC)
  q, k, v = map(blocks.tokens, (q_BLHC, k_BLHC, v_BLHC))
  lse_shape = batch, blocks.groups, heads // blocks.groups, length
  out, column_B1L, lse_BGHL = blocks.call(
    functools.partial(_forward_kernel, causal=causal),
    [q, k, v],
    [(_row(mask_BL), blocks.of_row)],
    [q],
    [
      ((batch, 1, length), blocks.of_row),
      (lse_shape, blocks.of_heads),
    ],
  )
  return (
    blocks.back(out),
    column_B1L[:, 0],
    lse_BGHL.reshape(batch, heads, length),
  )


def backward(dout_BLHC, dcolumn_BL, residuals, *, causal):
  """See `reference.backward`; the mask is None or valid_BL, never mask_BQS."""
  q_BLHC, k_BLHC, v_BLHC, mask_BL, _, lse_BHL = residuals
  batch, length, _, _ = q_BLHC.shape
  blocks = _Blocks(q_BLHC)
  q, k, v, dout = map(blocks.tokens, (q_BLHC, k_BLHC, v_BLHC, dout_BLHC))
  gradients = blocks.call(
    functools.partial(_backward_kernel, causal=causal),
    [q, k, v, dout],
    [
      (lse_BHL.reshape(batch, blocks.groups, -1, length), blocks.of_heads),
      (_row(mask_BL), blocks.of_row),
      (_row(dcolumn_BL), blocks.of_row),
    ],
    [q, k, v],
    [],
  )
  return tuple(map(blocks.back, gradients))


def _row(x_BL):
  return None if x_BL is None else x_BL[:, None].astype(jnp.float32)


class _Blocks:
  """Blocks of rows of the batch and of heads.

  Attributes:
    rows: number of rows of a block; they are interleaved if it is not 1.
    lanes: number of lanes of a block.
    groups: number of groups of heads; a block holds the heads of one group.
    of_heads: `BlockSpec` of an array [batch, groups, heads per group, length].
    of_row: `BlockSpec` of an array [batch, 1, length].
  """

  def __init__(self, q_BLHC):
    batch, length, heads, channels = self._shape = q_BLHC.shape
    sublanes = 32 // q_BLHC.dtype.itemsize
    interleaved = length % sublanes and not batch % sublanes
    self.rows = sublanes if interleaved else 1
    width, lanes = heads * channels, math.lcm(channels, LANES)
    self.lanes = width if width % lanes else lanes
    self.groups = width // self.lanes
    self.of_heads = pl.BlockSpec(
      (self.rows, None, heads // self.groups, length),
      lambda b, g: (b, g, 0, 0),
    )
    self.of_row = pl.BlockSpec((self.rows, 1, length), lambda b, g: (b, 0, 0))
    self._of_tokens = pl.BlockSpec(
      (1, length, self.lanes), lambda b, g: (b, 0, g)
    )
    if interleaved:
      self._of_tokens = pl.BlockSpec(
        (length, self.rows, self.lanes), lambda b, g: (0, b, g)
      )

  def tokens(self, x_BLHC):
    """Returns an array in the layout that kernels take."""
    x_BLD = x_BLHC.reshape(*self._shape[:2], -1)
    return x_BLD if self.rows == 1 else x_BLD.swapaxes(0, 1)

  def back(self, x):
    """Inverts `tokens`."""
    return (x if self.rows == 1 else x.swapaxes(0, 1)).reshape(self._shape)

  def call(self, kernel, tokens, others, out_tokens, out_others):
    """Calls a kernel, and returns its outputs.

    Args:
      kernel: takes blocks of all inputs (None for absent inputs) and outputs.
        If rows are interleaved, it also takes scratch memory [rows, length,
        lanes] for each block of tokens.
      tokens: inputs in the layout of the method `tokens`.
      others: (array or None, `BlockSpec`) of further inputs.
      out_tokens: arrays with the shapes and dtypes of outputs in that layout.
      out_others: (shape, `BlockSpec`) of further outputs, which are float32.
    """
    of_tokens = [(x, self._of_tokens) for x in tokens]
    inputs = [*of_tokens, *others]
    outputs = [(x.shape, x.dtype) for x in out_tokens]
    outputs += [(shape, jnp.float32) for shape, _ in out_others]
    rows = pltpu.VMEM((self.rows, self._shape[1], self.lanes), tokens[0].dtype)
    copies = len(tokens + out_tokens) if self.rows > 1 else 0
    return pl.pallas_call(
      of_present(kernel, [x for x, _ in inputs]),
      grid=(self._shape[0] // self.rows, self.groups),
      in_specs=[spec for x, spec in inputs if x is not None],
      out_specs=[self._of_tokens] * len(out_tokens)
      + [spec for _, spec in out_others],
      out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
      scratch_shapes=[rows] * copies,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'arbitrary'),
        vmem_limit_bytes=VMEM_BYTES,
      ),
      # The plain interpreter also fills outputs with NaN, and is faster than
      # `InterpretParams`.
      interpret=dispatch.interpreting(),
    )(*(x for x, _ in inputs if x is not None))


def _for_rows(inputs, outputs, scratch, one):
  """Calls `one` for each row of a block.

  Args:
    inputs: blocks to read from.
    outputs: blocks to write to.
    scratch: memory [rows, length, lanes] for each input and output; empty if
      the blocks have that layout themselves.
    one: takes the index of a row and that row of each input; returns the row of
      each output, in float32.
  """
  apart = scratch or [*inputs, *outputs]
  if scratch:
    for ref, rows in zip(inputs, scratch, strict=False):
      _separate(ref, rows)

  def row(b, carry):
    results = one(b, *(rows[b] for rows in apart[: len(inputs)]))
    for rows, result in zip(apart[len(inputs) :], results, strict=True):
      rows[b] = result.astype(rows.dtype)
    return carry

  jax.lax.fori_loop(0, apart[0].shape[0], row, None)
  if scratch:
    for ref, rows in zip(outputs, scratch[len(inputs) :], strict=True):
      _interleave(rows, ref)


def _words(ref):
  """Returns interleaved rows as 32-bit words, and indices of each row's words.

  In bfloat16, a word holds numbers of two neighbouring rows, which then share
  their indices.
  """
  if ref.dtype.itemsize == 2:
    ref = ref.bitcast(jnp.uint32)
  length, rows, lanes = ref.shape
  places = [(pl.ds(i, length, rows), slice(None)) for i in range(rows)]
  return ref.reshape(length * rows, lanes), places


def _separate(ref, rows):
  """Copies interleaved rows to [rows, length, lanes]."""
  words, places = _words(ref)
  for i, place in enumerate(places):
    word_LW = words[place]
    if ref.dtype.itemsize == 4:
      rows[i] = word_LW
      continue
    # The bits of a bfloat16 are the upper half of a float32's.
    for r, bits in enumerate((word_LW << 16, word_LW & jnp.uint32(0xFFFF0000))):
      value = jax.lax.bitcast_convert_type(bits, jnp.float32)
      rows[2 * i + r] = value.astype(rows.dtype)


def _interleave(rows, ref):
  """Inverts `_separate`."""
  words, places = _words(ref)
  for i, place in enumerate(places):
    if ref.dtype.itemsize == 4:
      words[place] = rows[i]
      continue
    low, high = (
      jax.lax.bitcast_convert_type(
        rows[2 * i + r].astype(jnp.float32), jnp.uint32
      )
      for r in range(2)
    )
    words[place] = (low >> 16) | high


def _of_head(h, heads, x_LW):
  """Returns x in the lanes of head h, and 0 in the other lanes."""
  channels = x_LW.shape[1] // heads
  lane_LW = jax.lax.broadcasted_iota(jnp.int32, x_LW.shape, 1)
  inside = (lane_LW >= h * channels) & (lane_LW < (h + 1) * channels)
  # Select in float32, because not all TPUs support selects of bfloat16.
  return jnp.where(inside, x_LW.astype(jnp.float32), 0).astype(x_LW.dtype)


def _seen(valid_1L, length, causal):
  """Returns seen_KQ, which hides keys; None if every query sees every key."""
  seen_KQ = None
  if causal:
    seen_KQ = _iota(length, 0) <= _iota(length, 1)
  if valid_1L is not None:
    # Broadcast numbers, because Mosaic may not support it for booleans.
    valid_KQ = jnp.broadcast_to(as_column(valid_1L), (length, length)) > 0
    seen_KQ = valid_KQ if seen_KQ is None else seen_KQ & valid_KQ
  return seen_KQ


def _iota(length, axis):
  return jax.lax.broadcasted_iota(jnp.int32, (length, length), axis)


def _logits(q_QW, k_KW, h, heads, seen_KQ):
  """Returns logits of head `h`, not scaled; hidden pairs have `_LOWEST`."""
  logit_KQ = product(_of_head(h, heads, k_KW), q_QW, (1, 1))
  return logit_KQ if seen_KQ is None else jnp.where(seen_KQ, logit_KQ, _LOWEST)


def _forward_kernel(q, k, v, valid, out, column, lse, *scratch, causal):
  _, heads, length = lse.shape
  scale = (q.shape[-1] // heads) ** -0.5

  @pl.when(pl.program_id(1) == 0)
  def _():
    column[...] = jnp.zeros_like(column)

  def one(b, q_QW, k_KW, v_KW):
    valid_1L = None if valid is None else valid[b]
    seen_KQ = _seen(valid_1L, length, causal)
    map_KQ = jnp.zeros((length, length), jnp.float32)
    out_QW = jnp.zeros(q_QW.shape, jnp.float32)
    for h in range(heads):
      logit_KQ = _logits(q_QW, k_KW, h, heads, seen_KQ)
      top_1Q = logit_KQ.max(axis=0, keepdims=True)
      weight_KQ = jnp.exp((logit_KQ - top_1Q) * scale)
      total_1Q = weight_KQ.sum(axis=0, keepdims=True)
      lse_1Q = top_1Q * scale + jnp.log(total_1Q)
      inverse_1Q = 1 / total_1Q
      if valid is not None:
        sees_any_1Q = (top_1Q > _LOWEST / 10) & (valid_1L > 0)
        lse_1Q = jnp.where(sees_any_1Q, lse_1Q, reference.BLIND)
        inverse_1Q = jnp.where(sees_any_1Q, inverse_1Q, 0)
      weight_KQ *= inverse_1Q
      map_KQ += weight_KQ
      out_QW += product(
        weight_KQ.astype(v_KW.dtype), _of_head(h, heads, v_KW), (0, 0)
      )
      lse[b, h : h + 1] = lse_1Q
    column[b] += map_KQ.T.sum(axis=0, keepdims=True)
    return [out_QW]

  _for_rows([q, k, v], [out], scratch, one)


def _backward_kernel(
  q, k, v, dout, lse, valid, dcolumn, dq, dk, dv, *scratch, causal
):
  _, heads, length = lse.shape
  scale = (q.shape[-1] // heads) ** -0.5

  def one(b, q_QW, k_KW, v_KW, dout_QW):
    seen_KQ = _seen(None if valid is None else valid[b], length, causal)
    dq_QW, dk_KW, dv_KW = (jnp.zeros(q_QW.shape, jnp.float32) for _ in range(3))
    for h in range(heads):
      of_head = functools.partial(_of_head, h, heads)
      logit_KQ = _logits(q_QW, k_KW, h, heads, seen_KQ)
      weight_KQ = jnp.exp(logit_KQ * scale - lse[b, h : h + 1])
      dweight_KQ = product(of_head(v_KW), dout_QW, (1, 1))
      if dcolumn is not None:
        dweight_KQ += as_column(dcolumn[b])
      mean_1Q = (weight_KQ * dweight_KQ).sum(axis=0, keepdims=True)
      dlogit_KQ = weight_KQ * (dweight_KQ - mean_1Q) * scale
      dlogit_KQ = dlogit_KQ.astype(q_QW.dtype)
      dq_QW += product(dlogit_KQ, of_head(k_KW), (0, 0))
      dk_KW += product(dlogit_KQ, of_head(q_QW))
      dv_KW += product(weight_KQ.astype(q_QW.dtype), of_head(dout_QW))
    return dq_QW, dk_KW, dv_KW

  _for_rows([q, k, v, dout], [dq, dk, dv], scratch, one)
