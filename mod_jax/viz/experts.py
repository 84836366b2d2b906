"""Which expert takes which token, and how many each of them takes.

Shapes: R blocks with experts, L tokens or patches of a text or of B images,
X choices: E experts, then those that do nothing, the no-ops.
"""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.collections import LineCollection
from matplotlib.collections import PathCollection
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm
from matplotlib.colors import ListedColormap
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import images
from mod_jax.viz import style
from mod_jax.viz import text_panels

NO_EXPERT = -1  # The token is in the block, and no expert takes it.
NOT_THERE = -2  # The block is routed, and passes the token by.

# As areas all are seen on white, the yellow too; brown, as marks are black.
_FEW = (*style.SERIES_COLORS[:6], '#F0E442', '#5C3317')
_EMPTY = {'facecolor': 'white', 'edgecolor': '#8A8A8A', 'linewidth': 0.6}
_NUMBER_SIZE = 5.5  # Points.
_LEAST_PATCH = 0.14  # Inches, for a number on it.
_MORE = {'marker': 'o', 'facecolor': 'white', 'edgecolor': style.INK}
_DROPPED = {'marker': 'x'}


def expert_colors(num_experts: int) -> np.ndarray:
  """Returns a colour for each expert, [E, 3] from 0 to 1.

  Up to eight are distinct by themselves. More of them go around the rainbow, so
  that neighbours look alike: pictures also write their numbers.
  """
  if num_experts <= len(_FEW):
    return np.array([to_rgb(color) for color in _FEW[:num_experts]])
  # Without the ends, which are nearly black.
  return colormaps['turbo'](np.linspace(0.06, 0.96, num_experts))[:, :3]


