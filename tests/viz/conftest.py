"""What the tests of pictures read from a figure, and when it is legible."""

from matplotlib.figure import FigureBase
from matplotlib.legend import Legend
from matplotlib.text import Text
import numpy as np
import pytest


@pytest.fixture
def rng():
  return np.random.default_rng(0)


@pytest.fixture
def photos(rng):
  """Returns what draws `count` images."""

  def draw(count, height=8, width=8):
    return rng.integers(0, 200, (count, height, width, 3), dtype=np.uint8)

  return draw


class Seen:
  """Reads figures and axes."""

  @staticmethod
  def axes(figure, label):
    """Returns the axes of a label, in the order in which they were made."""
    return [axes for axes in figure.axes if axes.get_label() == label]

  @staticmethod
  def marks(where, gid):
    return where.findobj(lambda artist: artist.get_gid() == gid)

  @staticmethod
  def mark(where, gid):
    (mark,) = Seen.marks(where, gid)
    return mark

  @staticmethod
  def texts(where, gid):
    return [text.get_text() for text in Seen.marks(where, gid)]

  @staticmethod
  def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]

  @staticmethod
  def words(figure):
    """Returns all texts in one, as a reader sees them."""
    artists = figure.findobj(lambda artist: hasattr(artist, 'get_text'))
    joined = ' '.join(artist.get_text() for artist in artists)
    return joined.replace('\n', ' ').replace('\\$', '$')

  @staticmethod
  def assert_legible(figure):
    """No text meets another, none leaves the figure."""
    figure.draw_without_rendering()
    texts = [t for part in figure.findobj(FigureBase) for t in part.texts]
    texts += [
      part._suptitle for part in figure.findobj(FigureBase) if part._suptitle
    ]
    for legend in figure.findobj(Legend):
      texts += legend.get_texts()
    for axes in figure.axes:
      texts += [*axes.texts, axes.title, axes._left_title]
      for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
        texts.append(axis.label)
        # Ticks beyond the limits are not drawn.
        for tick in axis._update_ticks():
          texts += [t for t in (tick.label1, tick.label2) if t.get_visible()]
    texts = [t for t in dict.fromkeys(texts) if t.get_text().strip()]
    assert texts
    # Without the lines that tie names to their markers.
    boxes = [Text.get_window_extent(text) for text in texts]
    for i, box in enumerate(boxes):
      assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, texts[i]
      assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, texts[i]
      assert box.count_overlaps(boxes[:i]) == 0, texts[i]


@pytest.fixture(scope='session')
def seen():
  return Seen
