"""Pictures of adaptive compute show the arrays' numbers, legibly."""

import numpy as np
import pytest

from mod_jax import viz

pytestmark = pytest.mark.filterwarnings('error')

ODD = '$a$ 漢\x00\n🙂 and a long text that must be cut somewhere'


def marks(seen, figure):
  (axes,) = seen.axes(figure, 'plot')
  return {a.get_gid(): a for a in axes.lines + axes.patches if a.get_gid()}


class TestComputeHistogram:
  def test_bars_hold_the_images_and_marks_the_statistics(self, rng, seen):
    load_B = rng.normal(0.4, 0.05, 300).clip(0, 1)
    figure = viz.compute_histogram(load_B, budget=0.35, unit='of all')
    (axes,) = seen.axes(figure, 'plot')
    found = marks(seen, figure)
    assert found['mean'].get_xdata()[0] == pytest.approx(load_B.mean())
    assert found['budget'].get_xdata()[0] == 0.35
    band = found['spread']
    assert band.get_x() == pytest.approx(load_B.mean() - load_B.std())
    assert band.get_width() == pytest.approx(2 * load_B.std())
    bars = [bar for bar in axes.patches if bar.get_gid() == 'bars']
    for bar in bars[:-1]:
      # The edges are rounded, and the smallest load is one of them.
      start = bar.get_x() - 1e-12
      end = start + bar.get_width()
      assert bar.get_height() == ((load_B >= start) & (load_B < end)).sum()
    assert sum(bar.get_height() for bar in bars) == 300
    mean, std = f'{load_B.mean():.1%}', f'{load_B.std():.1%}'
    assert f'300 images: {mean} of all on average' in seen.said(figure)
    assert f'standard deviation {std}' in seen.said(figure)
    assert 'The budget is 35.0%' in seen.said(figure)

  def test_no_budget(self, rng, seen):
    figure = viz.compute_histogram(rng.random(9))
    assert 'budget' not in marks(seen, figure)
    assert 'budget' not in seen.said(figure)

  @pytest.mark.parametrize('load', [0.0, 1.0, 0.3, 1 + 1e-7])
  @pytest.mark.parametrize('count', [1, 5])
  def test_equal_images_are_one_bar(self, seen, load, count):
    figure = viz.compute_histogram(np.full(count, load), budget=0.3, unit=ODD)
    (axes,) = seen.axes(figure, 'plot')
    bars = [bar for bar in axes.patches if bar.get_gid() == 'bars']
    assert [bar.get_height() for bar in bars] == [count]
    low, high = axes.get_xlim()
    assert low < min(load, 0.3) <= max(load, 0.3) < high

  @pytest.mark.parametrize('tiny', [1e-16, 1e-9, 1e-4])
  def test_almost_equal_images(self, tiny):
    viz.compute_histogram([0.5, 0.5 + tiny, 0.5]).canvas.draw()

  def test_outliers_do_not_make_a_thousand_bars(self, rng, seen):
    load_B = np.append(rng.normal(0.5, 1e-4, 5000), [0, 1])
    figure = viz.compute_histogram(load_B)
    assert len(seen.axes(figure, 'plot')[0].patches) < 70


class TestComputeExtremes:
  def photos(self, rng, count):
    return rng.integers(0, 255, (count, 8, 8, 3), dtype=np.uint8)

  def test_draws_the_cheapest_and_the_dearest(self, rng, seen):
    pictures = self.photos(rng, 9)
    load_B = np.array([0.5, 0.2, 0.9, 0.4, 0.2, 0.6, 0.8, 0.3, 0.7])
    load_BL = rng.random((9, 4))
    figure = viz.compute_extremes(
      pictures,
      load_B,
      load_BL,
      grid=(2, 2),
      count=2,
      labels=list('abcdefghi'),
    )
    expected = [1, 4, 2, 6]
    shown = [a.images[-1].get_array() for a in seen.axes(figure, 'image')]
    np.testing.assert_array_equal(np.stack(shown), pictures[expected])
    heat = seen.axes(figure, 'map')
    for axes, b in zip(heat, expected, strict=True):
      image = axes.images[-1]
      np.testing.assert_array_equal(image.get_array().ravel(), load_BL[b])
      assert image.get_clim() == (0, load_BL[expected].max())
    labels = [a.get_title(loc='left') for a in seen.axes(figure, 'image')]
    assert labels == [
      'cheapest 1: 0.2 · b',
      'cheapest 2: 0.2 · e',
      'dearest 1: 0.9 · c',
      'dearest 2: 0.8 · g',
    ]
    assert 'The 2 cheapest and the 2 dearest of 9 images' in seen.said(figure)
    assert len(seen.axes(figure, 'bar')) == 1
    # Shares throughout: the labels, the captions and the scale.
    assert f'{load_BL[1].mean():.3g} on average' in seen.said(figure)
    assert '%' not in seen.said(figure)

  @pytest.mark.parametrize(('images', 'drawn'), [(2, 1), (5, 2), (8, 4)])
  def test_never_an_image_twice(self, rng, seen, images, drawn):
    load_B = rng.random(images)
    figure = viz.compute_extremes(
      self.photos(rng, images), load_B, rng.random((images, 4)), grid=(2, 2)
    )
    assert len(seen.axes(figure, 'image')) == 2 * drawn

  def test_maximum_ends_the_scale(self, rng, seen):
    figure = viz.compute_extremes(
      self.photos(rng, 4), np.ones(4), np.ones((4, 4)), grid=(2, 2), maximum=4
    )
    assert seen.axes(figure, 'map')[0].images[-1].get_clim() == (0, 4)


