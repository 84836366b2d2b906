"""A causal rule without a loss: the moving average of the k-th score."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class MovingThreshold:
  """A bias-corrected exponential moving average.

  A token is chosen where its score is at least the average of what the k-th
  best score of a sequence used to be.

  Attributes:
    total: float32, the weighted sum of k-th scores: a scalar, or one for each
      of several that choose.
    weight: float32 scalar, the sum of the weights.
  """

  total: jax.Array
  weight: jax.Array

  @classmethod
  def zeros(cls, shape: tuple[int, ...] = ()) -> 'MovingThreshold':
    return cls(jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.float32))

  def update(self, kth: jax.Array, decay: float) -> 'MovingThreshold':
    """Returns the average after one more observation.

    One of +inf, as of a batch of padding alone, changes nothing.
    """
    kth = jax.lax.stop_gradient(kth)
    seen = jnp.all(kth < jnp.inf)
    return MovingThreshold(
      jnp.where(seen, decay * self.total + (1 - decay) * kth, self.total),
      jnp.where(seen, decay * self.weight + (1 - decay), self.weight),
    )

  def value(self) -> jax.Array:
    """Returns the threshold; +inf (nothing chosen) before any update."""
    seen = self.weight > 0
    return jnp.where(
      seen, self.total / jnp.where(seen, self.weight, 1), jnp.inf
    )


def mean_of_rows(kth_B: jax.Array) -> jax.Array:
  """Returns the mean over the rows that hold a real token: not +inf.

  Without such a row it is +inf.
  """
  seen_B = kth_B < jnp.inf
  count = seen_B.sum(axis=0)
  mean = jnp.where(seen_B, kth_B, 0).sum(axis=0) / jnp.maximum(count, 1)
  return jnp.where(count > 0, mean, jnp.inf)
