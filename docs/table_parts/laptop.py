"""The sweep at equal training FLOPs in `results/isoflop_laptop`."""

import json

from machine import markdown
import numpy as np
import study_tables

from mod_jax.sweeps import fit, optimum
from table_parts.common import ROOT, read_csv, table

FOLDER = 'isoflop_laptop'


@table
def laptop_first_attempt():
  """Losses at 3e13 FLOPs that copying decides."""
  columns = {
    'held-out loss': 'loss',
    'first 32 tokens': 'loss_of_first_eighth',
    'last 32': 'loss_of_last_eighth',
    'random tokens, once': 'random_once',
    'again': 'random_again',
  }
  rows = [
    [
      f'{run["group"]}, width {run["width"]}',
      run['num_heads'],
      *(f'{float(run[column]):.2f}' for column in columns.values()),
    ]
    for run in read_csv(f'{FOLDER}/first_attempt.csv')
    if float(run['budget']) == 3e13
  ]
  return markdown(['four blocks', 'heads', *columns], rows)


@table
def laptop_third_attempt():
  """Losses at 3e13 FLOPs that copying decides once more."""
  columns = {
    'held-out loss': 'loss',
    'after tokens new in their context': 'loss_after_new',
    'after the others': 'loss_after_seen',
  }
  rows = [
    [
      f'{run["group"]}, width {run["width"]}',
      *(f'{float(run[column]):.3f}' for column in columns.values()),
    ]
    for run in read_csv(f'{FOLDER}/third_attempt.csv')
    if float(run['budget']) == 3e13
  ]
  return markdown(['one seed', *columns], rows)


@table
def laptop_rates():
  """The search for the learning rate of the laptop's sweep."""
  runs = read_csv(f'{FOLDER}/tune.csv')
  widths = sorted({run['width'] for run in runs}, key=int)
  by_size = {(run['group'], run['width']): run for run in runs}
  rows = []
  for group in dict.fromkeys(run['group'] for run in runs):
    of = [by_size[group, width] for width in widths]
    cells = (
      f'{float(run["loss"]):.3f} at {float(run["learning_rate"]):.4f}'
      for run in of
    )
    rows.append([group.removeprefix('rate_x'), *cells])
  return markdown(['factor', *(f'width {w}' for w in widths)], rows)


def laptop_fit():
  path = ROOT / 'results' / FOLDER / 'fit.json'
  return json.loads(path.read_text())


def dense_gain(below: float, above: float) -> float:
  """Returns what dense models gain by e times the FLOPs, in nats per token.

  It is the gain between two budgets of the sweep.
  """
  least = {
    curve['budget']: curve['parabola']['loss']['value']
    for curve in laptop_fit()['curves']
    if curve['group'] == 'dense'
  }
  return (least[below] - least[above]) / np.log(above / below)


def interval(found, form: str) -> str:
  low, high = (format(found[end], form) for end in ('low', 'high'))
  return f'{found["value"]:{form}} ({low} to {high})'


def flops_budget(row) -> str:
  return f'{row["budget"]:g}'.replace('+', '')


@table
def laptop_equal_steps():
  """Routed models against their full blocks alone, after as many steps."""
  rows = [
    [
      flops_budget(row),
      f'{row["group"]} against {row["against"]}',
      str(row['pairs']),
      interval(row['loss_difference'], '+.3f'),
    ]
    for row in laptop_fit()['equal_steps']
  ]
  return markdown(['budget', 'at equal steps', 'pairs', 'nats/token'], rows)


@table
def laptop_rules():
  """What other rules than top-k cost, or a model without routed blocks."""
  rows = {}
  for row in laptop_fit()['causal']:
    of = rows.setdefault((flops_budget(row), row['group']), {})
    of[row['rule']] = f'{row["loss_difference"]:+.3f}'
  rules = sorted({rule for of in rows.values() for rule in of})
  return markdown(
    ['budget', 'models', *rules],
    [
      [*which, *(of.get(rule, '') for rule in rules)]
      for which, of in rows.items()
    ],
  )


