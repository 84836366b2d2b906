"""The language-model loss."""

import jax
import jax.numpy as jnp
import optax


def next_token_loss(
  logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the summed cross-entropy in nats, and the sum of the weights.

  Args:
    logits_BLV: unnormalised log-probabilities.
    targets_BL: int token ids.
    weights_BL: how much each target counts; 0 for padding.
  """
  nats_BL = optax.softmax_cross_entropy_with_integer_labels(
    logits_BLV.astype(jnp.float32), targets_BL
  )
  return jnp.sum(nats_BL * weights_BL), jnp.sum(weights_BL)
