"""The attention of cuDNN, NVIDIA's library, which JAX calls."""

import jax
import jax.numpy as jnp

from mod_jax_kernels.attention import choice, reference


def attention(q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL, *, causal):
  """See `mod_jax_kernels.attention`.

  Odd lengths get one more token, which no other sees: JAX refuses the gradient
  of cuDNN's attention for them. For those with a mask cuDNN has none, and for
  others JAX takes them for masked ones (0.11.2).
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
    elif not causal:  # Causal attention hides what comes last anyway.
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
