"""How much the attention of each block has to tell."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mod_jax.errors import UserError
from mod_jax.viz import images
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

  Raises:
    UserError: what are no shares, or blocks that there are not.
  """
  shares = images.shares('shares', shares)
  if not len(shares):
    raise UserError('there are no blocks to draw: expected at least one.')
  suggested = images.block_numbers('suggested', suggested, len(shares))
  _, body = style.new_figure(
    max(6.0, 1.5 + 0.35 * len(shares)),
    3.2,
    title or 'Rank of the attention maps',
    'The lower, the less a block mixes tokens. Diamonds: the lowest, which are'
    ' suggested for routing (γ-MoD).',
  )
  axes = body.subplots()
  colors = [
    style.CHOSEN if i in routed else style.FAINT for i in range(len(shares))
  ]
  for i, (share, color) in enumerate(zip(shares, colors, strict=True)):
    axes.bar(i, share, width=0.7, color=color, gid='share')
  axes.plot(
    suggested,
    [shares[i] for i in suggested],
    marker='D',
    ls='',
    ms=6,
    mfc='white',
    mec=style.INK,
    gid='suggested',
    clip_on=False,
  )
  style.clean(axes)
  axes.set_ylim(0, 1.05)
  axes.yaxis.set_major_formatter(style.percent)
  axes.set_xlim(-0.6, len(shares) - 0.4)
  # Every block has its number, as long as they find room.
  step = -(-len(shares) // 48)
  axes.set_xticks(range(0, len(shares), step))
  axes.set_xlabel('block')
  axes.set_ylabel('rank / largest possible')
  style.heading(axes, 'Mean over heads and samples', facts)
  style.key(
    body,
    [
      Patch(color=color, label=label)
      for color, label in ((style.CHOSEN, 'routed'), (style.FAINT, 'dense'))
    ],
  )
  return body.get_figure(root=True)
