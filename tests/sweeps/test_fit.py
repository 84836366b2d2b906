"""From the results of a sweep to its minima, their table and its files."""

import csv
import dataclasses
import json
import pathlib

import numpy as np
import pytest

from mod_jax import cli
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.sweeps import fit, manifest, plan, run
from mod_jax.sweeps.manifest import Entry
from mod_jax.sweeps.plan import SweepConfig
from mod_jax.tasks.experiment import ExperimentConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

# Parameters and loss of the best models in Figure 4 of Raposo et al. 2024, as
# read from the picture: dense, then Mixture-of-Depths.
PUBLISHED = {
  6e18: ((231e6, 3.137), (483e6, 3.091)),
  2e19: ((467e6, 2.866), (794e6, 2.834)),
  1e20: ((725e6, 2.587), (1.9e9, 2.560)),
}
SEVEN = tuple(np.linspace(-1.3, 1.1, 7))
MODELS = {
  'dense': ExperimentConfig(model=LMConfig(routing=None)),
  'deep': ExperimentConfig(model=LMConfig(routing=None)),
  'mod': ExperimentConfig(model=LMConfig(routing=MoDConfig())),
}


def add(runs, group, budget, params, loss, *, seed=0, **facts):
  """Adds a run and its result; a routed model takes .56 of the FLOPs."""
  known = {
    'params': params,
    'embedding_params': params / 10,
    'forward_flops': 2 * params * (0.56 if group == 'mod' else 1.0),
    'head_flops': params / 10,
    'steps': 10,
    'tokens': budget / 6 / params,
    'train_flops': budget,
    'equal_flops': True,
  }
  name = f'{group}_{len(runs)}'
  entry = Entry(
    id=name,
    group=group,
    budget=budget,
    seed=seed,
    config=MODELS.get(group, MODELS['mod']),
    facts=known | facts,
  )
  runs.append((entry, loss))


def write(workdir, runs):
  """Writes the manifest and the results; a loss of None has diverged."""
  digest = manifest.write(workdir, [entry for entry, _ in runs])
  for entry, loss in runs:
    path = run.result_path(workdir, entry)
    path.parent.mkdir(exist_ok=True)
    result = {
      'id': entry.id,
      'manifest': digest,
      'diverged': '' if loss is not None else 'loss is nan at step 3',
      'loss': loss,
      'metrics': {},
    }
    if loss is not None and entry.config.model.routing is not None:
      result['metrics'] = {'top_k/loss': loss, 'threshold/loss': loss + 0.002}
    path.write_text(json.dumps(result))


def published(rng, offsets=SEVEN, noise=0.002):
  """The runs of curves whose minima are those of the published figure.

  Sizes are at `offsets` from the best one, in the logarithm of parameters.

  Their sides are those of Hoffmann et al. 2022, approach 3.
  """
  runs, a, b = [], 0.34, 0.28
  for budget, minima in PUBLISHED.items():
    for group, (best, least) in zip(('dense', 'mod'), minima, strict=True):
      for x in offsets:
        sides = b * np.exp(-a * x) + a * np.exp(b * x)
        loss = least + sides / (a + b) - 1 + noise * rng.normal()
        add(runs, group, budget, best * np.exp(x), loss)
  return runs


