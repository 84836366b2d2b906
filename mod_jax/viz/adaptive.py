"""Where an adaptive model's compute goes, and what it buys.

Shares are of the cost of all learners, from 0 to 1. Shapes: B images, L
patches, K = N + 1 numbers of learners from 0 to N, T tokens.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import numbers

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.errors import UserError
from mod_jax.viz import images
from mod_jax.viz import style

_BUDGET = '#D55E00'
_MOST_BINS = 60
_LEAST_WIDTH = 0.05  # Of the histogram's axis: two equal images are a bar.
# Of a token's error with k learners over that with none.
_ERROR = Normalize(0, 1)
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

  Raises:
    UserError: loads of another shape, or numbers that are no shares.
  """
  load_B = _shares('loads', load_B)
  if budget is not None:
    budget = float(_shares('budget', [budget])[0])
  mean, std = (
    (load_B.mean(), load_B.std()) if load_B.size else (math.nan, math.nan)
  )
  subtitle = ''
  if load_B.size:
    count = f'{load_B.size:,} image{"" if load_B.size == 1 else "s"}'
    subtitle = (
      f'{count}: {mean:.1%} {unit} on average, standard deviation {std:.1%},'
      f' from {load_B.min():.1%} to {load_B.max():.1%}.'
    )
    if budget is not None:
      subtitle += (
        f' The budget is {budget:.1%}, from which the mean is'
        f' {100 * (mean - budget):+.1f} points.'
      )
  figure, body = style.new_figure(
    7.5, 3.6, title or 'Compute per image', subtitle
  )
  axes = body.subplots()
  axes.set_label('plot')
  style.clean(axes)
  if not load_B.size:
    style.say(axes, 'No images measured yet')
    return figure
  low, high = _limits(load_B, budget)
  axes.hist(load_B, bins=_bins(load_B, low, high), color='#9CC3DD', gid='bars')
  axes.axvspan(
    mean - std, mean + std, color=style.CHOSEN, alpha=0.12, lw=0, gid='spread'
  )
  axes.axvline(mean, color=style.CHOSEN, lw=1.8, gid='mean')
  handles = [
    Line2D([], [], color=style.CHOSEN, lw=1.8, label='mean'),
    Patch(color=style.CHOSEN, alpha=0.15, lw=0, label='± standard deviation'),
  ]
  if budget is not None:
    axes.axvline(budget, color=_BUDGET, lw=1.8, ls='--', gid='budget')
    handles.append(
      Line2D([], [], color=_BUDGET, lw=1.8, ls='--', label='budget')
    )
  style.key(body, handles)
  axes.set_xlim(low, high)
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
    images_BHWC: uint8 RGB images.
    load_B: the share of the compute that each image takes, from 0 to 1.
    load_BL: compute spent on each patch, 0 or more.
    grid: rows and columns of patches, L in all.
    count: how many of each; fewer where there are fewer than twice as many.
    labels: a text for each image, such as its class.
    title: says what is seen; a general one if empty.
    unit: of the patches' load.
    maximum: where the colour scale ends; None: at the largest load drawn.

  Raises:
    UserError: fewer than two images, shapes or numbers that do not fit
      together, or more than one picture can hold.
  """
  load_B = _shares('loads', load_B)
  images_BHWC, load_BL = np.asarray(images_BHWC), np.asarray(load_BL)
  total = len(load_B)
  if images_BHWC.shape[:1] != (total,) or load_BL.shape[:1] != (total,):
    raise UserError(
      f'{total} loads for images of shape {images_BHWC.shape} and patch loads'
      f' of shape {load_BL.shape}: expected one of each for every image.'
    )
  if total < 2:
    raise UserError(
      f'{total} image{"" if total == 1 else "s"}: expected two at least, one to'
      ' be the cheapest and one the dearest.'
    )
  if not _is_whole(count) or count < 1:
    raise UserError(
      f'count={count!r:.40}: expected a whole number of images, 1 or more.'
    )
  labels = images.image_labels(labels, total)
  count = min(count, total // 2)
  cheap = np.argsort(load_B, kind='stable')[:count]
  dear = np.argsort(-load_B, kind='stable')[:count]
  texts = []
  for name, chosen in (('cheapest', cheap), ('dearest', dear)):
    for rank, b in enumerate(chosen.tolist(), 1):
      place = f'{name} {rank}' if count > 1 else name
      # As the captions below and the scale have it: a share, no percentage.
      text = f'{place}: {load_B[b]:.3g}'
      texts.append(text if labels is None else f'{text} · {labels[b]}')
  chosen = np.concatenate([cheap, dear])
  default = (
    f'The {count} cheapest and the {count} dearest of {total:,} images'
    if count > 1
    else f'The cheapest and the dearest of {total:,} images'
  )
  return images.load_map(
    images_BHWC[chosen],
    load_BL[chosen],
    grid=grid,
    title=title or default,
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

  Raises:
    UserError: fewer than two rows, or distances that are negative or not
      finite.
  """
  distance_KT = images.finite('distances', distance_KT)
  if distance_KT.ndim < 2 or len(distance_KT) < 2:
    raise UserError(
      f'distances of shape {distance_KT.shape}: expected shape (N + 1, tokens),'
      ' with a row for k = 0 and for each further number of learners.'
    )
  distance_KT = distance_KT.reshape(len(distance_KT), -1)
  if distance_KT.size and distance_KT.min() < 0:
    raise UserError(
      f'a distance of {distance_KT.min():.6g}: expected 0 or more.'
    )
  most = len(distance_KT) - 1
  drawn_KT = _sorted_errors(distance_KT)
  tokens, left_out = drawn_KT.shape[1], distance_KT.shape[1] - drawn_KT.shape[1]
  subtitle = (
    'A column is a token, a row a number of learners; the darker, the less of'
    ' the error with no learner is left. Sorted: at the left those whose error'
    ' falls fastest.'
  )
  if left_out:
    subtitle += (
      f' {left_out:,} token{"" if left_out == 1 else "s"} without an error at'
      ' k = 0 left out.'
    )
  if (drawn_KT > 1).any():
    subtitle += (
      f' At {(drawn_KT[1:] > 1).mean():.1%} of the places learners add error.'
    )
  title = title or 'How the error falls with each learner'
  if module:
    title += f': {module}'

  high = float(np.clip(0.36 * (most + 1), 1.6, 4.5)) + 0.9
  figure, body = style.new_figure(9.5, high, title, subtitle)
  axes, beside = body.subplots(1, 2, width_ratios=(2, 1))
  axes.set_label('map')
  beside.set_label('means')
  if not tokens:
    beside.remove()
    style.say(
      axes,
      'No token has an error' if distance_KT.size else 'No tokens measured yet',
    )
    return figure
  style.clean(axes)
  axes.imshow(
    _columns(drawn_KT),
    extent=(0, tokens, most + 0.5, -0.5),
    aspect='auto',
    cmap=images.HEAT,
    norm=_ERROR,
    interpolation='nearest',
  )
  axes.set_ylabel('learners k')
  axes.set_xlabel('tokens, sorted')
  axes.yaxis.set_major_locator(MaxNLocator(17, integer=True))
  axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
  axes.xaxis.set_major_formatter('{x:,.0f}')
  style.heading(axes, 'error over that at k = 0')
  bar = style.scale(
    body,
    _ERROR,
    images.HEAT,
    ax=axes,
    extend='max' if (drawn_KT > 1).any() else 'neither',
    ticks=[0, 0.25, 0.5, 0.75, 1],
    format=style.percent,
    aspect=30,
    pad=0.02,
  )
  bar.set_label('bar')
  _draw_means(beside, distance_KT.mean(axis=1))
  return figure


