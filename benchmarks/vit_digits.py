"""Adapting a dense ViT on the handwritten digits: accuracy and cost, by seeds.

    python benchmarks/vit_digits.py --workdir=runs/vit_digits

For each seed a dense model is trained (`configs/vit/digits.py`), then adapted
by variants of that file and fine-tuned. Accuracies are those of all 355
held-out images: after adaptation without any training, and after fine-tuning.
Each run is one line of `vit_digits.jsonl` beside this file; see `study.py`.
Half an hour on two cores.
"""

import re

from absl import app, flags
import machine
from machine import point, spread
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/vit_digits')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')

# The table's name of each variant of the config file. All others start from the
# weights of the first.
_NAMES = {
  '': 'dense',
  'amod': 'A-MoD 50%',
  'mod': 'MoD 50%, raw',
  'mod_sigmoid': 'MoD 50%, sigmoid',
  'dynamic': 'DynamicViT .7',
  'isoflop': 'dense, 6 blocks',
}


def planned(seed: str) -> dict[str, ExperimentConfig]:
  """Returns the runs of a seed by name; a trial lacks some."""
  variants, runs = machine.configs('vit/digits.py').VARIANTS, {}
  for variant, name in _NAMES.items():
    file_variant = f'{variant}_tiny'.strip('_') if _STUDY.tiny else variant
    if file_variant in variants:
      init = str(_STUDY.workdir(f'dense/{seed}')) if variant else None
      runs[f'{name}/{seed}'] = config_lib.replace(
        variants[file_variant](), {'seed': int(seed), 'init': init}
      )
  return runs


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  lines = metrics_lib.read(_STUDY.workdir(config.name))
  at_first = (x for x in lines if x['kind'] == 'eval' and x['step'] == 0)
  return {
    'before': next((x['accuracy'] for x in at_first), None),
    'after': metrics['accuracy'],
    'gmacs': flops.published_macs(config.model) / 1e9,
    'params': flops.num_params(config.model),
  }


def main(_):
  for seed in _SEEDS.value:
    _STUDY.train(planned(seed), tell)
  found = _STUDY.results()
  print(study_tables.adapted(found))
  points = []
  for name, of_seed in study_tables.by_model(found).items():
    runs = list(of_seed.values())
    accuracy = spread([run['after'] for run in runs])
    group = re.split('[, ]', name)[0]
    points.append(point(name, group, 1e3 * runs[0]['gmacs'], accuracy))
  figure = viz.accuracy_flops(
    points,
    title='Digits: accuracy after fine-tuning against cost',
    xlabel='MMACs per image',
  )
  viz.save(figure, _STUDY.path('.png'))


if __name__ == '__main__':
  app.run(main)
