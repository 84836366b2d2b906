"""What a sweep came to: the best models at each budget, with their errors.

Writes `fit.json`, `isoflop.csv` (a line per run), and the pictures
`isoflop.png` (the paper's Figure 4), `variants.png`, where there are groups
that are at one budget only, and `curves.png`, the losses of each group's best
run at the highest budget over steps, training FLOPs and time.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from absl import flags
import numpy as np

from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.sweeps import compare, manifest, optimum, tables
from mod_jax.sweeps import run as run_lib
from mod_jax.sweeps.manifest import Entry
from mod_jax.sweeps.optimum import NoMinimumError
from mod_jax.train import metrics as metrics_lib
from mod_jax.train import workdir as workdir_lib

# Runs of a budget, besides those that its parabolas need, from which its noise
# is told.
_FREEDOM = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """The runs of a group at a budget, those that diverged left out.

  Attributes:
    group: its name.
    budget: training FLOPs of each run.
    params_I: parameters of each run's model, by which the runs are ordered.
    tokens_I: tokens that each was trained on.
    forward_I: FLOPs of a forward pass over one sequence.
    loss_I: held-out, at the end.
    diverged: how many did.
    equal: whether all have spent their budget.
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
    """Returns the FLOPs of a forward pass of a model between the sizes."""
    x_I = np.log(self.params_I)
    power = min(2, len(set(x_I.tolist())) - 1)
    line = np.polyfit(x_I, np.log(self.forward_I), power)
    return np.exp(np.polyval(line, log_params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """What is known of a curve; a sentence stands for what the data refuse."""

  curve: Curve
  parabola: optimum.Minimum | str
  joint: optimum.Minimum | str


def curves(results: Sequence[tuple[Entry, Mapping[str, Any]]]) -> list[Curve]:
  """Returns the curves of a sweep's results, in the order of the plan."""
  by_curve = {}
  for entry, result in results:
    key = (entry.group, entry.budget)
    by_curve.setdefault(key, []).append((entry, result))
  found = []
  for (group, budget), runs in by_curve.items():
    good = [(e.facts, r['loss']) for e, r in runs if not r['diverged']]
    good.sort(key=lambda run: run[0]['params'])

    def column(name, good=good):
      return np.array([known[name] for known, _ in good], float)

    found.append(
      Curve(
        group=group,
        budget=budget,
        params_I=column('params'),
        tokens_I=column('tokens'),
        forward_I=column('forward_flops'),
        loss_I=np.array([loss for _, loss in good], float),
        diverged=len(runs) - len(good),
        equal=all(entry.facts['equal_flops'] for entry, _ in runs),
      )
    )
  return found


def fit(
  found: Sequence[Curve],
) -> tuple[list[Fitted], dict[str, optimum.Surface | str]]:
  """Returns what is known of each curve, and the surface of each group."""
  equal = [curve for curve in found if curve.equal and len(curve.loss_I)]
  noise = {curve.budget: _noise(equal, curve.budget) for curve in equal}
  surfaces = {}
  for group in dict.fromkeys(curve.group for curve in found):
    own = [curve for curve in equal if curve.group == group]
    if len(own) < 2:
      surfaces[group] = 'fewer than 2 budgets of equal FLOPs'
      continue
    columns = (
      np.concatenate([getattr(curve, name) for curve in own])
      for name in ('params_I', 'tokens_I', 'loss_I')
    )
    surfaces[group] = _or_why(optimum.surface, *columns)
  fitted = []
  for i, curve in enumerate(found):
    if not curve.equal or not len(curve.loss_I):
      why = 'its runs do not spend the budget'
      if curve.equal:
        why = 'no run has a loss'
      fitted.append(Fitted(curve=curve, parabola=why, joint=why))
      continue
    # Each curve has draws of its own: the runs of one tell nothing of another.
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

  Runs of one budget may differ more than those of another, as where some of
  them have learned by then what others learn later.
  """
  own, every = (
    optimum.noise([(c.params_I, c.loss_I) for c in curves])
    for curves in ([c for c in equal if c.budget == budget], equal)
  )
  return own if own is not None and own.freedom >= _FREEDOM else every


def _or_why(function, *args, **kwargs):
  """Returns what a function does, or why there is no minimum."""
  try:
    return function(*args, **kwargs)
  except NoMinimumError as error:
    return str(error)


def comparisons(
  fitted: Sequence[Fitted], reference: str
) -> list[dict[str, Any]]:
  """Returns how the minima differ from the reference group's, by budget.

  A row has `group`, `budget`, `method` ('parabola' or 'joint'), and estimates:
  `params_ratio`, `flops_ratio` (of a forward pass) and `loss_difference`.
  """
  rows = []
  base = {f.curve.budget: f for f in fitted if f.curve.group == reference}
  for own in fitted:
    other = base.get(own.curve.budget)
    if own.curve.group == reference or other is None:
      continue
    for method in ('parabola', 'joint'):
      ours, theirs = getattr(own, method), getattr(other, method)
      if isinstance(ours, str) or isinstance(theirs, str):
        continue
      forwards = (
        minimum.log_params.map(lambda x, c=of.curve: np.log(c.forward_at(x)))
        for minimum, of in ((ours, own), (theirs, other))
      )
      mine, others = forwards
      rows.append(
        {
          'group': own.curve.group,
          'budget': own.curve.budget,
          'method': method,
          'params_ratio': ours.log_params.minus(theirs.log_params).map(np.exp),
          'flops_ratio': mine.minus(others).map(np.exp),
          'loss_difference': ours.loss.minus(theirs.loss),
        }
      )
  return rows


def at_equal_steps(
  results: Sequence[tuple[Entry, Mapping[str, Any]]],
) -> list[dict[str, Any]]:
  """Returns what groups gain on those that do not spend their budget.

  That is the control whose routed blocks are removed: a run of it is compared
  with that of the same budget, width, seed and number of steps. The interval is
  Student's, over all such pairs.
  """
  by_group = {}
  for entry, result in results:
    if result['diverged']:
      continue
    known, width = entry.facts, entry.config.model.width
    key = (entry.group, entry.budget, known['equal_flops'])
    runs = by_group.setdefault(key, {})
    runs[width, known['steps'], entry.seed] = result['loss']
  rows, rng = [], np.random.default_rng(0)
  for (control, budget, spent), low in by_group.items():
    if spent:
      continue
    for (group, other, whole), high in by_group.items():
      pairs = [high[run] - low[run] for run in low if run in high]
      if other != budget or not whole or len(pairs) < 2:
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
  """Returns what routed models lose where no token sees later ones.

  The loss of a run is that of top-k, which looks at whole sequences. A row has
  `group`, `budget`, `rule`, and `loss_difference`, the mean over the runs of
  how much higher the loss is under a causal rule.
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
      'loss_difference': float(np.mean(found)),
    }
    for (group, budget, rule), found in differences.items()
  ]


