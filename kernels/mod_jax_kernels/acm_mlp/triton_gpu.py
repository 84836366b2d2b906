"""Learners on NVIDIA GPUs.

There is a kernel for each matrix product. The first multiplies by W1, adds the
bias, applies the activation and writes the hidden units of the chosen (token,
learner) pairs, one row per token in order. The second multiplies by W2; a tile
of tokens reads only n · F columns for its n learners. Nothing is computed,
written or read for learners above a tile's largest k. Tokens are not moved:
both kernels address them through the order.

A single kernel would keep the hidden units on the chip, but a program could not
hold its accumulators: 128 tokens by 768 outputs in float32 take 384 KB, more
than a multiprocessor's registers. Fewer tokens would starve the matrix units,
and splitting the outputs would recompute the hidden units for each part. A
static MLP writes its hidden units too, so the cost is the same if all learners
run.

The gradient works alike. For the gradient, the first kernel also writes the
hidden units before the activation. `_slopes` computes from them the units after
the activation, and the gradients before the activation. `_down` turns these
gradients into the gradient of x. `_weights` computes gradients of weights: sums
over the tokens of each learner, which are the first in the order.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles as tiles_lib
from mod_jax_kernels.acm_mlp.tiles import TILES
from mod_jax_kernels.triton_call import block_of, triton_call


@dispatch.jit(static_argnames=('activation', 'keep'))
def forward(x_TD, w1_NDF, b1_NF, w2_NFD, order, *, activation, keep):
  """See `reference.forward`."""
  blocks = _Blocks(x_TD)
  tokens, width = x_TD.shape
  learners, hidden, _ = w2_NFD.shape
  rows, columns = blocks.rows, blocks('up_columns', hidden)
  gelu = activation == 'gelu'
  units = jax.ShapeDtypeStruct((tokens, learners * hidden), x_TD.dtype)
  # If the kernel writes no second array, that output has a single number.
  before = units if gelu and keep else jax.ShapeDtypeStruct((1,), x_TD.dtype)
  hidden_SH, before_SH = triton_call(
    *(_up, x_TD, w1_NDF, b1_NF, order.token_T, order.count_N),
    out_type=(units, before),
    grid=(triton.cdiv(tokens, rows) * learners * triton.cdiv(hidden, columns),),
    **blocks.launch('up'),
    **dict(T=tokens, N=learners, D=width, F=hidden),
    **dict(P=rows, BF=columns, BK=blocks('inner', width)),
    **dict(GELU=gelu, KEEP=gelu and keep),
  )
  y_TD = _second_product(hidden_SH, w2_NFD, order, blocks)
  return y_TD, (before_SH if gelu else hidden_SH) if keep else None


@dispatch.jit(static_argnames='activation')
def backward(
  x_TD, w1_NDF, b1_NF, w2_NFD, order, before_SH, g_TD, *, activation
):
  """See `reference.backward`."""
  blocks = _Blocks(x_TD)
  tokens = x_TD.shape[0]
  learners, hidden, outputs = w2_NFD.shape
  rows, columns = blocks.rows, blocks('slope_columns', hidden)
  row_tiles = triton.cdiv(tokens, rows)
  units = jax.ShapeDtypeStruct((tokens, learners * hidden), x_TD.dtype)
  hidden_SH, delta_SH, db1_IH = triton_call(
    *(_slopes, before_SH, w2_NFD, g_TD, order.token_T, order.count_N),
    out_type=(
      *(units, units),
      jax.ShapeDtypeStruct((row_tiles, learners * hidden), jnp.float32),
    ),
    grid=(row_tiles * learners * triton.cdiv(hidden, columns),),
    **blocks.launch('slope'),
    **dict(T=tokens, N=learners, F=hidden, OUT=outputs),
    **dict(P=rows, BF=columns, BO=blocks('inner', outputs)),
    GELU=activation == 'gelu',
  )
  # Transpose, so that all learners' units are rows of one matrix, as in W2.
  w1_NFD = jnp.swapaxes(w1_NDF, 1, 2)
  dx_TD = _second_product(delta_SH, w1_NFD, order, blocks)
  in_order = functools.partial(_sum_over_tokens, order=order, blocks=blocks)
  return (
    dx_TD,
    in_order(x_TD, delta_SH, w1_NDF, ordered='right'),
    db1_IH.sum(axis=0).reshape(b1_NF.shape).astype(b1_NF.dtype),
    in_order(hidden_SH, g_TD, w2_NFD, ordered='left'),
  )


class _Blocks:
  """Block sizes, limited to the arrays' dimensions."""

  def __init__(self, x_TD):
    self._sizes = tiles_lib.choose(TILES, 'triton')
    # Float32 products do not use the matrix units, and large blocks would spill
    # registers.
    self._most = 64 if x_TD.dtype.itemsize > 2 else 256
    self.rows = self('rows', x_TD.shape[0])
    self.weight_parts = self._sizes['weight_parts']

  def __call__(self, name, dimension):
    return block_of(dimension, min(self._sizes[name], self._most))

  def launch(self, name):
    return {
      'num_warps': self._sizes[f'{name}_warps'],
      'num_stages': self._sizes[f'{name}_stages'],
    }


