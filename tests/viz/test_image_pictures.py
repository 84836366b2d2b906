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


def test_the_veil_changes_exactly_the_other_patches(photos):
  (image,) = photos(1, 6, 8)
  seen_L = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1], bool)
  shown = images.veiled(image, seen_L, (3, 4))
  assert shown.dtype == np.uint8
  seen_HW1 = seen_L.reshape(3, 4).repeat(2, 0).repeat(2, 1)[..., None]
  expected = np.where(seen_HW1, image, 0.15 * image + 0.85 * 150)
  np.testing.assert_allclose(shown, expected, atol=0.51)
  assert (shown == image)[seen_HW1[..., 0]].all()
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


@pytest.mark.parametrize('most', [3, 0])
def test_each_image_stands_beside_its_load(rng, photos, seen, most):
  pictures, load_BL = photos(6), rng.integers(0, most + 1, (6, 16))
  told = {'labels': ['x'] * 6, 'unit': 'learners', 'title': ''}
  figure = viz.load_map(pictures, load_BL, grid=(4, 4), **told)
  shown = list(itertools.chain(*rows(seen, figure)))
  np.testing.assert_array_equal(shown[::3], pictures)
  np.testing.assert_array_equal(shown[2::3], load_BL.reshape(6, 4, 4))
  limits = seen.axes(figure, 'row')[0].images[2].get_clim()
  assert limits == (0, most or 1)
  means = [f'{mean:.3g} on average' for mean in load_BL.mean(axis=1)]
  assert [text for text in seen.texts(figure, 'top') if text] == means


@pytest.mark.parametrize(
  ('load', 'expected'),
  [
    ((0.5, 0.2, 0.9, 0.4, 0.2, 0.6, 0.8, 0.3, 0.7), [1, 4, 2, 6]),
    # None is drawn twice.
    ((0.1, 0.2, 0.3), [0, 2]),
    ((0.5, 0.5, 0.5, 0.5), [0, 1, 2, 3]),
    ((0.5,), [0]),
  ],
)
def test_the_cheapest_and_the_dearest(rng, photos, seen, load, expected):
  pictures, load_BL = photos(len(load)), rng.random((len(load), 4))
  figure = viz.compute_extremes(
    *(pictures, np.array(load), load_BL),
    grid=(2, 2),
    count=2,
    labels=list('abcdefghi')[: len(load)],
  )
  shown = list(itertools.chain(*rows(seen, figure)))
  np.testing.assert_array_equal(shown[::3], pictures[expected])
  np.testing.assert_array_equal(
    shown[2::3], load_BL[expected].reshape(-1, 2, 2)
  )
  first, *_ = filter(None, seen.texts(figure, 'bottom'))
  assert first == f'cheapest 1: {min(load)} · {"abc"[expected[0]]}'


def test_names_of_boxes_are_no_mathematics(photos, seen):
  found = [[('a$^$', 0.9, (1, 1, 5, 5))]]
  figure = viz.boxes(photos(1), found, {}, grid=(2, 2))
  figure.draw_without_rendering()
  assert 'a$^$ 0.90' in seen.words(figure)


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
    for r, shown_HWC in enumerate(rows(seen, figure)[b][1:]):
      for i, expert in enumerate(expert_RBL[r, b]):
        y, x = divmod(i, 4)
        patch = np.s_[2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        want = {NONE: grey_HWC[patch], AWAY: faded_HWC[patch]}.get(
          expert, 0.28 * grey_HWC[patch] + 0.72 * colors[expert]
        )
        np.testing.assert_allclose(shown_HWC[patch], want, atol=0.003)
    dots = seen.mark(axes, 'more').get_offsets()
    assert len(dots) == more_RBL[:, b].sum()


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
