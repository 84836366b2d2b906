"""Pictures over images show the arrays' numbers, at any count, legibly."""

import itertools

from matplotlib.legend import Legend
import numpy as np
import pytest

from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.viz import images
from mod_jax.viz import scatter

pytestmark = pytest.mark.filterwarnings('error')

ODD = '$a$ 漢\x00\n🙂 and a long text that must be wrapped or cut somewhere'


def photos(rng, count, height=8, width=8):
  return rng.integers(0, 200, (count, height, width, 3), dtype=np.uint8)


def pixels(axes):
  return np.asarray(axes.images[-1].get_array())


def outlined(axes):
  (found,) = [c for c in axes.collections if c.get_gid() == 'outline']
  return {
    tuple(sorted(map(tuple, path.vertices.tolist())))
    for path in found.get_paths()
  }


class TestVeiled:
  def test_changes_exactly_the_other_patches(self, rng):
    (image,) = photos(rng, 1, 6, 8)
    seen_L = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1], bool)
    shown = images.veiled(image, seen_L, (3, 4))
    assert shown.dtype == np.uint8
    for y, x in itertools.product(range(6), range(8)):
      if seen_L[y // 2 * 4 + x // 2]:
        np.testing.assert_array_equal(shown[y, x], image[y, x])
      else:
        expected = 0.15 * image[y, x] + 0.85 * 150
        np.testing.assert_allclose(shown[y, x], expected, atol=0.51)

  def test_black_and_white_stay_apart(self):
    image = np.array([[[0] * 3, [255] * 3]], np.uint8)
    shown = images.veiled(image, [False, False], (1, 2))
    assert shown[0, :, 0].tolist() == [128, 166]


class TestPatchMaps:
  def test_a_row_per_image_and_a_column_per_block(self, rng, seen):
    pictures = photos(rng, 2)
    processed_RBL = rng.random((3, 2, 16)) < 0.4
    figure = viz.patch_maps(
      pictures, processed_RBL, layers=(5, 1, 3), grid=(4, 4), num_layers=6
    )
    assert len(figure.axes) == 2 * 4
    assert seen.titles(figure) == [
      'image',
      'block 5',
      'block 1',
      'block 3',
    ]
    for b, axes in enumerate(seen.axes(figure, 'image')):
      np.testing.assert_array_equal(pixels(axes), pictures[b])
    for axes, (b, r) in zip(
      seen.axes(figure, 'map'),
      itertools.product(range(2), range(3)),
      strict=True,
    ):
      expected = images.veiled(pictures[b], processed_RBL[r, b], (4, 4))
      np.testing.assert_array_equal(pixels(axes), expected)
      count = processed_RBL[r, b].sum()
      assert axes.get_xlabel() == f'{count} of 16 ({count / 16:.0%})'
    # Rows below each other, columns beside each other, in this order.
    corners = [
      tuple(axes.get_position().p0.round(6).tolist()) for axes in figure.axes
    ]
    assert corners == sorted(corners, key=lambda c: (-c[1], c[0]))
    assert len({c[1] for c in corners}) == 2
    assert len({c[0] for c in corners}) == 4
    share = f'{processed_RBL.mean():.1%}'
    assert f'3 of 6 blocks are routed and process {share}' in seen.said(figure)

  def test_outlines_what_is_processed(self, seen):
    white = np.full((1, 4, 6, 3), 255, np.uint8)
    processed_RBL = np.array([1, 1, 0, 0, 0, 0]).reshape(1, 1, 6)
    figure = viz.patch_maps(white, processed_RBL, layers=[1], grid=(2, 3))
    (axes,) = seen.axes(figure, 'map')
    # Two patches side by side, with no line between them.
    assert outlined(axes) == {
      ((0, 0), (1, 0)),
      ((1, 0), (2, 0)),
      ((0, 1), (1, 1)),
      ((1, 1), (2, 1)),
      ((0, 0), (0, 1)),
      ((2, 0), (2, 1)),
    }
    assert axes.get_xlim() == (0, 3)
    assert axes.get_ylim() == (2, 0)
    # White as they are, the others are grey and hatched.
    assert {tuple(pixel) for pixel in pixels(axes)[2:].reshape(-1, 3)} == {
      (166,) * 3
    }
    (hatched,) = [c for c in axes.collections if c.get_gid() == 'hatch']
    assert hatched.get_hatch()
    assert len(hatched.get_paths()) == 4

  def test_the_aspect_is_the_image_s(self, rng):
    figure = viz.patch_maps(
      photos(rng, 1, 8, 16), np.ones((1, 1, 8)), layers=[0], grid=(4, 2)
    )
    figure.draw_without_rendering()
    for axes in figure.axes:
      box = axes.get_window_extent()
      assert box.width / box.height == pytest.approx(2)

  def test_labels_stand_beside_their_rows(self, rng, seen):
    figure = viz.patch_maps(
      photos(rng, 2),
      np.ones((1, 2, 16)),
      layers=[1],
      grid=(4, 4),
      labels=['cat', '$dog$'],
    )
    first, second = seen.axes(figure, 'image')
    assert first.get_ylabel() == 'cat'
    # Escaped, or it would be mathematics.
    assert second.get_ylabel() == r'\$dog\$'


class TestTokenStages:
  def test_shows_what_each_stage_leaves(self, rng, seen):
    pictures = photos(rng, 2)
    rank_BL = rng.random((2, 16)).argsort(axis=1)
    kept_SBL = np.stack([rank_BL < 11, rank_BL < 7, rank_BL < 0])
    figure = viz.token_stages(
      pictures,
      kept_SBL,
      grid=(4, 4),
      blocks=(3, 6, 9),
      labels=['ab'] * 2,
    )
    before = [f'before block {b}' for b in (3, 6, 9)]
    assert seen.titles(figure) == ['image', *before]
    for i, axes in enumerate(seen.axes(figure, 'map')):
      b, s = divmod(i, 3)
      expected = images.veiled(pictures[b], kept_SBL[s, b], (4, 4))
      np.testing.assert_array_equal(pixels(axes), expected)
      shown = ('11 of 16 (69%)', '7 of 16 (44%)', '0 of 16 (0%)')[s]
      assert axes.get_xlabel() == shown
    assert not outlined(axes)


class TestAttentionMaps:
  def test_a_row_per_block_and_a_column_per_head(self, rng, seen):
    (image,) = photos(rng, 1)
    maps_RHL = rng.random((2, 3, 16)) * [[[1.0]], [[0.01]]]
    figure = viz.attention_maps(image, maps_RHL, layers=(0, 4), grid=(4, 4))
    pictures = seen.axes(figure, 'image')
    assert len(pictures) == len(seen.axes(figure, 'bar')) == 2
    maps = seen.axes(figure, 'map')
    assert len(maps) == 6
    for i, axes in enumerate(maps):
      r, h = divmod(i, 3)
      np.testing.assert_array_equal(pixels(axes), maps_RHL[r, h].reshape(4, 4))
      # One scale for a row, and each row its own.
      assert axes.images[0].get_clim() == (0, maps_RHL[r].max())
    heads = [f'head {h}' for h in range(3)]
    assert seen.titles(figure) == ['image', *heads]
    assert [a.get_ylabel() for a in pictures] == ['block 0', 'block 4']

  def test_a_few_huge_values_do_not_darken_the_rest(self, rng, seen):
    maps_RHL = rng.random((1, 2, 256))
    maps_RHL[0, 1, 3] = 50
    figure = viz.attention_maps(
      photos(rng, 1, 16, 16)[0], maps_RHL, layers=[2], grid=(16, 16)
    )
    for axes in seen.axes(figure, 'map'):
      assert 0.9 < axes.images[0].get_clim()[1] < 1
    (bar,) = seen.axes(figure, 'bar')
    assert bar._colorbar.extend == 'max'

  @pytest.mark.parametrize('value', [0.0, 0.25, -1.0])
  def test_constant_maps_are_drawn(self, rng, seen, value):
    figure = viz.attention_maps(
      photos(rng, 1)[0], np.full((1, 1, 16), value), layers=[0], grid=(4, 4)
    )
    low, high = seen.axes(figure, 'map')[0].images[0].get_clim()
    assert low <= min(value, 0)
    assert low < high
    figure.canvas.draw()


class TestKeepProbability:
  @pytest.mark.parametrize('stages', [1, 3, 6])
  def test_a_map_per_stage_on_one_scale(self, rng, seen, stages):
    mean_SL = rng.uniform(0.3, 0.6, (stages, 12))
    blocks = [3 * s for s in range(stages)]
    figure = viz.keep_probability(
      mean_SL, grid=(3, 4), blocks=blocks, count=1797
    )
    maps = seen.axes(figure, 'map')
    assert len(maps) == stages
    assert len(seen.axes(figure, 'bar')) == 1
    for axes, mean_L in zip(maps, mean_SL, strict=True):
      np.testing.assert_array_equal(pixels(axes), mean_L.reshape(3, 4))
      assert axes.images[0].get_clim() == (0, 1)
      assert axes.get_xlabel() == f'{mean_L.mean():.1%} on average'
    assert seen.titles(figure) == [f'before block {b}' for b in blocks]
    assert '1,797 images' in seen.said(figure)

  def test_rounding_is_no_error(self, seen):
    figure = viz.keep_probability(
      np.full((1, 4), 1 + 1e-6), grid=(2, 2), blocks=[3], count=1
    )
    assert (pixels(seen.axes(figure, 'map')[0]) == 1).all()
    assert '1 image in' in seen.said(figure)


class TestLoadMap:
  @pytest.mark.parametrize('count', [1, 6])
  def test_each_image_beside_its_load(self, rng, seen, count):
    pictures = photos(rng, count)
    load_BL = rng.integers(0, 4, (count, 16))
    figure = viz.load_map(
      pictures,
      load_BL,
      grid=(4, 4),
      maximum=4,
      labels=[ODD, *'abcde'][:count],
    )
    for b, (image, heat) in enumerate(
      zip(seen.axes(figure, 'image'), seen.axes(figure, 'map'), strict=True)
    ):
      np.testing.assert_array_equal(pixels(image), pictures[b])
      np.testing.assert_array_equal(pixels(heat), load_BL[b].reshape(4, 4))
      assert heat.images[-1].get_clim() == (0, 4)
      assert 0 < heat.images[-1].get_alpha() < 1
      beneath = np.asarray(heat.images[0].get_array())
      assert (beneath[..., :1] == beneath).all()
      assert beneath.std() > 0
      assert heat.get_xlabel() == f'{load_BL[b].mean():.3g} on average'
      left, right = (a.get_position() for a in (image, heat))
      assert left.x1 < right.x0
      assert left.y0 == pytest.approx(right.y0)
    (bar,) = seen.axes(figure, 'bar')
    assert bar.get_ylabel() == 'learners per token'
    ticks = [tick for tick in bar.get_yticks() if 0 <= tick <= 4]
    assert ticks == [0, 1, 2, 3, 4]

  @pytest.mark.parametrize(
    ('load', 'high'), [(0.0, 1.0), (2.5, 2.5), (1e-9, 1e-9)]
  )
  def test_constant_loads_end_the_scale(self, rng, seen, load, high):
    figure = viz.load_map(
      photos(rng, 1), np.full((1, 16), load), grid=(4, 4), unit=ODD
    )
    assert seen.axes(figure, 'map')[0].images[-1].get_clim() == (0, high)
    figure.canvas.draw()


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
    axes = figure.axes[0]
    assert 'GFLOPs' in axes.get_xlabel()
    assert axes.yaxis.get_major_formatter()(0.725, 0) == '72.5%'
    figure.canvas.draw()
    legend_box = legend.get_window_extent()
    assert axes.get_window_extent().x1 < legend_box.x0
    assert legend_box.x1 <= figure.bbox.x1

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
    assert 'spread over runs' in seen.said(figure)
    for point in points:
      del point['spread']
    figure = viz.accuracy_flops(points)
    assert not figure.axes[0].collections
    assert 'spread' not in seen.said(figure)

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

  def test_draws_the_frontier_if_asked(self, seen):
    assert 'pareto' not in self.lines(viz.accuracy_flops(models()))
    figure = viz.accuracy_flops(models(), pareto=True)
    np.testing.assert_array_equal(
      self.lines(figure)['pareto'].get_xydata(), [(2.6, 0.72), (3.4, 0.78)]
    )
    assert 'Pareto' in seen.said(figure.findobj(Legend)[0])
    viz.accuracy_flops(models()[:1], pareto=True).canvas.draw()

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
    found = seen.marks(axes, 'name')
    assert len(found) >= 5
    assert 'far' in seen.texts(axes, 'name')
    boxes = [text.get_window_extent() for text in found]
    frame = axes.get_window_extent()
    marks = axes.transData.transform(
      [(p['flops'], p['accuracy']) for p in points]
    )
    for i, box in enumerate(boxes):
      assert box.count_overlaps(boxes[:i]) == 0
      assert frame.x0 <= box.x0 < box.x1 <= frame.x1
      assert not any(box.contains(*mark) for mark in marks)

  def test_many_points_and_groups_stay_in_the_frame(self, rng, seen):
    points = [
      {
        'name': 'n',
        'group': 'a group with a long name ' * 3 + str(i),
        'flops': rng.random(),
        'accuracy': rng.random() * 90,
      }
      for i in range(63)
    ]
    figure = viz.accuracy_flops(points, ylabel='$ of $')
    assert not seen.texts(figure, 'name')
    figure.canvas.draw()
    box = figure.findobj(Legend)[0].get_window_extent()
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    looks = {
      (line.get_color(), line.get_marker()) for line in figure.axes[0].lines
    }
    assert len(looks) == 63
    assert figure.axes[0].yaxis.get_major_formatter()(50, 0) == '50'
    with pytest.raises(UserError, match='64 groups of points: at most 63'):
      viz.accuracy_flops([*points, {**points[0], 'group': 'b'}])