def _second_product(hidden_SH, w_NFO, order, blocks):
  tokens = order.token_T.size
  learners, hidden, width = w_NFO.shape
  rows, columns = blocks.rows, blocks('down_columns', width)
  return triton_call(
    *(_down, hidden_SH, w_NFO, order.token_T, order.count_N),
    out_type=jax.ShapeDtypeStruct((tokens, width), hidden_SH.dtype),
    grid=(triton.cdiv(tokens, rows) * triton.cdiv(width, columns),),
    **blocks.launch('down'),
    **dict(T=tokens, N=learners, F=hidden, OUT=width),
    **dict(P=rows, BO=columns, BK=blocks('inner', learners * hidden)),
    LEARNERS=triton.next_power_of_2(learners),
  )


def _sum_over_tokens(left, right, w_NIJ, *, ordered, order, blocks):
  """Returns leftᵀ · right for each learner, in the layout of `w_NIJ`.

  The factor that `ordered` names has a row per slot, with the learners' columns
  side by side; the other factor has a row per token, for all learners.
  """
  learners, i, j = w_NIJ.shape
  rows, columns = blocks('weight_rows', i), blocks('weight_columns', j)
  parts = blocks.weight_parts
  parts_SNIJ = triton_call(
    *(_weights, left, right, order.token_T, order.count_N),
    out_type=jax.ShapeDtypeStruct((parts, *w_NIJ.shape), jnp.float32),
    grid=(parts * learners * triton.cdiv(i, rows) * triton.cdiv(j, columns),),
    **blocks.launch('weight'),
    **dict(N=learners, LEFT=i, RIGHT=j, LEFT_ORDERED=ordered == 'left'),
    **dict(BI=rows, BJ=columns, BT=blocks('inner', order.token_T.size)),
    PARTS=parts,
  )
  return parts_SNIJ.sum(axis=0).astype(w_NIJ.dtype)


# Kernels. Sizes are constants: N learners, D inputs, F hidden units of a
# learner, OUT outputs, P tokens of a tile. BF is the block size of F, and so
# on; BK is the block size of a summed dimension. H is N · F. Row indices are
# 64-bit, because T · N · F may exceed 2³¹.


# Not `tl.sum`, which Triton can interpret only if TRITON_INTERPRET is set for
# the whole process. Tests interpret single kernels (`triton_call.interpreted`).
@triton.jit
def _sum(x):
  """Returns the sum over the first axis."""
  return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def _gaussian(before):
  """Returns Φ, the standard normal distribution function."""
  return 0.5 + 0.5 * tl.math.erf(before * 0.7071067811865476)


