"""A loop over blocks of rows, each of one group: no product is in vain.

A group's last block goes on into the rows of the next group, whose own block
comes after it and writes them again.
"""

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch

# Rows of a block at most. A block reads its group's matrix, which takes longer
# than the product where the rows are few.
_BLOCK = 256


def product(x_TD, w_EDF, size_E):
  """As `mod_jax_kernels.grouped_dot`."""
  tokens, groups = x_TD.shape[0], w_EDF.shape[0]
  rows = _rows(tokens, groups)
  x_SD = jnp.pad(x_TD, ((0, rows), (0, 0)))

  def step(y_SF, group, start, _):
    x_RD = jax.lax.dynamic_slice_in_dim(x_SD, start, rows)
    y_RF = jnp.dot(x_RD, w_EDF[group], preferred_element_type=x_TD.dtype)
    return jax.lax.dynamic_update_slice_in_dim(y_SF, y_RF, start, axis=0)

  y_SF = jnp.zeros((tokens + rows, w_EDF.shape[2]), x_TD.dtype)
  y_TF = _for_each_block(step, y_SF, size_E, rows)[:tokens]
  # The last block of all may have gone on into rows of no group.
  return jnp.where((jnp.arange(tokens) < size_E.sum())[:, None], y_TF, 0)


def weight_gradient(x_TD, dy_TF, size_E):
  """As `reference.weight_gradient`."""
  rows = _rows(x_TD.shape[0], size_E.shape[0])
  x_SD, dy_SF = (jnp.pad(x, ((0, rows), (0, 0))) for x in (x_TD, dy_TF))

  def step(dw_EDF, group, start, count):
    x_RD, dy_RF = (
      jax.lax.dynamic_slice_in_dim(x, start, rows) for x in (x_SD, dy_SF)
    )
    dy_RF = jnp.where((jnp.arange(rows) < count)[:, None], dy_RF, 0)
    dw_DF = jnp.dot(x_RD.T, dy_RF, preferred_element_type=jnp.float32)
    return dw_EDF.at[group].add(dw_DF)

  shape = (size_E.shape[0], x_TD.shape[1], dy_TF.shape[1])
  return _for_each_block(step, jnp.zeros(shape, jnp.float32), size_E, rows)


def _rows(tokens, groups):
  """Returns the rows of a block: about a group's share, as a power of two."""
  share = dispatch.at_most(tokens // groups, _BLOCK)
  return 1 << (max(1, share) - 1).bit_length()


def _for_each_block(step, start, size_E, rows):
  """Returns what `step(carry, group, first row, rows of the group)` leaves."""
  end_E = jnp.cumsum(size_E)
  blocks_E = -(-size_E // rows)
  last_E = jnp.cumsum(blocks_E)

  def body(i, carry):
    group = jnp.searchsorted(last_E, i, side='right')
    done = (i - (last_E - blocks_E)[group]) * rows
    first = (end_E - size_E)[group] + done
    return step(carry, group, first, size_E[group] - done)

  return jax.lax.fori_loop(0, last_E[-1], body, start)
