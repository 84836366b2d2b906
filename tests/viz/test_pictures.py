"""Pictures show what the arrays hold, whatever the text, without a warning."""

import functools
import os
import threading

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
import matplotlib
from matplotlib import colors
from matplotlib import font_manager
from matplotlib.figure import Figure
import numpy as np
from PIL import Image
import pytest

from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.viz import curves
from mod_jax.viz import glyphs
from mod_jax.viz import images
from mod_jax.viz import style

pytestmark = pytest.mark.filterwarnings('error')

LAYERS = (1, 3, 5)
# A math sign, a glyph that no font of ours has, controls, a combining mark, an
# emoji, a half surrogate, a soft hyphen, a no-break space, a replacement.
ODD = ('$', '$', '\\', '漢', '\x00', '\x1b', '\r', '\u0301', '🙂', '\udc80')
ODD += ('\xad', '\xa0', '\ufffd', ' ', '\n', '\t', 'é', 'a')


def routing(rng, length, capacity=0.25, routed=3):
  score_RL = rng.normal(size=(routed, length))
  cut_R1 = np.quantile(score_RL, 1 - capacity, axis=-1, keepdims=True)
  return score_RL, score_RL >= cut_R1


def draw(figure):
  """Renders, which is when matplotlib warns, and returns the pixels."""
  figure.canvas.draw()
  return np.asarray(figure.canvas.buffer_rgba())


def centres(collection):
  return [tuple(p.vertices[:4].mean(axis=0)) for p in collection.get_paths()]


