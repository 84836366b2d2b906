"""Where a model spends its compute: cells over depth and position in a text."""

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

TRACK = '#F6F6F6'  # A block's row, where nothing is drawn.
COUNT_ROW = -1.25  # Where the cells stand that count over blocks.
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
  title: str = '',
  weights_RL=None,
  num_layers: int | None = None,
  columns: int = 64,
) -> Figure:
  """Draws which tokens each block processed, with the text under its columns.

  A long text is wrapped over several panels. In each, a row is a block, the
  first at the bottom. The row below them says how many of the routed blocks
  processed a token.

  Args:
    chosen_RL: whether each of R routed blocks processed each of L tokens.
    pieces: the text of each token; characters or subwords.
    layers: the block numbers of the R routed blocks, counted from 0.
    title: says what is seen; a general one if empty.
    weights_RL: factors on the blocks' updates, shown as colour where chosen.
    num_layers: blocks of the model; those not in `layers` are drawn as dense.
      None: up to the last routed one.
    columns: tokens per panel.
  """
  layers, chosen_RL = list(layers), np.asarray(chosen_RL) > 0
  num_layers = num_layers or max(layers) + 1
  subtitle = f'No block is routed: all {num_layers} process every token.'
  count_L = chosen_RL.sum(axis=0)
  if layers:
    subtitle = (
      f'Routed blocks: {len(layers)} of {num_layers}, with'
      f' {chosen_RL.mean():.1%} of these tokens. Passed by all of them:'
      f' {np.mean(count_L == 0):.0%}.'
    )
  body, panels = text_panels(
    pieces,
    range(num_layers),
    layers,
    title=title or 'The tokens that each block processes',
    subtitle=subtitle,
    columns=columns,
    gid='routed',
  )
  colors = {'facecolor': style.CHOSEN, 'linewidth': 0}
  if weights_RL is not None:
    weights_RL = np.ma.masked_invalid(np.asarray(weights_RL, float))
    size = np.abs(weights_RL[chosen_RL].compressed())
    # A few large weights shall not wash out the others.
    limit = float(np.quantile(size, 0.98)) if size.any() else 1.0
    norm, cmap = Normalize(-limit, limit), _WEIGHTS.with_extremes(bad='black')
    # An outline, since a weight near 0 is as white as the paper.
    colors = {'norm': norm, 'cmap': cmap, **_EDGE}
  for axes, start, end in panels:
    r_N, c_N = np.nonzero(chosen_RL[:, start:end])
    if weights_RL is not None:
      colors['array'] = weights_RL[r_N, start + c_N]
    cells(axes, start + c_N, np.take(layers, r_N), gid='chosen', **colors)
  handles = [Patch(label='dense block: every token', fc=style.DENSE)]
  if layers:
    look = {'facecolor': style.CHOSEN}
    if weights_RL is not None:
      look = {'facecolor': _WEIGHTS(0.75), **_EDGE}
    handles = [
      Patch(label='processed by a routed block', **look),
      Patch(label='passed by', fc=TRACK, ec=style.FAINT, lw=0.4),
      *(handles if len(layers) < num_layers else []),
    ]
    draw_counts(body, panels, count_L, 'routed blocks that processed it')
  if weights_RL is not None:
    how = {'extend': 'both' if (size > limit).any() else 'neither'}
    label, how['ticks'] = 'weight on its update', [-limit, 0, limit]
    bars = [panel.axes for panel in panels]
    style.scale(body, bars, norm, _WEIGHTS, label, name='weight_bar', **how)
  style.key(body, handles)
  return body.get_figure(root=True)


