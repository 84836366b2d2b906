"""The moving average of the k-th score."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing


def after(values, decay):
  moving = routing.MovingThreshold.zeros(len(values[0]))
  for value in values:
    moving = moving.update(jnp.array(value), decay)
  return moving


def test_nothing_passes_before_the_first_update():
  value_R = routing.MovingThreshold.zeros(2).value_R()
  assert value_R.tolist() == [float('inf')] * 2


def test_first_value_is_taken_in_full():
  value_R = after([[0.5, -3.0]], decay=0.99).value_R()
  np.testing.assert_allclose(value_R, [0.5, -3.0], rtol=1e-5)


@pytest.mark.parametrize('decay', [0.0, 0.5, 0.9])
def test_is_the_weighted_mean_of_what_was_seen(decay):
  seen = np.random.default_rng(0).normal(size=(6, 3))
  weight = decay ** np.arange(6)[::-1]
  expected = weight @ seen / weight.sum()
  np.testing.assert_allclose(after(seen, decay).value_R(), expected, atol=1e-5)


def test_carries_no_gradient():
  def loss(kth_R):
    return routing.MovingThreshold.zeros(2).update(kth_R, 0.5).value_R().sum()

  assert jax.grad(loss)(jnp.array([1.0, 2.0])).tolist() == [0, 0]
