"""Numbers against numbers: importance and scores, accuracy and compute."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import math
import statistics

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Bbox
import numpy as np

from mod_jax.viz import glyphs, style

_TREND = '#D55E00'
_NAMED = 24  # More points than this are not named in the plot.
# Where a name may stand: points from its marker, and the direction. The nearest
# first, and straight above before beside, where lines run.
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0))
_SLANTS = ((0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7))
_PLACES = tuple(itertools.product((8, 14, 24, 36, 52), (*_SIDES, *_SLANTS)))
_NEAR = 14  # Names further away are tied to their markers.


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
  """
  body, panels = style.small_multiples(
    layers,
    title or 'Do routing scores find the important tokens?',
    'A point is a token: how much leaving it out changes the output, against'
    ' the score by which the block chooses. Line: the linear trend.',
    height=2.75,
    xlabel='routing score',
    ylabel='leave-one-out importance',
  )
  for axes, layer, x_N, y_N, values in zip(
    panels, layers, score_RN, importance_RN, correlations, strict=True
  ):
    facts = [
      _correlation(values, 'pearson', 'r'),
      _correlation(values, 'spearman', 'ρ'),
    ]
    style.heading(axes, f'Block {layer}', '\n'.join(facts))
    if not len(x_N):
      style.say(axes, 'No tokens.')
      continue
    size, alpha = 60 / math.sqrt(len(x_N)), 12 / math.sqrt(len(x_N))
    axes.plot(
      *(x_N, y_N),
      ls='none',
      marker='o',
      ms=float(np.clip(size, 1.5, 4.5)),
      markeredgewidth=0,
      alpha=float(np.clip(alpha, 0.15, 0.8)),
      color=style.CHOSEN,
      gid='tokens',
    )
    ends = np.array([np.min(x_N), np.max(x_N)])
    if ends[0] < ends[1]:
      slope, start = statistics.linear_regression(x_N, y_N)
      look = {'color': _TREND, 'lw': 1.6, 'gid': 'trend'}
      axes.plot(ends, slope * ends + start, **look)
    axes.margins(0.06)
    axes.axhline(0, color=style.FAINT, lw=0.8, zorder=0)
    axes.locator_params(nbins=5)
    axes.xaxis.set_major_formatter('{x:.4g}')
    axes.yaxis.set_major_formatter('{x:.4g}')
  return body.get_figure(root=True)


