"""Which tokens engage more blocks, and how uncertain the model is there."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from mod_jax.viz import glyphs, style


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
  places = dict(enumerate(names))
  if len(names) > 2 * listed:
    # An empty row parts the two ends.
    ends = [*names[:listed], None, *names[-listed:]]
    places = {i: name for i, name in enumerate(ends) if name is not None}
  figure, body = style.new_figure(
    *(9.5, max(3.2, 0.8 + 0.18 * len(places))),
    title or 'Which tokens the routed blocks process',
    'Boxes: the middle half of the tokens, with the median; whiskers from 5% to'
    ' 95%. Diamonds: the mean.',
  )
  left, right = body.subplots(1, 2, width_ratios=(1.5, 1))
  if groups:
    _draw_boxes(left, groups, facts)
  else:
    style.say(left, 'No tokens measured yet.')
  if not places:
    style.say(right, 'No token comes often enough.')
    return figure
  share = [pieces[name] for name in places.values()]
  right.plot(share, list(places), 'o', ms=4, color=style.CHOSEN)
  style.clean(right, 'y')
  right.set_yticks(list(places), map(glyphs.display_piece, places.values()))
  for label in right.get_yticklabels():
    label.set(fontproperties=glyphs.mono(8), parse_math=False, color=style.INK)
  right.tick_params(axis='y', length=0)
  right.set(xlim=(-0.03, 1.03), ylim=(max(places) + 0.6, -0.6))
  right.xaxis.set_major_formatter(style.percent)
  right.set_xlabel('share of their occurrences processed')
  which = 'most and least processed; ' if len(places) < len(names) else ''
  facts = f'{which}mean over {blocks} routed block(s)'
  style.heading(right, 'Frequent tokens', facts)
  return figure


def _draw_boxes(axes, groups, facts):
  line = {'color': style.CHOSEN}
  axes.boxplot(
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
  axes.set_xticks(list(groups), shares)
  axes.set_xlim(min(groups) - 0.6, max(groups) + 0.6)
  axes.set_ylim(bottom=0)
  style.clean(axes)
  axes.set_xlabel('routed blocks that process the token, and share of tokens')
  axes.set_ylabel('entropy of the prediction, nats')
  style.heading(axes, 'Entropy by blocks', facts)
