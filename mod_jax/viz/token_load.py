"""How much compute each token of a text takes, by block."""

from collections.abc import Sequence

from matplotlib.figure import Figure
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import images
from mod_jax.viz import style
from mod_jax.viz import text_panels

_COLUMNS = 48  # Tokens side by side.


def token_load(
  share_RL: np.ndarray,
  pieces: Sequence[str],
  *,
  layers: Sequence[int],
  unit: str,
  title: str = '',
) -> Figure:
  """Draws a text, and over each token the compute that each block gave it.

  Args:
    share_RL: between 0 and 1, for each of R blocks and L tokens.
    pieces: what the tokens stand for.
    layers: the blocks' numbers.
    unit: what 1 stands for, as in `share of all learners`.
    title: of the figure.

  Raises:
    UserError: no text, or shares of another shape or that are none.
  """
  share_RL = text_panels.check_pieces(
    'shares', share_RL, pieces, layers, 'blocks'
  )
  if not len(layers):
    raise UserError('there are no blocks to draw: expected at least one.')
  share_RL = images.shares('shares', share_RL)
  shown = [glyphs.display_piece(piece) for piece in pieces]
  columns = min(_COLUMNS, max(_COLUMNS // 2, len(shown)))
  rows = -(-len(shown) // columns)
  figure, body = style.new_figure(
    2 + 10 * columns / _COLUMNS,
    # High enough for what the colour scale's label says.
    max(1.9, 0.5 + rows * (0.45 + 0.25 * len(layers))),
    title,
  )
  panels = body.subplots(rows, squeeze=False)[:, 0]
  for i, axes in enumerate(panels):
    start, end = i * columns, min((i + 1) * columns, len(shown))
    image = axes.imshow(
      share_RL[::-1, start:end],
      extent=(-0.5, end - start - 0.5, -0.5, len(layers) - 0.5),
      origin='upper',
      aspect='auto',
      cmap='viridis',
      vmin=0,
      vmax=1,
    )
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_xticks(range(end - start), shown[start:end])
    for label in axes.get_xticklabels():
      label.set(
        fontproperties=glyphs.mono(8),
        parse_math=False,
        rotation=90 if max(map(len, shown)) > 2 else 0,
      )
    axes.set_yticks(range(len(layers)), layers)
    axes.set_ylabel('block')
    axes.tick_params(length=0, labelsize=8, colors=style.INK)
    axes.spines[:].set_visible(False)
  mean = f'{100 * share_RL.mean():.0f}%'
  how = {'ax': panels, 'fraction': 0.03, 'format': style.percent}
  scale = style.scale(body, image.norm, image.cmap, **how)
  scale.set_ylabel(
    f'{glyphs.plain(unit)}\n(these {len(shown)} tokens: {mean})', fontsize=9
  )
  return figure
