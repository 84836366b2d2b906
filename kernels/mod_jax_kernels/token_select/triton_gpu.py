"""Selection on GPUs: each program holds one row in registers."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mod_jax_kernels import dispatch, tiles, triton_call
from mod_jax_kernels.token_select.tiles import TILES


# Not `tl.sum` and `tl.cumsum`, which Triton can interpret only if
# TRITON_INTERPRET is set for the whole process. Tests interpret single kernels
# (`triton_call.interpreted`).
@triton.jit
def _count(mask):
  return tl.reduce(mask.to(tl.int32), 0, tl.standard._sum_combine)


@triton.jit
def _running(mask):
  return tl.associative_scan(mask.to(tl.int32), 0, tl.standard._sum_combine)


@triton.jit
def _select(
  key_ptr,
  k,
  index_ptr,
  LENGTH: tl.constexpr,
  BLOCK: tl.constexpr,
):
  row = tl.program_id(0).to(tl.int64)
  key_ptr += row * LENGTH
  index_ptr += row * k
  lane = tl.arange(0, BLOCK)
  lowest = -2147483648
  first = tl.load(key_ptr + lane, mask=lane < LENGTH, other=lowest)
  # Bisect, from the sign bit down, for the largest number that at least k keys
  # reach.
  kth = tl.full((), lowest, tl.int32)
  for step in range(32):
    higher = kth ^ (tl.full((), 1, tl.int32) << (31 - step))
    count = _count(first >= higher)
    # Read the rest of rows that are longer than a block again, from the cache.
    for start in range(BLOCK, LENGTH, BLOCK):
      index = start + lane
      key = tl.load(key_ptr + index, mask=index < LENGTH, other=lowest)
      count += _count(key >= higher)
    kth = tl.where(count >= k, higher, kth)
  above = _count(first > kth)
  for start in range(BLOCK, LENGTH, BLOCK):
    index = start + lane
    key = tl.load(key_ptr + index, mask=index < LENGTH, other=lowest)
    above += _count(key > kth)
  # Remaining number of ties to choose, and number of slots filled so far.
  ties_left = k - above
  filled = tl.full((), 0, tl.int32)
  for start in range(0, LENGTH, BLOCK):
    index = start + lane
    key = tl.load(key_ptr + index, mask=index < LENGTH, other=lowest)
    equal = key == kth
    chosen = (key > kth) | equal & (_running(equal) <= ties_left)
    tl.store(index_ptr + filled + _running(chosen) - 1, index, mask=chosen)
    filled += _count(chosen)
    ties_left -= _count(equal)


@dispatch.jit(static_argnames='k')
def token_select(key_BL, k):
  """See `reference.token_select`."""
  rows, length = key_BL.shape
  sizes = tiles.choose(TILES, 'triton')
  block = min(triton.next_power_of_2(length), sizes['block'])
  return triton_call.triton_call(
    _select,
    key_BL,
    k,
    out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
    grid=(rows,),
    # At least four keys per thread.
    num_warps=max(1, min(sizes['num_warps'], block // 128)),
    num_stages=1,
    LENGTH=length,
    BLOCK=block,
  )
