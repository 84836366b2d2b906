"""Numbers over the steps of a run, and over how corrupted images are."""

from collections.abc import Iterable, Mapping, Sequence
import numbers

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.viz import style

_TRAIN = '#8A8A8A'
_SMOOTH = {'color': _TRAIN, 'lw': 1.6}
_FEW = 10  # Fewer training losses than this are all shown.


def loss_curves(
  records: Iterable[Mapping], *, title: str = '', classifier: bool = False
) -> Figure:
  """Draws training and held-out losses over the steps of a run.

  A second panel shows how often each causal rule decides as top-k would, with
  the trivial baseline of never routing, where the records hold it.

  Args:
    records: one mapping for each line of `metrics.jsonl`. Those of kind
      `train` hold `step` and `loss`; those of kind `eval` hold `step` and, for
      each rule, `RULE/loss`, perhaps `RULE/accuracy` and `RULE/never_route`
      (or plain `loss` for a model without rules). What is missing or not
      finite is skipped; of two records of one step the later counts, as after
      a resumption.
    title: says what is seen; a general one if empty.
    classifier: whether losses are nats per image rather than per token, and
      accuracies (plain `accuracy` among them) those of a classifier rather than
      a rule's agreement with top-k.
  """
  series = _read(records)
  train, held_out = series.get(('train', 'loss')), _by_rule(series, 'loss')
  accuracy = _by_rule(series, 'accuracy')
  never = _by_rule(series, 'never_route')
  if not classifier:
    accuracy.pop('', None)  # No rule's.
    never.pop('', None)
  lines = max(1 + len(held_out), len(accuracy) + len(never))
  figure, body = style.new_figure(
    10.5 if accuracy else 7.5,
    4.2 + 0.1 * lines,  # With room for the legends, two series on a line.
    title or 'Training and held-out loss',
    'Grey: training batches, smoothed. Markers: held-out data. Numbers: the'
    ' last values.',
  )
  panels = body.subplots(
    *(1, 1 + bool(accuracy)),
    squeeze=False,
    width_ratios=(1.35, 1)[: 1 + bool(accuracy)],
    sharex=True,
  )[0]
  if train is None and not held_out:
    style.say(panels[0], 'No losses recorded yet')
  else:
    _draw_losses(panels[0], train, held_out, classifier)
  if accuracy:
    _draw_accuracy(panels[1], accuracy, never, classifier)
  _widen(panels[0])
  return figure


