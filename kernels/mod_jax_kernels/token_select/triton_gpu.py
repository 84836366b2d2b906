"""Selection on a GPU: a program for each row, which it keeps in registers."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mod_jax_kernels import dispatch, tiles, triton_call
from mod_jax_kernels.token_select.tiles import TILES


# By their combining function, since Triton's interpreter does not know `tl.sum`
# and `tl.cumsum` unless all of Triton was imported for it.
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
  # Bisection from the sign down: the largest key that k of them reach.
  kth = tl.full((), lowest, tl.int32)
  for step in range(32):
    higher = kth ^ (tl.full((), 1, tl.int32) << (31 - step))
    count = _count(first >= higher)
    # Only rows longer than a block are read again, from a cache.
    for start in range(BLOCK, LENGTH, BLOCK):
      at = start + lane
      key = tl.load(key_ptr + at, mask=at < LENGTH, other=lowest)
      count += _count(key >= higher)
    kth = tl.where(count >= k, higher, kth)
  above = _count(first > kth)
  for start in range(BLOCK, LENGTH, BLOCK):
    at = start + lane
    key = tl.load(key_ptr + at, mask=at < LENGTH, other=lowest)
    above += _count(key > kth)
  # What is left for those equal to the k-th best, and the slots given away.
  wanted = k - above
  given = tl.full((), 0, tl.int32)
  for start in range(0, LENGTH, BLOCK):
    at = start + lane
    key = tl.load(key_ptr + at, mask=at < LENGTH, other=lowest)
    equal = key == kth
    chosen = (key > kth) | equal & (_running(equal) <= wanted)
    tl.store(index_ptr + given + _running(chosen) - 1, at, mask=chosen)
    given += _count(chosen)
    wanted -= _count(equal)


@dispatch.jit(static_argnames='k')
def token_select(key_BL, k):
  """As `reference.token_select`."""
  rows, length = key_BL.shape
  sizes = tiles.choose(TILES, 'triton')
  block = min(triton.next_power_of_2(length), sizes['block'])
  return triton_call.triton_call(
    _select,
    key_BL,
    k,
    out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
    grid=(rows,),
    # A warp has no use for less than a few lanes each.
    num_warps=max(1, min(sizes['num_warps'], block // 128)),
    num_stages=1,
    LENGTH=length,
    BLOCK=block,
  )
