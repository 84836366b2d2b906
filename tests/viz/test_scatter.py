"""Points stand where their numbers are, under legible names."""

import numpy as np
import pytest

from mod_jax import viz
from mod_jax.viz import scatter

pytestmark = pytest.mark.filterwarnings('error')


def test_importance_is_over_scores_with_their_trend(rng, seen):
  score_RN = rng.random((2, 30))
  importance_RN = 3 * score_RN + 1
  told = {'pearson': 0.5, 'pearson_p': 0.0123}
  told |= {'spearman': -0.5, 'spearman_p': 2e-7}
  figure = viz.importance_scatter(
    *(importance_RN, score_RN),
    layers=(1, 3),
    correlations=[told] * 2,
    title='',
  )
  for r, axes in enumerate(figure.axes):
    assert axes.get_title(loc='left') == f'Block {(1, 3)[r]}'
    points = np.stack([score_RN[r], importance_RN[r]], axis=1)
    drawn = seen.mark(axes, 'tokens').get_xydata()
    np.testing.assert_array_equal(drawn, points)
    x, y = seen.mark(axes, 'trend').get_data()
    np.testing.assert_allclose(y, 3 * x + 1)
    assert seen.texts(axes, 'facts') == [
      'Pearson r = 0.50 (p = 0.012)\nSpearman ρ = -0.50 (p = 2e-07)'
    ]


def models():
  table = {
    'MoD': [(4.0, 0.74), (2.6, 0.60), (3.4, 0.70)],
    'A-MoD': [(3.4, 0.78), (2.6, 0.72)],
    'dense': [(4.6, 0.77)],
  }
  return [
    {'name': f'{f} G', 'group': g, 'flops': f, 'accuracy': a, 'spread': 0.01}
    for g, points in table.items()
    for f, a in points
  ]


def test_sizes_without_a_minimum_are_joined_by_their_means(seen):
  runs = {'params': [1e5, 2e5, 1e5], 'loss': [3.2, 2.9, 3.0]}
  figure = viz.isoflop([{'group': 'dense', 'budget': 1e13, **runs}])
  drawn = seen.mark(figure.axes[0], 'means').get_xydata()
  np.testing.assert_allclose(drawn, [(1e5, 3.1), (2e5, 2.9)])


class TestAccuracyFlops:
  def test_a_sorted_line_per_group(self, seen):
    points = [*models(), {'flops': 5, 'accuracy': 0.5, 'group': '_x'}]
    figure = viz.accuracy_flops(points)
    assert '_x' in seen.words(figure)
    (axes,) = figure.axes
    lines = {line.get_gid(): line for line in axes.lines}
    np.testing.assert_array_equal(
      lines['group MoD'].get_xydata(), [(2.6, 0.60), (3.4, 0.70), (4.0, 0.74)]
    )
    np.testing.assert_array_equal(
      lines['group A-MoD'].get_xydata(), [(2.6, 0.72), (3.4, 0.78)]
    )
    groups = [line for gid, line in lines.items() if gid and 'group' in gid]
    assert len({line.get_color() for line in groups}) == 4

  def test_bars_are_as_long_as_the_spread(self):
    points = models()[:2]
    points[1]['spread'] = None
    figure = viz.accuracy_flops(points)
    (bars,) = figure.axes[0].collections
    ends = [path.vertices[:, 1].tolist() for path in bars.get_paths()]
    assert ends == [
      [pytest.approx(0.60), pytest.approx(0.60)],
      [pytest.approx(0.73), pytest.approx(0.75)],
    ]
    # From the lowest to the highest, which the mean need not halve.
    points[1]['spread'] = (0.03, 0.01)
    (bars,) = viz.accuracy_flops(points).axes[0].collections
    lower, upper = bars.get_paths()[0].vertices[:, 1]
    assert (lower, upper) == (pytest.approx(0.57), pytest.approx(0.61))

  def test_the_frontier_is_what_none_beats(self, rng):
    points = [
      {'flops': f, 'accuracy': a}
      for f, a in rng.integers(0, 12, (60, 2)).tolist()
      if a < 3 + f
    ]
    front = scatter.frontier(points)
    assert 3 < len(front) < 12

    def beats(p, q):
      no_worse = p['flops'] <= q['flops'] and p['accuracy'] >= q['accuracy']
      return no_worse and p != q

    expected = [q for q in points if not any(beats(p, q) for p in points)]
    unique = {(q['flops'], q['accuracy']) for q in expected}
    assert [(q['flops'], q['accuracy']) for q in front] == sorted(unique)


def test_seeds_are_dots_and_their_mean_a_bar(seen):
  rows = {'sigmoid': [3.1, 3.2, 3.15], 'raw': [3.3], 'not yet': []}
  groups = {'first': rows, 'second': {'dense': [1.5]}, 'none': {'x': []}}
  figure = viz.seed_dots(groups, xlabel='loss', title='Which is best')
  first, second = figure.axes

  def points(gid):
    return [line.get_xydata().tolist() for line in seen.marks(first, gid)]

  assert points('run') == [[[3.1, 0], [3.2, 0], [3.15, 0]], [[3.3, 1]]]
  assert points('mean') == [[[pytest.approx(3.15), 0]], [[3.3, 1]]]
  assert seen.ticks(first.yaxis) == ['sigmoid', 'raw']
  assert second.get_title(loc='left') == 'second'
  assert second.get_xlabel() == 'loss'
  # The first row is on top.
  assert first.get_ylim()[0] > first.get_ylim()[1]