def compared_curves(runs: Iterable[Mapping], *, title: str = '') -> Figure:
  """Draws the losses of several runs over steps, training FLOPs and time.

  Args:
    runs: of each `name`; `records`, as in `loss_curves`; `flops_S`, training
      FLOPs up to each step; and `seconds_per_step`, None where it is not
      recorded. Lines are training losses, smoothed; markers are held-out
      losses, those of top-k where there are rules.
    title: says what is seen; a general one if empty.
  """
  runs = list(runs)
  figure, body = style.new_figure(
    *(12, 4.6, title or 'Losses of several runs'),
    'Lines: training loss, smoothed. Markers: held-out loss. Time: at the mean'
    ' rate of the run, which the legend has.',
  )
  panels = body.subplots(1, 3, sharey=True)
  handles, lows, highs = [], [], []
  for i, run in enumerate(runs):
    look, seconds = style.series_look(i), run['seconds_per_step']
    series = _read(run['records'])
    train, held_out = series.get(('train', 'loss')), _by_rule(series, 'loss')
    held_out = held_out.get('top_k', held_out.get(''))
    for numbers_2S, gid, how in (
      (train, 'train', {'color': look['color'], 'lw': 1.1, 'alpha': 0.8}),
      (held_out, 'held-out', look | {'ls': '', 'ms': 5}),
    ):
      if numbers_2S is None:
        continue
      step_S, value_S = numbers_2S
      smooth_S = _smooth(value_S)
      shown_S = smooth_S if gid == 'train' else value_S
      for axes, x_S in zip(
        panels,
        (
          step_S,
          run['flops_S'][step_S.astype(int)],
          step_S * (seconds or np.nan) / 3600,
        ),
        strict=True,
      ):
        axes.plot(x_S, shown_S, gid=gid, **how)
      lows.append(smooth_S.min())
      # The first steps fall so far that nothing else would be seen.
      highs.append(np.quantile(smooth_S, 0.85))
    rate = f', {1 / seconds:.3g} steps/s' if seconds else ''
    name = f'{style.shortened(run["name"])}{rate}'
    handles.append(Line2D([], [], lw=1.4, ms=5, label=name, **look))
  for axes, name in zip(
    panels, ('step', 'training FLOPs', 'hours'), strict=True
  ):
    style.clean(axes, 'both')
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.get_offset_text().set(size=8, color=style.MUTED)
  if not any(run['seconds_per_step'] for run in runs):
    style.say(panels[2], 'No times recorded')
  panels[0].set_ylabel('loss')
  if not lows:
    style.say(panels[0], 'No losses recorded yet')
    return figure
  margin = 0.05 * (max(highs) - min(lows)) or 0.1
  panels[0].set_ylim(min(lows) - margin, max(highs) + margin)
  longest = max(len(handle.get_label()) for handle in handles)
  style.key(body, handles, ncols=min(3, 150 // longest, len(handles)))
  return figure


# Of each metric of experts: heading, what it is, and where it is at balance.
_OF_EXPERTS = {
  'busiest': ('Busiest expert', 'its tokens over the mean of all', 1.0),
  'null': ('No-ops', 'choices that do nothing', None),
  'dropped': ('Dropped', 'choices of experts without a free slot', None),
  'balance': ('Balance loss', '1: choices are as they should be', 1.0),
}
_SHARES = ('null', 'dropped')


def expert_curves(
  records: Iterable[Mapping],
  *,
  null_target: float | None = None,
  title: str = '',
) -> Figure:
  """Draws over the steps of a run how evenly its experts were chosen.

  A panel for each of the metrics `experts/busiest`, `null`, `dropped` and
  `balance` that is anywhere above 0: lines for the training batches, markers
  for held-out data by each rule.

  Args:
    records: as in `loss_curves`; here of kind `train` they hold
      `experts/NAME`, of kind `eval` `experts/NAME` or `RULE/experts/NAME`.
    null_target: the share of the choices that should do nothing; None where
      there are no such choices.
    title: says what is seen; a general one if empty.
  """
  series = _read(records)
  panels, zero, rules = {}, [], {}
  for name in _OF_EXPERTS:
    train = series.get(('train', f'experts/{name}'))
    held_out = _by_rule(series, f'experts/{name}')
    held_out.pop('never', None)  # Without routed blocks nothing is judged.
    drawn = [*held_out.values()] + ([] if train is None else [train])
    if any(value_S.max() > 0 for _, value_S in drawn):
      panels[name] = train, held_out
    elif drawn:
      zero.append(_OF_EXPERTS[name][0].lower())
  subtitle = 'Grey: training batches, smoothed. Markers: held-out data.'
  if zero:
    subtitle += f' Not drawn, since 0 throughout: {", ".join(zero)}.'
  figure, body = style.new_figure(
    *(max(7.5, 3.2 * len(panels)), 3.4),
    title or 'How evenly experts are chosen, over training',
    subtitle,
  )
  if not panels:
    style.say(body.subplots(), 'Nothing recorded yet')
    return figure
  grid = body.subplots(1, len(panels), squeeze=False, sharex=True)[0]
  for axes, (name, (train, held_out)) in zip(grid, panels.items(), strict=True):
    heading, facts, reference = _OF_EXPERTS[name]
    reference = null_target if name == 'null' else reference
    if reference is not None:
      axes.axhline(reference, color=style.INK, ls='--', lw=1, gid='reference')
    if train is not None:
      _draw_train(axes, *train)
    for rule, (step_S, value_S) in held_out.items():
      label = _label(rule, False) if rule else 'held-out'
      _draw_rule(axes, rule, step_S, value_S, label, name)
      rules[rule] = axes.lines[-1]
    _steps(axes, 4)
    style.heading(axes, heading, facts)
    if name in _SHARES:
      # With room for a marker at 0.
      axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
      axes.yaxis.set_major_formatter(style.percent)
  _widen(grid[0])
  handles = [
    Line2D([], [], label='training', **_SMOOTH),
    *(rules[rule] for rule in sorted(rules, key=_order)),
    Line2D([], [], color=style.INK, ls='--', lw=1, label='as it should be'),
  ]
  style.key(body, handles, ncols=min(4, len(handles)))
  return figure


def corruption_curves(
  curves: Mapping[str, Mapping[str, Sequence[float]]],
  *,
  budget: float,
  title: str = '',
) -> Figure:
  """Draws, for each corruption, accuracy above and mean compute below.

  Args:
    curves: by the corruption's name `adaptive` and `dense`, accuracies, and
      `load`, the mean share of all learners' cost; one number for each
      severity, the first of them of clean images; all from 0 to 1.
    budget: the share that the model was trained for.
    title: says what is seen; a general one if empty.
  """
  columns = max(1, len(curves))
  figure, body = style.new_figure(
    *(max(6.0, 0.9 + 2.1 * columns), 4.2),
    title or 'How corrupted images are classified',
    'Severity 0 is the clean image. Compute is the share of all learners; the'
    ' dotted line is the budget.',
  )
  if not curves:
    style.say(body.subplots(), 'No corruption measured yet')
    return figure
  grid = body.subplots(2, columns, sharex=True, sharey='row', squeeze=False)
  for (above, below), (kind, curve) in zip(grid.T, curves.items(), strict=True):
    for axes, name, label, color, marker, ls in (
      (above, 'adaptive', 'adaptive model', style.CHOSEN, 'o', '-'),
      (above, 'dense', 'dense model', '#000000', 's', '--'),
      (below, 'load', 'compute', '#E69F00', 'D', '-'),
    ):
      look = {'label': label, 'color': color, 'marker': marker, 'ls': ls}
      severities = range(len(curve[name]))
      axes.plot(severities, curve[name], ms=4, gid=name, **look)
    dotted = {'color': style.MUTED, 'ls': ':', 'lw': 1}
    below.axhline(budget, label='budget', gid='budget', **dotted)
    style.clean(above)
    style.clean(below)
    style.heading(above, style.shortened(kind, 24))
    below.set_xlabel('severity')
    below.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  above, below = grid[:, 0]
  above.set(ylabel='accuracy', ylim=(0, 1.04))
  below.set(ylabel='compute')
  below.margins(y=0.15)
  _widen(below)
  for axes in (above, below):
    axes.yaxis.set_major_formatter(style.percent)
  style.key(body, above.lines + below.lines)
  return figure


def _read(records) -> dict[tuple[str, str], np.ndarray]:
  """Returns steps and values, [2, S], by kind of record and name of number.

  What is not finite is left out; of two records of a step the later counts.
  """
  points = {}
  for record in records:
    numbers_ = {
      str(name): float(value)
      for name, value in record.items()
      if isinstance(value, numbers.Real) and np.isfinite(value)
    }
    step = numbers_.pop('step', None)
    for name, value in numbers_.items() if step is not None else ():
      points.setdefault((record.get('kind'), name), {})[step] = value
  return {key: np.array(sorted(p.items())).T for key, p in points.items()}


def _by_rule(series, name) -> dict[str, np.ndarray]:
  """Returns held-out series of a name by rule, in the order of the table."""
  rules = {
    key.removesuffix(name).rstrip('/'): value_2S
    for (kind, key), value_2S in series.items()
    if kind == 'eval' and f'/{key}'.endswith(f'/{name}')
  }
  return {rule: rules[rule] for rule in sorted(rules, key=_order)}


def _order(rule):
  rules = ['', *style.RULES]
  return rules.index(rule) if rule in rules else len(rules), rule


def _label(rule, classifier) -> str:
  if not classifier:
    return f'held-out, {style.rule_style(rule).label}'
  if rule == 'never':
    return 'routed blocks left out'
  return f'held-out, {rule}' if rule else 'held-out'


def _smooth(value_T):
  """Returns centred moving averages; the window shrinks towards the ends."""
  half = len(value_T) // 60
  total = np.concatenate([[0], np.cumsum(value_T)])
  index = np.arange(len(value_T))
  # As far to the left as to the right, so that a slope moves no end.
  reach = np.minimum(half, np.minimum(index, len(value_T) - 1 - index))
  # At the very end a window of one point would be the noise itself.
  low = np.where(index + half >= len(value_T), index - half, index - reach)
  low = np.maximum(low, 0)
  high = index + reach
  return (total[high + 1] - total[low]) / (high + 1 - low)


def _draw_train(axes, step_S, value_S):
  """Draws all values, and over them their average; one alone as a point."""
  marker = 'o' if len(step_S) == 1 else None
  look = {'color': _TRAIN, 'lw': 0.7, 'alpha': 0.45, 'marker': marker}
  axes.plot(step_S, value_S, gid='train', **look)
  smooth_S = _smooth(value_S)
  label = f'training  {smooth_S[-1]:.3f}'
  axes.plot(step_S, smooth_S, label=label, gid='train_smooth', **_SMOOTH)


def _draw_rule(axes, rule, step_S, value_S, label, name):
  look = style.rule_style(rule)
  look = {'color': look.color, 'marker': look.marker, 'lw': 1.3, 'ms': 4.5}
  look |= {'markerfacecolor': 'white', 'markeredgewidth': 1.2}
  axes.plot(step_S, value_S, label=label, gid=f'{rule}/{name}', **look)


def _draw_losses(axes, train, held_out, classifier):
  if train is not None:
    _draw_train(axes, *train)
  for rule, (step_S, loss_S) in held_out.items():
    label = f'{_label(rule, classifier)}  {loss_S[-1]:.3f}'
    _draw_rule(axes, rule, step_S, loss_S, label, 'loss')
  axes.set_ylabel(f'loss (nats per {"image" if classifier else "token"})')
  _steps(axes)
  low, high = _limits(train, held_out)
  axes.set_ylim(low, high)
  series = [*held_out.values()] + ([] if train is None else [train])
  step_S, loss_S = max(series, key=lambda step_value: step_value[1].max())
  if loss_S.max() > high:
    # Beside the line that leaves the frame there, not over it.
    peak = loss_S.argmax()
    axes.annotate(
      f'↑ up to {loss_S.max():.2f}',
      (step_S[peak + np.argmax(loss_S[peak:] <= high)], 1),
      xycoords=axes.get_xaxis_transform(),
      xytext=(6, -3),
      textcoords='offset points',
      va='top',
      fontsize=8,
      color=style.MUTED,
      gid='beyond',
    )
  _legend(axes)


def _limits(train, held_out):
  """Returns y-limits that neither the first steps nor odd batches stretch."""
  series = [*held_out.values()] + ([] if train is None else [train])
  all_2N = np.concatenate(series, axis=1)
  start = all_2N[0].min() + 0.08 * np.ptp(all_2N[0])
  settled = [value_S[step_S >= start] for step_S, value_S in series]
  if train is not None and len(train[1]) < _FEW:
    settled[-1] = train[1]
  elif train is not None and settled[-1].size:
    # Not interpolated, which would be towards the odd one.
    high = np.quantile(settled[-1], 0.99, method='lower')
    settled[-1] = settled[-1][settled[-1] <= high]
  settled, most = np.concatenate(settled), all_2N[1].max()
  low, high = settled.min(), settled.max()
  pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
  # Too little to leave anything out.
  high = most if most < high + 0.5 * (high - low) else high
  return low - pad, high + pad


def _draw_accuracy(axes, accuracy, never, classifier):
  for rule, (step_S, value_S) in accuracy.items():
    name = _label(rule, True) if classifier else style.rule_style(rule).label
    label = f'{name}  {value_S[-1]:.1%}'
    _draw_rule(axes, rule, step_S, value_S, label, 'accuracy')
  # The baseline depends on what top-k chose: usually it is one for all rules.
  same = len({baseline.tobytes() for baseline in never.values()}) == 1
  for rule, (step_S, value_S) in list(never.items())[: 1 if same else None]:
    label = 'never route' if same else f'never route, {rule}'
    axes.plot(
      *(step_S, value_S),
      color=style.MUTED if same else style.rule_style(rule).color,
      ls='--',
      lw=1.2,
      marker='_' if len(step_S) == 1 else None,
      ms=14,
      label=f'{label}  {value_S[-1]:.1%}',
      gid=f'{rule}/never_route',
    )
  axes.set_ylabel(
    'held-out accuracy' if classifier else 'decisions that agree with top-k'
  )
  _steps(axes)
  shown = np.concatenate([v for _, v in (*accuracy.values(), *never.values())])
  room = 0.1 * (1 - shown.min()) or 0.05
  axes.set_ylim(shown.min() - room, max(1.0, shown.max()))
  axes.yaxis.set_major_formatter(style.percent)
  _legend(axes)


def _legend(axes):
  """Says what is drawn, above the panel, where it hides no line."""
  handles, _ = axes.get_legend_handles_labels()
  style.key(axes, handles, 'lower left', bbox_to_anchor=(0, 1), ncols=2)


def _widen(axes):
  """Gives a single step some room: matplotlib would mark fractions of it."""
  low, high = axes.get_xlim()
  if high - low < 2:
    axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)


def _steps(axes, ticks=6):
  style.clean(axes, 'y')
  axes.set_xlabel('training step')
  axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
  axes.xaxis.set_major_formatter('{x:,.0f}')
