"""Scatter plots: importance and scores, accuracy, loss, compute."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import math
import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
import numpy as np

from mod_jax.viz import glyphs, style

_NAMED = 24  # If there are more points than this, none is named in the plot.
# Places for a name: distance from its marker in points, and direction. They are
# tried in this order: the nearest first, and above before beside, where lines
# run.
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0))
_SLANTS = ((0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7))
_PLACES = tuple(itertools.product((8, 14, 24, 36, 52), (*_SIDES, *_SLANTS)))
_NEAR = 14  # Names further away are connected to their markers by a line.
# The first group, usually that of dense models, is black.
_GROUPS = (style.INK, *style.SERIES_COLORS[:-1])


def importance_scatter(
  importance_RN,
  score_RN,
  *,
  layers: Sequence[int],
  correlations: Sequence[Mapping[str, float]],
  title: str,
) -> Figure:
  """Draws the importance of N tokens against their scores, a panel per block.

  `correlations` have, for each of the R blocks in `layers`, `pearson` and
  `spearman`, NaN if scores or importances are constant, and the p-values
  `pearson_p` and `spearman_p`. If scores are not constant, a line fitted by
  least squares shows the trend.
  """
  body, panels = style.panels(
    title,
    'A point is a token: how much leaving it out changes the output, against'
    ' the score by which the block chooses. Line: the linear trend.',
    len(layers),
    xlabel='routing score',
    ylabel='leave-one-out importance',
  )
  for axes, layer, x_N, y_N, values in zip(
    panels, layers, score_RN, importance_RN, correlations, strict=True
  ):
    kinds = ('pearson', 'r'), ('spearman', 'ρ')
    facts = '\n'.join(_correlation(values, *kind) for kind in kinds)
    style.heading(axes, f'Block {layer}', facts)
    size, alpha = np.array([60, 12]) / math.sqrt(len(x_N))
    size, alpha = np.clip([size, alpha], (1.5, 0.15), (4.5, 0.8))
    look = {'ls': 'none', 'marker': 'o', 'ms': size, 'markeredgewidth': 0}
    look |= {'alpha': alpha, 'color': style.CHOSEN, 'gid': 'tokens'}
    axes.plot(x_N, y_N, **look)
    ends = np.array([np.min(x_N), np.max(x_N)])
    if ends[0] < ends[1]:
      slope, start = statistics.linear_regression(x_N, y_N)
      look = {'color': '#D55E00', 'lw': 1.6, 'gid': 'trend'}
      axes.plot(ends, slope * ends + start, **look)
    axes.margins(0.06)
    axes.axhline(0, color=style.FAINT, lw=0.8, zorder=0)
    for axis in (axes.xaxis, axes.yaxis):
      style.ticks(axis, 5)
  return body.get_figure(root=True)


def _correlation(values, name, symbol) -> str:
  value, p = values[name], values[f'{name}_p']
  if math.isnan(value):
    return f'{name.title()} undefined: one side is constant'
  # A p that is far below 1e-300 underflows to 0.
  shown = f'{p:.3f}' if p >= 0.001 else f'{p:.0e}'
  p_value = f'p = {shown}' if p else 'p < 1e-300'
  return f'{name.title()} {symbol} = {value:.2f} ({p_value})'


def accuracy_flops(
  points: Iterable[Mapping],
  *,
  title: str = 'Accuracy and compute',
  xlabel: str = 'GFLOPs (multiply-accumulates)',
  pareto: bool = False,
) -> Figure:
  """Draws models' accuracy against their compute, by group.

  A point has `flops`, in the unit that `xlabel` names, and `accuracy`, and may
  have `name`, `group`, and `spread`: how far the error bar reaches down and up,
  a pair, or a number for both. Lines join the points of a group in the order of
  their compute. If there are at most 24 points, they are named beside their
  markers, as far as there is room. `pareto` draws the frontier of the models
  that no other model beats, by more accuracy at no more FLOPs or fewer FLOPs at
  no less accuracy.
  """
  groups = {}
  for point in points:
    groups.setdefault(point.get('group') or '', []).append(point)
  points = list(itertools.chain(*groups.values()))
  subtitle = 'Further up is more accurate; further left is cheaper.'
  if any(np.any(point.get('spread') or 0) for point in points):
    subtitle += ' Bars: the spread over runs.'
  # The legend stands outside, where it hides no point.
  longest = max([24, *(len(style.shortened(g)) for g in groups)])
  body, panels = style.panels(
    *(title, subtitle, min(1, len(points))),
    lines=len(groups),
    beside=longest + 9,
    xlabel=xlabel,
    ylabel='held-out accuracy',
    grid='both',
  )
  figure = body.get_figure(root=True)
  if not points:
    return figure
  (axes,) = panels
  axes.set_label('plot')
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
      # A single point is no line, so mark it by a ring.
      marker='o' if len(front) == 1 else None,
      ms=12,
      markerfacecolor='none',
      label='Pareto frontier: none is\nboth cheaper and better',
      gid='pareto',
    )
  if len(groups) > 1 or any(groups) or pareto:
    # Matplotlib's own list would leave out names such as `_x`.
    handles = [line for line in axes.lines if line.get_gid()]
    style.key(body, handles, 'outside right upper')
  style.ticks(axes.xaxis, 7)
  style.ticks(axes.yaxis, 7, style.percent)
  if len(points) <= _NAMED:
    _name_points(figure, axes, groups)
  return figure


def frontier(points: Iterable[Mapping]) -> list[Mapping]:
  """Returns the points that no other point beats, by ascending `flops`.

  Points are as in `accuracy_flops`; of equal points only the first is returned.
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
  title: str,
) -> Figure:
  """Draws a panel per group, a row per kind of run and a dot per run.

  `groups[group][kind]` has a number for each run of a kind; kinds without runs
  are left out. A vertical bar marks the mean of a row. Each panel has its own
  x-axis, since numbers of different groups need not be comparable.
  """
  groups = {
    group: {name: values for name, values in rows.items() if len(values)}
    for group, rows in groups.items()
    if any(map(len, rows.values()))
  }
  heights = [len(rows) + 2 for rows in groups.values()]
  body, panels = style.panels(
    *(title, '', len(groups)),
    columns=1,
    lines=sum(heights),
    height_ratios=heights or None,
    grid='y',
  )
  for axes, (group, rows) in zip(panels, groups.items(), strict=True):
    style.heading(axes, group)
    for i, values in enumerate(rows.values()):
      dots = {'marker': 'o', 'ms': 5, 'alpha': 0.75, 'color': style.CHOSEN}
      axes.plot(values, [i] * len(values), ls='', gid='run', **dots)
      bar = {'marker': '|', 'ms': 13, 'mew': 2, 'color': style.INK}
      axes.plot(statistics.mean(values), i, ls='', gid='mean', **bar)
    axes.set_yticks(range(len(rows)), map(style.shortened, rows))
    axes.tick_params(axis='y', length=0, labelcolor=style.INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # The first row on top.
  if panels:
    # At the right, where a long label has room to its left.
    panels[-1].set_xlabel(style.shortened(xlabel, 60), loc='right')
  return body.get_figure(root=True)


def isoflop(
  curves: Sequence[Mapping[str, Any]],
  *,
  title: str = 'Loss at equal training FLOPs',
) -> Figure:
  """Draws losses over sizes, and over the FLOPs of a forward pass.

  A dot is a run: its colour is that of the group, its marker that of the
  budget. A line is a fitted parabola, and a ring marks its minimum, with lines
  for the intervals of both coordinates. Without a minimum, a dashed line joins
  the mean losses of sizes. After Figure 4 of Raposo et al. 2024.

  A curve has `group`, `budget`, and the `params` and `loss` of its runs. If
  there is a best dense model, the curve also has `flops`: the FLOPs of the
  runs' forward passes relative to that model's. A curve with a minimum has
  `line`, `minimum` and `interval`, pairs of parameters and losses. With `flops`
  it also has `flops_line`, `flops_minimum` and `flops_interval`: FLOPs in place
  of the parameters in these pairs.
  """
  curves = [curve for curve in curves if len(curve['loss'])]
  groups = list(dict.fromkeys(curve['group'] for curve in curves))
  budgets = sorted({curve['budget'] for curve in curves})
  relative = any('flops' in curve for curve in curves)
  names = [style.shortened(group, 24) for group in groups]
  body, panels = style.panels(
    title,
    'A dot is a run; a line is the parabola through those of one budget, and'
    ' its ring the least loss, with 90% intervals; dashed: means of sizes.',
    1 + relative if curves else 0,
    lines=len(groups) + len(budgets),
    # The legend stands outside, where it hides no point.
    beside=max(map(len, names), default=0) + 9,
    ylabel='held-out loss in nats per token (routed: top-k)',
    grid='both',
    sharey=True,
  )
  colors = {g: _GROUPS[i % len(_GROUPS)] for i, g in enumerate(groups)}
  markers = {b: style.series_look(j)['marker'] for j, b in enumerate(budgets)}
  for curve in curves:
    look = colors[curve['group']], markers[curve['budget']]
    _draw_curve(panels[0], curve, *look, '', curve['params'])
    if 'flops' in curve:
      _draw_curve(panels[1], curve, *look, 'flops_', curve['flops'])
  kinds = (
    ('parameters, embedding and head included', style.quantity),
    ("FLOPs of a forward pass, by the best dense model's", '{:.2g}'.format),
  )
  for axes, (xlabel, write) in zip(panels, kinds, strict=False):
    axes.set_xlabel(xlabel)
    axes.set_xscale('log')
    low, high = axes.get_xlim()
    steps = (1, 2, 5) if high / low > 12 else (1, 1.5, 2, 3, 4, 5, 7)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _, write=write: write(x))
    axes.yaxis.set_major_locator(MaxNLocator(7))
  if relative:
    panels[1].axvline(1, color=style.FAINT, lw=1, zorder=0)
  handles = [
    Line2D([], [], color=color, lw=2, label=name)
    for color, name in zip(colors.values(), names, strict=True)
  ]
  for budget, marker in markers.items():
    look = {'ls': '', 'color': style.MUTED, 'marker': marker, 'ms': 5}
    label = f'{budget:.3g}'.replace('+', '') + ' FLOPs'
    handles.append(Line2D([], [], label=label, **look))
  style.key(body, handles, 'outside right upper')
  return body.get_figure(root=True)