def loss_effects(rows: Iterable[Mapping], *, title: str = '') -> Figure:
  """Draws what each auxiliary loss does: a panel per number, a bar per row.

  Args:
    rows: for each training run `name`, `accuracy`, `load_mean`, the mean share
      of the compute, and its standard deviations over images, `load_std`, and
      over tokens, `token_std`; all numbers are from 0 to 1.
    title: says what is seen; a general one if empty.

  Raises:
    UserError: a row without one of the numbers, one that is out of range, or
      more rows than one picture can hold.
  """
  rows = [_effect(i, given) for i, given in enumerate(rows)]
  names = [style.shortened(row['name']) for row in rows]
  figure, body = style.new_figure(
    # Wider for long names, which stand at the left of the first panel.
    max(10, 7.5 + 0.1 * max(map(len, names), default=0)),
    0.3 * max(len(rows), 3) + 0.8,
    title or 'What each loss does',
    'Compute is a share of all learners. The spreads are standard deviations:'
    ' of the mean over an image, and of single tokens.',
    what=f'{len(rows)} rows',
  )
  if not rows:
    style.say(body.subplots(), 'No runs measured yet')
    return figure
  panels = body.subplots(1, len(_EFFECTS))
  for axes, (key, heading, color) in zip(panels, _EFFECTS, strict=True):
    axes.set_label(key)
    style.clean(axes)
    values = [row[key] for row in rows]
    _draw_bars(axes, values, [f'{value:.1%}' for value in values], color)
    axes.xaxis.set_major_formatter(style.percent)
    axes.set_yticks(
      range(len(rows)), names if axes is panels[0] else [''] * len(rows)
    )
    axes.tick_params(axis='y', length=0, labelcolor=style.INK)
    style.heading(axes, heading)
  return figure