class TestRoutingMap:
  @pytest.mark.parametrize('weighted', [False, True])
  def test_fills_exactly_the_chosen_cells(self, rng, seen, weighted):
    score_RL, chosen_RL = routing(rng, 50)
    figure = viz.routing_map(
      chosen_RL,
      'x' * 50,
      layers=LAYERS,
      num_layers=7,
      weights_RL=score_RL if weighted else None,
      columns=16,
    )
    assert len(seen.axes(figure, 'panel')) == 4
    drawn = {}
    for axes in seen.axes(figure, 'panel'):
      (cells,) = seen.marks(axes, 'chosen')
      drawn |= dict.fromkeys(centres(cells))
      if weighted:
        drawn |= zip(centres(cells), cells.get_array(), strict=True)
    expected = {
      (float(c), float(LAYERS[r])): score_RL[r, c]
      for r, c in np.argwhere(chosen_RL)
    }
    assert len(expected) == chosen_RL.sum() > 30
    assert drawn.keys() == expected.keys()
    if weighted:
      assert drawn == expected
      limits = cells.norm.vmin, cells.norm.vmax
      assert limits[0] == -limits[1] < 0
    draw(figure)

  def test_draws_every_block_with_the_first_at_the_bottom(self, rng, seen):
    _, chosen_RL = routing(rng, 20)
    figure = viz.routing_map(chosen_RL, 'x' * 20, layers=LAYERS, num_layers=7)
    (axes,) = seen.axes(figure, 'panel')
    for gid, blocks in (('dense', [0, 2, 4, 6]), ('routed', [*LAYERS])):
      rows = seen.marks(axes, gid)
      middles = [row.get_y() + row.get_height() / 2 for row in rows]
      assert middles == pytest.approx(blocks)
    low, high = axes.get_ylim()
    assert low < 0 < 6 < high
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [str(i) for i in range(7)]

  def test_numbers_the_routed_blocks_of_a_deep_model(self, rng, seen):
    _, chosen_RL = routing(rng, 20, routed=12)
    figure = viz.routing_map(chosen_RL, 'x' * 20, layers=range(1, 24, 2))
    assert list(seen.axes(figure, 'panel')[0].get_yticks()) == list(
      range(1, 24, 2)
    )

  def test_numbers_the_positions_across_panels(self, rng, seen):
    _, chosen_RL = routing(rng, 40)
    figure = viz.routing_map(chosen_RL, 'x' * 40, layers=LAYERS, columns=20)
    ticks = [list(axes.get_xticks()) for axes in seen.axes(figure, 'panel')]
    assert ticks == [[0, 8, 16], [24, 32]]

  def test_shows_every_character_under_its_column(self, rng, seen):
    _, chosen_RL = routing(rng, len(ODD))
    figure = viz.routing_map(chosen_RL, ODD, layers=LAYERS, columns=10)
    draw(figure)
    found = [
      (text.get_position()[0], text.get_text(), text.get_rotation())
      for axes in seen.axes(figure, 'panel')
      for text in seen.marks(axes, 'piece')
    ]
    shown = '$$\\' + '□' * 8 + '·\ufffd·⏎→éa'
    assert found == [(i, c, 0) for i, c in enumerate(shown)]

  def test_dollars_are_drawn_as_dollars(self, rng, seen):
    _, chosen_RL = routing(rng, 1)
    heights = []
    for piece in ('$a$', '_a_'):
      figure = viz.routing_map(chosen_RL, [piece], layers=LAYERS)
      draw(figure)
      (text,) = seen.marks(seen.axes(figure, 'panel')[0], 'piece')
      heights.append(text.get_window_extent().height)
    # As mathematics the dollars would vanish, and the piece would shrink.
    assert heights[0] == pytest.approx(heights[1], rel=0.2)

  def test_turns_and_shortens_subwords(self, rng, seen):
    _, chosen_RL = routing(rng, 4)
    pieces = ['a', ' the', '\n' * 30, '']
    figure = viz.routing_map(chosen_RL, pieces, layers=LAYERS)
    (axes,) = seen.axes(figure, 'panel')
    assert seen.texts(axes, 'piece') == ['a', '·the', '⏎' * 9 + '…', '□']
    assert {text.get_rotation() for text in seen.marks(axes, 'piece')} == {90}
    draw(figure)
    low = axes.transData.transform((0, axes.get_ylim()[0]))[1]
    top = axes.transData.transform((0, -0.5))[1]
    for text in seen.marks(axes, 'piece'):
      box = text.get_window_extent()
      assert low <= box.y0 < box.y1 <= top

  def test_characters_stay_in_their_columns(self, rng, seen):
    _, chosen_RL = routing(rng, 64)
    figure = viz.routing_map(chosen_RL, 'Wg' * 32, layers=LAYERS)
    draw(figure)
    boxes = [
      t.get_window_extent()
      for t in seen.marks(seen.axes(figure, 'panel')[0], 'piece')
    ]
    assert all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
    assert boxes[-1].x1 < figure.bbox.x1

  def test_colours_a_character_by_its_routed_blocks(self, seen):
    chosen_RL = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]])
    figure = viz.routing_map(chosen_RL, 'abcd', layers=LAYERS)
    (load,) = seen.marks(seen.axes(figure, 'panel')[0], 'load')
    assert list(load.get_array()) == [3, 2, 0, 1]
    load.update_scalarmappable()
    shades = load.get_facecolor()[:, :3].sum(axis=1)
    assert shades[0] < shades[1] < shades[3] < shades[2] == 3
    (bar,) = [a for a in figure.axes if a.get_label() == 'load_bar']
    assert [t.get_text() for t in bar.get_xticklabels()] == ['0', '1', '2', '3']

  def test_says_how_much_is_processed(self, seen):
    chosen_RL = np.zeros((1, 8), bool)
    chosen_RL[0, 3] = True
    figure = viz.routing_map(
      chosen_RL, 'abcdefgh', layers=[1], num_layers=2, title='At $5 and $6'
    )
    said = seen.said(figure)
    assert 'At $5 and $6' in said
    assert '1 of 2 blocks is routed and processes 12.5% of these 8' in said
    assert '88% of the tokens pass by' in said
    draw(figure)

  @pytest.mark.parametrize('value', [np.nan, np.inf, 0.0])
  def test_chosen_cells_with_odd_weights_are_not_lost(self, rng, seen, value):
    _, chosen_RL = routing(rng, 8)
    weights_RL = np.full(chosen_RL.shape, value)
    figure = viz.routing_map(
      chosen_RL, 'x' * 8, layers=LAYERS, weights_RL=weights_RL
    )
    draw(figure)
    (cells,) = seen.marks(seen.axes(figure, 'panel')[0], 'chosen')
    assert len(cells.get_paths()) == chosen_RL.sum()
    assert len(cells.get_facecolor()) == chosen_RL.sum()
    assert (cells.get_facecolor()[:, 3] == 1).all()


