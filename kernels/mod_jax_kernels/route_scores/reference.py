"""Attention and its map's column sums in plain JAX: reference, CPU backend."""

import jax.numpy as jnp

# Log-sum-exp of a query that sees no key: it makes all its weights 0.
BLIND = 1e30


def forward(q_BLHC, k_BLHC, v_BLHC, mask, *, causal):
  """Returns out_BLHC, and in float32 column_BL and lse_BHL.

  `out` is the output of attention, with zeros for queries that see no key;
  `column` the sum of the attention map over heads and queries; and `lse` each
  query's log-sum-exp. The mask is None, valid_BL or mask_BQS.
  """
  # Put heads first: XLA then fuses the products with the softmax on CPUs.
  q_BHQC, k_BHSC, v_BHSC = map(_heads_first, (q_BLHC, k_BLHC, v_BLHC))
  visible_BQS = seen(mask, causal, q_BLHC.shape[1])
  logit_BHQS = _logits(q_BHQC, k_BHSC, visible_BQS)
  top_BHQ1 = logit_BHQS.max(axis=-1, keepdims=True)
  weight_BHQS = jnp.exp(logit_BHQS - top_BHQ1)
  total_BHQ1 = weight_BHQS.sum(axis=-1, keepdims=True)
  lse_BHQ1 = top_BHQ1 + jnp.log(total_BHQ1)
  # Divide the results instead of the map, which has more numbers.
  inverse_total_BHQ1 = 1 / total_BHQ1
  if mask is not None:
    sees_any_B1Q1 = visible_BQS.any(axis=-1)[:, None, :, None]
    lse_BHQ1 = jnp.where(sees_any_B1Q1, lse_BHQ1, BLIND)
    inverse_total_BHQ1 *= sees_any_B1Q1
  out_BHQC = jnp.einsum(
    'BHQS,BHSC->BHQC',
    weight_BHQS.astype(v_BLHC.dtype),
    v_BHSC,
    preferred_element_type=jnp.float32,
  )
  out_BHQC = (out_BHQC * inverse_total_BHQ1).astype(q_BLHC.dtype)
  # Use full precision: rounded factors would make nearby scores tie.
  column_BHS = jnp.einsum(
    'BHQS,BHQ->BHS',
    weight_BHQS,
    inverse_total_BHQ1[..., 0],
    precision='highest',
  )
  return _heads_first(out_BHQC), column_BHS.sum(axis=1), lse_BHQ1[..., 0]


def backward(dout_BLHC, dcolumn_BL, residuals, *, causal):
  """Returns the gradients of q, k and v.

  With P the attention map: `dP_ij = dO_i·v_j + dcolumn_j`,
  `dS_ij = P_ij (dP_ij - Σ_j P_ij dP_ij)`. P is recomputed from the log-sum-exp,
  which takes one more product but saves the memory of every layer's map.

  Args:
    dout_BLHC: gradient of `out_BLHC`.
    dcolumn_BL: gradient of `column_BL` in float32; None if it is zero.
    residuals: the arguments of `forward`, and its `out_BLHC` and `lse_BHL`.
    causal: see `forward`.
  """
  q_BLHC, k_BLHC, v_BLHC, mask, out_BLHC, lse_BHL = residuals
  logit_BHQS = _logits(
    *map(_heads_first, (q_BLHC, k_BLHC)), seen(mask, causal, q_BLHC.shape[1])
  )
  weight_BHQS = jnp.exp(logit_BHQS - lse_BHL[..., None])
  dv_BSHC = jnp.einsum(
    'BHQS,BQHC->BSHC',
    weight_BHQS.astype(dout_BLHC.dtype),
    dout_BLHC,
    preferred_element_type=jnp.float32,
  )
  dweight_BHQS = jnp.einsum(
    'BQHC,BSHC->BHQS', dout_BLHC, v_BLHC, preferred_element_type=jnp.float32
  )
  # Σ_j P_ij dO_i·v_j = dO_i·O_i, which needs no map.
  mean_BHQ = dot(dout_BLHC, out_BLHC)
  if dcolumn_BL is not None:
    dweight_BHQS += dcolumn_BL[:, None, None]
    mean_BHQ += jnp.einsum(
      'BHQS,BS->BHQ', weight_BHQS, dcolumn_BL, precision='highest'
    )
  dlogit_BHQS = weight_BHQS * (dweight_BHQS - mean_BHQ[..., None])
  dlogit_BHQS = (dlogit_BHQS * q_BLHC.shape[-1] ** -0.5).astype(q_BLHC.dtype)
  dq_BQHC = jnp.einsum(
    'BHQS,BSHC->BQHC', dlogit_BHQS, k_BLHC, preferred_element_type=jnp.float32
  )
  dk_BSHC = jnp.einsum(
    'BHQS,BQHC->BSHC', dlogit_BHQS, q_BLHC, preferred_element_type=jnp.float32
  )
  return (
    dq_BQHC.astype(q_BLHC.dtype),
    dk_BSHC.astype(k_BLHC.dtype),
    dv_BSHC.astype(v_BLHC.dtype),
  )


def seen(mask, causal, length):
  """Returns seen_BQS, True where a query sees a key; None if all are seen."""
  if mask is not None and mask.ndim == 2:
    mask = mask[:, :, None] & mask[:, None, :]
  if causal:
    earlier_QS = jnp.tri(length, dtype=bool)
    mask = earlier_QS[None] if mask is None else mask & earlier_QS
  return mask


def dot(x_BLHC, y_BLHC):
  """Returns dot products over channels, float32 [B, H, L]."""
  return jnp.einsum(
    'BLHC,BLHC->BHL',
    x_BLHC.astype(jnp.float32),
    y_BLHC.astype(jnp.float32),
    precision='highest',
  )


def _heads_first(x_BLHC):
  return jnp.swapaxes(x_BLHC, 1, 2)


def _logits(q_BHQC, k_BHSC, seen_BQS):
  logit_BHQS = jnp.einsum(
    'BHQC,BHSC->BHQS', q_BHQC, k_BHSC, preferred_element_type=jnp.float32
  )
  logit_BHQS *= q_BHQC.shape[-1] ** -0.5
  if seen_BQS is not None:
    # A finite number, so that queries without any key give no NaN.
    lowest = jnp.finfo(jnp.float32).min / 2
    logit_BHQS = jnp.where(seen_BQS[:, None], logit_BHQS, lowest)
  return logit_BHQS
