"""Choosing tokens, against plain numpy."""

import fractions

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing

LENGTH = 7
INF = float('inf')
NAN = float('nan')
# Few values, so that ties are the rule.
SCORES = hnp.arrays(
  np.float32,
  (2, LENGTH),
  elements=st.sampled_from([NAN, -INF, -2.0, -0.5, -0.0, 0.0, 0.5, 3.0]),
)
MASKS = hnp.arrays(np.bool_, (2, LENGTH))

select_tokens = jax.jit(routing.select_tokens, static_argnames='k')
select_top_k = jax.jit(routing.select_top_k, static_argnames='k')
select_decided = jax.jit(routing.select_decided, static_argnames='slots')
mark_tokens = jax.jit(routing.mark_tokens, static_argnames='length')


def best(score_L, k, valid_L=None):
  """Positions of the k best candidates, the lowest first among equals."""
  score_L = np.nan_to_num(score_L.astype(np.float64), nan=-INF, neginf=-INF)
  order = np.argsort(-score_L, kind='stable')
  if valid_L is not None:
    order = [i for i in order if valid_L[i]]
  return sorted(int(i) for i in order[:k])


def held(selection, row):
  """The tokens that a row's slots hold."""
  index_K = np.asarray(selection.index_BK)[row]
  if selection.valid_BK is None:
    return index_K.tolist()
  return index_K[np.asarray(selection.valid_BK)[row]].tolist()


def assert_ascending(index_BK):
  assert (np.diff(np.asarray(index_BK), axis=-1) > 0).all()


class TestSelectTokens:
  @hypothesis.given(SCORES, st.integers(1, LENGTH))
  def test_chooses_as_numpy_does(self, score_BL, k):
    index_BK, score_BK = select_tokens(score_BL, k)
    assert index_BK.dtype == jnp.int32
    assert index_BK.shape == score_BK.shape == (2, k)
    assert_ascending(index_BK)
    for row in range(2):
      assert index_BK[row].tolist() == best(score_BL[row], k)
    np.testing.assert_array_equal(
      score_BK, np.take_along_axis(score_BL, np.asarray(index_BK), -1)
    )

  def test_keeps_bfloat16_and_breaks_its_ties_by_position(self):
    # 1.001 and 1.002 are one number in bfloat16.
    score_BL = jnp.array([[0.5, 1.001, 1.002, 2.0]], jnp.bfloat16)
    index_BK, score_BK = select_tokens(score_BL, 2)
    assert index_BK.tolist() == [[1, 3]]
    assert score_BK.dtype == jnp.bfloat16


class TestSelectTopK:
  @hypothesis.given(
    SCORES,
    MASKS,
    st.integers(1, LENGTH),
    hnp.arrays(np.int32, 2, elements=st.integers(0, LENGTH)),
  )
  def test_padding_and_counts_as_in_numpy(self, score_BL, valid_BL, k, count_B):
    counted = select_top_k(score_BL, k, valid_BL, count_B)
    every = select_top_k(score_BL, k, valid_BL)
    for selection, most_B in ((counted, count_B), (every, (k, k))):
      assert selection.index_BK.shape == (2, k)
      assert_ascending(selection.index_BK)
      for row in range(2):
        most = min(k, most_B[row])
        expected = best(score_BL[row], most, valid_BL[row])
        assert held(selection, row) == expected


class TestSelectDecided:
  @hypothesis.given(
    MASKS,
    st.integers(1, LENGTH + 2),
    st.none() | hnp.arrays(np.int32, 2, elements=st.integers(0, LENGTH)),
  )
  def test_first_come_by_position(self, decided_BL, slots, count_B):
    selection = select_decided(decided_BL, slots, count_B)
    assert selection.index_BK.shape == (2, min(slots, LENGTH))
    assert_ascending(selection.index_BK)
    for row in range(2):
      most = slots if count_B is None else min(slots, count_B[row])
      wanted = np.flatnonzero(decided_BL[row])[:most].tolist()
      assert held(selection, row) == wanted

  def test_exact_over_a_long_row(self):
    decided_BL = np.random.default_rng(0).random((1, 5000)) < 0.3
    selection = routing.select_decided(jnp.array(decided_BL), 1000)
    assert held(selection, 0) == np.flatnonzero(decided_BL[0])[:1000].tolist()


class TestMoves:
  @hypothesis.given(MASKS, st.integers(1, LENGTH))
  def test_marking_undoes_selecting(self, decided_BL, slots):
    selection = select_decided(decided_BL, slots)
    first = np.cumsum(decided_BL, axis=-1) <= slots
    np.testing.assert_array_equal(
      mark_tokens(selection, LENGTH), decided_BL & first
    )

  @pytest.mark.parametrize(
    ('trailing', 'dtype'), [((), jnp.float32), ((2, 3), jnp.bfloat16)]
  )
  def test_gather_and_scatter_as_numpy_does(self, trailing, dtype):
    rng = np.random.default_rng(0)
    x = jnp.array(rng.normal(size=(2, 5, *trailing)), dtype)
    update = jnp.array(rng.normal(size=(2, 2, *trailing)), jnp.float32)
    index_BK = jnp.array([[0, 3], [2, 4]])
    gathered = routing.gather_tokens(x, index_BK)
    added = routing.scatter_add_tokens(x, index_BK, update)
    assert gathered.dtype == added.dtype == dtype
    expected = np.array(x)
    for row in range(2):
      np.testing.assert_array_equal(gathered[row], x[row, index_BK[row]])
      for slot, position in enumerate(index_BK[row]):
        expected[row, position] += np.asarray(update.astype(dtype))[row, slot]
    np.testing.assert_array_equal(added, expected)


class TestNumChosen:
  @hypothesis.example(290, 100)  # As floats, 28.999999999999996.
  @hypothesis.given(st.integers(1, 1000), st.integers(1, 100_000))
  def test_is_the_floor_of_the_decimal_product(self, thousandths, length):
    exact = fractions.Fraction(thousandths, 1000) * length
    assert routing.num_chosen(thousandths / 1000, length) == max(1, exact // 1)


def test_padded_rows_choose_as_many_as_alone():
  def count(n):
    return routing.num_chosen(0.29, n)

  count_B = routing.for_lengths(count, 100, jnp.array([1, 7, 100]))
  assert count_B.tolist() == [1, 2, 29]


def test_an_inverse_says_who_is_where():
  index_BM = jnp.array([[2, 0, 4], [4, 4, 1]])  # 4 is nobody's.
  assert routing.inverse(index_BM, 4).tolist() == [[1, 3, 0, 3], [3, 2, 3, 3]]
