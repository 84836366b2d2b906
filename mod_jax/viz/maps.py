"""Where a model spends its compute: routing over depth and position."""

from collections.abc import Sequence
import math

from matplotlib import colormaps
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm
from matplotlib.colors import ListedColormap
from matplotlib.colors import Normalize
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import images
from mod_jax.viz import style

_WEIGHTS = colormaps['RdBu']  # Blue: added. Red: subtracted. White: nothing.
_TRACK = '#F6F6F6'  # A routed block's row, where tokens pass by.

# Inches.
_LEFT, _RIGHT, _BOTTOM, _GAP, _KEY = 0.6, 0.2, 0.1, 0.12, 0.68
_COLUMN, _MIN_WIDTH = 0.15, 10.0
_TICKS = 0.2  # Of the positions under a panel.
_GLYPH_SIZE = 8  # Points.


def routing_map(
  chosen_RL,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  title: str = '',
  weights_RL=None,
  num_layers: int | None = None,
  columns: int = 64,
) -> Figure:
  """Draws which tokens each block processed, with the text under its columns.

  A long text is wrapped over several panels. In each, a row is a block, the
  first at the bottom. Colour behind a piece of text says how many of the
  routed blocks processed it.

  Args:
    chosen_RL: whether each of R routed blocks processed each of L tokens.
    pieces: the text of each token; characters or subwords.
    layers: the block numbers of the R routed blocks, counted from 0.
    title: says what is seen; a general one if empty.
    weights_RL: factors on the blocks' updates, shown as colour where chosen.
    num_layers: blocks of the model; those not in `layers` are drawn as dense.
      None: up to the last routed one.
    columns: tokens per panel.

  Raises:
    UserError: shapes or numbers that do not fit together, or a text too long
      for one picture.
  """
  if num_layers is None:
    num_layers = max(layers, default=-1) + 1
  if num_layers < 1:
    raise UserError(f'num_layers={num_layers}: expected at least one block.')
  layers = images.block_numbers('layers', layers, num_layers)
  chosen_RL = _checked(chosen_RL, pieces, layers)
  if weights_RL is not None:
    weights_RL = np.asarray(weights_RL, float)
    if weights_RL.shape != chosen_RL.shape:
      raise UserError(
        f'weights of shape {weights_RL.shape}: expected one for each decision,'
        f' shape {chosen_RL.shape}.'
      )
  if columns < 1:
    raise UserError(f'columns={columns}: expected 1 or more tokens per panel.')
  length = len(pieces)
  columns = min(columns, length)

  shown = [glyphs.display_piece(piece) for piece in pieces]
  longest = max(map(len, shown))
  # A monospaced character is 0.6 of its size wide; turned, that is a height.
  strip = 0.19 if longest == 1 else (longest + 2) * 0.603 * _GLYPH_SIZE / 72
  row = float(np.clip(1.7 / num_layers, 0.085, 0.16))
  panels = math.ceil(length / columns)
  panel = num_layers * row + strip
  width = max(_MIN_WIDTH, _LEFT + columns * _COLUMN + _RIGHT)

  title = title or 'The tokens that each block processes'
  subtitle = _summary(chosen_RL, num_layers)
  top = _KEY
  height = top + panels * (panel + _TICKS + _GAP) + _BOTTOM
  figure, body = style.new_figure(
    width,
    height,
    title,
    subtitle,
    what=f'{length} tokens in rows of {columns}',
    layout=None,
  )
  weights = (
    None if weights_RL is None else _weight_colors(weights_RL[chosen_RL])
  )
  count_L = chosen_RL.sum(axis=0)
  counts = _count_colors(int(count_L.max(initial=0)))
  _draw_key(body, width, height, weights, counts, bool(layers))

  for i in range(panels):
    start, end = i * columns, min((i + 1) * columns, length)
    bottom = height - top - i * (panel + _TICKS + _GAP) - panel
    axes = body.add_axes(
      (
        _LEFT / width,
        bottom / height,
        columns * _COLUMN / width,
        panel / height,
      ),
      label='panel',
    )
    axes.set_xlim(start - 0.5, start + columns - 0.5)
    axes.set_ylim(-0.5 - strip / row, num_layers - 0.5)
    _draw_rows(axes, start, end, layers, num_layers)
    weights_RC = None if weights_RL is None else weights_RL[:, start:end]
    _draw_cells(
      axes, start, chosen_RL[:, start:end], layers, weights, weights_RC
    )
    _draw_pieces(
      axes,
      start,
      shown[start:end],
      count_L[start:end],
      counts,
      row,
      strip / row,
      turned=longest > 1,
    )
    _label(axes, start, end, layers, num_layers, row)
  return figure


