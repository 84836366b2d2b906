"""Choices among the logits of a vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.layers import vocabulary


@pytest.mark.parametrize('size', [1, 7, 256, 257, 1000])
def test_argmax_is_the_first_of_the_largest(size):
  rng = np.random.default_rng(size)
  x_BLV = rng.integers(-9, 0, size=(2, 40, size)).astype(np.float32)
  x_BLV[0, 0] = -np.inf
  got_BL = jax.jit(vocabulary.argmax)(x_BLV)
  np.testing.assert_array_equal(got_BL, x_BLV.argmax(axis=-1))
  assert got_BL.dtype == jnp.int32


def test_draws_in_proportion_to_weights():
  # In the first, the second and the last block, which is not full.
  weights = {0: 1, 3: 2, 300: 4, 699: 5}
  weight_V = np.zeros(700, np.float32)
  weight_V[list(weights)] = 1e-3 * np.array(list(weights.values()))
  keys_R = jax.random.split(jax.random.key(0), 20_000)
  got_R = jax.vmap(vocabulary.draw, (0, None))(keys_R, weight_V)
  count_V = np.bincount(got_R, minlength=700)
  expected_V = len(keys_R) * weight_V / weight_V.sum()
  assert (np.abs(count_V - expected_V) <= 4 * np.sqrt(expected_V)).all()
