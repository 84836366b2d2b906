"""Attention that also tells how much attention each token received."""

import functools
from typing import Literal

import jax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.route_scores import reference

Implementation = Literal['xla', 'pallas', 'triton']

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
  if not q_BLHC.shape == k_BLHC.shape == v_BLHC.shape or q_BLHC.ndim != 4:
    raise ValueError(
      f'q {q_BLHC.shape}, k {k_BLHC.shape}, v {v_BLHC.shape}: expected one'
      ' shape [batch, tokens, heads, channels] for all three.'
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
  dispatch.check(implementation, ('xla', *dispatch.PLATFORMS))
  refused = _refused(q_BLHC, k_BLHC, v_BLHC, mask)
  if refused is not None and implementation in dispatch.PLATFORMS:
    raise ValueError(
      f"implementation={implementation!r} takes no {refused} use None or 'xla'."
    )
  if refused is not None:
    implementation = 'xla'
  return _route_scores(q_BLHC, k_BLHC, v_BLHC, mask, causal, implementation)


def _refused(q_BLHC, k_BLHC, v_BLHC, mask) -> str | None:
  """Returns what of the arguments no kernel takes, or None."""
  if mask is not None and mask.ndim == 3:
    return 'mask of queries and keys: pass one of tokens, or causal=True, or'
  if q_BLHC.shape[-1] > _WIDEST:
    return f'heads of {q_BLHC.shape[-1]} channels, {_WIDEST} at most:'
  dtypes = [str(x.dtype) for x in (q_BLHC, k_BLHC, v_BLHC)]
  if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES:
    return (
      f'q, k and v of {", ".join(dtypes)}: cast them to one of'
      f' {", ".join(_DTYPES)}, or'
    )
  if not q_BLHC.size:
    return f'empty arrays {q_BLHC.shape}:'
  return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _route_scores(q_BLHC, k_BLHC, v_BLHC, mask, causal, implementation):
  results, _ = _forward(q_BLHC, k_BLHC, v_BLHC, mask, causal, implementation)
  return results


def _forward(q_BLHC, k_BLHC, v_BLHC, mask, causal, implementation):
  arrays = q_BLHC, k_BLHC, v_BLHC, mask
  out_BLHC, column_BL, lse_BHL = dispatch.run(
    implementation,
    {
      'xla': functools.partial(reference.forward, causal=causal),
      'pallas': functools.partial(_pallas_forward, causal=causal),
      'triton': functools.partial(_triton_forward, causal=causal),
    },
    *arrays,
  )
  # They add up to H times the queries that see a key, but for rounding, which
  # is large where logits are.
  total_B1 = column_BL.sum(axis=-1, keepdims=True)
  score_BL = column_BL / jnp.where(total_B1 > 0, total_B1, 1)
  return (out_BLHC, score_BL), (*arrays, out_BLHC, lse_BHL)


def _forward_of_primals(q_BLHC, k_BLHC, v_BLHC, mask, causal, implementation):
  # What JAX says of each: its value, and whether a gradient is wanted.
  values = jax.tree.map(
    lambda x: x.value,
    (q_BLHC, k_BLHC, v_BLHC, mask),
    is_leaf=lambda x: hasattr(x, 'perturbed'),
  )
  return _forward(*values, causal, implementation)


def _backward(causal, implementation, residuals, gradients):
  q_BLHC, _, _, mask, *_ = residuals
  dout_BLHC, dscore_BL = gradients
  # Scores that only rank tokens have no gradient, and save the kernels a pass.
  dcolumn_BL = None
  if not isinstance(dscore_BL, SymbolicZero):
    dcolumn_BL = dscore_BL * _share(q_BLHC, mask, causal)
  if isinstance(dout_BLHC, SymbolicZero):
    dout_BLHC = jnp.zeros(dout_BLHC.shape, dout_BLHC.dtype)
  dq_BLHC, dk_BLHC, dv_BLHC = dispatch.run(
    implementation,
    {
      'xla': functools.partial(reference.backward, causal=causal),
      'pallas': functools.partial(_pallas_backward, causal=causal),
      'triton': functools.partial(_triton_backward, causal=causal),
    },
    *residuals,
    dout_BLHC,
    dcolumn_BL,
  )
  return dq_BLHC, dk_BLHC, dv_BLHC, None


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


@dispatch.jit(static_argnames='causal')
def _pallas_forward(*arrays, causal):
  from mod_jax_kernels.route_scores import pallas_tpu

  return pallas_tpu.forward(*arrays, causal=causal)


@dispatch.jit(static_argnames='causal')
def _pallas_backward(*arrays, causal):
  from mod_jax_kernels.route_scores import pallas_tpu

  return pallas_tpu.backward(*arrays, causal=causal)


# Imported where it is meant only, for Triton is not installed everywhere.
@dispatch.jit(static_argnames='causal')
def _triton_forward(*arrays, causal):
  from mod_jax_kernels.route_scores import triton_gpu

  return triton_gpu.forward(*arrays, causal=causal)


@dispatch.jit(static_argnames='causal')
def _triton_backward(*arrays, causal):
  from mod_jax_kernels.route_scores import triton_gpu

  return triton_gpu.backward(*arrays, causal=causal)