def token_load(
  share_RL: np.ndarray,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  unit: str,
  title: str = '',
) -> Figure:
  """Draws a text, and over each token the compute that each block gave it.

  Args:
    share_RL: between 0 and 1, for each of R blocks and L tokens.
    pieces: what the tokens stand for.
    layers: the blocks' numbers.
    unit: what 1 stands for, as in `share of all learners`.
    title: of the figure.
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
  bars = [panel.axes for panel in panels]
  how = {'format': style.percent}
  style.scale(body, bars, norm, colormaps['viridis'], unit, **how)
  return body.get_figure(root=True)


def text_panels(
  pieces: Sequence[str],
  blocks: Sequence[int],
  apart: Sequence[int] = (),
  *,
  title: str,
  subtitle: str,
  columns: int = 64,
  least: float = 0.085,
  gid: str = '',
) -> tuple[SubFigure, list[Panel]]:
  """Returns a figure's part, and in it panels of a text under rows of blocks.

  Args:
    pieces: the text of each token.
    blocks: numbers of the rows, the first at the bottom.
    apart: rows that are not of the dense blocks' colour.
    title: says what is seen.
    subtitle: what a stranger must know to read the picture.
    columns: tokens per panel.
    least: inches; so high is a row of a deep model.
    gid: names what the rows in `apart` are drawn with.
  """
  shown = [glyphs.display_piece(piece) for piece in pieces]
  longest = max(map(len, shown))
  row = float(np.clip(1.7 / len(blocks), least, 0.16))
  count = -(-len(shown) // columns)
  high = count * (row * (len(blocks) + 1.5) + 0.45)
  # One low panel is as high as colour scales with all their numbers.
  high = max(1.9, high) + 0.07 * longest * count
  _, body = style.new_figure(0.15 * columns + 1.6, high, title, subtitle)
  panels = []
  step = next(step for step in (1, 2, 4, 8, 16, 32) if step * row > 0.12)
  # Blocks that stand apart have numbers rather than those between them.
  numbered = range(min(apart, default=0) % step, len(blocks), step)
  for i, axes in enumerate(body.subplots(count, squeeze=False)[:, 0]):
    start, end = i * columns, min((i + 1) * columns, len(shown))
    for y in range(len(blocks)):
      color, name = (TRACK, gid) if y in apart else (style.DENSE, 'dense')
      axes.barh(y, end - start, 0.84, start - 0.5, color=color, gid=name)
    axes.set_xticks(range(start, end), shown[start:end])
    for label in axes.get_xticklabels():
      label.set(fontproperties=glyphs.mono(8), parse_math=False, gid='piece')
    turn = 90 if longest > 1 else 0
    axes.tick_params(axis='x', rotation=turn, pad=1, colors=style.INK)
    # Positions stand above, as ticks of their own.
    axes.xaxis.remove_overlapping_locs = False
    positions = range(-(-start // 8) * 8, end, 8)
    axes.set_xticks(positions, positions, minor=True)
    above = {'labeltop': True, 'labelbottom': False, 'colors': style.MUTED}
    axes.tick_params(axis='x', which='minor', pad=1, labelsize=7, **above)
    axes.set_yticks(numbered, [blocks[y] for y in numbered])
    axes.tick_params(axis='y', labelsize=7, pad=2, colors=style.MUTED)
    axes.tick_params(which='both', length=0)
    axes.set_ylabel('block', fontsize=8, color=style.INK)
    axes.set(xlim=(start - 0.5, start + columns - 0.5), label='panel')
    axes.set_ylim(-0.5, len(blocks) - 0.5)
    axes.spines[:].set_visible(False)
    panels.append(Panel(axes, start, end))
  return body, panels


def cells(axes, x_N, y_N, *, wide=0.86, **look) -> None:
  """Adds a rectangle around each of N places, in one collection."""
  corner_42 = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (wide / 2, 0.42)
  corners_N42 = np.stack([x_N, y_N], axis=-1)[:, None] + corner_42
  look = {'zorder': 2} | look
  axes.add_collection(PolyCollection(corners_N42, **look), autolim=False)


def draw_counts(body, panels, count_L, label) -> None:
  """Draws under the blocks how many of them there are for each token."""
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