@triton.jit
def _up(
  x,
  w1,
  b1,
  token,
  count,
  hidden,
  before,
  T: tl.constexpr,
  N: tl.constexpr,
  D: tl.constexpr,
  F: tl.constexpr,
  P: tl.constexpr,
  BF: tl.constexpr,
  BK: tl.constexpr,
  GELU: tl.constexpr,
  KEEP: tl.constexpr,
):
  """Writes hidden units; one program per tile, learner and block of units.

  With KEEP it also writes the hidden units before the activation.
  """
  # Programs of a tile have neighbouring indices, to find its tokens in cache.
  blocks: tl.constexpr = (F + BF - 1) // BF
  pid = tl.program_id(0)
  n = pid // blocks % N
  start = pid // (blocks * N) * P
  last = tl.load(count + n)
  if start < last:
    slot_P = start + tl.arange(0, P)
    f_B = pid % blocks * BF + tl.arange(0, BF)
    runs_P1 = (slot_P < last)[:, None]
    inside_1B = (f_B < F)[None, :]
    row_P = tl.load(token + slot_P, slot_P < last, 0).to(tl.int64)
    k_B = tl.arange(0, BK)
    sum_PB = tl.full((P, BF), 0.0, tl.float32)
    for k in range(0, D, BK):
      d_B = k + k_B
      x_PK = tl.load(
        x + row_P[:, None] * D + d_B[None, :],
        runs_P1 & (d_B < D)[None, :],
        0.0,
      )
      w_KB = tl.load(
        w1 + n * D * F + d_B[:, None] * F + f_B[None, :],
        (d_B < D)[:, None] & inside_1B,
        0.0,
      )
      sum_PB = tl.dot(x_PK, w_KB, sum_PB, input_precision='ieee')
    bias_B = tl.load(b1 + n * F + f_B, f_B < F, 0.0)
    # Write zeros for tokens that do not run the learner, because the second
    # product reads the whole tile.
    value_PB = tl.where(runs_P1, sum_PB + bias_B.to(tl.float32)[None, :], 0.0)
    first = start.to(tl.int64) * (N * F) + n * F
    at_PB = tl.arange(0, P)[:, None] * (N * F) + f_B[None, :]
    inside_PB = (slot_P < T)[:, None] & inside_1B
    if KEEP:
      tl.store(
        before + first + at_PB, value_PB.to(before.dtype.element_ty), inside_PB
      )
    if GELU:
      value_PB = value_PB * _gaussian(value_PB)
    tl.store(
      hidden + first + at_PB, value_PB.to(hidden.dtype.element_ty), inside_PB
    )


@triton.jit
def _down(
  hidden,
  w,
  token,
  count,
  y,
  T: tl.constexpr,
  N: tl.constexpr,
  F: tl.constexpr,
  OUT: tl.constexpr,
  P: tl.constexpr,
  BO: tl.constexpr,
  BK: tl.constexpr,
  LEARNERS: tl.constexpr,
):
  """Writes each token's sum of hidden · w over the token's chosen learners."""
  blocks: tl.constexpr = (OUT + BO - 1) // BO
  pid = tl.program_id(0)
  start = pid // blocks * P
  n_N = tl.arange(0, LEARNERS)
  count_N = tl.load(count + n_N, n_N < N, 0)
  columns = _sum((count_N > start).to(tl.int32)) * F
  slot_P = start + tl.arange(0, P)
  o_B = pid % blocks * BO + tl.arange(0, BO)
  exists_P1 = (slot_P < T)[:, None]
  inside_1B = (o_B < OUT)[None, :]
  slot_P1 = slot_P.to(tl.int64)[:, None]
  k_B = tl.arange(0, BK)
  sum_PB = tl.full((P, BO), 0.0, tl.float32)
  # All learners' units are rows of one matrix: only the last step is partial.
  for k in range(0, columns, BK):
    f_B = k + k_B
    hidden_PK = tl.load(
      hidden + slot_P1 * (N * F) + f_B[None, :],
      exists_P1 & (f_B < columns)[None, :],
      0.0,
    )
    w_KB = tl.load(
      w + f_B[:, None] * OUT + o_B[None, :],
      (f_B < columns)[:, None] & inside_1B,
      0.0,
    )
    sum_PB = tl.dot(hidden_PK, w_KB, sum_PB, input_precision='ieee')
  row_P = tl.load(token + slot_P, slot_P < T, 0).to(tl.int64)
  tl.store(
    y + row_P[:, None] * OUT + o_B[None, :],
    sum_PB.to(y.dtype.element_ty),
    exists_P1 & inside_1B,
  )


