"""Which expert takes which token, and how many tokens each expert takes.

Shapes: R blocks with experts; L tokens or patches of a text or of B images; X
choices: E experts, then no-ops, choices that do nothing. `expert` is the number
of the expert that takes a token (of several, the one with the largest weight);
`more` is True where several do. `layers` are the numbers of the R blocks,
counted from 0, and `num_layers` is the number of blocks of the model.
"""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
import numpy as np

from mod_jax.viz import images, maps, style

NO_EXPERT = -1  # The token is in the block, but no expert takes it.
NOT_THERE = -2  # The block is routed, and the token skips it.

# Areas are visible on white even in yellow. Brown is used in place of black,
# which is the colour of marks.
_FEW = (*style.SERIES_COLORS[:6], '#F0E442', '#5C3317')
_EMPTY = {'facecolor': 'white', 'edgecolor': '#8A8A8A', 'linewidth': 0.6}
_MORE = {'marker': 'o', 'facecolor': 'white', 'edgecolor': style.INK}
_MORE |= {'linewidth': 0.5, 'zorder': 4, 'gid': 'more'}
# Black with a white outline, to be visible on any colour.
_DROPPED = {'marker': 'x', 's': 9, 'color': style.INK, 'linewidth': 1.0}
_DROPPED |= {'path_effects': [withStroke(linewidth=2.2, foreground='white')]}
_DROPPED |= {'zorder': 4, 'gid': 'dropped'}
_TARGET = {'color': style.INK, 'ls': '--', 'lw': 1.3}


def expert_colors(num_experts: int) -> np.ndarray:
  """Returns a colour for each expert, [E, 3] from 0 to 1.

  Up to eight colours are distinct. More are taken from a rainbow, where
  neighbours look alike, so pictures also show the experts' numbers.
  """
  if num_experts <= len(_FEW):
    return np.array([to_rgb(color) for color in _FEW[:num_experts]])
  # Leave out the ends of the colour map, which are nearly black.
  return colormaps['turbo'](np.linspace(0.06, 0.96, num_experts))[:, :3]


def expert_map(
  expert_RL,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  num_experts: int,
  more_RL,
  dropped_RL,
  num_layers: int,
  title: str,
) -> Figure:
  """Draws which expert takes each token, with the text below.

  `dropped` is True where an expert that the token chose had no slot for it. If
  some token is not taken in all blocks, a row below the blocks counts the
  blocks where an expert takes the token.
  """
  layers, expert_RL = np.asarray(layers), np.asarray(expert_RL)
  more_RL, dropped_RL = np.asarray(more_RL), np.asarray(dropped_RL)
  color_E3 = expert_colors(num_experts)
  body, panels = maps.text_panels(
    pieces,
    range(num_layers),
    layers.tolist(),
    title=title,
    subtitle=_summary(expert_RL, num_layers, num_experts, 'tokens'),
    least=0.13,
    gid='experts',
  )
  for axes, start, end in panels:
    columns = np.s_[:, start:end]
    expert_RC = expert_RL[columns]

    def places(mask_RC, start=start):
      r_N, c_N = np.nonzero(mask_RC)
      return start + c_N, layers[r_N]

    taken_RC = expert_RC >= 0
    look = {'facecolor': color_E3[expert_RC[taken_RC]], 'linewidth': 0}
    maps.cells(axes, *places(taken_RC), gid='taken', **look)
    maps.cells(axes, *places(expert_RC == NO_EXPERT), gid='empty', **_EMPTY)
    _write_numbers(axes, *places(taken_RC), expert_RC[taken_RC], color_E3)
    # Draw marks in corners of cells, where they hide no number.
    x_N, y_N = places(more_RL[columns])
    axes.scatter(x_N + 0.27, y_N + 0.24, s=5, **_MORE)
    x_N, y_N = places(dropped_RL[columns])
    axes.scatter(x_N - 0.22, y_N - 0.2, **_DROPPED)
  bars = [panel.axes for panel in panels]
  _scale(body, bars, num_experts, name='expert_bar')
  count_L = (expert_RL >= 0).sum(axis=0)
  if count_L.min() < len(layers):  # Otherwise all counts are equal.
    maps.draw_counts(body, panels, count_L, 'blocks where one takes it')
  dot = {'ls': '', 'mec': style.INK, 'ms': 4.5}
  track = {'fc': maps.TRACK, 'ec': style.FAINT, 'lw': 0.4}
  several = 'several do: the heaviest gives the colour'
  handles = (
    (expert_RL == NO_EXPERT, Patch(label='no expert takes it', **_EMPTY)),
    (expert_RL == NOT_THERE, Patch(label='does not reach the block', **track)),
    (more_RL, Line2D([], [], label=several, marker='o', mfc='white', **dot)),
    (
      dropped_RL,
      Line2D([], [], label='a choice had no slot', marker='x', **dot),
    ),
    (
      len(layers) < num_layers,
      Patch(label='block without experts', fc=style.DENSE),
    ),
  )
  style.key(body, [handle for mask, handle in handles if np.any(mask)], ncols=3)
  return body.get_figure(root=True)


