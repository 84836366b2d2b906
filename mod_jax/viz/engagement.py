"""Which tokens engage more blocks, and how uncertain the model is there."""

from collections.abc import Mapping
from collections.abc import Sequence

from matplotlib.figure import Figure
import numpy as np

from mod_jax.viz import glyphs
from mod_jax.viz import style


def engagement(
  groups: Mapping[int, Sequence[float]],
  pieces: Mapping[str, float],
  *,
  blocks: int,
  listed: int,
  facts: str = '',
  title: str = '',
) -> Figure:
  """Draws entropies by the number of blocks, and the tokens at both ends.

  Args:
    groups: entropies of predictions in nats, by how many of the routed blocks
      processed the token; none is empty.
    pieces: mean share of the routed blocks that process a piece of text.
    blocks: how many blocks are routed.
    listed: how many pieces to show at either end.
    facts: what stands above the first panel.
    title: says what is seen; a general one if empty.
  """
  names = sorted(pieces, key=lambda name: -pieces[name])
  if len(names) > 2 * listed:
    names = [*names[:listed], '', *names[-listed:]]
  _, body = style.new_figure(
    9.5,
    max(3.2, 0.6 + 0.18 * len(names)),
    title or 'Which tokens the routed blocks process',
    'Boxes: the middle half of the tokens, with the median; whiskers from 5% to'
    ' 95%. Diamonds: the mean.',
  )
  left, right = body.subplots(1, 2, width_ratios=(1.5, 1))
  figure = body.get_figure(root=True)
  if groups:
    _boxes(left, groups, facts)
  else:
    style.say(left, 'No tokens measured yet.')
  if names:
    _dots(right, names, pieces, blocks)
  else:
    style.say(right, 'No token comes often enough.')
  return figure


def _boxes(axes, groups, facts):
  total = sum(map(len, groups.values()))
  boxes = []
  for values in groups.values():
    low, q1, median, q3, high = np.quantile(
      values, (0.05, 0.25, 0.5, 0.75, 0.95)
    )
    boxes.append(
      {
        'whislo': low,
        'q1': q1,
        'med': median,
        'q3': q3,
        'whishi': high,
        'mean': np.mean(values),
      }
    )
  line = {'color': style.CHOSEN}
  axes.bxp(
    boxes,
    positions=list(groups),
    showfliers=False,
    showmeans=True,
    widths=0.5,
    boxprops=line,
    whiskerprops=line,
    capprops=line,
    medianprops={'color': style.INK, 'lw': 1.5},
    meanprops={
      'marker': 'D',
      'ms': 5,
      'mfc': style.CHOSEN,
      'mec': 'white',
    },
    manage_ticks=False,
  )
  axes.set_xticks(
    list(groups),
    [f'{k}\n{len(v) / total:.1%}' for k, v in groups.items()],
  )
  axes.set_xlim(min(groups) - 0.6, max(groups) + 0.6)
  axes.set_ylim(bottom=0)
  style.clean(axes)
  axes.set_xlabel('routed blocks that process the token, and share of tokens')
  axes.set_ylabel('entropy of the prediction, nats')
  style.heading(axes, 'Entropy by blocks', facts)


def _dots(axes, names, pieces, blocks):
  rows = [(i, name) for i, name in enumerate(names) if name]
  places = [i for i, _ in rows]
  axes.plot(
    [pieces[name] for _, name in rows],
    places,
    marker='o',
    ls='',
    ms=4,
    color=style.CHOSEN,
  )
  style.clean(axes)
  axes.set_yticks(places, [glyphs.display_piece(name) for _, name in rows])
  for label in axes.get_yticklabels():
    label.set(fontproperties=glyphs.mono(8), parse_math=False, color=style.INK)
  axes.tick_params(axis='y', length=0)
  axes.set_ylim(len(names) - 0.4, -0.6)
  axes.set_xlim(-0.03, 1.03)
  axes.xaxis.set_major_formatter(style.percent)
  axes.grid(axis='y', color=style.DENSE)
  axes.set_axisbelow(True)
  axes.set_xlabel('share of their occurrences processed')
  what = 'Frequent tokens'
  if len(rows) < len(names):
    what += ': the most and the least processed'
  style.heading(axes, what, f'mean over {blocks} routed block(s)')
