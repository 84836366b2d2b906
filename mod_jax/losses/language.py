"""The language-model loss, from logits or from features and the head."""

import functools

import jax
import jax.numpy as jnp
import optax

from mod_jax import parallel
from mod_jax.losses.sums import Pair

# `head_loss` processes chunks with 4M logits, the fastest on a CPU, but at
# least 2,048 tokens: each chunk reads and writes the kernel's whole gradient,
# which only that many tokens amortise on accelerators. With a vocabulary of
# 32,768 and 1,024 features, chunks of half as many tokens took 1.16 times as
# long on an H100, of twice as many .98 times (`results/h100/head_chunks.json`).
_LOGITS, _TOKENS = 2**22, 2048


def next_token_loss(
  logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array
) -> Pair:
  """Returns the weighted cross-entropy in nats, and the sum of the weights."""
  nats_BL = optax.softmax_cross_entropy_with_integer_labels(
    logits_BLV.astype(jnp.float32), targets_BL
  )
  return jnp.sum(nats_BL * weights_BL), jnp.sum(weights_BL)


def head_loss(
  x_BLD: jax.Array,
  kernel_DV: jax.Array,
  targets_BL: jax.Array,
  weights_BL: jax.Array,
  *,
  chunk: int | None = None,
) -> Pair:
  """Returns `next_token_loss` of the logits x · kernel, computed in chunks.

  All logits together would be the largest array of a training step. Each chunk
  of tokens computes its part of the gradients along with its logits, hence no
  product is computed twice (as in the fused loss of Hsu et al. 2024, Liger
  Kernel). Tokens and vocabulary may be sharded. Factors of products have the
  dtype of x; sums are float32. `chunk` is the number of tokens per chunk on
  each device; None chooses it by `_LOGITS` and `_TOKENS`.
  """
  total = _head_loss(chunk, x_BLD, kernel_DV, targets_BL, weights_BL)
  return total, jnp.sum(weights_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_loss(chunk, *args):
  nats_BL, *_ = _per_device(chunk, 'none', *args)
  return jnp.sum(nats_BL * args[-1])


def _forward(chunk, *args):
  needs = 'both' if args[1].perturbed else 'features'
  args = [arg.value for arg in args]
  nats_BL, dx_BLD, *dkernel = _per_device(chunk, needs, *args)
  # Reduce over devices once, directly into the kernel's sharding.
  dkernel = [
    parallel.constrain(dkernel_NDV.sum(axis=0), 'embed', 'vocab')
    for dkernel_NDV in dkernel
  ]
  total = jnp.sum(nats_BL * args[-1])
  return total, (dx_BLD, dkernel, nats_BL)


def _backward(chunk, gradients, dtotal):
  del chunk
  dx_BLD, dkernel, nats_BL = gradients
  dx_BLD = (dtotal * dx_BLD.astype(jnp.float32)).astype(dx_BLD.dtype)
  dkernel_DV = dtotal * dkernel[0] if dkernel else None
  return dx_BLD, dkernel_DV, None, dtotal * nats_BL


# By symbolic zeros, `_forward` knows whether the kernel is frozen.
_head_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _per_device(chunk, needs, x_BLD, kernel_DV, targets_BL, weights_BL):
  """Returns nats_BL and, optionally, gradients of their weighted sum.

  With the `needs` 'none', there are no gradients. With 'features', dx_BLD
  follows. With 'both', dx_BLD and dkernel_NDV follow; the latter has the part
  of each of the N devices among which the batch is split.
  """
  token_axes = ('batch', 'length')
  feature_axes = (*token_axes, 'act_embed')
  kernel_axes = ('act_embed', 'act_vocab')
  gradient_axes = {
    'none': (),
    'features': (feature_axes,),
    'both': (feature_axes, ('batch', *kernel_axes)),
  }[needs]
  return parallel.per_device(
    functools.partial(_chunked, chunk, needs),
    (feature_axes, kernel_axes, token_axes, token_axes),
    (token_axes, *gradient_axes),
  )(x_BLD, kernel_DV.astype(x_BLD.dtype), targets_BL, weights_BL)


def _chunked(chunk, needs, x_BLD, kernel_DV, targets_BL, weights_BL):
  """Does the work of `_per_device` on one device's tokens and vocabulary."""
  tokens, vocab = targets_BL.size, kernel_DV.shape[1]
  size = min(chunk or max(_LOGITS // vocab, _TOKENS), tokens)
  size = -(-tokens // -(-tokens // size))  # Equalise the chunks.
  # The first token id of this device's part of the vocabulary.
  first = vocab * parallel.index_of('act_vocab')

  def split(x_BL):
    x_T = x_BL.reshape(tokens, *x_BL.shape[2:])
    # Padding of the last chunk gets weight 0.
    widths = ((0, -tokens % size), *((0, 0) for _ in x_T.shape[1:]))
    return jnp.pad(x_T, widths).reshape(-1, size, *x_T.shape[1:])

  def join(x_CK):
    x_T = x_CK.reshape(-1, *x_CK.shape[2:])[:tokens]
    return x_T.reshape(*targets_BL.shape, *x_T.shape[1:])

  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def step(dkernel_DV, inputs):
    x_KD, target_K, weight_K = inputs
    logit_KV = product('KD,DV->KV', x_KD, kernel_DV)
    top_K1 = parallel.max_over(logit_KV.max(-1, keepdims=True), 'act_vocab')
    exp_KV = jnp.exp(logit_KV - top_K1)
    total_K1 = exp_KV.sum(axis=-1, keepdims=True)
    total_K1 = parallel.sum_over(total_K1, 'act_vocab')
    target_K1 = target_K[:, None] - first
    target_logit_K1 = jnp.take_along_axis(
      logit_KV, target_K1, axis=-1, mode='clip'
    )
    is_local_K1 = (target_K1 >= 0) & (target_K1 < vocab)
    target_logit_K1 = parallel.sum_over(
      jnp.where(is_local_K1, target_logit_K1, 0), 'act_vocab'
    )
    nats_K = (jnp.log(total_K1) + top_K1 - target_logit_K1)[:, 0]
    if needs == 'none':
      return None, (nats_K,)
    is_target_KV = target_K1 == jnp.arange(vocab)
    dlogit_KV = weight_K[:, None] * (exp_KV / total_K1 - is_target_KV)
    # Without this cast, GPUs would multiply in TF32, at half the speed.
    dlogit_KV = dlogit_KV.astype(x_KD.dtype)
    dx_KD = product('KV,DV->KD', dlogit_KV, kernel_DV)
    if needs == 'both':
      dkernel_DV += product('KD,KV->DV', x_KD, dlogit_KV)
    return dkernel_DV, (nats_K, dx_KD)

  start = jnp.zeros(kernel_DV.shape, jnp.float32) if needs == 'both' else None
  dkernel_DV, outputs = jax.lax.scan(
    step, start, tuple(map(split, (x_BLD, targets_BL, weights_BL)))
  )
  nats_BL, *dx_BLD = map(join, outputs)
  if needs == 'none':
    return (nats_BL,)
  dx_BLD = parallel.sum_over(dx_BLD[0], 'act_vocab').astype(x_BLD.dtype)
  if needs == 'features':
    return nats_BL, dx_BLD
  return nats_BL, dx_BLD, dkernel_DV[None]