def _causal_losses(result) -> dict[str, float]:
  """Returns the losses under other rules than top-k, by rule."""
  names = {name: name.partition('/') for name in result['metrics']}
  return {
    rule: result['metrics'][name]
    for name, (rule, _, what) in names.items()
    if what == 'loss' and rule != 'top_k'
  }


def record(
  fitted: Sequence[Fitted],
  surfaces: Mapping[str, optimum.Surface | str],
  rows: Sequence[Mapping[str, Any]],
  equal_steps: Sequence[Mapping[str, Any]] = (),
  under_rules: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
  """Returns what `fit.json` holds; refusals are `{'refused': WHY}`."""

  def minimum(found):
    if isinstance(found, str):
      return {'refused': found}
    return {
      'params': _told(found.log_params.map(np.exp)),
      'loss': _told(found.loss),
    }

  def surface(found):
    if isinstance(found, str):
      return {'refused': found}
    # In plain units: A over parameters to the power a, and so on.
    scale_R2 = np.exp(found.exponent_R2 * found.log_units)
    scale_2 = np.exp(found.exponents * found.log_units)
    numbers = {
      'E': (found.terms[0], found.term_R3[:, 0]),
      'A': (found.terms[1] * scale_2[0], found.term_R3[:, 1] * scale_R2[:, 0]),
      'B': (found.terms[2] * scale_2[1], found.term_R3[:, 2] * scale_R2[:, 1]),
      'a': (found.exponents[0], found.exponent_R2[:, 0]),
      'b': (found.exponents[1], found.exponent_R2[:, 1]),
    }
    told = {
      name: _told(optimum.Estimate(float(value), draw_R))
      for name, (value, draw_R) in numbers.items()
    }
    return told | {'spread': found.spread}

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
    'surfaces': {name: surface(found) for name, found in surfaces.items()},
    'comparisons': [plain(row) for row in rows],
    'equal_steps': [plain(row) for row in equal_steps],
    'causal': list(under_rules),
  }


def _told(estimate) -> dict[str, float]:
  low, high = map(float, estimate.interval)
  return {'value': estimate.value, 'low': low, 'high': high}


