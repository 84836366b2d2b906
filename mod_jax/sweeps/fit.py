"""Evaluates a sweep: the best model at each budget, with error bars.

Writes `fit.json`, `isoflop.csv` (a line per run), and the pictures
`isoflop.png` (Figure 4 of Raposo et al. 2024), `variants.png` (if some groups
have one budget only) and `curves.png` (the losses of each group's best run at
the highest budget over steps, training FLOPs and time).
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from absl import flags
import numpy as np

from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import compare, manifest, optimum, tables
from mod_jax.sweeps import run as run_lib
from mod_jax.sweeps.manifest import Entry
from mod_jax.sweeps.optimum import NoMinimumError

# Degrees of freedom needed to estimate the noise from the runs of one budget
# alone.
_FREEDOM = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """The runs of a group at a budget, without those that diverged.

  Attributes:
    group: the group's name.
    budget: training FLOPs of each run.
    params_I: parameters of each run's model, in ascending order.
    tokens_I: training tokens of each run.
    forward_I: FLOPs of a forward pass over one sequence.
    loss_I: held-out loss at the end of each run.
    diverged: number of runs that diverged.
    equal: whether all runs have spent the budget.
  """

  group: str
  budget: float
  params_I: np.ndarray
  tokens_I: np.ndarray
  forward_I: np.ndarray
  loss_I: np.ndarray
  diverged: int = 0
  equal: bool = True

  def means(self) -> list[tuple[float, float]]:
    """Returns parameters and mean loss of each size, the smallest first."""
    return [
      (float(size), float(self.loss_I[self.params_I == size].mean()))
      for size in np.unique(self.params_I)
    ]

  def forward_at(self, log_params):
    """Interpolates the FLOPs of a forward pass at a logarithm of parameters."""
    x_I = np.log(self.params_I)
    power = min(2, len(set(x_I.tolist())) - 1)
    line = np.polyfit(x_I, np.log(self.forward_I), power)
    return np.exp(np.polyval(line, log_params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """A curve and its minima; a string says why there is no minimum."""

  curve: Curve
  parabola: optimum.Minimum | str
  joint: optimum.Minimum | str


def curves(results: Sequence[tuple[Entry, Mapping[str, Any]]]) -> list[Curve]:
  """Returns the curves of a sweep's results, in the order of the plan."""
  by_curve = {}
  for entry, result in results:
    key = (entry.group, entry.budget)
    by_curve.setdefault(key, []).append((entry, result))
  all_curves = []
  for (group, budget), runs in by_curve.items():
    finished = [(e.facts, r['loss']) for e, r in runs if not r['diverged']]
    finished.sort(key=lambda run: run[0]['params'])

    def column(name, finished=finished):
      return np.array([run_facts[name] for run_facts, _ in finished], float)

    all_curves.append(
      Curve(
        group=group,
        budget=budget,
        params_I=column('params'),
        tokens_I=column('tokens'),
        forward_I=column('forward_flops'),
        loss_I=np.array([loss for _, loss in finished], float),
        diverged=len(runs) - len(finished),
        equal=all(entry.facts['equal_flops'] for entry, _ in runs),
      )
    )
  return all_curves


def fit(
  found: Sequence[Curve],
) -> tuple[list[Fitted], dict[str, optimum.Surface | str]]:
  """Fits each curve, and the surface of each group.

  Returns:
    The fitted curves in the given order; and the surfaces by group, where a
    string says why there is none.
  """
  equal = [curve for curve in found if curve.equal and len(curve.loss_I)]
  noise = {curve.budget: _noise(equal, curve.budget) for curve in equal}
  surfaces = {}
  for group in dict.fromkeys(curve.group for curve in found):
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
  for i, curve in enumerate(found):
    if not curve.equal or not len(curve.loss_I):
      reason = 'its runs do not spend the budget'
      if curve.equal:
        reason = 'no run has a loss'
      fitted.append(Fitted(curve=curve, parabola=reason, joint=reason))
      continue
    # Another seed for each curve, so that their draws are independent.
    parabola = _or_why(
      optimum.of_curve,
      curve.params_I,
      curve.loss_I,
      noise[curve.budget],
      seed=i,
    )
    joint = surfaces[curve.group]
    if not isinstance(joint, str):
      joint = _or_why(joint.minimum, curve.params_I, curve.tokens_I)
    fitted.append(Fitted(curve=curve, parabola=parabola, joint=joint))
  return fitted, surfaces


def _noise(equal: Sequence[Curve], budget: float) -> optimum.Noise | None:
  """Returns the noise of the runs at a budget, or of all if these are few.

  Noise may depend on the budget, for instance if it is just enough for some of
  the runs to learn something.
  """
  alone, pooled = (
    optimum.noise([(c.params_I, c.loss_I) for c in curves])
    for curves in ([c for c in equal if c.budget == budget], equal)
  )
  return alone if alone is not None and alone.freedom >= _FREEDOM else pooled


