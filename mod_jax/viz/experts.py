"""Which expert takes which token, and how many each of them takes.

Shapes: R blocks with experts, L tokens or patches of a text or of B images,
X choices: E experts, then those that do nothing, the no-ops.
"""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.viz import images, maps, style

NO_EXPERT = -1  # The token is in the block, and no expert takes it.
NOT_THERE = -2  # The block is routed, and passes the token by.

# As areas all are seen on white, the yellow too; brown, as marks are black.
_FEW = (*style.SERIES_COLORS[:6], '#F0E442', '#5C3317')
_EMPTY = {'facecolor': 'white', 'edgecolor': '#8A8A8A', 'linewidth': 0.6}
_MORE = {'marker': 'o', 'facecolor': 'white', 'edgecolor': style.INK}


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
  first at the bottom. Where experts do not take all tokens, the row below says
  in how many of the blocks one takes it.

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
  """
  layers, expert_RL = np.asarray(layers), np.asarray(expert_RL)
  num_layers = num_layers or max(layers) + 1
  color_E3 = expert_colors(num_experts)
  more_RL, dropped_RL = (
    np.zeros(expert_RL.shape, bool) if marked_RL is None else marked_RL
    for marked_RL in (more_RL, dropped_RL)
  )
  body, panels = maps.text_panels(
    pieces,
    range(num_layers),
    layers.tolist(),
    title=title or 'The expert that takes each token',
    subtitle=_summary(expert_RL, num_layers, num_experts, 'tokens'),
    columns=columns,
    least=0.13,
    gid='experts',
  )
  for axes, start, end in panels:
    expert_RC = expert_RL[:, start:end]

    def places(mask_RC, start=start):
      r_N, c_N = np.nonzero(mask_RC)
      return start + c_N, layers[r_N]

    taken_RC = expert_RC >= 0
    maps.cells(
      axes,
      *places(taken_RC),
      facecolor=color_E3[expert_RC[taken_RC]],
      linewidth=0,
      gid='taken',
    )
    maps.cells(axes, *places(expert_RC == NO_EXPERT), gid='empty', **_EMPTY)
    _write_numbers(axes, *places(taken_RC), expert_RC[taken_RC], color_E3)
    # Marks stand in corners, where they hide no number.
    x_N, y_N = places(more_RL[:, start:end])
    look = {'s': 5, 'linewidth': 0.5, 'zorder': 4, 'gid': 'more', **_MORE}
    axes.scatter(x_N + 0.27, y_N + 0.24, **look)
    x_N, y_N = places(dropped_RL[:, start:end])
    # Black on white, to be seen on any colour.
    for color, width, gid in (
      ('white', 2.2, None),
      (style.INK, 1.0, 'dropped'),
    ):
      look = {'marker': 'x', 's': 9, 'color': color, 'linewidth': width}
      axes.scatter(x_N - 0.22, y_N - 0.2, zorder=4, gid=gid, **look)
  cmap, norm = _color_scale(num_experts)
  bars = [panel.axes for panel in panels]
  how = {'ticks': _number_ticks(num_experts), 'name': 'expert_bar'}
  style.scale(body, bars, norm, cmap, 'expert', **how)
  count_L = (expert_RL >= 0).sum(axis=0)
  if count_L.min() < len(layers):  # Else the row would be of one colour.
    maps.draw_counts(body, panels, count_L, 'blocks where one takes it')
  dot = {'ls': '', 'mec': style.INK, 'ms': 4.5}
  handles = {
    'no expert takes it': (expert_RL == NO_EXPERT, Patch(**_EMPTY)),
    'does not reach the block': (
      expert_RL == NOT_THERE,
      Patch(facecolor=maps.TRACK, edgecolor=style.FAINT, linewidth=0.4),
    ),
    'several do: the heaviest gives the colour': (
      more_RL,
      Line2D([], [], marker='o', mfc='white', **dot),
    ),
    'a choice had no slot': (dropped_RL, Line2D([], [], marker='x', **dot)),
    'block without experts': (
      len(layers) < num_layers,
      Patch(facecolor=style.DENSE),
    ),
  }
  shown = []
  for label, (mask, handle) in handles.items():
    if np.any(mask):
      handle.set_label(label)
      shown.append(handle)
  style.key(body, shown, ncols=3)
  return body.get_figure(root=True)


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
  are struck through, those that do not reach the block are under a grey veil.

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
    num_layers: blocks of the model, if it is to be written.
  """
  images_BHWC, expert_RBL = images.checked(images_BHWC), np.asarray(expert_RBL)
  if more_RBL is None:
    more_RBL = np.zeros(expert_RBL.shape, bool)
  color_E3 = expert_colors(num_experts)
  subtitle = _summary(expert_RBL, num_layers, num_experts, 'patches')
  for mask_RBL, text in (
    (expert_RBL == NO_EXPERT, 'Struck through: no expert takes the patch.'),
    (expert_RBL == NOT_THERE, 'Faded: the patch does not reach the block.'),
    (more_RBL, 'A dot: several do; the heaviest gives the colour.'),
  ):
    subtitle += f' {text}' if np.any(mask_RBL) else ''
  body, axes_B, start_C = images.image_grid(
    [
      [
        [(image_HWC, {})],
        *(
          [(_tinted(image_HWC, expert_L, color_E3, grid), {})]
          for expert_L in expert_RL
        ),
      ]
      for image_HWC, expert_RL in zip(
        images_BHWC, np.moveaxis(expert_RBL, 0, 1), strict=True
      )
    ],
    grid,
    title=title or 'The expert that takes each patch',
    subtitle=subtitle,
    above=[['image', *(f'block {layer}' for layer in layers)]],
    below=[
      ['', *(_caption(expert_L) for expert_L in expert_RBL[:, b])]
      for b in range(len(images_BHWC))
    ],
    labels=labels,
    aspect=images.patch_aspect(images_BHWC[0], grid),
    scale=True,
  )
  # The middles of the patches of all of a row's pictures.
  y_RL, x_RL = np.indices(grid).reshape(2, 1, -1) + 0.5
  x_RL = x_RL + start_C[1:, None]
  y_RL = np.broadcast_to(y_RL, x_RL.shape)
  for b, axes in enumerate(axes_B):
    expert_RL, more_RL = expert_RBL[:, b], more_RBL[:, b]
    taken_RL = expert_RL >= 0
    if images.patch_inches(len(start_C), grid) > 0.14:
      place = x_RL[taken_RL], y_RL[taken_RL]
      _write_numbers(axes, *place, expert_RL[taken_RL], color_E3)
    # On a white image a grey patch is white as well.
    empty_RL = expert_RL == NO_EXPERT
    middle_N12 = np.stack([x_RL, y_RL], -1)[empty_RL][:, None]
    strikes = middle_N12 + np.array([[-0.5, 0.5], [0.5, -0.5]])
    look = {'colors': style.INK, 'linewidths': 0.8, 'gid': 'empty'}
    axes.add_collection(LineCollection(strikes, **look), autolim=False)
    look = {'s': 300 / grid[0] / len(start_C), 'linewidth': 0.5, **_MORE}
    dots = x_RL[more_RL] + 0.3, y_RL[more_RL] - 0.3
    axes.scatter(*dots, gid='more', **look)
  cmap, norm = _color_scale(num_experts)
  how = {'ticks': _number_ticks(num_experts), 'alpha': images.OVERLAY}
  style.scale(body, axes_B, norm, cmap, 'expert', **how)
  return body.get_figure(root=True)


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
  """
  height_RX = np.array(share_RX, float)
  nulls = height_RX.shape[1] - num_experts
  target, null_target = targets_X[0], targets_X[-1]
  null_R = height_RX[:, num_experts:].sum(axis=1)
  subtitle = 'Bars: of the tokens that reach the block, those an expert gets.'
  if nulls:
    subtitle += (
      ' Hatched: no-ops, choices that do nothing, scaled to the same target.'
    )
    if min(target, null_target) > 0:
      height_RX[:, num_experts:] *= target / null_target
  body, panels = style.small_multiples(
    layers,
    title or 'How many tokens each expert takes',
    subtitle,
    height=2.3,
    xlabel='expert',
    ylabel='share of the tokens',
  )
  # No-ops stand apart, by the width of a bar.
  x_X = np.arange(num_experts + nulls)
  x_X[num_experts:] += 1
  ticks = {tick: str(tick) for tick in _number_ticks(num_experts)}
  if nulls:
    place = float(x_X[num_experts:].mean())
    # Without the number that the word would stand on.
    room = 0.1 * (x_X[-1] + 2)
    ticks = {x: text for x, text in ticks.items() if place - x > room}
    ticks[place] = 'no-op'
  for axes, layer, height_X, none, null in zip(
    panels, layers, height_RX, none_R, null_R, strict=True
  ):
    share_E, height_Z = np.split(height_X, [num_experts])
    look = {'color': expert_colors(num_experts), 'linewidth': 0}
    axes.bar(x_X[:num_experts], share_E, width=0.84, gid='expert', **look)
    look = _EMPTY | {'width': 0.84, 'hatch': '////', 'gid': 'no-op'}
    axes.bar(x_X[num_experts:], height_Z, **look)
    axes.axhline(target, color=style.INK, ls='--', lw=1.3, gid='target')
    axes.set_xticks(*zip(*ticks.items(), strict=True))
    axes.tick_params(axis='x', length=0)
    axes.set_xlim(-1, x_X[-1] + 1)
    axes.set_ylim(0, 1.08 * max(height_RX.max(), target))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(style.percent)
    busiest = share_E.max() / max(share_E.mean(), 1e-9)
    facts = f'busiest: {busiest:.2f} x the mean\n{none:.1%} without any expert'
    if nulls:
      wanted = nulls * null_target
      facts += f'\nno-ops: {null:.1%} of the tokens, target {wanted:.1%}'
    style.heading(axes, f'Block {layer}', facts)
  handles = [Line2D([], [], color=style.INK, ls='--', lw=1.3, label='target')]
  if nulls:
    handles.append(Patch(label='no-op', hatch='////', **_EMPTY))
  style.key(body, handles)
  return body.get_figure(root=True)


def _summary(expert, num_layers, num_experts, unit) -> str:
  of = '' if num_layers is None else f' of {num_layers}'
  text = f'Blocks with {num_experts} experts: {len(expert)}{of}.'
  there = expert != NOT_THERE
  if not there.all():
    text += f' On average {there.mean():.1%} of these {unit} reach them.'
  if there.any():
    taken = (expert[there] >= 0).mean()
    text += f' Of the {unit} there, experts take {taken:.1%}.'
  return text


def _caption(expert_L) -> str:
  taken_N = expert_L[expert_L >= 0]
  experts = len(np.unique(taken_N))
  return f'experts: {experts}\npatches: {len(taken_N)} of {len(expert_L)}'


def _color_scale(num_experts):
  cmap = ListedColormap(expert_colors(num_experts))
  return cmap, BoundaryNorm(np.arange(num_experts + 1) - 0.5, num_experts)


def _number_ticks(num_experts) -> range:
  """Returns all numbers of a few experts, or some of those of many."""
  step = next(2**i for i in range(32) if num_experts <= 8 * 2**i)
  return range(0, num_experts, step)


def _write_numbers(axes, x_N, y_N, expert_N, color_E3):
  """Writes the numbers of experts whose colours look alike over their cells.

  A collection of markers per expert, as thousands of texts would take seconds.
  """
  if len(color_E3) <= len(_FEW):
    return
  for expert in np.unique(expert_N):
    own_N = expert_N == expert
    # A marker is as large as its longer side.
    side = 5.5 * max(0.73, 0.63 * len(str(expert)))
    light = color_E3[expert] @ (0.299, 0.587, 0.114) > 0.5
    axes.scatter(
      *(x_N[own_N], y_N[own_N]),
      s=side**2,
      marker=rf'$\mathtt{{{expert}}}$',
      color=style.INK if light else 'white',
      linewidth=0,
      zorder=3,
      gid=f'number {expert}',
    )


def _tinted(image_HWC, expert_L, color_E3, grid) -> np.ndarray:
  """Returns the image in grey under colours, veiled where nothing arrives."""
  expert_HW1 = images.over_pixels(expert_L, grid, image_HWC)
  grey_HWC = images.greyed(image_HWC)
  colored_HWC = grey_HWC * (1 - images.OVERLAY)
  colored_HWC += images.OVERLAY * color_E3[np.maximum(expert_HW1[..., 0], 0)]
  shown_HWC = np.where(expert_HW1 >= 0, colored_HWC, grey_HWC)
  faded_HWC = 1 - (1 - images.VEIL) * (1 - image_HWC / 255)
  return np.where(expert_HW1 == NOT_THERE, faded_HWC, shown_HWC)