def table(told: Mapping[str, Any]) -> str:
  """Returns what `fit.json` holds for people."""
  lines = [
    f'Minima at equal training FLOPs, with {told["interval"]:.0%} intervals'
  ]
  for curve in told['curves']:
    head = (
      f'{curve["group"]} at {curve["budget"]:g} FLOPs, {curve["runs"]} runs'
    )
    if curve['diverged']:
      head += f' and {curve["diverged"]} that diverged'
    means = (
      f'{mean["loss"]:.4f} ({mean["params"]:.3g})'
      for mean in curve['mean_losses']
    )
    lines += [head, f'  mean losses, by parameters: {", ".join(means)}']
    for method in ('parabola', 'joint'):
      found = curve[method]
      if 'refused' in found:
        lines.append(f'  {method:9} no minimum: {found["refused"]}')
        continue
      lines.append(
        f'  {method:9} {_written(found["params"], ".3g")} parameters, loss'
        f' {_written(found["loss"], ".4f")}'
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
    results: of the runs.
    dense_flops: by budget, FLOPs of a forward pass of the best dense model.
  """
  found = []
  rules = {rule: None for _, r in results for rule in _causal_losses(r)}
  for entry, result in results:
    known, model = entry.facts, entry.config.model
    best = dense_flops.get(entry.budget)
    under = _causal_losses(result)
    found.append(
      {
        'id': entry.id,
        'group': entry.group,
        'budget': entry.budget,
        'seed': entry.seed,
        'num_layers': model.num_layers,
        'width': model.width,
        'params': known['params'],
        'embedding_params': known['embedding_params'],
        'forward_flops': known['forward_flops'],
        'relative_flops': best and known['forward_flops'] / best,
        'learning_rate': entry.config.optimizer.learning_rate,
        'steps': known['steps'],
        'tokens': known['tokens'],
        'train_flops': known['train_flops'],
        'loss': result['loss'],
        **{f'{rule}_loss': under.get(rule) for rule in rules},
        'diverged': result['diverged'],
      }
    )
  return found


def best_dense(fitted: Sequence[Fitted], reference: str) -> dict[float, float]:
  """Returns a forward pass's FLOPs of the best dense model, by budget.

  Where there is no minimum, it is that of the size with the least mean loss.
  """
  found = {}
  for own in fitted:
    curve = own.curve
    if curve.group != reference or not len(curve.loss_I):
      continue
    if isinstance(own.parabola, str):
      size, _ = min(curve.means(), key=lambda mean: mean[1])
      found[curve.budget] = float(curve.forward_I[curve.params_I == size][0])
    else:
      found[curve.budget] = float(
        curve.forward_at(own.parabola.log_params.value)
      )
  return found


def main(_) -> None:
  """`python -m mod_jax.sweeps fit`."""
  workdir = flags.FLAGS.workdir
  if not workdir:
    raise UserError('--workdir is missing: give the directory of the sweep.')
  print(write(workdir))


def write(workdir) -> str:
  """Fits what a sweep's runs came to, and writes it; returns the table.

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
  compared = comparisons(fitted, reference)
  told = record(
    fitted, surfaces, compared, at_equal_steps(results), causal(results)
  )
  text = metrics_lib.to_json(told, indent=2) + '\n'
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
    return table(told)
  return f'{len(results)} of {planned} runs are over.\n{table(told)}'


def _best_runs(workdir, results, budget) -> list[compare.Run]:
  """Returns each group's best run at a budget, where its files are here."""
  best = {}
  for entry, result in results:
    if entry.budget != budget or result['diverged']:
      continue
    held = best.setdefault(entry.group, (entry, result))
    if result['loss'] < held[1]['loss']:
      best[entry.group] = (entry, result)
  folders = {e.id: run_lib.directory(workdir, e) for e, _ in best.values()}
  return [
    compare.read(folder, name)
    for name, folder in folders.items()
    if workdir_lib.holds_run(folder)
  ]


def _pictures(fitted: Sequence[Fitted]) -> dict[str, list[Fitted]]:
  """Returns which curves stand in which picture.

  Groups that are at several budgets are what the sweep is about. The others
  are compared with them where they are.
  """
  budgets = {}
  for own in fitted:
    budgets.setdefault(own.curve.group, set()).add(own.curve.budget)
  whole = {group for group, own in budgets.items() if len(own) > 1}
  whole = whole or set(budgets)
  found = {'isoflop': [f for f in fitted if f.curve.group in whole]}
  if whole != set(budgets):
    beside = set().union(*(budgets[g] for g in set(budgets) - whole))
    found['variants'] = [f for f in fitted if f.curve.budget in beside]
  return found


def _drawn(own: Fitted, dense_flops) -> dict[str, Any]:
  """Returns what `viz.isoflop` draws of a curve."""
  curve = own.curve
  drawn = {
    'group': curve.group,
    'budget': curve.budget,
    'params': curve.params_I,
    'loss': curve.loss_I,
  }
  if curve.budget in dense_flops:
    drawn['flops'] = curve.forward_I / dense_flops[curve.budget]
  if isinstance(own.parabola, str):
    return drawn
  line = optimum.parabola(curve.params_I, curve.loss_I)
  grid_G = np.geomspace(curve.params_I.min(), curve.params_I.max(), 100)
  minimum = own.parabola
  drawn |= {
    'line': (grid_G, np.polyval(line, np.log(grid_G))),
    'minimum': (np.exp(minimum.log_params.value), minimum.loss.value),
    'interval': (
      np.exp(minimum.log_params.interval),
      minimum.loss.interval,
    ),
  }
  if curve.budget in dense_flops:
    best = dense_flops[curve.budget]
    drawn |= {
      'flops_line': curve.forward_at(np.log(grid_G)) / best,
      'flops_minimum': curve.forward_at(minimum.log_params.value) / best,
      'flops_interval': curve.forward_at(np.array(minimum.log_params.interval))
      / best,
    }
  return drawn


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.')