def _or_why(function, *args, **kwargs):
  """Returns the function's result, or the message of a NoMinimumError."""
  try:
    return function(*args, **kwargs)
  except NoMinimumError as error:
    return str(error)


def comparisons(
  fitted: Sequence[Fitted], reference: str
) -> list[dict[str, Any]]:
  """Compares the minima with those of the reference group at each budget.

  Returns:
    Rows with `group`, `budget`, `method` ('parabola' or 'joint') and the
    estimates `params_ratio`, `flops_ratio` (of a forward pass) and
    `loss_difference`.
  """
  rows = []
  baselines = {f.curve.budget: f for f in fitted if f.curve.group == reference}
  for this in fitted:
    other = baselines.get(this.curve.budget)
    if this.curve.group == reference or other is None:
      continue
    for method in ('parabola', 'joint'):
      ours, theirs = getattr(this, method), getattr(other, method)
      if isinstance(ours, str) or isinstance(theirs, str):
        continue
      forwards = (
        minimum.log_params.map(lambda x, c=side.curve: np.log(c.forward_at(x)))
        for minimum, side in ((ours, this), (theirs, other))
      )
      our_flops, their_flops = forwards
      rows.append(
        {
          'group': this.curve.group,
          'budget': this.curve.budget,
          'method': method,
          'params_ratio': ours.log_params.minus(theirs.log_params).map(np.exp),
          'flops_ratio': our_flops.minus(their_flops).map(np.exp),
          'loss_difference': ours.loss.minus(theirs.loss),
        }
      )
  return rows


