"""Attention that also tells how much attention each token received."""

from typing import Literal

import jax

from mod_jax_kernels.route_scores import reference

Implementation = Literal['xla']


def route_scores(
  q_BLHC: jax.Array,
  k_BLHC: jax.Array,
  v_BLHC: jax.Array,
  mask: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BLHC, in the dtype of q, and score_BL, in float32.

  `score_j = 1/(H·N) Σ_h Σ_i a_h[i, j]`, the means of the attention map's
  columns over heads and queries; they add up to 1 (A-MoD, Gadhikar et al.
  2024, Eq. 4).

  Args:
    q_BLHC: queries.
    k_BLHC: keys of as many heads.
    v_BLHC: values.
    mask: mask_BQS, True where a query may see a key. A query that sees none
      gets finite, meaningless numbers and takes no part in the scores.
    implementation: `xla`, or None for the fitting one.

  Raises:
    ValueError: shapes that do not fit, or an unknown backend.
  """
  if not q_BLHC.shape == k_BLHC.shape == v_BLHC.shape:
    raise ValueError(
      f'q {q_BLHC.shape}, k {k_BLHC.shape}, v {v_BLHC.shape}: expected one'
      ' shape [batch, tokens, heads, channels] for all three.'
    )
  if implementation not in (None, 'xla'):
    raise ValueError(
      f"implementation={implementation!r}: expected 'xla' or None."
    )
  return reference.route_scores(q_BLHC, k_BLHC, v_BLHC, mask)