def test_published_minima(tmp_path, command):
  runs = published(np.random.default_rng(0))
  add(runs, 'dense', 6e18, 5e8, None)
  write(tmp_path, runs)
  status, out, _ = command('fit', f'--workdir={tmp_path}')
  assert status == 0
  told = json.loads((tmp_path / 'fit.json').read_text())
  assert [c['diverged'] for c in told['curves']] == [1, 0, 0, 0, 0, 0]
  held = []
  for curve in told['curves']:
    index = ('dense', 'mod').index(curve['group'])
    best, least = PUBLISHED[curve['budget']][index]
    params, loss = curve['parabola']['params'], curve['parabola']['loss']
    held += [params['low'] < best < params['high']]
    held += [loss['low'] < least < loss['high'] < loss['low'] + 0.015]
    assert params['value'] == pytest.approx(best, rel=0.1)
    assert loss['value'] == pytest.approx(least, abs=0.005)
  assert sum(held) >= 10  # Of 12 intervals at 90%.
  rows = {
    row['budget']: row
    for row in told['comparisons']
    if row['method'] == 'parabola'
  }
  for budget, (dense, mod) in PUBLISHED.items():
    gain = rows[budget]['loss_difference']
    assert gain['low'] < mod[1] - dense[1] < gain['high'] < 0
    ratio = rows[budget]['params_ratio']
    assert 1 < ratio['low'] < mod[0] / dense[0] < ratio['high']
    forward = rows[budget]['flops_ratio']
    assert forward['value'] == pytest.approx(0.56 * ratio['value'], rel=1e-3)
    # Dense models on the straight line through this budget and the next one
    # reach the routed models' loss with so many times the FLOPs.
    multiplier = rows[budget]['compute_multiplier']
    assert 1 < multiplier['low'] < multiplier['value'] < multiplier['high']
  budgets = sorted(PUBLISHED)
  losses = [PUBLISHED[budget][0][1] for budget in budgets]
  slope = (losses[1] - losses[0]) / np.log(budgets[1] / budgets[0])
  gain = rows[budgets[0]]['loss_difference']['value']
  assert rows[budgets[0]]['compute_multiplier']['value'] == pytest.approx(
    np.exp(gain / slope), rel=0.05
  )
  (together,) = (row for row in told['pooled'] if row['method'] == 'parabola')
  assert (together['group'], together['budgets']) == ('mod', 3)
  each = [row['compute_multiplier']['value'] for row in rows.values()]
  assert min(each) < together['compute_multiplier']['value'] < max(each)
  assert 'mod at 1e+20, threshold: loss +0.0020' in out
  with (tmp_path / 'isoflop.csv').open() as file:
    lines = list(csv.DictReader(file))
  assert len(lines) == len(runs)
  # By the best dense model of the same budget, the published one.
  relative = [float(row['relative_flops']) for row in lines[:7]]
  assert relative[0] < 0.5 < 1 < relative[-1]
  assert lines[-1]['loss'] == ''
  for line in lines:
    known = line['group'] == 'mod' and line['loss']
    expected = str(float(line['loss']) + 0.002) if known else ''
    assert line['threshold_loss'] == expected
  assert (tmp_path / 'isoflop.png').stat().st_size > 10_000
  assert not (tmp_path / 'variants.png').exists()


def test_intervals_hold_the_true_differences():
  """In 85% of the trials at least, as those of the minima themselves."""
  rng = np.random.default_rng(0)
  dense, mod = PUBLISHED[6e18]
  truth = {
    'params_ratio': mod[0] / dense[0],
    'flops_ratio': 0.56 * mod[0] / dense[0],
    'loss_difference': mod[1] - dense[1],
  }
  held = {name: [] for name in truth}
  for _ in range(100):
    runs = [
      (entry, {'loss': loss + 0.003 * rng.normal(), 'diverged': ''})
      for entry, loss in published(rng)
      if entry.budget == 6e18
    ]
    fitted, _ = fit.fit(fit.curves(runs))
    (row,) = fit.comparisons(fitted, 'dense')
    for name, value in truth.items():
      low, high = row[name].interval
      held[name].append(low <= value <= high)
  for name, found in held.items():
    assert np.mean(found) >= 0.85, name


def test_three_sizes_are_compared_by_their_means(tmp_path):
  """Two runs of each: too few sizes for minima, not for a difference."""
  rng = np.random.default_rng(0)
  (dense, mod), (dense_next, _), _ = PUBLISHED.values()
  difference = mod[1] - dense[1]
  slope = (dense_next[1] - dense[1]) / np.log(2e19 / 6e18)
  held = {'loss_difference': [], 'compute_multiplier': []}
  for _ in range(50):
    runs = published(rng, (-0.2, -0.2, 0.1, 0.1, 0.4, 0.4), noise=0.01)
    results = [(entry, {'loss': x, 'diverged': ''}) for entry, x in runs]
    fitted, _ = fit.fit(fit.curves(results))
    compared = fit.comparisons(fitted, 'dense')
    row, *_ = (row for row in compared if row['method'] == 'mean')
    for name, true in (
      ('loss_difference', difference),
      ('compute_multiplier', np.exp(difference / slope)),
    ):
      low, high = row[name].interval
      held[name].append(low <= true <= high)
      assert high - low < 0.5 * row[name].value or name == 'loss_difference'
  for name, found in held.items():
    assert 0.85 <= np.mean(found) < 1, name
  write(tmp_path, runs)
  text = fit.write(tmp_path)
  assert 'no minimum: 3 sizes, of at least 4 needed' in text
  assert f'  mean      {np.exp(np.log(231e6) + 0.1):.3g} [' in text
  assert 'mod at 6e+18, mean: parameters x' in text


