"""Pictures over images show the arrays' numbers, at any count, legibly."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.viz import images
from mod_jax.viz import scatter

pytestmark = pytest.mark.filterwarnings('error')

ODD = '$a$ 漢\x00\n🙂 and a long text that must be wrapped or cut somewhere'


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def photos(rng, count, height=8, width=8):
  return rng.integers(0, 200, (count, height, width, 3), dtype=np.uint8)


def kinds(figure, kind):
  return [axes for axes in figure.axes if axes.get_label() == kind]


def pixels(axes):
  return np.asarray(axes.images[-1].get_array())


def texts(where, gid):
  """Returns the texts of axes or of all axes of a figure, in order."""
  found = where.findobj(lambda a: a.get_gid() == gid)
  return [text.get_text() for text in found]


def said(figure):
  found = figure.findobj(lambda a: hasattr(a, 'get_text'))
  return ' '.join(a.get_text() for a in found).replace('\n', ' ')


def outlined(axes):
  (found,) = [c for c in axes.collections if c.get_gid() == 'outline']
  return {
    tuple(sorted(map(tuple, path.vertices.tolist())))
    for path in found.get_paths()
  }


def shown_texts(figure):
  """Yields the texts that are drawn; ticks beyond the limits are not."""
  yield from figure.texts
  for legend in figure.legends:
    yield from legend.get_texts()
  for axes in figure.axes:
    yield from axes.texts
    yield from (axes.title, axes._left_title)
    for axis in (axes.xaxis, axes.yaxis):
      yield axis.label
      for tick in axis._update_ticks():
        yield from (t for t in (tick.label1, tick.label2) if t.get_visible())


def assert_legible(figure, panels=True):
  """No text meets another or a panel, and none leaves the figure."""
  figure.draw_without_rendering()
  found = [text for text in shown_texts(figure) if text.get_text().strip()]
  assert found
  boxes = [text.get_window_extent() for text in found]
  for i, box in enumerate(boxes):
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, found[i]
    assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, found[i]
    assert box.count_overlaps(boxes[:i]) == 0, found[i]
  if panels:
    frames = [axes.get_window_extent() for axes in figure.axes]
    for i, frame in enumerate(frames):
      assert frame.count_overlaps(frames[:i]) == 0
      assert frame.count_overlaps(boxes) == 0


class TestWhitened:
  def test_changes_exactly_the_other_patches(self, rng):
    (image,) = photos(rng, 1, 6, 8)
    seen_L = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1], bool)
    shown = images.whitened(image, seen_L, (3, 4))
    assert shown.dtype == np.uint8
    for y, x in itertools.product(range(6), range(8)):
      if seen_L[y // 2 * 4 + x // 2]:
        np.testing.assert_array_equal(shown[y, x], image[y, x])
      else:
        expected = 0.15 * image[y, x] + 0.85 * 255
        np.testing.assert_allclose(shown[y, x], expected, atol=0.51)
        assert (shown[y, x] > image[y, x]).all()

  def test_black_and_white_stay_apart(self):
    image = np.array([[[0] * 3, [255] * 3]], np.uint8)
    shown = images.whitened(image, [False, False], (1, 2))
    assert shown[0, :, 0].tolist() == [217, 255]


class TestPatchMaps:
  def test_a_row_per_image_and_a_column_per_block(self, rng):
    pictures = photos(rng, 2)
    processed_RBL = rng.random((3, 2, 16)) < 0.4
    figure = viz.patch_maps(
      pictures, processed_RBL, layers=(5, 1, 3), grid=(4, 4), num_layers=6
    )
    assert len(figure.axes) == 2 * 4
    assert texts(figure, 'heading') == [
      'image',
      'block 5',
      'block 1',
      'block 3',
    ]
    for b, axes in enumerate(kinds(figure, 'image')):
      np.testing.assert_array_equal(pixels(axes), pictures[b])
    for axes, (b, r) in zip(
      kinds(figure, 'map'), itertools.product(range(2), range(3)), strict=True
    ):
      expected = images.whitened(pictures[b], processed_RBL[r, b], (4, 4))
      np.testing.assert_array_equal(pixels(axes), expected)
      count = processed_RBL[r, b].sum()
      assert texts(axes, 'caption') == [f'{count} of 16 ({count / 16:.0%})']
    # Rows below each other, columns beside each other, in this order.
    corners = [
      tuple(axes.get_position().p0.round(6).tolist()) for axes in figure.axes
    ]
    assert corners == sorted(corners, key=lambda c: (-c[1], c[0]))
    assert len({c[1] for c in corners}) == 2
    assert len({c[0] for c in corners}) == 4
    share = f'{processed_RBL.mean():.1%}'
    assert f'3 of 6 blocks are routed and process {share}' in said(figure)

  def test_outlines_what_is_processed(self):
    white = np.full((1, 4, 6, 3), 255, np.uint8)
    processed_RBL = np.array([1, 1, 0, 0, 0, 0]).reshape(1, 1, 6)
    figure = viz.patch_maps(white, processed_RBL, layers=[1], grid=(2, 3))
    (axes,) = kinds(figure, 'map')
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

  def test_the_aspect_is_the_image_s(self, rng):
    figure = viz.patch_maps(
      photos(rng, 1, 8, 16), np.ones((1, 1, 8)), layers=[0], grid=(4, 2)
    )
    figure.draw_without_rendering()
    for axes in figure.axes:
      box = axes.get_window_extent()
      assert box.width / box.height == pytest.approx(2)

  @pytest.mark.parametrize(
    ('count', 'routed', 'size'),
    [(1, 1, (8, 8)), (2, 12, (32, 4)), (8, 3, (8, 8)), (3, 0, (4, 64))],
  )
  def test_nothing_overlaps(self, rng, count, routed, size):
    figure = viz.patch_maps(
      photos(rng, count, *size),
      rng.random((routed, count, 16)) < 0.5,
      layers=range(100, 100 + routed),
      grid=(4, 4),
      title='At $5 and $6, ' + 'the title is long ' * 20,
      labels=[ODD, 'W' * 40, '', 'x', *['label'] * 8][:count],
    )
    assert len(figure.axes) == count * (routed + 1)
    assert_legible(figure)

  def test_labels_stand_beside_their_rows(self, rng):
    figure = viz.patch_maps(
      photos(rng, 2),
      np.ones((1, 2, 16)),
      layers=[1],
      grid=(4, 4),
      labels=['cat', '$dog$'],
    )
    first, second = kinds(figure, 'image')
    assert texts(first, 'label') == ['cat']
    assert texts(second, 'label') == ['$dog$']
    (label,) = second.findobj(lambda a: a.get_gid() == 'label')
    assert not label.get_parse_math()

  def test_a_model_without_routed_blocks(self, rng):
    figure = viz.patch_maps(
      photos(rng, 1), np.zeros((0, 1, 16)), layers=[], grid=(4, 4)
    )
    assert 'No block is routed' in said(figure)

  @pytest.mark.parametrize(
    ('change', 'words'),
    [
      ({'images': np.zeros((2, 8, 8, 3))}, 'float64.*expected shape.*uint8'),
      ({'images': np.zeros((2, 8, 8, 1), np.uint8)}, r'\(2, 8, 8, 1\)'),
      ({'images': np.zeros((0, 8, 8, 3), np.uint8)}, 'none of them 0'),
      ({'grid': (3, 4)}, '8 x 8 pixels do not divide into 3 x 4 patches'),
      ({'grid': (0, 4)}, r'grid=\(0, 4\): expected two whole numbers'),
      ({'grid': 16}, 'grid=16: expected two'),
      (
        {'processed': np.ones((1, 2, 17))},
        r'\(1, 2, 17\).*\(1, 2, 16\).*class',
      ),
      ({'processed': np.full((1, 2, 16), 7)}, 'such as 7.*not the positions'),
      ({'processed': np.full((1, 2, 16), np.nan)}, 'such as nan'),
      ({'layers': [1.5]}, r'layers=\[1.5\]'),
      ({'layers': [9]}, 'from 0 to 5'),
      ({'layers': [-1], 'num_layers': None}, 'numbers from 0 on'),
      ({'labels': ['one']}, 'labels of 2 images'),
      ({'labels': 'ab'}, "'ab' as labels"),
    ],
  )
  def test_refuses_what_does_not_fit(self, rng, change, words):
    given = {
      'images': photos(rng, 2),
      'processed': np.ones((1, 2, 16)),
      'layers': [1],
      'grid': (4, 4),
      'num_layers': 6,
    } | change
    with pytest.raises(UserError, match=words):
      viz.patch_maps(given.pop('images'), given.pop('processed'), **given)

  def test_refuses_more_than_a_picture_holds(self, rng):
    with pytest.raises(UserError, match='400 rows.*limit of 200: draw fewer'):
      viz.patch_maps(
        photos(rng, 400), np.ones((1, 400, 16)), layers=[1], grid=(4, 4)
      )


class TestTokenStages:
  def test_shows_what_each_stage_leaves(self, rng):
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
    assert texts(figure, 'heading') == ['image', *before]
    for i, axes in enumerate(kinds(figure, 'map')):
      b, s = divmod(i, 3)
      expected = images.whitened(pictures[b], kept_SBL[s, b], (4, 4))
      np.testing.assert_array_equal(pixels(axes), expected)
      shown = ('11 of 16 (69%)', '7 of 16 (44%)', '0 of 16 (0%)')[s]
      assert texts(axes, 'caption') == [shown]
    assert not outlined(axes)
    assert_legible(figure)

  def test_long_headings_and_captions_do_not_meet(self, rng):
    figure = viz.token_stages(
      photos(rng, 1, 32, 32),
      rng.random((12, 1, 1024)) < 0.5,
      grid=(32, 32),
      blocks=range(100, 112),
    )
    assert_legible(figure)

  def test_refuses_what_does_not_fit(self, rng):
    with pytest.raises(UserError, match='for 2 blocks, 1 images'):
      viz.token_stages(
        photos(rng, 1), np.ones((3, 1, 16)), grid=(4, 4), blocks=(3, 6)
      )
    with pytest.raises(UserError, match=r'blocks=\[3, 3\]'):
      viz.token_stages(
        photos(rng, 1), np.ones((2, 1, 16)), grid=(4, 4), blocks=(3, 3)
      )


class TestAttentionMaps:
  def test_a_row_per_block_and_a_column_per_head(self, rng):
    (image,) = photos(rng, 1)
    maps_RHL = rng.random((2, 3, 16)) * [[[1.0]], [[0.01]]]
    figure = viz.attention_maps(image, maps_RHL, layers=(0, 4), grid=(4, 4))
    assert len(kinds(figure, 'image')) == len(kinds(figure, 'bar')) == 2
    maps = kinds(figure, 'map')
    assert len(maps) == 6
    for i, axes in enumerate(maps):
      r, h = divmod(i, 3)
      np.testing.assert_array_equal(pixels(axes), maps_RHL[r, h].reshape(4, 4))
      # One scale for a row, and each row its own.
      assert axes.images[0].get_clim() == (0, maps_RHL[r].max())
    heads = [f'head {h}' for h in range(3)]
    assert texts(figure, 'heading') == ['image', *heads]
    assert texts(figure, 'label') == ['block 0', 'block 4']
    assert_legible(figure)

  def test_a_few_huge_values_do_not_darken_the_rest(self, rng):
    maps_RHL = rng.random((1, 2, 256))
    maps_RHL[0, 1, 3] = 50
    figure = viz.attention_maps(
      photos(rng, 1, 16, 16)[0], maps_RHL, layers=[2], grid=(16, 16)
    )
    for axes in kinds(figure, 'map'):
      assert 0.9 < axes.images[0].get_clim()[1] < 1
    (bar,) = kinds(figure, 'bar')
    assert bar._colorbar.extend == 'max'

  @pytest.mark.parametrize('value', [0.0, 0.25, -1.0])
  def test_constant_maps_are_drawn(self, rng, value):
    figure = viz.attention_maps(
      photos(rng, 1)[0], np.full((1, 1, 16), value), layers=[0], grid=(4, 4)
    )
    low, high = kinds(figure, 'map')[0].images[0].get_clim()
    assert low <= min(value, 0)
    assert low < high
    figure.canvas.draw()

  def test_nothing_overlaps_in_a_large_model(self, rng):
    figure = viz.attention_maps(
      photos(rng, 1)[0], rng.random((2, 16, 16)), layers=(2, 11), grid=(4, 4)
    )
    assert_legible(figure)

  @pytest.mark.parametrize(
    ('shape', 'words'),
    [
      ((1, 2, 17), r'\(1, 2, 17\) for 1 blocks.*\(1, heads, 16\)'),
      ((1, 16), r'\(1, 16\)'),
      ((2, 2, 16), r'\(2, 2, 16\)'),
      ((1, 0, 16), 'one head at least'),
    ],
  )
  def test_refuses_other_shapes(self, rng, shape, words):
    with pytest.raises(UserError, match=words):
      viz.attention_maps(
        photos(rng, 1)[0], np.zeros(shape), layers=[0], grid=(4, 4)
      )

  def test_refuses_what_is_not_finite(self, rng):
    maps_RHL = np.zeros((1, 1, 16))
    maps_RHL[0, 0, 5] = np.nan
    with pytest.raises(UserError, match=r'hold nan at \(0, 0, 5\) and 1 such'):
      viz.attention_maps(photos(rng, 1)[0], maps_RHL, layers=[0], grid=(4, 4))
    with pytest.raises(UserError, match=r'shape \(2, 8, 8, 3\)'):
      viz.attention_maps(
        photos(rng, 2), np.zeros((1, 1, 16)), layers=[0], grid=(4, 4)
      )


class TestKeepProbability:
  @pytest.mark.parametrize('stages', [1, 3, 6])
  def test_a_map_per_stage_on_one_scale(self, rng, stages):
    mean_SL = rng.uniform(0.3, 0.6, (stages, 12))
    blocks = [3 * s for s in range(stages)]
    figure = viz.keep_probability(
      mean_SL, grid=(3, 4), blocks=blocks, count=1797
    )
    maps = kinds(figure, 'map')
    assert len(maps) == stages
    assert len(kinds(figure, 'bar')) == 1
    for axes, mean_L in zip(maps, mean_SL, strict=True):
      np.testing.assert_array_equal(pixels(axes), mean_L.reshape(3, 4))
      assert axes.images[0].get_clim() == (0, 1)
      assert texts(axes, 'caption') == [f'{mean_L.mean():.1%} on average']
    assert texts(figure, 'heading') == [f'before block {b}' for b in blocks]
    assert '1,797 images' in said(figure)
    assert_legible(figure)

  def test_rounding_is_no_error(self):
    figure = viz.keep_probability(
      np.full((1, 4), 1 + 1e-6), grid=(2, 2), blocks=[3], count=1
    )
    assert (pixels(kinds(figure, 'map')[0]) == 1).all()
    assert '1 image in' in said(figure)

  @pytest.mark.parametrize(
    ('change', 'words'),
    [
      ({'mean': np.full((1, 4), 1.5)}, 'probability of 1.5.*from 0 to'),
      ({'mean': np.array([[0.5, -0.2, 0, 1]])}, 'probability of -0.2'),
      ({'mean': np.full((1, 4), np.nan)}, 'hold nan at .*4 such values'),
      ({'mean': np.zeros((1, 5))}, r'\(1, 5\) for 1 stages.*\(1, 4\)'),
      ({'mean': np.zeros((0, 4)), 'blocks': []}, 'one stage at least'),
      ({'count': 0}, 'count=0'),
    ],
  )
  def test_refuses_what_does_not_fit(self, change, words):
    given = {
      'mean': np.zeros((1, 4)),
      'grid': (2, 2),
      'blocks': [3],
      'count': 9,
    } | change
    with pytest.raises(UserError, match=words):
      viz.keep_probability(given.pop('mean'), **given)


class TestLoadMap:
  @pytest.mark.parametrize('count', [1, 6])
  def test_each_image_beside_its_load(self, rng, count):
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
      zip(kinds(figure, 'image'), kinds(figure, 'map'), strict=True)
    ):
      np.testing.assert_array_equal(pixels(image), pictures[b])
      np.testing.assert_array_equal(pixels(heat), load_BL[b].reshape(4, 4))
      assert heat.images[-1].get_clim() == (0, 4)
      assert 0 < heat.images[-1].get_alpha() < 1
      beneath = np.asarray(heat.images[0].get_array())
      assert (beneath[..., :1] == beneath).all()
      assert beneath.std() > 0
      assert texts(heat, 'caption') == [f'{load_BL[b].mean():.3g} on average']
      left, right = (a.get_position() for a in (image, heat))
      assert left.x1 < right.x0
      assert left.y0 == pytest.approx(right.y0)
    (bar,) = kinds(figure, 'bar')
    assert bar.get_ylabel() == 'learners per token'
    ticks = [tick for tick in bar.get_yticks() if 0 <= tick <= 4]
    assert ticks == [0, 1, 2, 3, 4]
    assert_legible(figure)

  @pytest.mark.parametrize(
    ('load', 'high'), [(0.0, 1.0), (2.5, 2.5), (1e-9, 1e-9)]
  )
  def test_constant_loads_end_the_scale(self, rng, load, high):
    figure = viz.load_map(
      photos(rng, 1), np.full((1, 16), load), grid=(4, 4), unit=ODD
    )
    assert kinds(figure, 'map')[0].images[-1].get_clim() == (0, high)
    figure.canvas.draw()

  @pytest.mark.parametrize(
    ('load', 'maximum', 'words'),
    [
      (np.full((2, 16), -1), None, 'load of -1: expected 0 or more'),
      (np.full((2, 16), 5), 4, 'load of 5 is over maximum=4'),
      (np.full((2, 16), np.inf), None, 'hold inf'),
      (np.ones((2, 16)), 0, 'maximum=0'),
      (np.ones((2, 16)), math.nan, 'maximum=nan'),
      (np.ones((2, 17)), None, r'\(2, 17\).*expected shape \(2, 16\)'),
    ],
  )
  def test_refuses_what_does_not_fit(self, rng, load, maximum, words):
    with pytest.raises(UserError, match=words):
      viz.load_map(photos(rng, 2), load, grid=(4, 4), maximum=maximum)


def correlated(value=0.5, p=0.01):
  return {'pearson': value, 'pearson_p': p, 'spearman': -value, 'spearman_p': p}


class TestImportanceScatter:
  def test_points_hold_the_arrays(self, rng):
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
    first, second = (texts(axes, 'facts')[0] for axes in figure.axes)
    assert (
      first == 'Pearson r = 0.50 (p = 0.012)\nSpearman ρ = -0.50 (p = 0.012)'
    )
    assert 'Pearson r = -0.25 (p = 2e-07)' in second
    figure.canvas.draw()

  @pytest.mark.parametrize('routed', [1, 5])
  def test_nothing_overlaps(self, rng, routed):
    score_RN = rng.random((routed, 20)) * 1e-4
    figure = viz.importance_scatter(
      -score_RN,
      score_RN,
      layers=range(routed),
      correlations=[correlated()] * routed,
    )
    assert len(figure.axes) == routed
    assert_legible(figure, panels=False)

  def test_needs_no_spread(self):
    undefined = correlated(math.nan, math.nan)
    figure = viz.importance_scatter(
      np.zeros((1, 4)), np.ones((1, 4)), layers=[1], correlations=[undefined]
    )
    assert 'Pearson undefined' in said(figure)
    figure.canvas.draw()
    for routed, words in ((0, 'No block is routed'), (1, 'No tokens')):
      figure = viz.importance_scatter(
        np.zeros((routed, 0)),
        np.zeros((routed, 0)),
        layers=range(routed),
        correlations=[correlated(1, 0)] * routed,
      )
      assert words in said(figure)
      figure.canvas.draw()

  @pytest.mark.parametrize(
    ('change', 'words'),
    [
      ({'importance': np.zeros((1, 5))}, r'\(1, 5\).*\(1, 4\).*\(1, tokens\)'),
      ({'importance': np.full((1, 4), np.nan)}, 'importances hold nan'),
      ({'score': np.full((1, 4), -np.inf)}, 'scores hold -inf'),
      ({'correlations': []}, '0 correlations for 1'),
      ({'correlations': [{'pearson': 0.5}]}, 'block 1 are.*spearman_p'),
      ({'correlations': [correlated(1.5)]}, 'pearson 1.5 with p 0.01'),
      ({'correlations': [correlated(0.5, 2)]}, 'with p 2'),
      ({'layers': [1, 1]}, r'layers=\[1, 1\]'),
    ],
  )
  def test_refuses_what_does_not_fit(self, change, words):
    given = {
      'importance': np.zeros((1, 4)),
      'score': np.zeros((1, 4)),
      'layers': [1],
      'correlations': [correlated()],
    } | change
    with pytest.raises(UserError, match=words):
      viz.importance_scatter(
        given.pop('importance'), given.pop('score'), **given
      )


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

  def test_a_sorted_line_per_group_with_its_own_look(self):
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
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ['MoD', 'A-MoD', 'dense']
    assert sorted(texts(figure, 'name')) == sorted(p['name'] for p in models())
    axes = figure.axes[0]
    assert 'GFLOPs' in axes.get_xlabel()
    assert axes.yaxis.get_major_formatter()(0.725, 0) == '72.5%'
    figure.canvas.draw()
    legend_box = legend.get_window_extent()
    assert axes.get_window_extent().x1 < legend_box.x0
    assert legend_box.x1 <= figure.bbox.x1

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
    assert 'spread over runs' in said(figure)
    for point in points:
      del point['spread']
    figure = viz.accuracy_flops(points)
    assert not figure.axes[0].collections
    assert 'spread' not in said(figure)

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
    assert 'Pareto' in said(figure.legends[0])
    viz.accuracy_flops(models()[:1], pareto=True).canvas.draw()

  def test_names_meet_nothing_even_in_a_crowd(self, rng):
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
    found = axes.findobj(lambda a: a.get_gid() == 'name')
    assert len(found) >= 5
    assert 'far' in texts(axes, 'name')
    boxes = [text.get_window_extent() for text in found]
    frame = axes.get_window_extent()
    marks = axes.transData.transform(
      [(p['flops'], p['accuracy']) for p in points]
    )
    for i, box in enumerate(boxes):
      assert box.count_overlaps(boxes[:i]) == 0
      assert frame.x0 <= box.x0 < box.x1 <= frame.x1
      assert not any(box.contains(*mark) for mark in marks)

  def test_many_points_and_groups_stay_in_the_frame(self, rng):
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
    assert not texts(figure, 'name')
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    looks = {
      (line.get_color(), line.get_marker()) for line in figure.axes[0].lines
    }
    assert len(looks) == 63
    assert figure.axes[0].yaxis.get_major_formatter()(50, 0) == '50'
    with pytest.raises(UserError, match='64 groups of points: at most 63'):
      viz.accuracy_flops([*points, {**points[0], 'group': 'b'}])

  @pytest.mark.parametrize('pareto', [False, True])
  def test_says_that_there_is_nothing(self, pareto):
    figure = viz.accuracy_flops(iter([]), pareto=pareto)
    assert 'No models measured yet' in said(figure)
    figure.canvas.draw()

  @pytest.mark.parametrize(
    ('change', 'words'),
    [
      ({'flops': None}, r"point 0 \('4.0 G'\) has flops None.*finite"),
      ({'flops': -1}, 'flops -1: expected 0 or more'),
      ({'accuracy': math.nan}, 'accuracy nan'),
      ({'accuracy': '0.5'}, "accuracy '0.5'"),
      ({'spread': -0.1}, 'spread -0.1: expected 0'),
      ({'spread': math.inf}, 'spread inf'),
    ],
  )
  def test_refuses_what_is_no_point(self, change, words):
    with pytest.raises(UserError, match=words):
      viz.accuracy_flops([models()[0] | change])


def test_pyplot_is_never_imported():
  code = (
    'import sys, numpy as np; from mod_jax import viz;'
    'image = np.zeros((1, 2, 2, 3), "uint8"); one = np.ones((1, 1, 4));'
    'viz.patch_maps(image, one, layers=[0], grid=(2, 2)).canvas.draw();'
    'viz.attention_maps(image[0], one, layers=[0], grid=(2, 2));'
    'viz.accuracy_flops([dict(name="a", flops=1, accuracy=1)]);'
    'assert "matplotlib.pyplot" not in sys.modules;'
    'assert "jax" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
