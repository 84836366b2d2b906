"""Exact top-k of each row as ascending positions, without sorting."""

from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.token_select import reference, sort

Implementation = Literal['xla', 'sort', 'pallas', 'triton']
# Scores, over all rows, from which a CPU takes a half to a fifth of the time of
# a sort; below, both take some ten microseconds.
_MANY = 2**13
_HERE = 'mod_jax_kernels.token_select'
OP = dispatch.Op(
  # These two run only if they are asked for, until they are measured.
  dispatch.Backend(
    name='pallas', module=f'{_HERE}.pallas_tpu', platform='tpu', default_on=()
  ),
  dispatch.Backend(
    name='triton', module=f'{_HERE}.triton_gpu', platform='cuda', default_on=()
  ),
  dispatch.Backend(
    name='xla',
    module=reference,
    default_on=('cpu',),
    suits=lambda key_BL: dispatch.at_most(key_BL.size, _MANY) == _MANY,
  ),
  dispatch.Backend(name='sort', module=sort),
)


def token_select(
  score_BL: jax.Array, k: int, implementation: Implementation | None = None
) -> jax.Array:
  """Returns index_BK, int32: the positions of the k best, ascending.

  The choice of Mixture-of-Depths (Raposo et al. 2024, Eq. 1): exact top-k, the
  lowest position first among equals. The k-th best is found by bisection on
  the 32 bits of the scores, and a running count gives each chosen token its
  slot. No gradient passes.

  Args:
    score_BL: scores, compared in float32; any leading shape. -0.0 equals 0.0,
      and NaN counts as -inf.
    k: tokens to choose in each row, 1 <= k <= L.
    implementation: `xla`; `sort`, which is XLA's top-k and a sort; `pallas`
      (TPU); `triton` (GPU); or None, which is `xla` on a CPU for the many
      scores with which it was measured to win, and `sort` else: on other
      devices, until the kernels are measured.

  Raises:
    ValueError: scores that are no floats or no rows, k outside of 1..L, an
      unknown backend, or rows too long for it.
    RuntimeError: a backend that was asked for by name and cannot run.
  """
  score_BL = jnp.asarray(score_BL)
  if not score_BL.ndim or not jnp.issubdtype(score_BL.dtype, jnp.floating):
    raise ValueError(
      f'score {score_BL.dtype}{list(score_BL.shape)}: expected rows of floats.'
    )
  *leading, length = score_BL.shape
  if not 1 <= k <= length:
    raise ValueError(
      f'k={k} tokens cannot be chosen from a row of {length}: expected'
      f' 1 <= k <= {length}.'
    )
  rows = score_BL.size // length
  score_BL = jax.lax.stop_gradient(score_BL).reshape(rows, length)
  key_BL = _order(score_BL.astype(jnp.float32))
  if not rows:
    return jnp.zeros((*leading, k), jnp.int32)
  chosen = OP.choose(implementation, key_BL)
  index_BK = OP.run('token_select', chosen, key_BL, k=k)
  return index_BK.reshape(*leading, k)


def _order(score_BL):
  """Returns int32 keys that compare as the scores do, ties included."""
  bits_BL = jax.lax.bitcast_convert_type(score_BL, jnp.int32)
  # Compared as bits, since hardware may take tiny numbers for 0.
  size_BL = bits_BL & 0x7FFFFFFF
  infinite = 0x7F800000
  bits_BL = jnp.where(size_BL == 0, 0, bits_BL)
  bits_BL = jnp.where(size_BL > infinite, infinite - 2**31, bits_BL)
  # The bits of negative numbers grow away from zero: all but the sign turned.
  return jnp.where(bits_BL < 0, bits_BL ^ 0x7FFFFFFF, bits_BL)
