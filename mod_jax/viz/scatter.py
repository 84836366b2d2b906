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
from matplotlib.transforms import Bbox
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import images
from mod_jax.viz import style

_MAX_GROUPS = len(style.SERIES_COLORS) * len(style.SERIES_MARKERS)
_TREND = '#D55E00'
_NAMED = 24  # More points than this are not named in the plot.
# Where a name may stand: points from its marker, and the direction. The nearest
# first, and straight above before beside, where lines run.
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0))
_SLANTS = ((0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7))
_PLACES = tuple(itertools.product((8, 14, 24, 36, 52), (*_SIDES, *_SLANTS)))
_NEAR = 14  # Names further away are tied to their markers.
_PARETO = 'Pareto frontier: none is both cheaper and better'


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

  body, panels = style.small_multiples(
    layers,
    title or 'Do routing scores find the important tokens?',
    'A point is a token: how much leaving it out changes the output, against'
    ' the score by which the block chooses. Line: the linear trend.',
    height=2.75,
    xlabel='routing score',
    ylabel='leave-one-out importance',
  )
  for axes, layer, score_N, importance_N, text in zip(
    panels, layers, score_RN, importance_RN, facts, strict=True
  ):
    style.heading(axes, f'Block {layer}', text)
    _draw_tokens(axes, score_N, importance_N)
  return body.get_figure(root=True)


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


