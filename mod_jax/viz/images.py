"""Where a vision model spends its compute: pictures over pictures.

Patches are numbered row by row from the top left, without a class token.
Shapes: B images, H x W pixels, R routed blocks, S pruning stages, L patches.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
import textwrap

from matplotlib import colormaps
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import style

VEIL = 0.85  # How white or grey a skipped patch becomes.
_GREY = 150  # Which grey.
HEAT = colormaps['viridis']  # Perceptually uniform.
OVERLAY = 0.72  # Opacity of colours that lie on a picture.
SLACK = 1e-5  # A float32 share of all learners may exceed 1.

# Inches.
_GAP, _GROUP_GAP, _HEAD, _BELOW = 0.09, 0.22, 0.24, 0.2
_LEAST_WIDTH, _WIDTH = 5.5, 11.0
_LEAST_CELL, _MOST_CELL, _HIGHEST = 0.75, 1.7, 2.4
_LEAST_SCALE = 0.7  # For its label.

# The space of a GridSpec: everything, and none between its cells.
_WHOLE = {
  'left': 0,
  'right': 1,
  'bottom': 0,
  'top': 1,
  'wspace': 0,
  'hspace': 0,
}

_SIDE = 18  # Characters of a label beside a row.
_HEADING = {'fontsize': 9, 'color': style.INK, 'pad': 6}
_CAPTION = {'fontsize': 7.5, 'color': style.MUTED}
_LABEL = {'fontsize': 8, 'color': style.INK}


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
    num_layers: blocks of the model, if it is to be told.

  Raises:
    UserError: shapes or numbers that do not fit together, or more than one
      picture can hold.
  """
  layers = block_numbers('layers', layers, num_layers)
  return _masked_pictures(
    images_BHWC,
    processed_RBL,
    grid,
    [f'block {layer}' for layer in layers],
    title or 'The patches that each routed block processes',
    lambda processed_RBL: _patch_summary(processed_RBL, num_layers),
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
    ' block. Hatched grey: the patch passes by. Below: how many are processed.'
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
  blocks = block_numbers('blocks', blocks)
  summary = (
    'Patches are removed just before the named blocks, for good. Outlined:'
    ' still there. Hatched grey: removed. Below: how many are left.'
  )
  if not blocks:
    summary = 'There is no pruning stage: every patch is kept.'
  return _masked_pictures(
    images_BHWC,
    kept_SBL,
    grid,
    [f'before block {block}' for block in blocks],
    title or 'The patches that are left after each pruning stage',
    lambda _: summary,
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
  images_BHWC = checked_images(image_HWC[None], one=True)
  layers = block_numbers('layers', layers)
  grid = checked_grid(grid, images_BHWC)
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
  heads = [f'head {h}' for h in range(maps_RHL.shape[1])]
  figure, panels, scales = _sheet(
    title or 'The attention that each patch receives',
    'A row per block, a column per head; the brighter, the more attention. The'
    ' heads of a block share the scale at its right.',
    rows=len(layers),
    columns=1 + len(heads),
    aspect=_aspect(images_BHWC),
    headings=heads,
    labels=[f'block {layer}' for layer in layers],
    scales=len(layers),
  )
  for r, ((first, *others), map_HL) in enumerate(
    zip(panels, maps_RHL, strict=True)
  ):
    show(first, 'image', images_BHWC[0], grid, above='' if r else 'image')
    norm, clipped = _heat_norm(map_HL)
    for axes, map_L, head in zip(others, map_HL, heads, strict=True):
      heat = {'above': '' if r else head, 'cmap': HEAT, 'norm': norm}
      show(axes, 'map', map_L.reshape(grid), grid, images_BHWC, **heat)
    draw_scale(scales[r], norm, extend='max' if clipped else 'neither')
  return figure


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
  grid = checked_grid(grid)
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
  headings = [f'before block {block}' for block in blocks]
  captions = [f'{mean:.1%} on average' for mean in mean_SL.mean(axis=1)]
  figure, panels, (scale,) = _sheet(
    title or 'How probably each patch is kept',
    f'Share of {count:,} image{"" if count == 1 else "s"} in which the patch at'
    ' this place is still there after pruning just before the named block.',
    rows=math.ceil(len(blocks) / columns),
    columns=columns,
    aspect=grid[0] / grid[1],
    headings=headings,
    between=_HEAD,
    captions=captions,
    scales=1,
  )
  norm = Normalize(0, 1)
  for axes, mean_L, above, below in zip(
    panels.flat, mean_SL, headings, captions, strict=False
  ):
    values = mean_L.reshape(grid)
    look = {'cmap': HEAT, 'norm': norm}
    show(axes, 'map', values, grid, above=above, below=below, **look)
  draw_scale(scale, norm, label='probability of being kept')
  for axes in panels.flat[len(blocks) :]:
    axes.remove()
  return figure


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
  images_BHWC = checked_images(images_BHWC)
  labels = image_labels(labels, len(images_BHWC))
  grid = checked_grid(grid, images_BHWC)
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
  figure, panels, (scale,) = _sheet(
    title or 'The compute that each patch takes',
    f'Each image, and beside it the {unit}. Below: the mean over its patches.',
    rows=math.ceil(len(images_BHWC) / pairs),
    columns=2 * pairs,
    group=2,
    aspect=_aspect(images_BHWC),
    over=_HEAD if labels else _GAP,
    between=_HEAD if labels else _GAP,
    captions=captions,
    scales=1,
  )
  panels = panels.reshape(-1, 2)
  norm = Normalize(0, maximum)
  for b, (image_HWC, load_L) in enumerate(
    zip(images_BHWC, load_BL, strict=True)
  ):
    left, right = panels[b]
    show(left, 'image', image_HWC, grid)
    if labels:
      # Over the pair: a label is no longer than both are wide.
      room = 2 * left.get_window_extent().width / figure.dpi
      left.set_title(_fitting(labels[b], room), loc='left', **_LABEL)
    show(right, 'map', greyed(image_HWC), grid)
    heat = {'cmap': HEAT, 'norm': norm, 'alpha': OVERLAY}
    load_YX = load_L.reshape(grid)
    show(right, 'map', load_YX, grid, images_BHWC, below=captions[b], **heat)
  whole = np.array_equal(load_BL, np.round(load_BL)) and maximum <= 64
  draw_scale(scale, norm, label=unit, whole=whole, alpha=OVERLAY)
  for axes in panels[len(images_BHWC) :].flat:
    axes.remove()
  return figure


def greyed(image_HWC) -> np.ndarray:
  """Returns a uint8 image in light grey, each channel from 0.4 to 1.

  All colour over it is then what was drawn there, and one colour looks alike
  over dark and bright parts.
  """
  grey_HW = 0.4 + 0.6 * (image_HWC @ [0.299, 0.587, 0.114]) / 255
  return np.repeat(grey_HW[..., None], 3, axis=-1)


def veiled(image_HWC, seen_L, grid: tuple[int, int]) -> np.ndarray:
  """Returns an image under a grey veil but for some patches.

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
  veiled_HWC = VEIL * _GREY + (1 - VEIL) * image_HWC
  veiled_HWC = veiled_HWC.round().astype(np.uint8)
  return np.where(seen_HW[..., None], image_HWC, veiled_HWC)


def _masked_pictures(
  images_BHWC, seen_CBL, grid, headings, title, summary, labels
) -> Figure:
  """Draws a row per image: as it is, then with each of C masks."""
  images_BHWC = checked_images(images_BHWC)
  grid = checked_grid(grid, images_BHWC)
  length = math.prod(grid)
  seen_CBL = by_patch('decisions', seen_CBL, len(headings), images_BHWC, grid)
  seen_CBL = decisions(seen_CBL, 'patch')

  def draw(axes, c, b, **how):
    seen_L = seen_CBL[c, b]
    show(axes, 'map', veiled(images_BHWC[b], seen_L, grid), grid, **how)
    # On an image that is as grey as the veil, this would not be seen alone.
    axes.add_collection(
      PolyCollection(
        _corners(~seen_L.reshape(grid)),
        facecolors='none',
        edgecolors='white',
        linewidths=0,
        hatch='////',
        gid='hatch',
      ),
      autolim=False,
    )
    axes.add_collection(
      LineCollection(
        _outline(seen_L.reshape(grid)),
        colors=style.CHOSEN,
        linewidths=float(np.clip(6 / grid[1], 0.7, 1.5)),
        capstyle='projecting',
        # Over the frame, also where the patch is at the image's edge.
        clip_on=False,
        zorder=2.6,
        gid='outline',
      ),
      autolim=False,
    )

  figure, _ = pictures_by_block(
    images_BHWC,
    grid=grid,
    headings=headings,
    captions_CB=[
      [f'{count} of {length} ({count / length:.0%})' for count in count_B]
      for count_B in seen_CBL.sum(axis=-1)
    ],
    title=title,
    summary=summary(seen_CBL),
    labels=labels,
    draw=draw,
  )
  return figure


def pictures_by_block(
  images_BHWC,
  *,
  grid: tuple[int, int],
  headings: Sequence[str],
  captions_CB: Sequence[Sequence[str]],
  title: str,
  summary: str,
  labels: Sequence[str] | None,
  draw: Callable[..., None],
  scales: int = 0,
) -> tuple[Figure, list[Axes]]:
  """Draws a row per image: as it is, then a picture for each of C blocks.

  Args:
    images_BHWC: checked images.
    grid: rows and columns of patches.
    headings: over the C columns.
    captions_CB: under each picture.
    title: of the figure.
    summary: under the title.
    labels: a text for each image, or None.
    draw: is called with axes, the number of the block among the C, that of the
      image, and texts for `show`.
    scales: 1 to leave room for a colour scale at the right.

  Returns:
    The figure, and the axes for scales.
  """
  figure, panels, bars = _sheet(
    title,
    summary,
    rows=len(images_BHWC),
    columns=1 + len(headings),
    aspect=_aspect(images_BHWC),
    headings=headings,
    captions=[text for captions_B in captions_CB for text in captions_B],
    labels=image_labels(labels, len(images_BHWC)),
    scales=scales,
  )
  for b, (first, *others) in enumerate(panels):
    show(first, 'image', images_BHWC[b], grid, above='' if b else 'image')
    for c, axes in enumerate(others):
      above = '' if b else headings[c]
      draw(axes, c, b, above=above, below=captions_CB[c][b])
  return figure, bars


def _corners(patch_YX) -> np.ndarray:
  """Returns the four corners [N, 4, 2] (x, y) of each patch that is True."""
  y, x = np.nonzero(patch_YX)
  place_N12 = np.stack([x, y], axis=-1)[:, None]
  return place_N12 + np.array([(0, 0), (1, 0), (1, 1), (0, 1)])


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


def shares(name: str, values) -> np.ndarray:
  """Returns values from 0 to 1, or raises UserError if one lies outside."""
  values = finite(name, values)
  odd = values[(values < -SLACK) | (values > 1 + SLACK)]
  if odd.size:
    raise UserError(
      f'{name}: {odd[0]:.6g} is no share; expected numbers from 0 to 1.'
    )
  return values.clip(0, 1)


def decisions(chosen, what: str) -> np.ndarray:
  """Returns decisions about tokens as booleans, or raises UserError."""
  chosen = np.asarray(chosen)
  odd = chosen[~np.isin(chosen, (0, 1))]
  if odd.size:
    raise UserError(
      f'decisions such as {odd[0]}: expected True or False for each {what}, not'
      ' the positions of the chosen ones.'
    )
  return chosen.astype(bool)


def checked_images(images_BHWC, *, one: bool = False) -> np.ndarray:
  """Returns images, or raises UserError; `one` if the caller gave a single."""
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


def checked_grid(grid, images_BHWC=None) -> tuple[int, int]:
  """Returns rows and columns of patches, or raises UserError."""
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


def by_patch(name: str, values, blocks: int, images_BHWC, grid) -> np.ndarray:
  """Returns values for each block, image and patch, or raises UserError."""
  values = np.asarray(values)
  expected = (blocks, len(images_BHWC), math.prod(grid))
  if values.shape != expected:
    raise UserError(
      f'{name} of shape {values.shape} for {expected[0]} blocks,'
      f' {expected[1]} images and {expected[2]} patches: expected shape'
      f' {expected}, without a class token.'
    )
  return values


def image_labels(labels, count: int) -> list[str] | None:
  """Returns a text for each image, or raises UserError."""
  if labels is None:
    return None
  if isinstance(labels, str) or len(labels) != count:
    raise UserError(
      f'{labels!r:.60} as labels of {count} images: expected one text for each.'
    )
  return [str(label) for label in labels]


# Layout.


def _sheet(
  title,
  summary,
  *,
  rows,
  columns,
  aspect,
  headings=(),
  captions=(),
  labels=None,
  over=_HEAD,
  between=_GAP,
  group=1_000_000,
  scales=0,
) -> tuple[Figure, np.ndarray, list[Axes]]:
  """Returns a figure, rows of panels, and places for colour scales.

  Everything has a size in inches, which a GridSpec takes as it is: for some
  hundred panels constrained layout would need seconds.

  Args:
    title: of the figure.
    summary: under the title.
    rows: of panels.
    columns: of panels.
    aspect: a panel's height over its width.
    headings: what will stand over panels, which are wide enough for it.
    captions: what will stand under panels, which are wide enough for it.
    labels: a text at the left of each row.
    over: inches over the first row.
    between: inches over each other row.
    group: after so many columns the gap is wider.
    scales: 0; 1: at the right of the first rows; or one for each row.
  """
  labels = [glyphs.plain(label) for label in labels or ()]
  lines = [line for label in labels for line in textwrap.wrap(label, _SIDE)]
  left = style.MARGIN
  if lines:
    left += 0.12 + max(_inches(line, _LABEL['fontsize']) for line in lines)
  right = [0.14 - _GAP, 0.11, 0.8] if scales else [style.MARGIN - _GAP]
  texts = [(text, _HEADING['fontsize']) for text in set(headings)]
  texts += [(text, _CAPTION['fontsize']) for text in set(captions)]
  least = max((_inches(*text) for text in texts), default=0.0)
  # A single row may be larger.
  most = _MOST_CELL if rows > 1 else _HIGHEST
  cell = (_WIDTH - left - sum(right)) / columns - _GAP
  cell = max(least, _LEAST_CELL, min(cell, most))
  high = min(max(cell * aspect, 0.3), _HIGHEST)
  widths = [left]
  for column in range(1, columns + 1):
    widths += [cell, _GAP if column % group else _GROUP_GAP]
  widths += right
  widths[-1] += max(0, _LEAST_WIDTH - sum(widths))
  heights = [over]
  for _ in range(rows):
    heights += [high, _BELOW if captions else 0.0, between]
  heights[-1] = max(0.12, _LEAST_SCALE - high if scales else 0.0)

  figure, body = style.new_figure(
    sum(widths),
    sum(heights),
    title,
    summary,
    what=f'{rows} rows of {columns} pictures',
    layout=None,
  )
  spec = body.add_gridspec(
    len(heights),
    len(widths),
    height_ratios=heights,
    width_ratios=widths,
    **_WHOLE,
  )
  panels = [
    [body.add_subplot(spec[3 * r + 1, 2 * c + 1]) for c in range(columns)]
    for r in range(rows)
  ]
  most = max(1, int(high * 72 / 10))  # Lines beside a panel.
  for (first, *_), label in zip(panels, labels, strict=False):
    text = textwrap.fill(label, _SIDE, max_lines=most, placeholder='…')
    first.set_ylabel(text, rotation=0, ha='right', va='center', **_LABEL)
  # A single scale is as high as two rows.
  more = 3 if scales == 1 and rows > 1 else 0
  bars = [
    body.add_subplot(spec[3 * r + 1 : 3 * r + 2 + more, -2], label='bar')
    for r in range(scales)
  ]
  return figure, np.array(panels), bars


def _inches(text: str, size: float) -> float:
  """Returns the width of a line of text, `size` in points."""
  font = font_manager.get_font(glyphs.sans(text))
  font.set_size(size, 72)
  font.set_text(text)
  # With some room: at another resolution hinting makes it a little wider.
  return font.get_width_height()[0] / 64 / 72 + 0.04


def _fitting(text: str, room: float) -> str:
  """Returns as much of a label as stands on so many inches."""
  for most in range(len(glyphs.plain(text)), 0, -1):
    shown = style.shortened(text, most)
    if _inches(shown, _LABEL['fontsize']) <= room:
      return shown
  return ''


def _aspect(images_BHWC) -> float:
  return images_BHWC.shape[1] / images_BHWC.shape[2]


def show(
  axes, kind, values, grid, images_BHWC=None, *, above='', below='', **how
):
  """Shows pixels or one value per patch, in units of patches.

  Args:
    axes: where.
    kind: the axes' label, for who looks for them.
    values: pixels, or a number for each patch.
    grid: rows and columns of patches.
    images_BHWC: what has the aspect of the patches; None: the values have.
    above: the panel's heading.
    below: its caption.
    **how: as in `Axes.imshow`.
  """
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
  axes.set(label=kind, xticks=[], yticks=[])
  axes.spines[:].set(color=style.FAINT, linewidth=0.6)
  if above:
    axes.set_title(above, **_HEADING)
  if below:
    axes.set_xlabel(below, labelpad=3, **_CAPTION)


def draw_scale(axes, norm, *, cmap=HEAT, label='', whole=False, **how):
  """Draws a colour scale; `how` is as in `Figure.colorbar`."""
  high = axes.get_window_extent().height / axes.get_figure(root=True).dpi
  few = max(2, min(5, int(high / 0.3)))
  ticks = MaxNLocator(few, integer=whole, steps=[1, 2, 2.5, 5, 10])
  part = axes.get_figure()
  style.scale(part, norm, cmap, cax=axes, ticks=ticks, format='{x:.3g}', **how)
  text = textwrap.fill(
    style.shortened(label, 60), max(12, int(high / 0.065)), max_lines=2
  )
  axes.set_ylabel(text, linespacing=1.1, **_LABEL)
