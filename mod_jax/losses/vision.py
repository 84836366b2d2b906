"""Losses of image classification and of token pruning."""

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses.sums import Pair, weighted_sum


def classification_loss(
  logits_BV: jax.Array,
  target_BV: jax.Array,
  weight_B: jax.Array | None = None,
  class_weight_V: jax.Array | None = None,
) -> Pair:
  """Returns the summed cross-entropy in nats, and the number of images.

  `target_BV` are probabilities of the classes: one-hot, smoothed or mixed.
  `weight_B` is 0 for images that only pad a batch. With `class_weight_V`, an
  image has the weight of its class, so that the quotient is a weighted mean, as
  in PyTorch's `CrossEntropyLoss` for targets that are not smoothed.
  """
  target_BV = target_BV.astype(jnp.float32)
  if class_weight_V is not None:
    target_BV = target_BV * class_weight_V
  nats_B = optax.softmax_cross_entropy(logits_BV.astype(jnp.float32), target_BV)
  total, count = weighted_sum(nats_B, weight_B)
  if class_weight_V is not None:
    count, _ = weighted_sum(target_BV.sum(axis=-1), weight_B)
  return total, count


def multi_label_loss(
  logits_BV: jax.Array,
  target_BV: jax.Array,
  weight_B: jax.Array | None = None,
  class_weight_V: jax.Array | None = None,
) -> Pair:
  """Returns the summed binary cross-entropy in nats, and the number of images.

  An image's cross-entropy is the mean over its labels. `target_BV` are the
  probabilities that the labels are true. `class_weight_V` are factors on the
  terms of true labels, as the `pos_weight` of PyTorch's `BCEWithLogitsLoss`.
  """
  logits_BV = logits_BV.astype(jnp.float32)
  true_BV = target_BV * jax.nn.log_sigmoid(logits_BV)
  if class_weight_V is not None:
    true_BV *= class_weight_V
  false_BV = (1 - target_BV) * jax.nn.log_sigmoid(-logits_BV)
  return weighted_sum(-jnp.mean(true_BV + false_BV, axis=-1), weight_B)


def top_k_accuracy(
  logits_BV: jax.Array,
  label_B: jax.Array,
  k: int,
  weight_B: jax.Array | None = None,
) -> Pair:
  """Returns the number of images that are right, and of all images.

  An image is right if its class is among the k likeliest. Of classes that tie,
  the lower index counts as likelier, so that constant logits score no better
  than chance.
  """
  label_logit_B1 = jnp.take_along_axis(logits_BV, label_B[:, None], axis=-1)
  is_lower_BV = jnp.arange(logits_BV.shape[-1]) < label_B[:, None]
  is_better_BV = (logits_BV > label_logit_B1) | (
    (logits_BV == label_logit_B1) & is_lower_BV
  )
  # Comparisons with NaN are False, but a NaN must not count as correct.
  is_correct_B = (is_better_BV.sum(axis=-1) < k) & ~jnp.isnan(
    label_logit_B1[:, 0]
  )
  return weighted_sum(is_correct_B.astype(jnp.float32), weight_B)


def logit_distillation(
  logits_BV: jax.Array, teacher_BV: jax.Array, weight_B: jax.Array | None = None
) -> Pair:
  """Returns the summed KL(teacher ‖ student) in nats, and the summed weights.

  The logits are of images, or of tokens [B, L, V]. The teacher's logits get no
  gradient.
  """
  teacher_BV = jax.lax.stop_gradient(teacher_BV).astype(jnp.float32)
  teacher_BV = jax.nn.log_softmax(teacher_BV)
  student_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
  nats_B = jnp.sum(jnp.exp(teacher_BV) * (teacher_BV - student_BV), axis=-1)
  return weighted_sum(nats_B, weight_B)


def token_distillation(
  features_BND: jax.Array, teacher_BND: jax.Array, keep_BN: jax.Array
) -> Pair:
  """Returns the summed squared error of kept patches, and their number.

  Rao et al. 2021, section 3.4, Eq. 13 as published: the quotient is the mean
  over kept patches and channels. `features_BND` and `teacher_BND` are patches
  after the last norm. `keep_BN` is 1 for kept patches. Neither the teacher nor
  the decision to keep a patch gets a gradient.
  """
  keep_BN = jax.lax.stop_gradient(keep_BN)
  teacher_BND = jax.lax.stop_gradient(teacher_BND)
  difference_BND = features_BND.astype(jnp.float32) - teacher_BND
  distance_BN = jnp.mean(jnp.square(difference_BND), axis=-1)
  return jnp.sum(distance_BN * keep_BN), jnp.sum(keep_BN)


def ratio_loss(
  keep_SBN: jax.Array,
  targets: tuple[float, ...],
  weight_B: jax.Array | None = None,
) -> Pair:
  """Returns squared errors of the fractions kept, and the number of images.

  Rao et al. 2021, section 3.4, Eq. 15 as published: an image's error is the
  mean over stages. `keep_SBN` is 1 for patches that remain after a stage, and
  `targets` has the wanted fraction of all patches for each stage. `weight_B` is
  0 for images that only pad a batch; None if there are none.
  """
  kept_SB = keep_SBN.mean(axis=-1)
  error_SB = jnp.square(kept_SB - jnp.asarray(targets)[:, None])
  return weighted_sum(error_SB.mean(axis=0), weight_B)
