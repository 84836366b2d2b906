"""Where a model spends its compute: routing over depth and position."""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import images
from mod_jax.viz import style
from mod_jax.viz import text_panels

_WEIGHTS = colormaps['RdBu']  # Blue: added. Red: subtracted. White: nothing.


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
  chosen_RL = text_panels.check_pieces(
    *('decisions', chosen_RL, pieces, layers, 'routed blocks')
  )
  chosen_RL = images.decisions(chosen_RL, 'token')
  if weights_RL is not None:
    weights_RL = np.asarray(weights_RL, float)
    if weights_RL.shape != chosen_RL.shape:
      raise UserError(
        f'weights of shape {weights_RL.shape}: expected one for each decision,'
        f' shape {chosen_RL.shape}.'
      )
  sheet = text_panels.TextPanels(
    pieces,
    num_layers=num_layers,
    columns=columns,
    title=title or 'The tokens that each block processes',
    subtitle=_summary(chosen_RL, num_layers),
  )
  weights = (
    None if weights_RL is None else _weight_colors(weights_RL[chosen_RL])
  )
  count_L = chosen_RL.sum(axis=0)
  most = int(count_L.max(initial=0))
  _draw_key(sheet, weights, most, bool(layers))
  sheet.draw_rows(layers, 'routed')
  for axes, start, end in sheet.panels:
    weights_RC = None if weights_RL is None else weights_RL[:, start:end]
    _draw_cells(
      axes, start, chosen_RL[:, start:end], layers, weights, weights_RC
    )
  sheet.write(count_L, text_panels.count_colors(most))
  sheet.label(layers)
  return sheet.figure


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


def _draw_cells(axes, start, chosen_RC, layers, weights, weights_RC):
  """Adds one rectangle for each decision to process, and no other."""
  r_N, c_N = np.nonzero(chosen_RC)
  y_N = np.array(layers, float)[r_N]
  cells = PolyCollection(
    text_panels.rectangles(start + c_N, y_N, 0.86, 0.84),
    gid='chosen',
    zorder=2,
  )
  if weights is None:
    cells.set(facecolor=style.CHOSEN, linewidth=0)
  else:
    # An outline, since a weight near 0 is as white as the paper.
    cells.set(edgecolor='#444444', linewidth=0.5)
    cells.set(cmap=_WEIGHTS.with_extremes(bad='black'), norm=weights[0])
    cells.set_array(np.ma.masked_invalid(weights_RC[r_N, c_N]))
  axes.add_collection(cells, autolim=False)


def _draw_key(sheet, weights, most, routed):
  """Explains the colours in one row under the header."""
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
      Patch(label='passed by', facecolor=text_panels.TRACK),
    ]
  swatches.append(
    Patch(label='dense block: every token', facecolor=style.DENSE)
  )
  sheet.key(swatches)
  if not routed:
    return
  cmap, norm = text_panels.count_colors(most)
  label = 'routed blocks that processed it'
  ticks = text_panels.count_ticks(most)
  sheet.scale(0, label, 'load_bar', norm, cmap, ticks=ticks)
  if weights is not None:
    norm, clipped = weights
    sheet.scale(
      1,
      'weight on its update',
      'weight_bar',
      norm,
      _WEIGHTS,
      extend='both' if clipped else 'neither',
      ticks=[norm.vmin, 0, norm.vmax],
      format='%.2g',
    )
