"""Choices of tokens with static shapes, gather and scatter.

Chosen positions are always ascending, so that ordinary causal attention works
on the gathered tokens.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from mod_jax.errors import require
import mod_jax_kernels


@flax.struct.dataclass
class Selection:
  """The chosen tokens: K slots per sequence, some of which may be empty.

  Attributes:
    index_BK: int32 positions of tokens, ascending and unique in each row. An
      empty slot has the position of padding or of a token that was not chosen.
    valid_BK: False for empty slots; None if all hold a chosen token.
  """

  index_BK: jax.Array
  valid_BK: jax.Array | None = None


def num_chosen(capacity: float, length: int) -> int:
  """Returns the number of tokens to choose, k = max(1, floor(capacity · L)).

  L is `length`. The product is first rounded to nine decimals, so that
  0.29 · 100 gives 29.
  """
  return max(1, int(round(capacity * length, 9)))


def for_lengths(
  count: Callable[[int], int], length: int, length_B: jax.Array
) -> jax.Array:
  """Returns `count` of each row's number of tokens, int32 [B].

  `length_B` has these numbers, at most `length`. The results come from a table
  that Python computes, so that float32 rounding cannot make a padded row differ
  from the same row without padding.
  """
  return jnp.array([count(n) for n in range(length + 1)])[length_B]


def select_tokens(score_BL: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Returns the k best positions in sequence order, and their scores.

  This is the choice of Mixture-of-Depths (Raposo et al. 2024, Eq. 1): exact
  top-k, with ties broken in favour of the lowest position. The positions are
  int32, ascending, and have no gradient.
  """
  selection = select_top_k(score_BL, k)
  score_BK = jnp.take_along_axis(score_BL, selection.index_BK, axis=-1)
  return selection.index_BK, score_BK


def select_top_k(
  score_BL: jax.Array,
  k: int,
  valid_BL: jax.Array | None = None,
  count_B: jax.Array | None = None,
) -> Selection:
  """Chooses the best tokens of each row; padding is never a candidate.

  Args:
    score_BL: scores. NaN and -inf count as the lowest finite number: last among
      real tokens, but before padding.
    k: slots per row; UserError unless 1 <= k <= L.
    valid_BL: False for padding; None if there is none.
    count_B: number of the k slots that each row may fill, with its best tokens;
      with None, each row may fill all k.

  Returns:
    A Selection of k slots. Rows with fewer than k candidates or `count < k`
    have empty slots, marked in `valid_BK`.
  """
  length = score_BL.shape[-1]
  require(
    1 <= k <= length,
    f'1 to {length}; lower the capacity or lengthen the sequence',
    k=k,
  )
  score_BL = jax.lax.stop_gradient(score_BL).astype(jnp.float32)
  lowest = jnp.finfo(jnp.float32).min
  # NaN also becomes the lowest number, as comparisons with NaN are False.
  score_BL = jnp.where(score_BL > lowest, score_BL, lowest)
  if valid_BL is not None:
    score_BL = jnp.where(valid_BL, score_BL, -jnp.inf)
  if count_B is None:
    index_BK = mod_jax_kernels.token_select(score_BL, k)
    if valid_BL is None:
      return Selection(index_BK)
    # Rows with too few candidates also select padding.
    return Selection(index_BK, jnp.take_along_axis(valid_BL, index_BK, axis=-1))
  # Sort by score, since each row keeps a different number of tokens. Make -0
  # equal to 0, because `top_k` would put it below.
  score_BL = jnp.where(score_BL == 0, 0, score_BL)
  index_BK = jax.lax.top_k(score_BL, k)[1].astype(jnp.int32)
  keep_BK = jnp.broadcast_to(jnp.arange(k) < count_B[..., None], index_BK.shape)
  if valid_BL is not None:
    keep_BK &= jnp.take_along_axis(valid_BL, index_BK, axis=-1)
  return Selection(*jax.lax.sort((index_BK, keep_BK), num_keys=1))


def select_decided(
  decided_BL: jax.Array, slots: int, count_B: jax.Array | None = None
) -> Selection:
  """Chooses the tokens that are True, in order of position.

  Later tokens that find none of the `slots` are left out, which keeps the
  choice causal. A row may fill `count_B` slots; with None, it may fill all.
  """
  length = decided_BL.shape[-1]
  if count_B is not None:
    decided_BL &= jnp.cumsum(decided_BL, axis=-1) <= count_B[..., None]
  # Rank decided tokens first, each group in sequence order. The ranks are
  # distinct integers, exact in float32.
  order_L = length - jnp.arange(length, dtype=jnp.float32)
  selection = select_top_k(decided_BL * length + order_L, min(slots, length))
  valid_BK = jnp.take_along_axis(decided_BL, selection.index_BK, axis=-1)
  return Selection(selection.index_BK, valid_BK)


def mark_tokens(selection: Selection, length: int) -> jax.Array:
  """Returns mask_BL, True at the chosen positions."""
  index_BK, valid_BK = selection.index_BK, selection.valid_BK
  if valid_BK is None:
    valid_BK = jnp.ones_like(index_BK, bool)

  def mark(index_K, valid_K):
    mask_L = jnp.zeros(length, bool)
    return mask_L.at[index_K].set(valid_K, **_SCATTER)

  return jax.vmap(mark)(index_BK, valid_BK)


# With these promises XLA needs no sort and no bounds checks, and gather and
# scatter stay local to a device if the batch is sharded.
_SCATTER = {
  'unique_indices': True,
  'indices_are_sorted': True,
  'mode': 'promise_in_bounds',
}


def gather_tokens(x_BLD: jax.Array, index_BK: jax.Array) -> jax.Array:
  """Returns x_BKD, the tokens at the given ascending positions."""
  return jax.vmap(lambda x, index: x.at[index].get(**_SCATTER))(x_BLD, index_BK)


def scatter_add_tokens(
  x_BLD: jax.Array, index_BK: jax.Array, update_BKD: jax.Array
) -> jax.Array:
  """Returns x with updates added at the given ascending, unique positions."""
  return jax.vmap(lambda x, index, u: x.at[index].add(u, **_SCATTER))(
    x_BLD, index_BK, update_BKD.astype(x_BLD.dtype)
  )