def test_models_wait_for_the_first_dense_group(tmp_path):
  """Another dense group that has results is not what they are compared with."""
  runs = []
  for group in ('dense', 'deep', 'mod'):
    for params in (1e6, 1e6, 2e6, 4e6):
      add(runs, group, 6e18, params, 3.0)
  write(tmp_path, runs)
  compared = []
  for finished in (True, False):
    if not finished:
      for entry, _ in runs[:4]:
        run.result_path(tmp_path, entry).unlink()
    fit.write(tmp_path)
    rows = json.loads((tmp_path / 'fit.json').read_text())['comparisons']
    compared.append({row['group'] for row in rows})
  assert compared == [{'deep', 'mod'}, set()]


def test_no_multiplier_where_more_flops_do_not_help_dense_models():
  """It would be below 1 where the routed model's loss is the lower one."""
  runs = []
  for budget, loss in ((1e18, 3.0), (2e18, 3.1)):
    for params in (1e6, 1e6, 2e6, 4e6):
      add(runs, 'dense', budget, params, loss)
      add(runs, 'mod', budget, params, loss - 0.1)
  results = [(entry, {'loss': x, 'diverged': ''}) for entry, x in runs]
  rows = fit.comparisons(fit.fit(fit.curves(results))[0], 'dense')
  assert [row['loss_difference'].value for row in rows] == pytest.approx(
    [-0.1, -0.1]
  )
  assert not any('compute_multiplier' in row for row in rows)


@pytest.mark.parametrize('name', ['gpu.py:hour', 'laptop.py:rows_of_128'])
def test_three_sizes_are_planned_with_what_a_multiplier_needs(name):
  config = f'{ROOT}/configs/sweeps/{name}'
  sweep = cli.load_config(config, SweepConfig)
  entries = plan.entries(dataclasses.replace(sweep, corpus_tokens=1e12))
  rng = np.random.default_rng(0)
  results = []
  for entry in entries:
    sides = entry.facts['params'] ** -0.34, entry.facts['tokens'] ** -0.28
    loss = 1.7 + 406 * sides[0] + 411 * sides[1] + 0.01 * rng.normal()
    results.append((entry, {'loss': loss, 'diverged': ''}))
  compared = fit.comparisons(fit.fit(fit.curves(results))[0], 'dense')
  answers = [row for row in compared if row['method'] == 'mean']
  row = next(row for row in answers if row['budget'] == sweep.budgets[-1])
  assert row['group'] == 'mod'
  assert 0.5 < row['compute_multiplier'].value < 2


def test_pooled_where_some_draws_have_no_minimum():
  rng = np.random.default_rng(0)
  results = [
    (entry, {'loss': loss + 0.03 * rng.normal(), 'diverged': ''})
    for _ in range(3)
    for entry, loss in published(rng)
  ]
  compared = [
    row
    for row in fit.comparisons(fit.fit(fit.curves(results))[0], 'dense')
    if row['method'] == 'parabola'
  ]
  counts = {len(row['compute_multiplier'].draw_R) for row in compared}
  assert len(counts) == len(compared) == 2
  (row,) = fit.pooled(compared)
  low, high = row['compute_multiplier'].interval
  each = [row['compute_multiplier'].value for row in compared]
  assert min(each) < row['compute_multiplier'].value < max(each)
  assert low < row['compute_multiplier'].value < high


