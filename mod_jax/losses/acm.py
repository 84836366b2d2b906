"""Losses of adaptive computation modules (Wójcik et al. 2023, section 3.2).

Choices are a dictionary from a module's name to one-hot choices ν̂ of the number
of learners, with straight-through gradients, `[batch, length, choices]`. A row
is an image or a sequence. `valid_BL` is False for padding and for what was
dropped, which count for nothing, and None where all tokens count; every other
token counts the same. Modules may see different tokens: `valid` is a dictionary
from their names to the `valid_BL` of each, and None stands for None of all.
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses.sums import Pair

# See the module.
Valid = Mapping[str, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Learners:
  """What the losses need to know of a module.

  Attributes:
    min: the smallest number of learners that the gate chooses among.
    max: N, the largest.
    cost: of one learner on one token.
  """

  min: int
  max: int
  cost: float


def distillation(
  sums_KBLD: jax.Array,
  target_BLD: jax.Array,
  valid_BL: jax.Array | None = None,
) -> Pair:
  """Returns the squared error of h(z, k), averaged over all k at once: Eq. 3.

  Args:
    sums_KBLD: h(z, k) for k = 0, …, N; k = 0 has no learner and is left out.
    target_BLD: what the dense module returns; no gradient passes.
    valid_BL: see the module.

  Returns:
    (sum over rows of the mean over k, tokens and features; rows). A row that is
    partly padding counts for the part that is not.
  """
  target_BLD = jax.lax.stop_gradient(target_BLD).astype(jnp.float32)
  error_NBLD = jnp.square(sums_KBLD[1:].astype(jnp.float32) - target_BLD)
  if valid_BL is not None:
    error_NBLD = jnp.where(valid_BL[..., None], error_NBLD, 0)
  mean_B = error_NBLD.mean(axis=(0, 2, 3))
  return mean_B.sum(), _count_rows(mean_B, valid_BL)


def row_weights(valid_BL: jax.Array | None) -> jax.Array | None:
  """Returns weight_B: the fraction of each row that is not padding, or None."""
  if valid_BL is None:
    return None
  return valid_BL.mean(axis=-1, dtype=jnp.float32)


def _count_rows(x_B, valid_BL):
  if valid_BL is None:
    return jnp.float32(len(x_B))
  return row_weights(valid_BL).sum()


def distances(sums_KBLD: jax.Array, target_BLD: jax.Array) -> jax.Array:
  """Returns distance_KBL: the norm ‖h(z, k) - target‖₂ over features, Eq. 4.

  Not its square: what `gate_labels` compares with τ is a ratio of norms.
  """
  return jnp.linalg.norm(sums_KBLD.astype(jnp.float32) - target_BLD, axis=-1)


def gate_labels(distance_KBL: jax.Array, tau: float) -> jax.Array:
  """Returns label_BL: the least n >= 2 whose n-th learner gains little.

  `min{ n in 2..N : d(n-1) / d(n) < τ }`, and N if there is none. Eq. 5, whose
  ratio is printed upside down; labels are never 0 or 1.

  Args:
    distance_KBL: d(k) for k = 0, …, N, as of `distances`.
    tau: τ > 1.
  """
  num_learners = distance_KBL.shape[0] - 1
  if num_learners < 2:
    return jnp.full(distance_KBL.shape[1:], num_learners, jnp.int32)
  # A product in place of the quotient, because d(n) may be 0: then n is worth
  # it, unless d(n-1) is 0, which nothing improves.
  before_NBL, after_NBL = distance_KBL[1:-1], distance_KBL[2:]
  small_NBL = (before_NBL < tau * after_NBL) | (before_NBL == 0)
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
  """Returns cross-entropy of the soft choices ν against labels: Eq. 6.

  Args:
    logits_BLM: of the choices `min_learners`, …, N.
    label_BL: numbers of learners; those below `min_learners` count as it.
    min_learners: the smallest number to choose.
    temperature: of the softmax.
    valid_BL: see the module.

  Returns:
    (sum over rows of the mean over tokens, in nats; rows), padding as in
    `distillation`.
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
  """Returns load_B: the fraction of all learners' cost that a row takes.

  Of the tokens that reach each module; 0 for a row that is nothing but padding.
  """
  spent_B, whole = 0.0, 0.0
  for name, one_hot_BLM in choices.items():
    module, valid_BL = modules[name], _of(valid, name)
    count_M = jnp.arange(module.min, module.max + 1, dtype=jnp.float32)
    learners_BL = one_hot_BLM.astype(jnp.float32) @ count_M
    spent_B += module.cost * learners_BL.sum(axis=-1, where=valid_BL)
    if valid_BL is None:
      tokens = learners_BL.shape[-1]
    else:
      tokens = valid_BL.sum(axis=-1)
    whole += module.cost * module.max * tokens
  return spent_B / jnp.where(whole > 0, whole, 1)


