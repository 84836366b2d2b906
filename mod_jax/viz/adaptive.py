"""Where an adaptive model's compute goes, and what it buys.

Shares are of the cost of all learners, from 0 to 1. Shapes: B images, L
patches, K = N + 1 numbers of learners from 0 to N, T tokens.
"""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import images, style

_BUDGET = {'color': '#D55E00', 'lw': 1.8, 'ls': '--', 'label': 'budget'}
_MEAN = {'color': style.CHOSEN, 'lw': 1.8, 'label': 'mean'}
_MOST_BINS = 60
_MOST_COLUMNS = 1000
_EFFECTS = (
  ('accuracy', 'Accuracy', '#0072B2'),
  ('load_mean', 'Mean compute', '#E69F00'),
  ('load_std', 'Spread over images', '#009E73'),
  ('token_std', 'Spread over tokens', '#CC79A7'),
)


def compute_histogram(
  load_B,
  *,
  budget: float | None = None,
  unit: str = 'of all learners',
  title: str = '',
) -> Figure:
  """Draws how many images take how much compute.

  Lines mark the mean and the budget, a band one standard deviation to each
  side of the mean.

  Args:
    load_B: the share of the compute that each image takes, from 0 to 1.
    budget: the mean share that was asked for, from 0 to 1; None: none.
    unit: what it is a share of.
    title: says what is seen; a general one if empty.
  """
  load_B = np.asarray(load_B, float)
  title = title or 'Compute per image'
  if not load_B.size:
    figure, body = style.new_figure(7.5, 3.6, title)
    style.say(body.subplots(), 'No images measured yet')
    return figure
  mean, std = load_B.mean(), load_B.std()
  aim = '' if budget is None else f', budget {budget:.1%}'
  figure, body = style.new_figure(
    *(7.5, 3.6, title),
    f'Images: {load_B.size:,}. Mean {mean:.1%} {unit}{aim}, standard deviation'
    f' {std:.1%}, from {load_B.min():.1%} to {load_B.max():.1%}.',
  )
  axes = body.subplots()
  axes.set_label('plot')
  style.clean(axes)
  if np.ptp(load_B) < 1e-3:
    edges = np.array([mean - 5e-4, mean + 5e-4])
  else:
    count = len(np.histogram_bin_edges(load_B, 'auto')) - 1
    ends = load_B.min(), load_B.max()
    edges = np.linspace(*ends, min(count, _MOST_BINS) + 1)
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
  if high - low < 0.05:  # Equal images are one bar, not the whole axis.
    axes.set_xlim((low + high) / 2 - 0.025, (low + high) / 2 + 0.025)
  axes.set_xlabel(style.shortened(f'compute per image, share {unit}'))
  axes.set_ylabel('images')
  axes.xaxis.set_major_locator(MaxNLocator(7))
  axes.xaxis.set_major_formatter(style.percent)
  axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
  axes.yaxis.set_major_formatter('{x:,.0f}')
  return figure


