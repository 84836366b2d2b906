"""Attention that also returns how much attention each token received."""

import functools
from typing import Literal

import jax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.route_scores import reference

Implementation = Literal['xla', 'pallas', 'triton']

_HERE = 'mod_jax_kernels.route_scores'
_WIDEST = 128


def route_scores(
  q_BLHC: jax.Array,
  k_BLHC: jax.Array,
  v_BLHC: jax.Array,
  mask: jax.Array | None = None,
  implementation: Implementation | None = None,
  *,
  causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BLHC, in the dtype of q, and score_BL, in float32.

  `score_j = 1/(H·N) Σ_h Σ_i a_h[i, j]` is the mean of column j of the attention
  map over heads and queries; the scores sum to 1 (A-MoD, Gadhikar et al. 2024,
  Eq. 4). Kernels never store the map: they run flash attention (Dao 2023), with
  the log-sum-exp of each query as a further result, and then a second pass over
  queries and keys. Both results are differentiable.

  Args:
    q_BLHC: queries.
    k_BLHC: keys, with as many heads as the queries.
    v_BLHC: values.
    mask: None; valid_BL, False for tokens that neither see nor are seen; or
      mask_BQS, True where a query may see a key, which only `xla` supports. A
      query that sees no key gets zeros and is excluded from the scores.
    implementation: `xla`; `pallas` (TPU); `triton` (NVIDIA GPU); None chooses
      by platform.
    causal: whether tokens see only themselves and earlier ones.

  Raises:
    ValueError: shapes do not match; the requested backend is unknown or does
      not support the arguments.
    RuntimeError: the requested backend cannot run here.
  """
  if (
    not q_BLHC.shape == k_BLHC.shape == v_BLHC.shape
    or q_BLHC.ndim != 4
    or not q_BLHC.shape[1]
  ):
    raise ValueError(
      f'q {q_BLHC.shape}, k {k_BLHC.shape}, v {v_BLHC.shape}: expected one'
      ' shape [batch, tokens, heads, channels] for all three, and one token at'
      ' least.'
    )
  if mask is not None:
    batch, length = q_BLHC.shape[:2]
    shape = (batch, length) + (length,) * (mask.ndim == 3)
    if mask.shape != shape or mask.dtype != bool:
      raise ValueError(
        f'mask of {mask.dtype} {mask.shape}: expected bool'
        f' {(batch, length)}, a token each, or {(batch, length, length)}, a'
        ' query and a key.'
      )
  chosen = OP.choose(implementation, q_BLHC, k_BLHC, v_BLHC, mask)
  return _route_scores(q_BLHC, k_BLHC, v_BLHC, mask, causal, chosen)


def lacks(q_BLHC, k_BLHC, v_BLHC, mask) -> str | None:
  """Returns why the kernels do not support the arguments; None if they do."""
  if mask is not None and mask.ndim == 3:
    return (
      'takes no mask of queries and keys: pass one of tokens, or causal=True,'
      " or use None or 'xla'"
    )
  if q_BLHC.shape[-1] > _WIDEST:
    return (
      f'takes no heads of {q_BLHC.shape[-1]} channels, {_WIDEST} at most: use'
      " None or 'xla'"
    )
  if not q_BLHC.size:
    return f"takes no empty arrays {q_BLHC.shape}: use None or 'xla'"
  return dispatch.wrong_types('q, k and v', (q_BLHC, k_BLHC, v_BLHC))


OP = dispatch.Op(
  dispatch.Backend(
    name='pallas', module=f'{_HERE}.pallas_tpu', platform='tpu', lacks=lacks
  ),
  dispatch.Backend(
    name='triton', module=f'{_HERE}.triton_gpu', platform='cuda', lacks=lacks
  ),
  dispatch.Backend(name='xla', module=reference),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _route_scores(q_BLHC, k_BLHC, v_BLHC, mask, causal, chosen):
  results, _ = _forward(q_BLHC, k_BLHC, v_BLHC, mask, causal, chosen)
  return results


def _forward(q_BLHC, k_BLHC, v_BLHC, mask, causal, chosen):
  arrays = q_BLHC, k_BLHC, v_BLHC, mask
  out_BLHC, column_BL, lse_BHL = OP.run(
    'forward', chosen, *arrays, causal=causal
  )
  # Divide by the sum, which is H times the number of queries that see a key
  # only up to rounding errors, which can be large for large logits.
  total_B1 = column_BL.sum(axis=-1, keepdims=True)
  score_BL = column_BL / jnp.where(total_B1 > 0, total_B1, 1)
  return (out_BLHC, score_BL), (*arrays, out_BLHC, lse_BHL)


def _forward_of_primals(q_BLHC, k_BLHC, v_BLHC, mask, causal, chosen):
  # With symbolic zeros, JAX wraps each argument with a flag `perturbed`.
  values = jax.tree.map(
    lambda x: x.value,
    (q_BLHC, k_BLHC, v_BLHC, mask),
    is_leaf=lambda x: hasattr(x, 'perturbed'),
  )
  return _forward(*values, causal, chosen)


def _backward(causal, chosen, residuals, gradients):
  q_BLHC, _, _, mask, *_ = residuals
  dout_BLHC, dscore_BL = gradients
  # Scores that are only used to rank tokens have no gradient; skip its pass.
  dcolumn_BL = None
  if not isinstance(dscore_BL, SymbolicZero):
    dcolumn_BL = dscore_BL * _share(q_BLHC, mask, causal)
  if isinstance(dout_BLHC, SymbolicZero):
    dout_BLHC = jnp.zeros(dout_BLHC.shape, dout_BLHC.dtype)
  arrays = dout_BLHC, dcolumn_BL, residuals
  return *OP.run('backward', chosen, *arrays, causal=causal), None


# Symbolic zeros show `_backward` that the scores have no gradient.
_route_scores.defvjp(_forward_of_primals, _backward, symbolic_zeros=True)


def _share(q_BLHC, mask, causal):
  """Returns 1/(H·N), the factor in the scores, for N queries that see a key.

  This is a number without a mask, and [B, 1] with one.
  """
  _, length, heads, _ = q_BLHC.shape
  if mask is None:
    return 1 / (heads * length)
  if mask.ndim == 3:
    # Only queries that see a key take part in the mean.
    mask = reference.seen(mask, causal, length).any(axis=-1)
  return 1 / (heads * jnp.maximum(mask.sum(axis=-1, keepdims=True), 1))
