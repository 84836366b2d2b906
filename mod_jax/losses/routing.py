"""Learning to foresee top-k, and how well it is foreseen."""

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses import experts
from mod_jax.losses.sums import Pair


def choice_bce(
  logit_BL: jax.Array, chosen_BL: jax.Array, valid_BL: jax.Array | None = None
) -> Pair:
  """Returns the binary cross-entropy of logits against top-k's choice.

  The auxiliary loss on the router and the loss of the predictor (Raposo et al.
  2024, section 3.5); no gradient passes the targets.

  Args:
    logit_BL: a token's logit of being chosen.
    chosen_BL: what top-k chose.
    valid_BL: False for padding.

  Returns:
    (sum in nats, number of tokens).
  """
  target_BL = jax.lax.stop_gradient(chosen_BL.astype(jnp.float32))
  nats_BL = optax.sigmoid_binary_cross_entropy(logit_BL, target_BL)
  weight_BL = _weights(nats_BL, valid_BL)
  return jnp.sum(nats_BL * weight_BL), jnp.sum(weight_BL)


def path_balance(
  logit_BL: jax.Array,
  capacity: jax.Array,
  valid_BL: jax.Array | None = None,
) -> Pair:
  """Returns how far the share of tokens that want in is from the capacity.

  Two paths, into the block and past it, with the targets t = (c, 1 - c):
  `Σ f · P / t`, f the share of tokens that want a path, before any is dropped
  and without a gradient, P the mean probability of it: 1 where f = P = t. The
  balance loss of experts (Fedus et al. 2021, section 2.2) with unequal targets;
  where all tokens want in, and where none does, its gradient leads back.

  Args:
    logit_BL: a token's logit of entering; above 0 it wants in.
    capacity: c, scalar.
    valid_BL: False for padding.

  Returns:
    (loss times the number of tokens, number of tokens).
  """
  if valid_BL is None:
    valid_BL = jnp.ones(logit_BL.shape, bool)
  enters_BL = logit_BL > 0
  # The softmax of a logit and 0 is its sigmoid, and what is left of 1.
  loss = experts.balance_loss(
    jnp.stack([logit_BL, jnp.zeros_like(logit_BL)], axis=-1),
    jnp.stack([enters_BL, ~enters_BL], axis=-1) & valid_BL[..., None],
    valid_BL,
    # No target is 0, by which a share would be divided.
    jnp.maximum(jnp.stack([capacity, 1 - capacity]), 1e-3),
  )
  count = valid_BL.sum(dtype=jnp.float32)
  return loss * count, count


def choice_agreement(
  decided_BL: jax.Array,
  chosen_BL: jax.Array,
  valid_BL: jax.Array | None = None,
) -> dict[str, Pair]:
  """Compares a causal rule's decisions with what top-k chose.

  Accuracy alone flatters: a rule that never routes already scores 1 - c.

  Returns:
    Pairs named
      `accuracy`: decisions that agree;
      `precision`: of the tokens decided for, those that top-k chose;
      `recall`: of the tokens that top-k chose, those decided for;
      `count_error`: `|decided - chosen|` of each sequence, over its chosen;
      `routed`: fraction of tokens decided for;
      `never_route`: the accuracy of never routing, the trivial baseline.
  """
  weight_BL = _weights(decided_BL, valid_BL)
  decided_BL = decided_BL * weight_BL
  chosen_BL = chosen_BL * weight_BL
  both = jnp.sum(decided_BL * chosen_BL)
  decided, chosen = jnp.sum(decided_BL), jnp.sum(chosen_BL)
  total = jnp.sum(weight_BL)
  count_error = jnp.abs(decided_BL.sum(axis=-1) - chosen_BL.sum(axis=-1)).sum()
  return {
    'accuracy': (total - decided - chosen + 2 * both, total),
    'precision': (both, decided),
    'recall': (both, chosen),
    'count_error': (count_error, chosen),
    'routed': (decided, total),
    'never_route': (total - chosen, total),
  }


def _weights(like_BL, valid_BL):
  if valid_BL is None:
    return jnp.ones(like_BL.shape, jnp.float32)
  return valid_BL.astype(jnp.float32)
