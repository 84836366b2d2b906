"""Adaptive width on the handwritten digits: budgets, learners, losses, seeds.

    python benchmarks/acm_digits.py --workdir=runs/acm_digits

For each seed a dense model is trained (`configs/vit/digits.py`) and converted
by `configs/acm/vit.py:digits`: learners and gates once, then end to end for
each budget. For comparison there are static models of the same cost, whose
modules all run the same number of learners and which train end to end for as
long; a model without the auxiliary losses; and, for one seed, other numbers of
learners. Accuracies are those of all 355 held-out images. Each run is one line
of `acm_digits.jsonl` beside this file; see `study.py`. The picture has the
models with all seeds.
"""

import sys

from absl import app, flags
import adaptive_runs
import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/acm_digits')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')

BUDGETS = ('.25', '.4', '.6', '.75')
COUNTS = (1, 2, 3, 4)
ALONE = 'adaptive, β = .4, L_b alone'  # Without the other losses.
# Numbers of learners beside 4, with one seed, and budgets of each.
LEARNERS, SWEPT = (2, 8, 16), ('.25', '.6')


def planned(seed: int) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed, each after the one that it starts from."""
  dense, adaptive = (
    machine.configs(path).get_config('tiny' if _STUDY.tiny else variant)
    for path, variant in (('vit/digits.py', ''), ('acm/vit.py', 'digits'))
  )
  runs = {f'dense/{seed}': adaptive_runs.run(_STUDY, dense, seed)}
  runs |= adaptive_runs.planned(_STUDY, adaptive, seed, BUDGETS, COUNTS)
  runs[f'{ALONE}/{seed}'] = adaptive_runs.run(
    *(_STUDY, adaptive, seed, 'gates'),
    **{'phase': 'end_to_end', 'budget': 0.4},
    **{'entropy_weight': 0.0, 'diversity_weight': 0.0},
  )
  for n in LEARNERS if seed == 0 else ():
    other = config_lib.replace(adaptive, {'model.adaptive.num_learners': n})
    runs |= adaptive_runs.planned(
      *(_STUDY, other, seed, SWEPT), of=f', {n} learners'
    )
  return runs


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  if config.objective is None:
    gmacs = flops.published_macs(config.model) / 1e9
    return {'accuracy': metrics['accuracy'], 'gmacs': gmacs}
  if 'load' in metrics:
    names = ('accuracy', 'load', 'load_std', 'token_std', 'gmacs')
    return {name: metrics[name] for name in names}
  task = make_task(config)
  # Learners alone: all of them.
  k = config.objective.static_learners or task.num_learners
  gmacs = task.macs(learners=k) / 1e9
  return {'accuracy': metrics[f'k{k}/accuracy'], 'gmacs': gmacs}


def main(_):
  for seed in map(int, _SEEDS.value):
    _STUDY.train(planned(seed), tell)
  found = _STUDY.results()
  if not found:
    sys.exit('No run is finished yet.')
  print(study_tables.adaptive(found))
  figure = adaptive_runs.draw(
    {name: x for name, x in found.items() if not name.startswith(ALONE)},
    cost=lambda result: 1e3 * result['gmacs'],
    accuracy=lambda result: result['accuracy'],
    title='Digits: adaptive width and the dense model',
    xlabel='MMACs per image',
  )
  viz.save(figure, _STUDY.path('.png'))


if __name__ == '__main__':
  app.run(main)
