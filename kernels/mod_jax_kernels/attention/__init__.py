"""Softmax attention: plain XLA anywhere, cuDNN's flash attention on GPUs."""

from typing import Literal

import jax

from mod_jax_kernels.attention import reference

Implementation = Literal['xla', 'cudnn']


def attention(
  q_BQHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask_BQS: jax.Array | None = None,
  *,
  causal: bool = False,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns softmax(q·kᵀ/√C)·v for each head, in the dtype of q.

  Args:
    q_BQHC: queries of H heads.
    k_BSGC: keys of G heads; G divides H, and each serves H/G query heads.
    v_BSGC: values.
    mask_BQS: True where a query may see a key. A query that may see no key
      gets finite, meaningless numbers.
    causal: whether slot i sees slots 0..i only; needs Q = S.
    implementation: `xla`, `cudnn` (GPU, 16-bit floats), or None for XLA.

  Raises:
    ValueError: shapes that do not fit; a backend that was asked for by name
      and cannot run.
  """
  heads, groups = q_BQHC.shape[2], k_BSGC.shape[2]
  if k_BSGC.shape != v_BSGC.shape or heads % groups:
    raise ValueError(
      f'q {q_BQHC.shape}, k {k_BSGC.shape}, v {v_BSGC.shape}: expected k and v'
      ' of one shape, and a number of heads that theirs divides.'
    )
  if causal and q_BQHC.shape[1] != k_BSGC.shape[1]:
    raise ValueError(
      f'causal=True needs as many queries as keys, got {q_BQHC.shape[1]} and'
      f' {k_BSGC.shape[1]}: pass a mask instead.'
    )
  match implementation:
    case None | 'xla':
      return reference.attention(q_BQHC, k_BSGC, v_BSGC, mask_BQS, causal)
    case 'cudnn':
      return jax.nn.dot_product_attention(
        q_BQHC,
        k_BSGC,
        v_BSGC,
        mask=None if mask_BQS is None else mask_BQS[:, None],
        is_causal=causal,
        implementation='cudnn',
      )
  raise ValueError(
    f"implementation={implementation!r}: expected 'xla', 'cudnn' or None."
  )