def _draw_tokens(axes, score_N, importance_N):
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
  """Draws models' accuracy against their compute, by group.

  Those of a group are joined in the order of their compute. Up to 24
  points are named beside their markers, wherever there is room.

  Args:
    points: for each model `name`, `group`, `flops` (in the unit that `xlabel`
      names), `accuracy`, and optionally `spread` (how far the error bar reaches
      down and up, a pair, or a number for both, such as a standard deviation
      over seeds; in the unit of accuracy; None: no bar).
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
  subtitle = 'Further up is more accurate; further left is cheaper.'
  if any(point['spread'] is not None for point in points):
    subtitle += ' Bars: the spread over runs.'

  legend = len(groups) > 1 or any(groups) or (pareto and bool(points))
  named = [style.shortened(group) for group in groups] + [_PARETO] * pareto
  figure, body = style.new_figure(
    # The legend stands outside, where it hides no point.
    7.6 + (0.07 * max(map(len, named)) + 0.6 if legend else 0),
    max(4.8, 0.19 * len(groups) + 0.6),
    title or 'Accuracy and compute',
    subtitle,
  )
  axes = body.subplots()
  axes.set_label('plot')
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
      label=_PARETO,
      gid='pareto',
    )
  if legend:
    handles, _ = axes.get_legend_handles_labels()
    style.key(body, handles, 'outside right upper')
  style.clean(axes)
  if not points:
    style.say(axes, 'No models measured yet')
    return figure
  axes.set_xlabel(glyphs.plain(xlabel))
  axes.set_ylabel(glyphs.plain(ylabel))
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
    style.percent if percent else _ticks([p['accuracy'] for p in points])
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
  spread = given.get('spread')
  ends = tuple(spread) if isinstance(spread, Sequence) else (spread, spread)
  if len(ends) != 2:
    raise UserError(
      f'point {index} ({name!r:.40}) has spread {spread!r:.40}: expected a'
      ' number, or a pair of them, down and up.'
    )
  for key, value in (
    *((key, given.get(key)) for key in ('flops', 'accuracy')),
    *(('spread', value) for value in ends if spread is not None),
  ):
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
  return point | {'spread': None if spread is None else ends}


def _draw_groups(axes, groups):
  for i, (group, points) in enumerate(groups.items()):
    points = sorted(points, key=lambda p: (p['flops'], p['accuracy']))
    color = style.SERIES_COLORS[i % len(style.SERIES_COLORS)]
    x, y = (np.array([p[key] for p in points]) for key in ('flops', 'accuracy'))
    spread = np.array([p['spread'] or (0.0, 0.0) for p in points])
    if spread.any():
      axes.errorbar(
        x, y, spread.T, ls='none', ecolor=color, elinewidth=1.1, capsize=2.5
      )
    axes.plot(
      x,
      y,
      color=color,
      marker=style.SERIES_MARKERS[i % len(style.SERIES_MARKERS)],
      ms=6,
      lw=1.3,
      markerfacecolor='white',
      markeredgewidth=1.4,
      label=style.shortened(group) or 'models',
      gid=f'group {group}',
    )


def _name_points(figure, axes, groups):
  """Writes names beside markers, clear of markers and of other names.

  A name for which there is no room is left out; one over a line comes second.
  """
  axes.autoscale_view()
  figure.draw_without_rendering()  # The places depend on the layout.
  pixel = figure.dpi / 72  # Per point.
  frame = axes.get_window_extent()
  taken, line_N2 = _obstacles(axes, pixel)
  for i, points in enumerate(groups.values()):
    for point in points:
      if not point['name']:
        continue
      xy = point['flops'], point['accuracy']
      text = axes.annotate(
        style.shortened(point['name']),
        xy,
        xytext=(0, 0),
        textcoords='offset points',
        ha='center',
        va='center',
        fontsize=7.5,
        color=style.SERIES_COLORS[i % len(style.SERIES_COLORS)],
        path_effects=[withStroke(linewidth=2, foreground='white')],
        zorder=4,
        gid='name',
      )
      # Names have their places; the layout shall not change for them.
      text.set_in_layout(False)
      start = axes.transData.transform(xy)
      extent = text.get_window_extent()
      # At another resolution hinting makes it a little wider.
      half = np.array([1.06 * extent.width, extent.height]) / 2 + pixel
      free = []
      for rank, (distance, toward) in enumerate(_PLACES):
        # Sideways by the whole half even for a slant: it is the end that is
        # near.
        push = half * (np.sign(toward[0]), toward[1])
        centre = start + np.array(toward) * distance * pixel + push
        box = Bbox([centre - half, centre + half])
        inside = frame.contains(*box.min) and frame.contains(*box.max)
        if inside and not box.count_overlaps(taken):
          near = box.padded(2 * pixel)
          hit_N = (line_N2 > near.min) & (line_N2 < near.max)
          free.append((rank + 6 * hit_N.all(axis=1).sum(), distance, box))
      if not free:
        text.remove()
        continue
      _, distance, box = min(free, key=lambda place: place[0])
      text.set_position((box.p0 + half - start) / pixel)
      taken.append(box)
      if distance > _NEAR:
        ends = [start, np.clip(start, box.min, box.max)]
        ends = axes.transData.inverted().transform(ends)
        axes.plot(*ends.T, color=style.FAINT, lw=0.7, zorder=1, gid='leader')


def _obstacles(axes, pixel):
  """Returns boxes of the markers, and points on lines and bars, in pixels."""
  curves, marks = [], []
  reach = 4.5 * pixel
  for line in axes.lines:
    if line.get_gid() is None:
      continue  # The ends of error bars.
    xy_N2 = axes.transData.transform(line.get_xydata())
    marks += [Bbox([xy - reach, xy + reach]) for xy in xy_N2]
    if line.get_drawstyle() == 'steps-post':
      x_N, y_N = np.repeat(xy_N2, 2, axis=0).T
      xy_N2 = np.stack([x_N[1:], y_N[:-1]], axis=-1)
    curves.append(xy_N2)
  for bars in axes.collections:
    curves += [axes.transData.transform(ends) for ends in bars.get_segments()]
  line_N2 = [
    np.linspace(start, end, 2 + int(np.abs(end - start).max() / (4 * pixel)))
    for xy_N2 in curves
    for start, end in itertools.pairwise(xy_N2)
  ]
  return marks, np.concatenate([np.zeros((0, 2)), *line_N2])