class TestScoreHistogram:
  def histogram(self, axes):
    """Returns the area of chosen and passed bars, in tokens."""
    by_color = {
      colors.to_hex(patch.get_facecolor()).upper(): patch.get_path().vertices
      for patch in axes.patches
    }
    chosen, passed = by_color[style.CHOSEN], by_color[style.PASSED]
    edges = np.unique(chosen[:, 0])
    width = np.diff(edges).mean()
    return area(chosen) / width, area(passed) / width

  def test_counts_all_tokens_in_two_colours(self, rng):
    score_RBL = rng.normal(size=(2, 3, 40))
    chosen_RBL = score_RBL > [[[0.9]], [[0.2]]]
    # Far beyond the frame: counted in the last bin, not lost.
    score_RBL[0, 0, 0], chosen_RBL[0, 0, 0] = 50, True
    figure = viz.score_histogram(score_RBL, chosen_RBL, layers=(1, 3))
    draw(figure)
    assert [a.get_title(loc='left') for a in figure.axes] == [
      'Block 1',
      'Block 3',
    ]
    for axes, chosen_BL in zip(figure.axes, chosen_RBL, strict=True):
      counted = self.histogram(axes)
      assert counted == pytest.approx((chosen_BL.sum(), (~chosen_BL).sum()))

  def test_marks_zero_and_the_thresholds(self, rng, seen):
    score_RBL = rng.normal(size=(2, 3, 40)) + 5  # Zero lies far outside.
    chosen_RBL = score_RBL > 6
    figure = viz.score_histogram(
      score_RBL, chosen_RBL, layers=(1, 3), thresholds=[6.5, np.inf]
    )
    draw(figure)
    for axes in figure.axes:
      (router,) = seen.marks(axes, 'router')
      assert set(router.get_xdata()) == {0}
      assert router.get_color() == viz.RULES['router'].color
      assert axes.get_xlim()[0] < 0
    (threshold,) = seen.marks(figure.axes[0], 'threshold')
    assert set(threshold.get_xdata()) == {6.5}
    assert threshold.get_color() == viz.RULES['threshold'].color
    assert not seen.marks(figure.axes[1], 'threshold')
    share = (score_RBL[0] >= 6.5).mean()
    assert f'≥ threshold: {share:.1%}' in seen.texts(figure.axes[0], 'facts')[0]
    assert (
      f'chosen {chosen_RBL[1].mean():.1%} · > 0: 100.0%'
      in (seen.texts(figure.axes[1], 'facts')[0])
    )

  def test_leaves_out_padding(self, rng):
    score_RBL = rng.normal(size=(1, 2, 30))
    score_RBL[0, 1, 10:] = -np.inf
    figure = viz.score_histogram(score_RBL, score_RBL > 1, layers=[2])
    draw(figure)
    assert sum(self.histogram(figure.axes[0])) == pytest.approx(40)


def area(vertices):
  """The shoelace formula."""
  x, y = vertices.T
  return abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def run_records(steps=1000, every=5):
  records = []
  for i in range(0, steps + 1, every):
    loss = 1.5 + 4 * np.exp(-i / 30) + 0.02 * (-1) ** i
    records.append({'step': i, 'kind': 'train', 'loss': loss, 'rate': 3.0})
    if i and i % 200 == 0:
      records.append(
        {
          'step': i,
          'kind': 'eval',
          'top_k/loss': 1.6,
          'router/loss': 1.61,
          'router/accuracy': 0.97 + i / 1e5,
          'router/never_route': 0.875,
          'predictor/loss': 1.62,
          'predictor/accuracy': 0.96,
          'predictor/never_route': 0.875,
        }
      )
  return records