def expert_patches(
  images_BHWC,
  expert_RBL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  num_experts: int,
  more_RBL,
  labels: Sequence[str],
  num_layers: int,
  title: str,
) -> Figure:
  """Draws which expert takes each patch, a row per image.

  The image is at the left; then follows, for each block with experts, the image
  in grey under the experts' colours. Patches that no expert takes are grey and
  struck through; patches that do not reach the block are faded. Images and
  `grid` are as in `images`.
  """
  images_BHWC, expert_RBL = np.asarray(images_BHWC), np.asarray(expert_RBL)
  more_RBL, color_E3 = np.asarray(more_RBL), expert_colors(num_experts)
  subtitle = _summary(expert_RBL, num_layers, num_experts, 'patches')
  for mask_RBL, text in (
    (expert_RBL == NO_EXPERT, 'Struck through: no expert takes the patch.'),
    (expert_RBL == NOT_THERE, 'Faded: the patch does not reach the block.'),
    (more_RBL, 'A dot: several do; the heaviest gives the colour.'),
  ):
    subtitle += f' {text}' if np.any(mask_RBL) else ''
  tiles, captions = [], []
  for image, expert_RL in zip(
    images_BHWC, np.moveaxis(expert_RBL, 0, 1), strict=True
  ):
    tinted = [
      _tinted(image, expert_L, color_E3, grid) for expert_L in expert_RL
    ]
    tiles.append([[(shown, {})] for shown in (image, *tinted)])
    taken = [expert_L[expert_L >= 0] for expert_L in expert_RL]
    captions.append(
      [
        '',
        *(
          f'experts: {len(np.unique(taken_N))}\n'
          f'patches: {len(taken_N)} of {expert_RL.shape[1]}'
          for taken_N in taken
        ),
      ]
    )
  body, axes_B, start_C = images.image_grid(
    tiles,
    grid,
    title=title,
    subtitle=subtitle,
    above=[['image', *(f'block {layer}' for layer in layers)]],
    below=captions,
    labels=labels,
    aspect=images.patch_aspect(images_BHWC[0], grid),
    scale=True,
  )
  # The middles of the patches in all pictures of a row.
  y_RL, x_RL = np.indices(grid).reshape(2, 1, -1) + 0.5
  x_RL = x_RL + start_C[1:, None]
  y_RL = np.broadcast_to(y_RL, x_RL.shape)
  for b, axes in enumerate(axes_B):
    expert_RL, more_RL = expert_RBL[:, b], more_RBL[:, b]
    taken_RL = expert_RL >= 0
    if images.patch_inches(len(start_C), grid) > 0.14:
      place = x_RL[taken_RL], y_RL[taken_RL]
      _write_numbers(axes, *place, expert_RL[taken_RL], color_E3)
    # Strike through patches that no expert takes: in grey, a patch of a white
    # image is white, too.
    empty_RL = expert_RL == NO_EXPERT
    middle_N12 = np.stack([x_RL, y_RL], -1)[empty_RL][:, None]
    strikes = middle_N12 + np.array([[-0.5, 0.5], [0.5, -0.5]])
    look = {'colors': style.INK, 'linewidths': 0.8, 'gid': 'empty'}
    axes.add_collection(LineCollection(strikes, **look), autolim=False)
    dots = x_RL[more_RL] + 0.3, y_RL[more_RL] - 0.3
    axes.scatter(*dots, s=300 / grid[0] / len(start_C), **_MORE)
  _scale(body, axes_B, num_experts, alpha=images.OVERLAY)
  return body.get_figure(root=True)


