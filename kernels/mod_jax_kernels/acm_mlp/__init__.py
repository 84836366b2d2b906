"""Adaptive computation: each token runs through the learners that it needs."""

from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels.acm_mlp import reference

Implementation = Literal['xla']
Activation = Literal['gelu', 'linear']


def acm_mlp(
  x_TD: jax.Array,
  w1_NDF: jax.Array,
  b1_NF: jax.Array,
  w2_NFD: jax.Array,
  num_learners_T: jax.Array,
  implementation: Implementation | None = None,
  *,
  activation: Activation = 'gelu',
) -> jax.Array:
  """Returns y_TD: the sum of the first `num_learners` learners of each token.

  `y_t = Σ_{n < k_t} act(x_t · W1_n + b1_n) · W2_n` (Wójcik et al. 2023, Eq. 1).
  Only the chosen products are computed, up to tiles of tokens of equal or
  nearly equal k. It has no gradient; training runs all learners.

  Args:
    x_TD: tokens, in any order.
    w1_NDF: first kernel of each of N learners.
    b1_NF: bias of their F hidden units.
    w2_NFD: second kernel; its outputs may be other than D.
    num_learners_T: integers in 0..N; others count as the nearest.
    implementation: `xla`, or None for the fitting one.
    activation: between the two products; exact GELU by default.

  Raises:
    ValueError: shapes that do not fit, numbers of learners that are no
      integers, or an unknown backend or activation.
  """
  x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T = map(
    jnp.asarray, (x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T)
  )
  ranks = (x_TD.ndim, w1_NDF.ndim, b1_NF.ndim, w2_NFD.ndim)
  if (
    ranks != (2, 3, 2, 3)
    or w1_NDF.shape[1] != x_TD.shape[1]
    or b1_NF.shape != w1_NDF.shape[::2]
    or w2_NFD.shape[:2] != b1_NF.shape
    or num_learners_T.shape != x_TD.shape[:1]
  ):
    raise ValueError(
      f'x {x_TD.shape}, w1 {w1_NDF.shape}, b1 {b1_NF.shape}, w2'
      f' {w2_NFD.shape}, num_learners {num_learners_T.shape}: expected [T, D],'
      ' [N, D, F], [N, F], [N, F, D] and [T].'
    )
  if not jnp.issubdtype(num_learners_T.dtype, jnp.integer):
    raise ValueError(
      f'num_learners of type {num_learners_T.dtype}: expected integers.'
    )
  if activation not in ('gelu', 'linear'):
    raise ValueError(f"activation={activation!r}: expected 'gelu' or 'linear'.")
  if implementation not in (None, 'xla'):
    raise ValueError(
      f"implementation={implementation!r}: expected 'xla' or None."
    )
  return reference.acm_mlp(
    x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T, activation
  )
