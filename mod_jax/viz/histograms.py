"""How the router's scores lie, and where a rule would cut them."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.viz import style

_BINS = 48
_ROUTER = {'color': style.RULES['router'].color, 'lw': 1.5}
_THRESHOLD = {'color': style.RULES['threshold'].color, 'lw': 1.5, 'ls': '--'}


def score_histogram(
  score_RBL,
  chosen_RBL,
  *,
  layers: Sequence[int],
  title: str = '',
  thresholds=None,
) -> Figure:
  """Draws a histogram of router scores for each routed block.

  The tokens that were chosen and those passed by are stacked, so a bar's full
  height is all tokens of that score. Lines mark where the causal rules cut.
  The outermost bins hold what lies beyond them (at most 0.2% of the tokens);
  scores that are not finite, such as those of padding, are left out.

  Args:
    score_RBL: scores of R routed blocks; any shape after R.
    chosen_RBL: the tokens that were processed, of the same shape.
    layers: the block numbers of the R routed blocks, counted from 0.
    title: says what is seen; a general one if empty.
    thresholds: R moving thresholds; None, or one that is not finite, is not
      drawn.
  """
  body, panels = style.small_multiples(
    layers,
    title or 'Router scores of the chosen tokens and of the rest',
    'Bars are stacked. A causal rule processes the tokens right of its line.',
    height=2.2,
    xlabel='router score',
    ylabel='tokens',
  )
  if thresholds is None:
    thresholds = np.full(len(layers), np.nan)
  for axes, layer, score, chosen, threshold in zip(
    panels, layers, score_RBL, chosen_RBL, thresholds, strict=True
  ):
    _draw(axes, layer, np.ravel(score), np.ravel(chosen) > 0, threshold)
  if panels:
    handles = [
      Patch(color=style.CHOSEN, label='chosen'),
      Patch(color=style.PASSED, label='passed by'),
      Line2D([], [], **_ROUTER, label='0: the router rule'),
    ]
    if np.isfinite(thresholds).any():
      line = Line2D([], [], **_THRESHOLD, label='the moving threshold')
      handles.append(line)
    style.key(body, handles)
  return body.get_figure(root=True)


def _draw(axes, layer, score_N, chosen_N, threshold):
  finite_N = np.isfinite(score_N)
  score_N, chosen_N = score_N[finite_N], chosen_N[finite_N]
  if not score_N.size:
    style.heading(axes, f'Block {layer}')
    style.say(axes, 'No finite scores.')
    return
  low, high = np.quantile(score_N, (0.001, 0.999))
  if low == high:
    low, high = low - 0.5, high + 0.5
  clipped_N = np.clip(score_N, low, high)
  # Chosen ones at the base, where their shape can be read directly.
  axes.hist(
    [clipped_N[chosen_N], clipped_N[~chosen_N]],
    bins=np.linspace(low, high, _BINS + 1),
    stacked=True,
    histtype='stepfilled',
    color=[style.CHOSEN, style.PASSED],
  )
  facts = f'chosen {chosen_N.mean():.1%} · > 0: {np.mean(score_N > 0):.1%}'
  axes.axvline(0, **_ROUTER, gid='router')
  if np.isfinite(threshold):
    axes.axvline(threshold, **_THRESHOLD, gid='threshold')
    facts += f' · ≥ threshold: {np.mean(score_N >= threshold):.1%}'
  style.heading(axes, f'Block {layer}', facts)
  axes.margins(x=0.02)
  axes.xaxis.set_major_locator(MaxNLocator(5))
  axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
  axes.yaxis.set_major_formatter('{x:,.0f}')
