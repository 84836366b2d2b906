"""Pictures over images show the arrays' numbers, at any count."""

import itertools

import numpy as np
import pytest

from mod_jax import viz
from mod_jax.viz import experts, images

pytestmark = pytest.mark.filterwarnings('error')

NONE, AWAY = viz.NO_EXPERT, viz.NOT_THERE


def rows(seen, figure):
  """Returns the pictures of each row."""
  return [
    [np.asarray(image.get_array()) for image in axes.images]
    for axes in seen.axes(figure, 'row')
  ]


def starts(axes):
  """Returns where the pictures begin."""
  return [image.get_extent()[0] for image in axes.images]


def lines(axes, gid):
  (collection,) = [c for c in axes.collections if c.get_gid() == gid]
  return [path.vertices for path in collection.get_paths()]


def test_the_veil_changes_exactly_the_other_patches(photos):
  (image,) = photos(1, 6, 8)
  seen_L = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1], bool)
  shown = images.veiled(image, seen_L, (3, 4))
  assert shown.dtype == np.uint8
  for y, x in itertools.product(range(6), range(8)):
    if seen_L[y // 2 * 4 + x // 2]:
      np.testing.assert_array_equal(shown[y, x], image[y, x])
    else:
      expected = 0.15 * image[y, x] + 0.85 * 150
      np.testing.assert_allclose(shown[y, x], expected, atol=0.51)
  # Black and white stay apart, and neither is as the veil.
  image = np.array([[[0] * 3, [255] * 3]], np.uint8)
  shown = images.veiled(image, [False, False], (1, 2))
  assert shown[0, :, 0].tolist() == [128, 166]


def test_patch_maps_have_a_row_per_image_and_a_column_per_block(
  rng, photos, seen
):
  pictures, processed_RBL = photos(2), rng.random((3, 2, 16)) < 0.4
  figure = viz.patch_maps(
    *(pictures, processed_RBL),
    layers=(5, 1, 3),
    grid=(4, 4),
    num_layers=6,
    labels=['cat', '$dog$'],
  )
  for b, row in enumerate(rows(seen, figure)):
    veiled = [
      images.veiled(pictures[b], seen_L, (4, 4))
      for seen_L in processed_RBL[:, b]
    ]
    np.testing.assert_array_equal(row, [pictures[b], *veiled])
  shares = processed_RBL.mean(axis=(1, 2))
  told = [f'block {i}: {x:.0%}' for i, x in zip((5, 1, 3), shares, strict=True)]
  assert seen.texts(figure, 'bottom') == ['image', *told]
  counts = [f'{n} of 16 ({n / 16:.0%})' for n in processed_RBL.sum(-1).T.flat]
  assert [text for text in seen.texts(figure, 'top') if text] == counts
  labels = [seen.ticks(axes.yaxis) for axes in seen.axes(figure, 'row')]
  # Escaped, or it would be mathematics.
  assert labels == [['cat'], [r'\$dog\$']]


def test_stages_show_what_each_leaves(rng, photos, seen):
  pictures, rank_BL = photos(2), rng.random((2, 16)).argsort(axis=1)
  kept_SBL = np.stack([rank_BL < 11, rank_BL < 0])
  figure = viz.token_stages(pictures, kept_SBL, grid=(4, 4), blocks=(3, 6))
  for b, (_, first, second) in enumerate(rows(seen, figure)):
    expected = images.veiled(pictures[b], kept_SBL[0, b], (4, 4))
    np.testing.assert_array_equal(first, expected)
    assert (second != pictures[b]).any(axis=-1).mean() > 0.9
  assert {'11 of 16 (69%)', '0 of 16 (0%)'} <= set(seen.texts(figure, 'top'))


def test_attention_has_a_row_per_block_and_a_column_per_head(rng, photos, seen):
  (image,) = photos(1)
  maps_RHL = rng.random((3, 3, 16)) * [[[1.0]], [[0.01]], [[0.0]]]
  figure = viz.attention_maps(
    image, maps_RHL, layers=(0, 4, 5), grid=(4, 4), title=''
  )
  for r, (axes, row) in enumerate(
    zip(seen.axes(figure, 'row'), rows(seen, figure), strict=True)
  ):
    np.testing.assert_array_equal(row[0], image)
    np.testing.assert_array_equal(row[1:], maps_RHL[r].reshape(3, 4, 4))
    # One scale for a row, and each row its own.
    ((low, high),) = {image.get_clim() for image in axes.images[1:]}
    assert low == 0 < high
    assert high == maps_RHL[r].max() or r == 2
    assert seen.ticks(axes.yaxis) == [f'block {(0, 4, 5)[r]}']


def test_a_map_of_keeping_per_stage_on_one_scale(rng, seen):
  mean_SL = rng.uniform(0.3, 0.6, (6, 12))
  blocks = [3 * s for s in range(6)]
  figure = viz.keep_probability(mean_SL, grid=(3, 4), blocks=blocks, count=1797)
  shown = list(itertools.chain(*rows(seen, figure)))
  np.testing.assert_array_equal(shown, mean_SL.reshape(-1, 3, 4))
  for axes in seen.axes(figure, 'row'):
    assert {image.get_clim() for image in axes.images} == {(0, 1)}
  means = [f'{mean:.1%} on average' for mean in mean_SL.mean(axis=1)]
  assert seen.texts(figure, 'top') == means


def loads(pictures, load_BL):
  told = {'labels': ['x'] * len(pictures), 'unit': 'learners', 'title': ''}
  return viz.load_map(pictures, load_BL, grid=(4, 4), **told)


def test_each_image_stands_beside_its_load(rng, photos, seen):
  pictures, load_BL = photos(6), rng.integers(0, 4, (6, 16))
  figure = loads(pictures, load_BL)
  shown = list(itertools.chain(*rows(seen, figure)))
  for b in range(6):
    image, grey, load = shown[3 * b : 3 * b + 3]
    np.testing.assert_array_equal(image, pictures[b])
    np.testing.assert_array_equal(load, load_BL[b].reshape(4, 4))
    assert (grey[..., :1] == grey).all()
    assert grey.std() > 0
  assert seen.axes(figure, 'row')[0].images[2].get_clim() == (0, load_BL.max())
  means = [f'{mean:.3g} on average' for mean in load_BL.mean(axis=1)]
  assert [text for text in seen.texts(figure, 'top') if text] == means
  (bar,) = seen.axes(figure, 'bar')
  assert bar.get_ylabel() == 'learners'


@pytest.mark.parametrize(('load', 'high'), [(0.0, 1.0), (1e-9, 1e-9)])
def test_constant_loads_end_the_scale(photos, seen, load, high):
  figure = loads(photos(1), np.full((1, 16), load))
  assert seen.axes(figure, 'row')[0].images[-1].get_clim() == (0, high)


class TestComputeExtremes:
  def test_draws_the_cheapest_and_the_dearest(self, rng, photos, seen):
    pictures, load_BL = photos(9), rng.random((9, 4))
    load_B = np.array([0.5, 0.2, 0.9, 0.4, 0.2, 0.6, 0.8, 0.3, 0.7])
    figure = viz.compute_extremes(
      *(pictures, load_B, load_BL),
      grid=(2, 2),
      count=2,
      labels=list('abcdefghi'),
    )
    shown = list(itertools.chain(*rows(seen, figure)))
    expected = [1, 4, 2, 6]
    np.testing.assert_array_equal(shown[::3], pictures[expected])
    np.testing.assert_array_equal(
      shown[2::3], load_BL[expected].reshape(4, 2, 2)
    )
    assert [text for text in seen.texts(figure, 'bottom') if text] == [
      'cheapest 1: 0.2 · b',
      'cheapest 2: 0.2 · e',
      'dearest 1: 0.9 · c',
      'dearest 2: 0.8 · g',
    ]

  @pytest.mark.parametrize(('count', 'drawn'), [(1, 1), (5, 2)])
  def test_never_an_image_twice(self, rng, photos, seen, count, drawn):
    load_B, load_BL = rng.random(count), rng.random((count, 4))
    figure = viz.compute_extremes(photos(count), load_B, load_BL, grid=(2, 2))
    shown = list(itertools.chain(*rows(seen, figure)))
    assert len(shown) == 3 * 2 * drawn


def test_patches_have_the_colour_of_their_expert(rng, photos, seen):
  pictures = photos(2)
  expert_RBL = rng.integers(AWAY, 3, (2, 2, 16))
  more_RBL = expert_RBL == 1
  figure = viz.expert_patches(
    *(pictures, expert_RBL),
    layers=(1, 3),
    grid=(4, 4),
    num_experts=3,
    more_RBL=more_RBL,
    labels=['cat', 'dog'],
    num_layers=4,
    title='',
  )
  colors = experts.expert_colors(3)
  for b, axes in enumerate(seen.axes(figure, 'row')):
    grey_HWC = images.greyed(pictures[b])
    faded_HWC = 0.85 + 0.15 * pictures[b] / 255
    cells = {NONE: [], 'more': []}
    for r, start in enumerate(starts(axes)[1:]):
      shown_HWC = rows(seen, figure)[b][1 + r]
      for i, expert in enumerate(expert_RBL[r, b]):
        y, x = divmod(i, 4)
        patch = np.s_[2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        want = {NONE: grey_HWC[patch], AWAY: faded_HWC[patch]}.get(
          expert, 0.28 * grey_HWC[patch] + 0.72 * colors[expert]
        )
        np.testing.assert_allclose(shown_HWC[patch], want, atol=0.003)
        if expert == NONE:
          cells[NONE].append((start + x, y))
        if more_RBL[r, b, i]:
          cells['more'].append((start + x + 0.8, y + 0.2))
    corners = [ends.min(axis=0) for ends in lines(axes, 'empty')]
    np.testing.assert_allclose(corners, cells[NONE])
    dots = seen.mark(axes, 'more').get_offsets()
    np.testing.assert_allclose(dots, cells['more'])


def test_merged_patches_share_their_mean_colour(photos, seen):
  pictures, place_RBL = photos(1), np.arange(16).reshape(1, 1, 16)
  place_RBL = np.concatenate([place_RBL, place_RBL % 8])
  figure = viz.merged_patches(pictures, place_RBL, layers=(0, 2), grid=(4, 4))
  ((_, alone, halved),) = rows(seen, figure)
  side = len(alone) // 4
  upper, lower = (pictures[0, y : y + side, :side] for y in (0, 2 * side))
  for shown, pixels in ((alone, upper), (halved, np.stack([upper, lower]))):
    mean = pixels.reshape(-1, 3).mean(axis=0)
    np.testing.assert_allclose(shown[:side, :side].mean((0, 1)), mean, atol=1)
  assert {'tokens: 16', 'tokens: 8'} <= set(seen.texts(figure, 'top'))
