"""Grouped products by a loop over blocks of rows, each of one group.

A group's last block may extend into rows of the next group, whose own blocks
come later and overwrite them.
"""

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch

# Maximum number of rows of a block. Smaller blocks would be slower, since every
# block reads its group's matrix, which takes longer than a product of few rows.
_BLOCK = 256


def product(x_TD, w_EDF, size_E):
  """See `mod_jax_kernels.grouped_dot`."""
  tokens, groups = x_TD.shape[0], w_EDF.shape[0]
  rows = _rows(tokens, groups)
  x_SD = jnp.pad(x_TD, ((0, rows), (0, 0)))

  def step(y_SF, group, start, _):
    x_RD = jax.lax.dynamic_slice_in_dim(x_SD, start, rows)
    y_RF = jnp.dot(x_RD, w_EDF[group], preferred_element_type=x_TD.dtype)
    return jax.lax.dynamic_update_slice_in_dim(y_SF, y_RF, start, axis=0)

  y_SF = jnp.zeros((tokens + rows, w_EDF.shape[2]), x_TD.dtype)
  y_TF = _for_each_block(step, y_SF, size_E, rows)[:tokens]
  # The very last block may extend into rows of no group.
  return jnp.where((jnp.arange(tokens) < size_E.sum())[:, None], y_TF, 0)


def weight_gradient(x_TD, dy_TF, size_E):
  """See `reference.weight_gradient`."""
  rows = _rows(x_TD.shape[0], size_E.shape[0])
  x_SD, dy_SF = (jnp.pad(x, ((0, rows), (0, 0))) for x in (x_TD, dy_TF))

  def step(dw_EDF, group, start, count):
    # Set both to 0 in rows of other groups, which then add nothing even if they
    # are not finite.
    of_group_R1 = (jnp.arange(rows) < count)[:, None]
    x_RD, dy_RF = (
      jnp.where(of_group_R1, jax.lax.dynamic_slice_in_dim(x, start, rows), 0)
      for x in (x_SD, dy_SF)
    )
    dw_DF = jnp.dot(x_RD.T, dy_RF, preferred_element_type=jnp.float32)
    return dw_EDF.at[group].add(dw_DF)

  shape = (size_E.shape[0], x_TD.shape[1], dy_TF.shape[1])
  return _for_each_block(step, jnp.zeros(shape, jnp.float32), size_E, rows)


def _rows(tokens, groups):
  """Returns how many rows a block has: a power of two near the mean group."""
  mean_size = dispatch.at_most(tokens // groups, _BLOCK)
  return 1 << (max(1, mean_size) - 1).bit_length()


def _for_each_block(step, start, size_E, rows):
  """Folds `step` over all blocks; returns the carry, which begins as `start`.

  Arguments of `step` are the carry, the block's group, its first row, and the
  number of rows from that row to the end of the group.
  """
  end_E = jnp.cumsum(size_E)
  blocks_E = -(-size_E // rows)
  end_block_E = jnp.cumsum(blocks_E)

  def body(i, carry):
    group = jnp.searchsorted(end_block_E, i, side='right')
    offset = (i - (end_block_E - blocks_E)[group]) * rows
    first = (end_E - size_E)[group] + offset
    return step(carry, group, first, size_E[group] - offset)

  return jax.lax.fori_loop(0, end_block_E[-1], body, start)
