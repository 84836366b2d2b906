"""Capacity over depth and over training."""

import hypothesis
from hypothesis import strategies as st
import pytest

from mod_jax import routing


class TestLayerCapacities:
  def test_a_list_is_taken_as_it_is(self):
    assert routing.layer_capacities((0.5, 0.25), 2) == (0.5, 0.25)

  @hypothesis.example(0.9, 4, 0.1)  # All but the last layer are full.
  @hypothesis.given(
    st.floats(0.01, 1), st.integers(2, 12), st.floats(0.01, 100)
  )
  def test_no_layer_exceeds_one_and_the_mean_stays(self, mean, layers, decay):
    values = routing.layer_capacities(mean, layers, decay=decay)
    assert all(0 < value <= 1 for value in values)
    assert sum(values) / layers == pytest.approx(mean)
    # Those that are not full keep their ratio to each other.
    rest = [value for value in values if value < 1]
    steps = [b / a for a, b in zip(rest, rest[1:], strict=False)]
    assert steps == pytest.approx([decay ** (1 / (layers - 1))] * len(steps))

  @pytest.mark.parametrize('num_routed', [0, 1])
  def test_decay_needs_two_layers(self, num_routed):
    assert (
      routing.layer_capacities(0.3, num_routed, decay=0.5)
      == (0.3,) * num_routed
    )


class TestShiftedCosine:
  def test_falls_along_half_a_cosine_between_dense_and_the_floor(self):
    values = routing.shifted_cosine(7)
    assert values[:2] == (None, None)  # 1 and .933.
    assert values[2:] == pytest.approx((0.75, 0.5, 0.25, 0.15, 0.15))


class TestCapacityFloor:
  def test_comes_down_in_equal_stages(self):
    floors = [
      routing.capacity_floor(step, warmup_steps=8, stages=4)
      for step in range(10)
    ]
    assert floors == [1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0, 0]
