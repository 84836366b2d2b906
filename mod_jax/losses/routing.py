"""Losses of routers and predictors, and how well causal rules match top-k.

`tasks.plain.routing_losses` weighs the losses of all routed layers, which are
then added to the loss of the data.
"""

import jax
import jax.numpy as jnp
import optax

from mod_jax.losses import experts
from mod_jax.losses.sums import Pair


def choice_bce(
  logit_BL: jax.Array, chosen_BL: jax.Array, valid_BL: jax.Array | None = None
) -> Pair:
  """Returns the binary cross-entropy of logits against top-k's choice.

  It is the auxiliary loss of the router and the loss of the predictor (Raposo
  et al. 2024, section 3.5). Returns (sum in nats, number of tokens). The choice
  gets no gradient.
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
  """Returns the balance loss of the fraction of tokens that enter a block.

  There are two paths, through the block and around it. Their targets t are the
  capacity c and 1 - c. The loss is `Σ f · P / t`, which is 1 if f = P = t. f is
  the fraction of tokens that want a path, before any is dropped; it has no
  gradient. P is the path's mean probability. This is the balance loss of
  experts (Fedus et al. 2021, section 2.2) with unequal targets. If all tokens
  want to enter, or none, its gradient still leads towards the capacity.
  A token with a logit above 0 wants to enter. Returns (loss times the number of
  tokens, number of tokens).
  """
  if valid_BL is None:
    valid_BL = jnp.ones(logit_BL.shape, bool)
  enters_BL = logit_BL > 0
  # The softmax of (logit, 0) is (sigmoid, 1 - sigmoid) of the logit.
  loss = experts.balance_loss(
    jnp.stack([logit_BL, jnp.zeros_like(logit_BL)], axis=-1),
    jnp.stack([enters_BL, ~enters_BL], axis=-1) & valid_BL[..., None],
    valid_BL,
    # Avoid division by a target of 0.
    jnp.maximum(jnp.stack([capacity, 1 - capacity]), 1e-3),
  )
  count = valid_BL.sum(dtype=jnp.float32)
  return loss * count, count


def choice_agreement(
  decided_BL: jax.Array,
  chosen_BL: jax.Array,
  valid_BL: jax.Array | None = None,
) -> dict[str, Pair]:
  """Compares a causal rule's decisions to route with what top-k chose.

  Accuracy alone is misleading: at capacity c, never routing has accuracy 1 - c.

  Returns:
    Pairs by name:

    * `accuracy`: fraction of decisions that agree;
    * `precision`: fraction of the decided tokens that top-k chose;
    * `recall`: fraction of the tokens chosen by top-k that were decided;
    * `count_error`: sum over sequences of `|decided - chosen|`, relative to the
      number of chosen tokens;
    * `routed`: fraction of tokens that were decided;
    * `never_route`: accuracy of never routing, a trivial baseline.
  """
  weight_BL = _weights(decided_BL, valid_BL)
  decided_BL = decided_BL * weight_BL
  chosen_BL = chosen_BL * weight_BL
  agreed = jnp.sum(decided_BL * chosen_BL)
  decided, chosen = jnp.sum(decided_BL), jnp.sum(chosen_BL)
  total = jnp.sum(weight_BL)
  count_error = jnp.abs(decided_BL.sum(axis=-1) - chosen_BL.sum(axis=-1)).sum()
  return {
    'accuracy': (total - decided - chosen + 2 * agreed, total),
    'precision': (agreed, decided),
    'recall': (agreed, chosen),
    'count_error': (count_error, chosen),
    'routed': (decided, total),
    'never_route': (total - chosen, total),
  }


def _weights(like_BL, valid_BL):
  if valid_BL is None:
    return jnp.ones(like_BL.shape, jnp.float32)
  return valid_BL.astype(jnp.float32)
