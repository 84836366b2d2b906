"""Evaluates a sweep: the best model at each budget, with error bars.

Writes `fit.json`, `isoflop.csv` (a line per run), and the pictures
`isoflop.png` (Figure 4 of Raposo et al. 2024), `variants.png` (if some groups
have one budget only) and `curves.png` (the losses of each group's best run at
the highest budget over steps, training FLOPs and time).
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from absl import flags
import numpy as np

from mod_jax import tables, viz
from mod_jax.errors import UserError
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import compare, manifest, optimum
from mod_jax.sweeps import run as run_lib
from mod_jax.sweeps.manifest import Entry
from mod_jax.sweeps.optimum import NoMinimumError

_METHODS = ('parabola', 'joint', 'mean')
# Degrees of freedom needed to estimate the noise from the runs of one budget
# alone.
_FREEDOM = 10

Results = Sequence[tuple[Entry, Mapping[str, Any]]]  # As from `run.results`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """The I runs of a group at a budget, without those that diverged."""

  group: str
  budget: float  # Training FLOPs of each run.
  params_I: np.ndarray  # Parameters of each run's model, in ascending order.
  tokens_I: np.ndarray  # Training tokens of each run.
  forward_I: np.ndarray  # FLOPs of a forward pass over one sequence.
  loss_I: np.ndarray  # Held-out loss at the end of each run.
  diverged: int = 0  # Number of runs that diverged.
  equal: bool = True  # Whether all runs have spent the budget.

  def means(self) -> list[tuple[float, float]]:
    """Returns parameters and mean loss of each size, the smallest first."""
    return [
      (float(size), float(self.loss_I[self.params_I == size].mean()))
      for size in np.unique(self.params_I)
    ]

  def forward_at(self, log_params):
    """Interpolates a forward pass's FLOPs at the log of a parameter count."""
    x_I = np.log(self.params_I)
    power = min(2, len(np.unique(x_I)) - 1)
    line = np.polyfit(x_I, np.log(self.forward_I), power)
    return np.exp(np.polyval(line, log_params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """A curve and its minimum by each method; a str says why one is missing."""

  curve: Curve
  parabola: optimum.Minimum | str
  joint: optimum.Minimum | str
  mean: optimum.Minimum | str  # Of three sizes; see `optimum`.


def curves(results: Results) -> list[Curve]:
  """Returns the curves of a sweep's results, in the order of the plan."""
  by_curve = {}
  for entry, result in results:
    by_curve.setdefault((entry.group, entry.budget), []).append((entry, result))
  return [_curve(*key, runs) for key, runs in by_curve.items()]


def _curve(group, budget, runs) -> Curve:
  finished = [(e.facts, r['loss']) for e, r in runs if not r['diverged']]
  finished.sort(key=lambda run: run[0]['params'])

  def column(name):
    return np.array([run_facts[name] for run_facts, _ in finished], float)

  return Curve(
    group=group,
    budget=budget,
    params_I=column('params'),
    tokens_I=column('tokens'),
    forward_I=column('forward_flops'),
    loss_I=np.array([loss for _, loss in finished], float),
    diverged=len(runs) - len(finished),
    equal=all(entry.facts['equal_flops'] for entry, _ in runs),
  )


def fit(
  all_curves: Sequence[Curve],
) -> tuple[list[Fitted], dict[str, optimum.Surface | str]]:
  """Returns each fitted curve, and by group a surface or why there is none."""
  equal = [curve for curve in all_curves if curve.equal and len(curve.loss_I)]
  noise = {curve.budget: _noise(equal, curve.budget) for curve in equal}
  surfaces = {}
  for group in dict.fromkeys(curve.group for curve in all_curves):
    group_curves = [curve for curve in equal if curve.group == group]
    if len(group_curves) < 2:
      surfaces[group] = 'fewer than 2 budgets of equal FLOPs'
      continue
    columns = (
      np.concatenate([getattr(curve, name) for curve in group_curves])
      for name in ('params_I', 'tokens_I', 'loss_I')
    )
    surfaces[group] = _or_why(optimum.surface, *columns)
  fitted = []
  for i, curve in enumerate(all_curves):
    if not curve.equal:
      parabola = joint = mean = 'its runs do not spend the budget'
    elif not len(curve.loss_I):
      parabola = joint = mean = 'no run has a loss'
    else:
      # Use another seed for each curve, so that their draws are independent.
      data = curve.params_I, curve.loss_I, noise[curve.budget], i
      parabola = _or_why(optimum.of_curve, *data)
      mean = _or_why(optimum.of_three_sizes, *data)
      joint = surfaces[curve.group]
      if not isinstance(joint, str):
        joint = _or_why(joint.minimum, curve.params_I, curve.tokens_I)
    fitted.append(
      Fitted(curve=curve, parabola=parabola, joint=joint, mean=mean)
    )
  return fitted, surfaces


def _noise(equal: Sequence[Curve], budget: float) -> optimum.Noise | None:
  """Returns the noise of a budget's runs, or if they are few, of all runs."""
  # Noise may depend on the budget, for instance if it is just enough for some
  # of the runs to learn something.
  alone, pooled = (
    optimum.noise([(c.params_I, c.loss_I) for c in curves])
    for curves in ([c for c in equal if c.budget == budget], equal)
  )
  return alone if alone is not None and alone.freedom >= _FREEDOM else pooled


def _or_why(function, *args):
  """Returns the function's result, or the message of a NoMinimumError."""
  try:
    return function(*args)
  except NoMinimumError as error:
    return str(error)


def comparisons(
  fitted: Sequence[Fitted], reference: str
) -> list[dict[str, Any]]:
  """Compares the minima of groups with the reference group's at each budget.

  Returns a row for each group, budget and method that found both minima. The
  `compute_multiplier` of a group is the factor on the training FLOPs with which
  the reference would reach the group's loss, by the slope of the reference's
  minima at neighbouring budgets. The multiplier is missing if the reference has
  fewer than two minima, or if these do not fall: no budget would reach a lower
  loss.
  """
  rows = []
  baselines = {f.curve.budget: f for f in fitted if f.curve.group == reference}
  slopes = {method: _slopes(baselines.values(), method) for method in _METHODS}
  for this in fitted:
    other = baselines.get(this.curve.budget)
    if this.curve.group == reference or other is None:
      continue
    for method in _METHODS:
      ours, theirs = getattr(this, method), getattr(other, method)
      if isinstance(ours, str) or isinstance(theirs, str):
        continue
      our_flops, their_flops = (
        minimum.log_params.map(lambda x, c=side.curve: np.log(c.forward_at(x)))
        for minimum, side in ((ours, this), (theirs, other))
      )
      row = {
        'group': this.curve.group,
        'budget': this.curve.budget,
        'method': method,
        'params_ratio': ours.log_params.minus(theirs.log_params).map(np.exp),
        'flops_ratio': our_flops.minus(their_flops).map(np.exp),
        'loss_difference': ours.loss.minus(theirs.loss),
      }
      slope = slopes[method].get(this.curve.budget, 0)
      if slope < 0:
        row['compute_multiplier'] = row['loss_difference'].map(
          lambda x, slope=slope: np.exp(x / slope)
        )
      rows.append(row)
  return rows


def _slopes(baselines: Iterable[Fitted], method: str) -> dict[float, float]:
  """Returns d loss / d ln FLOPs by budget; {} if there are fewer than two."""
  minima = {
    f.curve.budget: getattr(f, method).loss.value
    for f in baselines
    if not isinstance(getattr(f, method), str)
  }
  if len(minima) < 2:
    return {}
  budgets = sorted(minima)
  losses = [minima[budget] for budget in budgets]
  return dict(
    zip(budgets, np.gradient(losses, np.log(budgets)).tolist(), strict=True)
  )


def pooled(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Averages a group's compute multipliers over budgets, in logarithms.

  A budget's weight is the inverse variance of the logarithms of its draws.
  """
  by_curve = {}
  for row in compared:
    if 'compute_multiplier' in row:
      estimates = by_curve.setdefault((row['group'], row['method']), [])
      estimates.append(row['compute_multiplier'].map(np.log))
  rows = []
  for (group, method), estimates in by_curve.items():
    if len(estimates) < 2:
      continue
    weights = np.array([1 / estimate.draw_R.var() for estimate in estimates])
    weights /= weights.sum()
    # The counts differ, since draws without a minimum were left out.
    count = min(len(estimate.draw_R) for estimate in estimates)
    mean = optimum.Estimate(
      float(weights @ [estimate.value for estimate in estimates]),
      weights @ [estimate.draw_R[:count] for estimate in estimates],
    )
    rows.append(
      {
        'group': group,
        'method': method,
        'budgets': len(estimates),
        'compute_multiplier': mean.map(np.exp),
      }
    )
  return rows


def at_equal_steps(results: Results) -> list[dict[str, Any]]:
  """Compares groups with the control whose routed blocks are removed.

  Runs are paired by budget, width, seed and number of steps. The interval of
  the mean difference is Student's, over all pairs.
  """
  by_group = {}
  for entry, result in results:
    if result['diverged']:
      continue
    run_facts, width = entry.facts, entry.config.model.width
    key = (entry.group, entry.budget, run_facts['equal_flops'])
    runs = by_group.setdefault(key, {})
    runs[width, run_facts['steps'], entry.seed] = result['loss']
  rows, rng = [], np.random.default_rng(0)
  for (control, budget, control_equal), control_losses in by_group.items():
    if control_equal:
      continue
    for (group, other_budget, group_equal), group_losses in by_group.items():
      pairs = [
        group_losses[run] - control_losses[run]
        for run in control_losses
        if run in group_losses
      ]
      if other_budget != budget or not group_equal or len(pairs) < 2:
        continue
      error = np.std(pairs, ddof=1) / np.sqrt(len(pairs))
      mean = float(np.mean(pairs))
      draw_R = mean + error * rng.standard_t(len(pairs) - 1, 4000)
      rows.append(
        {
          'group': group,
          'against': control,
          'budget': budget,
          'pairs': len(pairs),
          'loss_difference': optimum.Estimate(mean, draw_R),
        }
      )
  return rows


def causal(results: Results) -> list[dict[str, Any]]:
  """Returns by group, budget and causal rule the mean loss minus top-k's."""
  differences = {}
  for entry, result in results:
    for rule, loss in _causal_losses(result).items():
      key = (entry.group, entry.budget, rule)
      differences.setdefault(key, []).append(loss - result['loss'])
  names = ('group', 'budget', 'rule')
  return [
    dict(zip(names, key, strict=True))
    | {'loss_difference': float(np.mean(values))}
    for key, values in differences.items()
  ]


def _causal_losses(result) -> dict[str, float]:
  """Returns a result's loss under each routing rule except top-k."""
  losses = {}
  for name, value in result['metrics'].items():
    rule, _, metric = name.partition('/')
    if metric == 'loss' and rule != 'top_k':
      losses[rule] = value
  return losses


def record(results: Results, fitted, surfaces, reference) -> dict[str, Any]:
  """Returns the content of `fit.json`; failed fits are `{'refused': WHY}`."""

  def plain(value):
    match value:
      case str():
        return {'refused': value}
      case optimum.Estimate():
        low, high = map(float, value.interval)
        return {'value': value.value, 'low': low, 'high': high}
      case optimum.Minimum():
        size = value.log_params.map(np.exp)
        return {'params': plain(size), 'loss': plain(value.loss)}
      case optimum.Surface():
        coefficients = value.coefficients()
        estimates = {name: plain(x) for name, x in coefficients.items()}
        return estimates | {'spread': value.spread}

  def plain_row(row):
    return {
      name: plain(value) if isinstance(value, optimum.Estimate) else value
      for name, value in row.items()
    }

  compared = comparisons(fitted, reference)
  return {
    'interval': optimum.LEVEL,
    'curves': [
      {
        'group': f.curve.group,
        'budget': f.curve.budget,
        'runs': len(f.curve.loss_I),
        'sizes': len(np.unique(f.curve.params_I)),
        'diverged': f.curve.diverged,
        'mean_losses': [
          {'params': size, 'loss': loss} for size, loss in f.curve.means()
        ],
        'parabola': plain(f.parabola),
        'joint': plain(f.joint),
        'mean': plain(f.mean),
      }
      for f in fitted
    ],
    'surfaces': {name: plain(outcome) for name, outcome in surfaces.items()},
    'comparisons': [plain_row(row) for row in compared],
    'pooled': [plain_row(row) for row in pooled(compared)],
    'equal_steps': [plain_row(row) for row in at_equal_steps(results)],
    'causal': causal(results),
  }


def table(fit_record: Mapping[str, Any]) -> str:
  """Returns the content of `fit.json` as text."""
  level = fit_record['interval']
  lines = [f'Minima at equal training FLOPs, with {level:.0%} intervals']
  for curve in fit_record['curves']:
    title = (
      f'{curve["group"]} at {curve["budget"]:g} FLOPs, {curve["runs"]} runs'
    )
    if curve['diverged']:
      title += f' and {curve["diverged"]} that diverged'
    means = (
      f'{mean["loss"]:.4f} ({mean["params"]:.3g})'
      for mean in curve['mean_losses']
    )
    lines += [title, f'  mean losses, by parameters: {", ".join(means)}']
    for method in _METHODS:
      minimum = curve[method]
      if 'refused' in minimum and method == 'mean':
        continue
      if 'refused' in minimum:
        text = f'no minimum: {minimum["refused"]}'
      else:
        text = (
          f'{_written(minimum["params"], ".3g")} parameters, loss'
          f' {_written(minimum["loss"], ".4f")}'
        )
      lines.append(f'  {method:9} {text}')
  if fit_record['comparisons']:
    lines.append('Against the dense models')
  for row in fit_record['comparisons']:
    lines.append(
      f'  {row["group"]} at {row["budget"]:g}, {row["method"]}: parameters x'
      f' {_written(row["params_ratio"], ".2f")}, FLOPs of a forward pass x'
      f' {_written(row["flops_ratio"], ".2f")}, loss'
      f' {_written(row["loss_difference"], "+.4f")}{_multiplier(row)}'
    )
  for row in fit_record['pooled']:
    lines.append(
      f'  {row["group"]}, {row["budgets"]} budgets together,'
      f' {row["method"]}{_multiplier(row)}'
    )
  for row in fit_record['equal_steps']:
    lines.append(
      f'  {row["group"]} against {row["against"]} at {row["budget"]:g}, the'
      f' same steps, {row["pairs"]} pairs: loss'
      f' {_written(row["loss_difference"], "+.4f")}'
    )
  if fit_record['causal']:
    lines.append('Under other rules than top-k, which looks at whole sequences')
  for row in fit_record['causal']:
    lines.append(
      f'  {row["group"]} at {row["budget"]:g}, {row["rule"]}: loss'
      f' {row["loss_difference"]:+.4f}'
    )
  return '\n'.join(lines)


def _multiplier(row) -> str:
  if 'compute_multiplier' not in row:
    return ''
  return f', compute x {_written(row["compute_multiplier"], ".2f")}'


def _written(estimate, form) -> str:
  value, low, high = (
    format(estimate[n], form) for n in ('value', 'low', 'high')
  )
  return f'{value} [{low}, {high}]'


def rows(
  results: Results, dense_flops: Mapping[float, float]
) -> list[dict[str, Any]]:
  """Returns for each run its line of `isoflop.csv`, as a dict by column."""
  lines = []
  rules = {rule: None for _, r in results for rule in _causal_losses(r)}
  for entry, result in results:
    run_facts, model = entry.facts, entry.config.model
    best = dense_flops.get(entry.budget)
    losses = _causal_losses(result)
    of_entry = ('id', 'group', 'budget', 'seed')
    sizes = ('params', 'embedding_params', 'forward_flops')
    spent = ('steps', 'tokens', 'train_flops')
    lines.append(
      {
        **{name: getattr(entry, name) for name in of_entry},
        'num_layers': model.num_layers,
        'width': model.width,
        **{name: run_facts[name] for name in sizes},
        'relative_flops': best and run_facts['forward_flops'] / best,
        'learning_rate': entry.config.optimizer.learning_rate,
        **{name: run_facts[name] for name in spent},
        'loss': result['loss'],
        **{f'{rule}_loss': losses.get(rule) for rule in rules},
        'diverged': result['diverged'],
      }
    )
  return lines


def best_dense(fitted: Sequence[Fitted], reference: str) -> dict[float, float]:
  """Returns the FLOPs of a forward pass of the best dense model, by budget.

  The best model is at the parabola's minimum, or else has the least mean loss.
  """
  flops_by_budget = {}
  for f in fitted:
    curve = f.curve
    if curve.group != reference or not len(curve.loss_I):
      continue
    if isinstance(f.parabola, str):
      size, _ = min(curve.means(), key=lambda mean: mean[1])
      forward = curve.forward_I[curve.params_I == size][0]
    else:
      forward = curve.forward_at(f.parabola.log_params.value)
    flops_by_budget[curve.budget] = float(forward)
  return flops_by_budget


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.', required=True)


def main(_) -> None:
  """`python -m mod_jax.sweeps fit`."""
  print(write(flags.FLAGS.workdir))


def write(workdir) -> str:
  """Fits a sweep's results, writes the module's files, returns the table.

  Raises:
    UserError: there is no sweep, or no run of it is finished.
  """
  workdir = workdir_lib.expand(workdir)
  results = run_lib.results(workdir)
  if all(result['diverged'] for _, result in results):
    raise UserError(
      f'no run in {workdir} has a loss yet ({len(results)} diverged): run the'
      ' sweep by `python -m mod_jax.sweeps run`.'
    )
  planned, *_ = manifest.read(workdir)
  # The group of `plan`'s `relative_flops`, even if it has no results so far.
  dense = (
    entry.group
    for entry in planned
    if entry.config.model.routing is None and entry.facts['equal_flops']
  )
  reference = next(dense, None)
  fitted, surfaces = fit(curves(results))
  fit_record = record(results, fitted, surfaces, reference)
  metrics_lib.write_json(workdir / 'fit.json', fit_record)
  dense_flops = best_dense(fitted, reference)
  lines = rows(results, dense_flops)
  workdir_lib.write_text(workdir / 'isoflop.csv', tables.csv_of(lines))
  for name, chosen in _pictures(fitted).items():
    figure = viz.isoflop([_drawn(f, dense_flops) for f in chosen])
    viz.save(figure, workdir / f'{name}.png')
  budget = max(entry.budget for entry, _ in results)
  best = _best_runs(workdir, results, budget)
  if best:
    title = f'The best run of each group at {budget:g} FLOPs'
    figure = compare.Comparison(best).figure(title)
    viz.save(figure, workdir / 'curves.png')
  if len(results) == len(planned):
    return table(fit_record)
  return f'{len(results)} of {len(planned)} runs are over.\n{table(fit_record)}'


def _best_runs(workdir, results, budget) -> list[compare.RecordedRun]:
  """Returns each group's best run at a budget, if its files are present."""
  by_group = {}
  for entry, result in results:
    if entry.budget == budget and not result['diverged']:
      by_group.setdefault(entry.group, []).append((result['loss'], entry))
  best = [min(runs, key=lambda run: run[0])[1] for runs in by_group.values()]
  folders = {entry.id: run_lib.directory(workdir, entry) for entry in best}
  return [
    compare.read(folder, name)
    for name, folder in folders.items()
    if workdir_lib.holds_run(folder)
  ]


def _pictures(fitted: Sequence[Fitted]) -> dict[str, list[Fitted]]:
  """Returns the curves of each picture, by name.

  `isoflop` shows the groups that have several budgets, or all if none has.
  `variants` shows all groups at the budgets of the groups with a single budget.
  """
  budgets = {}
  for f in fitted:
    budgets.setdefault(f.curve.group, set()).add(f.curve.budget)
  several = {group for group, of_group in budgets.items() if len(of_group) > 1}
  several = several or set(budgets)
  pictures = {'isoflop': [f for f in fitted if f.curve.group in several]}
  others = set().union(*(budgets[group] for group in set(budgets) - several))
  if others:
    pictures['variants'] = [f for f in fitted if f.curve.budget in others]
  return pictures


def _drawn(own: Fitted, dense_flops) -> dict[str, Any]:
  """Returns a fitted curve as `viz.isoflop` takes it."""
  curve, minimum = own.curve, own.parabola
  best = dense_flops.get(curve.budget)
  fields = {
    'group': curve.group,
    'budget': curve.budget,
    'params': curve.params_I,
    'loss': curve.loss_I,
  }
  if best is not None:
    fields['flops'] = curve.forward_I / best
  if isinstance(minimum, str):
    return fields
  line = np.polyfit(np.log(curve.params_I), curve.loss_I, 2)
  grid_G = np.geomspace(curve.params_I.min(), curve.params_I.max(), 100)
  at, interval = minimum.log_params.value, minimum.log_params.interval
  fields |= {
    'line': (grid_G, np.polyval(line, np.log(grid_G))),
    'minimum': (np.exp(at), minimum.loss.value),
    'interval': (np.exp(interval), minimum.loss.interval),
  }
  if best is not None:
    fields |= {
      'flops_line': curve.forward_at(np.log(grid_G)) / best,
      'flops_minimum': curve.forward_at(at) / best,
      'flops_interval': curve.forward_at(np.array(interval)) / best,
    }
  return fields
