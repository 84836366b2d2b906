"""Bars and histograms show the arrays' numbers."""

from matplotlib import colors
import numpy as np
import pytest

from mod_jax import viz
from mod_jax.viz import style

pytestmark = pytest.mark.filterwarnings('error')


class TestComputeHistogram:
  def test_bars_hold_the_images_and_marks_the_statistics(self, rng, seen):
    load_B = rng.normal(0.4, 0.05, 300).clip(0, 1)
    (axes,) = viz.compute_histogram(load_B, budget=0.35).axes
    mean = seen.mark(axes, 'mean').get_xdata()[0]
    assert mean == pytest.approx(load_B.mean())
    assert seen.mark(axes, 'budget').get_xdata()[0] == 0.35
    band = seen.mark(axes, 'spread')
    assert band.get_x() == pytest.approx(load_B.mean() - load_B.std())
    assert band.get_width() == pytest.approx(2 * load_B.std())
    bars = seen.marks(axes, 'bars')
    for bar in bars[:-1]:
      # The edges are rounded, and the smallest load is one of them.
      start = bar.get_x() - 1e-12
      end = start + bar.get_width()
      assert bar.get_height() == ((load_B >= start) & (load_B < end)).sum()
    assert sum(bar.get_height() for bar in bars) == 300

  @pytest.mark.parametrize('load', [0.0, 1.0, 1 + 1e-7])
  def test_equal_images_are_one_bar(self, seen, load):
    (axes,) = viz.compute_histogram(np.full(5, load), budget=0.3).axes
    assert seen.mark(axes, 'bars').get_height() == 5
    low, high = axes.get_xlim()
    assert low < min(load, 0.3) <= max(load, 0.3) < high


def test_columns_are_sorted_by_how_fast_the_error_falls(seen):
  # Slow, fast, medium, of different sizes; and one that had no error at first.
  distance_KT = np.array([[1, 10, 2, 0], [0.9, 1, 1, 0], [0.8, 1, 0.4, 1]])
  figure = viz.error_by_learners(distance_KT, title='', module='block_1/mlp')
  (axes,) = seen.axes(figure, 'map')
  (image,) = axes.images
  np.testing.assert_allclose(
    image.get_array(), [[1, 1, 1], [0.1, 0.5, 0.9], [0.1, 0.2, 0.8]]
  )
  (means,) = seen.axes(figure, 'means')
  widths = [bar.get_width() for bar in means.patches]
  np.testing.assert_allclose(widths, distance_KT.mean(axis=1))
  # The same rows at the same heights.
  assert means.get_ylim() == axes.get_ylim()
  assert 'without an error at k = 0: 1.' in seen.words(figure)


class TestScoreHistogram:
  def histogram(self, axes):
    """Returns the area of chosen and passed bars, in tokens."""
    by_color = {
      colors.to_hex(patch.get_facecolor()).upper(): patch.get_path().vertices
      for patch in axes.patches
    }
    chosen, passed = by_color[style.CHOSEN], by_color[style.PASSED]
    width = np.diff(np.unique(chosen[:, 0])).mean()
    return area(chosen) / width, area(passed) / width

  def test_counts_all_tokens_in_two_colours(self, rng):
    score_RBL = rng.normal(size=(2, 3, 40))
    chosen_RBL = score_RBL > [[[0.9]], [[0.2]]]
    # Far beyond the frame: counted in the last bin, not lost.
    score_RBL[0, 0, 0], chosen_RBL[0, 0, 0] = 50, True
    score_RBL[1, 1, 10:], chosen_RBL[1, 1, 10:] = -np.inf, False  # Padding.
    figure = viz.score_histogram(score_RBL, chosen_RBL, layers=(1, 3))
    titles = [axes.get_title(loc='left') for axes in figure.axes]
    assert titles == ['Block 1', 'Block 3']
    for axes, chosen_BL, total in zip(
      figure.axes, chosen_RBL, (120, 90), strict=True
    ):
      chosen = chosen_BL.sum()
      assert self.histogram(axes) == pytest.approx((chosen, total - chosen))

  def test_marks_zero_and_the_thresholds(self, rng, seen):
    score_RBL = rng.normal(size=(2, 3, 40)) + 5  # Zero lies far outside.
    chosen_RBL = score_RBL > 6
    figure = viz.score_histogram(
      score_RBL, chosen_RBL, layers=(1, 3), thresholds=[6.5, np.inf]
    )
    figure.canvas.draw()
    for axes in figure.axes:
      assert set(seen.mark(axes, 'router').get_xdata()) == {0}
      assert axes.get_xlim()[0] < 0
    threshold = seen.mark(figure.axes[0], 'threshold')
    assert set(threshold.get_xdata()) == {6.5}
    assert not seen.marks(figure.axes[1], 'threshold')
    facts = [seen.texts(axes, 'facts')[0] for axes in figure.axes]
    assert f'≥ threshold: {(score_RBL[0] >= 6.5).mean():.1%}' in facts[0]
    assert f'chosen {chosen_RBL[1].mean():.1%} · > 0: 100.0%' in facts[1]


def area(vertices):
  """The shoelace formula."""
  x, y = vertices.T
  return abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def test_ranks_are_bars_and_the_suggested_have_diamonds(seen):
  shares = [1.0, 0.25, 0.5, 0.75]
  figure = viz.attention_ranks(
    shares, routed=[1, 3], suggested=[1, 2], facts='', title=''
  )
  bars = seen.marks(figure, 'share')
  assert [bar.get_height() for bar in bars] == shares
  assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == [0, 1, 2, 3]
  filled = [colors.to_hex(bar.get_facecolor()).upper() for bar in bars]
  assert filled == [style.FAINT, style.CHOSEN] * 2
  diamonds = seen.mark(figure, 'suggested').get_xydata().tolist()
  assert diamonds == [[1, 0.25], [2, 0.5]]
