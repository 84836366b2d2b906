"""Exact top-k of each row of scores, as ascending positions."""

from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.token_select import reference, sort

Implementation = Literal['xla', 'sort', 'pallas', 'triton']
# For at least this many scores in all rows, bisection on CPUs takes a half to a
# fifth of the time of a sort; for fewer, both take some ten microseconds.
_MANY = 2**13
# The kernel for TPUs holds two buffers of eight rows of this length, and at
# most as many positions, on the chip.
LONGEST = 2**17
_HERE = 'mod_jax_kernels.token_select'


def _lacks(key_BL) -> str | None:
  """Returns why the kernel for TPUs does not support the rows, or None."""
  if (length := key_BL.shape[1]) <= LONGEST:
    return None
  return (
    f'takes rows of {LONGEST} scores, which fit the chip, and not {length}: use'
    " None or 'xla'"
  )


OP = dispatch.Op(
  # `pallas` and `triton` run only if requested. `pallas` is not measured yet.
  # On an H100 `triton` takes .7 of the time of `sort`, which takes 2% of a
  # routed block's step.
  dispatch.Backend(
    name='pallas',
    module=f'{_HERE}.pallas_tpu',
    platform='tpu',
    default_on=(),
    lacks=_lacks,
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
  """Returns index_BK, int32: positions of the k largest scores, ascending.

  This is the choice of Mixture-of-Depths (Raposo et al. 2024, Eq. 1): exact
  top-k, with ties broken in favour of the lowest position. All backends but
  `sort` find the k-th largest score by bisection on the scores' 32 bits; then a
  running count gives each chosen token its slot. The result has no gradient.

  Args:
    score_BL: scores, compared in float32; any leading shape. -0.0 equals 0.0,
      and NaN counts as -inf.
    k: number of tokens to choose in each row, 1 <= k <= L.
    implementation: `xla`; `sort`, which is XLA's top-k and a sort; `pallas`
      (TPU); `triton` (GPU); or None, which is `xla` on CPUs if there are enough
      scores for it to be faster, and else `sort`.

  Raises:
    ValueError: scores are not rows of floats, k is not in 1..L, or the
      requested backend is unknown or does not support rows this long.
    RuntimeError: the requested backend cannot run here.
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
  """Returns sort keys: int32 with the same order and ties as the scores."""
  bits_BL = jax.lax.bitcast_convert_type(score_BL, jnp.int32)
  # Compare bits, since hardware may treat denormal numbers as 0.
  magnitude_BL = bits_BL & 0x7FFFFFFF
  infinite = 0x7F800000
  bits_BL = jnp.where(magnitude_BL == 0, 0, bits_BL)
  bits_BL = jnp.where(magnitude_BL > infinite, infinite - 2**31, bits_BL)
  # Flip all bits but the sign of negative numbers, whose order is reversed.
  return jnp.where(bits_BL < 0, bits_BL ^ 0x7FFFFFFF, bits_BL)
