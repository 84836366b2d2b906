"""Pictures over a text show the arrays' numbers, whatever the text."""

import itertools

import numpy as np
import pytest

from mod_jax import viz
from mod_jax.viz import experts

pytestmark = pytest.mark.filterwarnings('error')

LAYERS = (1, 3, 5)
# A math sign, a glyph that no font of ours has, controls, a combining mark, an
# emoji, a half surrogate, a soft hyphen, a no-break space, a replacement.
ODD = ('$', '$', '\\', '漢', '\x00', '\x1b', '\r', '\u0301', '🙂', '\udc80')
ODD += ('\xad', '\xa0', '\ufffd', ' ', '\n', '\t', 'é', 'a')
NONE, AWAY = viz.NO_EXPERT, viz.NOT_THERE


def panels(seen, figure):
  return seen.axes(figure, 'panel')


def cells(collection):
  """Returns the colour of each cell by its place."""
  collection.update_scalarmappable()
  colors = collection.get_facecolor()
  middles = [p.vertices[:4].mean(axis=0) for p in collection.get_paths()]
  return {
    tuple(middle.round(6).tolist()): tuple(color[:3].tolist())
    # One colour may stand for all.
    for middle, color in zip(middles, itertools.cycle(colors), strict=False)
  }


def places(mask_RL):
  return {(float(c), float(LAYERS[r])) for r, c in np.argwhere(mask_RL)}


class TestRoutingMap:
  @pytest.mark.parametrize('weighted', [False, True])
  def test_fills_exactly_the_chosen_cells(self, rng, seen, weighted):
    score_RL = rng.normal(size=(3, 130))
    score_RL[0, :4] = np.nan, 9, 9, 0
    chosen_RL = ~(score_RL < 0.5)
    figure = viz.routing_map(
      chosen_RL,
      'x' * 130,
      layers=LAYERS,
      num_layers=7,
      weights_RL=score_RL if weighted else None,
    )
    assert len(panels(seen, figure)) == 3
    drawn, weights = {}, []
    for axes in panels(seen, figure):
      chosen = seen.mark(axes, 'chosen')
      drawn |= cells(chosen)
      weights += [] if not weighted else chosen.get_array().tolist()
    assert drawn.keys() == places(chosen_RL)
    if weighted:
      # A weight that is no number is black, not lost.
      assert drawn[0.0, 1.0] == (0, 0, 0)
      assert sum(w is None for w in weights) == 1
      assert chosen.norm.vmin == -chosen.norm.vmax < 0

  def test_every_character_stands_under_its_column(self, rng, seen):
    pieces = ['a'] * 60 + [*ODD]
    chosen_RL = rng.random((3, len(pieces))) < 0.5
    figure = viz.routing_map(chosen_RL, pieces, layers=LAYERS, num_layers=6)
    figure.canvas.draw()
    shown = [
      (x, text)
      for axes in panels(seen, figure)
      for x, text in zip(axes.get_xticks(), seen.ticks(axes.xaxis), strict=True)
    ]
    expected = 'a' * 60 + '$$\\' + '□' * 8 + '·\ufffd·⏎→éa'
    assert shown == list(enumerate(expected))
    first, second = panels(seen, figure)
    boxes = [t.get_window_extent() for t in first.get_xticklabels()]
    # As mathematics the dollars would vanish.
    assert all(box.width > 3 for box in boxes)
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))

  def test_counts_the_routed_blocks_of_a_token(self, seen):
    chosen_RL = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]])
    figure = viz.routing_map(chosen_RL, 'abcd', layers=LAYERS, num_layers=6)
    load = seen.mark(panels(seen, figure)[0], 'load')
    assert list(load.get_array()) == [3, 2, 0, 1]
    text = seen.words(figure)
    assert 'Routed blocks: 3 of 6, with 50.0% of these tokens' in text
    assert 'Passed by all of them: 25%' in text


def test_shares_stand_over_their_tokens(seen):
  share_RL = np.linspace(0, 1, 160).reshape(2, 80)
  figure = viz.token_load(
    *(share_RL, [f'$w{i}$' for i in range(80)]),
    layers=[1, 4],
    unit='share of all',
    title='',
  )
  drawn = [axes.images[0] for axes in panels(seen, figure)]
  # The first block at the bottom, each token once.
  joined = np.concatenate([image.get_array() for image in drawn], axis=1)
  np.testing.assert_array_equal(joined, share_RL)
  assert [image.get_extent()[0] for image in drawn] == [-0.5, 63.5]
  assert {image.origin for image in drawn} == {'lower'}


@pytest.mark.parametrize('num_experts', [8, 64])
def test_each_cell_is_what_becomes_of_the_token(rng, seen, num_experts):
  expert_RL = rng.integers(AWAY, num_experts, (3, 80))
  expert_RL[0, :5], expert_RL[1, :5] = AWAY, NONE
  more_RL = (expert_RL >= 0) & (rng.random((3, 80)) < 0.5)
  figure = viz.expert_map(
    expert_RL,
    'x' * 80,
    layers=LAYERS,
    num_experts=num_experts,
    more_RL=more_RL,
    dropped_RL=expert_RL == NONE,
    num_layers=7,
    title='',
  )
  taken, empty, marked = {}, {}, {'more': set(), 'dropped': set()}
  for axes in panels(seen, figure):
    taken |= cells(seen.mark(axes, 'taken'))
    empty |= cells(seen.mark(axes, 'empty'))
    for name, found in marked.items():
      offsets = seen.mark(axes, name).get_offsets().round().tolist()
      found |= set(map(tuple, offsets))
  colors = experts.expert_colors(num_experts)
  wanted = {
    (float(c), float(LAYERS[r])): expert_RL[r, c]
    for r, c in np.argwhere(expert_RL >= 0)
  }
  assert taken == {place: tuple(colors[e]) for place, e in wanted.items()}
  # White, and nothing at all where the block passes the token by.
  assert empty == dict.fromkeys(places(expert_RL == NONE), (1.0, 1.0, 1.0))
  assert marked['more'] == places(more_RL)
  assert marked['dropped'] == places(expert_RL == NONE)
  # Colours alone tell eight experts apart, no more.
  assert bool(seen.marks(figure, 'number 0')) == (num_experts > 8)


def test_bars_are_the_shares(rng, seen):
  share_RX = rng.random((2, 6))
  figure = viz.expert_load(
    share_RX,
    layers=(1, 3),
    num_experts=4,
    targets_X=[0.125] * 4 + [0.25] * 2,
    none_R=[0.5, 0.25],
    title='',
  )
  for r, axes in enumerate(figure.axes):
    bars = seen.marks(axes, 'expert'), seen.marks(axes, 'no-op')
    heights = [[bar.get_height() for bar in group] for group in bars]
    assert heights[0] == share_RX[r, :4].tolist()
    # Both targets are one line.
    assert np.multiply(heights[1], 2) == pytest.approx(share_RX[r, 4:])
    assert set(seen.mark(axes, 'target').get_ydata()) == {0.125}
  busiest = share_RX[0, :4].max() / share_RX[0, :4].mean()
  assert f'busiest: {busiest:.2f} x the mean' in seen.texts(figure, 'facts')[0]
