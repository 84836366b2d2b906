"""Pruning, routing and adaptive width on the digits: each alone, and together.

    python benchmarks/compose_digits.py --workdir=runs/compose_digits

For each seed one dense model is trained (`configs/vit/digits.py`). From it,
A-MoD, DynamicViT and ACM are trained alone, each by its own config, and one
after another, each from the checkpoint of the previous one
(`configs/vit/compose.py`). Batches are half as large as in the configs.
Accuracies are those of all 355 held-out images, and FLOPs those of a forward
pass with the learners that the gates choose. Each run is one line of
`compose_digits.jsonl` beside this file; see `study.py`. The table and the
picture show the seeds that have all runs.
"""

import sys

from absl import app, flags
import machine
from machine import point, spread
from study import Study, of_images
import study_tables

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/compose_digits')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_BATCH = flags.DEFINE_integer('batch', 32, 'Images of a step.')

# Name, config file, variant, variant for trials, and the run whose weights it
# starts from.
RUNS = (
  ('dense', 'vit/digits.py', '', 'tiny', None),
  ('A-MoD', 'vit/digits.py', 'amod', 'amod_tiny', 'dense'),
  ('DynamicViT', 'vit/digits.py', 'dynamic', 'dynamic_tiny', 'dense'),
  ('ACM', 'acm/vit.py', 'digits', 'tiny', 'dense'),
  ('A-MoD, DynamicViT', 'vit/compose.py', 'pruned', 'tiny', 'A-MoD'),
  (
    *('A-MoD, DynamicViT, ACM', 'vit/compose.py', '', 'tiny_acm'),
    'A-MoD, DynamicViT',
  ),
)


def load(path: str, variant: str) -> ExperimentConfig:
  """Returns a variant of a config file, with another batch size."""
  config = machine.configs(path).get_config(variant)
  rows = {'train.batch_size': _BATCH.value}
  if config.model.adaptive is not None:
    phases = ('learners', 'gates', 'end_to_end')
    rows = {f'objective.{name}.batch_size': _BATCH.value for name in phases}
  return config_lib.replace(config, {**rows, 'evaluation.every': 0})


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  return {**of_images(config, metrics), 'batch': _BATCH.value}


def draw(runs: dict[str, list[dict]]):
  """Returns a picture of accuracy over compute."""
  points = []
  for name, of_seeds in runs.items():
    alone = name in ('DynamicViT', 'ACM')
    points.append(
      point(
        name,
        f'{name} alone' if alone else 'one part after another',
        spread([run['forward_flops'] / 1e6 for run in of_seeds])['mean'],
        spread([run['accuracy'] for run in of_seeds]),
      )
    )
  return viz.accuracy_flops(
    points,
    title='Digits: pruning, routing and adaptive width, alone and together',
    xlabel='MFLOPs (multiply-add = 2) of a forward pass over one image',
  )


def main(_):
  planned = {}
  for seed in _SEEDS.value:
    for name, path, variant, trial, before in RUNS:
      config = load(path, trial if _STUDY.tiny else variant)
      init = before and str(_STUDY.workdir(f'{before}/{seed}'))
      planned[f'{name}/{seed}'] = config_lib.replace(
        config, {'seed': int(seed), 'init': init}
      )
  _STUDY.train(planned, tell)
  results = _STUDY.results()
  runs = study_tables.of_whole_seeds(results)
  if not runs.get('dense'):
    sys.exit('No seed has all of its runs yet.')
  print(study_tables.composition(results))
  viz.save(draw(runs), _STUDY.path('.png'))


if __name__ == '__main__':
  app.run(main)
