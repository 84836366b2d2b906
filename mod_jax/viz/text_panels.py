"""A text in panels, with a row of cells for each block above it.

What maps over a text share: where everything stands, the text and its colours,
the numbers of blocks and positions, and the key.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm
from matplotlib.colors import Colormap
from matplotlib.colors import ListedColormap
from matplotlib.colors import Normalize
from matplotlib.colors import to_rgb
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import style

TRACK = '#F6F6F6'  # A block's row, where nothing is drawn.

# Inches.
_LEFT, _RIGHT, _BOTTOM, _GAP, _KEY = 0.6, 0.2, 0.1, 0.12, 0.68
_COLUMN, _MIN_WIDTH = 0.15, 10.0
_TICKS = 0.2  # Of the positions under a panel.
_SCALE = 1.7  # Width of a colour scale.
_GLYPH_SIZE = 8  # Points.


class Panel(NamedTuple):
  """The part of the text from `start` to `end`; x is a token, y a block."""

  axes: Axes
  start: int
  end: int


class TextPanels:
  """A figure of panels, one below the other.

  Attributes:
    figure: the whole.
    panels: a `Panel` for each part of the text, in order.
  """

  def __init__(
    self,
    pieces: Sequence[str],
    *,
    num_layers: int,
    columns: int,
    title: str,
    subtitle: str,
    least_row: float = 0.085,
  ):
    """Makes the figure and its empty panels.

    Args:
      pieces: the text of each token; see `check_pieces`.
      num_layers: blocks of the model, a row for each.
      columns: tokens per panel.
      title: says what is seen.
      subtitle: what a stranger must know to read the picture.
      least_row: inches; so high is a row of a deep model.

    Raises:
      UserError: no column, or a text too long for one picture.
    """
    if columns < 1:
      raise UserError(
        f'columns={columns}: expected 1 or more tokens per panel.'
      )
    length = len(pieces)
    columns = min(columns, length)
    self._shown = [glyphs.display_piece(piece) for piece in pieces]
    self._longest = max(map(len, self._shown))
    # A monospaced character is 0.6 of its size wide; turned, that is a height.
    self._strip = (
      0.19
      if self._longest == 1
      else (self._longest + 2) * 0.603 * _GLYPH_SIZE / 72
    )
    self._row = float(np.clip(1.7 / num_layers, least_row, 0.16))
    self._num_layers = num_layers
    count = math.ceil(length / columns)
    panel = num_layers * self._row + self._strip
    self._width = max(_MIN_WIDTH, _LEFT + columns * _COLUMN + _RIGHT)
    self._height = _KEY + count * (panel + _TICKS + _GAP) + _BOTTOM
    self.figure, self._body = style.new_figure(
      self._width,
      self._height,
      title,
      subtitle,
      what=f'{length} tokens in rows of {columns}',
      layout=None,
    )
    self.panels = []
    for i in range(count):
      start, end = i * columns, min((i + 1) * columns, length)
      bottom = self._height - _KEY - i * (panel + _TICKS + _GAP) - panel
      axes = self._body.add_axes(
        (
          _LEFT / self._width,
          bottom / self._height,
          columns * _COLUMN / self._width,
          panel / self._height,
        ),
        label='panel',
      )
      axes.set_xlim(start - 0.5, start + columns - 0.5)
      axes.set_ylim(-0.5 - self._strip / self._row, num_layers - 0.5)
      self.panels.append(Panel(axes, start, end))

  def draw_rows(self, layers: Sequence[int], gid: str) -> None:
    """Draws the row of each block, those in `layers` apart from the others."""
    for axes, start, end in self.panels:
      for row in range(self._num_layers):
        color, name = (TRACK, gid) if row in layers else (style.DENSE, 'dense')
        axes.barh(row, end - start, 0.84, start - 0.5, color=color, gid=name)

  def write(self, count_L, colors: tuple[Colormap, Normalize]) -> None:
    """Writes the text, each piece on the colour of its number."""
    cmap, norm = colors
    row, strip = self._row, self._strip / self._row
    turned = self._longest > 1
    font = glyphs.mono(_GLYPH_SIZE)
    for axes, start, end in self.panels:
      count_C = np.asarray(count_L)[start:end]
      x_C = np.arange(start, end)
      axes.add_collection(
        PolyCollection(
          rectangles(x_C, np.full(len(x_C), -0.5 - strip / 2), 1, strip * 0.92),
          array=count_C,
          cmap=cmap,
          norm=norm,
          linewidth=0,
          gid='load',
        ),
        autolim=False,
      )
      for x, color in zip(x_C, cmap(norm(count_C)), strict=True):
        axes.text(
          x,
          # The baseline is shared, so that letters stand on one line.
          -0.5 - (0.6 * _GLYPH_SIZE / 72 / row if turned else 0.68 * strip),
          self._shown[x],
          rotation=90 if turned else 0,
          ha='center',
          va='top' if turned else 'baseline',
          fontproperties=font,
          color=ink_on(color),
          parse_math=False,
          gid='piece',
        )

  def label(self, layers: Sequence[int]) -> None:
    """Numbers blocks, those in `layers` first of all, and positions."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64) if s * self._row > 0.13)
    # The blocks in `layers` have numbers rather than those between them.
    first = layers[0] % step if layers else 0
    every = 8
    for axes, start, end in self.panels:
      axes.set_yticks(range(first, self._num_layers, step))
      axes.set_xticks(range(-(-start // every) * every, end, every))
      axes.tick_params(
        length=0, pad=2, labelsize=7, colors=style.MUTED, which='both'
      )
      axes.set_ylabel('block', fontsize=8, color=style.INK)
      # Beside the blocks, not beside blocks and text.
      low, high = axes.get_ylim()
      axes.yaxis.set_label_coords(
        -0.38 / _COLUMN / np.ptp(axes.get_xlim()),
        ((self._num_layers - 1) / 2 - low) / (high - low),
      )
      axes.spines[:].set_visible(False)

  def key(self, swatches: Sequence, **how) -> None:
    """Explains the colours at the left, under the header."""
    place = (0.6 * style.MARGIN / self._width, self._key_middle)
    style.key(self._body, swatches, 'center left', bbox_to_anchor=place, **how)

  def scale(
    self,
    place: int,
    label: str,
    name: str,
    norm: Normalize,
    cmap: Colormap,
    **how,
  ) -> None:
    """Draws a colour scale beside the key.

    Args:
      place: 0 at the right, 1 to the left of that.
      label: stands over it.
      name: the label of its axes, for who looks for them.
      norm: of the colours.
      cmap: the colours.
      **how: as in `Figure.colorbar`.
    """
    right = _RIGHT + place * (_SCALE + 0.4)
    left = 1 - (right + _SCALE) / self._width
    bottom = self._key_middle - 0.02 / self._height
    axes = self._body.add_axes(
      (left, bottom, _SCALE / self._width, 0.1 / self._height), label=name
    )
    axes.set_title(label, fontsize=8, color=style.INK, pad=3)
    how = {'cax': axes, 'orientation': 'horizontal'} | how
    style.scale(self._body, norm, cmap, **how)

  @property
  def _key_middle(self) -> float:
    return 1 - (_KEY / 2 + 0.02) / self._height


def check_pieces(name: str, values_RL, pieces, layers, of: str) -> np.ndarray:
  """Returns values as an array of a row per block and a column per piece.

  Args:
    name: of the values, for the error.
    values_RL: what is drawn.
    pieces: the text of each token.
    layers: the R blocks.
    of: what kind of blocks they are.

  Raises:
    UserError: no text, or another shape.
  """
  values_RL = np.asarray(values_RL)
  expected = (len(layers), len(pieces))
  if not len(pieces):
    raise UserError('there is no text to draw: expected at least one piece.')
  if values_RL.shape != expected:
    raise UserError(
      f'{name} of shape {values_RL.shape} for {len(layers)} {of} and'
      f' {len(pieces)} pieces of text: expected shape {expected}.'
    )
  return values_RL


def count_colors(most: int) -> tuple[Colormap, Normalize]:
  """Returns a colour for each number from 0 to `most`, 0 being white."""
  shades = colormaps['Greens'](np.linspace(0.25, 0.85, max(most, 1)))
  cmap = ListedColormap(np.concatenate([[[1, 1, 1, 1]], shades]))
  return cmap, BoundaryNorm(np.arange(max(most, 1) + 2) - 0.5, cmap.N)


def count_ticks(most: int) -> list[int]:
  """Returns at most nine of the numbers from 0 to `most`."""
  return list(range(0, max(most, 1) + 1, math.ceil(max(most, 1) / 8)))


def ink_on(color) -> str:
  """Returns the colour of text that is read on a colour."""
  light = np.dot(to_rgb(color), (0.299, 0.587, 0.114)) > 0.5
  return style.INK if light else 'white'


def rectangles(x_N, y_N, wide: float, high: float) -> np.ndarray:
  """Returns vertices [N, 4, 2] of rectangles around the centres."""
  corner = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (wide / 2, high / 2)
  return np.stack([x_N, y_N], axis=-1)[:, None] + corner