class TestLossCurves:
  def test_lines_hold_the_records(self, seen):
    records = run_records()
    figure = viz.loss_curves(records)
    draw(figure)
    losses, accuracy = figure.axes
    train = [(r['step'], r['loss']) for r in records if r['kind'] == 'train']
    np.testing.assert_allclose(seen.mark(losses, 'train').get_xydata(), train)
    for gid, axes in (
      ('top_k/loss', losses),
      ('router/loss', losses),
      ('predictor/loss', losses),
      ('router/accuracy', accuracy),
      ('predictor/accuracy', accuracy),
      ('router/never_route', accuracy),
    ):
      expected = [(r['step'], r[gid]) for r in records if gid in r]
      assert len(expected) == 5
      np.testing.assert_allclose(seen.mark(axes, gid).get_xydata(), expected)
      if 'never' not in gid:
        look = viz.RULES[gid.split('/')[0]]
        assert seen.mark(axes, gid).get_color() == look.color
        assert seen.mark(axes, gid).get_marker() == look.marker
    assert seen.mark(accuracy, 'router/never_route').get_linestyle() == '--'
    # The same for both rules: one line says it.
    assert not seen.marks(accuracy, 'predictor/never_route')
    assert 'nats per token' in losses.get_ylabel()
    assert 'step' in losses.get_xlabel()

  def test_baselines_that_differ_are_all_drawn(self, seen):
    records = run_records()
    for record in records:
      if 'predictor/never_route' in record:
        record['predictor/never_route'] = 0.9
    accuracy = viz.loss_curves(records).axes[1]
    assert set(seen.mark(accuracy, 'predictor/never_route').get_ydata()) == {
      0.9
    }
    assert set(seen.mark(accuracy, 'router/never_route').get_ydata()) == {0.875}
    assert accuracy.get_ylim()[0] < 0.875

  def test_the_first_steps_do_not_flatten_the_rest(self, seen):
    figure = viz.loss_curves(run_records())
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert low < 1.5 < 1.7 < high < 2.5
    assert seen.texts(axes, 'beyond') == ['↑ up to 5.52']
    (note,) = seen.marks(axes, 'beyond')
    train = seen.mark(axes, 'train')
    assert note.xy[0] == train.get_xdata()[train.get_ydata() <= high][0] > 0

  def test_a_few_records_are_shown_whole(self):
    records = [
      {'step': i, 'kind': 'train', 'loss': v} for i, v in enumerate((9, 3, 2))
    ]
    axes = viz.loss_curves(records).axes[0]
    assert axes.get_ylim()[1] > 9

  def test_a_spike_does_not_flatten_the_rest(self, seen):
    records = run_records()
    records[-40]['loss'] = 30.0
    axes = viz.loss_curves(records).axes[0]
    assert axes.get_ylim()[1] < 2.5
    assert seen.texts(axes, 'beyond') == ['↑ up to 30.00']
    (note,) = seen.marks(axes, 'beyond')
    assert note.xy[0] > records[-40]['step']

  def test_a_slow_start_is_shown_whole(self, seen):
    records = [
      {'step': i, 'kind': 'train', 'loss': 3 - i / 100} for i in range(100)
    ]
    axes = viz.loss_curves(records).axes[0]
    assert axes.get_ylim()[1] > 3
    assert not seen.marks(axes, 'beyond')

  def test_smoothing_lowers_noise_and_keeps_a_slope(self, rng):
    slope_T = np.linspace(5, 1, 600)
    noise_T = rng.normal(size=600)
    inner = slice(20, -20)
    np.testing.assert_allclose(curves._smooth(slope_T)[inner], slope_T[inner])
    assert np.std(curves._smooth(noise_T)[inner]) < 0.3
    assert abs(curves._smooth(noise_T)[-1]) < 1
    np.testing.assert_allclose(curves._smooth(np.full(7, 2.5)), 2.5)

  def test_skips_what_is_no_number(self, seen):
    records = [
      {'step': 1, 'kind': 'train', 'loss': 2.0},
      {'step': 2, 'kind': 'train', 'loss': float('nan')},
      {'step': 3, 'kind': 'train', 'loss': float('inf')},
      {'step': 4, 'kind': 'train', 'loss': None},
      {'step': 5, 'kind': 'train'},
      {'step': 6, 'kind': 'train', 'loss': 'NaN'},
      {'kind': 'train', 'loss': 9.0},
      {'step': 7, 'kind': 'train', 'loss': np.float32(1.0)},
      {'step': 7, 'kind': 'sample', 'loss': 9.0},
      {'step': 7, 'kind': 'eval', 'loss': 1.5, 'x/loss': float('nan')},
      {'step': 7, 'kind': 'eval', 'accuracy': 0.5, 'never_route': 0.5},
    ]
    figure = viz.loss_curves(records)
    draw(figure)
    (axes,) = figure.axes
    points = seen.mark(axes, 'train').get_xydata()
    np.testing.assert_array_equal(points, [(1, 2.0), (7, 1.0)])
    np.testing.assert_array_equal(
      seen.mark(axes, '/loss').get_xydata(), [(7, 1.5)]
    )
    assert not seen.marks(axes, 'x/loss')

  def test_a_step_done_again_counts_once_and_in_order(self, seen):
    records = [
      {'step': s, 'kind': 'train', 'loss': v}
      for s, v in ((1, 5.0), (4, 9.0), (2, 4.5), (4, 4.2))
    ]
    axes = viz.loss_curves(records).axes[0]
    points = seen.mark(axes, 'train').get_xydata()
    np.testing.assert_array_equal(points, [(1, 5.0), (2, 4.5), (4, 4.2)])

  @pytest.mark.parametrize(
    'records', [[], [{'step': 1, 'kind': 'train', 'loss': float('nan')}]]
  )
  def test_says_that_there_is_nothing(self, seen, records):
    figure = viz.loss_curves(records)
    assert 'No losses recorded yet' in seen.said(figure)
    draw(figure)

  @pytest.mark.parametrize(
    ('record', 'gid'),
    [
      ({'step': 3, 'kind': 'train', 'loss': 5.5}, 'train'),
      ({'step': 3, 'kind': 'eval', 'router/loss': 5.5}, 'router/loss'),
    ],
  )
  def test_one_record_is_a_visible_point(self, seen, record, gid):
    figure = viz.loss_curves([record])
    draw(figure)
    (axes,) = figure.axes
    assert seen.mark(axes, gid).get_marker() not in (None, 'None', '')
    assert 'Only one record' in seen.said(figure)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert '3' in labels
    assert len(set(labels)) == len(labels)

  def test_reads_an_iterator_and_unknown_rules(self, seen, monkeypatch):
    monkeypatch.setattr(glyphs, 'installed', lambda letter: None)
    figure = viz.loss_curves(
      iter([{'step': 1, 'kind': 'eval', 'a_new_漢_rule/loss': 2.0}])
    )
    draw(figure)
    assert r'held-out, a-new-\u6f22-rule' in seen.said(figure)


