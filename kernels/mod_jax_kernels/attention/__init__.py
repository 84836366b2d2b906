"""Softmax attention: in plain XLA, or by flash attention from libraries.

cuDNN on GPUs and splash on TPUs have their own gradients and residuals. Odd
lengths must be padded for cuDNN: for the shorter ones in bfloat16, GPUs run the
kernels of `route_scores` without their scores. `jax.lax.platform_dependent`
would keep the residuals of all backends, so the backend is chosen when a
program is traced: the first that suits the process.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.attention import choice, reference

Implementation = Literal['xla', 'cudnn', 'splash', 'triton']
# Checkpoint name of the residuals of `splash`. A `jax.checkpoint` policy should
# save them; otherwise the backward pass runs the forward kernel again.
RESIDUALS = 'attention_residuals'
_HERE = 'mod_jax_kernels.attention'
OP = dispatch.Op(
  dispatch.Backend(
    name='triton',
    module=f'{_HERE}.triton_gpu',
    platform='cuda',
    lacks=choice.triton_lacks,
    suits=choice.triton_suits,
  ),
  dispatch.Backend(
    name='cudnn',
    module=f'{_HERE}.cudnn',
    platform='cuda',
    lacks=choice.cudnn_lacks,
    suits=choice.cudnn_suits,
  ),
  dispatch.Backend(
    name='splash',
    module=f'{_HERE}.pallas_tpu',
    platform='tpu',
    lacks=choice.splash_lacks,
    suits=choice.splash_suits,
  ),
  dispatch.Backend(name='xla', module=reference),
)


def attention(
  q_BQHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask_BQS: jax.Array | None = None,
  *,
  causal: bool = False,
  segment_BL: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns softmax(q·kᵀ/√C)·v for each head, in the dtype of q.

  Args:
    q_BQHC: queries of H heads.
    k_BSGC: keys of G heads; G divides H, and each serves H/G query heads.
    v_BSGC: values.
    mask_BQS: True where a query may see a key; batch and queries may be 1, to
      broadcast. A query that may see no key gets finite, meaningless numbers.
    causal: whether slot i sees slots 0..i only; needs Q = S.
    segment_BL: integers; queries see only keys of their own segment, such as a
      packed document. Needs Q = S.
    implementation: `xla`; `cudnn` (GPU; 16-bit floats); `triton` (GPU; no mask
      and no segments, H = G and Q = S); `splash` (TPU; no mask_BQS, bfloat16 or
      float32); or None to choose by the platform of the process that traces. On
      a GPU None is `cudnn`, or `triton` for bfloat16 of odd lengths below 1024;
      on a TPU `splash`; but `xla` if these do not support the arrays or are
      slow for them. To lower a program for another platform, name the backend.
      Under a mesh of several devices, None is `xla` outside of `shard_map`: the
      compiler cannot shard `splash`, and `cudnn` only if q, k and v are sharded
      alike.

  Raises:
    ValueError: shapes do not match; the requested backend is unknown or does
      not support the arrays.
    RuntimeError: the requested backend does not run on this platform: raised in
      tracing for `cudnn`, in lowering for `splash` and `triton`.
  """
  batch, queries, heads, channels = q_BQHC.shape
  keys, groups = k_BSGC.shape[1:3]
  if (
    k_BSGC.shape != v_BSGC.shape
    or k_BSGC.shape[::3] != (batch, channels)
    or heads % groups
  ):
    raise ValueError(
      f'q {q_BQHC.shape}, k {k_BSGC.shape}, v {v_BSGC.shape}: expected k and v'
      ' of one shape, the batch and the channels of q, and a number of heads'
      ' that theirs divides.'
    )
  if mask_BQS is not None and (
    mask_BQS.dtype != bool
    or mask_BQS.ndim != 3
    or mask_BQS.shape[0] not in (1, batch)
    or mask_BQS.shape[1] not in (1, queries)
    or mask_BQS.shape[2] != keys
  ):
    raise ValueError(
      f'mask {mask_BQS.dtype}{list(mask_BQS.shape)}: expected booleans'
      f' [{batch}, {queries}, {keys}], True where a query may see a key; the'
      ' first two may be 1.'
    )
  if causal and queries != keys:
    raise ValueError(
      f'causal=True needs as many queries as keys, got {queries} and {keys}:'
      ' pass a mask instead.'
    )
  if segment_BL is not None and (
    segment_BL.shape != q_BQHC.shape[:2]
    or segment_BL.shape != k_BSGC.shape[:2]
    or not jnp.issubdtype(segment_BL.dtype, jnp.integer)
  ):
    raise ValueError(
      f'segment {segment_BL.dtype}{list(segment_BL.shape)}, q {q_BQHC.shape}, k'
      f' {k_BSGC.shape}: expected an integer for each query, and as many'
      ' queries as keys.'
    )
  if not queries or not keys:
    return jnp.zeros_like(q_BQHC)
  arrays = q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL
  chosen, *_ = OP.choose(implementation, *arrays)
  return OP.run('attention', (chosen,), *arrays, causal=causal)
