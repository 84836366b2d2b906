"""Runs that convert a dense model to an adaptive one, and their picture."""

from collections.abc import Callable, Iterable

import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.tasks.experiment import ExperimentConfig


def run(
  study: Study,
  config: ExperimentConfig,
  seed: int,
  init: str | None = None,
  **objective,
) -> ExperimentConfig:
  """Returns a run that starts from the run `init` of this seed."""
  changes = {'seed': seed, 'log.tensorboard': False, 'evaluation.every': 0}
  if init is not None:
    changes['init'] = str(study.workdir(f'{init}/{seed}').absolute())
  changes |= {f'objective.{name}': x for name, x in objective.items()}
  return config_lib.replace(config, changes)


def planned(
  study: Study,
  config: ExperimentConfig,
  seed: int,
  budgets: Iterable[str],
  counts: Iterable[int] = (),
  of: str = '',
) -> dict[str, ExperimentConfig]:
  """Returns the conversions of the run `dense` of a seed, in their order.

  Learners and gates are trained once, then end to end for each budget. Static
  models run as many learners in all modules, and are trained for as long. `of`
  ends all names.
  """
  learners, gates = f'learners{of}', f'gates{of}'
  runs = {
    learners: run(study, config, seed, 'dense', phase='learners'),
    gates: run(study, config, seed, learners, phase='gates'),
  }
  for budget in budgets:
    runs[f'adaptive, β = {budget}{of}'] = run(
      *(study, config, seed, gates), phase='end_to_end', budget=float(budget)
    )
  for k in counts:
    runs[f'static, k = {k}{of}'] = run(
      *(study, config, seed, learners),
      **{'phase': 'end_to_end', 'static_learners': k, 'gates.num_steps': 0},
    )
  return {f'{name}/{seed}': config for name, config in runs.items()}


def draw(
  found: dict[str, dict],
  cost: Callable[[dict], float],
  accuracy: Callable[[dict], float],
  **texts: str,
):
  """Returns a picture of the models that have all seeds of the dense one.

  `cost` are millions of multiply-accumulates of a result.
  """
  models = study_tables.by_model(found)
  points = [
    machine.point(
      name,
      name.split(',')[0],
      machine.spread(list(map(cost, runs)))['mean'],
      machine.spread(list(map(accuracy, runs))),
    )
    for name, of_seed in models.items()
    if not name.startswith(study_tables.FIRST_PHASES)
    and len(runs := list(of_seed.values())) == len(models['dense'])
  ]
  return viz.accuracy_flops(points, pareto=True, **texts)