def compute_extremes(
  images_BHWC,
  load_B,
  load_BL,
  *,
  grid: tuple[int, int],
  count: int = 4,
  labels: Sequence[str] | None = None,
  title: str = '',
  unit: str = 'share of all learners',
  maximum: float | None = None,
) -> Figure:
  """Draws the cheapest and the dearest images with the load of their patches.

  First the cheapest, from the very cheapest on, then the dearest, from the very
  dearest on; of equal ones the first. All share one colour scale.

  Args:
    images_BHWC: uint8 RGB images, two at least.
    load_B: the share of the compute that each image takes, from 0 to 1.
    load_BL: compute spent on each patch, 0 or more.
    grid: rows and columns of patches, L in all.
    count: how many of each, up to 4; fewer where there are fewer than twice as
      many.
    labels: a text for each image, such as its class.
    title: says what is seen; a general one if empty.
    unit: of the patches' load.
    maximum: where the colour scale ends; None: at the largest load drawn.

  Raises:
    UserError: fewer than two images.
  """
  load_B, total = np.asarray(load_B), len(load_B)
  if total < 2:
    raise UserError(
      f'images: {total}; expected two at least, the cheapest and the dearest.'
    )
  count = min(count, total // 2)
  cheap = np.argsort(load_B, kind='stable')[:count]
  dear = np.argsort(-load_B, kind='stable')[:count]
  texts = []
  for name, chosen in (('cheapest', cheap), ('dearest', dear)):
    for rank, b in enumerate(chosen, 1):
      # As the captions below and the scale have it: a share, no percentage.
      text = f'{name} {rank}: {load_B[b]:.3g}'
      texts.append(text if labels is None else f'{text} · {labels[b]}')
  chosen = np.concatenate([cheap, dear])
  return images.load_map(
    np.asarray(images_BHWC)[chosen],
    np.asarray(load_BL)[chosen],
    grid=grid,
    title=title or f'The cheapest and the dearest of {total:,} images',
    unit=unit,
    maximum=maximum,
    labels=texts,
  )


def error_by_learners(
  distance_KT, *, title: str = '', module: str = ''
) -> Figure:
  """Draws how each token's error falls with the number of learners.

  A column per token, a row per number of learners k = 0, …, N; the colour is
  the error over that with no learner, on a linear scale from 0 to 1, above
  which it does not change. Tokens are sorted by the mean of it over k = 1, …,
  N: at the left those whose error falls fastest. Beside it the mean error of
  all tokens for each k. Wójcik et al., 2023, Figure 5.

  Of more than 1000 tokens, neighbours are averaged in a column. Tokens without
  any error at k = 0 have no such ratio: they count in the means and are not
  drawn as columns.

  Args:
    distance_KT: distance of h(z, k) to what the dense module returns, 0 or
      more; any number of axes after K.
    title: says what is seen; a general one if empty.
    module: name of the module.
  """
  distance_KT = np.asarray(distance_KT, float)
  distance_KT = distance_KT.reshape(len(distance_KT), -1)
  drawn_KT = _sorted_errors(distance_KT)
  tokens, left_out = drawn_KT.shape[1], distance_KT.shape[1] - drawn_KT.shape[1]
  subtitle = (
    'A column is a token, a row a number of learners; the darker, the less of'
    ' the error with no learner is left. Sorted: at the left those whose error'
    ' falls fastest.'
  )
  if left_out:
    subtitle += f' Left out, being without an error at k = 0: {left_out:,}.'
  title = title or 'How the error falls with each learner'
  figure, body = style.new_figure(
    *(9.5, float(np.clip(0.36 * len(distance_KT), 1.6, 4.5)) + 0.9),
    f'{title}: {module}' if module else title,
    subtitle,
  )
  if not tokens:
    none = 'No token has an error' if left_out else 'No tokens measured yet'
    style.say(body.subplots(), none)
    return figure
  axes, beside = body.subplots(1, 2, width_ratios=(2, 1))
  axes.set_label('map')
  beside.set_label('means')
  style.clean(axes)
  norm = Normalize(0, 1)
  axes.imshow(
    _columns(drawn_KT),
    extent=(0, tokens, len(distance_KT) - 0.5, -0.5),
    aspect='auto',
    cmap=images.HEAT,
    norm=norm,
    interpolation='nearest',
  )
  axes.set_ylabel('learners k')
  axes.set_xlabel('tokens, sorted')
  axes.yaxis.set_major_locator(MaxNLocator(17, integer=True))
  axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
  axes.xaxis.set_major_formatter('{x:,.0f}')
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
  style.clean(beside)
  _draw_bars(beside, mean_K, texts)
  beside.yaxis.set_major_locator(MaxNLocator(17, integer=True))
  beside.xaxis.set_major_formatter('{x:.3g}')
  style.heading(beside, 'mean error')
  return figure


def loss_effects(rows: Iterable[Mapping], *, title: str = '') -> Figure:
  """Draws what each auxiliary loss does: a panel per number, a bar per row.

  Args:
    rows: for each training run `name`, `accuracy`, `load_mean`, the mean share
      of the compute, and its standard deviations over images, `load_std`, and
      over tokens, `token_std`; all numbers are from 0 to 1.
    title: says what is seen; a general one if empty.
  """
  rows = list(rows)
  names = [style.shortened(row['name']) for row in rows]
  figure, body = style.new_figure(
    # Wider for long names, which stand at the left of the first panel.
    max(10, 7.5 + 0.1 * max(map(len, names), default=0)),
    0.3 * max(len(rows), 3) + 0.8,
    title or 'What each loss does',
    'Compute is a share of all learners. The spreads are standard deviations:'
    ' of the mean over an image, and of single tokens.',
  )
  if not rows:
    style.say(body.subplots(), 'No runs measured yet')
    return figure
  panels = body.subplots(1, len(_EFFECTS), sharey=True)
  for axes, (key, heading, color) in zip(panels, _EFFECTS, strict=True):
    axes.set_label(key)
    style.clean(axes)
    values = [row[key] for row in rows]
    _draw_bars(axes, values, [f'{value:.1%}' for value in values], color)
    axes.xaxis.set_major_formatter(style.percent)
    axes.tick_params(axis='y', length=0, labelcolor=style.INK)
    style.heading(axes, heading)
  panels[0].set_yticks(range(len(rows)), names)
  return figure


def _sorted_errors(distance_KT) -> np.ndarray:
  """Returns errors over those at k = 0, columns sorted by their mean."""
  some_T = distance_KT[0] > 0
  with np.errstate(over='ignore'):
    error_KT = distance_KT[:, some_T] / distance_KT[0, some_T]
  # Beside a distance of almost 0 another may be infinitely larger.
  error_KT = np.minimum(error_KT, np.finfo(np.float32).max)
  order_T = np.argsort(error_KT[1:].mean(axis=0), kind='stable')
  return error_KT[:, order_T]


def _columns(error_KT) -> np.ndarray:
  """Returns means of neighbours, no more columns than can be seen."""
  tokens = error_KT.shape[1]
  if tokens <= _MOST_COLUMNS:
    return error_KT
  starts = np.arange(_MOST_COLUMNS) * tokens // _MOST_COLUMNS
  # Clipped as it is drawn, or one large value would hide its neighbours.
  total = np.add.reduceat(np.minimum(error_KT, 1), starts, axis=1)
  return total / np.diff(starts, append=tokens)


def _draw_bars(axes, values, texts, color=style.CHOSEN):
  """Draws horizontal bars from 0, the first at the top, and their numbers."""
  bars = axes.barh(range(len(values)), values, height=0.68, color=color)
  look = {'fontsize': 7.5, 'color': style.INK, 'gid': 'value'}
  axes.bar_label(bars, texts, padding=3, **look)
  # A third of the panel for the number beside the longest bar.
  longest = max(values)
  axes.set_xlim(0, 1.55 * longest or 1)
  ticks = MaxNLocator(3).tick_values(0, longest or 1)
  axes.set_xticks([tick for tick in ticks if 0 <= tick <= longest])
  axes.set_ylim(len(values) - 0.5, -0.5)
