"""The minimum of the loss at equal training FLOPs, with its uncertainty.

There are two methods. The first fits a parabola to the losses of one budget, in
the logarithm of the parameters (Hoffmann et al. 2022, approach 2). The second
fits one surface `E + A/N^a + B/D^b` of N parameters and D tokens to the losses
of all budgets (their approach 3), by variable projection.

Losses at equal FLOPs are not exactly a parabola. The error of a parabola's
minimum grows with the range of the sizes and their asymmetry about the minimum
(arXiv 2603.22339). So the interval of a minimum covers both noise and the shape
of the curve: it pools draws of the parabola with draws of curves `E + u/N^a +
v·N^b`, whose exponents cover the range of published ones.

Three sizes are too few for either method. If the sizes lie around the expected
optimum, the mean of their losses still compares two groups of models: this mean
exceeds the least loss by what a curve rises on its sides, and the curves of two
groups rise much alike.

The noise of a run's loss is assumed to be normal, with the same variance in all
runs of a budget. Intervals have a level of 90%. Suffixes: I runs, R draws, G
points of a grid.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np
import scipy.optimize

LEVEL = 0.9
_DRAWS = 4000  # In total over all shapes of a curve.
_JOINT_DRAWS = 400
# If more than this fraction of draws lack a minimum, none is reported.
_LOST = 0.05
_MIN_SIZES = 4
# Shapes of curves: None is the parabola, the others are exponents (a, b).
# Published exponents of parameters and tokens are .34 and .28 in Hoffmann et
# al. 2022, and .35 and .37 in the correction by Besiroglu et al. 2024.
_SHAPES = (None, (0.3, 0.3), (0.5, 0.25), (0.25, 0.5))
_EXPONENTS = (0.05, 1.5)  # Bounds of the surface's exponents.
_STEPS = 61  # Grid points for each exponent.


class NoMinimumError(Exception):
  """The data do not determine a minimum; the message says why."""


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number with its uncertainty: the best estimate, and R draws."""

  value: float
  draw_R: np.ndarray

  @property
  def interval(self) -> tuple[float, float]:
    """Lower and upper bound at `LEVEL`; widened to contain the value."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(self.draw_R, (tail, 1 - tail))
    return min(low, self.value), max(high, self.value)

  def map(self, function) -> 'Estimate':
    """Returns the estimate of a function of the number."""
    return Estimate(float(function(self.value)), function(self.draw_R))

  def minus(self, other: 'Estimate') -> 'Estimate':
    """Returns self minus an estimate that independent runs gave."""
    count = min(len(self.draw_R), len(other.draw_R))
    # Draws are ordered by shape; shuffle them, so as not to pair equal shapes.
    mixed_R = np.random.default_rng(1).permutation(other.draw_R)
    own_R = np.random.default_rng(2).permutation(self.draw_R)
    return Estimate(self.value - other.value, own_R[:count] - mixed_R[:count])


@dataclasses.dataclass(frozen=True)
class Minimum:
  """The lowest loss at a budget, and the log of its model's parameter count."""

  log_params: Estimate
  loss: Estimate


@dataclasses.dataclass(frozen=True)
class Noise:
  """The variance of a run's loss, and its estimate's degrees of freedom."""

  variance: float
  freedom: int

  def draw(self, rng, count: int) -> np.ndarray:
    """Draws `count` standard deviations, given the estimated variance."""
    chi_R = rng.chisquare(self.freedom, count) / self.freedom
    return np.sqrt(self.variance / np.maximum(chi_R, 1e-12))


