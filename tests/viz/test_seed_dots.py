"""Dots of several runs stand where their numbers are, under legible names."""

import pytest

from mod_jax import viz

pytestmark = pytest.mark.filterwarnings('error')
GROUPS = {
  'first $group$ of runs': {
    'sigmoid, with a rather long name': [3.1, 3.2, 3.15],
    'raw': [3.3],
    'not yet': [],
  },
  'second': {'dense': [1.5, 1.4]},
  'nothing': {'none': []},
}


def marks(axes, gid):
  return [
    list(zip(*line.get_data(), strict=True))
    for line in axes.lines
    if line.get_gid() == gid
  ]


def test_numbers_and_names():
  figure = viz.seed_dots(GROUPS, xlabel='loss', title='Which is best')
  first, second = figure.axes
  assert marks(first, 'run') == [
    [(3.1, 0), (3.2, 0), (3.15, 0)],
    [(3.3, 1)],
  ]
  assert marks(first, 'mean') == [[(pytest.approx(3.15), 0)], [(3.3, 1)]]
  names = [label.get_text() for label in first.get_yticklabels()]
  assert names == ['sigmoid, with a rather long name', 'raw']
  assert second.get_title(loc='left') == 'second'
  assert second.get_xlabel() == 'loss'
  # The first row is on top.
  low, high = first.get_ylim()
  assert low > high


def test_without_runs():
  figure = viz.seed_dots({'group': {'a': []}}, xlabel='loss')
  texts = [t.get_text() for t in figure.axes[0].texts]
  assert texts == ['No run is finished yet']