def _shares(name, values) -> np.ndarray:
  values_B = images.shares(name, values)
  if values_B.ndim != 1:
    raise UserError(
      f'{name} of shape {values_B.shape}: expected one number for each image.'
    )
  return values_B


def _is_whole(value) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _limits(load_B, budget) -> tuple[float, float]:
  """Returns where the axis starts and ends: around what there is to see."""
  mean, std = load_B.mean(), load_B.std()
  seen = [load_B.min(), load_B.max(), mean - std, mean + std]
  seen += [] if budget is None else [budget]
  low, high = min(seen), max(seen)
  margin = max(0.05 * (high - low), (_LEAST_WIDTH - (high - low)) / 2)
  return float(low - margin), float(high + margin)


def _bins(load_B, low, high) -> np.ndarray:
  """Returns the edges of the bars."""
  start, end = load_B.min(), load_B.max()
  if end - start < 1e-3 * (high - low):
    centre, half = (start + end) / 2, (high - low) / _MOST_BINS
    return np.array([centre - half, centre + half])
  edges = np.histogram_bin_edges(load_B, 'auto')
  return np.linspace(start, end, min(len(edges), _MOST_BINS + 1))


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
  count = np.diff(starts, append=tokens)
  # What is drawn is clipped, or one large value would hide its neighbours.
  return np.add.reduceat(_clipped(error_KT), starts, axis=1) / count


def _clipped(error_KT) -> np.ndarray:
  return np.minimum(error_KT, _ERROR.vmax)


def _draw_means(axes, mean_K):
  style.clean(axes)
  texts = [f'{mean_K[0]:.3g}']
  for mean in mean_K[1:]:
    ratio = mean / mean_K[0]
    # As a percentage, a ratio of 1e300 would be wider than the picture.
    shown = f'{ratio:.0%}' if ratio < 100 else f'{ratio:.3g} ×'
    texts.append(f'{mean:.3g} ({shown})')
  _draw_bars(axes, mean_K.tolist(), texts)
  axes.set_ylim(len(mean_K) - 0.5, -0.5)
  axes.yaxis.set_major_locator(MaxNLocator(17, integer=True))
  axes.xaxis.set_major_formatter('{x:.3g}')
  style.heading(axes, 'mean error')


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


def _effect(index, given) -> dict:
  row = {'name': str(given.get('name') or f'run {index}')}
  for key, *_ in _EFFECTS:
    value = given.get(key)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not -images.SLACK <= value <= 1 + images.SLACK:
      raise UserError(
        f'row {index} ({row["name"]!r:.40}) has {key} {value!r:.40}: expected a'
        ' number from 0 to 1.'
      )
    row[key] = min(max(float(value), 0.0), 1.0)
  return row
