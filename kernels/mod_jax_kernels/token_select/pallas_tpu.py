"""Selection on TPUs, eight rows per step.

Running counts are products with a triangular matrix, exact in float32. There is
no scatter: each slot counts the positions that precede its chosen token.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.pallas_parts import LANES, VMEM_BYTES, interpret
from mod_jax_kernels.token_select import reference
from mod_jax_kernels.token_select.tiles import TILES


@dispatch.jit(static_argnames='k')
def token_select(key_BL, k):
  """See `reference.token_select`."""
  batch, length = key_BL.shape
  sizes = tiles.choose(TILES, 'pallas')
  rows = sizes['rows']
  block_l = min(sizes['block_l'], _round_up(length, LANES))
  block_k = min(sizes['block_k'], _round_up(k, LANES))
  slots = _round_up(k, block_k)
  key_BL = jnp.pad(
    key_BL,
    ((0, -batch % rows), (0, -length % block_l)),
    constant_values=reference.LOWEST,
  )
  padded_batch, padded_length = key_BL.shape
  index_BK = pl.pallas_call(
    functools.partial(_kernel, k=k, block_l=block_l, block_k=block_k),
    out_shape=jax.ShapeDtypeStruct((padded_batch, slots), jnp.int32),
    grid=(padded_batch // rows,),
    in_specs=[pl.BlockSpec((rows, padded_length), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((rows, slots), lambda i: (i, 0)),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',), vmem_limit_bytes=VMEM_BYTES
    ),
    interpret=interpret(),
    name='token_select',
  )(key_BL)
  return index_BK[:batch, :k]


def _kernel(key_ref, index_ref, *, k, block_l, block_k):
  rows, length = key_ref.shape
  blocks = length // block_l

  def count(compare, with_R1):
    """Returns for how many keys of each row `compare` holds, [R, 1]."""

    def add(block, sum_RP):
      start = pl.multiple_of(block * block_l, block_l)
      key_RP = key_ref[:, pl.ds(start, block_l)]
      return sum_RP + compare(key_RP, with_R1).astype(jnp.int32)

    zero_RP = jnp.zeros((rows, block_l), jnp.int32)
    sum_RP = jax.lax.fori_loop(0, blocks, add, zero_RP)
    # The hardware sums lanes only as floats, which is exact below 2**24.
    sum_R1 = sum_RP.astype(jnp.float32).sum(axis=-1, keepdims=True)
    return sum_R1.astype(jnp.int32)

  def bisect(step, kth_R1):
    higher_R1 = kth_R1 ^ (jnp.int32(1) << (31 - step))
    is_reached_R1 = count(jnp.greater_equal, higher_R1) >= k
    return jnp.where(is_reached_R1, higher_R1, kth_R1)

  kth_R1 = jnp.full((rows, 1), reference.LOWEST, jnp.int32)
  kth_R1 = jax.lax.fori_loop(0, 32, bisect, kth_R1)
  num_ties_R1 = (k - count(jnp.greater, kth_R1)).astype(jnp.float32)
  index_ref[...] = jnp.zeros(index_ref.shape, jnp.int32)
  triangle_PP = (
    jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    <= jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
  ).astype(jnp.float32)

  def running(mask_RP, contract):
    """Returns inclusive counts along lanes; transposed if `contract` is 0."""
    operands = (
      (triangle_PP, mask_RP) if contract == 0 else (mask_RP, triangle_PP)
    )
    dims = ((0,), (1,)) if contract == 0 else ((1,), (0,))
    return jax.lax.dot_general(
      *operands, (dims, ((), ())), preferred_element_type=jnp.float32
    )

  def compact(block, carry):
    equal_R1, total_1R = carry
    start = pl.multiple_of(block * LANES, LANES)
    key_RP = key_ref[:, pl.ds(start, LANES)]
    tied_RP = (key_RP == kth_R1).astype(jnp.float32)
    rank_RP = equal_R1 + running(tied_RP, 1)
    tie_RP = (key_RP == kth_R1) & (rank_RP <= num_ties_R1)
    chosen_RP = ((key_RP > kth_R1) | tie_RP).astype(jnp.float32)
    total_PR = total_1R + running(chosen_RP, 0)

    def fill(part, _):
      first = pl.multiple_of(part * block_k, block_k)
      slot_1K = jax.lax.broadcasted_iota(jnp.int32, (1, block_k), 1) + first
      slot_1K = slot_1K.astype(jnp.float32)
      for row in range(rows):
        # Slot n holds the first position where the running count exceeds n,
        # which is the number of positions where it is at most n.
        before_PK = total_PR[:, row : row + 1] <= slot_1K
        count_1K = before_PK.astype(jnp.int32).sum(axis=0, keepdims=True)
        index_ref[pl.ds(row, 1), pl.ds(first, block_k)] += count_1K
      return 0

    jax.lax.fori_loop(0, index_ref.shape[1] // block_k, fill, 0)
    equal_R1 += tied_RP.sum(axis=-1, keepdims=True)
    return equal_R1, total_PR[LANES - 1 :]

  carry = jnp.zeros((rows, 1), jnp.float32), jnp.zeros((1, rows), jnp.float32)
  jax.lax.fori_loop(0, length // LANES, compact, carry)


def _round_up(number, multiple):
  return -(-number // multiple) * multiple
