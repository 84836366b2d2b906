"""A causal rule without a loss: the moving average of the k-th score."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class MovingThreshold:
  """Bias-corrected exponential moving averages, one for each routed layer.

  A token is chosen where its score is at least the average of what the k-th
  best score of a sequence used to be.

  Attributes:
    total_R: float32 weighted sum of k-th scores.
    weight: float32 scalar, the sum of the weights.
  """

  total_R: jax.Array
  weight: jax.Array

  @classmethod
  def zeros(cls, num_routed: int) -> 'MovingThreshold':
    return cls(jnp.zeros(num_routed, jnp.float32), jnp.zeros((), jnp.float32))

  def update(self, kth_R: jax.Array, decay: float) -> 'MovingThreshold':
    """Returns the averages after one more observation per layer."""
    kth_R = jax.lax.stop_gradient(kth_R)
    return MovingThreshold(
      decay * self.total_R + (1 - decay) * kth_R,
      decay * self.weight + (1 - decay),
    )

  def value_R(self) -> jax.Array:
    """Returns the thresholds; +inf (nothing chosen) before any update."""
    seen = self.weight > 0
    return jnp.where(
      seen, self.total_R / jnp.where(seen, self.weight, 1), jnp.inf
    )