@table
def laptop_minima():
  """The best models of the laptop's sweep at each budget, by parabolas."""
  told = laptop_fit()
  against = {
    (row['group'], row['budget']): row
    for row in told['comparisons']
    if row['method'] == 'parabola'
  }

  rows = []
  for curve in told['curves']:
    row = [flops_budget(curve), curve['group'], str(curve['runs'])]
    best = curve['parabola']
    if 'refused' in best:
      rows.append([*row, best['refused'], *[''] * 5])
      continue
    thousands = {end: x / 1e3 for end, x in best['params'].items()}
    row += [interval(thousands, '.0f'), interval(best['loss'], '.3f')]
    differs = against.get((curve['group'], curve['budget']))
    if differs:
      row += [
        interval(differs['params_ratio'], '.2f'),
        interval(differs['flops_ratio'], '.2f'),
        interval(differs['loss_difference'], '+.3f'),
        interval(differs['compute_multiplier'], '.2f'),
      ]
    rows.append(row + [''] * (9 - len(row)))
  header = [
    *('budget', 'models', 'runs', 'best size, 1000s', 'nats/token'),
    *('parameters ×', 'FLOPs ×', 'loss difference', 'compute multiplier'),
  ]
  return markdown(header, rows)


@table
def laptop_pooled():
  """What the routed models are worth over all budgets."""
  (row,) = (
    row
    for row in laptop_fit()['pooled']
    if (row['group'], row['method']) == ('mod', 'parabola')
  )
  worth = interval(row['compute_multiplier'], '.2f')
  return (
    f'Over the {row["budgets"]} budgets together the multiplier of'
    f' Mixture-of-Depths is {worth}.'
  )


ROWS_OF_128 = 'isoflop_rows_of_128'
# Losses of its runs, by column.
_LOSSES = {
  'loss': 'nats/token',
  'loss_after_new': 'after tokens new in their context',
  'loss_after_seen': 'after the others',
}


def rows_of_128() -> dict[tuple[str, str, str], list[dict[str, str]]]:
  """Returns the runs in rows of 128 by budget, group and width.

  Those of the higher budget also have the losses of the copying study.
  """
  copying = {run['id']: run for run in read_csv(f'{ROWS_OF_128}/copying.csv')}
  sizes = {}
  for run in read_csv(f'{ROWS_OF_128}/isoflop.csv'):
    key = run['budget'], run['group'], run['width']
    sizes.setdefault(key, []).append(run | copying.get(run['id'], {}))
  return sizes


@table
def laptop_rows_of_128():
  """Losses of each size in rows of 128 tokens."""
  rows = [
    [
      flops_budget({'budget': float(budget)}),
      f'{group}, width {width}',
      str(len(runs)),
      *(
        study_tables.over_seeds(
          [{loss: float(run[loss])} for run in runs if loss in run], loss
        )
        for loss in _LOSSES
      ),
    ]
    for (budget, group, width), runs in rows_of_128().items()
  ]
  header = ['budget', 'models', 'runs', *_LOSSES.values()]
  return markdown(header, rows)


@table
def laptop_rows_of_128_differences():
  """Mixture-of-Depths less dense models, by the means of three sizes.

  The last column takes from the sweep in rows of 32 what dense models gain by
  more FLOPs, between its two higher budgets.
  """
  gain = dense_gain(2.5e13, 8e13)
  rows = []
  for loss, label in _LOSSES.items():
    runs = {}
    for (budget, group, _), of_size in rows_of_128().items():
      of_size = [run for run in of_size if loss in run]
      runs.setdefault((float(budget), group), []).extend(of_size)
    curves = [
      fit.Curve(
        group=group,
        budget=budget,
        **{
          f'{name}_I': np.array([float(run[column]) for run in of_curve])
          for name, column in (
            *(('params', 'params'), ('tokens', 'tokens')),
            *(('forward', 'forward_flops'), ('loss', loss)),
          )
        },
      )
      for (budget, group), of_curve in runs.items()
    ]
    compared = fit.comparisons(fit.fit(curves)[0], 'dense')
    (row,) = (row for row in compared if row['method'] == 'mean')
    difference = row['loss_difference']
    cells = [label, between_draws(difference, '+.3f'), '', '']
    if loss == 'loss':
      shorter = difference.map(lambda x: np.exp(-x / gain))
      cells[2] = between_draws(row['compute_multiplier'], '.2f')
      cells[3] = between_draws(shorter, '.2f')
    rows.append(cells)
  header = ['1.2e14 FLOPs', 'mod less dense', 'compute multiplier']
  return markdown([*header, 'by the slope in rows of 32'], rows)


def between_draws(estimate: optimum.Estimate, form: str) -> str:
  low, high = estimate.interval
  return interval({'value': estimate.value, 'low': low, 'high': high}, form)
