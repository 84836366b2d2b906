"""Losses at equal training FLOPs: Figure 4 of Raposo et al. 2024."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.ticker import MaxNLocator
from matplotlib.ticker import NullLocator
import numpy as np

from mod_jax.viz import style

# The first group, which is the dense one as a rule, is black.
_COLORS = (style.INK, *style.SERIES_COLORS[:-1])


def isoflop(curves: Sequence[Mapping[str, Any]], *, title: str = '') -> Figure:
  """Draws losses over sizes, and over the FLOPs of a forward pass.

  A colour per group, a marker per budget, a dot per run; a line is the fitted
  parabola, its ring the minimum with the interval of both coordinates.

  Args:
    curves: for each group and budget `group`, `budget`, `params` and `loss` of
      its runs; `flops` of a forward pass, relative to the best dense model's,
      where that is known. A curve with a minimum also has `line`, `minimum` and
      `interval`, pairs of parameters and losses; `flops_line`, `flops_minimum`
      and `flops_interval` are the abscissae of these in the other panel.
    title: says what is seen; a general one if empty.
  """
  curves = [curve for curve in curves if len(curve['loss'])]
  groups = list(dict.fromkeys(curve['group'] for curve in curves))
  budgets = sorted({curve['budget'] for curve in curves})
  relative = any('flops' in curve for curve in curves)
  named = [style.shortened(group, 24) for group in groups]
  figure, body = style.new_figure(
    # The legend stands outside, where it hides no point.
    (11 if relative else 7) + 0.07 * max(map(len, named), default=0) + 0.6,
    max(4.8, 0.19 * (len(groups) + len(budgets)) + 0.6),
    title or 'Loss at equal training FLOPs',
    'A dot is a run; a line is the parabola through those of one budget, and'
    ' its ring the least loss, with 90% intervals.',
  )
  panels = body.subplots(1, 1 + relative, squeeze=False, sharey=True)[0]
  for axes in panels:
    style.clean(axes)
  if not curves:
    style.say(panels[0], 'No run is finished yet')
    return figure
  look = {
    (group, budget): {
      'color': _COLORS[i % len(_COLORS)],
      'marker': style.SERIES_MARKERS[j % len(style.SERIES_MARKERS)],
    }
    for i, group in enumerate(groups)
    for j, budget in enumerate(budgets)
  }
  for curve in curves:
    kind = look[curve['group'], curve['budget']]
    _draw(panels[0], curve, kind, '', curve['params'])
    if 'flops' in curve:
      _draw(panels[1], curve, kind, 'flops_', curve['flops'])
  for axes in panels:
    axes.set_xscale('log')
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.grid(color='#EEEEEE', lw=0.8)
    axes.set_axisbelow(True)
  panels[0].set_ylabel('held-out loss in nats per token (routed: top-k)')
  panels[0].set_xlabel('parameters, embedding and head included')
  _tick(panels[0], [c['params'] for c in curves], style.quantity)
  if relative:
    panels[1].set_xlabel("FLOPs of a forward pass, by the best dense model's")
    flops = [c['flops'] for c in curves if 'flops' in c]
    _tick(panels[1], flops, lambda x: f'{x:.2g}')
    panels[1].axvline(1, color=style.FAINT, lw=1, zorder=0)
  colors = [
    Line2D([], [], color=_COLORS[i % len(_COLORS)], lw=2, label=name)
    for i, name in enumerate(named)
  ]
  markers = [
    Line2D(
      [],
      [],
      ls='',
      color=style.MUTED,
      marker=look[groups[0], budget]['marker'],
      ms=5,
      label=f'{budget:.3g}'.replace('+', '') + ' FLOPs',
    )
    for budget in budgets
  ]
  style.key(body, [*colors, *markers], 'outside right upper')
  return figure


def _draw(axes, curve, kind, prefix, x_I):
  """Draws a curve in one of the panels, whose names begin with `prefix`."""
  axes.plot(
    x_I, curve['loss'], ls='', ms=4, alpha=0.55, mew=0, gid='run', **kind
  )
  if 'line' not in curve or (prefix and 'flops_line' not in curve):
    return
  line_x, line_y = curve['line']
  (x, y), (span_x, span_y) = curve['minimum'], curve['interval']
  if prefix:
    line_x, x = curve['flops_line'], curve['flops_minimum']
    span_x = curve['flops_interval']
  axes.plot(line_x, line_y, color=kind['color'], lw=1.4, gid='parabola')
  for ends in ((span_x, (y, y)), ((x, x), span_y)):
    axes.plot(*ends, color=kind['color'], lw=2.4, solid_capstyle='butt')
  axes.plot(
    x,
    y,
    marker='o',
    ms=8,
    color=kind['color'],
    markerfacecolor='white',
    mew=2,
    zorder=3,
    gid='minimum',
  )


def _tick(axes, columns, write):
  """Marks some of an axis's values at equal distances of their logarithm."""
  values = np.concatenate([np.asarray(column, float) for column in columns])
  low, high = values.min(), values.max()
  steps = [1, 2, 5] if high / low > 12 else [1, 1.5, 2, 3, 4, 5, 7]
  powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
  marks = [s * 10.0**p for p in powers for s in steps]
  axes.set_xticks([m for m in marks if low * 0.9 <= m <= high * 1.1])
  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: write(x)))