def expert_map(
  expert_RL,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  num_experts: int,
  title: str = '',
  more_RL=None,
  dropped_RL=None,
  num_layers: int | None = None,
  columns: int = 64,
) -> Figure:
  """Draws which expert takes each token, with the text under its columns.

  A long text is wrapped over several panels. In each, a row is a block, the
  first at the bottom. Where experts do not take all tokens, colour behind a
  piece of text says in how many of the blocks one takes it.

  Args:
    expert_RL: the number of the expert that takes each of L tokens in each of R
      blocks; of several that with the largest weight. `NO_EXPERT` where none
      does, `NOT_THERE` where the token does not reach the block.
    pieces: the text of each token; characters or subwords.
    layers: the block numbers of the R blocks with experts, counted from 0.
    num_experts: E.
    title: says what is seen; a general one if empty.
    more_RL: whether more than one expert takes the token; None for nowhere.
    dropped_RL: whether an expert that the token chose had no slot for it; None
      for nowhere.
    num_layers: blocks of the model; those not in `layers` have no experts.
      None: up to the last that has some.
    columns: tokens per panel.

  Raises:
    UserError: shapes or numbers that do not fit together, no block, or a text
      too long for one picture.
  """
  layers = _checked_layers(layers, num_layers)
  if num_layers is None:
    num_layers = max(layers) + 1
  given = (pieces, layers, 'blocks with experts')
  expert_RL = text_panels.check_pieces('experts', expert_RL, *given)
  expert_RL = _checked(expert_RL, num_experts)
  marks = {
    name: images.decisions(
      text_panels.check_pieces(name, marked_RL, *given), 'token'
    )
    for name, marked_RL in (('more', more_RL), ('dropped', dropped_RL))
    if marked_RL is not None and np.any(marked_RL)
  }
  subtitle = _summary(expert_RL, num_layers, num_experts, 'tokens')
  if 'more' in marks:
    subtitle += ' Of several experts the heaviest gives the colour.'
  sheet = text_panels.TextPanels(
    pieces,
    num_layers=num_layers,
    columns=columns,
    title=title or 'The expert that takes each token',
    subtitle=subtitle,
    least_row=0.13,
  )
  sheet.draw_rows(layers, 'experts')
  y_R = np.array(layers, float)
  for axes, start, end in sheet.panels:
    expert_RC = expert_RL[:, start:end]
    _draw_cells(axes, start, y_R, expert_RC, num_experts)
    for name, marked_RL in marks.items():
      r_N, c_N = np.nonzero(marked_RL[:, start:end])
      _draw_marks(axes, name, start + c_N, y_R[r_N])
  count_L = (expert_RL >= 0).sum(axis=0)
  most = int(count_L.max())
  everywhere = count_L.min() == len(layers)
  colors = text_panels.count_colors(most)
  # A colour that all of the text had would say nothing.
  sheet.write(np.zeros_like(count_L) if everywhere else count_L, colors)
  sheet.label(layers)

  swatches = _states(expert_RL, marks)
  if len(layers) < num_layers:
    swatches.append(Patch(label='block without experts', fc=style.DENSE))
  if swatches:
    sheet.key(swatches, ncols=max(1, (len(swatches) + 1) // 2))
  cmap, norm = _color_scale(num_experts)
  ticks = _number_ticks(num_experts)
  sheet.scale(0, 'expert', 'expert_bar', norm, cmap, ticks=ticks)
  if not everywhere:
    label = 'blocks where one takes it'
    ticks = text_panels.count_ticks(most)
    sheet.scale(1, label, 'load_bar', colors[1], colors[0], ticks=ticks)
  return sheet.figure


def expert_patches(
  images_BHWC,
  expert_RBL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  num_experts: int,
  more_RBL=None,
  title: str = '',
  labels: Sequence[str] | None = None,
  num_layers: int | None = None,
) -> Figure:
  """Draws which expert takes each patch, a row per image.

  The image stands at the left; then, for each block with experts, the image in
  grey under the experts' colours. Patches that no expert takes stay grey and
  are struck through, those that do not reach the block are whitened.

  Args:
    images_BHWC: uint8 RGB images.
    expert_RBL: as in `expert_map`, for the patches of B images.
    layers: the block numbers of the R blocks with experts, counted from 0, in
      the order of the columns.
    grid: rows and columns of patches, L in all.
    num_experts: E.
    more_RBL: whether more than one expert takes the patch; None for nowhere.
    title: says what is seen; a general one if empty.
    labels: a text for each image, such as its class.
    num_layers: blocks of the model, if it is to be told.

  Raises:
    UserError: shapes or numbers that do not fit together, no block, or more
      than one picture can hold.
  """
  layers = _checked_layers(layers, num_layers)
  images_BHWC = images.checked_images(images_BHWC)
  grid = images.checked_grid(grid, images_BHWC)
  given = (len(layers), images_BHWC, grid)
  expert_RBL = images.by_patch('experts', expert_RBL, *given)
  expert_RBL = _checked(expert_RBL, num_experts)
  if more_RBL is None:
    more_RBL = np.zeros(expert_RBL.shape, bool)
  more_RBL = images.by_patch('more', more_RBL, *given)
  color_E3 = expert_colors(num_experts)
  center_L2 = np.indices(grid).reshape(2, -1).T[:, ::-1] + 0.5
  said = [_summary(expert_RBL, num_layers, num_experts, 'patches')]
  if (expert_RBL == NO_EXPERT).any():
    said.append('Grey and struck through: no expert takes the patch.')
  if (expert_RBL == NOT_THERE).any():
    said.append('Whitened: the patch does not reach the block.')
  if more_RBL.any():
    said.append('A dot: several do; the heaviest gives the colour.')
  said.append('Below: how many experts take how many of the patches.')

  def draw(axes, r, b, **how):
    expert_L = expert_RBL[r, b]
    shown = _tinted(images_BHWC[b], expert_L, color_E3, grid)
    images.show(axes, 'map', shown, grid, **how)
    box = axes.get_window_extent()
    high = box.height / axes.get_figure(root=True).dpi / grid[0]
    if num_experts > len(_FEW) and high >= _LEAST_PATCH:
      _write_numbers(axes, center_L2, expert_L, color_E3)
    axes.autoscale(False)
    # On a white image a grey patch is white as well.
    empty_N12 = center_L2[expert_L == NO_EXPERT][:, None]
    axes.add_collection(
      LineCollection(
        empty_N12 + np.array([[-0.5, 0.5], [0.5, -0.5]]),
        colors=style.INK,
        linewidths=0.8,
        gid='empty',
      ),
      autolim=False,
    )
    more_N2 = center_L2[more_RBL[r, b]] + (0.3, -0.3)
    size = min(16, (0.25 * 72 * high) ** 2)
    axes.scatter(*more_N2.T, s=size, linewidth=0.5, gid='more', **_MORE)

  figure, (bar,) = images.pictures_by_block(
    images_BHWC,
    grid=grid,
    headings=[f'block {layer}' for layer in layers],
    captions_CB=[
      [_caption(expert_L) for expert_L in expert_BL] for expert_BL in expert_RBL
    ],
    title=title or 'The expert that takes each patch',
    summary=' '.join(said),
    labels=labels,
    draw=draw,
    scales=1,
  )
  cmap, norm = _color_scale(num_experts)
  images.draw_scale(
    bar, norm, cmap=cmap, label='expert', whole=True, alpha=images.OVERLAY
  )
  return figure


def expert_load(
  share_RX,
  *,
  layers: Sequence[int],
  num_experts: int,
  targets_X,
  none_R,
  title: str = '',
) -> Figure:
  """Draws how many tokens each expert takes: a panel per block.

  Bars at the right, apart from the others, are no-ops. They are scaled so that
  their target is as high as that of the experts, since an expert of many takes
  little beside what may do nothing; their share stands over the panel.

  Args:
    share_RX: of the tokens that reach the block, those that each choice gets.
    layers: the block numbers, counted from 0.
    num_experts: E, of the X choices.
    targets_X: the share that each choice should get; the same for all experts,
      and for all no-ops.
    none_R: the share of tokens that no expert takes.
    title: says what is seen; a general one if empty.

  Raises:
    UserError: shapes or numbers that do not fit together, or no block.
  """
  layers = _checked_layers(layers, None)
  share_RX = images.finite('shares', share_RX)
  targets_X, none_R = np.asarray(targets_X, float), np.asarray(none_R, float)
  choices = share_RX.shape[-1]
  if (
    share_RX.shape != (len(layers), choices)
    or none_R.shape != (len(layers),)
    or targets_X.shape != (choices,)
    or not 1 <= num_experts <= choices
  ):
    raise UserError(
      f'shares of shape {share_RX.shape}, {targets_X.size} targets and'
      f' {none_R.size} shares of no expert for {len(layers)} blocks of'
      f' {num_experts} experts: expected a row per block, and a column and a'
      ' target per choice, the experts first.'
    )
  nulls = choices - num_experts
  said = [
    'Bars: of the tokens that reach the block, those that an expert gets.'
  ]
  if nulls:
    said.append(
      'Hatched: no-ops, choices that do nothing, scaled to have their target at'
      ' the same height.'
    )
  said.append('Dashed: what each should get.')
  body, panels = style.small_multiples(
    layers,
    title or 'How many tokens each expert takes',
    ' '.join(said),
    height=2.3,
    xlabel='expert',
    ylabel='share of the tokens',
  )
  # No-ops stand apart, by the width of a bar.
  x_X = np.arange(choices) + (np.arange(choices) >= num_experts)
  color_E3 = expert_colors(num_experts)
  ticks = {tick: str(tick) for tick in _number_ticks(num_experts)}
  if nulls:
    place = float(x_X[num_experts:].mean())
    # Without the number that the word would stand on.
    room = 0.1 * (x_X[-1] + 2)
    ticks = {x: text for x, text in ticks.items() if place - x > room}
    ticks[place] = 'no-op' if nulls == 1 else 'no-ops'
  target, ratio = targets_X[0], 1.0
  if nulls and min(target, targets_X[-1]) > 0:
    ratio = targets_X[-1] / target
  height_RX = share_RX.copy()
  height_RX[:, num_experts:] /= ratio
  high = 1.08 * max(height_RX.max(), target)
  for r, axes in enumerate(panels):
    share_E, height_Z = np.split(height_RX[r], [num_experts])
    look = {'width': 0.84, 'linewidth': 0}
    axes.bar(x_X[:num_experts], share_E, color=color_E3, gid='expert', **look)
    look = _EMPTY | {'width': 0.84, 'hatch': '////', 'gid': 'no-op'}
    axes.bar(x_X[num_experts:], height_Z, **look)
    axes.axhline(target, color=style.INK, ls='--', lw=1.3, gid='target')
    axes.set_xticks(*zip(*ticks.items(), strict=True))
    axes.tick_params(axis='x', length=0)
    axes.set_xlim(-1, x_X[-1] + 1)
    axes.set_ylim(0, high)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(style.percent)
    mean = share_E.mean()
    facts = f'{none_R[r]:.1%} without any expert'
    if mean:
      facts = f'busiest: {share_E.max() / mean:.2f} x the mean\n{facts}'
    if nulls:
      total, wanted = share_RX[r, num_experts:].sum(), nulls * targets_X[-1]
      facts += f'\nno-ops: {total:.1%} of the tokens, target {wanted:.1%}'
    style.heading(axes, f'Block {layers[r]}', facts)
  handles = [Line2D([], [], color=style.INK, ls='--', lw=1.3, label='target')]
  if nulls:
    handles.append(Patch(label='no-op', hatch='////', **_EMPTY))
  style.key(body, handles)
  return body.get_figure(root=True)


def _checked_layers(layers, num_layers) -> list[int]:
  layers = images.block_numbers('layers', layers, num_layers)
  if not layers:
    raise UserError('layers=[]: expected one block with experts at least.')
  return layers


def _checked(expert, num_experts) -> np.ndarray:
  """Returns numbers of experts, or raises UserError."""
  expert = np.asarray(expert)
  if num_experts < 1:
    raise UserError(f'num_experts={num_experts}: expected one at least.')
  if expert.dtype.kind not in 'iu':
    raise UserError(
      f'experts of type {expert.dtype}: expected whole numbers, one for each'
      ' token.'
    )
  odd = expert[(expert < NOT_THERE) | (expert >= num_experts)]
  if odd.size:
    raise UserError(
      f'expert {odd[0]} of num_experts={num_experts}: expected numbers from 0'
      f' to {num_experts - 1}, {NO_EXPERT} for no expert, and {NOT_THERE} for a'
      ' token that does not reach the block.'
    )
  return expert


def _summary(expert, num_layers, num_experts, unit) -> str:
  blocks = len(expert)
  of = '' if num_layers is None else f' of {num_layers}'
  one = blocks == 1 and num_layers in (None, 1)
  text = (
    f'{blocks}{of} block{"" if one else "s"} {"has" if blocks == 1 else "have"}'
    f' {num_experts} expert{"" if num_experts == 1 else "s"}. '
  )
  reach = expert != NOT_THERE
  if not reach.all():
    it = 'it' if blocks == 1 else 'each of them'
    text += f'On average {reach.mean():.1%} of these {unit} reach {it}. '
  if not reach.any():
    return text
  taken = (expert[reach] >= 0).mean()
  if taken == 1:
    return text + f'Every one of the {unit} there is taken by an expert.'
  return text + (
    f'Of the {unit} there, experts take {taken:.1%}; for the others nothing is'
    ' computed.'
  )


def _caption(expert_L) -> str:
  taken_N = expert_L[expert_L >= 0]
  experts = len(np.unique(taken_N))
  take = 'expert takes' if experts == 1 else 'experts take'
  return f'{experts} {take} {len(taken_N)} of {len(expert_L)}'


def _color_scale(num_experts):
  cmap = ListedColormap(expert_colors(num_experts))
  return cmap, BoundaryNorm(np.arange(num_experts + 1) - 0.5, num_experts)


def _number_ticks(num_experts) -> list[int]:
  """Returns all numbers of a few experts, or some of those of many."""
  step = next(2**i for i in range(32) if num_experts <= 8 * 2**i)
  return list(range(0, num_experts, step))


def _states(expert, marks):
  """Returns what explains cells that are no plain colour, if there are any."""
  found = []
  if (expert == NO_EXPERT).any():
    found.append(Patch(label='no expert takes it', **_EMPTY))
  if (expert == NOT_THERE).any():
    color = text_panels.TRACK
    found.append(Patch(label='does not reach the block', facecolor=color))
  for name, label, look in (
    ('more', 'several experts take it', _MORE),
    ('dropped', 'a choice found no slot', _DROPPED),
  ):
    if name in marks:
      look = {
        'marker': look['marker'],
        'mfc': look.get('facecolor'),
        'mec': style.INK,
        'ms': 4.5,
      }
      found.append(Line2D([], [], ls='', label=label, **look))
  return found


def _draw_cells(axes, start, y_R, expert_RC, num_experts):
  """Adds a cell for each token that is there."""
  color_E3 = expert_colors(num_experts)
  for gid, mask_RC in (
    ('taken', expert_RC >= 0),
    ('empty', expert_RC == NO_EXPERT),
  ):
    r_N, c_N = np.nonzero(mask_RC)
    cells = PolyCollection(
      text_panels.rectangles(start + c_N, y_R[r_N], 0.86, 0.84),
      gid=gid,
      zorder=2,
    )
    if gid == 'taken':
      cells.set(facecolor=color_E3[expert_RC[r_N, c_N]], linewidth=0)
    else:
      cells.set(**_EMPTY)
    axes.add_collection(cells, autolim=False)
  if num_experts > len(_FEW):
    r_N, c_N = np.nonzero(expert_RC >= 0)
    place_N2 = np.stack([start + c_N, y_R[r_N]], axis=-1)
    _write_numbers(axes, place_N2, expert_RC[r_N, c_N], color_E3)


def _draw_marks(axes, name, x_N, y_N):
  # In corners, where they hide no number.
  if name == 'more':
    corner = (x_N + 0.27, y_N + 0.24)
    axes.scatter(*corner, s=5, linewidth=0.5, zorder=4, gid=name, **_MORE)
    return
  # Black on white, to be seen on any colour.
  for color, width, gid in (('white', 2.2, None), (style.INK, 1.0, name)):
    axes.scatter(
      *(x_N - 0.22, y_N - 0.2),
      s=9,
      color=color,
      linewidth=width,
      zorder=4,
      gid=gid,
      **_DROPPED,
    )


def _write_numbers(axes, place_N2, expert_N, color_E3):
  """Writes the experts' numbers over cells, one collection per number.

  A text for each of thousands of cells would take seconds to draw.
  """
  font = glyphs.mono(_NUMBER_SIZE)
  for expert in np.unique(expert_N[expert_N >= 0]):
    text = TextPath((0, 0), str(expert), prop=font)
    middle = text.get_extents().get_points().mean(axis=0)
    numbers = PathCollection(
      [Path((text.vertices - middle) / 72, text.codes)],
      offsets=place_N2[expert_N == expert],
      offset_transform=axes.transData,
      facecolor=text_panels.ink_on(color_E3[expert]),
      linewidth=0,
      zorder=3,
      gid=f'number {expert}',
    )
    # Inches, whatever the axes' scales.
    numbers.set_transform(axes.get_figure(root=True).dpi_scale_trans)
    axes.add_collection(numbers, autolim=False)


def _tinted(image_HWC, expert_L, color_E3, grid) -> np.ndarray:
  """Returns the image in grey under colours, white where nothing arrives."""
  rows, columns = grid
  high, wide = image_HWC.shape[0] // rows, image_HWC.shape[1] // columns
  expert_HW = np.kron(expert_L.reshape(grid), np.ones((high, wide), int))
  expert_HW1 = expert_HW[..., None]
  grey_HWC = images.greyed(image_HWC)
  colored_HWC = grey_HWC * (1 - images.OVERLAY)
  colored_HWC += images.OVERLAY * color_E3[np.maximum(expert_HW, 0)]
  white_HWC = 1 - (1 - images.VEIL) * (1 - image_HWC / 255)
  shown_HWC = np.where(expert_HW1 >= 0, colored_HWC, grey_HWC)
  return np.where(expert_HW1 == NOT_THERE, white_HWC, shown_HWC)