def _checked(chosen_RL, pieces, layers) -> np.ndarray:
  chosen_RL = np.asarray(chosen_RL)
  expected = (len(layers), len(pieces))
  if not len(pieces):
    raise UserError('there is no text to draw: expected at least one piece.')
  if chosen_RL.shape != expected:
    raise UserError(
      f'decisions of shape {chosen_RL.shape} for {len(layers)} routed blocks'
      f' and {len(pieces)} pieces of text: expected shape {expected}.'
    )
  return images.decisions(chosen_RL, 'token')


def _summary(chosen_RL, num_layers) -> str:
  routed, length = chosen_RL.shape
  if not routed:
    return f'No block is routed: all {num_layers} process every token.'
  count_L = chosen_RL.sum(axis=0)
  return (
    f'{routed} of {num_layers} blocks {"is" if routed == 1 else "are"} routed'
    f' and {"processes" if routed == 1 else "process"} {chosen_RL.mean():.1%}'
    f' of these {length} tokens. {np.mean(count_L == 0):.0%} of the tokens pass'
    f' by every routed block; the busiest take part in {count_L.max()}.'
  )


def _weight_colors(weights):
  """Returns a norm centred at 0 that a few large weights cannot wash out."""
  size = np.abs(weights[np.isfinite(weights)])
  limit = float(np.quantile(size, 0.98)) if size.size else 0.0
  limit = limit or 1.0
  return Normalize(-limit, limit), bool((size > limit).any())


def _count_colors(most: int):
  """Returns one colour for each number of blocks, 0 being white."""
  shades = colormaps['Greens'](np.linspace(0.25, 0.85, max(most, 1)))
  cmap = ListedColormap(np.concatenate([[[1, 1, 1, 1]], shades]))
  return cmap, BoundaryNorm(np.arange(max(most, 1) + 2) - 0.5, cmap.N)


def _rectangles(x_N, y_N, wide, high):
  """Returns vertices [N, 4, 2] of rectangles around the centres."""
  corner = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (wide / 2, high / 2)
  return np.stack([x_N, y_N], axis=-1)[:, None] + corner


def _draw_rows(axes, start, end, layers, num_layers):
  for row in range(num_layers):
    routed = row in layers
    color = _TRACK if routed else style.DENSE
    gid = 'routed' if routed else 'dense'
    axes.barh(row, end - start, 0.84, start - 0.5, color=color, gid=gid)


def _draw_cells(axes, start, chosen_RC, layers, weights, weights_RC):
  """Adds one rectangle for each decision to process, and no other."""
  r_N, c_N = np.nonzero(chosen_RC)
  y_N = np.array(layers, float)[r_N]
  cells = PolyCollection(
    _rectangles(start + c_N, y_N, 0.86, 0.84), gid='chosen', zorder=2
  )
  if weights is None:
    cells.set(facecolor=style.CHOSEN, linewidth=0)
  else:
    # An outline, since a weight near 0 is as white as the paper.
    cells.set(edgecolor='#444444', linewidth=0.5)
    cells.set(cmap=_WEIGHTS.with_extremes(bad='black'), norm=weights[0])
    cells.set_array(np.ma.masked_invalid(weights_RC[r_N, c_N]))
  axes.add_collection(cells, autolim=False)


