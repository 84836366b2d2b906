"""Files, threads, colours, and texts that a font can draw."""

from concurrent import futures
import functools
import os

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
import matplotlib
from matplotlib import font_manager
import numpy as np
from PIL import Image
import pytest

from mod_jax import viz
from mod_jax.viz import glyphs, images, style

pytestmark = pytest.mark.filterwarnings('error')


def histogram():
  return viz.compute_histogram([0.2, 0.4])


class TestSave:
  def test_writes_a_png_and_makes_directories(self, tmp_path):
    path = tmp_path / 'a' / 'b' / 'curves.png'
    before = os.umask(0o022)
    try:
      assert viz.save(histogram(), str(path)) == path
    finally:
      os.umask(before)
    with Image.open(path) as image:
      assert image.format == 'PNG'
      assert min(image.size) > 500
    assert os.listdir(path.parent) == ['curves.png']
    assert os.stat(path).st_mode & 0o777 == 0o644

  @pytest.mark.parametrize('where', ['fsync', 'replace'])
  def test_a_failure_leaves_the_old_picture(self, tmp_path, monkeypatch, where):
    path = tmp_path / 'curves.png'
    path.write_bytes(b'old')

    def fail(*args, **kwargs):
      assert path.read_bytes() == b'old'
      raise OSError('no space left')

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match='no space left'):
      viz.save(histogram(), path)
    assert path.read_bytes() == b'old'
    assert os.listdir(tmp_path) == ['curves.png']


def test_threads_may_draw_at_once(rng, tmp_path):
  score_RL = rng.normal(size=(3, 30))
  told = {'layers': (1, 3, 5), 'num_layers': 6, 'weights_RL': score_RL}

  def work(i):
    figure = viz.routing_map(score_RL > 0, 'x' * 30, **told)
    return viz.save(figure, tmp_path / f'{i}.png').read_bytes()

  with futures.ThreadPoolExecutor(3) as pool:
    assert len(set(pool.map(work, range(3)))) == 1


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
  style.new_figure(3, 1, '漢').get_figure(root=True).canvas.draw()
  assert not caplog.records


def test_a_count_that_rounds_up_gets_the_next_unit():
  counts = (0, 999.6, 12_345, 999_600, 1.284e6, 4e12)
  written = ['0', '1k', '12.3k', '1M', '1.28M', '4T']
  assert [style.quantity(count) for count in counts] == written


def test_sides_that_are_no_multiples_of_the_grid_have_tokens_up_to_the_edge():
  value_L = np.arange(6)
  image_HWC = np.zeros((5, 8, 3))
  rows = np.repeat([[0, 1, 2], [3, 4, 5]], [3, 2], axis=0)
  expected = np.repeat(rows, [3, 3, 2], axis=1)
  found = images.over_pixels(value_L, (2, 3), image_HWC)
  np.testing.assert_array_equal(found[..., 0], expected)
