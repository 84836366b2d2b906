"""How much the attention of each block mixes tokens."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
import numpy as np

from mod_jax.viz import style


def attention_ranks(
  shares: Sequence[float],
  *,
  routed: Sequence[int],
  suggested: Sequence[int],
  facts: str = '',
  title: str = '',
) -> Figure:
  """Draws the rank of each block's attention map, over the largest possible.

  Args:
    shares: of each block, between 0 and 1.
    routed: blocks that are routed in this model.
    suggested: blocks whose share is lowest.
    facts: what stands above the panel.
    title: says what is seen; a general one if empty.
  """
  blocks, suggested = np.arange(len(shares)), list(suggested)
  _, body = style.new_figure(
    *(max(6.0, 1.5 + 0.35 * len(shares)), 3.2),
    title or 'Rank of the attention maps',
    'The lower, the less a block mixes tokens. Diamonds: the lowest, which are'
    ' suggested for routing (γ-MoD).',
  )
  axes = body.subplots()
  colors = [style.CHOSEN if i in routed else style.FAINT for i in blocks]
  axes.bar(blocks, shares, width=0.7, color=colors, gid='share')
  look = {'marker': 'D', 'ls': '', 'ms': 6, 'mfc': 'white', 'mec': style.INK}
  look |= {'gid': 'suggested', 'clip_on': False}
  axes.plot(suggested, np.asarray(shares)[suggested], **look)
  style.clean(axes)
  axes.set(xlim=(-0.6, len(shares) - 0.4), ylim=(0, 1.05))
  axes.yaxis.set_major_formatter(style.percent)
  # Every block has its number, as long as they find room.
  axes.set_xticks(range(0, len(shares), -(-len(shares) // 48)))
  axes.set(xlabel='block', ylabel='rank / largest possible')
  style.heading(axes, 'Mean over heads and samples', facts)
  style.key(
    body,
    [
      Patch(color=style.CHOSEN, label='routed'),
      Patch(color=style.FAINT, label='dense'),
    ],
  )
  return body.get_figure(root=True)
