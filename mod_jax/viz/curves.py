"""Losses over a run, and how well the causal rules agree with top-k."""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import numbers

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.viz import style

_TRAIN = '#8A8A8A'
_FEW = 10  # Fewer training losses than this are all shown.


@dataclasses.dataclass(frozen=True)
class _Words:
  """What the axes and series of a figure are called."""

  unit: str
  accuracy: str
  rules: bool  # Whether series are causal rules.


_TOKENS = _Words('nats per token', 'decisions that agree with top-k', True)
_IMAGES = _Words('nats per image', 'held-out accuracy', False)
_WITHOUT = {'never': 'routed blocks left out'}


def loss_curves(
  records: Iterable[Mapping], *, title: str = '', classifier: bool = False
) -> Figure:
  """Draws training and held-out losses over the steps of a run.

  A second panel shows how often each causal rule decides as top-k would, with
  the trivial baseline of never routing, where the records tell.

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
  train, held_out, accuracy, never = _read(records, classifier)
  words = _IMAGES if classifier else _TOKENS
  title = title or 'Training and held-out loss'
  panels = 2 if accuracy else 1
  width = 10.5 if panels == 2 else 7.5
  series = max(1 + len(held_out), len(accuracy) + len(never))
  figure, body = style.new_figure(
    width,
    4.2 + 0.1 * series,  # With room for the legends, two series on a line.
    title,
    _summary(train, held_out, words),
  )
  axes = body.subplots(
    1, panels, squeeze=False, width_ratios=(1.35, 1)[:panels], sharex=True
  )[0]
  _draw_losses(axes[0], train, held_out, words)
  if accuracy:
    _draw_accuracy(axes[1], accuracy, never, words)
  _widen(axes[0])
  return figure


def compared_curves(runs: Iterable[Mapping], *, title: str = '') -> Figure:
  """Draws the losses of several runs over steps, training FLOPs and time.

  Args:
    runs: of each `name`; `records`, as in `loss_curves`; `flops_S`, training
      FLOPs up to each step; and `seconds_per_step`, None where nobody knows.
      Lines are training losses, smoothed; markers are held-out losses, those of
      top-k where there are rules.
    title: says what is seen; a general one if empty.
  """
  runs = list(runs)
  figure, body = style.new_figure(
    12,
    4.6,
    title or 'Losses of several runs',
    'Lines: training loss, smoothed. Markers: held-out loss. Time: at the mean'
    ' rate of the run, which the legend tells.',
  )
  panels = body.subplots(1, 3, sharey=True)
  scales = {
    'step': lambda run, step_S: step_S,
    'training FLOPs': lambda run, step_S: run['flops_S'][step_S.astype(int)],
    'hours': lambda run, step_S: (
      step_S * (run['seconds_per_step'] or np.nan) / 3600
    ),
  }
  handles, lows, highs = [], [], []
  for i, run in enumerate(runs):
    train, held_out, _, _ = _read(run['records'], False)
    held_out = held_out.get('top_k', held_out.get(''))
    color = style.SERIES_COLORS[i % len(style.SERIES_COLORS)]
    marker = style.SERIES_MARKERS[i % len(style.SERIES_MARKERS)]
    look = {'color': color, 'marker': marker, 'markerfacecolor': 'white'}
    for axes, scale in zip(panels, scales.values(), strict=True):
      if train is not None:
        axes.plot(
          scale(run, train[0]),
          _smooth(train[1]),
          color=color,
          lw=1.1,
          alpha=0.8,
          gid='train',
        )
      if held_out is not None:
        axes.plot(
          scale(run, held_out[0]),
          held_out[1],
          ls='',
          ms=5,
          gid='held-out',
          **look,
        )
    series = [_smooth(s[1]) for s in (train, held_out) if s is not None]
    lows += [values.min() for values in series]
    # The first steps fall so far that nothing else would be seen.
    highs += [np.quantile(values, 0.85) for values in series]
    rate = run['seconds_per_step']
    said = f', {1 / rate:.3g} steps/s' if rate else ''
    name = f'{style.shortened(run["name"])}{said}'
    handles.append(Line2D([], [], lw=1.4, ms=5, label=name, **look))
  for axes, name in zip(panels, scales, strict=True):
    style.clean(axes)
    axes.set_xlabel(name)
    axes.grid(color='#EEEEEE', lw=0.8)
    axes.set_axisbelow(True)
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
  style.key(body, handles, ncols=min(3, len(handles)))
  return figure


# Of each metric of experts: heading, what it is, and where it is at balance.
_OF_EXPERTS = {
  'busiest': ('Busiest expert', 'its tokens over the mean of all', 1.0),
  'null': ('No-ops', 'choices that do nothing', None),
  'dropped': ('Dropped', 'choices of experts that found no slot', None),
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
  train, held_out = _read_experts(records)
  references = {name: value for name, (_, _, value) in _OF_EXPERTS.items()}
  references['null'] = null_target
  series = {
    name: [s for s in (train.get(name), *held_out[name].values()) if s]
    for name in _OF_EXPERTS
  }
  shown = [
    name
    for name in _OF_EXPERTS
    if any(max(values) > 0 for _, values in series[name])
  ]
  idle = [
    _OF_EXPERTS[name][0].lower()
    for name in _OF_EXPERTS
    if series[name] and name not in shown
  ]
  subtitle = 'Grey: training batches, smoothed. Markers: held-out data.'
  if idle:
    subtitle += f' Not drawn, since 0 throughout: {", ".join(idle)}.'
  figure, body = style.new_figure(
    max(7.5, 3.2 * len(shown)),
    3.4,
    title or 'How evenly experts are chosen, over training',
    subtitle,
  )
  if not shown:
    style.say(body.subplots(), 'Nothing recorded yet')
    return figure
  rules = {}
  panels = body.subplots(1, len(shown), squeeze=False, sharex=True)[0]
  for axes, name in zip(panels, shown, strict=True):
    if (reference := references[name]) is not None:
      axes.axhline(reference, color=style.INK, ls='--', lw=1, gid='reference')
    if name in train:
      steps, values = train[name]
      look = {'marker': 'o' if len(steps) == 1 else None, 'gid': 'train'}
      axes.plot(steps, values, color=_TRAIN, lw=0.7, alpha=0.45, **look)
      smooth = _smooth(np.array(values))
      axes.plot(steps, smooth, lw=1.6, color=_TRAIN, gid='train_smooth')
    for rule, (steps, values) in held_out[name].items():
      label = _label(rule, _TOKENS) if rule else 'held-out'
      _draw_rule(axes, rule, steps, values, label, name)
      rules[rule] = axes.lines[-1]
    style.clean(axes)
    _steps(axes)
    heading, facts, _ = _OF_EXPERTS[name]
    style.heading(axes, heading, facts)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if name in _SHARES:
      # With room for a marker at 0.
      axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
      axes.yaxis.set_major_formatter(style.percent)
  _widen(panels[0])
  handles = [
    Line2D([], [], color=_TRAIN, lw=1.6, label='training'),
    *(rules[rule] for rule in sorted(rules, key=_order)),
    Line2D([], [], color=style.INK, ls='--', lw=1, label='as it should be'),
  ]
  style.key(body, handles, ncols=min(4, len(handles)))
  return figure


def _read_experts(records):
  """Returns (steps, values) by metric; of held-out data by metric and rule."""
  train, held_out = {}, {name: {} for name in _OF_EXPERTS}
  for record in records:
    step = _number(record.get('step'))
    if step is None:
      continue
    for key, value in record.items():
      prefix, found, name = str(key).rpartition('experts/')
      rule = prefix.rstrip('/')
      # Without routed blocks there is nothing to judge.
      if not found or name not in _OF_EXPERTS or rule == 'never':
        continue
      if record.get('kind') == 'train':
        _put(train, name, step, value)
      elif record.get('kind') == 'eval':
        _put(held_out[name], rule, step, value)

  def ordered(points):
    return tuple(zip(*sorted(points.items()), strict=True))

  return (
    {name: ordered(points) for name, points in train.items()},
    {
      name: {rule: ordered(rules[rule]) for rule in sorted(rules, key=_order)}
      for name, rules in held_out.items()
    },
  )


def _read(records, classifier):
  """Sorts the numbers of the records into series of (steps, values)."""
  train, held_out, accuracy, never = {}, {}, {}, {}
  for record in records:
    step = _number(record.get('step'))
    if step is None:
      continue
    if record.get('kind') == 'train':
      _put(train, '', step, record.get('loss'))
    elif record.get('kind') == 'eval':
      for key, value in record.items():
        rule, _, name = str(key).rpartition('/')
        for series, wanted in (
          (held_out, 'loss'),
          (accuracy, 'accuracy'),
          (never, 'never_route'),
        ):
          # A plain accuracy is a classifier's, not a rule's.
          if name == wanted and (rule or classifier or wanted == 'loss'):
            _put(series, rule, step, value)
  arrays = [
    {
      rule: np.array(sorted(points.items())).T
      for rule, points in sorted(series.items(), key=lambda i: _order(i[0]))
    }
    for series in (train, held_out, accuracy, never)
  ]
  return arrays[0].get(''), *arrays[1:]


def _put(series, rule, step, value):
  value = _number(value)
  if value is not None:
    series.setdefault(rule, {})[step] = value


def _number(value):
  """Returns a finite float, or None for anything else."""
  if not isinstance(value, numbers.Real) or not np.isfinite(value):
    return None
  return float(value)


def _order(rule):
  if not rule:
    return -1, rule
  known = list(style.RULES)
  return (known.index(rule) if rule in known else len(known), rule)


def _label(rule, words) -> str:
  """Returns what a series is called, `held-out` included."""
  if not words.rules:
    return 'held-out' if not rule else _WITHOUT.get(rule, f'held-out, {rule}')
  return f'held-out, {style.rule_style(rule).label}'


def _summary(train, held_out, words) -> str:
  if train is None and not held_out:
    return 'No losses have been recorded yet.'
  parts = []
  if train is not None:
    steps, losses = train
    parts.append(
      f'training loss {_smooth(losses)[-1]:.3f} at step {steps[-1]:,.0f}'
    )
  if held_out:
    rule, (steps, values) = next(iter(held_out.items()))
    of = f' ({style.rule_style(rule).label})' if words.rules else ''
    parts.append(f'held-out loss {values[-1]:.3f}{of} at step {steps[-1]:,.0f}')
  text = '; '.join(parts) + f' ({words.unit}).'
  return text[0].upper() + text[1:]


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


def _draw_losses(axes, train, held_out, words):
  axes.set_ylabel(f'loss ({words.unit})')
  if train is None and not held_out:
    style.say(axes, 'No losses recorded yet')
    return
  if train is not None:
    steps, losses = train
    alone = len(steps) == 1
    axes.plot(
      steps,
      losses,
      color=_TRAIN,
      lw=0.7,
      alpha=0.45,
      marker='o' if alone else None,
      gid='train',
    )
    smooth = _smooth(losses)
    axes.plot(
      steps,
      smooth,
      color=_TRAIN,
      lw=1.6,
      label=f'training  {smooth[-1]:.3f}',
      gid='train_smooth',
    )
  for rule, (steps, losses) in held_out.items():
    name = f'{_label(rule, words)}  {losses[-1]:.3f}'
    _draw_rule(axes, rule, steps, losses, name, 'loss')
  style.clean(axes)
  _steps(axes)
  series = [s for s in (train, *held_out.values()) if s is not None]
  low, high, most = _limits(train, held_out)
  axes.set_ylim(low, high)
  if most > high:
    # Beside the line that leaves the frame there, not over it.
    steps, losses = next(s for s in series if s[1].max() == most)
    peak = losses.argmax()
    back = peak + np.argmax(losses[peak:] <= high)
    axes.annotate(
      f'↑ up to {most:.2f}',
      (steps[back], 1),
      xycoords=axes.get_xaxis_transform(),
      xytext=(6, -3),
      textcoords='offset points',
      va='top',
      fontsize=8,
      color=style.MUTED,
      gid='beyond',
    )
  _legend(axes)
  if sum(len(steps) for steps, _ in series) == 1:
    axes.text(
      0.5,
      0.06,
      'Only one record so far',
      transform=axes.transAxes,
      ha='center',
      color=style.MUTED,
      fontsize=9,
      gid='note',
    )


def _draw_rule(axes, rule, steps, values, label, gid):
  look = style.rule_style(rule)
  axes.plot(
    steps,
    values,
    color=look.color,
    marker=look.marker,
    ms=4.5,
    lw=1.3,
    markerfacecolor='white',
    markeredgewidth=1.2,
    label=label,
    gid=f'{rule}/{gid}',
  )


def _limits(train, held_out):
  """Returns y-limits that the first steps do not stretch, and the maximum."""
  series = ([] if train is None else [train]) + list(held_out.values())
  first = min(steps[0] for steps, _ in series)
  last = max(steps[-1] for steps, _ in series)
  settled = []
  for i, (steps, values) in enumerate(series):
    late = values[steps >= first + 0.08 * (last - first)]
    if i == 0 and train is not None:
      if len(values) < _FEW:
        late = values
      elif late.size:
        # One odd batch is no reason to shrink everything else. No interpolation
        # towards it either.
        high = np.quantile(late, 0.99, method='lower')
        late = late[late <= high]
    settled.append(late)
  settled = np.concatenate(settled)
  low, high = settled.min(), settled.max()
  pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
  most = max(values.max() for _, values in series)
  if most < high + 0.5 * (high - low):
    high = most  # Too little to leave anything out.
  return low - pad, high + pad, most


def _draw_accuracy(axes, accuracy, never, words):
  for rule, (steps, values) in accuracy.items():
    name = style.rule_style(rule).label if words.rules else _label(rule, words)
    name = f'{name}  {values[-1]:.1%}'
    _draw_rule(axes, rule, steps, values, name, 'accuracy')
  # The baseline is a property of what top-k chose: usually one for all rules.
  same = len({baseline.tobytes() for baseline in never.values()}) == 1
  for rule, (steps, values) in never.items():
    alone = len(steps) == 1
    label = 'never route' if same else f'never route, {rule}'
    axes.plot(
      steps,
      values,
      color=style.MUTED if same else style.rule_style(rule).color,
      ls='--',
      lw=1.2,
      marker='_' if alone else None,
      ms=14,
      label=f'{label}  {values[-1]:.1%}',
      gid=f'{rule}/never_route',
    )
    if same:
      break
  axes.set_ylabel(words.accuracy)
  style.clean(axes)
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


def _steps(axes):
  axes.set_xlabel('training step')
  axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  axes.xaxis.set_major_formatter('{x:,.0f}')
  axes.grid(axis='y', color='#EEEEEE', lw=0.8)
  axes.set_axisbelow(True)
