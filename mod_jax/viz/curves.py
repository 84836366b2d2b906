"""Numbers over the steps of a run, and over the severity of corruptions.

Records are the lines of `metrics.jsonl`, of kind `train` or `eval`, each with a
`step` and numbers by name; for held-out data also by `RULE/NAME`. Numbers that
are missing or not finite are skipped. Of two records of the same step, as after
a resumption, the later one counts. Arrays of S steps and values are [2, S].
"""

from collections.abc import Iterable, Mapping, Sequence
import numbers

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
import numpy as np

from mod_jax.viz import style

_SMOOTH = {'color': '#8A8A8A', 'lw': 1.6}
_REFERENCE = {'color': style.INK, 'ls': '--', 'lw': 1}
_FEW = 10  # If there are fewer training losses, the y-limits include them all.
# For each metric of experts: heading, description, and its value at balance.
_OF_EXPERTS = {
  'busiest': ('Busiest expert', 'its tokens over the mean of all', 1.0),
  'null': ('No-ops', 'choices that do nothing', None),
  'dropped': ('Dropped', 'choices of experts without a free slot', None),
  'balance': ('Balance loss', '1: choices are as they should be', 1.0),
}
_OF_CORRUPTIONS = (
  ('adaptive', 'adaptive model', style.CHOSEN, 'o', '-'),
  ('dense', 'dense model', '#000000', 's', '--'),
  ('load', 'compute', '#E69F00', 'D', '-'),
)


def loss_curves(
  records: Iterable[Mapping],
  *,
  title: str = 'Training and held-out loss',
  classifier: str = '',
  unit: str = '',
) -> Figure:
  """Draws training and held-out losses over the steps of a run.

  If the records have `RULE/accuracy` and `RULE/never_route`, a second panel
  shows how often each causal rule decides as top-k would, and the trivial
  baseline of never routing. For a classifier, the panel shows the metric that
  `classifier` names, accuracy or mAP. Losses are in nats per `unit`; '' leaves
  out the unit.
  """
  series = _read(records)
  train, losses = series.get(('train', 'loss')), _by_rule(series, 'loss')
  accuracy = _by_rule(series, classifier or 'accuracy')
  never = _by_rule(series, 'never_route')
  if not classifier:
    accuracy.pop('', None)  # Not of a rule.
    never.pop('', None)
  drawn = [*losses.values()] + ([] if train is None else [train])
  body, panels = style.panels(
    title,
    'Grey: training batches, smoothed. Markers: held-out data. Numbers: the'
    ' last values.',
    (1 + bool(accuracy)) if drawn else 0,
    lines=20 + len(losses),
    sharex=True,
    grid='y',
  )
  figure = body.get_figure(root=True)
  if not drawn:
    return figure
  axes = panels[0]
  if train is not None:
    _draw_train(axes, train)
  for rule, loss_2S in losses.items():
    label = f'{_label(rule, classifier)}  {loss_2S[1, -1]:.3f}'
    _draw_rule(axes, rule, loss_2S, label, 'loss')
  axes.set_ylabel(f'loss (nats per {unit})' if unit else 'loss')
  low, high = _limits(drawn, train)
  axes.set_ylim(low, high)
  step_S, loss_S = max(drawn, key=lambda loss_2S: loss_2S[1].max())
  if loss_S.max() > high:
    peak = loss_S.argmax()
    axes.annotate(
      f'↑ up to {loss_S.max():.2f}',
      # At the step where the loss comes back into the frame, so that the text
      # is beside the line.
      (step_S[peak + np.argmax(loss_S[peak:] <= high)], 1),
      xycoords=axes.get_xaxis_transform(),
      xytext=(6, -3),
      textcoords='offset points',
      va='top',
      fontsize=8,
      color=style.MUTED,
      gid='beyond',
    )
  if accuracy:
    _draw_accuracy(panels[1], accuracy, never, classifier)
  for axes in panels:
    _steps(axes)
    handles, _ = axes.get_legend_handles_labels()
    # Draw the legend above the panel, where it hides no line.
    style.key(axes, handles, 'lower left', bbox_to_anchor=(0, 1), ncols=2)
  _widen(panels[0])
  return figure


