"""Methods that skip work, on scenes of digits among clutter: accuracy and cost.

    python benchmarks/vit_scenes.py --workdir=runs/vit_scenes

For each seed a dense model learns from scratch to name the largest digit of a
scene (`configs/vit/scenes.py:quick`). Every method starts from its weights and
is trained as long as the others; so are the dense model itself and its first
blocks, which cost about what A-MoD does. A narrower dense model of that cost is
trained from scratch for as long as both together. Controls choose tokens at
random or by a fixed stride, drop patches at random, or pool them. Accuracies
are those of all 1,000 held-out scenes, before that training and after it. Every
run is a line of `vit_scenes.jsonl` beside this file; see `study.py`.
"""

import dataclasses
import functools
import pathlib

from absl import app, flags
import machine
import study
import study_tables

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks.experiment import ExperimentConfig

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'A dense run for each.')
_WORKDIR, _RUNS, _TABLE, _TINY = study.define_flags('runs/vit_scenes')

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / 'configs'
# Variant of the config file, and what is different here. All start from the
# dense model but for itself and the narrower one.
RUNS = {
  'dense': ('', {}),
  'dense, trained on': ('isoflop', {}),
  'dense, 4 blocks': ('isoflop', {}),
  'A-MoD 50%': ('amod', {}),
  'MoD 50%': ('mod', {}),
  'random 50%': ('mod', {'model.routing.score': 'gaussian'}),
  'stride 50%': ('mod', {'model.routing.score': 'stride'}),
  'DynamicViT .7': ('dynamic', {}),
  'patches dropped at random': ('dynamic', {'model.score': 'random'}),
  'pooling': ('dynamic', {'model.score': 'structural', 'model.stages': (3,)}),
  'ToMe, r = 6': ('tome', {}),
  'EViT .7': ('evit', {}),
  'ACM, β = .5': ('', {}),
  'A-MoD 12.5%': ('amod', {'model.routing.capacity': 0.125}),
  'MoD 12.5%': ('mod', {'model.routing.capacity': 0.125}),
  'random 12.5%': (
    'mod',
    {'model.routing.score': 'gaussian', 'model.routing.capacity': 0.125},
  ),
  'ToMe, r = 11': ('tome', {'model.reduction.r': 11}),
  'EViT .4': ('evit', {'model.reduction.keep': 0.4}),
  'dense, narrower': ('', {'model.width': 52}),
}
_FROM_SCRATCH = ('dense', 'dense, narrower')


@functools.cache
def variant(name: str) -> ExperimentConfig:
  """Returns a variant of the config file, in its version for minutes."""
  scenes = config_lib.load(CONFIGS / 'vit/scenes.py')
  if _TINY.value:
    return scenes.tiny(scenes.get_config(name))
  return scenes.get_config(f'quick_{name}'.strip('_'))


def adaptive() -> ExperimentConfig:
  """Returns ACM's conversion of the dense model; its last phase is as long."""
  config = config_lib.load(CONFIGS / 'acm/vit.py').get_config('digits')
  dense, steps = variant(''), variant('amod').train.num_steps
  model = dataclasses.replace(dense.model, adaptive=AdaptiveConfig())
  config = dataclasses.replace(
    config, model=model, data=dense.data, evaluation=dense.evaluation
  )
  lengths = {'learners': steps // 2, 'gates': steps // 4, 'end_to_end': steps}
  changes = {'objective.budget': 0.5}
  for phase, length in lengths.items():
    changes[f'objective.{phase}.num_steps'] = length
    changes[f'objective.{phase}.batch_size'] = dense.train.batch_size
  return config_lib.replace(config, changes)


def make_config(name: str, seed: str) -> ExperimentConfig:
  kind, changes = RUNS[name]
  config = adaptive() if name.startswith('ACM') else variant(kind)
  if name == 'dense, trained on':
    config = dataclasses.replace(config, model=variant('').model)
  init = None
  if name not in _FROM_SCRATCH:
    init = str(study.workdir(_WORKDIR.value, f'dense/{seed}').absolute())
  elif name != 'dense':
    more = variant('amod').train.num_steps
    changes = changes | {'train.num_steps': config.train.num_steps + more}
  common = {'seed': int(seed), 'init': init, 'log.tensorboard': False}
  return config_lib.replace(config, {**common, **changes})


def tell(name: str, config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  lines = metrics_lib.read(study.workdir(_WORKDIR.value, name))
  before = [
    x['accuracy'] for x in lines if x['kind'] == 'eval' and not x['step']
  ]
  return {
    'before': before[0] if before else None,
    'accuracy': metrics['accuracy'],
    'loss': metrics['loss'],
    'load': metrics.get('load'),
    'forward_flops': study.forward_flops(config, metrics.get('load')),
    'params': flops.num_params(config.model),
    'steps': config.train.num_steps,
    'batch': config.train.batch_size,
  }


def draw(found: dict[str, dict]):
  """Returns a picture of accuracy over compute; bars are over seeds."""
  points = []
  for name, runs in study_tables.of_whole_seeds(found).items():
    accuracy = machine.spread([run['accuracy'] for run in runs])
    mega = machine.spread([run['forward_flops'] / 1e6 for run in runs])['mean']
    points.append(machine.point(name, _group(name), mega, accuracy))
  return viz.accuracy_flops(
    points,
    title='Scenes: the largest digit, by methods that skip work',
    xlabel='MFLOPs (multiply-add = 2) of a forward pass over one picture',
    pareto=True,
  )


def _group(name: str) -> str:
  if name.startswith(('random', 'stride', 'patches', 'pooling')):
    return 'controls'
  return name.split(',')[0].split(' ')[0]


def main(_):
  trial = _WORKDIR.value if _TINY.value else None
  path = machine.result_path(__file__, '.jsonl', trial)
  if not _TABLE.value:
    for seed in _SEEDS.value:
      for model in RUNS:
        name = f'{model}/{seed}'
        study.train_all(
          *({name: make_config(model, seed)}, _RUNS.value, _WORKDIR.value),
          *(path, functools.partial(tell, name)),
        )
  found = study.read(path)
  print(study_tables.scenes(found))
  viz.save(draw(found), machine.result_path(__file__, '.png', trial))


if __name__ == '__main__':
  app.run(main)
