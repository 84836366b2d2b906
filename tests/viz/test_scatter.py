"""Points stand where their numbers are, under legible names."""

from matplotlib.legend import Legend
from matplotlib.text import Text
import numpy as np
import pytest

from mod_jax import viz
from mod_jax.viz import scatter

pytestmark = pytest.mark.filterwarnings('error')


def correlated(value=0.5, p=0.01):
  return {'pearson': value, 'pearson_p': p, 'spearman': -value, 'spearman_p': p}


class TestImportanceScatter:
  def test_points_hold_the_arrays(self, rng, seen):
    score_RN = rng.random((2, 30))
    importance_RN = 3 * score_RN + 1
    figure = viz.importance_scatter(
      importance_RN,
      score_RN,
      layers=(1, 3),
      correlations=[correlated(0.5, 0.0123), correlated(-0.25, 2e-7)],
      title='',
    )
    titles = [axes.get_title(loc='left') for axes in figure.axes]
    assert titles == ['Block 1', 'Block 3']
    for r, axes in enumerate(figure.axes):
      lines = {line.get_gid(): line for line in axes.lines}
      np.testing.assert_array_equal(
        lines['tokens'].get_xydata(),
        np.stack([score_RN[r], importance_RN[r]]).T,
      )
      x, y = lines['trend'].get_data()
      np.testing.assert_allclose(y, 3 * x + 1)
    first, second = (seen.texts(axes, 'facts')[0] for axes in figure.axes)
    assert (
      first == 'Pearson r = 0.50 (p = 0.012)\nSpearman ρ = -0.50 (p = 0.012)'
    )
    assert 'Pearson r = -0.25 (p = 2e-07)' in second
    figure.canvas.draw()


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


class TestAccuracyFlops:
  def lines(self, figure):
    return {line.get_gid(): line for line in figure.axes[0].lines}

  def test_a_sorted_line_per_group_with_its_own_look(self, seen):
    figure = viz.accuracy_flops(models())
    lines = self.lines(figure)
    np.testing.assert_array_equal(
      lines['group MoD'].get_xydata(), [(2.6, 0.60), (3.4, 0.70), (4.0, 0.74)]
    )
    np.testing.assert_array_equal(
      lines['group A-MoD'].get_xydata(), [(2.6, 0.72), (3.4, 0.78)]
    )
    groups = [line for gid, line in lines.items() if gid and 'group' in gid]
    assert len({line.get_color() for line in groups}) == 3
    assert len({line.get_marker() for line in groups}) == 3
    (legend,) = figure.findobj(Legend)
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ['MoD', 'A-MoD', 'dense']
    assert sorted(seen.texts(figure, 'name')) == sorted(
      p['name'] for p in models()
    )

  def test_bars_are_as_long_as_the_spread(self, seen):
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
    assert 'spread over runs' in seen.words(figure)
    # A single run has none.
    alone = [point | {'spread': (0.0, 0.0)} for point in points]
    words = seen.words(viz.accuracy_flops(alone))
    assert 'spread over runs' not in words

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

  def test_draws_the_frontier_if_asked(self):
    assert 'pareto' not in self.lines(viz.accuracy_flops(models()))
    figure = viz.accuracy_flops(models(), pareto=True)
    np.testing.assert_array_equal(
      self.lines(figure)['pareto'].get_xydata(), [(2.6, 0.72), (3.4, 0.78)]
    )

  def test_names_meet_nothing_even_in_a_crowd(self, rng, seen):
    points = [
      {
        'name': f'model number {i}',
        'group': f'{i % 3}',
        'flops': 3 + rng.normal() * 0.02,
        'accuracy': 0.8 + rng.normal() * 0.002,
      }
      for i in range(20)
    ]
    points.append({**points[0], 'name': 'far', 'flops': 9, 'accuracy': 0.9})
    figure = viz.accuracy_flops(points)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    names = seen.marks(axes, 'name')
    assert len(names) >= 5
    assert 'far' in seen.texts(axes, 'name')
    # Without the lines that tie names to their markers.
    boxes = [Text.get_window_extent(text) for text in names]
    frame = axes.get_window_extent()
    marks = axes.transData.transform(
      [(p['flops'], p['accuracy']) for p in points]
    )
    for i, box in enumerate(boxes):
      assert box.count_overlaps(boxes[:i]) == 0
      assert frame.x0 <= box.x0 < box.x1 <= frame.x1
      assert not any(box.contains(*mark) for mark in marks)


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
