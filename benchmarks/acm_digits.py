"""Adaptive width on the handwritten digits: budgets, learners, losses, seeds.

    python benchmarks/acm_digits.py --workdir=runs/acm_digits

For each seed a dense model is trained (`configs/vit/digits.py`) and converted
by `configs/acm/vit.py:digits`: learners and gates once, then end to end for
each budget. For comparison there are models without the auxiliary losses, and
static models of the same cost, whose modules all run the same number of
learners and which train end to end for as long. One seed is also converted with
other numbers of learners. Accuracies are those of all 355 held-out images. The
result is written beside this file as JSON and as pictures. About an hour on two
cores; started again, it continues. `--report` trains nothing and reports the
finished runs and their seeds.
"""

import pathlib
import sys

from absl import app, flags
import machine
from machine import cell, point, spread

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig
import results as results_lib

_WORKDIR = flags.DEFINE_string('workdir', 'runs/acm_digits', 'For the runs.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_BUDGETS = flags.DEFINE_list('budgets', ['.25', '.4', '.6', '.75'], 'β')
_LEARNERS = flags.DEFINE_list('learners', ['2', '8', '16'], 'N beside 4.')
_SWEPT = flags.DEFINE_list('swept', ['.25', '.6'], 'β of the other N.')
_REPORT = flags.DEFINE_bool('report', False, 'Only of what is finished.')
_TINY = flags.DEFINE_bool('tiny', False, 'Small models and few steps: a trial.')

_ABLATED = ('.4', {'entropy_weight': 0.0, 'diversity_weight': 0.0})


class _MissingError(Exception):
  """With `--report`, a run that is not finished."""


def load(path: str, variant: str, seed: str) -> ExperimentConfig:
  """Returns a variant of a config file, or its variant for trials."""
  root = pathlib.Path(__file__).resolve().parents[1] / 'configs'
  module = config_lib.load(root / path)
  config = module.get_config('tiny' if _TINY.value else variant)
  return config_lib.replace(config, {'seed': int(seed)})


def finish(config: ExperimentConfig, name: str) -> tuple[str, dict]:
  """Trains a run unless it is finished; returns its workdir and metrics."""
  workdir = f'{_WORKDIR.value}/{name}'
  directory, last = phases.expand(config, workdir)[-1]
  metrics = phases.finished(directory, last)
  if metrics is None:
    if _REPORT.value:
      raise _MissingError(workdir)
    metrics = phases.train(config, workdir).metrics
  return workdir, metrics


class Conversion:
  """A dense model and its conversions, for one seed."""

  def __init__(self, seed: str):
    self.seed = seed
    self.config = load('vit/digits.py', '', seed)
    self.dense, self.metrics = finish(self.config, f'dense_{seed}')

  def gates(self, learners: int) -> tuple[ExperimentConfig, str, str]:
    """Returns the config, and the workdirs of the first two phases."""
    config = load('acm/vit.py', 'digits', self.seed)
    config = config_lib.replace(
      config,
      {'model.adaptive.num_learners': learners, 'evaluation.every': 0},
    )
    label = f'{learners}_{self.seed}'
    first, _ = finish(
      config_lib.replace(
        config, {'objective.phase': 'learners', 'init': self.dense}
      ),
      f'learners_{label}',
    )
    second, _ = finish(
      config_lib.replace(config, {'objective.phase': 'gates', 'init': first}),
      f'gates_{label}',
    )
    return config, first, second

  def adaptive(self, budget: str, learners: int = 4, **objective) -> dict:
    """Returns the metrics of the conversion at a budget."""
    config, _, gates = self.gates(learners)
    changes = {f'objective.{name}': x for name, x in objective.items()}
    config = config_lib.replace(
      config,
      {
        'objective.phase': 'end_to_end',
        'objective.budget': float(budget),
        'init': gates,
        **changes,
      },
    )
    kind = '_'.join(('adaptive', *objective))
    _, metrics = finish(config, f'{kind}_{budget}_{learners}_{self.seed}')
    names = ('accuracy', 'load', 'load_std', 'token_std', 'gmacs')
    return {name: metrics[name] for name in names}

  def static(self, k: int) -> dict:
    """Returns the metrics with k learners everywhere, trained as long."""
    config, learners, _ = self.gates(4)
    config = config_lib.replace(
      config,
      {
        'objective.phase': 'end_to_end',
        'objective.static_learners': k,
        # Skip the gates' phase; start from the learners.
        'objective.gates.num_steps': 0,
        'init': learners,
      },
    )
    _, metrics = finish(config, f'static_{k}_{self.seed}')
    gmacs = make_task(config).macs(learners=k) / 1e9
    return {'accuracy': metrics[f'k{k}/accuracy'], 'gmacs': gmacs}


def each(run, of) -> dict:
  """Returns the result of `run` for each, without those that are missing."""
  results = {}
  for x in of:
    try:
      results[x] = run(x)
    except _MissingError:
      continue
  return results


def gathered(runs: dict) -> dict:
  """Returns the spread over seeds of each number, and the seeds."""
  first, *_ = runs.values()
  spreads = {
    name: spread([run[name] for run in runs.values()]) for name in first
  }
  return spreads | {'seeds': [conversion.seed for conversion in runs]}


def drawn(name, group, row) -> dict:
  """Returns a row as a point of a picture."""
  return point(name, group, 1e3 * row['gmacs']['mean'], row['accuracy'])


def _trial() -> str | None:
  return _WORKDIR.value if _TINY.value else None


def draw(figure, suffix: str) -> None:
  viz.save(figure, machine.result_path(__file__, f'{suffix}.png', _trial()))


def main(_):
  seeds = list(each(Conversion, _SEEDS.value).values())
  if not seeds:
    sys.exit(f'No dense model is finished in {_WORKDIR.value}.')
  table, points, swept = {}, [], _SWEPT.value

  def add(name, group, label, runs):
    if runs:
      table[name] = gathered(runs)
    # Draw complete rows only: means over different seeds are not comparable.
    if len(runs) == len(seeds):
      points.append(drawn(label, group, table[name]))

  dense = {
    seed: {
      'accuracy': seed.metrics['accuracy'],
      'gmacs': flops.published_macs(seed.config.model) / 1e9,
    }
    for seed in seeds
  }
  add('dense', 'dense', 'dense', dense)
  for budget in _BUDGETS.value:
    runs = each(lambda seed, b=budget: seed.adaptive(b), seeds)
    add(f'adaptive, β = {budget}', 'adaptive, 4 learners', f'β={budget}', runs)
  for k in range(1, 5):
    runs = each(lambda seed, k=k: seed.static(k), seeds)
    add(f'static, k = {k}', 'static', f'k={k}', runs)
  budget, changes = _ABLATED
  ablated = each(lambda seed: seed.adaptive(budget, **changes), seeds)
  if ablated:
    table[f'adaptive, β = {budget}, L_b alone'] = gathered(ablated)
  # Numbers of learners, with one seed.
  sweep = {}
  for n in _LEARNERS.value:
    if runs := each(lambda b, n=int(n): seeds[0].adaptive(b, n), swept):
      sweep[n] = runs
  results_lib.save(
    __file__,
    {'seeds': _SEEDS.value, 'models': table, 'learners_of_one_seed': sweep},
    _trial(),
  )
  print('| | seeds | MMACs | load | accuracy, % | std, images | std, tokens |')
  print('|---|---|---|---|---|---|---|')
  for name, row in table.items():
    print(
      f'| {name} | {len(row["seeds"])} |'
      f' {cell(row["gmacs"], 1e3, 1)} | {cell(row.get("load"))} |'
      f' {cell(row["accuracy"], 100, 1)} | {cell(row.get("load_std"))} |'
      f' {cell(row.get("token_std"))} |'
    )
  xlabel = 'MMACs per image'
  title = 'Digits: adaptive width and the dense model'
  draw(
    viz.accuracy_flops(points, title=title, xlabel=xlabel, pareto=True),
    '',
  )
  if sweep:
    sweep['4'] = each(lambda b: seeds[0].adaptive(b), swept)
    draw_learners(sweep, seeds[0], xlabel)


def draw_learners(sweep, seed, xlabel):
  """Draws accuracy against compute by number of learners, for one seed."""
  points = [
    drawn(f'β={b}', f'{n} learners', gathered({seed: run}))
    for n, runs in sorted(sweep.items(), key=lambda item: int(item[0]))
    for b, run in runs.items()
  ]
  draw(
    viz.accuracy_flops(
      [{**p, 'spread': None} for p in points],
      title='Digits: how many learners, one seed',
      xlabel=xlabel,
      pareto=True,
    ),
    '_learners',
  )


if __name__ == '__main__':
  app.run(main)
