"""Gates, and scores that do not look at the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing

SCORE = np.linspace(-3, 3, 13, dtype=np.float32)


class TestGate:
  @pytest.mark.parametrize(
    ('kind', 'expected'),
    [
      ('raw', SCORE),
      ('sigmoid', 1 / (1 + np.exp(-SCORE))),
      ('alpha_sigmoid', 3 / (1 + np.exp(-SCORE))),
      ('one_plus_tanh', 1 + np.tanh(SCORE)),
      ('none', np.ones_like(SCORE)),
    ],
  )
  def test_formula(self, kind, expected):
    weight = routing.gate(kind, jnp.array(SCORE), alpha=3.0)
    np.testing.assert_allclose(weight, expected, atol=1e-6)

  def test_every_gate_has_a_formula_and_is_float32(self):
    for kind in routing.GATES:
      weight = routing.gate(kind, jnp.array(SCORE, jnp.bfloat16))
      assert weight.dtype == jnp.float32


class TestGaussian:
  @pytest.mark.parametrize('capacity', [0.125, 0.9])
  def test_threshold_passes_the_capacity(self, capacity):
    score = routing.gaussian_scores(jax.random.key(2), (40_000,))
    passed = (score > routing.gaussian_threshold(capacity)).mean()
    assert passed == pytest.approx(capacity, abs=0.01)

  def test_full_capacity_passes_all(self):
    assert routing.gaussian_threshold(1.0) == -float('inf')


class TestStride:
  @pytest.mark.parametrize('capacity', [1.0, 0.7, 0.29, 0.01])
  def test_any_fraction_is_kept_and_evenly_spread(self, capacity):
    length = 1000
    position_L = jnp.arange(length)
    at = np.flatnonzero(routing.stride_scores(position_L, capacity))
    assert len(at) == routing.num_chosen(capacity, length)
    assert np.ptp(np.diff(at)) <= 1

  def test_starts_anew_with_the_positions(self):
    position_BL = jnp.array([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    score_BL = routing.stride_scores(position_BL, 0.5)
    assert score_BL.tolist() == [[1, 1, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0]]

  def test_exact_at_late_positions(self):
    # 0.3 as float32 would put these off by one.
    late_L = 10 * 3_000_000 + jnp.arange(20)
    np.testing.assert_array_equal(
      routing.stride_scores(late_L, 0.3),
      routing.stride_scores(jnp.arange(20), 0.3),
    )
