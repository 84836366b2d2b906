"""Colours, and functions that all figures use.

Colours are those of Okabe and Ito (2008), which remain distinct under the
common kinds of colour blindness; markers differ too.
"""

from collections.abc import Sequence
import dataclasses
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from mod_jax.viz import glyphs

CHOSEN = '#0072B2'  # Tokens that a routed block processed.
PASSED = '#CFCFCF'  # Tokens that skipped the block.
DENSE = '#E9E9E9'  # Blocks that process every token.
INK = '#1A1A1A'
MUTED = '#666666'
FAINT = '#BBBBBB'

# Colours of Okabe and Ito, except yellow, which is hard to see on white.
SERIES_COLORS = (
  *('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'),
  '#000000',
)
# 7 colours and 9 markers have no common divisor: 63 different looks.
SERIES_MARKERS = ('o', 's', 'D', '^', 'v', 'P', 'X', '<', '>')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleStyle:
  """The look of a routing rule, the same in every figure."""

  label: str
  color: str
  marker: str


RULES = {
  'top_k': RuleStyle(label='top-k', color='#0072B2', marker='o'),
  'router': RuleStyle(label='router', color='#D55E00', marker='s'),
  'predictor': RuleStyle(label='predictor', color='#009E73', marker='D'),
  'threshold': RuleStyle(label='threshold', color='#CC79A7', marker='^'),
  'fixed': RuleStyle(label='fixed', color='#E69F00', marker='v'),
  'never': RuleStyle(label='never', color='#7F7F7F', marker='x'),
  # A model without routing.
  '': RuleStyle(label='all tokens', color='#000000', marker='o'),
}
_OTHERS = ('#56B4E9', '#8C6D31', '#637939', '#7B4173')


def rule_style(rule: str) -> RuleStyle:
  """Returns the style of a rule, or makes one if the rule is not in `RULES`."""
  if rule in RULES:
    return RULES[rule]
  # Not `hash`, which differs between processes.
  color = _OTHERS[sum(rule.encode()) % len(_OTHERS)]
  label = glyphs.plain(rule.replace('_', '-'))
  return RuleStyle(label=label, color=color, marker='P')


def series_look(index: int) -> dict[str, Any]:
  """Returns colour and marker of line number `index`; markers are hollow."""
  return {
    'color': SERIES_COLORS[index % len(SERIES_COLORS)],
    'marker': SERIES_MARKERS[index % len(SERIES_MARKERS)],
    'markerfacecolor': 'white',
  }


def new_figure(
  width: float, height: float, title: str, subtitle: str = ''
) -> SubFigure:
  """Returns the part of a new figure that is below its title and subtitle.

  pyplot does not manage the figure. `width` and `height` are those of the part,
  in inches; the title and subtitle make the figure higher.
  """
  figure = Figure((width, height), facecolor='white', layout='constrained')
  FigureCanvasAgg(figure)
  figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
  # Constrained layout leaves room for only one text above a part, so each text
  # gets a part of its own.
  part = figure
  for text, look in (
    (title, {'size': 12, 'weight': 'bold', 'color': INK}),
    (subtitle, {'size': 9, 'color': MUTED}),
  ):
    if text:
      above = part.suptitle(
        glyphs.plain(text), x=0.15 / width, ha='left', wrap=True, **look
      )
      height += above.get_window_extent().height / figure.dpi + 0.12
    part = part.subfigures()
  figure.set_figheight(height)
  return part


