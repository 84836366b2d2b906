"""Pictures of experts: the right colour on each token, and the right bars."""

import itertools

import numpy as np
import pytest

from mod_jax import viz
from mod_jax.viz import experts
from mod_jax.viz import images

pytestmark = pytest.mark.filterwarnings('error')

LAYERS = (1, 3)
NONE, AWAY = viz.NO_EXPERT, viz.NOT_THERE


def centres(collection):
  """Returns the colour of each cell by its place."""
  colors = collection.get_facecolor()
  places = [p.vertices[:4].mean(axis=0) for p in collection.get_paths()]
  # One colour may stand for all.
  colors = [colors[i % len(colors)] for i in range(len(places))]
  return {
    tuple(place.tolist()): tuple(color[:3].tolist())
    for place, color in zip(places, colors, strict=True)
  }


def places(values_RL):
  return {(float(c), float(LAYERS[r])) for r, c in np.argwhere(values_RL)}


@pytest.mark.parametrize('num_experts', [1, 2, 8, 9, 64])
def test_no_two_experts_share_a_colour(num_experts):
  colors = experts.expert_colors(num_experts)
  assert colors.shape == (num_experts, 3)
  pairs = itertools.combinations(colors.tolist(), 2)
  least = min((np.abs(np.subtract(*pair)).max() for pair in pairs), default=1)
  assert least > (0.15 if num_experts <= 8 else 0.01)


class TestExpertMap:
  @pytest.mark.parametrize('num_experts', [8, 64])
  def test_each_cell_is_what_becomes_of_the_token(self, rng, seen, num_experts):
    expert_RL = rng.integers(AWAY, num_experts, (2, 40))
    expert_RL[0, :5], expert_RL[1, :5] = AWAY, NONE
    more_RL = (expert_RL >= 0) & (rng.random((2, 40)) < 0.5)
    dropped_RL = expert_RL == NONE
    figure = viz.expert_map(
      expert_RL,
      'x' * 40,
      layers=LAYERS,
      num_experts=num_experts,
      more_RL=more_RL,
      dropped_RL=dropped_RL,
      num_layers=5,
      columns=16,
    )
    taken, empty, marked, numbered = {}, {}, {'more': [], 'dropped': []}, {}
    for axes in seen.axes(figure, 'panel'):
      taken |= centres(seen.mark(axes, 'taken'))
      empty |= centres(seen.mark(axes, 'empty'))
      for name, found in marked.items():
        found += seen.mark(axes, name).get_offsets().round().tolist()
      for e in range(num_experts):
        for numbers in seen.marks(axes, f'number {e}'):
          numbered |= dict.fromkeys(map(tuple, numbers.get_offsets()), e)
    colors = experts.expert_colors(num_experts)
    assert taken == {
      (float(c), float(LAYERS[r])): tuple(colors[expert_RL[r, c]].tolist())
      for r, c in np.argwhere(expert_RL >= 0)
    }
    # White, and nothing at all where the block passes the token by.
    assert empty == dict.fromkeys(places(expert_RL == NONE), (1.0, 1.0, 1.0))
    assert set(map(tuple, marked['more'])) == places(more_RL)
    assert set(map(tuple, marked['dropped'])) == places(dropped_RL)
    # Colours alone tell eight experts apart, no more.
    assert numbered == {
      (float(c), float(LAYERS[r])): expert_RL[r, c]
      for r, c in np.argwhere(expert_RL >= 0)
      if num_experts > 8
    }

  def test_colours_the_text_where_experts_leave_tokens_out(self, seen):
    expert_RL = np.array([[0, 1, NONE, AWAY], [0, NONE, NONE, 1]])
    for given, shown in ((expert_RL, [2, 1, 0, 1]), (expert_RL * 0, [0] * 4)):
      figure = viz.expert_map(given, 'abcd', layers=LAYERS, num_experts=2)
      (load,) = seen.marks(seen.axes(figure, 'panel')[0], 'load')
      assert load.get_array().tolist() == shown
      assert bool(seen.axes(figure, 'load_bar')) == any(shown)

  def test_says_what_there_is_and_nothing_else(self, seen):
    expert_RL = np.array([[0, 1, NONE, AWAY], [0, NONE, AWAY, AWAY]])
    given = {'layers': LAYERS, 'num_experts': 2, 'num_layers': 4}
    said = seen.said(viz.expert_map(expert_RL, 'abcd', **given))
    assert '2 of 4 blocks have 2 experts. On average 62.5%' in said
    assert 'experts take 60.0%' in said
    for words in ('no expert takes it', 'does not reach', 'without experts'):
      assert words in said
    assert 'slot' not in said
    assert 'heaviest' not in said
    said = seen.said(viz.expert_map(expert_RL * 0, 'abcd', **given))
    assert 'no expert takes it' not in said
    assert 'reach' not in said