def _draw_curve(axes, curve, color, marker, prefix, x_I):
  """Draws a curve in one panel; `prefix` begins the names of its x-values."""
  runs = {'ls': '', 'ms': 4, 'alpha': 0.55, 'mew': 0, 'gid': 'run'}
  axes.plot(x_I, curve['loss'], color=color, marker=marker, **runs)
  if 'line' not in curve or (prefix and 'flops_line' not in curve):
    x_I, loss_I = np.asarray(x_I), np.asarray(curve['loss'])
    sizes = np.unique(x_I)
    means = [loss_I[x_I == x].mean() for x in sizes]
    axes.plot(sizes, means, color=color, lw=1.2, ls='--', gid='means')
    return
  line_x, line_y = curve['line']
  (x, y), (span_x, span_y) = curve['minimum'], curve['interval']
  if prefix:
    line_x, x = curve['flops_line'], curve['flops_minimum']
    span_x = curve['flops_interval']
  axes.plot(line_x, line_y, color=color, lw=1.4, gid='parabola')
  for ends in ((span_x, (y, y)), ((x, x), span_y)):
    axes.plot(*ends, color=color, lw=2.4, solid_capstyle='butt')
  ring = {'ms': 8, 'mfc': 'white', 'mew': 2, 'zorder': 3, 'gid': 'minimum'}
  axes.plot(x, y, marker='o', color=color, **ring)


