"""Where a vision model spends its compute: pictures over pictures.

Shapes: B images, at most eight, of H x W pixels; R blocks; S pruning stages; L
patches, numbered row by row from the top left, without a class token. `images`
are uint8 RGB, `grid` is (rows, columns) of patches, `layers` and `blocks` are
the numbers of blocks, counted from 0, and `labels` are texts for the images.
"""

from collections.abc import Sequence
import itertools
import math
import textwrap

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
import numpy as np

from mod_jax.viz import glyphs, style

VEIL = 0.85  # Opacity of the grey over a patch that skips the block.
HEAT = colormaps['viridis']  # Perceptually uniform.
OVERLAY = 0.72  # Opacity of colours over a picture.
_GREY = 150


def patch_maps(
  images_BHWC,
  processed_RBL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  num_layers: int,
  labels: Sequence[str] = (),
  title: str = 'The patches that each routed block processes',
) -> Figure:
  """Draws the patches that each routed block processed, a row per image.

  The image is at the left; then follows, for each routed block, the image with
  the skipped patches hatched in grey and the processed ones outlined.
  """
  subtitle = (
    f'Routed blocks: {len(layers)} of {num_layers}, with'
    f' {np.mean(processed_RBL):.1%} of the patches. Outlined: processed. Grey:'
    ' the patch passes by.'
  )
  above = [
    f'block {layer}: {share:.0%}'
    for layer, share in zip(
      layers, np.mean(processed_RBL, axis=(1, 2)), strict=True
    )
  ]
  return _masked(
    images_BHWC, processed_RBL, grid, above, labels, title, subtitle
  )


def token_stages(
  images_BHWC,
  kept_SBL,
  *,
  grid: tuple[int, int],
  blocks: Sequence[int],
  labels: Sequence[str] = (),
  title: str = 'The patches that are left after each pruning stage',
) -> Figure:
  """Draws the patches that are left after each stage, a row per image.

  `blocks` has for each stage the block before which it prunes.
  """
  subtitle = (
    'Patches are removed just before the named blocks, for good. Outlined:'
    ' still there. Grey: removed.'
  )
  above = [f'before block {block}' for block in blocks]
  return _masked(images_BHWC, kept_SBL, grid, above, labels, title, subtitle)


def merged_patches(
  images_BHWC,
  place_RBL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  labels: Sequence[str] = (),
  title: str = 'The patches that were merged',
) -> Figure:
  """Draws which patches are one token after each block, a row per image.

  Patches of equal `place_RBL` (see `routing.merging`) are one token. A token is
  drawn in the mean colour of its pixels; lines separate different tokens.
  """
  images_BHWC = np.asarray(images_BHWC)
  place_BRL = np.moveaxis(np.asarray(place_RBL), 0, 1)
  body, axes_B, start_C = image_grid(
    [
      [[(image, {})], *([(_mosaic(image, p_L, grid), {})] for p_L in place_RL)]
      for image, place_RL in zip(images_BHWC, place_BRL, strict=True)
    ],
    grid,
    title=title,
    subtitle='Patches of one colour without a line between them are one token.'
    ' White lines: different tokens meet.',
    above=[['image', *(f'after block {layer}' for layer in layers)]],
    below=[
      ['', *(f'tokens: {len(np.unique(p_L))}' for p_L in place_RL)]
      for place_RL in place_BRL
    ],
    labels=labels,
    aspect=patch_aspect(images_BHWC[0], grid),
  )
  for axes, place_RL in zip(axes_B, place_BRL, strict=True):
    for start, place_L in zip(start_C[1:], place_RL, strict=True):
      lines_N22 = _borders(place_L.reshape(grid)) + (start, 0)
      look = {'colors': 'white', 'linewidths': 0.5, 'gid': 'between'}
      lines = LineCollection(lines_N22, **look)
      axes.add_collection(lines, autolim=False)
  return body.get_figure(root=True)


