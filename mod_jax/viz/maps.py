"""Where a model spends its compute: cells over depth and position in a text.

Shapes: R blocks, L tokens. `pieces` is the text of each token, `layers` are the
numbers of the R blocks, counted from 0, and `num_layers` is the number of
blocks of the model. A long text is wrapped over several panels; in each, a row
is a block, the first at the bottom.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
import numpy as np

from mod_jax.viz import glyphs, style

TRACK = '#F6F6F6'  # Background of a block's row of cells.
COUNT_ROW = -1.25  # Height y of the cells that count over blocks.
COLUMNS = 64  # Most tokens of a panel.
_WEIGHTS = colormaps['RdBu']  # Blue: added. Red: subtracted. White: nothing.
_EDGE = {'edgecolor': '#444444', 'linewidth': 0.5}


class Panel(NamedTuple):
  """The part of a text from `start` to `end`; x is a token, y a block."""

  axes: Axes
  start: int
  end: int


def routing_map(
  chosen_RL,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  num_layers: int,
  weights_RL=None,
  title: str = 'The tokens that each block processes',
) -> Figure:
  """Draws which tokens each routed block processed, with the text below.

  The row below the blocks counts the routed blocks that processed a token.
  `weights_RL` are the factors on the blocks' updates, shown as colours if
  given.
  """
  layers, chosen_RL = list(layers), np.asarray(chosen_RL) > 0
  count_L = chosen_RL.sum(axis=0)
  body, panels = text_panels(
    pieces,
    range(num_layers),
    layers,
    title=title,
    subtitle=f'Routed blocks: {len(layers)} of {num_layers}, with'
    f' {chosen_RL.mean():.1%} of these tokens. Passed by all of them:'
    f' {np.mean(count_L == 0):.0%}.',
    gid='routed',
  )
  colors, look = {'facecolor': style.CHOSEN, 'linewidth': 0}, {}
  if weights_RL is not None:
    weights_RL = np.ma.masked_invalid(np.asarray(weights_RL, float))
    size = np.abs(weights_RL[chosen_RL].compressed())
    # Limit the scale, so that a few large weights do not make all others pale.
    limit = float(np.quantile(size, 0.98)) if size.any() else 1.0
    norm, cmap = Normalize(-limit, limit), _WEIGHTS.with_extremes(bad='black')
    # Outline cells, since a weight near 0 is as white as the background.
    colors, look = {'norm': norm, 'cmap': cmap, **_EDGE}, _EDGE
  for axes, start, end in panels:
    r_N, c_N = np.nonzero(chosen_RL[:, start:end])
    if weights_RL is not None:
      colors['array'] = weights_RL[r_N, start + c_N]
    cells(axes, start + c_N, np.take(layers, r_N), gid='chosen', **colors)
  draw_counts(body, panels, count_L, 'routed blocks that processed it')
  if weights_RL is not None:
    style.scale(
      body,
      [panel.axes for panel in panels],
      norm,
      _WEIGHTS,
      'weight on its update',
      name='weight_bar',
      extend='both' if (size > limit).any() else 'neither',
      ticks=[-limit, 0, limit],
    )
  color = _WEIGHTS(0.75) if look else style.CHOSEN
  handles = [
    Patch(label='processed by a routed block', facecolor=color, **look),
    Patch(label='passed by', fc=TRACK, ec=style.FAINT, lw=0.4),
  ]
  if len(layers) < num_layers:
    handles.append(Patch(label='dense block: every token', fc=style.DENSE))
  style.key(body, handles)
  return body.get_figure(root=True)


def token_load(
  share_RL,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  unit: str,
  title: str,
) -> Figure:
  """Draws a text, and above each token its compute in each block.

  The compute is a share from 0 to 1; `unit` labels its scale.
  """
  share_RL, norm = np.asarray(share_RL), Normalize(0, 1)
  body, panels = text_panels(
    pieces,
    layers,
    title=title,
    subtitle=f'Mean of these {len(pieces)} tokens: {share_RL.mean():.0%}.',
    least=0.13,
  )
  for axes, start, end in panels:
    axes.imshow(
      share_RL[:, start:end],
      extent=(start - 0.5, end - 0.5, -0.5, len(layers) - 0.5),
      origin='lower',
      aspect='auto',
      cmap='viridis',
      norm=norm,
      zorder=2,
    )
  bars, cmap = [panel.axes for panel in panels], colormaps['viridis']
  style.scale(body, bars, norm, cmap, unit, format=style.percent)
  return body.get_figure(root=True)


def text_panels(
  pieces: Sequence[str],
  blocks: Sequence[int],
  apart: Sequence[int] = (),
  *,
  title: str,
  subtitle: str,
  least: float = 0.085,
  gid: str = '',
) -> tuple[SubFigure, list[Panel]]:
  """Returns the figure's part below its titles, and its panels.

  A panel has rows of blocks above a part of the text. `blocks` are the numbers
  of the blocks, and `apart` the indices of the rows that get the colour `TRACK`
  and the name `gid`; other rows look like dense blocks. A row is at least
  `least` inches high.
  """
  shown = [glyphs.display_piece(piece) for piece in pieces]
  longest = max(map(len, shown))
  row = float(np.clip(1.7 / len(blocks), least, 0.16))
  count = -(-len(shown) // COLUMNS)
  high = count * (row * (len(blocks) + 1.5) + 0.45)
  # A single panel must be as high as a colour scale with all its numbers.
  high = max(1.9, high) + 0.07 * longest * count
  body = style.new_figure(11.2, high, title, subtitle)
  panels = []
  step = next(step for step in (1, 2, 4, 8, 16, 32) if step * row > 0.12)
  # If not every row gets a number, the first one in `apart` does.
  numbered = range(min(apart, default=0) % step, len(blocks), step)
  for i, axes in enumerate(body.subplots(count, squeeze=False)[:, 0]):
    start, end = i * COLUMNS, min((i + 1) * COLUMNS, len(shown))
    for y in range(len(blocks)):
      color, name = (TRACK, gid) if y in apart else (style.DENSE, 'dense')
      axes.barh(y, end - start, 0.84, start - 0.5, color=color, gid=name)
    axes.set_xticks(range(start, end), shown[start:end])
    glyphs.write_pieces(axes.get_xticklabels())
    turn = 90 if longest > 1 else 0
    axes.tick_params(axis='x', rotation=turn, pad=1, colors=style.INK)
    # Write positions above the panel, as minor ticks.
    axes.xaxis.remove_overlapping_locs = False
    positions = range(-(-start // 8) * 8, end, 8)
    axes.set_xticks(positions, positions, minor=True)
    above = {'labeltop': True, 'labelbottom': False, 'colors': style.MUTED}
    axes.tick_params(axis='x', which='minor', pad=1, labelsize=7, **above)
    axes.set_yticks(numbered, [blocks[y] for y in numbered])
    axes.tick_params(axis='y', labelsize=7, pad=2, colors=style.MUTED)
    axes.tick_params(which='both', length=0)
    axes.set_ylabel('block', fontsize=8, color=style.INK)
    axes.set(xlim=(start - 0.5, start + COLUMNS - 0.5), label='panel')
    axes.set_ylim(-0.5, len(blocks) - 0.5)
    axes.spines[:].set_visible(False)
    panels.append(Panel(axes, start, end))
  return body, panels


def cells(axes, x_N, y_N, *, wide=0.86, **look) -> None:
  """Adds a rectangle around each of N points (x, y), as one collection."""
  corner_42 = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (wide / 2, 0.42)
  corners_N42 = np.stack([x_N, y_N], axis=-1)[:, None] + corner_42
  cells_N = PolyCollection(corners_N42, zorder=2, **look)
  axes.add_collection(cells_N, autolim=False)


def draw_counts(body, panels, count_L, label) -> None:
  """Draws below the blocks a row with a number of blocks for each token."""
  most = max(1, int(count_L.max()))
  shades = colormaps['Greens'](np.linspace(0.25, 0.85, most))
  cmap = ListedColormap(np.concatenate([[[1, 1, 1, 1]], shades]))
  norm = BoundaryNorm(np.arange(most + 2) - 0.5, cmap.N)
  for axes, start, end in panels:
    x_C, how = np.arange(start, end), {'cmap': cmap, 'norm': norm, 'lw': 0}
    how |= {'array': count_L[start:end], 'gid': 'load'}
    cells(axes, x_C, np.full(len(x_C), COUNT_ROW), wide=1, **how)
    axes.set_ylim(bottom=COUNT_ROW - 0.5)
    axes.set_yticks(
      [COUNT_ROW, *axes.get_yticks()],
      ['sum', *(text.get_text() for text in axes.get_yticklabels())],
    )
  how = {'ticks': range(0, most + 1, -(-most // 8)), 'name': 'load_bar'}
  style.scale(body, [p.axes for p in panels], norm, cmap, label, **how)
