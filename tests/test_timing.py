"""Ratios of times that were taken in turn."""

import pytest

from mod_jax import timing


@pytest.mark.parametrize(
  ('above', 'expected'),
  [
    ([3.0], (3, 3, 3)),  # A single round has a ratio too.
    ([1.0, 2.0, 3.0, 4.0, 50.0], (3, 2, 4)),
  ],
)
def test_median_and_quartiles_of_ratios(above, expected):
  seconds = {'a': [2 * x for x in above], 'b': [2.0] * len(above)}
  assert timing.ratio_spread(seconds, 'a', 'b') == pytest.approx(expected)


def test_calls_of_a_turn_are_queued():
  called = []
  functions = {name: lambda n=name: called.append(n) for name in 'ab'}
  seconds = timing.interleaved(functions, rounds=1, warmup=0, queued=3)
  assert ''.join(called) == 'aaabbb'
  assert len(seconds['a']) == 1


def test_functions_take_turns():
  called = []
  functions = {name: lambda n=name: called.append(n) for name in 'ab'}
  seconds = timing.interleaved(functions, rounds=2, warmup=1)
  assert sorted(called[:2]) == sorted(called[2:4]) == ['a', 'b']
  assert {name: len(taken) for name, taken in seconds.items()} == {
    'a': 2,
    'b': 2,
  }
