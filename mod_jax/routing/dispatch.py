"""Moves tokens to the experts that they chose, and back.

An assignment is a pair of a token and an expert. Each token has up to J
assignments, which are ordered by token. A slot is the place of one token in an
expert's batch. `layers.experts` decides who chooses, and how many slots there
are; its residual connection carries the tokens that get none.
"""

import jax
import jax.numpy as jnp


def give_slots(
  wanted_BLE: jax.Array, slots: int, limit_B: jax.Array | None = None
) -> jax.Array:
  """Returns slot_BLE, int32: each assignment's slot among all experts' slots.

  `wanted_BLE` is True for the assignments to make. Each expert has `slots`
  slots; those of expert e begin at `e · slots`. They are given in order of
  position, so that no token takes the slot of an earlier one. Assignments that
  are not wanted or get no slot have the index `E · slots`. A row fills at most
  `limit_B` slots of each expert; with None, it may fill all.
  """
  experts = wanted_BLE.shape[-1]
  rank_BLE = jnp.cumsum(wanted_BLE, axis=1, dtype=jnp.int32) - 1
  fits_BLE = rank_BLE < slots
  if limit_B is not None:
    fits_BLE &= rank_BLE < limit_B[:, None, None]
  slot_BLE = rank_BLE + slots * jnp.arange(experts, dtype=jnp.int32)
  return jnp.where(wanted_BLE & fits_BLE, slot_BLE, experts * slots)


def inverse(index_BM: jax.Array, size: int) -> jax.Array:
  """Returns inverse_BN, int32: the m for which `index[m]` is n, or M if none.

  N is `size`. A value below N occurs at most once in a row; N is ignored.
  """
  count = index_BM.shape[1]
  entry_M = jnp.arange(count, dtype=jnp.int32)

  def invert_row(index_M):
    empty_N = jnp.full(size, count, jnp.int32)
    return empty_N.at[index_M].set(entry_M, mode='drop', unique_indices=True)

  return jax.vmap(invert_row)(index_BM)


@jax.custom_vjp
def take(
  x_BND: jax.Array, index_BM: jax.Array, inverse_BNJ: jax.Array
) -> jax.Array:
  """Returns y_BMD with `y[m] = x[index[m]]`, or zeros where `index[m]` is N.

  Its gradient is also a gather, because a scatter would add row by row. For
  each row n, `inverse_BNJ` has the at most J indices m with `index[m]` = n, and
  M in the remaining places.
  """
  del inverse_BNJ
  return _gather(x_BND, index_BM)


def _take_forward(x_BND, index_BM, inverse_BNJ):
  return _gather(x_BND, index_BM), inverse_BNJ


def _take_backward(inverse_BNJ, dy_BMD):
  batch, rows, per_row = inverse_BNJ.shape
  dx_BQD = _gather(dy_BMD, inverse_BNJ.reshape(batch, -1))
  dx_BNJD = dx_BQD.reshape(batch, rows, per_row, -1)
  dx_BND = dx_BNJD.sum(axis=2, dtype=jnp.float32).astype(dy_BMD.dtype)
  return dx_BND, None, None


take.defvjp(_take_forward, _take_backward)


def _gather(x_BND, index_BM):
  return jax.vmap(lambda x, i: x.at[i].get(mode='fill', fill_value=0))(
    x_BND, index_BM
  )
