"""The attention of cuDNN, NVIDIA's library, which JAX calls."""

import jax
import jax.numpy as jnp

from mod_jax_kernels.attention import choice, reference


def attention(q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL, *, causal):
  """See `mod_jax_kernels.attention`.

  Odd lengths are padded by one token, which no other token sees, since JAX
  (0.11.2) refuses the gradient of cuDNN's attention for odd lengths: cuDNN has
  none for odd lengths with a mask, and JAX treats all odd lengths as masked.
  """
  if (platform := choice.platform()) != 'cuda':
    raise RuntimeError(
      "implementation='cudnn' needs an NVIDIA GPU with cuDNN where it is"
      f" traced, and this process runs on {platform}: use None or 'xla'."
    )
  lengths = q_BQHC.shape[1], k_BSGC.shape[1]
  mask_BQS = reference.seen(mask_BQS, segment_BL, lengths[0])
  more_q, more_k = (length % 2 for length in lengths)
  settings = {}
  if more_q or more_k:
    q_BQHC, k_BSGC, v_BSGC = (
      jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
      for x, more in ((q_BQHC, more_q), (k_BSGC, more_k), (v_BSGC, more_k))
    )
    if mask_BQS is not None:
      mask_BQS = jnp.pad(mask_BQS, ((0, 0), (0, more_q), (0, more_k)))
    elif not causal:  # A causal mask already hides the last token from others.
      for name, length in zip(('query', 'key_value'), lengths, strict=True):
        settings[f'{name}_seq_lengths'] = jnp.full(
          len(q_BQHC), length, jnp.int32
        )
  out_BQHC = jax.nn.dot_product_attention(
    q_BQHC,
    k_BSGC,
    v_BSGC,
    mask=None if mask_BQS is None else mask_BQS[:, None],
    is_causal=causal,
    implementation='cudnn',
    **settings,
  )
  return out_BQHC[:, : lengths[0]]
