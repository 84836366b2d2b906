"""What the tests of pictures read from a figure, and when it is legible."""

from matplotlib.figure import FigureBase
from matplotlib.legend import Legend
import numpy as np
import pytest


@pytest.fixture
def rng():
  return np.random.default_rng(0)


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
    (found,) = Seen.marks(where, gid)
    return found

  @staticmethod
  def texts(where, gid):
    return [text.get_text() for text in Seen.marks(where, gid)]

  @staticmethod
  def titles(figure, loc='center'):
    titles = [axes.get_title(loc=loc) for axes in figure.axes]
    return [title for title in titles if title]

  @staticmethod
  def said(figure):
    """Returns all texts in one, as a reader sees them."""
    found = figure.findobj(lambda artist: hasattr(artist, 'get_text'))
    joined = ' '.join(artist.get_text() for artist in found)
    return joined.replace('\n', ' ').replace('\\$', '$')

  @staticmethod
  def shown_texts(figure):
    """Returns the texts that are drawn; ticks beyond the limits are not."""
    found = [t for part in figure.findobj(FigureBase) for t in part.texts]
    for legend in figure.findobj(Legend):
      found += legend.get_texts()
    for axes in figure.axes:
      found += [*axes.texts, axes.title, axes._left_title]
      for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
        found.append(axis.label)
        for tick in axis._update_ticks():
          found += [t for t in (tick.label1, tick.label2) if t.get_visible()]
    return [t for t in dict.fromkeys(found) if t.get_text().strip()]

  @staticmethod
  def assert_legible(figure, panels=False):
    """No text meets another and none leaves the figure.

    Args:
      figure: what was drawn.
      panels: whether nothing may meet the panels either.
    """
    figure.draw_without_rendering()
    found = Seen.shown_texts(figure)
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


@pytest.fixture(scope='session')
def seen():
  return Seen