def learners_per_image(
  choices: Mapping[str, jax.Array],
  modules: Mapping[str, Learners],
  valid: Valid | None = None,
) -> jax.Array:
  """Returns the fraction of learners that each row runs, costs ignored."""
  equal = {
    name: dataclasses.replace(m, cost=1.0) for name, m in modules.items()
  }
  return load_per_image(choices, equal, valid)


def budget_loss(
  load_B: jax.Array, budget: float, weight_B: jax.Array | None = None
) -> jax.Array:
  """Returns `|mean load - β|`, Eq. 7: over the batch, so that rows may differ.

  `load_B` is from `load_per_image`, β is the budget, and `weight_B` from
  `row_weights`.
  """
  return jnp.abs(jnp.average(load_B, weights=weight_B) - budget)


def entropy_loss(
  choices: Mapping[str, jax.Array], valid: Valid | None = None
) -> jax.Array:
  """Returns minus the entropy of the choices over a row's tokens: Eq. 8.

  Normalised by the log of the number of choices that each module has; the mean
  over modules and rows. Minimising it spreads choices over tokens.
  """
  total = jnp.float32(0.0)
  for name, one_hot_BLM in choices.items():
    if one_hot_BLM.shape[-1] == 1:
      continue  # There is no choice, and log 1 is 0.
    valid_BL, where_BL1 = _of(valid, name), None
    weight_B = row_weights(valid_BL)
    if valid_BL is not None:
      # A row of padding alone has weight 0, but a mean of nothing would be NaN.
      where_BL1 = (valid_BL | ~valid_BL.any(axis=-1, keepdims=True))[..., None]
    share_BM = one_hot_BLM.astype(jnp.float32).mean(axis=1, where=where_BL1)
    # The small number bounds the slope at 0, where a choice is never made.
    nats_B = -jnp.sum(share_BM * jnp.log(share_BM + 1e-6), axis=-1)
    if weight_B is None:
      mean = nats_B.mean()
    else:  # A module that no token reaches has nothing to spread.
      mean = jnp.sum(nats_B * weight_B) / jnp.maximum(weight_B.sum(), 1e-9)
    total -= mean / jnp.log(one_hot_BLM.shape[-1])
  return total / len(choices)


def diversity_loss(
  fraction_B: jax.Array, weight_B: jax.Array | None = None
) -> jax.Array:
  """Returns minus the mean difference of compute between two rows: Eq. 10.

  The paper prints the opposite sign, which would make images alike.

  `fraction_B` is from `learners_per_image`: unlike the budget, Eq. 10 counts
  learners, and a cheap one as much as a dear one. `weight_B` is from
  `row_weights`.
  """
  weight_BB = None if weight_B is None else jnp.outer(weight_B, weight_B)
  return -jnp.average(
    jnp.abs(fraction_B[:, None] - fraction_B[None]), weights=weight_BB
  )
