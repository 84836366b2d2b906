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

TITLE_SIZE, SUBTITLE_SIZE, LABEL_SIZE, TICK_SIZE = 12, 9, 9, 8  # Points.
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


def wrap(text: str, width: float, size: float) -> list[str]:
  """Returns the lines of a text in `width` inches at `size` points."""
  # An average letter is a little wider than half its height.
  columns = max(20, int(width * 72 / (0.58 * size)))
  return [
    line
    for part in glyphs.plain(text).split('\n')
    for line in textwrap.wrap(part, columns)
  ]


def header_height(figure_width: float, title: str, subtitle: str) -> float:
  """Returns the inches that `draw_header` takes at the top."""
  width = figure_width - 2 * MARGIN
  return (
    MARGIN
    + len(wrap(title, width, TITLE_SIZE)) * TITLE_SIZE * 1.4 / 72
    + len(wrap(subtitle, width, SUBTITLE_SIZE)) * SUBTITLE_SIZE * 1.4 / 72
  )


def draw_header(figure: Figure, title: str, subtitle: str) -> float:
  """Writes what is seen at the top left; returns the inches it took."""
  width, height = figure.get_size_inches()
  top = MARGIN
  for text, size, color, weight, gid in (
    (title, TITLE_SIZE, INK, 'bold', 'title'),
    (subtitle, SUBTITLE_SIZE, MUTED, 'normal', 'subtitle'),
  ):
    lines = wrap(text, width - 2 * MARGIN, size)
    figure.text(
      MARGIN / width,
      1 - top / height,
      '\n'.join(lines),
      va='top',
      fontproperties=glyphs.sans(size=size, bold=weight == 'bold'),
      color=color,
      linespacing=1.15,
      parse_math=False,
      gid=gid,
    )
    top += len(lines) * size * 1.4 / 72
  return top


def clean(axes) -> None:
  """Takes away the frame's upper and right side and quietens the rest."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(FAINT)
  axes.tick_params(colors=MUTED, labelsize=TICK_SIZE, color=FAINT)
  for axis in (axes.xaxis, axes.yaxis):
    axis.label.set(color=INK, fontsize=LABEL_SIZE)