def engagement(
  groups: Mapping[int, Sequence[float]],
  pieces: Mapping[str, float],
  *,
  blocks: int,
  listed: int,
  facts: str,
  title: str,
) -> Figure:
  """Draws entropies by number of blocks, and the most and least routed pieces.

  `groups` are entropies of predictions in nats, by how many of the routed
  blocks processed the token. `pieces` has, by piece of text, the mean share of
  the routed blocks that process it; the `listed` pieces with the largest share
  and as many with the smallest are drawn. `facts` are above the first panel.
  """
  names = sorted(pieces, key=lambda name: -pieces[name])
  places = dict(enumerate(names))
  if len(names) > 2 * listed:
    # Leave an empty row between the two ends.
    ends = [*names[:listed], None, *names[-listed:]]
    places = {i: name for i, name in enumerate(ends) if name is not None}
  body, (left, right) = style.panels(
    title,
    'Boxes: the middle half of the tokens, with the median; whiskers from 5% to'
    ' 95%. Diamonds: the mean.',
    2,
    lines=len(places),
  )
  line = {'color': style.CHOSEN}
  left.boxplot(
    list(groups.values()),
    positions=list(groups),
    whis=(5, 95),
    showfliers=False,
    showmeans=True,
    widths=0.5,
    boxprops=line,
    whiskerprops=line,
    capprops=line,
    medianprops={'color': style.INK, 'lw': 1.5},
    meanprops={'marker': 'D', 'ms': 5, 'mfc': style.CHOSEN, 'mec': 'white'},
    manage_ticks=False,
  )
  total = sum(map(len, groups.values()))
  shares = [f'{k}\n{len(v) / total:.1%}' for k, v in groups.items()]
  left.set_xticks(list(groups), shares)
  left.set_xlim(min(groups) - 0.6, max(groups) + 0.6)
  left.set_ylim(bottom=0)
  left.set_xlabel('routed blocks that process the token, and share of tokens')
  left.set_ylabel('entropy of the prediction, nats')
  style.heading(left, 'Entropy by blocks', facts)
  if not places:
    style.say(right, 'No token comes often enough.')
    return body.get_figure(root=True)
  share = [pieces[name] for name in places.values()]
  right.plot(share, list(places), 'o', ms=4, color=style.CHOSEN)
  style.clean(right, 'y')
  right.set_yticks(list(places), map(glyphs.display_piece, places.values()))
  glyphs.write_pieces(right.get_yticklabels())
  right.tick_params(axis='y', length=0, labelcolor=style.INK)
  right.set(xlim=(-0.03, 1.03), ylim=(max(places) + 0.6, -0.6))
  right.xaxis.set_major_formatter(style.percent)
  right.set_xlabel('share of their occurrences processed')
  which = 'most and least processed; ' if len(places) < len(names) else ''
  facts = f'{which}mean over {blocks} routed block(s)'
  style.heading(right, 'Frequent tokens', facts)
  return body.get_figure(root=True)


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

  Places that cross no line are preferred. A name without a free place is left
  out.
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
      # Names are placed for this layout, so they must not change it.
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
  """Puts a name `distance` points from its marker; returns its rectangle."""
  x, y = np.sign(toward).astype(int)
  text.set(
    position=np.array(toward) * distance,
    ha=('right', 'center', 'left')[1 + x],
    va=('top', 'center', 'bottom')[1 + y],
  )
  text.arrow_patch.set_visible(distance > _NEAR)
  text.update_positions(text.get_figure(root=True).canvas.get_renderer())
  # At another resolution, hinting makes the text a little wider.
  return Text.get_window_extent(text).expanded(1.06, 1.1)
