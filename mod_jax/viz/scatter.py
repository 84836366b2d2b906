"""Numbers against numbers: importance and scores, accuracy and compute."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
import numbers

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import images
from mod_jax.viz import style

# Okabe and Ito's, but for the yellow that white paper swallows.
_COLORS = (
  *('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'),
  '#000000',
)
# As many as have no divisor in common with the colours: 63 different looks.
_MARKERS = ('o', 's', 'D', '^', 'v', 'P', 'X', '<', '>')
_MAX_GROUPS = len(_COLORS) * len(_MARKERS)
_TREND = '#D55E00'
_NAMED = 24  # More points than this are not named in the plot.
_LONGEST = 40  # Characters of a name.
# Where a name may stand: points from its marker, and the angle. The nearest
# first, and straight above before beside, where lines run.
_PLACES = tuple(
  (distance, math.radians(angle))
  for distance in (8, 14, 24, 36, 52)
  for angle in (90, -90, 0, 180, 45, 135, -45, -135)
)
_NEAR = 14  # Names further away are tied to their markers.

# Inches.
_LEFT, _RIGHT, _BOTTOM, _PLOT_WIDTH, _PLOT_HEIGHT = 0.85, 0.2, 0.6, 6.6, 4.2


def importance_scatter(
  importance_RN,
  score_RN,
  *,
  layers: Sequence[int],
  correlations: Sequence[Mapping[str, float]],
  title: str = '',
) -> Figure:
  """Draws tokens' importance against their routing scores, a panel per block.

  A straight line fitted by least squares shows the trend where there is one to
  fit.

  Args:
    importance_RN: what leaving out each of N tokens changes, for R blocks.
    score_RN: the routing scores of the same tokens.
    layers: the block numbers of the R routed blocks, counted from 0.
    correlations: for each block, `pearson`, `pearson_p`, `spearman` and
      `spearman_p`; not a number where one of the two sides is constant.
    title: says what is seen; a general one if empty.

  Raises:
    UserError: shapes or numbers that do not fit together, or values that are
      not finite.
  """
  layers = images.block_numbers('layers', layers)
  importance_RN = images.finite('importances', importance_RN)
  score_RN = images.finite('scores', score_RN)
  routed = len(layers)
  if (
    importance_RN.shape != score_RN.shape
    or importance_RN.ndim != 2
    or len(importance_RN) != routed
  ):
    raise UserError(
      f'importances of shape {importance_RN.shape} and scores of shape'
      f' {score_RN.shape} for {routed} routed blocks: expected one shape'
      f' ({routed}, tokens) for both.'
    )
  if len(correlations) != routed:
    raise UserError(
      f'{len(correlations)} correlations for {routed} routed blocks: expected'
      ' one for each.'
    )
  facts = [
    _correlation(layer, given)
    for layer, given in zip(layers, correlations, strict=True)
  ]

  ncols = min(4, max(routed, 1))
  nrows = math.ceil(max(routed, 1) / ncols)
  width = max(6.5, 3.1 * ncols)
  title = title or 'Do routing scores find the important tokens?'
  subtitle = (
    'A point is a token: how much leaving it out changes the output, against'
    ' the score by which the block chooses. Line: the linear trend.'
  )
  top = style.header_height(width, title, subtitle) + 0.1
  height = top + 2.75 * nrows + 0.1
  figure = style.new_figure(width, height)
  style.draw_header(figure, title, subtitle)
  if not routed:
    axes = figure.add_axes((0, 0, 1, 1 - top / height))
    style.say(axes, 'No block is routed.')
    return figure
  grid = figure.subplots(nrows, ncols, squeeze=False)
  for axes in grid.flat[routed:]:
    axes.remove()
  for r, layer in enumerate(layers):
    axes = grid.flat[r]
    axes.set_title(
      f'Block {layer}', loc='left', fontsize=10, color=style.INK, pad=28
    )
    _draw_tokens(axes, score_RN[r], importance_RN[r], facts[r])
    if r % ncols == 0:
      axes.set_ylabel('leave-one-out importance')
    if r + ncols >= routed:
      axes.set_xlabel('routing score')
    style.clean(axes)
  figure.set_layout_engine(
    'constrained',
    rect=(0, 0, 1, 1 - top / height),
    hspace=0.06,
    wspace=0.04,
    w_pad=0.1,
    h_pad=0.06,
  )
  return figure


def _correlation(layer, given) -> str:
  lines = []
  for name, symbol in (('pearson', 'r'), ('spearman', 'ρ')):
    try:
      value, p = float(given[name]), float(given[f'{name}_p'])
    except (KeyError, TypeError, ValueError) as error:
      raise UserError(
        f'the correlations of block {layer} are {given!r:.80}: expected numbers'
        ' pearson, pearson_p, spearman and spearman_p.'
      ) from error
    if abs(value) > 1 + 1e-6 or not (0 <= p <= 1 or math.isnan(p)):
      raise UserError(
        f'block {layer} has {name} {value:.6g} with p {p:.6g}: expected a'
        ' correlation from -1 to 1 and a probability from 0 to 1.'
      )
    if math.isnan(value):
      lines.append(f'{name.title()} undefined: one side is constant')
      continue
    lines.append(f'{name.title()} {symbol} = {value:.2f} ({_p_value(p)})')
  return '\n'.join(lines)


def _p_value(p) -> str:
  if math.isnan(p):
    return 'p unknown'
  if p == 0:
    return 'p < 1e-300'  # Too small for a float.
  return f'p = {p:.3f}' if p >= 0.001 else f'p = {p:.0e}'


def _draw_tokens(axes, score_N, importance_N, facts):
  axes.annotate(
    facts,
    (0, 1),
    xycoords='axes fraction',
    xytext=(0, 4),
    textcoords='offset points',
    fontsize=7.5,
    color=style.MUTED,
    linespacing=1.2,
    gid='facts',
  )
  if not score_N.size:
    style.say(axes, 'No tokens.')
    return
  many = score_N.size
  axes.plot(
    score_N,
    importance_N,
    ls='none',
    marker='o',
    ms=float(np.clip(60 / math.sqrt(many), 1.5, 4.5)),
    markeredgewidth=0,
    alpha=float(np.clip(12 / math.sqrt(many), 0.15, 0.8)),
    color=style.CHOSEN,
    rasterized=True,
    gid='tokens',
  )
  centred_N = score_N - score_N.mean()
  spread = float(centred_N @ centred_N)
  if np.ptp(score_N) > 0 and spread > 0:
    slope = float(centred_N @ importance_N) / spread
    ends = np.array([score_N.min(), score_N.max()])
    axes.plot(
      ends,
      importance_N.mean() + slope * (ends - score_N.mean()),
      color=_TREND,
      lw=1.6,
      gid='trend',
    )
  axes.margins(0.06)
  axes.axhline(0, color=style.FAINT, lw=0.8, zorder=0)
  axes.xaxis.set_major_locator(MaxNLocator(4))
  axes.yaxis.set_major_locator(MaxNLocator(5))
  axes.xaxis.set_major_formatter(_ticks(score_N))
  axes.yaxis.set_major_formatter(_ticks(importance_N))


def _ticks(values) -> FuncFormatter:
  """Returns a formatter with one power of ten for all ticks of an axis."""
  size = float(np.abs(values).max(initial=0.0))
  power = math.floor(math.log10(size)) if size else 0
  # Small and usual ones without.
  power = 0 if -3 <= power < 5 else power

  def write(value, _):
    number = f'{value / 10.0**power:.4g}'
    return f'{number}e{power}' if power and value else number

  return FuncFormatter(write)


def accuracy_flops(
  points: Iterable[Mapping],
  *,
  title: str = '',
  xlabel: str = 'GFLOPs (multiply-accumulates)',
  ylabel: str = 'held-out accuracy',
  pareto: bool = False,
) -> Figure:
  """Draws models' accuracy against their compute, a line per group.

  The points of a group are joined in the order of their compute. Up to 24
  points are named beside their markers, wherever there is room.

  Args:
    points: for each model `name`, `group`, `flops` (in the unit that `xlabel`
      names), `accuracy`, and optionally `spread` (half the length of the error
      bar, such as a standard deviation over seeds, in the unit of accuracy;
      None: no bar).
    title: says what is seen; a general one if empty.
    xlabel: what `flops` is, with its unit.
    ylabel: what `accuracy` is; fractions whose label speaks of accuracy are
      shown as percentages.
    pareto: whether to draw the frontier of the models that no other model
      beats: none has as few FLOPs and a higher accuracy, or fewer and as high
      a one.

  Raises:
    UserError: a point without one of the numbers, numbers that are not finite,
      negative FLOPs or spread, or more than 63 groups.
  """
  points = [_point(i, given) for i, given in enumerate(points)]
  groups = {}
  for point in points:
    groups.setdefault(point['group'], []).append(point)
  if len(groups) > _MAX_GROUPS:
    raise UserError(
      f'{len(groups)} groups of points: at most {_MAX_GROUPS} can be told'
      ' apart, so draw fewer.'
    )
  title = title or 'Accuracy and compute'
  subtitle = 'Further up is more accurate; further left is cheaper.'
  if any(point['spread'] is not None for point in points):
    subtitle += ' Bars: the spread over runs.'

  figure = style.new_figure(8, 6)
  axes = figure.add_axes((0.1, 0.1, 0.8, 0.8), label='plot')
  _draw_groups(axes, groups)
  if pareto and points:
    front = frontier(points)
    axes.step(
      [point['flops'] for point in front],
      [point['accuracy'] for point in front],
      where='post',
      color=style.MUTED,
      ls=':',
      lw=1.4,
      zorder=1,
      # Alone it is no line.
      marker='o' if len(front) == 1 else None,
      ms=12,
      markerfacecolor='none',
      label='Pareto frontier: none is better',
      gid='pareto',
    )
  legend = None
  if len(groups) > 1 or any(groups) or (pareto and points):
    handles, names = axes.get_legend_handles_labels()
    legend = figure.legend(
      handles,
      names,
      loc='upper left',
      frameon=False,
      fontsize=8.5,
      labelcolor=style.INK,
      borderpad=0,
      borderaxespad=0,
    )
    for text in legend.get_texts():
      text.set_parse_math(False)
  _place(figure, axes, legend, title, subtitle)
  style.clean(axes)
  if not points:
    style.say(axes, 'No models measured yet')
    return figure
  axes.set_xlabel(glyphs.plain(xlabel), parse_math=False)
  axes.set_ylabel(glyphs.plain(ylabel), parse_math=False)
  axes.grid(color='#EEEEEE', lw=0.8)
  axes.set_axisbelow(True)
  axes.margins(0.09)
  axes.xaxis.set_major_locator(MaxNLocator(7))
  axes.yaxis.set_major_locator(MaxNLocator(7))
  axes.xaxis.set_major_formatter(_ticks([p['flops'] for p in points]))
  percent = 'accura' in ylabel.lower() and all(
    0 <= point['accuracy'] <= 1 for point in points
  )
  axes.yaxis.set_major_formatter(
    FuncFormatter(_percent)
    if percent
    else _ticks([p['accuracy'] for p in points])
  )
  if len(points) <= _NAMED:
    _name_points(figure, axes, groups)
  return figure


def frontier(points: Iterable[Mapping]) -> list[Mapping]:
  """Returns the points that no other beats, by ascending `flops`.

  Args:
    points: mappings with `flops` and `accuracy`, as in `accuracy_flops`. Of
      equal ones the first stays.
  """
  front = []
  for point in sorted(points, key=lambda p: (p['flops'], -p['accuracy'])):
    if not front or point['accuracy'] > front[-1]['accuracy']:
      front.append(point)
  return front


def _point(index, given) -> dict:
  name = str(given.get('name') or '')
  point = {'name': name, 'group': str(given.get('group') or '')}
  for key in ('flops', 'accuracy', 'spread'):
    value = given.get(key)
    if key == 'spread' and value is None:
      point[key] = None
      continue
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
      raise UserError(
        f'point {index} ({name!r:.40}) has {key} {value!r:.40}: expected a'
        ' finite number.'
      )
    if key != 'accuracy' and value < 0:
      raise UserError(
        f'point {index} ({name!r:.40}) has {key} {value}: expected 0 or more.'
      )
    point[key] = float(value)
  return point


def _draw_groups(axes, groups):
  for i, (group, points) in enumerate(groups.items()):
    points = sorted(points, key=lambda p: (p['flops'], p['accuracy']))
    color = _COLORS[i % len(_COLORS)]
    x, y, spread = (
      np.array([p[key] or 0.0 for p in points])
      for key in ('flops', 'accuracy', 'spread')
    )
    if spread.any():
      axes.errorbar(
        x, y, spread, ls='none', ecolor=color, elinewidth=1.1, capsize=2.5
      )
    axes.plot(
      x,
      y,
      color=color,
      marker=_MARKERS[i % len(_MARKERS)],
      ms=6,
      lw=1.3,
      markerfacecolor='white',
      markeredgewidth=1.4,
      label=_shortened(group) or 'models',
      gid=f'group {group}',
    )


def _shortened(text) -> str:
  text = glyphs.plain(text).replace('\n', ' ')
  return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'


def _percent(value, _) -> str:
  return f'{100 * value:.4g}%'


def _place(figure, axes, legend, title, subtitle):
  """Sizes the figure: the legend stands outside, where it hides no point."""
  renderer = figure.canvas.get_renderer()
  wide = high = 0.0
  if legend is not None:
    box = legend.get_window_extent(renderer)
    wide, high = box.width / figure.dpi + 0.2, box.height / figure.dpi
  width = _LEFT + _PLOT_WIDTH + wide + _RIGHT
  top = style.header_height(width, title, subtitle) + 0.15
  plot_height = max(_PLOT_HEIGHT, high)
  height = top + plot_height + _BOTTOM
  figure.set_size_inches(width, height)
  style.draw_header(figure, title, subtitle)
  axes.set_position(
    (
      _LEFT / width,
      _BOTTOM / height,
      _PLOT_WIDTH / width,
      plot_height / height,
    )
  )
  if legend is not None:
    legend.set_bbox_to_anchor(
      ((_LEFT + _PLOT_WIDTH + 0.2) / width, 1 - top / height)
    )


def _name_points(figure, axes, groups):
  """Writes names beside markers, clear of markers and of other names.

  A name for which there is no room is left out.
  """
  renderer = figure.canvas.get_renderer()
  axes.autoscale_view()  # Now, not when drawn: the places depend on it.
  pixel = figure.dpi / 72  # Per point.
  to_pixels = axes.transData.transform
  frame = axes.get_window_extent(renderer).extents
  taken, lines = _obstacles(groups, to_pixels, pixel)
  for i, points in enumerate(groups.values()):
    for point in points:
      if not point['name']:
        continue
      xy = point['flops'], point['accuracy']
      text = axes.annotate(
        _shortened(point['name']),
        xy,
        xytext=(0, 0),
        textcoords='offset points',
        ha='center',
        va='center',
        fontproperties=glyphs.sans(7.5),
        color=_COLORS[i % len(_COLORS)],
        parse_math=False,
        path_effects=[withStroke(linewidth=2, foreground='white')],
        zorder=4,
        gid='name',
      )
      extent = text.get_window_extent(renderer)
      # At another resolution hinting makes it a little wider.
      half = np.array([1.06 * extent.width, extent.height]) / 2 + pixel
      start = to_pixels(xy)
      found = _free_place(start, half, pixel, frame, np.array(taken), lines)
      if found is None:
        text.remove()
        continue
      box, distance = found
      centre = (box[:2] + box[2:]) / 2
      text.set_position((centre - start) / pixel)
      taken.append(box)
      if distance > _NEAR:
        ends = [start, np.clip(start, box[:2], box[2:])]
        ends = axes.transData.inverted().transform(ends)
        axes.plot(*ends.T, color=style.FAINT, lw=0.7, zorder=1, gid='leader')


def _obstacles(groups, to_pixels, pixel):
  """Returns boxes [x0, y0, x1, y1] in pixels: of markers, and of lines."""
  markers, lines = [], []
  reach = 4.5 * pixel
  for points in groups.values():
    points = sorted(points, key=lambda p: (p['flops'], p['accuracy']))
    xy_N2 = to_pixels([(p['flops'], p['accuracy']) for p in points])
    markers += [(*(xy - reach), *(xy + reach)) for xy in xy_N2]
    for start, end in itertools.pairwise(xy_N2):
      steps = max(2, int(np.abs(end - start).max() / (4 * pixel)))
      lines += [(*xy, *xy) for xy in np.linspace(start, end, steps)]
    for p in points:
      if p['spread']:
        ends = [
          (p['flops'], p['accuracy'] + sign * p['spread']) for sign in (-1, 1)
        ]
        (x, low), (_, high) = to_pixels(ends)
        lines.append((x - reach, low, x + reach, high))
  return markers, np.array(lines, float).reshape(-1, 4)


def _free_place(start, half, pixel, frame, taken_N4, lines_N4):
  """Returns the best box for a name and its distance, or None.

  Args:
    start: the named point, in pixels.
    half: of the name's width and height.
    pixel: pixels per typographic point.
    frame: the box that it must not leave.
    taken_N4: boxes that it must not meet.
    lines_N4: boxes that it had better not meet.
  """
  best = None
  for rank, (distance, angle) in enumerate(_PLACES):
    toward = np.array([math.cos(angle), math.sin(angle)]).round(6)
    # Sideways by the whole half even for a slant: it is the end that is near.
    push = np.array([np.sign(toward[0]), toward[1]])
    centre = start + toward * distance * pixel + push * half
    box = np.concatenate([centre - half, centre + half])
    if (
      (box[:2] < frame[:2]).any()
      or (box[2:] > frame[2:]).any()
      or _meets(box, taken_N4).any()
    ):
      continue
    cost = rank + 6 * _meets(box, lines_N4).sum()
    if best is None or cost < best[0]:
      best = cost, (box, distance)
  return best and best[1]


def _meets(box, other_N4) -> np.ndarray:
  """Returns for each of N boxes whether it shares a point with `box`."""
  return (
    (other_N4[:, 0] <= box[2])
    & (other_N4[:, 2] >= box[0])
    & (other_N4[:, 1] <= box[3])
    & (other_N4[:, 3] >= box[1])
  )