@triton.jit
def _slopes(
  before,
  w2,
  g,
  token,
  count,
  hidden,
  delta,
  db1,
  T: tl.constexpr,
  N: tl.constexpr,
  F: tl.constexpr,
  OUT: tl.constexpr,
  P: tl.constexpr,
  BF: tl.constexpr,
  BO: tl.constexpr,
  GELU: tl.constexpr,
):
  """Writes hidden units, and the gradients before the activation.

  Also writes the sum of these gradients over each tile, for the bias.
  """
  blocks: tl.constexpr = (F + BF - 1) // BF
  pid = tl.program_id(0)
  n = pid // blocks % N
  tile = pid // (blocks * N)
  start = tile * P
  f_B = pid % blocks * BF + tl.arange(0, BF)
  bias_B = tile * (N * F) + n * F + f_B
  last = tl.load(count + n)
  if start < last:
    slot_P = start + tl.arange(0, P)
    runs_P1 = (slot_P < last)[:, None]
    row_P = tl.load(token + slot_P, slot_P < last, 0).to(tl.int64)
    row_P1 = row_P[:, None]
    k_B = tl.arange(0, BO)
    delta_PB = tl.full((P, BF), 0.0, tl.float32)
    for k in range(0, OUT, BO):
      o_B = k + k_B
      g_PK = tl.load(
        g + row_P1 * OUT + o_B[None, :], runs_P1 & (o_B < OUT)[None, :], 0.0
      )
      w_KB = tl.load(
        w2 + n * F * OUT + f_B[None, :] * OUT + o_B[:, None],
        (o_B < OUT)[:, None] & (f_B < F)[None, :],
        0.0,
      )
      delta_PB = tl.dot(g_PK, w_KB, delta_PB, input_precision='ieee')
    first = start.to(tl.int64) * (N * F) + n * F
    at_PB = tl.arange(0, P)[:, None] * (N * F) + f_B[None, :]
    inside_PB = (slot_P < T)[:, None] & (f_B < F)[None, :]
    before_PB = tl.load(before + first + at_PB, inside_PB, 0.0).to(tl.float32)
    value_PB = before_PB
    if GELU:
      phi_PB = _gaussian(before_PB)
      density_PB = tl.exp(-0.5 * before_PB * before_PB) * 0.3989422804014327
      value_PB = before_PB * phi_PB
      delta_PB *= phi_PB + before_PB * density_PB
    delta_PB = tl.where(runs_P1, delta_PB, 0.0)
    tl.store(
      hidden + first + at_PB, value_PB.to(hidden.dtype.element_ty), inside_PB
    )
    tl.store(
      delta + first + at_PB, delta_PB.to(delta.dtype.element_ty), inside_PB
    )
    tl.store(db1 + bias_B, _sum(delta_PB), f_B < F)
  else:
    tl.store(db1 + bias_B, tl.full((BF,), 0.0, tl.float32), f_B < F)


@triton.jit
def _weights(
  left,
  right,
  token,
  count,
  dw,
  N: tl.constexpr,
  LEFT: tl.constexpr,
  RIGHT: tl.constexpr,
  LEFT_ORDERED: tl.constexpr,
  BI: tl.constexpr,
  BJ: tl.constexpr,
  BT: tl.constexpr,
  PARTS: tl.constexpr,
):
  """Writes leftᵀ · right, summed over each part of a learner's tokens.

  The tokens are the learner's first `count` in order. Without parts there would
  be too few programs to keep all processors busy until the end.
  """
  across: tl.constexpr = (RIGHT + BJ - 1) // BJ
  blocks: tl.constexpr = (LEFT + BI - 1) // BI * across
  pid = tl.program_id(0)
  # The first learner has the most tokens, so its programs start first.
  n = pid // (blocks * PARTS)
  part = pid // blocks % PARTS
  i_B = pid % blocks // across * BI + tl.arange(0, BI)
  j_B = pid % across * BJ + tl.arange(0, BJ)
  count = tl.load(count + n)
  of_part = (count + BT * PARTS - 1) // (BT * PARTS) * BT
  last = tl.minimum(part * of_part + of_part, count)
  t_B = tl.arange(0, BT)
  sum_IJ = tl.full((BI, BJ), 0.0, tl.float32)
  for start in range(part * of_part, last, BT):
    slot_T = start + t_B
    runs_T1 = (slot_T < last)[:, None]
    row_T1 = tl.load(token + slot_T, slot_T < last, 0).to(tl.int64)[:, None]
    slot_T1 = slot_T.to(tl.int64)[:, None]
    if LEFT_ORDERED:
      at_TI = slot_T1 * (N * LEFT) + n * LEFT + i_B[None, :]
      at_TJ = row_T1 * RIGHT + j_B[None, :]
    else:
      at_TI = row_T1 * LEFT + i_B[None, :]
      at_TJ = slot_T1 * (N * RIGHT) + n * RIGHT + j_B[None, :]
    left_TI = tl.load(left + at_TI, runs_T1 & (i_B < LEFT)[None, :], 0.0)
    right_TJ = tl.load(right + at_TJ, runs_T1 & (j_B < RIGHT)[None, :], 0.0)
    sum_IJ = tl.dot(tl.trans(left_TI), right_TJ, sum_IJ, input_precision='ieee')
  of_program = (part * N + n).to(tl.int64) * (LEFT * RIGHT)
  tl.store(
    dw + of_program + i_B[:, None] * RIGHT + j_B[None, :],
    sum_IJ,
    (i_B < LEFT)[:, None] & (j_B < RIGHT)[None, :],
  )