def noise(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Noise | None:
  """Estimates noise from the residuals of the parabolas of all curves.

  Curves are pairs of parameters [I] and losses [I]. The result is None if the
  curves leave no degrees of freedom.
  """
  squares, freedom = 0.0, 0
  for params_I, loss_I in curves:
    if len(np.unique(params_I)) < 3:
      continue
    x_I = np.log(params_I)
    _, rest = _least_squares(_basis(x_I - x_I.mean(), None), loss_I)
    squares += rest
    freedom += len(loss_I) - 3
  return Noise(squares / freedom, freedom) if freedom > 0 else None


def _least_squares(basis_I3, loss_I) -> tuple[np.ndarray, float]:
  """Returns coefficients [3], and the residual sum of squares."""
  best_3 = np.linalg.lstsq(basis_I3, loss_I)[0]
  rest_I = loss_I - basis_I3 @ best_3
  return best_3, float(rest_I @ rest_I)


def of_curve(params_I, loss_I, noise: Noise | None, seed: int = 0) -> Minimum:
  """Returns the minimum of the parabola through the losses of one budget.

  Raises:
    NoMinimumError: there are too few sizes or runs, they do not enclose a
      minimum, or it is lost in the noise.
  """
  sizes = len(np.unique(params_I))
  if sizes < _MIN_SIZES:
    raise NoMinimumError(f'{sizes} sizes, of at least {_MIN_SIZES} needed')
  if noise is None:
    raise NoMinimumError('no run more than a parabola needs')
  x_I = np.log(params_I)
  middle = x_I.mean()
  rng = np.random.default_rng(seed)
  count = _DRAWS // len(_SHAPES)
  minima = []
  for shape in _SHAPES:
    basis_I3 = _basis(x_I - middle, shape)
    inverse_33 = np.linalg.inv(basis_I3.T @ basis_I3)
    best_3 = inverse_33 @ basis_I3.T @ loss_I
    if shape is None:
      (log_params,), (loss,) = _least(best_3[None], None)
      _check_inside(log_params + middle, x_I)
    normal_R3 = rng.normal(size=(count, 3)) @ np.linalg.cholesky(inverse_33).T
    draw_R3 = best_3 + noise.draw(rng, count)[:, None] * normal_R3
    minima.append(_least(draw_R3, shape))
  log_R, loss_R = np.concatenate(minima, axis=1)
  finite_R = np.isfinite(log_R)
  _check_not_lost(~finite_R)
  return Minimum(
    Estimate(float(log_params + middle), log_R[finite_R] + middle),
    Estimate(float(loss), loss_R[finite_R]),
  )


def of_three_sizes(
  params_I, loss_I, noise: Noise | None, seed: int = 0
) -> Minimum:
  """Returns the mean loss of three sizes, in place of the minimum.

  Each size weighs alike, both in the loss and in the logarithm of the
  parameters. The interval of the loss covers the noise of runs only.

  Raises:
    NoMinimumError: there are not three sizes, or the noise is unknown.
  """
  sizes, runs = np.unique(params_I, return_counts=True)
  if len(sizes) != 3:
    raise NoMinimumError(f'{len(sizes)} sizes, not 3')
  if noise is None:
    raise NoMinimumError('one run of each size')
  loss = np.mean([loss_I[params_I == size].mean() for size in sizes])
  rng = np.random.default_rng(seed)
  error_R = noise.draw(rng, _DRAWS) * rng.normal(size=_DRAWS)
  error_R *= np.sqrt((1 / runs).sum()) / len(sizes)
  log_params = np.log(sizes).mean()
  return Minimum(
    Estimate(float(log_params), np.full(_DRAWS, log_params)),
    Estimate(float(loss), loss + error_R),
  )


def _basis(x_I, shape):
  """Returns at x_I the three basis functions of one of `_SHAPES`, [I, 3]."""
  if shape is None:
    return np.stack([np.ones_like(x_I), x_I, x_I**2], axis=-1)
  left, right = shape
  return np.stack(
    [np.ones_like(x_I), np.exp(-left * x_I), np.exp(right * x_I)], axis=-1
  )


def _least(coefficient_R3, shape):
  """Returns locations and values of R curves' minima, nan for a missing one."""
  constant_R, u_R, v_R = coefficient_R3.T
  with np.errstate(invalid='ignore', divide='ignore'):
    if shape is None:
      x_R = np.where(v_R > 0, -u_R / (2 * v_R), np.nan)
      return x_R, constant_R + u_R * x_R + v_R * x_R**2
    left, right = shape
    both_R = (u_R > 0) & (v_R > 0)
    x_R = np.log(left * u_R / (right * v_R)) / (left + right)
    x_R = np.where(both_R, x_R, np.nan)
    sides_R = u_R * np.exp(-left * x_R) + v_R * np.exp(right * x_R)
    return x_R, constant_R + sides_R


def _check_inside(x, x_I):
  if np.isnan(x):
    raise NoMinimumError('the losses do not bend upwards')
  if not x_I.min() < x < x_I.max():
    side = 'below the smallest' if x <= x_I.min() else 'above the largest'
    raise NoMinimumError(f'the minimum lies {side} size')


def _check_not_lost(lost_R):
  if lost_R.mean() > _LOST:
    raise NoMinimumError(
      'noise hides the minimum: with as much of it,'
      f' {lost_R.mean():.0%} of repetitions would show none'
    )


@dataclasses.dataclass(frozen=True)
class Surface:
  """`E + A/N^a + B/D^b`, with N and D in units of their geometric means."""

  terms: np.ndarray  # (E, A, B).
  exponents: np.ndarray  # (a, b).
  term_R3: np.ndarray  # Draws of the terms.
  exponent_R2: np.ndarray  # Draws of the exponents.
  log_units: np.ndarray  # Logarithms of the units of N and D.
  spread: float  # Standard deviation of the residuals.

  def coefficients(self) -> dict[str, Estimate]:
    """Returns E, A, B, a and b for N and D in parameters and tokens."""
    scale_2 = np.exp(self.exponents * self.log_units)
    scale_R2 = np.exp(self.exponent_R2 * self.log_units)
    term_3, term_R3 = self.terms.copy(), self.term_R3.copy()
    term_3[1:] *= scale_2
    term_R3[:, 1:] *= scale_R2
    values = *term_3, *self.exponents
    draws = *term_R3.T, *self.exponent_R2.T
    return {
      name: Estimate(float(value), draw_R)
      for name, value, draw_R in zip('EABab', values, draws, strict=True)
    }

  def minimum(self, params_I, tokens_I) -> Minimum:
    """Returns the lowest loss along the sizes of one budget.

    Tokens are interpolated over parameters, by a parabola in the logarithms.

    Raises:
      NoMinimumError: the minimum is not between the sizes, or lost in noise.
    """
    log_I = np.log(params_I)
    power = min(2, len(np.unique(log_I)) - 1)
    x_G = np.linspace(log_I.min(), log_I.max(), 2000)
    tokens_G = np.polyval(np.polyfit(log_I, np.log(tokens_I), power), x_G)

    def least(term_R3, exponent_R2):
      n_RG = np.exp(-exponent_R2[:, :1] * (x_G - self.log_units[0]))
      d_RG = np.exp(-exponent_R2[:, 1:] * (tokens_G - self.log_units[1]))
      loss_RG = term_R3[:, :1] + term_R3[:, 1:2] * n_RG + term_R3[:, 2:] * d_RG
      best_R = loss_RG.argmin(axis=1)
      edge_R = (best_R == 0) | (best_R == len(x_G) - 1)
      return x_G[best_R], loss_RG.min(axis=1), edge_R

    (x,), (loss,), _ = least(self.terms[None], self.exponents[None])
    _check_inside(x, log_I)
    x_R, loss_R, edge_R = least(self.term_R3, self.exponent_R2)
    _check_not_lost(edge_R)
    return Minimum(Estimate(float(x), x_R), Estimate(float(loss), loss_R))


def surface(params_I, tokens_I, loss_I) -> Surface:
  """Fits the surface to the losses of all budgets of a group.

  For each pair of exponents the terms are a linear least-squares fit (Golub and
  Pereyra 1973, variable projection), so only the exponents are searched for.
  Draws are a parametric bootstrap: fits to the surface with new noise.

  Raises:
    NoMinimumError: the data do not determine the exponents.
  """
  log_I2 = np.log(np.stack([params_I, tokens_I], axis=-1))
  if len(np.unique(log_I2, axis=0)) < 6:
    raise NoMinimumError('fewer than 6 points for 5 numbers')
  units_2 = log_I2.mean(axis=0)
  log_I2 = log_I2 - units_2
  low, high = _EXPONENTS
  (pair_2,), _, (exists,) = _best(
    log_I2, loss_I[:, None], np.linspace([low, low], [high, high], _STEPS)
  )
  if not exists:
    raise NoMinimumError('the losses fall with parameters or tokens alone')
  pair_2, terms_3, rest = _refined(log_I2, loss_I, pair_2)
  if not (low < pair_2).all() or not (pair_2 < high).all():
    raise NoMinimumError('the losses do not tell the exponents')
  freedom = max(1, len(loss_I) - 5)
  spread = Noise(rest / freedom, freedom)
  rng = np.random.default_rng(0)
  fitted_I = _terms(log_I2, pair_2[None])[0] @ terms_3
  normal_IR = rng.normal(size=(len(loss_I), _JOINT_DRAWS))
  sigma_R = spread.draw(rng, _JOINT_DRAWS)
  # The grid for the draws spans six standard errors of the exponents.
  error_2 = np.sqrt(spread.variance) * _sensitivity(log_I2, pair_2, terms_3)
  ends = np.clip([pair_2 - 6 * error_2, pair_2 + 6 * error_2], low, high)
  pair_R2, term_R3, exists_R = _best(
    log_I2,
    fitted_I[:, None] + sigma_R * normal_IR,
    np.linspace(*ends, _STEPS),
  )
  _check_not_lost(~exists_R)
  return Surface(
    terms=terms_3,
    exponents=pair_2,
    term_R3=term_R3[exists_R],
    exponent_R2=pair_R2[exists_R],
    log_units=units_2,
    spread=float(np.sqrt(spread.variance)),
  )


def _best(log_I2, loss_IR, grid_G2):
  """Returns the best pair of exponents for each of R data sets.

  All pairs of the two columns of `grid_G2` are tried. The result is pairs
  [R, 2], terms [R, 3], and whether a valid pair exists [R].
  """
  pair_P2 = np.stack(np.meshgrid(*grid_G2.T), axis=-1).reshape(-1, 2)
  # In an orthonormal basis, the explained sum of squares is the sum of the
  # squared coefficients.
  q_PI3, r_P33 = np.linalg.qr(_terms(log_I2, pair_P2))
  inner_P3R = np.swapaxes(q_PI3, 1, 2) @ loss_IR
  term_P3R = np.linalg.inv(r_P33) @ inner_P3R
  explained_PR = (inner_P3R**2).sum(axis=1)
  # Valid surfaces fall with parameters and with tokens.
  falls_PR = (term_P3R[:, 1:] > 0).all(axis=1)
  explained_PR = np.where(falls_PR, explained_PR, -np.inf)
  best_R = explained_PR.argmax(axis=0)
  columns = np.arange(loss_IR.shape[1])
  exists_R = np.isfinite(explained_PR[best_R, columns])
  return pair_P2[best_R], term_P3R[best_R, :, columns], exists_R


def _sensitivity(log_I2, pair_2, terms_3):
  """Returns the exponents' standard errors for losses with unit variance."""
  basis_I3 = _terms(log_I2, pair_2[None])[0]
  slope_I2 = -log_I2 * basis_I3[:, 1:] * terms_3[1:]
  jacobian_I5 = np.concatenate([slope_I2, basis_I3], axis=1)
  covariance_55 = np.linalg.pinv(jacobian_I5.T @ jacobian_I5)
  return np.sqrt(np.diag(covariance_55)[:2])


def _terms(log_I2, pair_P2):
  """Returns the surface's basis functions for pairs of exponents, [P, I, 3]."""
  sides_PI2 = np.exp(-pair_P2[:, None] * log_I2)
  ones_PI1 = np.ones((*sides_PI2.shape[:2], 1))
  return np.concatenate([ones_PI1, sides_PI2], axis=-1)


def _refined(log_I2, loss_I, pair_2):
  """Refines a pair of exponents; returns pair, terms and sum of squares."""

  def solve(log_2):
    return _least_squares(_terms(log_I2, np.exp(log_2)[None])[0], loss_I)

  def squares(log_2):
    terms_3, rest = solve(log_2)
    return rest if (terms_3[1:] > 0).all() else np.inf

  log_2 = scipy.optimize.minimize(
    squares, np.log(pair_2), method='Nelder-Mead'
  ).x
  return np.exp(log_2), *solve(log_2)