def at_equal_steps(
  results: Sequence[tuple[Entry, Mapping[str, Any]]],
) -> list[dict[str, Any]]:
  """Compares groups with the control whose routed blocks are removed.

  Runs of the control, which do not spend their budget, are paired with runs of
  the same budget, width, seed and number of steps. The interval of the mean
  difference is Student's, over all pairs.
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


def causal(
  results: Sequence[tuple[Entry, Mapping[str, Any]]],
) -> list[dict[str, Any]]:
  """Returns how much higher losses are under causal routing rules.

  The loss of a run is that under top-k, which looks at whole sequences.

  Returns:
    Rows with `group`, `budget`, `rule` and `loss_difference`: the loss under
    the rule minus that under top-k, averaged over the runs.
  """
  differences = {}
  for entry, result in results:
    for rule, loss in _causal_losses(result).items():
      key = (entry.group, entry.budget, rule)
      differences.setdefault(key, []).append(loss - result['loss'])
  return [
    {
      'group': group,
      'budget': budget,
      'rule': rule,
      'loss_difference': float(np.mean(values)),
    }
    for (group, budget, rule), values in differences.items()
  ]


def _causal_losses(result) -> dict[str, float]:
  """Returns the losses by routing rule, except top-k."""
  names = {name: name.partition('/') for name in result['metrics']}
  return {
    rule: result['metrics'][name]
    for name, (rule, _, metric) in names.items()
    if metric == 'loss' and rule != 'top_k'
  }


def record(
  fitted: Sequence[Fitted],
  surfaces: Mapping[str, optimum.Surface | str],
  rows: Sequence[Mapping[str, Any]],
  equal_steps: Sequence[Mapping[str, Any]] = (),
  under_rules: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
  """Returns the content of `fit.json`; failed fits are `{'refused': WHY}`."""

  def minimum(outcome):
    if isinstance(outcome, str):
      return {'refused': outcome}
    return {
      'params': _told(outcome.log_params.map(np.exp)),
      'loss': _told(outcome.loss),
    }

  def surface(outcome):
    if isinstance(outcome, str):
      return {'refused': outcome}
    # Rescale A and B, which are in units of the geometric means.
    scale_R2 = np.exp(outcome.exponent_R2 * outcome.log_units)
    scale_2 = np.exp(outcome.exponents * outcome.log_units)
    numbers = {
      'E': (outcome.terms[0], outcome.term_R3[:, 0]),
      'A': (
        outcome.terms[1] * scale_2[0],
        outcome.term_R3[:, 1] * scale_R2[:, 0],
      ),
      'B': (
        outcome.terms[2] * scale_2[1],
        outcome.term_R3[:, 2] * scale_R2[:, 1],
      ),
      'a': (outcome.exponents[0], outcome.exponent_R2[:, 0]),
      'b': (outcome.exponents[1], outcome.exponent_R2[:, 1]),
    }
    coefficients = {
      name: _told(optimum.Estimate(float(value), draw_R))
      for name, (value, draw_R) in numbers.items()
    }
    return coefficients | {'spread': outcome.spread}

  def plain(row):
    return {
      name: _told(value) if isinstance(value, optimum.Estimate) else value
      for name, value in row.items()
    }

  return {
    'interval': optimum.LEVEL,
    'curves': [
      {
        'group': f.curve.group,
        'budget': f.curve.budget,
        'runs': len(f.curve.loss_I),
        'sizes': len(set(f.curve.params_I.tolist())),
        'diverged': f.curve.diverged,
        'mean_losses': [
          {'params': size, 'loss': loss} for size, loss in f.curve.means()
        ],
        'parabola': minimum(f.parabola),
        'joint': minimum(f.joint),
      }
      for f in fitted
    ],
    'surfaces': {name: surface(outcome) for name, outcome in surfaces.items()},
    'comparisons': [plain(row) for row in rows],
    'equal_steps': [plain(row) for row in equal_steps],
    'causal': list(under_rules),
  }


def _told(estimate) -> dict[str, float]:
  low, high = map(float, estimate.interval)
  return {'value': estimate.value, 'low': low, 'high': high}


def table(told: Mapping[str, Any]) -> str:
  """Returns the content of `fit.json` as text."""
  lines = [
    f'Minima at equal training FLOPs, with {told["interval"]:.0%} intervals'
  ]
  for curve in told['curves']:
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
    for method in ('parabola', 'joint'):
      minimum = curve[method]
      if 'refused' in minimum:
        lines.append(f'  {method:9} no minimum: {minimum["refused"]}')
        continue
      lines.append(
        f'  {method:9} {_written(minimum["params"], ".3g")} parameters, loss'
        f' {_written(minimum["loss"], ".4f")}'
      )
  if told['comparisons']:
    lines.append('Against the dense models')
  for row in told['comparisons']:
    lines.append(
      f'  {row["group"]} at {row["budget"]:g}, {row["method"]}: parameters x'
      f' {_written(row["params_ratio"], ".2f")}, FLOPs of a forward pass x'
      f' {_written(row["flops_ratio"], ".2f")}, loss'
      f' {_written(row["loss_difference"], "+.4f")}'
    )
  for row in told['equal_steps']:
    lines.append(
      f'  {row["group"]} against {row["against"]} at {row["budget"]:g}, the'
      f' same steps, {row["pairs"]} pairs: loss'
      f' {_written(row["loss_difference"], "+.4f")}'
    )
  if told['causal']:
    lines.append('Under other rules than top-k, which looks at whole sequences')
  for row in told['causal']:
    lines.append(
      f'  {row["group"]} at {row["budget"]:g}, {row["rule"]}: loss'
      f' {row["loss_difference"]:+.4f}'
    )
  return '\n'.join(lines)


def _written(told, form) -> str:
  low, high = format(told['low'], form), format(told['high'], form)
  return f'{told["value"]:{form}} [{low}, {high}]'


def rows(
  results: Sequence[tuple[Entry, Mapping[str, Any]]],
  dense_flops: Mapping[float, float],
) -> list[dict[str, Any]]:
  """Returns the lines of `isoflop.csv`, by column.

  Args:
    results: runs and their results.
    dense_flops: FLOPs of a forward pass of the best dense model, by budget.
  """
  lines = []
  rules = {rule: None for _, r in results for rule in _causal_losses(r)}
  for entry, result in results:
    run_facts, model = entry.facts, entry.config.model
    best = dense_flops.get(entry.budget)
    causal_losses = _causal_losses(result)
    lines.append(
      {
        'id': entry.id,
        'group': entry.group,
        'budget': entry.budget,
        'seed': entry.seed,
        'num_layers': model.num_layers,
        'width': model.width,
        'params': run_facts['params'],
        'embedding_params': run_facts['embedding_params'],
        'forward_flops': run_facts['forward_flops'],
        'relative_flops': best and run_facts['forward_flops'] / best,
        'learning_rate': entry.config.optimizer.learning_rate,
        'steps': run_facts['steps'],
        'tokens': run_facts['tokens'],
        'train_flops': run_facts['train_flops'],
        'loss': result['loss'],
        **{f'{rule}_loss': causal_losses.get(rule) for rule in rules},
        'diverged': result['diverged'],
      }
    )
  return lines


def best_dense(fitted: Sequence[Fitted], reference: str) -> dict[float, float]:
  """Returns the FLOPs of a forward pass of the best dense model, by budget.

  Without a fitted minimum, that is the size with the lowest mean loss.
  """
  flops_by_budget = {}
  for f in fitted:
    curve = f.curve
    if curve.group != reference or not len(curve.loss_I):
      continue
    if isinstance(f.parabola, str):
      size, _ = min(curve.means(), key=lambda mean: mean[1])
      flops_by_budget[curve.budget] = float(
        curve.forward_I[curve.params_I == size][0]
      )
    else:
      flops_by_budget[curve.budget] = float(
        curve.forward_at(f.parabola.log_params.value)
      )
  return flops_by_budget


def main(_) -> None:
  """`python -m mod_jax.sweeps fit`."""
  workdir = flags.FLAGS.workdir
  if not workdir:
    raise UserError('--workdir is missing: give the directory of the sweep.')
  print(write(workdir))


def write(workdir) -> str:
  """Fits the results of a sweep and writes the files; returns the table.

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
  reference = next(
    (
      entry.group
      for entry, _ in results
      if entry.config.model.routing is None and entry.facts['equal_flops']
    ),
    '',
  )
  fitted, surfaces = fit(curves(results))
  differences = comparisons(fitted, reference)
  fit_record = record(
    fitted, surfaces, differences, at_equal_steps(results), causal(results)
  )
  text = metrics_lib.to_json(fit_record, indent=2) + '\n'
  workdir_lib.write_text(workdir / 'fit.json', text)
  dense_flops = best_dense(fitted, reference)
  lines = rows(results, dense_flops)
  workdir_lib.write_text(workdir / 'isoflop.csv', tables.csv_text(lines))
  for name, chosen in _pictures(fitted).items():
    figure = viz.isoflop([_drawn(f, dense_flops) for f in chosen])
    viz.save(figure, workdir / f'{name}.png')
  budget = max(entry.budget for entry, _ in results)
  best = _best_runs(workdir, results, budget)
  if best:
    title = f'The best run of each group at {budget:g} FLOPs'
    viz.save(compare.picture(best, title=title), workdir / 'curves.png')
  planned = len(manifest.read(workdir))
  if len(results) == planned:
    return table(fit_record)
  return f'{len(results)} of {planned} runs are over.\n{table(fit_record)}'


