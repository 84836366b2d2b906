"""Where a vision model spends its compute: pictures over pictures.

Patches are numbered row by row from the top left, without a class token.
Shapes: B images, H x W pixels, R routed blocks, S pruning stages, L patches.
"""

from collections.abc import Sequence
import dataclasses
import math

from matplotlib import colormaps
from matplotlib import font_manager
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import style
from mod_jax.viz.files import DPI

VEIL = 0.85  # How white a skipped patch becomes.
HEAT = colormaps['viridis']  # Perceptually uniform.
_OVERLAY = 0.72  # Opacity of a heat map that lies on a picture.

# Inches.
_GAP, _GROUP_GAP, _BOTTOM = 0.09, 0.22, 0.12
_HEAD, _CAPTION = 0.24, 0.2
_MIN_WIDTH, _WIDTH = 6.5, 11.0
_MIN_CELL, _MAX_CELL, _MAX_CELL_HEIGHT = 0.75, 1.7, 2.4
_SIDE = 1.15  # Of a label beside a row.
_BAR, _BAR_HEIGHT = 1.05, 2.4
# Points.
_HEAD_SIZE, _CAPTION_SIZE, _LABEL_SIZE = 9, 7.5, 8

_MAX_INCHES = 30_000 // DPI  # Agg draws up to 2**16 pixels on a side.


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
  skipped patches whitened and the processed ones outlined.

  Args:
    images_BHWC: uint8 RGB images.
    processed_RBL: whether each routed block processed each patch.
    layers: the block numbers of the R routed blocks, counted from 0, in the
      order of the columns.
    grid: rows and columns of patches, L in all.
    title: says what is seen; a general one if empty.
    labels: a text for each image, such as its class.
    num_layers: blocks of the model, if it is to be told.

  Raises:
    UserError: shapes or numbers that do not fit together, or more than one
      picture can hold.
  """
  images_BHWC = _images(images_BHWC)
  layers = block_numbers('layers', layers, num_layers)
  grid = _grid(grid, images_BHWC)
  processed_RBL = _decisions(
    processed_RBL, (len(layers), len(images_BHWC), math.prod(grid))
  )
  return _masked_pictures(
    images_BHWC,
    processed_RBL,
    grid,
    [f'block {layer}' for layer in layers],
    title or 'The patches that each routed block processes',
    _patch_summary(processed_RBL, num_layers),
    labels,
  )


def _patch_summary(processed_RBL, num_layers) -> str:
  routed = len(processed_RBL)
  if not routed:
    return 'No block is routed: every block processes every patch.'
  of = '' if num_layers is None else f' of {num_layers}'
  one = routed == 1 and num_layers is None
  return (
    f'{routed}{of} block{"" if one else "s"}'
    f' {"is" if routed == 1 else "are"} routed and'
    f' process{"es" if routed == 1 else ""}'
    f' {processed_RBL.mean():.1%} of the patches. Outlined: processed by the'
    ' block. Whitened: the patch passes by. Below: how many are processed.'
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

  Raises:
    UserError: shapes or numbers that do not fit together, or more than one
      picture can hold.
  """
  images_BHWC = _images(images_BHWC)
  blocks = block_numbers('blocks', blocks)
  grid = _grid(grid, images_BHWC)
  kept_SBL = _decisions(
    kept_SBL, (len(blocks), len(images_BHWC), math.prod(grid))
  )
  if len(blocks):
    summary = (
      'Patches are removed just before the named blocks, for good. Outlined:'
      ' still there. Whitened: removed. Below: how many are left.'
    )
  else:
    summary = 'There is no pruning stage: every patch is kept.'
  return _masked_pictures(
    images_BHWC,
    kept_SBL,
    grid,
    [f'before block {block}' for block in blocks],
    title or 'The patches that are left after each pruning stage',
    summary,
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

  Raises:
    UserError: shapes or numbers that do not fit together, values that are not
      finite, or more than one picture can hold.
  """
  image_HWC = np.asarray(image_HWC)
  images_BHWC = _images(image_HWC[None], one=True)
  layers = block_numbers('layers', layers)
  grid = _grid(grid, images_BHWC)
  maps_RHL = finite('attention', maps_RHL)
  length = math.prod(grid)
  if (
    maps_RHL.ndim != 3
    or maps_RHL.shape[::2] != (len(layers), length)
    or not maps_RHL.size
  ):
    raise UserError(
      f'attention of shape {maps_RHL.shape} for {len(layers)} blocks and a grid'
      f' of {grid[0]} x {grid[1]} patches: expected shape ({len(layers)},'
      f' heads, {length}), with one block and one head at least.'
    )
  heads = maps_RHL.shape[1]
  sheet = _sheet(
    title or 'The attention that each patch receives',
    'A row per block, a column per head; the brighter, the more attention. The'
    ' heads of a block share the scale at its right.',
    rows=len(layers),
    headings=['image', *(f'head {h}' for h in range(heads))],
    aspect=_aspect(images_BHWC),
    labels=[f'block {layer}' for layer in layers],
    bar=True,
  )
  for r, map_HL in enumerate(maps_RHL):
    _show(sheet.panel(r, 0, 'image'), images_BHWC[0], grid)
    norm, clipped = _heat_norm(map_HL)
    for h, map_L in enumerate(map_HL):
      axes = sheet.panel(r, 1 + h, 'map')
      _show(axes, map_L.reshape(grid), grid, images_BHWC, cmap=HEAT, norm=norm)
    sheet.bar(norm, r, r, extend='max' if clipped else 'neither')
  return sheet.figure


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

  Raises:
    UserError: shapes or numbers that do not fit together, or values that are
      no probabilities.
  """
  blocks = block_numbers('blocks', blocks)
  grid = _grid(grid)
  mean_SL = finite('probabilities', mean_SL)
  expected = (len(blocks), math.prod(grid))
  if mean_SL.shape != expected or not blocks:
    raise UserError(
      f'probabilities of shape {mean_SL.shape} for {len(blocks)} stages and a'
      f' grid of {grid[0]} x {grid[1]} patches: expected shape {expected}, with'
      ' one stage at least.'
    )
  slack = 1e-5  # A float32 mean of ones may exceed 1.
  if mean_SL.min() < -slack or mean_SL.max() > 1 + slack:
    odd = mean_SL.min() if mean_SL.min() < -slack else mean_SL.max()
    raise UserError(
      f'a probability of {odd:.6g}: expected means of keep decisions, from 0 to'
      ' 1.'
    )
  if count < 1:
    raise UserError(f'count={count}: expected one image or more.')
  mean_SL = mean_SL.clip(0, 1)
  columns = min(len(blocks), 4)
  captions = [f'{mean:.1%} on average' for mean in mean_SL.mean(axis=1)]
  sheet = _sheet(
    title or 'How probably each patch is kept',
    f'Share of {count:,} image{"" if count == 1 else "s"} in which the patch at'
    ' this place is still there after pruning just before the named block.',
    rows=math.ceil(len(blocks) / columns),
    headings=[f'before block {block}' for block in blocks[:columns]],
    fitting=[f'before block {block}' for block in blocks],
    captions=captions,
    aspect=grid[0] / grid[1],
    over=_HEAD,
    bar=True,
  )
  norm = Normalize(0, 1)
  for s, (block, mean_L) in enumerate(zip(blocks, mean_SL, strict=True)):
    row, column = divmod(s, columns)
    axes = sheet.panel(row, column, 'map', f'before block {block}')
    _show(axes, mean_L.reshape(grid), grid, cmap=HEAT, norm=norm)
    _caption(axes, captions[s])
  sheet.bar(norm, 0, sheet.rows - 1, label='probability of being kept')
  return sheet.figure


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

  Raises:
    UserError: shapes or numbers that do not fit together, loads that are
      negative, above the maximum or not finite, or more than one picture can
      hold.
  """
  images_BHWC = _images(images_BHWC)
  labels = _labels(labels, len(images_BHWC))
  grid = _grid(grid, images_BHWC)
  load_BL = finite('loads', load_BL)
  expected = (len(images_BHWC), math.prod(grid))
  if load_BL.shape != expected:
    raise UserError(
      f'loads of shape {load_BL.shape} for {expected[0]} images and a grid of'
      f' {grid[0]} x {grid[1]} patches: expected shape {expected}.'
    )
  if load_BL.min() < 0:
    raise UserError(f'a load of {load_BL.min():.6g}: expected 0 or more.')
  if maximum is None:
    maximum = float(load_BL.max()) or 1.0
  elif not 0 < maximum < math.inf:
    raise UserError(
      f'maximum={maximum}: expected a finite number above 0, or None for the'
      ' largest load.'
    )
  elif load_BL.max() > maximum * (1 + 1e-6):
    raise UserError(
      f'a load of {load_BL.max():.6g} is over maximum={maximum}: raise it, or'
      ' leave it out.'
    )
  pairs = min(len(images_BHWC), 4)
  captions = [f'{mean:.3g} on average' for mean in load_BL.mean(axis=1)]
  sheet = _sheet(
    title or 'The compute that each patch takes',
    f'Each image, and beside it the {unit}. Below: the mean over its patches.',
    rows=math.ceil(len(images_BHWC) / pairs),
    headings=[''] * (2 * pairs),
    captions=captions,
    aspect=_aspect(images_BHWC),
    over=_HEAD if labels else 0,
    group=2,
    bar=True,
  )
  norm = Normalize(0, maximum)
  for b, (image_HWC, load_L) in enumerate(
    zip(images_BHWC, load_BL, strict=True)
  ):
    row, pair = divmod(b, pairs)
    axes = sheet.panel(row, 2 * pair, 'image')
    _show(axes, image_HWC, grid)
    if labels:
      (text,) = _fit(labels[b], 2 * sheet.cell, _LABEL_SIZE, 1)
      _pair_label(axes, text)
    axes = sheet.panel(row, 2 * pair + 1, 'map')
    # Grey, so that all colour is load, and light, so that one load looks alike
    # over dark and bright parts.
    grey_HW = 0.4 + 0.6 * (image_HWC @ [0.299, 0.587, 0.114]) / 255
    _show(axes, np.repeat(grey_HW[..., None], 3, axis=-1), grid)
    _show(
      axes,
      load_L.reshape(grid),
      grid,
      images_BHWC,
      cmap=HEAT,
      norm=norm,
      alpha=_OVERLAY,
    )
    _caption(axes, captions[b])
  whole = np.array_equal(load_BL, np.round(load_BL)) and maximum <= 64
  sheet.bar(norm, 0, sheet.rows - 1, label=unit, whole=whole, alpha=_OVERLAY)
  return sheet.figure


def whitened(image_HWC, seen_L, grid: tuple[int, int]) -> np.ndarray:
  """Returns an image under a white veil but for some patches.

  Args:
    image_HWC: a uint8 image, its sides multiples of the grid's.
    seen_L: whether each patch stays as it is.
    grid: rows and columns of patches.
  """
  image_HWC = np.asarray(image_HWC)
  rows, columns = grid
  height, width = image_HWC.shape[:2]
  seen_HW = np.kron(
    np.asarray(seen_L, bool).reshape(grid),
    np.ones((height // rows, width // columns), bool),
  )
  veiled_HWC = 255 - (1 - VEIL) * (255.0 - image_HWC)
  veiled_HWC = veiled_HWC.round().astype(np.uint8)
  return np.where(seen_HW[..., None], image_HWC, veiled_HWC)


def _masked_pictures(
  images_BHWC, seen_CBL, grid, headings, title, summary, labels
) -> Figure:
  """Draws a row per image: as it is, then with each of C masks."""
  labels = _labels(labels, len(images_BHWC))
  length = math.prod(grid)
  captions_CB = [
    [f'{n} of {length} ({n / length:.0%})' for n in count_B]
    for count_B in seen_CBL.sum(axis=-1)
  ]
  sheet = _sheet(
    title,
    summary,
    rows=len(images_BHWC),
    headings=['image', *headings],
    captions=[text for texts in captions_CB for text in texts],
    aspect=_aspect(images_BHWC),
    labels=labels,
  )
  line = float(np.clip(0.05 * sheet.cell * 72 / grid[1], 0.7, 1.5))
  for b, image_HWC in enumerate(images_BHWC):
    _show(sheet.panel(b, 0, 'image'), image_HWC, grid)
    for c, seen_BL in enumerate(seen_CBL):
      axes = sheet.panel(b, 1 + c, 'map')
      _show(axes, whitened(image_HWC, seen_BL[b], grid), grid)
      # On a white image a white veil alone would not be seen.
      axes.add_collection(
        LineCollection(
          _outline(seen_BL[b].reshape(grid)),
          colors=style.CHOSEN,
          linewidths=line,
          capstyle='projecting',
          # Over the frame, also where the patch is at the image's edge.
          clip_on=False,
          zorder=2.6,
          gid='outline',
        ),
        autolim=False,
      )
      _caption(axes, captions_CB[c][b])
  return sheet.figure


def _outline(seen_YX) -> np.ndarray:
  """Returns segments [N, 2, 2] (x, y) between seen patches and all else."""
  padded_YX = np.pad(seen_YX, 1)
  y, x = np.nonzero(np.diff(padded_YX, axis=0)[:, 1:-1])
  across = np.stack([x, y, x + 1, y], axis=-1)
  y, x = np.nonzero(np.diff(padded_YX, axis=1)[1:-1])
  down = np.stack([x, y, x, y + 1], axis=-1)
  return np.concatenate([across, down]).reshape(-1, 2, 2)


def _heat_norm(value_HL):
  """Returns a norm from 0 up, and whether it leaves out a few large values."""
  low, high = min(0.0, float(value_HL.min())), float(value_HL.max())
  most = float(np.quantile(value_HL, 0.99, method='higher'))
  clipped = most > 0 and high > 1.5 * most
  if clipped:
    high = most
  return Normalize(low, high if high > low else low + 1), clipped


# Checks.


def block_numbers(
  name: str, numbers: Sequence[int], num_layers: int | None = None
) -> list[int]:
  """Returns block numbers as ints, or raises UserError."""
  given_R = np.asarray(numbers)
  given = given_R.tolist()
  most = math.inf if num_layers is None else num_layers - 1
  if (
    given_R.ndim != 1
    or (given_R.size and given_R.dtype.kind not in 'iu')
    or len(set(given)) < len(given)
    or not all(0 <= number <= most for number in given)
  ):
    end = ' on' if num_layers is None else f' to {most}'
    raise UserError(
      f'{name}={given}: expected different block numbers from 0{end}.'
    )
  return given


def finite(name: str, values) -> np.ndarray:
  """Returns values as floats, or raises UserError if one is not finite."""
  values = np.asarray(values, float)
  bad = np.argwhere(~np.isfinite(values))
  if len(bad):
    where = tuple(bad[0].tolist())
    raise UserError(
      f'{name} hold {values[where]} at {where} and {len(bad)} such value'
      f'{"" if len(bad) == 1 else "s"} in all: expected finite numbers only.'
    )
  return values


def _images(images_BHWC, *, one: bool = False) -> np.ndarray:
  images_BHWC = np.asarray(images_BHWC)
  if (
    images_BHWC.dtype != np.uint8
    or images_BHWC.ndim != 4
    or images_BHWC.shape[-1] != 3
    or not images_BHWC.size
  ):
    shape = images_BHWC.shape[1:] if one else images_BHWC.shape
    expected = '(height, width, 3)' if one else '(images, height, width, 3)'
    raise UserError(
      f'images of shape {shape} and type {images_BHWC.dtype}: expected shape'
      f' {expected}, none of them 0, and type uint8, the pixels from 0 to 255'
      ' as before normalisation.'
    )
  return images_BHWC


def _grid(grid, images_BHWC=None) -> tuple[int, int]:
  sides = np.asarray(grid)
  if sides.shape != (2,) or sides.dtype.kind not in 'iu' or sides.min() < 1:
    raise UserError(
      f'grid={grid}: expected two whole numbers above 0, the rows and columns'
      ' of patches.'
    )
  rows, columns = sides.tolist()
  if images_BHWC is not None:
    height, width = images_BHWC.shape[1:3]
    if height % rows or width % columns:
      raise UserError(
        f'images of {height} x {width} pixels do not divide into {rows} x'
        f' {columns} patches: pass them at the resolution that the model saw.'
      )
  return rows, columns


def _decisions(seen_CBL, expected) -> np.ndarray:
  seen_CBL = np.asarray(seen_CBL)
  if seen_CBL.shape != expected:
    raise UserError(
      f'decisions of shape {seen_CBL.shape} for {expected[0]} blocks,'
      f' {expected[1]} images and {expected[2]} patches: expected shape'
      f' {expected}, without a class token.'
    )
  odd = seen_CBL[~np.isin(seen_CBL, (0, 1))]
  if odd.size:
    raise UserError(
      f'decisions such as {odd[0]}: expected True or False for each patch, not'
      ' the positions of the chosen ones.'
    )
  return seen_CBL.astype(bool)


def _labels(labels, count) -> list[str] | None:
  if labels is None:
    return None
  if isinstance(labels, str) or len(labels) != count:
    raise UserError(
      f'{labels!r:.60} as labels of {count} images: expected one text for each.'
    )
  return [str(label) for label in labels]


# Layout.


def _inches(text: str, size: float) -> float:
  """Returns the width of a line of text, `size` in points."""
  font = font_manager.get_font(glyphs.sans(size).get_file())
  font.set_size(size, 72)
  font.set_text(glyphs.plain(text))
  return font.get_width_height()[0] / 64 / 72


def _fit(text: str, width: float, size: float, most: int) -> list[str]:
  """Returns at least one and at most `most` lines, each within `width`."""
  lines = ['']
  for word in glyphs.plain(text).split():
    for i, letter in enumerate(word):
      gap = ' ' if i == 0 and lines[-1] else ''
      # A word is split only where it alone is too long for a line.
      rest = word if i == 0 else letter
      if lines[-1] and _inches(lines[-1] + gap + rest, size) > width:
        lines.append('')
        gap = ''
      lines[-1] += gap + letter
  if len(lines) > most:
    lines = lines[:most]
    last = lines[-1]
    while last and _inches(last + '…', size) > width:
      last = last[:-1]
    lines[-1] = last + '…'
  return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sheet:
  """Rows and columns of panels in a figure; lengths in inches."""

  figure: Figure
  rows: int
  headings: list[str]
  labels: list[str] | None
  cell: float  # The width of a panel.
  high: float
  pitch: float  # From one row to the next.
  left: float  # Of the first panel.
  top: float  # From the figure's upper edge to the first panel.
  group: int
  right: float  # Of the last panel.

  def _axes(self, x, top, wide, high, label):
    width, height = self.figure.get_size_inches()
    return self.figure.add_axes(
      (x / width, 1 - (top + high) / height, wide / width, high / height),
      label=label,
    )

  def panel(self, row, column, kind, heading=''):
    """Returns axes at a place; `kind` is their label."""
    axes = self._axes(
      self.left + _column_left(column, self.cell, self.group),
      self.top + row * self.pitch,
      self.cell,
      self.high,
      kind,
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=style.FAINT, linewidth=0.6)
    if not row and not heading:
      heading = self.headings[column]
    if heading:
      _heading(axes, heading)
    if column == 0 and self.labels:
      most = max(1, int(self.high * 72 / (_LABEL_SIZE * 1.25)))
      _row_label(axes, _fit(self.labels[row], _SIDE, _LABEL_SIZE, most))
    return axes

  def bar(
    self, norm, first, last, *, label='', whole=False, extend='neither', alpha=1
  ):
    """Adds a colour scale at the right of some rows."""
    high = min((last - first) * self.pitch + self.high, _BAR_HEIGHT)
    axes = self._axes(
      self.right + 0.14, self.top + first * self.pitch, 0.11, high, 'bar'
    )
    few = max(2, min(5, int(high / 0.3)))
    colorbar = self.figure.colorbar(
      ScalarMappable(norm, HEAT),
      cax=axes,
      alpha=alpha,
      extend=extend,
      ticks=MaxNLocator(few, integer=whole, steps=[1, 2, 2.5, 5, 10]),
      format=lambda value, _: f'{value:.3g}',
    )
    colorbar.ax.tick_params(length=2, pad=2, labelsize=7, colors=style.MUTED)
    colorbar.outline.set(edgecolor=style.FAINT, linewidth=0.5)
    if label:
      lines = _fit(label, max(high, 0.8), _LABEL_SIZE, 2)
      colorbar.set_label(
        '\n'.join(lines),
        fontproperties=glyphs.sans(_LABEL_SIZE),
        color=style.INK,
        linespacing=1.1,
      )
      colorbar.ax.yaxis.label.set_parse_math(False)


def _column_left(column, cell, group) -> float:
  return column * (cell + _GAP) + column // group * (_GROUP_GAP - _GAP)


def _sheet(
  title,
  summary,
  *,
  rows,
  headings,
  aspect,
  captions=(),
  fitting=(),
  labels=None,
  over=0.0,
  group=1_000_000,
  bar=False,
) -> _Sheet:
  """Returns an empty sheet whose panels are as wide as their texts.

  Args:
    title: of the figure.
    summary: under the title.
    rows: of panels.
    headings: one for each column, over the first row.
    aspect: a panel's height over its width.
    captions: what will stand under panels.
    fitting: more texts that panels must be wide enough for.
    labels: a text at the left of each row.
    over: inches over each row but the first.
    group: after so many columns the gap is wider.
    bar: whether a colour scale stands at the right.
  """
  columns = len(headings)
  texts = [(text, _HEAD_SIZE) for text in {*headings, *fitting}]
  texts += [(text, _CAPTION_SIZE) for text in set(captions)]
  least = max(
    _MIN_CELL, *(_inches(text, size) + 0.04 for text, size in texts), 0
  )
  left = style.MARGIN
  if labels:
    # No wider than the longest label takes.
    lines = [
      line
      for label in labels
      for line in _fit(label, _SIDE, _LABEL_SIZE, 1_000)
    ]
    left += max(_inches(line, _LABEL_SIZE) for line in lines) + 0.12
  right = _BAR if bar else style.MARGIN
  cell = (_WIDTH - left - right) / columns - _GAP
  cell = max(least, min(cell, _MAX_CELL))
  high = min(max(cell * aspect, 0.3), _MAX_CELL_HEIGHT)
  pitch = high + (_CAPTION if captions else 0) + max(over, _GAP)
  end = left + _column_left(columns - 1, cell, group) + cell
  width = max(_MIN_WIDTH, end + right)
  top = style.header_height(width, title, summary) + 0.12
  if any(headings) or over:
    top += _HEAD
  height = top + rows * pitch - max(over, _GAP) + _BOTTOM
  if bar:
    height = max(height, top + 0.6 + _BOTTOM)
  if max(width, height) > _MAX_INCHES:
    raise UserError(
      f'{rows} rows of {columns} pictures make one of {width:.0f} x'
      f' {height:.0f} inches, over the limit of {_MAX_INCHES}: draw fewer.'
    )
  figure = style.new_figure(width, height)
  style.draw_header(figure, title, summary)
  return _Sheet(
    figure=figure,
    rows=rows,
    headings=headings,
    labels=labels,
    cell=cell,
    high=high,
    pitch=pitch,
    left=left,
    top=top,
    group=group,
    right=end,
  )


def _aspect(images_BHWC) -> float:
  return images_BHWC.shape[1] / images_BHWC.shape[2]


def _show(axes, values, grid, images_BHWC=None, **how):
  """Shows pixels or one value per patch, in units of patches."""
  rows, columns = grid
  shape = values.shape if images_BHWC is None else images_BHWC.shape[1:]
  axes.imshow(
    values,
    extent=(0, columns, rows, 0),
    aspect=(shape[0] / rows) / (shape[1] / columns),
    # Patches have hard edges; a photograph is made smaller without moiré.
    interpolation='nearest' if 'cmap' in how else 'auto',
    **how,
  )


def _note(axes, text, at, offset, ha, va, *, gid, size, color=style.MUTED):
  """Writes beside a panel; `at` in fractions of it, the offset in points."""
  axes.annotate(
    glyphs.plain(text),
    at,
    xycoords='axes fraction',
    xytext=offset,
    textcoords='offset points',
    ha=ha,
    va=va,
    color=color,
    fontproperties=glyphs.sans(size),
    linespacing=1.15,
    parse_math=False,
    annotation_clip=False,
    gid=gid,
  )


def _caption(axes, text):
  size = _CAPTION_SIZE
  _note(
    axes, text, (0.5, 0), (0, -3), 'center', 'top', gid='caption', size=size
  )


def _heading(axes, text):
  _note(
    axes,
    text,
    (0.5, 1),
    (0, 6),
    'center',
    'baseline',
    gid='heading',
    size=_HEAD_SIZE,
    color=style.INK,
  )


def _row_label(axes, lines):
  _note(
    axes,
    '\n'.join(lines),
    (0, 0.5),
    (-6, 0),
    'right',
    'center',
    gid='label',
    size=_LABEL_SIZE,
    color=style.INK,
  )


def _pair_label(axes, text):
  _note(
    axes,
    text,
    (0, 1),
    (0, 6),
    'left',
    'baseline',
    gid='label',
    size=_LABEL_SIZE,
    color=style.INK,
  )