def test_noise_of_one_budget_is_not_that_of_another(tmp_path):
  rng = np.random.default_rng(0)
  runs = [*published(rng), *published(rng)]
  noisy = [
    (entry, loss + 0.02 * rng.normal() * (entry.budget == 1e20))
    for entry, loss in runs
  ]
  found = {}
  for kind, losses in (('even', runs), ('uneven', noisy)):
    results = [(entry, {'loss': x, 'diverged': ''}) for entry, x in losses]
    fitted, _ = fit.fit(fit.curves(results))
    found[kind] = {
      f.curve.budget: np.ptp(f.parabola.loss.interval)
      for f in fitted
      if f.curve.group == 'dense'
    }
  for budget in (6e18, 2e19):
    assert found['uneven'][budget] == found['even'][budget]
  assert found['uneven'][1e20] > 3 * found['even'][1e20]


def test_refusals_and_unfinished_runs_are_told(tmp_path):
  """One budget falls to its end, so nothing is compared there."""
  runs = published(np.random.default_rng(0))
  falling = [
    (entry, entry.facts['params'] ** -0.1 + 3)
    if (entry.group, entry.budget) == ('dense', 6e18)
    else (entry, loss)
    for entry, loss in runs
  ]
  write(tmp_path, falling)
  run.result_path(tmp_path, runs[-1][0]).unlink()
  text = fit.write(tmp_path)
  assert f'{len(runs) - 1} of {len(runs)} runs are over' in text
  assert 'no minimum: the minimum lies above the largest size' in text
  told = json.loads((tmp_path / 'fit.json').read_text())
  assert 'refused' in told['curves'][0]['parabola']
  means = [mean['loss'] for mean in told['curves'][0]['mean_losses']]
  assert means == sorted(means, reverse=True)
  assert f'{means[-1]:.4f} (' in text
  # In its place stands the best size there is.
  with (tmp_path / 'isoflop.csv').open() as file:
    assert [row['relative_flops'] for row in csv.DictReader(file)][6] == '1.0'
  rows = [r for r in told['comparisons'] if r['method'] == 'parabola']
  assert {row['budget'] for row in rows} == {2e19, 1e20}


def test_variants(tmp_path):
  """Some at one budget, one of which does not spend it."""
  runs = published(np.random.default_rng(0))
  for x in np.linspace(-1, 1, 5):
    params = 4e8 * np.exp(x)
    add(runs, 'raw', 6e18, params, 3.12 + 0.1 * x * x)
    # As many steps as a run of the group `raw`, and of no other.
    steps = int(100 + 10 * x)
    runs[-1][0].facts['steps'] = steps
    loss = 3.2 + 0.1 * x * x + 0.01 * (x > 0)
    add(runs, 'removed', 6e18, params, loss, equal_flops=False, steps=steps)
  add(runs, 'mod', 3e20, 1e9, None)  # Its only run has diverged.
  write(tmp_path, runs)
  text = fit.write(tmp_path)
  assert 'mod at 3e+20 FLOPs, 0 runs and 1 that diverged' in text
  assert 'raw at 6e+18, parabola: parameters' in text
  assert 'removed at 6e+18, parabola' not in text
  assert 'its runs do not spend the budget' in text
  (row,) = json.loads((tmp_path / 'fit.json').read_text())['equal_steps']
  assert (row['group'], row['against'], row['pairs']) == ('raw', 'removed', 5)
  gain = row['loss_difference']
  assert gain['value'] == pytest.approx(-0.084)
  assert gain['low'] < -0.085 < -0.083 < gain['high'] < -0.07
  assert (tmp_path / 'variants.png').stat().st_size > 10_000
  fitted, _ = fit.fit(fit.curves(run.results(tmp_path)))
  pictures = fit._pictures(fitted)
  assert {f.curve.group for f in pictures['isoflop']} == {'dense', 'mod'}
  assert {f.curve.budget for f in pictures['variants']} == {6e18}
  assert len(pictures['variants']) == 4


def test_nothing_to_fit(tmp_path, command):
  runs = []
  add(runs, 'dense', 1e18, 1e6, None)
  write(tmp_path, runs)
  status, _, err = command('fit', f'--workdir={tmp_path}')
  assert (status, err.count('\n')) == (2, 1)
  assert 'no run in' in err
  assert '(1 diverged)' in err