def _correlation(values, name, symbol) -> str:
  value, p = values[name], values[f'{name}_p']
  if math.isnan(value):
    return f'{name.title()} undefined: one side is constant'
  # Below 1e-300 p is no longer a float.
  shown = f'{p:.3f}' if p >= 0.001 else f'{p:.0e}'
  p_value = f'p = {shown}' if p else 'p < 1e-300'
  return f'{name.title()} {symbol} = {value:.2f} ({p_value})'


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
    points: for each model `flops` (in the unit that `xlabel` names),
      `accuracy`, and optionally `name`, `group`, and `spread` (how far the
      error bar reaches down and up, a pair, or a number for both, such as a
      standard deviation over seeds; in the unit of accuracy; None: no bar).
    title: says what is seen; a general one if empty.
    xlabel: what `flops` is, with its unit.
    ylabel: what `accuracy` is; fractions whose label speaks of accuracy are
      shown as percentages.
    pareto: whether to draw the frontier of the models that no other model
      beats: none has as few FLOPs and a higher accuracy, or fewer and as high
      a one.
  """
  groups = {}
  for point in points:
    groups.setdefault(point.get('group') or '', []).append(point)
  points = list(itertools.chain(*groups.values()))
  subtitle = 'Further up is more accurate; further left is cheaper.'
  if any(point.get('spread') is not None for point in points):
    subtitle += ' Bars: the spread over runs.'
  legend = len(groups) > 1 or any(groups) or (pareto and bool(points))
  longest = max([24 * pareto, *(len(style.shortened(g)) for g in groups)])
  figure, body = style.new_figure(
    # The legend stands outside, where it hides no point.
    7.6 + legend * (0.07 * longest + 0.6),
    max(4.8, 0.19 * len(groups) + 0.6),
    title or 'Accuracy and compute',
    subtitle,
  )
  axes = body.subplots()
  axes.set_label('plot')
  if not points:
    style.say(axes, 'No models measured yet')
    return figure
  for i, (group, members) in enumerate(groups.items()):
    _draw_group(axes, i, group, members)
  if pareto:
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
      label='Pareto frontier: none is\nboth cheaper and better',
      gid='pareto',
    )
  if legend:
    handles, _ = axes.get_legend_handles_labels()
    style.key(body, handles, 'outside right upper')
  style.clean(axes, 'both')
  axes.set_xlabel(glyphs.plain(xlabel))
  axes.set_ylabel(glyphs.plain(ylabel))
  axes.locator_params(nbins=7)
  axes.xaxis.set_major_formatter('{x:.4g}')
  fractions = all(0 <= point['accuracy'] <= 1 for point in points)
  axes.yaxis.set_major_formatter(
    style.percent if 'accura' in ylabel.lower() and fractions else '{x:.4g}'
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


def seed_dots(
  groups: Mapping[str, Mapping[str, Sequence[float]]],
  *,
  xlabel: str,
  title: str = '',
) -> Figure:
  """Draws a panel per group, a row per kind of run and a dot per run.

  A bar marks the mean of a row. Panels have axes of their own, since numbers of
  different groups need not be comparable.

  Args:
    groups: by the group's name and the kind's, the numbers of its runs; rows
      stand in the order given. Kinds without runs are left out.
    xlabel: what the numbers are, with their unit.
    title: says what is seen.
  """
  groups = {
    group: {name: values for name, values in rows.items() if len(values)}
    for group, rows in groups.items()
    if any(map(len, rows.values()))
  }
  heights = [0.24 * len(rows) + 0.55 for rows in groups.values()] or [1.0]
  figure, body = style.new_figure(7.5, sum(heights) + 0.5, title)
  panels = body.subplots(len(heights), squeeze=False, height_ratios=heights)
  panels = panels[:, 0]
  if not groups:
    style.say(panels[0], 'No run is finished yet')
    return figure
  for axes, (group, rows) in zip(panels, groups.items(), strict=True):
    style.clean(axes, 'y')
    style.heading(axes, group)
    for i, values in enumerate(rows.values()):
      dots = {'marker': 'o', 'ms': 5, 'alpha': 0.75, 'color': style.CHOSEN}
      axes.plot(values, [i] * len(values), ls='', gid='run', **dots)
      bar = {'marker': '|', 'ms': 13, 'mew': 2, 'color': style.INK}
      axes.plot(statistics.mean(values), i, ls='', gid='mean', **bar)
    axes.set_yticks(range(len(rows)), map(style.shortened, rows))
    axes.tick_params(axis='y', length=0, labelcolor=style.INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # The first on top.
  # At the right, where a long one has room to its left.
  panels[-1].set_xlabel(style.shortened(xlabel, 60), loc='right')
  return figure


def _draw_group(axes, index, group, points):
  points = sorted(points, key=lambda p: (p['flops'], p['accuracy']))
  look = style.series_look(index)
  x, y = (np.array([p[key] for p in points]) for key in ('flops', 'accuracy'))
  spread = np.array(
    [np.broadcast_to(point.get('spread') or 0.0, 2) for point in points]
  )
  if spread.any():
    bars = {'ecolor': look['color'], 'elinewidth': 1.1, 'capsize': 2.5}
    axes.errorbar(x, y, spread.T, ls='none', **bars)
  label, gid = style.shortened(group) or 'models', f'group {group}'
  axes.plot(x, y, ms=6, lw=1.3, mew=1.4, label=label, gid=gid, **look)


def _name_points(figure, axes, groups):
  """Writes names beside markers, clear of markers and of other names.

  A name for which there is no room is left out; one over a line comes second.
  """
  figure.draw_without_rendering()  # The places depend on the layout.
  frame, reach = axes.get_window_extent(), 4.5 * figure.dpi / 72
  lines = [line for line in axes.lines if line.get_gid()]
  curves = [line.get_path() for line in lines]
  for bars in axes.collections:
    curves += bars.get_paths()
  curves = [path.transformed(axes.transData) for path in curves]
  taken = [
    Bbox([xy - reach, xy + reach])
    for line in lines
    for xy in axes.transData.transform(line.get_xydata())
  ]
  for i, points in enumerate(groups.values()):
    for point in points:
      if not point.get('name'):
        continue
      text = axes.annotate(
        style.shortened(point['name']),
        (point['flops'], point['accuracy']),
        xytext=(0, 0),
        textcoords='offset points',
        fontsize=7.5,
        color=style.series_look(i)['color'],
        path_effects=[withStroke(linewidth=2, foreground='white')],
        arrowprops={'arrowstyle': '-', 'color': style.FAINT, 'lw': 0.7},
        zorder=4,
        gid='name',
      )
      # Names have their places; the layout shall not change for them.
      text.set_in_layout(False)
      free = []
      for rank, place in enumerate(_PLACES):
        box = _put(text, *place)
        inside = frame.contains(*box.min) and frame.contains(*box.max)
        if inside and not box.count_overlaps(taken):
          crossed = [c for c in curves if c.intersects_bbox(box, filled=False)]
          free.append((rank + 16 * len(crossed), place))
      if free:
        taken.append(_put(text, *min(free)[1]))
      else:
        text.remove()


def _put(text, distance, toward) -> Bbox:
  """Puts a name so many points from its marker; returns what it covers."""
  sides = {'ha': ('right', 'center', 'left'), 'va': ('top', 'center', 'bottom')}
  text.set(
    position=np.array(toward) * distance,
    **{
      name: where[1 + int(np.sign(along))]
      for (name, where), along in zip(sides.items(), toward, strict=True)
    },
  )
  text.arrow_patch.set_visible(distance > _NEAR)
  text.update_positions(text.get_figure(root=True).canvas.get_renderer())
  # At another resolution hinting makes it a little wider.
  return Text.get_window_extent(text).expanded(1.06, 1.1)
