"""Where a vision model spends its compute: pictures over pictures.

Patches are numbered row by row from the top left, without a class token.
Shapes: B images, at most eight, of H x W pixels, R routed blocks, S pruning
stages, L patches.
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

from mod_jax.errors import UserError
from mod_jax.viz import glyphs, style

VEIL = 0.85  # Opacity of what covers a patch that passes by.
_GREY = 150  # And its grey.
HEAT = colormaps['viridis']  # Perceptually uniform.
OVERLAY = 0.72  # Opacity of colours that lie on a picture.
_MOST_IMAGES = 8


def patch_maps(
  images_BHWC,
  processed_RBL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  title: str = '',
  labels: Sequence[str] | None = None,
  num_layers: int | None = None,
) -> Figure:
  """Draws the patches that each routed block processed, a row per image.

  The image stands at the left; then, for each routed block, the image with the
  skipped patches hatched in grey and the processed ones outlined.

  Args:
    images_BHWC: uint8 RGB images.
    processed_RBL: whether each routed block processed each patch.
    layers: the block numbers of the R routed blocks, counted from 0, in the
      order of the columns.
    grid: rows and columns of patches, L in all.
    title: says what is seen; a general one if empty.
    labels: a text for each image, such as its class.
    num_layers: blocks of the model, if it is to be written.
  """
  subtitle = 'No block is routed: every block processes every patch.'
  if len(layers):
    of = '' if num_layers is None else f' of {num_layers}'
    subtitle = (
      f'Routed blocks: {len(layers)}{of}, with {np.mean(processed_RBL):.1%} of'
      ' the patches. Outlined: processed. Grey: the patch passes by.'
    )
  return _masked_pictures(
    *(images_BHWC, processed_RBL, grid),
    [f'block {layer}' for layer in layers],
    title or 'The patches that each routed block processes',
    subtitle,
    labels,
  )


def token_stages(
  images_BHWC,
  kept_SBL,
  *,
  grid: tuple[int, int],
  blocks: Sequence[int],
  title: str = '',
  labels: Sequence[str] | None = None,
) -> Figure:
  """Draws the patches that are left after each pruning stage, a row per image.

  Args:
    images_BHWC: uint8 RGB images.
    kept_SBL: whether each patch is still there after each stage.
    grid: rows and columns of patches, L in all.
    blocks: the numbers, counted from 0, of the blocks before which the S
      stages prune.
    title: says what is seen; a general one if empty.
    labels: a text for each image, such as its class.
  """
  return _masked_pictures(
    *(images_BHWC, kept_SBL, grid),
    [f'before block {block}' for block in blocks],
    title or 'The patches that are left after each pruning stage',
    'Patches are removed just before the named blocks, for good. Outlined:'
    ' still there. Grey: removed.',
    labels,
  )


def attention_maps(
  image_HWC,
  maps_RHL,
  *,
  layers: Sequence[int],
  grid: tuple[int, int],
  title: str = '',
) -> Figure:
  """Draws the attention that each patch receives: a row per block.

  The image stands at the left of each row, then a map for each head. The heads
  of a block share one colour scale from 0 (or the smallest value, if that is
  below) to the largest. A few values far above all others do not stretch it;
  the colour bar then ends in an arrow.

  Args:
    image_HWC: one uint8 RGB image.
    maps_RHL: attention that each patch receives, of R blocks and H heads.
    layers: the R block numbers, counted from 0.
    grid: rows and columns of patches, L in all.
    title: says what is seen; a general one if empty.
  """
  image_HWC, maps_RHL = np.asarray(image_HWC), np.asarray(maps_RHL, float)
  norms = [_heat_norm(map_HL) for map_HL in maps_RHL]
  body, axes_R, _ = image_grid(
    [
      [[(image_HWC, {})]]
      + [
        [(map_L.reshape(grid), {'cmap': HEAT, 'norm': norm})]
        for map_L in map_HL
      ]
      for map_HL, (norm, _) in zip(maps_RHL, norms, strict=True)
    ],
    grid,
    title=title or 'The attention that each patch receives',
    subtitle='A row per block, a column per head; the brighter, the more'
    ' attention. The heads of a block share the scale at its right.',
    above=[['image', *(f'head {h}' for h in range(maps_RHL.shape[1]))]],
    labels=[f'block {layer}' for layer in layers],
    aspect=patch_aspect(image_HWC, grid),
    scale=True,
  )
  for axes, (norm, clipped) in zip(axes_R, norms, strict=True):
    extend = 'max' if clipped else 'neither'
    style.scale(body, [axes], norm, HEAT, extend=extend)
  return body.get_figure(root=True)


def keep_probability(
  mean_SL,
  *,
  grid: tuple[int, int],
  blocks: Sequence[int],
  count: int,
  title: str = '',
) -> Figure:
  """Draws how probably a patch is kept, over a data set: a map per stage.

  All maps share one colour scale from 0 to 1.

  Args:
    mean_SL: mean over the images of each patch's being kept, from 0 to 1.
    grid: rows and columns of patches, L in all.
    blocks: the numbers, counted from 0, of the blocks before which the S
      stages prune.
    count: images over which was averaged.
    title: says what is seen; a general one if empty.
  """
  norm = Normalize(0, 1)
  heat = {'cmap': HEAT, 'norm': norm}
  body, axes_R, _ = image_grid(
    _rows([[(mean_L, heat)] for mean_L in np.reshape(mean_SL, (-1, *grid))], 4),
    grid,
    title=title or 'How probably each patch is kept',
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
  title: str = '',
  unit: str = 'learners per token',
  maximum: float | None = None,
  labels: Sequence[str] | None = None,
) -> Figure:
  """Draws each image beside the same with the compute per patch as colour.

  Args:
    images_BHWC: uint8 RGB images.
    load_BL: compute spent on each patch, 0 or more.
    grid: rows and columns of patches, L in all.
    title: says what is seen; a general one if empty.
    unit: of the load; labels the colour scale, which starts at 0.
    maximum: where the colour scale ends; None: at the largest load.
    labels: a text for each image, such as its class.
  """
  images_BHWC, load_BL = checked(images_BHWC), np.asarray(load_BL)
  norm = Normalize(0, maximum or float(load_BL.max()) or 1.0)
  heat = {'cmap': HEAT, 'norm': norm, 'alpha': OVERLAY}
  pairs = []
  for image_HWC, load_L in zip(images_BHWC, load_BL, strict=True):
    load = load_L.reshape(grid), heat
    pairs += [[(image_HWC, {})], [(greyed(image_HWC), {}), load]]
  # Over the pair, which is as wide as two lines of it.
  names = [
    textwrap.fill(glyphs.plain(label), 22, max_lines=2, placeholder='…')
    for label in labels or [''] * len(load_BL)
  ]
  means = [f'{mean:.3g} on average' for mean in load_BL.mean(axis=1)]
  body, axes_R, _ = image_grid(
    _rows(pairs, 8),
    grid,
    title=title or 'The compute that each patch takes',
    subtitle=f'Each image, and beside it the {unit}, with the mean below.',
    above=_rows([text for name in names for text in (name, '')], 8),
    below=_rows([text for mean in means for text in ('', mean)], 8),
    aspect=patch_aspect(images_BHWC[0], grid),
    group=2,
    scale=True,
  )
  style.scale(body, axes_R, norm, HEAT, unit, alpha=OVERLAY)
  return body.get_figure(root=True)


def image_grid(
  tiles: Sequence[Sequence[Sequence]],
  grid: tuple[int, int],
  *,
  title: str,
  subtitle: str,
  above: Sequence[Sequence[str]],
  below: Sequence[Sequence[str]] = (),
  labels: Sequence[str] | None = None,
  aspect: float = 1.0,
  group: int = 1000,
  scale: bool = False,
) -> tuple[SubFigure, list[Axes], np.ndarray]:
  """Draws rows of pictures, each row in axes of its own, in units of patches.

  Axes for each picture would take constrained layout many seconds.

  Args:
    tiles: of each row and column the layers of a picture, pixels or a number
      for each patch, and how `imshow` draws them.
    grid: rows and columns of patches.
    title: of the figure.
    subtitle: of the figure.
    above: by row and column texts over the pictures; rows may lack.
    below: the same under them.
    labels: a text at the left of each row.
    aspect: height of a patch over its width.
    group: after so many columns the gap is wider.
    scale: whether there will be a colour scale.

  Returns:
    A part of the figure, the axes of each row, and where each column begins.
  """
  rows, columns = len(tiles), max(map(len, tiles))
  high, wide = grid
  start_C = np.arange(columns) * 1.07 + np.arange(columns) // group * 0.1
  start_C = start_C * wide
  # Inches; so wide is a letter.
  texts = [text for row in (*above, *below) for text in row]
  longest = max(len(line) for text in texts for line in text.split('\n'))
  least = max(0.75, 0.064 * longest) if group > columns else 0.75
  cell = max(least, min(10 / columns, 1.7 if rows > 1 else 2.4))
  width = cell * (start_C[-1] + wide) / wide + 0.2 + 0.7 * scale
  width += 0.075 * min(18, max(map(len, labels or ['']))) + 0.1 * bool(labels)
  over, under = (
    max(text.count('\n') + 1 for row in texts for text in row) if texts else 0
    for texts in (above, below)
  )
  picture = max(cell * aspect * high / wide, 0.3)
  height = rows * (picture + 0.08 + 0.14 * under)
  height += 0.16 * over * (rows if len(above) > 1 else 1)
  figure, body = style.new_figure(max(4.0, width), height, title, subtitle)
  figure.get_layout_engine().set(h_pad=0.03, hspace=0)
  axes_R = list(body.subplots(rows, squeeze=False)[:, 0])
  for r, (axes, row) in enumerate(zip(axes_R, tiles, strict=True)):
    for start, layers in zip(start_C, row, strict=False):
      for values, how in layers:
        axes.imshow(
          values,
          extent=(start, start + wide, high, 0),
          # Patches have hard edges; a photograph is made smaller without moiré.
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
    axes.set(xlim=(0, start_C[-1] + wide), ylim=(high, 0), aspect=aspect)
    axes.set(xticks=[], yticks=[], label='row')
    axes.spines[:].set_visible(False)
    if labels:
      text = textwrap.fill(
        *(glyphs.plain(labels[r]), 18),
        max_lines=int(picture / 0.14),
        placeholder='…',
      )
      axes.set_yticks([high / 2], [text], fontsize=8, color=style.INK)
      axes.tick_params(length=0)
  return body, axes_R, start_C


def checked(images_BHWC) -> np.ndarray:
  """Returns images, or raises UserError for what is none or too many."""
  images_BHWC = np.asarray(images_BHWC)
  if (
    images_BHWC.dtype != np.uint8
    or images_BHWC.shape[3:] != (3,)
    or not 1 <= len(images_BHWC) <= _MOST_IMAGES
  ):
    raise UserError(
      f'images of shape {images_BHWC.shape} and type {images_BHWC.dtype}:'
      f' expected shape [images, height, width, 3], at most {_MOST_IMAGES} of'
      ' them, and type uint8, the pixels from 0 to 255 as before normalisation.'
    )
  return images_BHWC


def greyed(image_HWC) -> np.ndarray:
  """Returns a uint8 image in light grey, each channel from 0.4 to 1.

  All colour over it is then what was drawn there, and one colour looks alike
  over dark and bright parts.
  """
  grey_HW = 0.4 + 0.6 * (image_HWC @ [0.299, 0.587, 0.114]) / 255
  return np.repeat(grey_HW[..., None], 3, axis=-1)


def over_pixels(value_L, grid: tuple[int, int], image_HWC) -> np.ndarray:
  """Returns the value of the patch of each pixel, [H, W, 1]."""
  (rows, columns), (high, wide) = grid, image_HWC.shape[:2]
  if high % rows or wide % columns:
    raise UserError(
      f'images of {high} x {wide} pixels do not divide into {rows} x {columns}'
      ' patches: pass them at the resolution that the model saw.'
    )
  patch = np.ones((high // rows, wide // columns), int)
  return np.kron(np.reshape(value_L, grid), patch)[..., None]


def veiled(image_HWC, seen_L, grid: tuple[int, int]) -> np.ndarray:
  """Returns an image under a grey veil but for some patches.

  Args:
    image_HWC: a uint8 image, its sides multiples of the grid's.
    seen_L: whether each patch stays as it is.
    grid: rows and columns of patches.
  """
  veiled_HWC = (1 - VEIL) * image_HWC + VEIL * _GREY
  seen_HW1 = over_pixels(seen_L, grid, image_HWC) > 0
  return np.where(seen_HW1, image_HWC, veiled_HWC.round().astype(np.uint8))


def _masked_pictures(
  images_BHWC, seen_CBL, grid, headings, title, subtitle, labels
) -> Figure:
  """Draws a row per image: as it is, then with each of C masks."""
  images_BHWC = checked(images_BHWC)
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
    above=[['image', *headings]],
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
      if patch_inches(len(start_C), grid) > 0.1:
        _hatch(axes, start, ~seen_L.reshape(grid))
  return body.get_figure(root=True)


def _hatch(axes, start, hidden_YX):
  """Hatches patches: on an image as grey as the veil, this is not seen alone.

  On small ones the lines would be all that is seen.
  """
  y_N, x_N = np.nonzero(hidden_YX)
  corners_N12 = np.stack([start + x_N, y_N], axis=-1)[:, None]
  corners_N42 = corners_N12 + np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
  axes.add_patch(
    PathPatch(
      Path.make_compound_path_from_polys(corners_N42),
      fill=False,
      edgecolor='white',
      linewidth=0,
      hatch='////',
      hatch_linewidth=0.5,
      gid='hatch',
    )
  )


def _outline(axes, start, seen_YX):
  """Draws a line between seen patches and all else."""
  padded_YX = np.pad(seen_YX, 1)
  y_M, x_M = np.nonzero(np.diff(padded_YX, axis=0)[:, 1:-1])
  across_M4 = np.stack([x_M, y_M, x_M + 1, y_M], axis=-1)
  y_M, x_M = np.nonzero(np.diff(padded_YX, axis=1)[1:-1])
  down_M4 = np.stack([x_M, y_M, x_M, y_M + 1], axis=-1)
  lines_M22 = np.concatenate([across_M4, down_M4]).reshape(-1, 2, 2)
  axes.add_collection(
    LineCollection(
      lines_M22 + (start, 0),
      colors=style.CHOSEN,
      linewidths=float(np.clip(6 / seen_YX.shape[1], 0.7, 1.5)),
      capstyle='projecting',
      # Over the frame, also where the patch is at the image's edge.
      clip_on=False,
      zorder=2.6,
      gid='outline',
    ),
    autolim=False,
  )


def _heat_norm(value_HL):
  """Returns a norm from 0 up, and whether it leaves out a few large values."""
  low, high = min(0.0, float(value_HL.min())), float(value_HL.max())
  most = float(np.quantile(value_HL, 0.99, method='higher'))
  clipped = most > 0 and high > 1.5 * most
  if clipped:
    high = most
  return Normalize(low, high if high > low else low + 1), clipped


def patch_inches(columns: int, grid: tuple[int, int]) -> float:
  """Returns about how wide a patch is on a sheet of so many columns."""
  return min(10 / columns, 1.7) / max(grid)


def patch_aspect(image_HWC, grid) -> float:
  """Returns the height of a patch over its width."""
  return image_HWC.shape[0] / grid[0] * grid[1] / image_HWC.shape[1]


def _rows(values, columns) -> list[list]:
  return [list(row) for row in itertools.batched(values, columns)]