def expert_load(
  share_RX,
  *,
  layers: Sequence[int],
  num_experts: int,
  targets_X,
  none_R,
  title: str,
) -> Figure:
  """Draws the share of the tokens that each choice gets: a panel per block.

  `targets` are the shares that choices should get, equal for all experts and
  for all no-ops; `none` is the share of tokens that no expert takes. No-ops are
  separate bars at the right. They are scaled so that their target is as high as
  the experts' target, as the share of one of many experts would be hard to see
  beside theirs; their true share is written above the panel.
  """
  height_RX = np.array(share_RX, float)
  nulls = height_RX.shape[1] - num_experts
  target, null_target = targets_X[0], targets_X[-1]
  null_R = height_RX[:, num_experts:].sum(axis=1)
  subtitle = 'Bars: of the tokens that reach the block, those an expert gets.'
  handles = [Line2D([], [], label='target', **_TARGET)]
  # Leave the width of a bar between experts and no-ops.
  x_X = np.arange(num_experts + nulls)
  x_X[num_experts:] += 1
  ticks = {tick: str(tick) for tick in _number_ticks(num_experts)}
  if nulls:
    subtitle += (
      ' Hatched: no-ops, choices that do nothing, scaled to the same target.'
    )
    if min(target, null_target) > 0:
      height_RX[:, num_experts:] *= target / null_target
    handles.append(Patch(label='no-op', hatch='////', **_EMPTY))
    place = float(x_X[num_experts:].mean())
    # Leave out numbers that the label 'no-op' would overlap.
    room = 0.1 * (x_X[-1] + 2)
    ticks = {x: text for x, text in ticks.items() if place - x > room}
    ticks[place] = 'no-op'
  body, panels = style.panels(
    *(title, subtitle, len(layers)),
    xlabel='expert',
    ylabel='share of the tokens',
  )
  for axes, layer, height_X, none, null in zip(
    panels, layers, height_RX, none_R, null_R, strict=True
  ):
    share_E, height_Z = np.split(height_X, [num_experts])
    look = {'color': expert_colors(num_experts), 'linewidth': 0}
    axes.bar(x_X[:num_experts], share_E, width=0.84, gid='expert', **look)
    look = _EMPTY | {'width': 0.84, 'hatch': '////', 'gid': 'no-op'}
    axes.bar(x_X[num_experts:], height_Z, **look)
    axes.axhline(target, gid='target', **_TARGET)
    axes.set_xticks(*zip(*ticks.items(), strict=True))
    axes.tick_params(axis='x', length=0)
    axes.set_xlim(-1, x_X[-1] + 1)
    axes.set_ylim(0, 1.08 * max(height_RX.max(), target))
    style.ticks(axes.yaxis, 5, style.percent)
    busiest = share_E.max() / max(share_E.mean(), 1e-9)
    facts = f'busiest: {busiest:.2f} x the mean\n{none:.1%} without any expert'
    if nulls:
      wanted = nulls * null_target
      facts += f'\nno-ops: {null:.1%} of the tokens, target {wanted:.1%}'
    style.heading(axes, f'Block {layer}', facts)
  style.key(body, handles)
  return body.get_figure(root=True)


def _summary(expert, num_layers, num_experts, unit) -> str:
  text = f'Blocks with {num_experts} experts: {len(expert)} of {num_layers}.'
  there = expert != NOT_THERE
  if not there.all():
    text += f' On average {there.mean():.1%} of these {unit} reach them.'
  if there.any():
    taken = (expert[there] >= 0).mean()
    text += f' Of the {unit} there, experts take {taken:.1%}.'
  return text


def _scale(body, axes, num_experts, **how) -> None:
  cmap = ListedColormap(expert_colors(num_experts))
  norm = BoundaryNorm(np.arange(num_experts + 1) - 0.5, num_experts)
  ticks = _number_ticks(num_experts)
  style.scale(body, axes, norm, cmap, 'expert', ticks=ticks, **how)


def _number_ticks(num_experts) -> range:
  """Returns the experts' numbers, or every second and so on if more than 8."""
  step = next(2**i for i in range(32) if num_experts <= 8 * 2**i)
  return range(0, num_experts, step)


def _write_numbers(axes, x_N, y_N, expert_N, color_E3):
  """Writes the experts' numbers over their cells if colours look alike.

  Numbers are markers, one collection for each expert, since thousands of texts
  would take seconds.
  """
  if len(color_E3) <= len(_FEW):
    return
  for expert in np.unique(expert_N):
    own_N = expert_N == expert
    # The size of a marker is that of its longer side.
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
  """Returns the image in grey under colours, faded where patches skip."""
  expert_HW1 = images.over_pixels(expert_L, grid, image_HWC)
  grey_HWC = images.greyed(image_HWC)
  colored_HWC = grey_HWC * (1 - images.OVERLAY)
  colored_HWC += images.OVERLAY * color_E3[np.maximum(expert_HW1[..., 0], 0)]
  shown_HWC = np.where(expert_HW1 >= 0, colored_HWC, grey_HWC)
  faded_HWC = 1 - (1 - images.VEIL) * (1 - image_HWC / 255)
  return np.where(expert_HW1 == NOT_THERE, faded_HWC, shown_HWC)
