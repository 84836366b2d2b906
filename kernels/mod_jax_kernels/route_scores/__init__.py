"""Attention that also tells how much attention each token received."""

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
_DTYPES = ('float32', 'bfloat16')


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

  `score_j = 1/(H·N) Σ_h Σ_i a_h[i, j]`, the means of the attention map's
  columns over heads and queries; they add up to 1 (A-MoD, Gadhikar et al.
  2024, Eq. 4). Kernels never hold the map: flash attention (Dao 2023) that
  returns the log-sum-exp of each query, and then a second pass over queries
  and keys. Gradients pass through both results.

  Args:
    q_BLHC: queries.
    k_BLHC: keys of as many heads.
    v_BLHC: values.
    mask: None; valid_BL, True for real tokens, which alone see and are seen;
      or mask_BQS, True where a query may see a key, which only XLA takes. A
      query that sees no key gets zeros and takes no part in the scores.
    implementation: `xla`; `pallas`, on a TPU; `triton`, on an NVIDIA GPU; None
      for the fitting one.
    causal: whether a token sees only itself and those before.

  Raises:
    ValueError: shapes that do not fit, an unknown backend, or arguments that a
      backend asked for by name does not take.
    RuntimeError: a backend asked for by name cannot run here.
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


def _lacks(q_BLHC, k_BLHC, v_BLHC, mask) -> str | None:
  """Returns which of the arguments no kernel takes, or None."""
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
  dtypes = [str(x.dtype) for x in (q_BLHC, k_BLHC, v_BLHC)]
  if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES:
    return (
      f'takes no q, k and v of {", ".join(dtypes)}: cast them to one of'
      f" {', '.join(_DTYPES)}, or use None or 'xla'"
    )
  if not q_BLHC.size:
    return f"takes no empty arrays {q_BLHC.shape}: use None or 'xla'"
  return None


OP = dispatch.Op(
  dispatch.Backend(
    name='pallas', module=f'{_HERE}.pallas_tpu', platform='tpu', lacks=_lacks
  ),
  dispatch.Backend(
    name='triton', module=f'{_HERE}.triton_gpu', platform='cuda', lacks=_lacks
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
  # They add up to H times the queries that see a key, but for rounding, which
  # is large where logits are.
  total_B1 = column_BL.sum(axis=-1, keepdims=True)
  score_BL = column_BL / jnp.where(total_B1 > 0, total_B1, 1)
  return (out_BLHC, score_BL), (*arrays, out_BLHC, lse_BHL)


def _forward_of_primals(q_BLHC, k_BLHC, v_BLHC, mask, causal, chosen):
  # What JAX says of each: its value, and whether a gradient is wanted.
  values = jax.tree.map(
    lambda x: x.value,
    (q_BLHC, k_BLHC, v_BLHC, mask),
    is_leaf=lambda x: hasattr(x, 'perturbed'),
  )
  return _forward(*values, causal, chosen)


def _backward(causal, chosen, residuals, gradients):
  q_BLHC, _, _, mask, *_ = residuals
  dout_BLHC, dscore_BL = gradients
  # Scores that only rank tokens have no gradient, and save the kernels a pass.
  dcolumn_BL = None
  if not isinstance(dscore_BL, SymbolicZero):
    dcolumn_BL = dscore_BL * _share(q_BLHC, mask, causal)
  if isinstance(dout_BLHC, SymbolicZero):
    dout_BLHC = jnp.zeros(dout_BLHC.shape, dout_BLHC.dtype)
  arrays = dout_BLHC, dcolumn_BL, residuals
  return *OP.run('backward', chosen, *arrays, causal=causal), None


# Symbolic, to know the scores' gradient for zero.
_route_scores.defvjp(_forward_of_primals, _backward, symbolic_zeros=True)


def _share(q_BLHC, mask, causal):
  """Returns what one query and head weighs in the mean: [B, 1] or a number."""
  _, length, heads, _ = q_BLHC.shape
  if mask is None:
    return 1 / (heads * length)
  if mask.ndim == 3:
    # Only queries that see a key take part in the mean.
    mask = reference.seen(mask, causal, length).any(axis=-1)
  return 1 / (heads * jnp.maximum(mask.sum(axis=-1, keepdims=True), 1))
