"""Moving average of the k-th best score, the threshold of a causal rule."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class MovingThreshold:
  """A bias-corrected exponential moving average.

  A token is chosen if its score is at least the average of past sequences' k-th
  best scores.

  Attributes:
    total: float32 weighted sum of k-th best scores: a scalar, or one per
      expert.
    weight: float32 scalar, the sum of the weights.
  """

  total: jax.Array
  weight: jax.Array

  @classmethod
  def zeros(cls, shape: tuple[int, ...] = ()) -> 'MovingThreshold':
    return cls(jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.float32))

  def update(self, kth: jax.Array, decay: float) -> 'MovingThreshold':
    """Returns the average after one more observation, `kth`.

    If any of its elements is +inf, as from a batch of padding only, the average
    does not change.
    """
    kth = jax.lax.stop_gradient(kth)
    is_finite = jnp.all(kth < jnp.inf)
    return MovingThreshold(
      jnp.where(is_finite, decay * self.total + (1 - decay) * kth, self.total),
      jnp.where(is_finite, decay * self.weight + (1 - decay), self.weight),
    )

  def value(self) -> jax.Array:
    """Returns the threshold; +inf (nothing chosen) before any update."""
    has_value = self.weight > 0
    return jnp.where(
      has_value, self.total / jnp.where(has_value, self.weight, 1), jnp.inf
    )


def mean_of_rows(kth_B: jax.Array) -> jax.Array:
  """Returns the mean of the rows' k-th best scores.

  Rows of +inf, without real tokens, are left out. If all are, returns +inf.
  """
  is_finite_B = kth_B < jnp.inf
  count = is_finite_B.sum(axis=0)
  mean = jnp.where(is_finite_B, kth_B, 0).sum(axis=0) / jnp.maximum(count, 1)
  return jnp.where(count > 0, mean, jnp.inf)
