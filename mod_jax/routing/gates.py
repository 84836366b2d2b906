"""Gates: factors on the updates of chosen tokens, from their router scores."""

import jax
import jax.numpy as jnp

from mod_jax.errors import require

GATES = (
  *('raw', 'sigmoid', 'alpha_sigmoid', 'one_plus_tanh', 'alpha_tanh'),
  'none',
)


def gate(kind: str, score: jax.Array, alpha: float = 2.0) -> jax.Array:
  """Returns the factor on a chosen token's residual update, in float32.

  `raw` is the score itself (Raposo et al. 2024, Eq. 1), and `none` is 1. Three
  kinds suit pretrained weights, since they are 1 at score 0: `alpha_sigmoid` is
  alpha · sigmoid, for alpha = 2; `one_plus_tanh` is 1 + tanh; `alpha_tanh` is
  1 + alpha · tanh, where p-MoD (Zhang et al. 2024) takes alpha = .2.
  """
  require(kind in GATES, f'one of {", ".join(GATES)}', gate=kind)
  score = score.astype(jnp.float32)
  match kind:
    case 'raw':
      return score
    case 'sigmoid':
      return jax.nn.sigmoid(score)
    case 'alpha_sigmoid':
      return alpha * jax.nn.sigmoid(score)
    case 'one_plus_tanh':
      return 1 + jnp.tanh(score)
    case 'alpha_tanh':
      return 1 + alpha * jnp.tanh(score)
  return jnp.ones_like(score)
