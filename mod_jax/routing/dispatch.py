"""Moves of tokens to the experts that they chose, and back.

An assignment is a pair of a token and an expert. A token has J of them at
most, and the J of a token come before those of the next.
"""

import jax
import jax.numpy as jnp


def give_slots(
  wanted_BLE: jax.Array, slots: int, limit_B: jax.Array | None = None
) -> jax.Array:
  """Returns slot_BLE, int32: each assignment's slot among all experts' slots.

  Expert e has the slots `e · slots` and following. They are given out in order
  of position, so that no token takes a slot from one before it, whichever of
  its choices it is. An assignment that finds no slot, and one that nobody
  wants, has the number `E · slots`.

  Args:
    wanted_BLE: which tokens want which expert.
    slots: of each expert.
    limit_B: how many of them each row may fill; None for all.
  """
  experts = wanted_BLE.shape[-1]
  rank_BLE = jnp.cumsum(wanted_BLE, axis=1, dtype=jnp.int32) - 1
  fits_BLE = rank_BLE < slots
  if limit_B is not None:
    fits_BLE &= rank_BLE < limit_B[:, None, None]
  slot_BLE = rank_BLE + slots * jnp.arange(experts, dtype=jnp.int32)
  return jnp.where(wanted_BLE & fits_BLE, slot_BLE, experts * slots)


def inverse(index_BM: jax.Array, size: int) -> jax.Array:
  """Returns inverse_BN of N = `size`: which entry of `index` is n.

  Args:
    index_BM: numbers below `size`, each at most once in a row; those that are
      not below are nobody's.
    size: N.

  Returns:
    int32, M where no entry is n.
  """
  count = index_BM.shape[1]
  entry_M = jnp.arange(count, dtype=jnp.int32)

  def one(index_M):
    nobody_N = jnp.full(size, count, jnp.int32)
    return nobody_N.at[index_M].set(entry_M, mode='drop', unique_indices=True)

  return jax.vmap(one)(index_BM)


@jax.custom_vjp
def take(
  x_BND: jax.Array, index_BM: jax.Array, inverse_BNJ: jax.Array
) -> jax.Array:
  """Returns y_BMD, `y[m] = x[index[m]]`; zeros where the index is N.

  Its gradient gathers too: a scatter would add row by row.

  Args:
    x_BND: rows.
    index_BM: which row each result is, 0 to N.
    inverse_BNJ: which results each row becomes, at most J of them; M for none.
  """
  del inverse_BNJ
  return _gather(x_BND, index_BM)


def _take_forward(x_BND, index_BM, inverse_BNJ):
  return _gather(x_BND, index_BM), inverse_BNJ


def _take_backward(inverse_BNJ, dy_BMD):
  batch, rows, each = inverse_BNJ.shape
  dx_BQD = _gather(dy_BMD, inverse_BNJ.reshape(batch, -1))
  dx_BNJD = dx_BQD.reshape(batch, rows, each, -1)
  dx_BND = dx_BNJD.sum(axis=2, dtype=jnp.float32).astype(dy_BMD.dtype)
  return dx_BND, None, None


take.defvjp(_take_forward, _take_backward)


def _gather(x_BND, index_BM):
  return jax.vmap(lambda x, i: x.at[i].get(mode='fill', fill_value=0))(
    x_BND, index_BM
  )