class TestErrorByLearners:
  def test_columns_are_sorted_by_how_fast_the_error_falls(self, seen):
    # Slow, fast, medium; of different sizes.
    distance_KT = np.array([[1, 10, 2], [0.9, 1, 1], [0.8, 1, 0.4]])
    figure = viz.error_by_learners(distance_KT, module='block_1/mlp')
    (axes,) = seen.axes(figure, 'map')
    (image,) = axes.images
    np.testing.assert_allclose(
      image.get_array(), [[1, 1, 1], [0.1, 0.5, 0.9], [0.1, 0.2, 0.8]]
    )
    assert image.get_clim() == (0, 1)
    assert image.get_extent() == [0, 3, 2.5, -0.5]
    (means,) = seen.axes(figure, 'means')
    widths = [bar.get_width() for bar in means.patches]
    np.testing.assert_allclose(widths, distance_KT.mean(axis=1))
    assert seen.texts(means, 'value') == ['4.33', '0.967 (22%)', '0.733 (17%)']
    # The same rows at the same heights.
    assert means.get_ylim() == axes.get_ylim()
    assert 'block_1/mlp' in seen.said(figure)
    assert 'left out' not in seen.said(figure)
    assert 'add error' not in seen.said(figure)

  def test_axes_after_the_first_are_tokens(self, rng, seen):
    distance_KBL = rng.random((4, 2, 3))
    one, other = (
      seen.axes(viz.error_by_learners(d), 'map')[0].images[0].get_array()
      for d in (distance_KBL, distance_KBL.reshape(4, 6))
    )
    np.testing.assert_array_equal(one, other)

  def test_tokens_without_error_only_count_in_the_mean(self, seen):
    figure = viz.error_by_learners([[0, 1, 0], [0, 0.5, 1]])
    (axes,) = seen.axes(figure, 'map')
    np.testing.assert_array_equal(axes.images[0].get_array(), [[1], [0.5]])
    assert '2 tokens without an error at k = 0 left out' in seen.said(figure)
    (means,) = seen.axes(figure, 'means')
    widths = [bar.get_width() for bar in means.patches]
    np.testing.assert_allclose(widths, [1 / 3, 0.5])

  def test_learners_may_add_error(self, seen):
    figure = viz.error_by_learners([[1, 1, 1e-300], [0.5, 3, 1e300]])
    assert 'At 66.7% of the places learners add error' in seen.said(figure)
    figure.canvas.draw()

  def test_neighbours_of_many_are_averaged(self, rng, seen):
    distance_KT = np.stack([np.ones(2500), rng.random(2500)])
    figure = viz.error_by_learners(distance_KT)
    (image,) = seen.axes(figure, 'map')[0].images
    shown_KT = np.asarray(image.get_array())
    assert shown_KT.shape == (2, 1000)
    assert image.get_extent()[1] == 2500
    np.testing.assert_array_equal(shown_KT[0], 1)
    ordered_T = np.sort(distance_KT[1])
    assert shown_KT[1, 0] == pytest.approx(ordered_T[:2].mean())
    assert (np.diff(shown_KT[1]) >= 0).all()


def run(name='all three', **change):
  numbers = {
    'accuracy': 0.93,
    'load_mean': 0.402,
    'load_std': 0.05,
    'token_std': 0.21,
  }
  return {'name': name} | numbers | change


class TestLossEffects:
  def test_a_bar_per_row_and_a_panel_per_number(self, seen):
    rows = [run('budget only', load_std=0.004, token_std=0), run(), run(ODD)]
    figure = viz.loss_effects(iter(rows))
    keys = ['accuracy', 'load_mean', 'load_std', 'token_std']
    assert [axes.get_label() for axes in figure.axes] == keys
    for axes, key in zip(figure.axes, keys, strict=True):
      values = [row[key] for row in rows]
      assert [bar.get_width() for bar in axes.patches] == values
      # The first row is on top, and bars start at 0.
      assert axes.get_ylim()[0] > axes.get_ylim()[1]
      assert axes.get_xlim()[0] == 0
      assert seen.texts(axes, 'value') == [f'{value:.1%}' for value in values]
      assert max(axes.get_xticks()) <= max(values)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[:2] == ['budget only', 'all three']
    assert len(names[2].replace(r'\$', '$')) == 40
    assert not any(t.get_text() for t in figure.axes[1].get_yticklabels())