def panels(
  title: str,
  subtitle: str,
  count: int = 1,
  *,
  columns: int = 4,
  lines: int = 0,
  beside: int = 0,
  xlabel: str = '',
  ylabel: str = '',
  grid: str = '',
  **how,
) -> tuple[SubFigure, list[Axes]]:
  """Returns the result of `new_figure`, and `count` axes, `columns` in a row.

  The figure has room for `lines` of text from top to bottom, and for `beside`
  letters at the side. `xlabel` and `ylabel` are written at the outer axes only,
  `grid` is an argument of `clean`, and `how` goes to `subplots`. If `count` is
  0, a note says that there is nothing to show.
  """
  columns = min(columns, max(count, 1))
  rows = -(-count // columns) or 1
  each = 2.5 if rows > 1 or columns > 3 else 4.2
  body = new_figure(
    min(4.5 + 3 * columns, 12.5) + 0.07 * beside,
    max(rows * each, 0.19 * lines + 0.8),
    title,
    subtitle,
  )
  axes = list(body.subplots(rows, columns, squeeze=False, **how).flat)
  if not count:
    say(axes[0], 'Nothing to show yet.')
  for surplus in axes[max(count, 1) :]:
    surplus.remove()
  axes = axes[:count]
  for i, panel in enumerate(axes):
    clean(panel, grid)
    if i % columns == 0:
      panel.set_ylabel(glyphs.plain(ylabel))
    if i + columns >= count:
      panel.set_xlabel(glyphs.plain(xlabel))
  return body, axes


def heading(axes: Axes, text: str, facts: str = '') -> None:
  """Writes a panel's title, and below it `facts` in smaller letters."""
  lines = len(facts.splitlines())
  axes.set_title(
    glyphs.plain(text), loc='left', fontsize=10, color=INK, pad=6 + 11 * lines
  )
  axes.annotate(
    facts,
    (0, 1),
    xycoords='axes fraction',
    xytext=(0, 4),
    textcoords='offset points',
    fontsize=7.5,
    color=MUTED,
    gid='facts',
  )


def key(
  part: Axes | SubFigure, handles: Sequence, loc='outside upper left', **how
) -> None:
  """Draws a legend, in rows above `part` or in a column beside it."""
  look = {'ncols': 1 if 'right' in loc else len(handles), 'borderpad': 0.2}
  look |= {'frameon': False, 'fontsize': 8.5, 'columnspacing': 1.4}
  part.legend(handles=handles, loc=loc, labelcolor=INK, **look | how)


def scale(
  part: SubFigure,
  axes: Sequence[Axes],
  norm: Normalize,
  cmap: Colormap,
  label: str = '',
  *,
  name: str = 'bar',
  **how,
) -> None:
  """Draws a colour scale beside axes; its own axes are labelled `name`."""
  ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
  # Beside a high figure, the scale is only at the top.
  high = part.get_figure(root=True).get_figheight()
  shrink = min(1, 2.2 / high) if len(axes) > 1 else 1
  place = {'shrink': shrink, 'anchor': (0, 1), 'pad': 0.015}
  how = {'format': '{x:.3g}', 'ticks': ticks, 'aspect': 20, **place} | how
  bar = part.colorbar(ScalarMappable(norm, cmap), ax=axes, **how)
  bar.ax.tick_params(length=2, pad=2, labelsize=7, colors=MUTED)
  bar.ax.minorticks_off()
  bar.outline.set(edgecolor=FAINT, linewidth=0.5)
  label = textwrap.fill(shortened(label, 60), 21)
  bar.ax.set_ylabel(label, fontsize=8, color=INK)
  bar.ax.set_label(name)


def ticks(axis, most: int, form='{x:.4g}', *, integer: bool = False) -> None:
  """Gives an axis round ticks, with at most `most` steps, written by `form`."""
  axis.set_major_locator(MaxNLocator(most, integer=integer))
  axis.set_major_formatter(form)


def percent(value: float, _=None) -> str:
  """Writes a fraction as a percentage, for the ticks of an axis."""
  return f'{100 * value:.4g}%'


def quantity(count: float) -> str:
  """Writes a count with three digits, as in 1.28M."""
  count = float(f'{count:.3g}')  # 999,600 is 1M.
  for size, unit in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if count >= size:
      return f'{count / size:.3g}{unit}'
  return f'{count:.3g}'


def shortened(text: str, most: int = 40) -> str:
  """Returns a text as one line of at most `most` characters, cut if needed."""
  text = ' '.join(str(text).split())
  # Cut before `plain`, which writes a letter that no font has as an escape of
  # several characters: the escape must not be cut.
  for end in range(min(len(text), most), -1, -1):
    shown = glyphs.plain(text[:end] + ('…' if end < len(text) else ''))
    if len(shown.replace(r'\$', '$')) <= most:
      return shown
  return ''


def say(axes: Axes, text: str) -> None:
  """Writes a sentence where there is nothing to draw."""
  axes.set_axis_off()
  middle = {'ha': 'center', 'va': 'center', 'transform': axes.transAxes}
  axes.text(0.5, 0.5, text, color=MUTED, fontsize=12, gid='note', **middle)


def clean(axes: Axes, grid: str = '') -> None:
  """Makes the frame faint; `grid` gives an axis grid lines: x, y or both."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(FAINT)
  axes.tick_params(colors=MUTED, labelsize=8, color=FAINT)
  for axis in (axes.xaxis, axes.yaxis):
    axis.label.set(color=INK, fontsize=9)
  if grid:
    axes.grid(axis=grid, color='#EEEEEE', lw=0.8)
    axes.set_axisbelow(True)