def _draw_pieces(axes, start, shown, count_C, counts, row, strip, *, turned):
  cmap, norm = counts
  y = -0.5 - strip / 2
  count_C = np.asarray(count_C)
  x_C = start + np.arange(len(shown))
  axes.add_collection(
    PolyCollection(
      _rectangles(x_C, np.full(len(shown), y), 1, strip * 0.92),
      array=count_C,
      cmap=cmap,
      norm=norm,
      linewidth=0,
      gid='load',
    ),
    autolim=False,
  )
  font = glyphs.mono(_GLYPH_SIZE)
  for x, piece, color in zip(x_C, shown, cmap(norm(count_C)), strict=True):
    light = np.dot(to_rgb(color), (0.299, 0.587, 0.114)) > 0.5
    axes.text(
      x,
      # The baseline is shared, so that letters stand on one line.
      -0.5 - (0.6 * _GLYPH_SIZE / 72 / row if turned else 0.68 * strip),
      piece,
      rotation=90 if turned else 0,
      ha='center',
      va='top' if turned else 'baseline',
      fontproperties=font,
      color=style.INK if light else 'white',
      parse_math=False,
      gid='piece',
    )


def _label(axes, start, end, layers, num_layers, row):
  step = next(s for s in (1, 2, 4, 8, 16, 32, 64) if s * row > 0.13)
  # The routed ones have their numbers rather than the dense ones between.
  first = layers[0] % step if layers else 0
  axes.set_yticks(range(first, num_layers, step))
  every = 8
  axes.set_xticks(range(-(-start // every) * every, end, every))
  axes.tick_params(
    length=0, pad=2, labelsize=7, colors=style.MUTED, which='both'
  )
  axes.set_ylabel('block', fontsize=8, color=style.INK)
  # Beside the blocks, not beside blocks and text.
  low, high = axes.get_ylim()
  axes.yaxis.set_label_coords(
    -0.38 / _COLUMN / np.ptp(axes.get_xlim()),
    ((num_layers - 1) / 2 - low) / (high - low),
  )
  axes.spines[:].set_visible(False)


def _draw_key(body, width, height, weights, counts, routed):
  """Explains the colours in one row under the header."""
  middle = 1 - (_KEY / 2 + 0.02) / height
  edge = {'edgecolor': '#444444', 'linewidth': 0.5}
  outlined = '' if weights is None else ' (outlined)'
  swatches = []
  if routed:
    fill = (
      {'facecolor': style.CHOSEN}
      if weights is None
      else {'facecolor': _WEIGHTS(0.75), **edge}
    )
    swatches = [
      Patch(label=f'processed by a routed block{outlined}', **fill),
      Patch(label='passed by', facecolor=_TRACK),
    ]
  swatches.append(
    Patch(label='dense block: every token', facecolor=style.DENSE)
  )
  place = (0.6 * style.MARGIN / width, middle)
  style.key(body, swatches, 'center left', bbox_to_anchor=place)
  if not routed:
    return

  def scale(right, label, name, norm, cmap, **how):
    left, bottom = 1 - (right + 1.7) / width, middle - 0.02 / height
    axes = body.add_axes((left, bottom, 1.7 / width, 0.1 / height), label=name)
    axes.set_title(label, fontsize=8, color=style.INK, pad=3)
    style.scale(body, norm, cmap, cax=axes, orientation='horizontal', **how)

  cmap, norm = counts
  ticks = range(0, cmap.N, math.ceil((cmap.N - 1) / 8))
  label = 'routed blocks that processed it'
  scale(_RIGHT, label, 'load_bar', norm, cmap, ticks=list(ticks))
  if weights is not None:
    norm, clipped = weights
    scale(
      _RIGHT + 2.1,
      'weight on its update',
      'weight_bar',
      norm,
      _WEIGHTS,
      extend='both' if clipped else 'neither',
      ticks=[norm.vmin, 0, norm.vmax],
      format='%.2g',
    )
