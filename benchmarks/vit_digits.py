"""Adapting a dense ViT on the handwritten digits: accuracy and cost, by seeds.

    python benchmarks/vit_digits.py --workdir=runs/vit_digits

For each seed a dense model is trained (`configs/vit/digits.py`), then adapted
by variants of that file and fine-tuned. Accuracies are those of all 355
held-out images: after adaptation without any training, and after fine-tuning.
The result is written beside this file as JSON and as a picture. Half an hour on
two cores; started again, it continues.
"""

import re

from absl import app, flags
import machine
from machine import cell, point, spread

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
import results as results_lib

_WORKDIR = flags.DEFINE_string('workdir', 'runs/vit_digits', 'For the runs.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_TINY = flags.DEFINE_bool('tiny', False, 'Small models and few steps: a trial.')

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


def load(variant: str) -> ExperimentConfig | None:
  """Returns a variant of the config file; None if it has none for trials."""
  module = machine.configs('vit/digits.py')
  if _TINY.value:
    variant = f'{variant}_tiny'.strip('_')
  return module.VARIANTS.get(variant, lambda: None)()


def run(
  variant: str, config: ExperimentConfig, seed: str, init: str | None = None
) -> dict:
  """Trains unless finished; returns accuracies before and after, and costs."""
  workdir = f'{_WORKDIR.value}/{variant or "dense"}_{seed}'
  config = config_lib.replace(config, {'seed': int(seed), 'init': init})
  result = phases.train(config, workdir)
  lines = [x for x in metrics_lib.read(workdir) if x['kind'] == 'eval']
  before = next((x for x in lines if x['step'] == 0), None)
  return {
    'workdir': workdir,
    'before': None if before is None else before['accuracy'],
    'after': result.metrics['accuracy'],
    'gmacs': flops.published_macs(config.model) / 1e9,
    'parameters': flops.num_params(config.model),
  }


def main(_):
  configs = {variant: load(variant) for variant in _NAMES}
  configs = {variant: x for variant, x in configs.items() if x is not None}
  runs = {_NAMES[variant]: [] for variant in configs}
  for seed in _SEEDS.value:
    dense = None
    for variant, config in configs.items():
      done = run(variant, config, seed, dense)
      runs[_NAMES[variant]].append(done)
      dense = dense or done['workdir']
  table = {}
  for name, seed_runs in runs.items():
    before = [r['before'] for r in seed_runs if r['before'] is not None]
    table[name] = {
      'gmacs': seed_runs[0]['gmacs'],
      'parameters': seed_runs[0]['parameters'],
      'before': spread(before) if before else None,
      'after': spread([r['after'] for r in seed_runs]),
    }
  trial = _WORKDIR.value if _TINY.value else None
  results_lib.save(__file__, {'seeds': _SEEDS.value, 'models': table}, trial)
  print('| | MMACs | parameters | adapted, % | fine-tuned, % |')
  print('|---|---|---|---|---|')
  for name, row in table.items():
    print(
      f'| {name} | {1e3 * row["gmacs"]:.1f} | {row["parameters"]:,} |'
      f' {cell(row["before"], 100, 1)} | {cell(row["after"], 100, 1)} |'
    )
  points = [
    point(name, re.split('[, ]', name)[0], 1e3 * row['gmacs'], row['after'])
    for name, row in table.items()
  ]
  figure = viz.accuracy_flops(
    points,
    title='Digits: accuracy after fine-tuning against cost',
    xlabel='MMACs per image',
  )
  viz.save(figure, machine.result_path(__file__, '.png', trial))


if __name__ == '__main__':
  app.run(main)
