"""Losses of adaptive computation modules (Wójcik et al. 2023, section 3.2).

A module's gate chooses, for each token, how many of its learners run. `choices`
maps names of modules to these choices ν̂: one-hot `[batch, length, choices]`,
with straight-through gradients. A row is an image or a sequence. `valid_BL` is
False for padding and dropped tokens, which are ignored; it is None if all
tokens are valid. All valid tokens have equal weight. Modules may see different
tokens, so `valid` maps names of modules to `valid_BL`; it is None if all tokens
of all modules are valid. h(z, k) is the sum of the first k learners' outputs.
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses.sums import Pair

# `valid_BL` of each module, by name.
Valid = Mapping[str, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Learners:
  """The learners of a module, as the losses see them.

  Attributes:
    min: smallest number of learners that the gate may choose.
    max: N, the largest number.
    cost: cost of one learner on one token.
  """

  min: int
  max: int
  cost: float


def distillation(
  sums_KBLD: jax.Array,
  target_BLD: jax.Array,
  valid_BL: jax.Array | None = None,
) -> Pair:
  """Returns the squared error of h(z, k), averaged over k: Eq. 3.

  `sums_KBLD` is h(z, k) for k = 0, …, N; k = 0 has no learner and is ignored.
  `target_BLD` is the output of the dense module, and gets no gradient.

  Returns:
    A total and a weight: the sum over rows of the mean over k, tokens and
    features, and the number of rows. A row counts as the fraction of its tokens
    that are valid.
  """
  target_BLD = jax.lax.stop_gradient(target_BLD).astype(jnp.float32)
  error_NBLD = jnp.square(sums_KBLD[1:].astype(jnp.float32) - target_BLD)
  if valid_BL is not None:
    error_NBLD = jnp.where(valid_BL[..., None], error_NBLD, 0)
  mean_B = error_NBLD.mean(axis=(0, 2, 3))
  return mean_B.sum(), _count_rows(mean_B, valid_BL)


def row_weights(valid_BL: jax.Array | None) -> jax.Array | None:
  """Returns each row's fraction of valid tokens; None if `valid_BL` is None."""
  if valid_BL is None:
    return None
  return valid_BL.mean(axis=-1, dtype=jnp.float32)


def _count_rows(x_B, valid_BL):
  if valid_BL is None:
    return jnp.float32(len(x_B))
  return row_weights(valid_BL).sum()


def distances(sums_KBLD: jax.Array, target_BLD: jax.Array) -> jax.Array:
  """Returns distance_KBL: the norm ‖h(z, k) - target‖₂ over features, Eq. 4.

  It is not squared, because `gate_labels` compares the ratio of norms with τ.
  """
  return jnp.linalg.norm(sums_KBLD.astype(jnp.float32) - target_BLD, axis=-1)


def gate_labels(distance_KBL: jax.Array, tau: float) -> jax.Array:
  """Returns label_BL: the smallest n >= 2 such that learner n gains little.

  `min{ n in 2..N : d(n-1) / d(n) < τ }`, or N if there is none: Eq. 5, where
  the printed ratio is inverted. Labels are never 0 or 1, except for N < 2.
  `distance_KBL` is d(k) for k = 0, …, N, from `distances`, and τ > 1.
  """
  num_learners = distance_KBL.shape[0] - 1
  if num_learners < 2:
    return jnp.full(distance_KBL.shape[1:], num_learners, jnp.int32)
  # Compare products instead of ratios, because d(n) may be 0. In that case
  # learner n is worth its cost, unless d(n-1) is 0 as well.
  previous_NBL, current_NBL = distance_KBL[1:-1], distance_KBL[2:]
  small_NBL = (previous_NBL < tau * current_NBL) | (previous_NBL == 0)
  first_BL = jnp.argmax(small_NBL, axis=0)
  label_BL = jnp.where(small_NBL.any(axis=0), first_BL + 2, num_learners)
  return label_BL.astype(jnp.int32)


def gate_loss(
  logits_BLM: jax.Array,
  label_BL: jax.Array,
  min_learners: int,
  temperature: float,
  valid_BL: jax.Array | None = None,
) -> Pair:
  """Returns the cross-entropy of soft choices ν against labels: Eq. 6.

  ν is the softmax of the logits divided by `temperature`. The choices are
  `min_learners`, …, N; smaller labels count as `min_learners`.

  Returns:
    A total and a weight: the sum over rows of the mean over tokens, in nats,
    and the number of rows, counted as in `distillation`.
  """
  nats_BL = optax.softmax_cross_entropy_with_integer_labels(
    logits_BLM / temperature, jnp.maximum(label_BL - min_learners, 0)
  )
  if valid_BL is not None:
    nats_BL = jnp.where(valid_BL, nats_BL, 0)
  return nats_BL.mean(axis=-1).sum(), _count_rows(label_BL, valid_BL)


