"""Losses that keep experts busy, and what became of the tokens' choices.

X choices of each token: E experts, then those that do nothing. Only tokens that
count have any, by `valid_BL`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mod_jax.losses.sums import Pair


def balance_loss(
  logits_BLX: jax.Array,
  wanted_BLX: jax.Array,
  valid_BL: jax.Array,
  targets: Sequence[float] | jax.Array,
) -> jax.Array:
  """Returns Σ_x f_x · P_x / t_x: 1 where the choices are as they should be.

  Fedus et al. 2021, Eq. 4, there with equal targets 1/E. f is the part of all
  choices that were x, before any was dropped, without a gradient; P the mean
  probability of x. A product of two means over tokens is no mean over tokens:
  of a batch that is processed in parts, each part is balanced by itself.

  Args:
    logits_BLX: of the choices.
    wanted_BLX: the choices that were made.
    valid_BL: the tokens that count.
    targets: t, the part of all choices that each x should get.
  """
  count_X = wanted_BLX.sum(axis=(0, 1), dtype=jnp.float32)
  part_X = count_X / jnp.maximum(count_X.sum(), 1)
  probability_BLX = jnp.where(
    valid_BL[..., None], jax.nn.softmax(logits_BLX), 0
  )
  mean_X = probability_BLX.sum(axis=(0, 1)) / jnp.maximum(valid_BL.sum(), 1)
  return jnp.sum(part_X * mean_X / jnp.asarray(targets))


def z_loss(logits_BLX: jax.Array, valid_BL: jax.Array) -> Pair:
  """Returns the squared log-sum-exps of the logits, and the tokens.

  Zoph et al. 2022, Eq. 5: it keeps logits from growing.
  """
  square_BL = jax.nn.logsumexp(logits_BLX, axis=-1) ** 2
  return (
    jnp.where(valid_BL, square_BL, 0).sum(),
    valid_BL.sum(dtype=jnp.float32),
  )


def load(wanted_BLX: jax.Array, ran_BLE: jax.Array) -> dict[str, Pair]:
  """Returns what became of the choices.

  Returns:
    Pairs named
      `dropped`: of the choices of experts, those that found no slot;
      `null`: of all choices, those that do nothing;
      `busiest`: the choices of the most wanted expert, over the mean of all.
  """
  experts = ran_BLE.shape[-1]
  count_X = wanted_BLX.sum(axis=(0, 1), dtype=jnp.float32)
  total, of_experts = count_X.sum(), count_X[:experts].sum()
  ran = ran_BLE.sum(dtype=jnp.float32)
  return {
    'dropped': (of_experts - ran, of_experts),
    'null': (total - of_experts, total),
    'busiest': (experts * count_X[:experts].max(), of_experts),
  }