def _best_runs(workdir, results, budget) -> list[compare.Run]:
  """Returns each group's best run at a budget, if its files are present."""
  best = {}
  for entry, result in results:
    if entry.budget != budget or result['diverged']:
      continue
    best_so_far = best.setdefault(entry.group, (entry, result))
    if result['loss'] < best_so_far[1]['loss']:
      best[entry.group] = (entry, result)
  folders = {e.id: run_lib.directory(workdir, e) for e, _ in best.values()}
  return [
    compare.read(folder, name)
    for name, folder in folders.items()
    if workdir_lib.holds_run(folder)
  ]


def _pictures(fitted: Sequence[Fitted]) -> dict[str, list[Fitted]]:
  """Returns the curves of each picture.

  `isoflop` shows the groups that have several budgets. `variants` shows all
  groups at the budgets of the others.
  """
  budgets = {}
  for item in fitted:
    budgets.setdefault(item.curve.group, set()).add(item.curve.budget)
  main_groups = {group for group, item in budgets.items() if len(item) > 1}
  main_groups = main_groups or set(budgets)
  pictures = {'isoflop': [f for f in fitted if f.curve.group in main_groups]}
  if main_groups != set(budgets):
    variant_budgets = set().union(
      *(budgets[g] for g in set(budgets) - main_groups)
    )
    pictures['variants'] = [
      f for f in fitted if f.curve.budget in variant_budgets
    ]
  return pictures


def _drawn(own: Fitted, dense_flops) -> dict[str, Any]:
  """Returns the input of `viz.isoflop` for a curve."""
  curve = own.curve
  fields = {
    'group': curve.group,
    'budget': curve.budget,
    'params': curve.params_I,
    'loss': curve.loss_I,
  }
  if curve.budget in dense_flops:
    fields['flops'] = curve.forward_I / dense_flops[curve.budget]
  if isinstance(own.parabola, str):
    return fields
  line = optimum.parabola(curve.params_I, curve.loss_I)
  grid_G = np.geomspace(curve.params_I.min(), curve.params_I.max(), 100)
  minimum = own.parabola
  fields |= {
    'line': (grid_G, np.polyval(line, np.log(grid_G))),
    'minimum': (np.exp(minimum.log_params.value), minimum.loss.value),
    'interval': (
      np.exp(minimum.log_params.interval),
      minimum.loss.interval,
    ),
  }
  if curve.budget in dense_flops:
    best = dense_flops[curve.budget]
    fields |= {
      'flops_line': curve.forward_at(np.log(grid_G)) / best,
      'flops_minimum': curve.forward_at(minimum.log_params.value) / best,
      'flops_interval': curve.forward_at(np.array(minimum.log_params.interval))
      / best,
    }
  return fields


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.')