class TestSave:
  def picture(self):
    return viz.loss_curves(run_records(200))

  def test_writes_a_png_and_makes_directories(self, tmp_path):
    path = tmp_path / 'a' / 'b' / 'curves.png'
    assert viz.save(self.picture(), str(path)) == path
    with Image.open(path) as image:
      assert image.format == 'PNG'
      assert min(image.size) > 500
    assert os.listdir(path.parent) == ['curves.png']

  def test_permissions_follow_the_umask(self, tmp_path):
    before = os.umask(0o022)
    try:
      path = viz.save(self.picture(), tmp_path / 'curves.png')
    finally:
      os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o644

  @pytest.mark.parametrize('where', ['savefig', 'write', 'replace'])
  def test_a_failure_leaves_the_old_picture(self, tmp_path, monkeypatch, where):
    path = tmp_path / 'curves.png'
    path.write_bytes(b'old')
    figure = self.picture()

    def fail(*args, **kwargs):
      if where == 'replace':
        # Whole and beside its goal, but not in its place yet.
        with Image.open(args[0], formats=['PNG']) as image:
          image.load()
        assert os.path.dirname(args[0]) == str(tmp_path)
        assert path.read_bytes() == b'old'
      raise OSError('no space left')

    if where == 'savefig':
      monkeypatch.setattr(figure, 'savefig', fail)
    elif where == 'write':
      monkeypatch.setattr(os, 'fsync', fail)
    else:
      monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='no space left'):
      viz.save(figure, path)
    assert path.read_bytes() == b'old'
    assert os.listdir(tmp_path) == ['curves.png']

  def test_refuses_other_formats(self, tmp_path):
    with pytest.raises(UserError, match=r"curves.pdf' is no name.*\.png"):
      viz.save(self.picture(), tmp_path / 'curves.pdf')
    assert not os.listdir(tmp_path)


