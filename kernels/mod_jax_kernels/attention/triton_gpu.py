"""Attention by the kernels of `route_scores`, without their scores."""

from mod_jax_kernels.route_scores import route_scores


def attention(q_BLHC, k_BLHC, v_BLHC, mask_BQS, segment_BL, *, causal):
  """See `mod_jax_kernels.attention`; takes no mask and no segments."""
  del mask_BQS, segment_BL  # None, see `choice.triton_lacks`.
  # XLA drops the pass that computes scores, since nothing uses them.
  return route_scores(
    q_BLHC, k_BLHC, v_BLHC, implementation='triton', causal=causal
  )[0]
