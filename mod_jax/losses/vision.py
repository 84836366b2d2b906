"""Losses of image classification and of token pruning."""

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses.sums import Pair, weighted_sum


def classification_loss(
  logits_BV: jax.Array, target_BV: jax.Array, weight_B: jax.Array | None = None
) -> Pair:
  """Returns the summed cross-entropy in nats, and the number of images.

  Args:
    logits_BV: unnormalised log-probabilities.
    target_BV: probabilities of the classes: one-hot, smoothed or mixed.
    weight_B: 0 for images that only pad a batch.
  """
  nats_B = optax.softmax_cross_entropy(
    logits_BV.astype(jnp.float32), target_BV.astype(jnp.float32)
  )
  return weighted_sum(nats_B, weight_B)


def top_k_accuracy(
  logits_BV: jax.Array,
  label_B: jax.Array,
  k: int,
  weight_B: jax.Array | None = None,
) -> Pair:
  """Returns how many images have their class among the k likeliest.

  The class counts as likelier than those it ties with only where its number is
  lower, so that constant logits score no better than chance.
  """
  own_B1 = jnp.take_along_axis(logits_BV, label_B[:, None], axis=-1)
  lower_BV = jnp.arange(logits_BV.shape[-1]) < label_B[:, None]
  before_BV = (logits_BV > own_B1) | ((logits_BV == own_B1) & lower_BV)
  # No class counts as likelier than a NaN, yet a NaN is never right.
  right_B = (before_BV.sum(axis=-1) < k) & ~jnp.isnan(own_B1[:, 0])
  return weighted_sum(right_B.astype(jnp.float32), weight_B)


def logit_distillation(
  logits_BV: jax.Array, teacher_BV: jax.Array, weight_B: jax.Array | None = None
) -> Pair:
  """Returns KL(teacher ‖ student) in nats, summed, and the sum of the weights.

  Args:
    logits_BV: the student's; of texts [B, L, V].
    teacher_BV: the teacher's, which get no gradient.
    weight_B: how much each image, or token, counts; None for 1.
  """
  teacher_BV = jax.lax.stop_gradient(teacher_BV).astype(jnp.float32)
  teacher_BV = jax.nn.log_softmax(teacher_BV)
  student_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
  nats_B = jnp.sum(jnp.exp(teacher_BV) * (teacher_BV - student_BV), axis=-1)
  return weighted_sum(nats_B, weight_B)


def token_distillation(
  features_BND: jax.Array, teacher_BND: jax.Array, keep_BN: jax.Array
) -> Pair:
  """Returns squared distances of kept patches to the teacher's, and a count.

  Rao et al. 2021, section 3.4, Eq. 13 as published: a mean over kept patches
  and channels. No gradient passes to the decision of what is kept.

  Args:
    features_BND: the student's patches after its last norm.
    teacher_BND: the teacher's.
    keep_BN: 1 for patches that are left.

  Returns:
    (sum over kept patches of the mean over channels, number kept).
  """
  keep_BN = jax.lax.stop_gradient(keep_BN)
  teacher_BND = jax.lax.stop_gradient(teacher_BND)
  difference_BND = features_BND.astype(jnp.float32) - teacher_BND
  distance_BN = jnp.mean(jnp.square(difference_BND), axis=-1)
  return jnp.sum(distance_BN * keep_BN), jnp.sum(keep_BN)


def ratio_loss(keep_SBN: jax.Array, targets: tuple[float, ...]) -> Pair:
  """Returns squared errors of the fractions kept, and the number of images.

  Rao et al. 2021, section 3.4, Eq. 15 as published: for each image, the mean
  over stages.

  Args:
    keep_SBN: decisions after each stage; gradients pass.
    targets: the fraction of all patches that each stage is to leave.
  """
  kept_SB = keep_SBN.mean(axis=-1)
  error_SB = jnp.square(kept_SB - jnp.asarray(targets)[:, None])
  return weighted_sum(error_SB.mean(axis=0))
