"""Grouped products on NVIDIA GPUs, where XLA multiplies rows with all groups.

A program computes a block of the result, whose rows are all of one group. The
rows after the last group count as another group, whose results are zeros.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mod_jax_kernels import dispatch
from mod_jax_kernels.triton_call import block_of, triton_call


@dispatch.jit()
def product(x_TD, w_EDF, size_E):
  """See `mod_jax_kernels.grouped_dot`."""
  (tokens, inputs), (groups, _, outputs) = x_TD.shape, w_EDF.shape
  rows, columns, inner = _sizes(x_TD.dtype, tokens, outputs, inputs)
  # Upper bound of the number of blocks: a group's last one need not be full.
  most = triton.cdiv(tokens, rows) + groups
  ends_G = jnp.append(jnp.cumsum(size_E), tokens)
  starts_G = jnp.append(0, ends_G[:-1])
  block_ends_G = jnp.cumsum(-(-(ends_G - starts_G) // rows))
  block_I = jnp.arange(most)
  group_I = (block_ends_G <= block_I[:, None]).sum(axis=1, dtype=jnp.int32)
  # Programs after the last block get the group of zeros, and no rows of it.
  group_I = jnp.minimum(group_I, groups)
  end_I = ends_G[group_I]
  blocks_I = -(-(end_I - starts_G[group_I]) // rows)
  before_I = block_ends_G[group_I] - blocks_I
  start_I = starts_G[group_I] + (block_I - before_I) * rows
  return triton_call(
    *(_product, x_TD, w_EDF),
    *(x.astype(jnp.int32) for x in (group_I, start_I, end_I)),
    out_type=jax.ShapeDtypeStruct((tokens, outputs), x_TD.dtype),
    grid=(most * triton.cdiv(outputs, columns),),
    **_LAUNCH,
    **dict(E=groups, D=inputs, F=outputs, R=rows, BF=columns, BK=inner),
  )


@dispatch.jit()
def weight_gradient(x_TD, dy_TF, size_E):
  """See `reference.weight_gradient`."""
  (tokens, inputs), outputs = x_TD.shape, dy_TF.shape[1]
  inner, columns, rows = _sizes(x_TD.dtype, inputs, outputs, tokens)
  end_E = jnp.cumsum(size_E).astype(jnp.int32)
  return triton_call(
    *(_weight_gradient, x_TD, dy_TF, end_E - size_E.astype(jnp.int32), end_E),
    out_type=jax.ShapeDtypeStruct((len(size_E), inputs, outputs), jnp.float32),
    grid=(
      len(size_E) * triton.cdiv(inputs, inner) * triton.cdiv(outputs, columns),
    ),
    **_LAUNCH,
    **dict(D=inputs, F=outputs, BD=inner, BF=columns, BT=rows),
  )


_LAUNCH = {'num_warps': 8, 'num_stages': 3}


def _sizes(dtype, *dimensions: int) -> list[int]:
  """Returns block sizes of a result's two dimensions and of the summed one."""
  # Float32 products do not use the matrix units, and large blocks would spill
  # registers.
  most = (128, 128, 64) if dtype.itemsize <= 2 else (64, 64, 32)
  return [block_of(*sizes) for sizes in zip(dimensions, most, strict=True)]


# Kernels. Sizes are constants: D inputs, F outputs, R rows of a block. BD, BF
# and BT are block sizes of D, F and tokens; BK is the block size of D where D
# is summed over. Row indices are 64-bit, because T · F may exceed 2³¹.


@triton.jit
def _product(
  x,
  w,
  group,
  start,
  end,
  y,
  E: tl.constexpr,
  D: tl.constexpr,
  F: tl.constexpr,
  R: tl.constexpr,
  BF: tl.constexpr,
  BK: tl.constexpr,
):
  """Writes rows of a group; one program per block of rows and of outputs."""
  # Programs of a block of rows have neighbouring indices, so that they find the
  # rows in the cache.
  across: tl.constexpr = (F + BF - 1) // BF
  block = tl.program_id(0) // across
  e = tl.load(group + block).to(tl.int64)
  row_R = tl.load(start + block) + tl.arange(0, R)
  exists_R1 = (row_R < tl.load(end + block))[:, None]
  row_R1 = row_R.to(tl.int64)[:, None]
  f_B = tl.program_id(0) % across * BF + tl.arange(0, BF)
  inside_1B = (f_B < F)[None, :]
  k_B = tl.arange(0, BK)
  sum_RB = tl.full((R, BF), 0.0, tl.float32)
  if e < E:
    for k in range(0, D, BK):
      d_B = k + k_B
      x_RK = tl.load(
        x + row_R1 * D + d_B[None, :], exists_R1 & (d_B < D)[None, :], 0.0
      )
      w_KB = tl.load(
        w + e * D * F + d_B[:, None] * F + f_B[None, :],
        (d_B < D)[:, None] & inside_1B,
        0.0,
      )
      sum_RB = tl.dot(x_RK, w_KB, sum_RB, input_precision='ieee')
  tl.store(
    y + row_R1 * F + f_B[None, :],
    sum_RB.to(y.dtype.element_ty),
    exists_R1 & inside_1B,
  )


@triton.jit
def _weight_gradient(
  x,
  dy,
  start,
  end,
  dw,
  D: tl.constexpr,
  F: tl.constexpr,
  BD: tl.constexpr,
  BF: tl.constexpr,
  BT: tl.constexpr,
):
  """Writes xᵀ · dy over a group's rows; one program per block of the result."""
  across: tl.constexpr = (F + BF - 1) // BF
  blocks: tl.constexpr = (D + BD - 1) // BD * across
  pid = tl.program_id(0)
  e = pid // blocks
  d_B = pid % blocks // across * BD + tl.arange(0, BD)
  f_B = pid % across * BF + tl.arange(0, BF)
  last = tl.load(end + e)
  t_B = tl.arange(0, BT)
  sum_DF = tl.full((BD, BF), 0.0, tl.float32)
  for first in range(tl.load(start + e), last, BT):
    row_T = first + t_B
    exists_T1 = (row_T < last)[:, None]
    row_T1 = row_T.to(tl.int64)[:, None]
    x_TD = tl.load(
      x + row_T1 * D + d_B[None, :], exists_T1 & (d_B < D)[None, :], 0.0
    )
    dy_TF = tl.load(
      dy + row_T1 * F + f_B[None, :], exists_T1 & (f_B < F)[None, :], 0.0
    )
    sum_DF = tl.dot(tl.trans(x_TD), dy_TF, sum_DF, input_precision='ieee')
  tl.store(
    dw + (e.to(tl.int64) * D + d_B[:, None]) * F + f_B[None, :],
    sum_DF,
    (d_B < D)[:, None] & (f_B < F)[None, :],
  )
