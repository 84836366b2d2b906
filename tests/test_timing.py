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


def test_functions_take_turns_of_several_calls():
  called = []
  functions = {name: lambda n=name: called.append(n) for name in 'ab'}
  seconds = timing.interleaved(functions, rounds=2, warmup=0, queued=3)
  turns = [''.join(called[i : i + 3]) for i in range(0, 12, 3)]
  assert sorted(turns[:2]) == sorted(turns[2:]) == ['aaa', 'bbb']
  assert [len(seconds[name]) for name in 'ab'] == [2, 2]
