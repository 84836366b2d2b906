"""Losses at equal training FLOPs: Figure 4 of Raposo et al. 2024."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

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
      where there is one. A curve with a minimum also has `line`, `minimum` and
      `interval`, pairs of parameters and losses; `flops_line`, `flops_minimum`
      and `flops_interval` are the abscissae of these in the other panel.
    title: says what is seen; a general one if empty.
  """
  curves = [curve for curve in curves if len(curve['loss'])]
  groups = list(dict.fromkeys(curve['group'] for curve in curves))
  budgets = sorted({curve['budget'] for curve in curves})
  relative = any('flops' in curve for curve in curves)
  names = [style.shortened(group, 24) for group in groups]
  figure, body = style.new_figure(
    # The legend stands outside, where it hides no point.
    (11 if relative else 7) + 0.07 * max(map(len, names), default=0) + 0.6,
    max(4.8, 0.19 * (len(groups) + len(budgets)) + 0.6),
    title or 'Loss at equal training FLOPs',
    'A dot is a run; a line is the parabola through those of one budget, and'
    ' its ring the least loss, with 90% intervals.',
  )
  panels = body.subplots(1, 1 + relative, squeeze=False, sharey=True)[0]
  if not curves:
    style.say(panels[0], 'No run is finished yet')
    return figure
  colors = {g: _COLORS[i % len(_COLORS)] for i, g in enumerate(groups)}
  markers = {b: style.series_look(j)['marker'] for j, b in enumerate(budgets)}
  for curve in curves:
    look = colors[curve['group']], markers[curve['budget']]
    _draw(panels[0], curve, *look, '', curve['params'])
    if 'flops' in curve:
      _draw(panels[1], curve, *look, 'flops_', curve['flops'])
  for axes, write in zip(
    panels, (style.quantity, '{:.2g}'.format), strict=False
  ):
    style.clean(axes, 'both')
    axes.set_xscale('log')
    low, high = axes.get_xlim()
    steps = (1, 2, 5) if high / low > 12 else (1, 1.5, 2, 3, 4, 5, 7)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _, write=write: write(x))
    axes.yaxis.set_major_locator(MaxNLocator(7))
  panels[0].set_ylabel('held-out loss in nats per token (routed: top-k)')
  panels[0].set_xlabel('parameters, embedding and head included')
  if relative:
    panels[1].set_xlabel("FLOPs of a forward pass, by the best dense model's")
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
  return figure


def _draw(axes, curve, color, marker, prefix, x_I):
  """Draws a curve in one of the panels, whose names begin with `prefix`."""
  runs = {'ls': '', 'ms': 4, 'alpha': 0.55, 'mew': 0, 'gid': 'run'}
  axes.plot(x_I, curve['loss'], color=color, marker=marker, **runs)
  if 'line' not in curve or (prefix and 'flops_line' not in curve):
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