def _mosaic(image_HWC, place_L, grid):
  """Returns the image with the pixels of each token replaced by their mean."""
  place_HW = over_pixels(place_L, grid, image_HWC)[..., 0]
  mean_HWC = np.empty_like(image_HWC)
  for place in np.unique(place_L):
    mean_HWC[place_HW == place] = image_HWC[place_HW == place].mean(axis=0)
  return mean_HWC


def attention_maps(
  image_HWC,
  maps_RHL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  title: str,
) -> Figure:
  """Draws the attention that each patch receives: a row per block.

  The image is at the left of each row, then follows a map for each of H heads.
  The heads of a block share one colour scale. If a few values are far above all
  others, the scale ends below these, and an arrow at the colour bar shows this.
  """
  image_HWC, maps_RHL = np.asarray(image_HWC), np.asarray(maps_RHL, float)
  norms = [_heat_norm(map_HL) for map_HL in maps_RHL]
  body, axes_R, _ = image_grid(
    [
      [
        [(image_HWC, {})],
        *([(x.reshape(grid), {'cmap': HEAT, 'norm': norm})] for x in map_HL),
      ]
      for map_HL, (norm, _) in zip(maps_RHL, norms, strict=True)
    ],
    grid,
    title=title,
    subtitle='A row per block, a column per head; the brighter, the more'
    ' attention. The heads of a block share the scale at its right.',
    above=[['image', *(f'head {h}' for h in range(maps_RHL.shape[1]))]],
    labels=[f'block {layer}' for layer in layers],
    aspect=patch_aspect(image_HWC, grid),
    scale=True,
  )
  for axes, (norm, extend) in zip(axes_R, norms, strict=True):
    style.scale(body, [axes], norm, HEAT, extend=extend)
  return body.get_figure(root=True)


def keep_probability(
  mean_SL,
  *,
  grid: tuple[int, int],
  blocks: Sequence[int],
  count: int,
  title: str = 'How probably each patch is kept',
) -> Figure:
  """Draws for each stage a map: the share of images that keep each patch.

  `mean_SL` has these shares, from 0 to 1; `count` is the number of images.
  """
  norm = Normalize(0, 1)
  heat = {'cmap': HEAT, 'norm': norm}
  body, axes_R, _ = image_grid(
    _rows([[(mean_L, heat)] for mean_L in np.reshape(mean_SL, (-1, *grid))], 4),
    grid,
    title=title,
    subtitle=f'Share of the images ({count:,}) in which the patch at this place'
    ' is still there after pruning just before the named block.',
    above=_rows([f'before block {block}' for block in blocks], 4),
    below=_rows([f'{np.mean(mean_L):.1%} on average' for mean_L in mean_SL], 4),
    scale=True,
  )
  style.scale(body, axes_R, norm, HEAT, 'probability of being kept')
  return body.get_figure(root=True)


def load_map(
  images_BHWC,
  load_BL,
  *,
  grid: tuple[int, int],
  labels: Sequence[str],
  unit: str,
  title: str,
) -> Figure:
  """Draws each image, and beside it a copy with its patches' load as colour.

  The load is 0 or more; `unit` names the load in the texts.
  """
  images_BHWC, load_BL = np.asarray(images_BHWC), np.asarray(load_BL)
  norm = Normalize(0, float(load_BL.max()) or 1.0)
  heat = {'cmap': HEAT, 'norm': norm, 'alpha': OVERLAY}
  pairs, above, below = [], [], []
  for image_HWC, load_L, label in zip(
    images_BHWC, load_BL, labels, strict=True
  ):
    load = load_L.reshape(grid), heat
    pairs += [[(image_HWC, {})], [(greyed(image_HWC), {}), load]]
    # Write the label above the pair of pictures, in at most two lines.
    label = glyphs.plain(label)
    above += [textwrap.fill(label, 22, max_lines=2, placeholder='…'), '']
    below += ['', f'{load_L.mean():.3g} on average']
  body, axes_R, _ = image_grid(
    _rows(pairs, 8),
    grid,
    title=title,
    subtitle=f'Each image, and beside it the {unit}, with the mean below.',
    above=_rows(above, 8),
    below=_rows(below, 8),
    aspect=patch_aspect(images_BHWC[0], grid),
    group=2,
    scale=True,
  )
  style.scale(body, axes_R, norm, HEAT, unit, alpha=OVERLAY)
  return body.get_figure(root=True)


