"""The one table of colours, and what every figure starts from.

Colours are those of Okabe and Ito (2008), which remain distinct under the
common kinds of colour blindness; markers differ too.
"""

import dataclasses
import textwrap

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mod_jax.viz import glyphs

CHOSEN = '#0072B2'  # Tokens that a routed block processed.
PASSED = '#CFCFCF'  # Tokens that passed it by.
DENSE = '#E9E9E9'  # Blocks that process every token.
INK = '#1A1A1A'
MUTED = '#666666'
FAINT = '#BBBBBB'

MARGIN = 0.15  # Inches around the header.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleStyle:
  """How one rule of choosing tokens looks, in every figure."""

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
  """Returns the style of a rule; one that the table lacks gets its own.

  Args:
    rule: as in `RoutingMode.rule`; '' for a model without routing.
  """
  if rule in RULES:
    return RULES[rule]
  # Not `hash`, which differs between runs.
  color = _OTHERS[sum(rule.encode()) % len(_OTHERS)]
  label = glyphs.plain(rule.replace('_', '-'))
  return RuleStyle(label=label, color=color, marker='P')


def new_figure(width: float, height: float) -> Figure:
  """Returns an empty white figure, sizes in inches, that pyplot never sees."""
  figure = Figure(figsize=(width, height), facecolor='white')
  FigureCanvasAgg(figure)
  return figure


def _wrap(text: str, width: float, size: float, bold: bool) -> list[str]:
  """Returns the lines of a text in `width` inches at `size` points."""
  # The width of an average letter of running text, with some room.
  em = 0.63 if bold else 0.55
  columns = max(20, int(width * 72 / (em * size)))
  return [
    line
    for part in glyphs.plain(text).split('\n')
    for line in textwrap.wrap(part, columns)
  ]


def _header(width: float, title: str, subtitle: str):
  """Yields lines, inches from the top, size, boldness and colour."""
  top = MARGIN
  for name, text, size, bold, color in (
    ('title', title, 12, True, INK),
    ('subtitle', subtitle, 9, False, MUTED),
  ):
    lines = _wrap(text, width - 2 * MARGIN, size, bold)
    yield name, lines, top, size, bold, color
    top += len(lines) * size * 1.4 / 72


def header_height(width: float, title: str, subtitle: str) -> float:
  """Returns the inches that `draw_header` takes at a figure's top."""
  *_, (_, lines, top, size, _, _) = _header(width, title, subtitle)
  return top + len(lines) * size * 1.4 / 72


def draw_header(figure: Figure, title: str, subtitle: str) -> None:
  """Writes what is seen at the top left."""
  width, height = figure.get_size_inches()
  for name, lines, top, size, bold, color in _header(width, title, subtitle):
    figure.text(
      MARGIN / width,
      1 - top / height,
      '\n'.join(lines),
      va='top',
      fontproperties=glyphs.sans(size=size, bold=bold),
      color=color,
      linespacing=1.15,
      parse_math=False,
      gid=name,
    )


def say(axes, text: str) -> None:
  """Writes a sentence where there is nothing to draw."""
  axes.set_axis_off()
  axes.text(
    0.5,
    0.5,
    text,
    ha='center',
    va='center',
    transform=axes.transAxes,
    color=MUTED,
    fontsize=12,
    gid='note',
  )


def clean(axes) -> None:
  """Takes away the frame's upper and right side and quietens the rest."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(FAINT)
  axes.tick_params(colors=MUTED, labelsize=8, color=FAINT)
  for axis in (axes.xaxis, axes.yaxis):
    axis.label.set(color=INK, fontsize=9)