def compared_curves(runs: Iterable[Mapping], *, title: str = '') -> Figure:
  """Draws the losses of several runs over steps, training FLOPs and time.

  A run has a `name`; `records`; `flops_S`, training FLOPs up to each step; and
  `seconds_per_step`, None if unknown. Held-out losses of routed models are
  those under top-k.
  """
  runs = list(runs)
  body, panels = style.panels(
    title or 'Losses of several runs',
    'Lines: training loss, smoothed. Markers: held-out loss. Time: at the mean'
    ' rate of the run, which the legend has.',
    3,
    grid='both',
    sharey=True,
    ylabel='loss',
  )
  handles, lows, highs = [], [], []
  for i, run in enumerate(runs):
    look, seconds = style.series_look(i), run['seconds_per_step']
    series = _read(run['records'])
    held_out = _by_rule(series, 'loss')
    line = {'color': look['color'], 'lw': 1.1, 'alpha': 0.8, 'gid': 'train'}
    for loss_2S, how in (
      (series.get(('train', 'loss')), line),
      (
        held_out.get('top_k', held_out.get('')),
        look | {'ls': '', 'ms': 5, 'gid': 'held-out'},
      ),
    ):
      if loss_2S is None:
        continue
      step_S, value_S = loss_2S
      smooth_S = _smooth(value_S)
      spent_S = run['flops_S'][step_S.astype(int)]
      hours_S = step_S * (seconds or np.nan) / 3600
      for axes, x_S in zip(panels, (step_S, spent_S, hours_S), strict=True):
        axes.plot(x_S, smooth_S if how is line else value_S, **how)
      lows.append(smooth_S.min())
      # Leave out the first, much higher losses, which would hide all others.
      highs.append(np.quantile(smooth_S, 0.85))
    rate = f', {1 / seconds:.3g} steps/s' if seconds else ''
    name = f'{style.shortened(run["name"])}{rate}'
    handles.append(Line2D([], [], lw=1.4, ms=5, label=name, **look))
  names = ('step', 'training FLOPs', 'hours')
  for axes, name in zip(panels, names, strict=True):
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.get_offset_text().set(size=8, color=style.MUTED)
  if not any(run['seconds_per_step'] for run in runs):
    style.say(panels[2], 'No times recorded')
  if lows:
    margin = 0.05 * (max(highs) - min(lows)) or 0.1
    panels[0].set_ylim(min(lows) - margin, max(highs) + margin)
  longest = max((len(handle.get_label()) for handle in handles), default=1)
  style.key(body, handles, ncols=max(1, min(3, 150 // longest)))
  return body.get_figure(root=True)


def expert_curves(
  records: Iterable[Mapping],
  *,
  null_target: float | None = None,
  title: str = 'How evenly experts are chosen, over training',
) -> Figure:
  """Draws over the steps of a run how evenly its experts were chosen.

  There is a panel for each of the metrics `experts/busiest`, `null`, `dropped`
  and `balance` that is above 0 at any step. `null_target` is the share of the
  choices that should do nothing; None if there are no such choices.
  """
  series = _read(records)
  drawn, zero, rules = {}, [], {}
  for name, (heading, _, _) in _OF_EXPERTS.items():
    train = series.get(('train', f'experts/{name}'))
    held_out = _by_rule(series, f'experts/{name}')
    # The rule `never` leaves out routed blocks, and so their experts.
    held_out.pop('never', None)
    both = [*held_out.values()] + ([] if train is None else [train])
    if any(value_S.max() > 0 for _, value_S in both):
      drawn[name] = train, held_out
    elif both:
      zero.append(heading.lower())
  subtitle = 'Grey: training batches, smoothed. Markers: held-out data.'
  if zero:
    subtitle += f' Not drawn, since 0 throughout: {", ".join(zero)}.'
  body, panels = style.panels(
    title, subtitle, len(drawn), grid='y', sharex=True
  )
  for axes, (name, (train, held_out)) in zip(
    panels, drawn.items(), strict=True
  ):
    heading, facts, reference = _OF_EXPERTS[name]
    reference = null_target if name == 'null' else reference
    if reference is not None:
      axes.axhline(reference, gid='reference', **_REFERENCE)
    if train is not None:
      _draw_train(axes, train)
    for rule, value_2S in held_out.items():
      label = _label(rule, False) if rule else 'held-out'
      _draw_rule(axes, rule, value_2S, label, name)
      rules[rule] = axes.lines[-1]
    _steps(axes, 4)
    style.heading(axes, heading, facts)
    if name in ('null', 'dropped'):
      # Leave room for a marker at 0.
      axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
      axes.yaxis.set_major_formatter(style.percent)
    _widen(axes)
  handles = [
    Line2D([], [], label='training', **_SMOOTH),
    *(rules[rule] for rule in sorted(rules, key=_order)),
    Line2D([], [], label='as it should be', **_REFERENCE),
  ]
  style.key(body, handles, ncols=min(4, len(handles)))
  return body.get_figure(root=True)


def corruption_curves(
  curves: Mapping[str, Mapping[str, Sequence[float]]],
  *,
  budget: float,
  title: str = 'How corrupted images are classified',
) -> Figure:
  """Draws, for each corruption, accuracy above and mean compute below.

  `curves` has for each corruption three sequences, with a number for each
  severity from 0, the clean images: the accuracies `adaptive` and `dense`, and
  `load`, the mean share of the cost of all learners. `budget` is the share that
  the model was trained for.
  """
  columns = len(curves)
  body, panels = style.panels(
    title,
    'Severity 0 is the clean image. Compute is the share of all learners; the'
    ' dotted line is the budget.',
    2 * columns,
    columns=columns,
    sharex=True,
    sharey='row',
    xlabel='severity',
  )
  above, below = panels[:columns], panels[columns:]
  for i, (kind, curve) in enumerate(curves.items()):
    for name, label, color, marker, ls in _OF_CORRUPTIONS:
      look = {'label': label, 'color': color, 'marker': marker, 'ls': ls}
      axes = (below if name == 'load' else above)[i]
      axes.plot(curve[name], ms=4, gid=name, **look)
    dotted = {'color': style.MUTED, 'ls': ':', 'lw': 1}
    below[i].axhline(budget, label='budget', gid='budget', **dotted)
    style.heading(above[i], style.shortened(kind, 24))
    below[i].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _widen(below[i])
  above[0].set(ylabel='accuracy', ylim=(0, 1.04))
  below[0].set_ylabel('compute')
  below[0].margins(y=0.15)
  for axes in (above[0], below[0]):
    axes.yaxis.set_major_formatter(style.percent)
  style.key(body, above[0].lines + below[0].lines)
  return body.get_figure(root=True)


def _read(records) -> dict[tuple[str, str], np.ndarray]:
  """Returns steps and values, [2, S], by (kind of record, name of number)."""
  points = {}
  for record in records:
    values = {
      str(name): float(value)
      for name, value in record.items()
      if isinstance(value, numbers.Real) and np.isfinite(value)
    }
    step = values.pop('step', None)
    for name, value in values.items() if step is not None else ():
      points.setdefault((record.get('kind'), name), {})[step] = value
  return {key: np.array(sorted(p.items())).T for key, p in points.items()}


def _by_rule(series, name) -> dict[str, np.ndarray]:
  """Returns a number's held-out series by rule, in the order of `RULES`."""
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
  """Returns centred moving averages; values are reflected at both ends."""
  half = len(value_T) // 60
  window = np.full(2 * half + 1, 1 / (2 * half + 1))
  return np.convolve(np.pad(value_T, half, 'reflect'), window, 'valid')


def _draw_train(axes, value_2S):
  """Draws values and their moving average; a single value as a point."""
  step_S, value_S = value_2S
  marker = 'o' if len(step_S) == 1 else None
  look = {'color': _SMOOTH['color'], 'lw': 0.7, 'alpha': 0.45}
  axes.plot(step_S, value_S, marker=marker, gid='train', **look)
  smooth_S = _smooth(value_S)
  label = f'training  {smooth_S[-1]:.3f}'
  axes.plot(step_S, smooth_S, label=label, **_SMOOTH)


def _draw_rule(axes, rule, value_2S, label, name):
  look = style.rule_style(rule)
  look = {'color': look.color, 'marker': look.marker, 'lw': 1.3, 'ms': 4.5}
  look |= {'markerfacecolor': 'white', 'markeredgewidth': 1.2}
  axes.plot(*value_2S, label=label, gid=f'{rule}/{name}', **look)


def _limits(drawn, train):
  """Returns y-limits without the high losses of first steps and odd batches."""
  all_2N = np.concatenate(drawn, axis=1)
  start = all_2N[0].min() + 0.08 * np.ptp(all_2N[0])
  settled = [value_S[step_S >= start] for step_S, value_S in drawn]
  # The last of `drawn` is `train`, if that is not None.
  if train is not None and len(train[1]) < _FEW:
    settled[-1] = train[1]
  elif train is not None and settled[-1].size:
    # Do not interpolate, which would be towards an odd batch's loss.
    high = np.quantile(settled[-1], 0.99, method='lower')
    settled[-1] = settled[-1][settled[-1] <= high]
  settled, most = np.concatenate(settled), all_2N[1].max()
  low, high = settled.min(), settled.max()
  pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
  # If little would be left out, leave out nothing.
  high = most if most < high + 0.5 * (high - low) else high
  return low - pad, high + pad


def _draw_accuracy(axes, accuracy, never, classifier):
  for rule, value_2S in accuracy.items():
    name = _label(rule, True) if classifier else style.rule_style(rule).label
    label = f'{name}  {value_2S[1, -1]:.1%}'
    _draw_rule(axes, rule, value_2S, label, 'accuracy')
  # The baseline depends only on what top-k chose: usually all rules share it.
  same = len({baseline.tobytes() for baseline in never.values()}) == 1
  for rule, value_2S in list(never.items())[: 1 if same else None]:
    label = 'never route' if same else f'never route, {rule}'
    axes.plot(
      *value_2S,
      color=style.MUTED if same else style.rule_style(rule).color,
      ls='--',
      lw=1.2,
      marker='_' if value_2S.shape[1] == 1 else None,
      ms=14,
      label=f'{label}  {value_2S[1, -1]:.1%}',
      gid=f'{rule}/never_route',
    )
  axes.set_ylabel(
    f'held-out {classifier}'
    if classifier
    else 'decisions that agree with top-k'
  )
  shown = np.concatenate([v for _, v in (*accuracy.values(), *never.values())])
  room = 0.1 * (1 - shown.min()) or 0.05
  axes.set_ylim(shown.min() - room, max(1.0, shown.max()))
  axes.yaxis.set_major_formatter(style.percent)


def _widen(axes):
  """Widens a short x-axis: matplotlib would put ticks at fractions of steps."""
  low, high = axes.get_xlim()
  if high - low < 2:
    axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)


def _steps(axes, ticks=6):
  axes.set_xlabel('training step')
  style.ticks(axes.xaxis, ticks, '{x:,.0f}', integer=True)
