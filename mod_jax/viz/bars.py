"""Histograms and bars of scores, compute, errors and ranks.

Shapes: R blocks, whose numbers (from 0) are `layers`; B images or sequences;
K = N + 1 numbers of learners from 0 to N; T tokens. Shares are from 0 to 1.
"""

from collections.abc import Sequence

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.viz import images, style

_ROUTER = {'color': style.RULES['router'].color, 'lw': 1.5}
_THRESHOLD = {'color': style.RULES['threshold'].color, 'lw': 1.5, 'ls': '--'}
_BUDGET = {'color': '#D55E00', 'lw': 1.8, 'ls': '--', 'label': 'budget'}
_MEAN = {'color': style.CHOSEN, 'lw': 1.8, 'label': 'mean'}
_MOST_COLUMNS = 1000


def score_histogram(
  score_RBL,
  chosen_RBL,
  *,
  layers: Sequence[int],
  thresholds=None,
  title: str = 'Router scores of the chosen tokens and of the rest',
) -> Figure:
  """Draws a histogram of router scores for each routed block.

  The chosen tokens and the others are stacked, so a bar's full height counts
  all tokens of that score. Lines mark the least scores that the causal rules
  choose: 0, and the block's moving threshold if `thresholds` [R] has a finite
  one. The outermost bins include all scores beyond them (at most 0.2% of the
  tokens). Scores that are not finite, such as those of padding, are left out.
  """
  body, panels = style.panels(
    title,
    'Bars are stacked. A causal rule processes the tokens right of its line.',
    len(layers),
    xlabel='router score',
    ylabel='tokens',
  )
  if thresholds is None:
    thresholds = np.full(len(layers), np.nan)
  for axes, layer, score, chosen, threshold in zip(
    panels, layers, score_RBL, chosen_RBL, thresholds, strict=True
  ):
    finite = np.isfinite(score)
    score_N = np.asarray(score)[finite]
    chosen_N = np.asarray(chosen)[finite] > 0
    if not score_N.size:
      style.heading(axes, f'Block {layer}')
      style.say(axes, 'No finite scores.')
      continue
    low, high = np.quantile(score_N, (0.001, 0.999))
    if low == high:
      low, high = low - 0.5, high + 0.5
    clipped_N = np.clip(score_N, low, high)
    # Draw chosen tokens at the bottom, where their shape can be read directly.
    axes.hist(
      [clipped_N[chosen_N], clipped_N[~chosen_N]],
      bins=np.linspace(low, high, 49),
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
    style.ticks(axes.xaxis, 5)
    style.ticks(axes.yaxis, 4, '{x:,.0f}', integer=True)
  handles = [
    Patch(color=style.CHOSEN, label='chosen'),
    Patch(color=style.PASSED, label='passed by'),
    Line2D([], [], **_ROUTER, label='0: the router rule'),
  ]
  if np.isfinite(thresholds).any():
    handles.append(Line2D([], [], **_THRESHOLD, label='the moving threshold'))
  style.key(body, handles)
  return body.get_figure(root=True)


def compute_histogram(
  load_B, *, budget: float | None = None, title: str = 'Compute per image'
) -> Figure:
  """Draws a histogram of the images' compute, as a share of all learners.

  Lines mark the mean and the `budget`, the mean share that the model was
  trained for; a band marks one standard deviation on each side of the mean.
  """
  load_B = np.asarray(load_B, float)
  mean, std, low, high = load_B.mean(), load_B.std(), load_B.min(), load_B.max()
  aim = '' if budget is None else f', budget {budget:.1%}'
  body, (axes,) = style.panels(
    title,
    f'Measured: {load_B.size:,}. Mean {mean:.1%} of all learners{aim}, standard'
    f' deviation {std:.1%}, from {low:.1%} to {high:.1%}.',
    xlabel='compute, share of all learners',
    ylabel='count',
  )
  axes.set_label('plot')
  edges = np.array([mean - 5e-4, mean + 5e-4])
  if high - low >= 1e-3:
    count = len(np.histogram_bin_edges(load_B, 'auto'))
    edges = np.linspace(low, high, min(count, 61))
  axes.hist(load_B, edges, color='#9CC3DD', gid='bars')
  band = {'color': style.CHOSEN, 'lw': 0}
  axes.axvspan(mean - std, mean + std, alpha=0.12, gid='spread', **band)
  axes.axvline(mean, gid='mean', **_MEAN)
  handles = [
    Line2D([], [], **_MEAN),
    Patch(alpha=0.15, label='± standard deviation', **band),
  ]
  if budget is not None:
    axes.axvline(budget, gid='budget', **_BUDGET)
    handles.append(Line2D([], [], **_BUDGET))
  style.key(body, handles)
  low, high = axes.get_xlim()
  if high - low < 0.05:  # A single bar shall not fill the axis.
    axes.set_xlim((low + high) / 2 - 0.025, (low + high) / 2 + 0.025)
  style.ticks(axes.xaxis, 7, style.percent)
  style.ticks(axes.yaxis, 5, '{x:,.0f}', integer=True)
  return body.get_figure(root=True)


def error_by_learners(distance_KT, *, title: str, module: str) -> Figure:
  """Draws how each token's error falls with the number of learners.

  `distance` is the distance of h(z, k) (see `layers.acm`) from the dense
  module's output. A column is a token, a row a k = 0, …, N. The colour is the
  ratio of the error to the error with no learner, on a linear scale from 0 to
  1; larger ratios look like 1. Tokens are sorted by their mean ratio over
  k = 1, …, N, so at the left are those whose error falls fastest. A second
  panel shows the mean error of all tokens for each k. Wójcik et al., 2023,
  Figure 5.

  If there are more than 1000 tokens, neighbours are averaged in a column.
  Tokens without any error at k = 0 have no ratio: they count in the means and
  are not drawn as columns.
  """
  distance_KT = np.asarray(distance_KT, float)
  drawn_KT = _sorted_errors(distance_KT)
  rows, tokens = drawn_KT.shape
  subtitle = (
    'A column is a token, a row a number of learners; the darker, the less of'
    ' the error with no learner is left. Sorted: at the left those whose error'
    ' falls fastest.'
  )
  if left_out := distance_KT.shape[1] - tokens:
    subtitle += f' Left out, being without an error at k = 0: {left_out:,}.'
  if not tokens:
    body, _ = style.panels(f'{title}: {module}', subtitle, 0)
    return body.get_figure(root=True)
  body, (axes, beside) = style.panels(
    *(f'{title}: {module}', subtitle, 2), lines=2 * rows, width_ratios=(2, 1)
  )
  norm = Normalize(0, 1)
  # Clip before averaging, or one large value would hide its neighbours.
  parts = np.array_split(
    np.minimum(drawn_KT, 1), min(tokens, _MOST_COLUMNS), axis=1
  )
  axes.imshow(
    np.stack([part_KT.mean(axis=1) for part_KT in parts], axis=1),
    extent=(0, tokens, rows - 0.5, -0.5),
    aspect='auto',
    cmap=images.HEAT,
    norm=norm,
    interpolation='nearest',
  )
  axes.set(label='map', ylabel='learners k', xlabel='tokens, sorted')
  style.ticks(axes.xaxis, 5, '{x:,.0f}', integer=True)
  style.heading(axes, 'error over that at k = 0')
  extend = 'max' if (drawn_KT > 1).any() else 'neither'
  how = {'format': style.percent, 'aspect': 30, 'extend': extend}
  style.scale(body, [axes], norm, images.HEAT, **how)
  mean_K = distance_KT.mean(axis=1)
  texts = []
  for mean, ratio in zip(mean_K, mean_K / mean_K[0], strict=True):
    # As a percentage, a ratio of 1e300 would be wider than the picture.
    shown = f'{ratio:.0%}' if ratio < 100 else f'{ratio:.3g} ×'
    texts.append(f'{mean:.3g} ({shown})')
  _draw_bars(beside, mean_K, texts)
  beside.set_label('means')
  beside.xaxis.set_major_formatter('{x:.3g}')
  style.heading(beside, 'mean error')
  for panel in (axes, beside):
    style.ticks(panel.yaxis, 17, integer=True)
  return body.get_figure(root=True)


def attention_ranks(
  shares: Sequence[float],
  *,
  routed: Sequence[int],
  suggested: Sequence[int],
  facts: str,
  title: str,
) -> Figure:
  """Draws for each block the rank of its attention map, as one of `shares`.

  `shares` are fractions of the largest possible rank. `routed` are the blocks
  that the model routes, `suggested` the blocks with the lowest shares. `facts`
  are written above the panel.
  """
  blocks, suggested = np.arange(len(shares)), list(suggested)
  body, (axes,) = style.panels(
    title,
    'The lower, the less a block mixes tokens. Diamonds: the lowest, which are'
    ' suggested for routing (γ-MoD).',
    xlabel='block',
    ylabel='rank / largest possible',
  )
  colors = [style.CHOSEN if i in routed else style.FAINT for i in blocks]
  axes.bar(blocks, shares, width=0.7, color=colors, gid='share')
  look = {'marker': 'D', 'ls': '', 'ms': 6, 'mfc': 'white', 'mec': style.INK}
  look |= {'gid': 'suggested', 'clip_on': False}
  axes.plot(suggested, np.asarray(shares)[suggested], **look)
  axes.set(xlim=(-0.6, len(shares) - 0.4), ylim=(0, 1.05))
  axes.yaxis.set_major_formatter(style.percent)
  # Number every block, or of more than 24 blocks every second one and so on.
  axes.set_xticks(range(0, len(shares), -(-len(shares) // 24)))
  style.heading(axes, 'Mean over heads and samples', facts)
  kinds = (style.CHOSEN, 'routed'), (style.FAINT, 'dense')
  style.key(body, [Patch(color=color, label=label) for color, label in kinds])
  return body.get_figure(root=True)


def _sorted_errors(distance_KT) -> np.ndarray:
  """Returns ratios to the error at k = 0, if this is not 0; columns sorted."""
  some_T = distance_KT[0] > 0
  with np.errstate(over='ignore'):
    error_KT = distance_KT[:, some_T] / distance_KT[0, some_T]
  # A ratio to a distance of almost 0 may overflow.
  error_KT = np.minimum(error_KT, np.finfo(np.float32).max)
  order_T = np.argsort(error_KT[1:].mean(axis=0), kind='stable')
  return error_KT[:, order_T]


def _draw_bars(axes, values, texts):
  """Draws horizontal bars from 0, the first at the top, labelled by `texts`."""
  bars = axes.barh(range(len(values)), values, height=0.68, color=style.CHOSEN)
  look = {'fontsize': 7.5, 'color': style.INK, 'gid': 'value'}
  axes.bar_label(bars, texts, padding=3, **look)
  # Leave a third of the panel for the number beside the longest bar.
  longest = max(values)
  axes.set_xlim(0, 1.55 * longest or 1)
  ticks = MaxNLocator(3).tick_values(0, longest or 1)
  axes.set_xticks([tick for tick in ticks if 0 <= tick <= longest])
  axes.set_ylim(len(values) - 0.5, -0.5)
