"""Moves of tokens on a GPU: a program for a few rows, read and written once."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles
from mod_jax_kernels import triton_call
from mod_jax_kernels.token_move.tiles import TILES


@triton.jit
def _gather(
  x_ptr,
  index_ptr,
  slots,
  y_ptr,
  LENGTH: tl.constexpr,
  KEPT: tl.constexpr,
  WIDTH: tl.constexpr,
  ROWS: tl.constexpr,
  BLOCK_D: tl.constexpr,
):
  slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
  feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None]
  real = slot < slots
  index = tl.load(index_ptr + slot, mask=real, other=0)
  row = slot // KEPT * LENGTH + index
  mask = real[:, None] & (feature < WIDTH)
  x = tl.load(x_ptr + row[:, None] * WIDTH + feature, mask=mask)
  tl.store(y_ptr + slot[:, None] * WIDTH + feature, x, mask=mask)


@triton.jit
def _scatter(
  x_ptr,
  slot_ptr,
  update_ptr,
  gate_ptr,
  rows,
  y_ptr,
  LENGTH: tl.constexpr,
  KEPT: tl.constexpr,
  WIDTH: tl.constexpr,
  GATED: tl.constexpr,
  ROWS: tl.constexpr,
  BLOCK_D: tl.constexpr,
):
  row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
  feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None]
  real = row < rows
  slot = tl.load(slot_ptr + row, mask=real, other=-1)
  hit = slot >= 0
  slot = row // LENGTH * KEPT + slot
  wide = feature < WIDTH
  at = row[:, None] * WIDTH + feature
  x = tl.load(x_ptr + at, mask=real[:, None] & wide)
  # Rows that pass by read nothing.
  update = tl.load(
    update_ptr + slot[:, None] * WIDTH + feature,
    mask=hit[:, None] & wide,
    other=0.0,
  ).to(tl.float32)
  if GATED:
    gate = tl.load(gate_ptr + slot, mask=hit, other=0.0).to(tl.float32)
    update *= gate[:, None]
  kind = y_ptr.dtype.element_ty
  y = (x.to(tl.float32) + update.to(kind).to(tl.float32)).to(kind)
  # Not a sum with zero, which would make 0 of -0.
  y = tl.where(hit[:, None], y, x)
  tl.store(y_ptr + at, y, mask=real[:, None] & wide)


@triton.jit
def _gather_gated(
  dy_ptr,
  index_ptr,
  update_ptr,
  gate_ptr,
  slots,
  d_update_ptr,
  d_gate_ptr,
  LENGTH: tl.constexpr,
  KEPT: tl.constexpr,
  WIDTH: tl.constexpr,
  ROWS: tl.constexpr,
  BLOCK_D: tl.constexpr,
):
  slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
  real = slot < slots
  index = tl.load(index_ptr + slot, mask=real, other=0)
  gate = tl.load(gate_ptr + slot, mask=real, other=0.0).to(tl.float32)
  row = slot // KEPT * LENGTH + index
  total = tl.full((ROWS, BLOCK_D), 0.0, tl.float32)
  for start in range(0, WIDTH, BLOCK_D):
    feature = start + tl.arange(0, BLOCK_D)[None]
    mask = real[:, None] & (feature < WIDTH)
    at = slot[:, None] * WIDTH + feature
    dy = tl.load(
      dy_ptr + row[:, None] * WIDTH + feature, mask=mask, other=0.0
    ).to(tl.float32)
    update = tl.load(update_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total += dy * update
    d_update = dy * gate[:, None]
    tl.store(
      d_update_ptr + at, d_update.to(d_update_ptr.dtype.element_ty), mask=mask
    )
  # By the combining function, since Triton's interpreter does not know `tl.sum`
  # unless all of Triton was imported for it.
  d_gate = tl.reduce(total, 1, tl.standard._sum_combine)
  tl.store(d_gate_ptr + slot, d_gate.to(d_gate_ptr.dtype.element_ty), mask=real)


def gather(x_BLD, index_BK):
  """As `reference.gather`."""
  batch, _, width = x_BLD.shape
  kept = index_BK.shape[1]
  return _call(
    _gather,
    x_BLD,
    index_BK,
    rows=batch * kept,
    out_type=jax.ShapeDtypeStruct((batch, kept, width), x_BLD.dtype),
    sizes=(x_BLD.shape[1], kept, width),
    split=True,
  )


def scatter(x_BLD, index_BK, update_BKD, gate_BK):
  """As `reference.scatter`; one pass over all rows."""
  batch, length, width = x_BLD.shape
  kept = index_BK.shape[1]
  # Which slot each row takes its update from; -1 for none.
  slot_BL = jnp.full((batch, length), -1, jnp.int32)
  slot_BL = jax.vmap(
    lambda slot_L, index_K: slot_L.at[index_K].set(
      jnp.arange(kept, dtype=jnp.int32),
      unique_indices=True,
      indices_are_sorted=True,
      mode='promise_in_bounds',
    )
  )(slot_BL, index_BK)
  return _call(
    _scatter,
    x_BLD,
    slot_BL,
    update_BKD,
    update_BKD if gate_BK is None else gate_BK,
    rows=batch * length,
    out_type=jax.ShapeDtypeStruct(x_BLD.shape, x_BLD.dtype),
    sizes=(length, kept, width),
    split=True,
    GATED=gate_BK is not None,
  )


def gather_gated(dy_BLD, index_BK, update_BKD, gate_BK):
  """As `reference.gather_gated`; one pass over the chosen rows."""
  batch, length, width = dy_BLD.shape
  kept = index_BK.shape[1]
  return _call(
    _gather_gated,
    dy_BLD,
    index_BK,
    update_BKD,
    gate_BK,
    rows=batch * kept,
    out_type=(
      jax.ShapeDtypeStruct(update_BKD.shape, update_BKD.dtype),
      jax.ShapeDtypeStruct(gate_BK.shape, gate_BK.dtype),
    ),
    sizes=(length, kept, width),
    split=False,
  )


def _call(kernel, *arrays, rows, out_type, sizes, split, **meta):
  if not rows * sizes[-1]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)
  tile = tiles.choose(TILES, 'triton')
  length, kept, width = sizes
  block_d = min(tile['block_d'], triton.next_power_of_2(width))
  parts = triton.cdiv(width, block_d) if split else 1
  return _launch(
    *arrays,
    kernel=kernel,
    rows=rows,
    out_type=out_type,
    grid=(triton.cdiv(rows, tile['rows']), parts),
    num_warps=tile['num_warps'],
    meta=tuple(meta.items())
    + (('LENGTH', length), ('KEPT', kept), ('WIDTH', width))
    + (('ROWS', tile['rows']), ('BLOCK_D', block_d)),
  )


@dispatch.jit(
  static_argnames=('kernel', 'rows', 'out_type', 'grid', 'num_warps', 'meta')
)
def _launch(*arrays, kernel, rows, out_type, grid, num_warps, meta):
  return triton_call.triton_call(
    kernel,
    *arrays,
    rows,
    out_type=out_type,
    grid=grid,
    num_warps=num_warps,
    num_stages=1,
    **dict(meta),
  )