def test_patches_have_the_colour_of_their_expert(rng, seen):
  pictures = rng.integers(0, 200, (2, 8, 8, 3), dtype=np.uint8)
  expert_RBL = rng.integers(AWAY, 3, (2, 2, 16))
  more_RBL = expert_RBL == 1
  figure = viz.expert_patches(
    pictures,
    expert_RBL,
    layers=LAYERS,
    grid=(4, 4),
    num_experts=3,
    more_RBL=more_RBL,
    labels=['a', 'b'],
  )
  colors = experts.expert_colors(3)
  for axes, (b, r) in zip(
    seen.axes(figure, 'map'), itertools.product(range(2), range(2)), strict=True
  ):
    shown_HWC = np.asarray(axes.images[-1].get_array())
    grey_HWC = images.greyed(pictures[b])
    white_HWC = 0.85 + 0.15 * pictures[b] / 255
    for i, expert in enumerate(expert_RBL[r, b]):
      patch = np.s_[i // 4 * 2 : i // 4 * 2 + 2, i % 4 * 2 : i % 4 * 2 + 2]
      want = {
        NONE: grey_HWC[patch],
        AWAY: white_HWC[patch],
      }.get(expert, 0.28 * grey_HWC[patch] + 0.72 * colors[expert])
      np.testing.assert_allclose(shown_HWC[patch], want, atol=0.003)
    dots = seen.mark(axes, 'more').get_offsets() // 1
    cells = np.argwhere(more_RBL[r, b].reshape(4, 4))[:, ::-1]
    assert dots.tolist() == cells.tolist()
    own = expert_RBL[r, b]
    struck = [path.vertices for path in seen.mark(axes, 'empty').get_paths()]
    empty = np.argwhere(own.reshape(4, 4) == NONE)[:, ::-1]
    assert [ends.min(axis=0).tolist() for ends in struck] == empty.tolist()
    assert f'take {(own >= 0).sum()} of 16' in axes.get_xlabel()
  said = seen.said(figure)
  for words in (
    'struck through: no expert',
    'Whitened: the patch',
    'A dot: several',
  ):
    assert words in said


def test_bars_are_the_shares(rng, seen):
  share_RX = rng.random((2, 6))
  figure = viz.expert_load(
    share_RX,
    layers=LAYERS,
    num_experts=4,
    targets_X=[0.125] * 4 + [0.25] * 2,
    none_R=[0.5, 0.25],
  )
  for r, axes in enumerate(figure.axes):
    assert axes.get_title(loc='left') == f'Block {LAYERS[r]}'
    bars = seen.marks(axes, 'expert'), seen.marks(axes, 'no-op')
    heights = [[bar.get_height() for bar in found] for found in bars]
    assert heights[0] == share_RX[r, :4].tolist()
    # Both targets are one line.
    assert np.multiply(heights[1], 2) == pytest.approx(share_RX[r, 4:])
    assert set(seen.mark(axes, 'target').get_ydata()) == {0.125}
    # No-ops stand apart.
    assert bars[1][0].get_x() > bars[0][-1].get_x() + 1.5
  facts = seen.texts(figure, 'facts')[0]
  busiest = share_RX[0, :4].max() / share_RX[0, :4].mean()
  assert facts.splitlines() == [
    f'busiest: {busiest:.2f} x the mean',
    '50.0% without any expert',
    f'no-ops: {share_RX[0, 4:].sum():.1%} of the tokens, target 50.0%',
  ]


class TestExpertCurves:
  def records(self, **more):
    found = [
      {'step': s, 'kind': 'train', 'experts/busiest': 3 - s / 100, 'loss': 1.0}
      for s in range(20)
    ]
    for step in (10, 19):
      held_out = {'top_k/experts/busiest': 1.5, 'never/experts/busiest': 9.0}
      found.append({'step': step, 'kind': 'eval', **held_out})
    return [record | more for record in found]

  def test_lines_hold_the_records(self, seen):
    records = self.records(**{'experts/null': 0.25})
    figure = viz.expert_curves(records, null_target=0.5)
    busiest, null = figure.axes
    assert seen.mark(busiest, 'train').get_xydata().tolist() == [
      [s, 3 - s / 100] for s in range(20)
    ]
    held_out = seen.mark(busiest, 'top_k/busiest')
    assert held_out.get_xydata().tolist() == [[10, 1.5], [19, 1.5]]
    assert not seen.marks(busiest, 'never/busiest')
    for axes, reference in ((busiest, 1.0), (null, 0.5)):
      assert set(seen.mark(axes, 'reference').get_ydata()) == {reference}

  def test_leaves_out_what_is_always_0(self, seen):
    records = self.records(**{'experts/null': 0.0, 'experts/dropped': 0.0})
    figure = viz.expert_curves(records)
    assert len(figure.axes) == 1
    assert '0 throughout: no-ops, dropped.' in seen.said(figure)

  def test_without_records(self, seen):
    assert 'Nothing recorded' in seen.said(viz.expert_curves([]))