def test_threads_may_draw_at_once(rng, tmp_path):
  score_RL, chosen_RL = routing(rng, 30)
  errors = []

  def work(i):
    try:
      figure = viz.routing_map(
        chosen_RL, 'x' * 30, layers=LAYERS, weights_RL=score_RL
      )
      assert isinstance(figure, Figure)
      viz.save(figure, tmp_path / f'{i}.png')
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not errors
  written = {(tmp_path / f'{i}.png').read_bytes() for i in range(3)}
  assert len(written) == 1


def test_each_rule_has_its_own_look():
  looks = [look for rule, look in viz.RULES.items() if rule]
  assert len({look.color for look in looks}) == len(looks)
  assert len({look.marker for look in looks}) == len(looks)
  assert viz.rule_style('new') == viz.rule_style('new')
  assert viz.rule_style('new').color not in {look.color for look in looks}


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('a  line\nand more', 'a line and more'),
    ('x' * 50, 'x' * 39 + '…'),
    ('x' * 38 + '$y$', 'x' * 38 + r'\$…'),
    ('🙂' * 40, r'\U0001f642' * 3 + '…'),
  ],
)
def test_long_names_are_cut_to_what_can_be_drawn(text, expected):
  assert style.shortened(text) == expected


@pytest.mark.parametrize(
  ('piece', 'expected'),
  [
    (' the', '·the'),
    ('\n\t', '⏎→'),
    ('', '□'),
    ('\u0301a\u200b', '□a□'),
    ('abcdefghij', 'abcdefghij'),
    (' abcdefghij', '·abcdefgh…'),
  ],
)
def test_pieces_of_text_are_seen(piece, expected):
  assert glyphs.display_piece(piece) == expected


def test_letters_of_a_font_that_is_installed(tmp_path, monkeypatch, caplog):
  builder = FontBuilder(1000, isTTF=True)
  builder.setupGlyphOrder(['.notdef', 'han'])
  builder.setupCharacterMap({ord('漢'): 'han'})
  empty = TTGlyphPen(None).glyph()
  builder.setupGlyf({'.notdef': empty, 'han': empty})
  builder.setupHorizontalMetrics({'.notdef': (500, 0), 'han': (3000, 0)})
  builder.setupHorizontalHeader(ascent=800, descent=-200)
  builder.setupNameTable({'familyName': 'Tiny Han', 'styleName': 'Regular'})
  builder.setupOS2()
  builder.setupPost()
  builder.save(tmp_path / 'han.ttf')
  manager = font_manager.fontManager
  own = [f for f in manager.ttflist if f.name == 'DejaVu Sans']
  monkeypatch.setattr(manager, 'ttflist', own)
  monkeypatch.setitem(matplotlib.rcParams, 'font.family', ['sans-serif'])
  monkeypatch.setattr(
    glyphs, 'installed', functools.cache(glyphs.installed.__wrapped__)
  )
  assert glyphs.plain('漢字\u200b') == r'\u6f22\u5b57□'
  glyphs.installed.cache_clear()
  manager.addfont(tmp_path / 'han.ttf')
  assert glyphs.plain('漢字') == r'漢\u5b57'
  draw(style.new_figure(3, 1, '漢')[0])
  assert not caplog.records
  assert images._inches('漢漢', 10) > 2 * images._inches('WW', 10)


def test_a_count_that_rounds_up_gets_the_next_unit():
  counts = (0, 999.6, 12_345, 999_600, 1.284e6, 4e12)
  written = ['0', '1k', '12.3k', '1M', '1.28M', '4T']
  assert [style.quantity(count) for count in counts] == written
