"""Minima of curves and surfaces that are known, from noisy runs."""

import numpy as np
import pytest

from mod_jax.sweeps import optimum
from mod_jax.sweeps.optimum import NoMinimumError

pytestmark = pytest.mark.slow

TRIALS = 200
# E, A, B, a, b: Hoffmann et al. 2022 and Besiroglu et al. 2024, and a surface
# whose sides differ more.
SURFACES = {
  'Hoffmann': (1.69, 406.4, 410.7, 0.34, 0.28),
  'Besiroglu': (1.82, 482.0, 2085.4, 0.35, 0.37),
  'steep': (1.8, 7000.0, 500.0, 0.5, 0.3),
}
# Where the sizes lie around the minimum, as powers of e: ends, and how many.
GRIDS = {
  'centred': (-1.2, 1.2, 7),
  'few': (-1.0, 1.0, 5),
  'above': (-0.4, 2.0, 7),
  'below': (-2.0, 0.4, 7),
  'one-sided': (-0.15, 2.2, 8),
}


def losses(surface, params, tokens):
  e, a_term, b_term, a, b = surface
  return e + a_term / params**a + b_term / tokens**b


def least(surface, budget):
  """Returns the parameters and the loss of the best model of 6ND FLOPs."""
  _, a_term, b_term, a, b = surface
  ratio = (a * a_term / (b * b_term)) ** (1 / (a + b))
  params = ratio * (budget / 6) ** (b / (a + b))
  return params, losses(surface, params, budget / 6 / params)


def runs(surface, budget, grid, seeds, noise, rng, shift=0.0):
  """Returns parameters, tokens and noisy losses of the runs of a budget."""
  low, high, count = grid
  best, _ = least(surface, budget)
  sizes = best * np.exp(np.linspace(low, high, count) + shift)
  params = np.repeat(sizes, seeds)
  tokens = budget / 6 / params
  exact = losses(surface, params, tokens)
  return params, tokens, exact + noise * rng.normal(size=len(params))


def holds(estimate, truth):
  low, high = estimate.interval
  assert low <= estimate.value <= high
  return low <= truth <= high


@pytest.mark.parametrize('noise', [0.003, 0.015])
@pytest.mark.parametrize('grid', GRIDS)
@pytest.mark.parametrize('surface', SURFACES)
def test_intervals_hold_the_true_minimum(surface, grid, noise):
  """In 85% of the trials at least, where a minimum is reported."""
  surface, grid = SURFACES[surface], GRIDS[grid]
  rng = np.random.default_rng(0)
  best, loss = least(surface, 1e19)
  sizes, least_losses, refused = [], [], 0
  for trial in range(TRIALS):
    params, _, noisy = runs(surface, 1e19, grid, 3, noise, rng)
    try:
      found = optimum.of_curve(
        params, noisy, optimum.noise([(params, noisy)]), seed=trial
      )
    except NoMinimumError:
      refused += 1
      continue
    sizes.append(holds(found.log_params, np.log(best)))
    least_losses.append(holds(found.loss, loss))
  assert np.mean(sizes) >= 0.85
  assert np.mean(least_losses) >= 0.85
  if grid[0] < -0.3 < 0.3 < grid[1] and noise < 0.01:
    assert refused < 0.1 * TRIALS


def test_a_parabola_alone_would_be_too_sure():
  """So the doubt about the shape is no decoration."""
  surface, rng = SURFACES['steep'], np.random.default_rng(0)
  params, _, noisy = runs(surface, 1e19, (-1.2, 1.2, 7), 3, 1e-4, rng)
  found = optimum.of_curve(params, noisy, optimum.noise([(params, noisy)]))
  truth = np.log(least(surface, 1e19)[0])
  assert holds(found.log_params, truth)
  parabola = optimum._DRAWS // len(optimum._SHAPES)
  alone = optimum.Estimate(
    found.log_params.value, found.log_params.draw_R[:parabola]
  )
  assert not holds(alone, truth)


@pytest.mark.parametrize(
  # With less noise, the grid of the exponents is coarser than their spread,
  # unless it adapts.
  ('surface', 'noise'),
  [*((name, 0.004) for name in SURFACES), ('Besiroglu', 0.001)],
)
def test_the_surface_of_all_budgets(surface, noise):
  """Off-centre at each budget, in another direction each time."""
  surface, rng = SURFACES[surface], np.random.default_rng(0)
  held, refused = [], 0
  for _ in range(12):
    curves = [
      runs(surface, budget, (-1.2, 1.2, 6), 2, noise, rng, shift)
      for budget, shift in zip(
        (6e18, 2e19, 1e20), rng.uniform(-0.7, 0.7, 3), strict=True
      )
    ]
    try:
      found = optimum.surface(*map(np.concatenate, zip(*curves, strict=True)))
      for budget, (params, tokens, _) in zip(
        (6e18, 2e19, 1e20), curves, strict=True
      ):
        minimum = found.minimum(params, tokens)
        best, loss = least(surface, budget)
        held.append(holds(minimum.log_params, np.log(best)))
        held.append(holds(minimum.loss, loss))
    except NoMinimumError:
      refused += 1
  assert np.mean(held) >= 0.85
  assert refused <= 2


def test_the_surface_without_noise():
  surface, rng = SURFACES['Besiroglu'], np.random.default_rng(0)
  curves = [
    runs(surface, budget, (-1.2, 1.2, 6), 1, 1e-9, rng)
    for budget in (6e18, 2e19, 1e20)
  ]
  found = optimum.surface(*map(np.concatenate, zip(*curves, strict=True)))
  np.testing.assert_allclose(found.exponents, surface[3:], rtol=1e-3)
  scale = np.exp(found.exponents * found.log_units)
  plain = found.terms * [1, *scale]
  np.testing.assert_allclose(plain, surface[:3], rtol=0.02)


@pytest.mark.parametrize(
  ('params', 'loss', 'message'),
  [
    ([1, 2, 4] * 3, [3.0, 2.9, 3.0] * 3, '3 sizes, of at least 4'),
    ([1, 2, 4, 8], [3.0, 2.9, 2.8, 2.9], 'no run more than|noise hides'),
    ([1, 2, 4, 8, 16], [3.0, 3.1, 3.15, 3.1, 3.0], 'do not bend upwards'),
    ([1, 2, 4, 8, 16], [3.0, 2.8, 2.65, 2.55, 2.5], 'above the largest'),
    ([1, 2, 4, 8, 16], [2.5, 2.55, 2.65, 2.8, 3.0], 'below the smallest'),
    ([1, 2, 4, 8, 16], [3.0, 2.7, 3.2, 2.6, 3.1], 'noise hides'),
  ],
)
def test_no_minimum(params, loss, message):
  params, loss = np.array(params, float), np.array(loss)
  with pytest.raises(NoMinimumError, match=message):
    optimum.of_curve(params, loss, optimum.noise([(params, loss)]))