def _of(valid, name):
  return None if valid is None else valid[name]


def load_per_image(
  choices: Mapping[str, jax.Array],
  modules: Mapping[str, Learners],
  valid: Valid | None = None,
) -> jax.Array:
  """Returns load_B: the cost of the learners that each row runs.

  It is a fraction of the cost of all learners. Only valid tokens count; rows
  without any have load 0.
  """
  cost_B, total_cost = 0.0, 0.0
  for name, one_hot_BLM in choices.items():
    module, valid_BL = modules[name], _of(valid, name)
    count_M = jnp.arange(module.min, module.max + 1, dtype=jnp.float32)
    learners_BL = one_hot_BLM.astype(jnp.float32) @ count_M
    cost_B += module.cost * learners_BL.sum(axis=-1, where=valid_BL)
    if valid_BL is None:
      tokens = learners_BL.shape[-1]
    else:
      tokens = valid_BL.sum(axis=-1)
    total_cost += module.cost * module.max * tokens
  return cost_B / jnp.where(total_cost > 0, total_cost, 1)


def learners_per_image(
  choices: Mapping[str, jax.Array],
  modules: Mapping[str, Learners],
  valid: Valid | None = None,
) -> jax.Array:
  """Returns each row's fraction of learners that run, whatever their cost."""
  equal = {
    name: dataclasses.replace(m, cost=1.0) for name, m in modules.items()
  }
  return load_per_image(choices, equal, valid)


def budget_loss(
  load_B: jax.Array, budget: float, weight_B: jax.Array | None = None
) -> jax.Array:
  """Returns `|mean load - β|`, Eq. 7.

  The mean is over the batch, so that a row's load may differ from β, the
  budget. `load_B` is from `load_per_image`, and `weight_B` from `row_weights`.
  """
  return jnp.abs(jnp.average(load_B, weights=weight_B) - budget)


def entropy_loss(
  choices: Mapping[str, jax.Array], valid: Valid | None = None
) -> jax.Array:
  """Returns the negative entropy of the mean choice of a row's tokens: Eq. 8.

  Each module's entropy is divided by the log of its number of choices. The
  result is the mean over modules and rows. Minimising it makes the tokens of a
  row differ in their choices.
  """
  total = jnp.float32(0.0)
  for name, one_hot_BLM in choices.items():
    if one_hot_BLM.shape[-1] == 1:
      continue  # log 1 = 0: there is no choice.
    valid_BL, where_BL1 = _of(valid, name), None
    weight_B = row_weights(valid_BL)
    if valid_BL is not None:
      # A row of padding only would have a NaN mean: average over all its tokens
      # instead. Its weight is 0.
      where_BL1 = (valid_BL | ~valid_BL.any(axis=-1, keepdims=True))[..., None]
    mean_BM = one_hot_BLM.astype(jnp.float32).mean(axis=1, where=where_BL1)
    # The constant bounds the gradient for choices that are never made.
    nats_B = -jnp.sum(mean_BM * jnp.log(mean_BM + 1e-6), axis=-1)
    if weight_B is None:
      mean = nats_B.mean()
    else:  # The result is 0 for a module that no token reaches.
      mean = jnp.sum(nats_B * weight_B) / jnp.maximum(weight_B.sum(), 1e-9)
    total -= mean / jnp.log(one_hot_BLM.shape[-1])
  return total / len(choices)


def diversity_loss(
  fraction_B: jax.Array, weight_B: jax.Array | None = None
) -> jax.Array:
  """Returns the negative mean difference of two rows' computation: Eq. 10.

  The paper prints the opposite sign, which would make rows alike. `fraction_B`
  is from `learners_per_image`, since Eq. 10 counts learners whatever their
  cost, and `weight_B` from `row_weights`.
  """
  weight_BB = None if weight_B is None else jnp.outer(weight_B, weight_B)
  return -jnp.average(
    jnp.abs(fraction_B[:, None] - fraction_B[None]), weights=weight_BB
  )
