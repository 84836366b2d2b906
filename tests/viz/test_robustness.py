"""Curves over severities: what is drawn, and what is refused."""

import pytest

from mod_jax import viz
from mod_jax.errors import UserError

FOUND = {
  'adaptive': [0.9, 0.7, 0.2],
  'dense': [0.95, 0.6, 0.3],
  'load': [0.4, 0.45, 0.5],
}


def lines(figure, gid):
  return [
    line for axes in figure.axes for line in axes.lines if line.get_gid() == gid
  ]


def test_every_number_is_drawn():
  other = FOUND | {'dense': [0.9, 0.8, 0.7]}
  figure = viz.corruption_curves({'noise': FOUND, 'blur': other}, budget=0.4)
  figure.canvas.draw()
  for gid in ('adaptive', 'dense', 'load'):
    drawn = [list(line.get_ydata()) for line in lines(figure, gid)]
    assert drawn == [FOUND[gid], other[gid]]
    assert list(lines(figure, gid)[0].get_xdata()) == [0, 1, 2]
  assert {line.get_ydata()[0] for line in lines(figure, 'budget')} == {0.4}
  titles = [a.get_title(loc='left') for a in figure.axes]
  assert titles == ['noise', '', 'blur', '']


def test_nothing_measured():
  viz.corruption_curves({}, budget=0.4).canvas.draw()


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'dense': [0.1]}, "noise: 1 numbers of 'dense'"),
    ({'load': []}, "noise: 3 numbers of 'adaptive'"),
    ({'adaptive': [0.1, 1.2, 0.3]}, "'adaptive' is .*from 0 to 1"),
  ],
)
def test_refused(change, message):
  with pytest.raises(UserError, match=message):
    viz.corruption_curves({'noise': FOUND | change}, budget=0.4)


def test_too_many():
  curves = {f'{i}': FOUND for i in range(13)}
  with pytest.raises(UserError, match='13 corruptions: at most 12'):
    viz.corruption_curves(curves, budget=0.4)
