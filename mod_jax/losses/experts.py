"""Losses and metrics of mixtures of experts.

Each token has X choices: E experts, then no-ops. `valid_BL` is False for tokens
to ignore, which make no choices.
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
  """Returns Σ_x f_x · P_x / t_x, which is 1 if the choices match the targets.

  Fedus et al. 2021, Eq. 4, with targets in place of 1/E. f_x is the fraction of
  choices that were x, before any was dropped; it has no gradient. P_x is the
  mean probability of x. The product is not a mean over tokens: if a batch is
  processed in parts, each part is balanced separately.
  `wanted_BLX` is True for the choices that were made. `targets` are t_x, the
  wanted fractions of all choices.
  """
  count_X = wanted_BLX.sum(axis=(0, 1), dtype=jnp.float32)
  fraction_X = count_X / jnp.maximum(count_X.sum(), 1)
  probability_BLX = jnp.where(
    valid_BL[..., None], jax.nn.softmax(logits_BLX), 0
  )
  mean_X = probability_BLX.sum(axis=(0, 1)) / jnp.maximum(valid_BL.sum(), 1)
  return jnp.sum(fraction_X * mean_X / jnp.asarray(targets))


def z_loss(logits_BLX: jax.Array, valid_BL: jax.Array) -> Pair:
  """Returns the sum of squared log-sum-exps, and the number of tokens.

  Zoph et al. 2022, Eq. 5: it keeps the logits from growing.
  """
  square_BL = jax.nn.logsumexp(logits_BLX, axis=-1) ** 2
  return (
    jnp.where(valid_BL, square_BL, 0).sum(),
    valid_BL.sum(dtype=jnp.float32),
  )


def load(wanted_BLX: jax.Array, ran_BLE: jax.Array) -> dict[str, Pair]:
  """Returns metrics of how the choices were distributed.

  `wanted_BLX` is True for the choices that were made, and `ran_BLE` for those
  of them that got a slot of an expert.

  Returns:
    Pairs named
      `dropped`: fraction of the choices of experts that got no slot;
      `null`: fraction of all choices that are no-ops;
      `busiest`: choices of the most popular expert, relative to the mean.
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
