"""The moving average of the k-th score."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing


def after(values, decay):
  moving = routing.MovingThreshold.zeros()
  for value in values:
    moving = moving.update(jnp.array(value), decay)
  return moving


def test_nothing_passes_before_the_first_update():
  assert routing.MovingThreshold.zeros().value() == float('inf')


@pytest.mark.parametrize('decay', [0.0, 0.5, 0.9])
def test_is_the_weighted_mean_of_what_was_seen(decay):
  seen = np.random.default_rng(0).normal(size=6)
  weight = decay ** np.arange(6)[::-1]
  expected = weight @ seen / weight.sum()
  np.testing.assert_allclose(after(seen, decay).value(), expected, atol=1e-5)


def test_rows_of_padding_count_for_nothing():
  kth_B = jnp.array([0.5, jnp.inf, -1.5, jnp.inf])
  assert routing.mean_of_rows(kth_B) == -0.5
  of_padding = routing.mean_of_rows(kth_B[1::2])
  assert of_padding == jnp.inf
  before = after([0.5], decay=0.9)
  assert before.update(of_padding, 0.9) == before


def test_carries_no_gradient():
  def loss(kth):
    return routing.MovingThreshold.zeros().update(kth, 0.5).value()

  assert jax.grad(loss)(2.0) == 0