def compute_extremes(
  images_BHWC,
  load_B,
  load_BL,
  *,
  grid: tuple[int, int],
  count: int = 4,
  labels: Sequence[str] = (),
  title: str = '',
) -> Figure:
  """Draws the cheapest and the dearest images with the load of their patches.

  First come up to `count` of the cheapest, the very cheapest first, then as
  many of the dearest, the very dearest first. Images of equal load keep their
  order, and no image is drawn twice. The loads of images (`load_B`) and patches
  (`load_BL`) are shares of all learners. B may be any number here.
  """
  load_B, total = np.asarray(load_B), len(load_B)
  count = min(count, total // 2 or 1)
  chosen, texts = [], []
  for name, sign in (('cheapest', 1), ('dearest', -1)):
    order = np.argsort(sign * load_B, kind='stable').tolist()
    new = [b for b in order if b not in chosen][:count]
    for rank, b in enumerate(new, 1):
      # Write a share, not a percentage, as the captions and the scale do.
      text = f'{name} {rank}: {load_B[b]:.3g}'
      texts.append(f'{text} · {labels[b]}' if len(labels) else text)
      chosen.append(b)
  return load_map(
    np.asarray(images_BHWC)[chosen],
    np.asarray(load_BL)[chosen],
    grid=grid,
    title=title or f'The cheapest and the dearest of {total:,} images',
    unit='share of all learners',
    labels=texts,
  )


def image_grid(
  tiles: Sequence[Sequence[Sequence]],
  grid: tuple[int, int],
  *,
  title: str,
  subtitle: str,
  above: Sequence[Sequence[str]],
  below: Sequence[Sequence[str]] = (),
  labels: Sequence[str] = (),
  aspect: float = 1.0,
  group: int = 1000,
  scale: bool = False,
) -> tuple[SubFigure, list[Axes], np.ndarray]:
  """Draws rows of pictures, each row in axes of its own, in units of patches.

  `tiles` has by row and column the layers of a picture, each an array of pixels
  (or of a number for each patch) and the keywords of `imshow`. `above` and
  `below` are texts by row and column, of which rows may be missing; `labels`
  are texts at the left of rows. `aspect` is the height of a patch over its
  width. The gap is wider after every `group` columns; `scale` leaves room for a
  colour scale. Returns the part of the figure below the titles, the axes of
  each row, and the x at which each column begins. (With axes for each picture,
  constrained layout would take many seconds.)
  """
  rows, columns = len(tiles), max(map(len, tiles))
  high, wide = grid
  start_C = np.arange(columns) * 1.07 + np.arange(columns) // group * 0.1
  start_C = start_C * wide
  # All sizes are in inches; a letter is 0.064 wide, a line 0.14 high.
  lines = [text.split('\n') for row in (*above, *below) for text in row]
  longest = max(map(len, itertools.chain(*lines)))
  least = max(0.75, 0.064 * longest) if group > columns else 0.75
  cell = max(least, min(10 / columns, 1.7 if rows > 1 else 2.4))
  beside = 0.2 + 0.5 * scale
  if len(labels):
    beside += 0.1 + 0.06 * min(18, max(map(len, labels)))
  # Width of a row as a multiple of a picture's, gaps included.
  across = (start_C[-1] + wide) / wide
  width = max(4.0, cell * across + beside)
  # Pictures fill the width, which determines the height of a row.
  cell = (width - beside) / across
  over, under = (
    max((text.count('\n') + 1 for row in texts for text in row), default=0)
    for texts in (above, below)
  )
  picture = max(cell * aspect * high / wide, 0.3)
  height = rows * (picture + 0.16 + 0.14 * under)
  height += 0.16 * over * (rows if len(above) > 1 else 1)
  body = style.new_figure(width, height, title, subtitle)
  body.get_figure(root=True).get_layout_engine().set(h_pad=0.03, hspace=0)
  axes_R = list(body.subplots(rows, squeeze=False)[:, 0])
  for r, (axes, row) in enumerate(zip(axes_R, tiles, strict=True)):
    for start, layers in zip(start_C, row, strict=False):
      for values, how in layers:
        axes.imshow(
          values,
          extent=(start, start + wide, high, 0),
          # Draw patches with hard edges, and photographs without moiré.
          interpolation='nearest' if 'cmap' in how else 'auto',
          **how,
        )
      frame = {'fill': False, 'ec': style.FAINT, 'lw': 0.6, 'clip_on': False}
      axes.add_patch(Rectangle((start, 0), wide, high, **frame))
    for texts, y, va, look in (
      (above[r : r + 1], 0, 'bottom', {'fontsize': 8, 'color': style.INK}),
      (below[r : r + 1], high, 'top', {'fontsize': 7.5, 'color': style.MUTED}),
    ):
      for start, text in zip(start_C, itertools.chain(*texts), strict=False):
        points = {'xytext': (0, 3 if y == 0 else -3), 'va': va}
        points['textcoords'] = 'offset points'
        axes.annotate(text, (start, y), gid=va, **points, **look)
    # Without this anchor, the layout would leave too little room for labels.
    axes.set(
      xlim=(0, start_C[-1] + wide), ylim=(high, 0), aspect=aspect, anchor='W'
    )
    axes.set(xticks=[], yticks=[], label='row')
    axes.spines[:].set_visible(False)
    if len(labels):
      lines = int(picture / 0.14)
      text = textwrap.fill(
        glyphs.plain(labels[r]), 18, max_lines=lines, placeholder='…'
      )
      axes.set_yticks([high / 2], [text], fontsize=8, color=style.INK)
      axes.tick_params(length=0)
  return body, axes_R, start_C


def greyed(image_HWC) -> np.ndarray:
  """Returns a uint8 image in light grey: floats [H, W, 3] from 0.4 to 1.

  A colour drawn over the grey cannot be mistaken for one of the image, and
  looks alike over dark and bright parts.
  """
  grey_HW = 0.4 + 0.6 * (image_HWC @ [0.299, 0.587, 0.114]) / 255
  return np.repeat(grey_HW[..., None], 3, axis=-1)


def over_pixels(value_L, grid: tuple[int, int], image_HWC) -> np.ndarray:
  """Returns for each pixel the value of its patch, [H, W, 1]."""
  # A side that is no multiple of the number of patches was padded by the model
  # up to the next multiple.
  y_H, x_W = (
    np.arange(pixels) // math.ceil(pixels / count)
    for pixels, count in zip(image_HWC.shape[:2], grid, strict=True)
  )
  return np.reshape(value_L, grid)[y_H[:, None], x_W][..., None]


def veiled(image_HWC, seen_L, grid: tuple[int, int]) -> np.ndarray:
  """Returns an image with a patch faded to grey unless its `seen_L` is > 0."""
  veiled_HWC = (1 - VEIL) * image_HWC + VEIL * _GREY
  seen_HW1 = over_pixels(seen_L, grid, image_HWC) > 0
  return np.where(seen_HW1, image_HWC, veiled_HWC.round().astype(np.uint8))


def _masked(images_BHWC, seen_CBL, grid, above, labels, title, subtitle):
  """Draws a row per image: the image, then the image under each of C masks."""
  images_BHWC = np.asarray(images_BHWC)
  seen_BCL = np.moveaxis(np.asarray(seen_CBL) > 0, 0, 1)
  length = math.prod(grid)
  body, axes_B, start_C = image_grid(
    [
      [[(image, {})], *([(veiled(image, seen_L, grid), {})] for seen_L in seen)]
      for image, seen in zip(images_BHWC, seen_BCL, strict=True)
    ],
    grid,
    title=title,
    subtitle=subtitle,
    above=[['image', *above]],
    below=[
      ['', *(f'{n} of {length} ({n / length:.0%})' for n in count_C)]
      for count_C in seen_BCL.sum(axis=-1)
    ],
    labels=labels,
    aspect=patch_aspect(images_BHWC[0], grid),
  )
  for axes, seen_CL in zip(axes_B, seen_BCL, strict=True):
    for start, seen_L in zip(start_C[1:], seen_CL, strict=True):
      _outline(axes, start, seen_L.reshape(grid))
      # Small patches are not hatched, as hatches would cover them completely.
      if patch_inches(len(start_C), grid) > 0.1:
        _hatch(axes, start, ~seen_L.reshape(grid))
  return body.get_figure(root=True)


def _hatch(axes, start, hidden_YX):
  """Hatches hidden patches, since the image itself may be grey."""
  y_N, x_N = np.nonzero(hidden_YX)
  corners_N12 = np.stack([start + x_N, y_N], axis=-1)[:, None]
  corners_N42 = corners_N12 + np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
  path = Path.make_compound_path_from_polys(corners_N42)
  look = {'hatch': '////', 'hatch_linewidth': 0.5, 'edgecolor': 'white'}
  axes.add_patch(PathPatch(path, fill=False, linewidth=0, gid='hatch', **look))


def _outline(axes, start, seen_YX):
  """Draws a line around the seen patches."""
  lines = LineCollection(
    _borders(np.pad(seen_YX, 1)) + (start - 1, -1),
    colors=style.CHOSEN,
    linewidths=float(np.clip(6 / seen_YX.shape[1], 0.7, 1.5)),
    capstyle='projecting',
    # Draw over the frame, also at patches at the edge of the image.
    clip_on=False,
    zorder=2.6,
    gid='outline',
  )
  axes.add_collection(lines, autolim=False)


def _borders(cell_YX):
  """Returns the lines [N, ends, (x, y)] between adjacent cells that differ."""
  y_N, x_N = np.nonzero(np.diff(cell_YX, axis=1))
  down_N4 = np.stack([x_N + 1, y_N, x_N + 1, y_N + 1], axis=-1)
  y_N, x_N = np.nonzero(np.diff(cell_YX, axis=0))
  across_N4 = np.stack([x_N, y_N + 1, x_N + 1, y_N + 1], axis=-1)
  return np.concatenate([down_N4, across_N4]).reshape(-1, 2, 2)


def _heat_norm(value_HL):
  """Returns a norm from 0 that leaves out a few outliers, and its `extend`.

  `extend` is the keyword of a colour bar: 'max' if values were left out.
  """
  low, high = min(0.0, float(value_HL.min())), float(value_HL.max())
  most = float(np.quantile(value_HL, 0.99, method='higher'))
  clipped = most > 0 and high > 1.5 * most
  if clipped:
    high = most
  norm = Normalize(low, high if high > low else low + 1)
  return norm, 'max' if clipped else 'neither'


def patch_inches(columns: int, grid: tuple[int, int]) -> float:
  """Returns a patch's rough width in inches, if pictures have `columns`."""
  return min(10 / columns, 1.7) / max(grid)


def patch_aspect(image_HWC, grid) -> float:
  """Returns the height of a patch over its width."""
  return image_HWC.shape[0] / grid[0] * grid[1] / image_HWC.shape[1]


def _rows(values, columns) -> list[list]:
  return [list(row) for row in itertools.batched(values, columns)]
