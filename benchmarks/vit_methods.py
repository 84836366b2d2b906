"""Methods that skip work, on a task of pictures: runs, table and picture.

For each seed a dense model learns from scratch. Every method starts from its
weights and is trained as long as the others; so are the dense model itself and
its first blocks, which cost about what A-MoD does. A narrower dense model of
that cost is trained from scratch for as long as both together. Controls choose
tokens at random or by a fixed stride, drop patches at random, or pool them.
Accuracies are those of all held-out pictures, before that training and after
it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
import re

import machine
import rival_tasks
import rivals
from study import Study, of_images
import study_tables

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import loop

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
  'A-ViT, depth 4': ('isoflop', {}),
  'A-ViT, depth 3': ('isoflop', {}),
  'Zero Time Waste, .9': ('isoflop', {}),
  'Zero Time Waste, .7': ('isoflop', {}),
  'MoEfication, 8 of 16': ('isoflop', {}),
  'MoEfication, 4 of 16': ('isoflop', {}),
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
def of_scenes(name: str, tiny: bool) -> ExperimentConfig:
  """Returns a variant of `configs/vit/scenes.py`, in its version for minutes.

  Args:
    name: of the variant.
    tiny: whether to take a version for seconds.
  """
  scenes = machine.configs('vit/scenes.py')
  if tiny:
    return scenes.tiny(scenes.get_config(name))
  return scenes.get_config(f'quick_{name}'.strip('_'))


def _moefied(config: ExperimentConfig, k: int, experts: int):
  """Returns a run of MoEfication, of half the steps: it takes two."""
  width = config.model.width
  slot = rivals.MoEfied(
    width=width, hidden=4 * width, num_experts=experts, k=k, router=experts
  )
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, feed_forward=slot),
    train=dataclasses.replace(
      config.train, num_steps=config.train.num_steps // 2
    ),
  )


class Methods:
  """A study of all methods on one task.

  Args:
    study: with the results.
    variant: returns what a variant of the config file is on this task.
    title: of the picture.
  """

  def __init__(
    self,
    study: Study,
    variant: Callable[[str], ExperimentConfig],
    title: str,
  ):
    self._study, self._variant, self._title = study, variant, title

  def run(self, seeds: Sequence[str]) -> None:
    """Trains all models, prints the table and draws the picture."""
    configs = {
      f'{name}/{seed}': self._config(name, seed)
      for seed in seeds
      for name in RUNS
    }
    self._study.train(configs, self._tell, self._train)
    found = self._study.results()
    print(study_tables.methods(found))
    viz.save(self._draw(found), self._study.path('.png'))

  def _adaptive(self) -> ExperimentConfig:
    """Returns ACM's conversion, whose last phase is as long as others."""
    config = machine.configs('acm/vit.py').get_config('digits')
    dense = self._variant('')
    steps = self._variant('amod').train.num_steps
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

  def _config(self, name: str, seed: str) -> ExperimentConfig:
    kind, changes = RUNS[name]
    is_adaptive = name.startswith('ACM')
    config = self._adaptive() if is_adaptive else self._variant(kind)
    if name.startswith(('dense, trained on', 'A-ViT', 'Zero', 'MoE')):
      config = dataclasses.replace(config, model=self._variant('').model)
    if name.startswith('Zero Time Waste'):  # Heads learn at the first rate.
      optimizer = dataclasses.replace(
        self._variant('dynamic').optimizer,
        rules=((rival_tasks.EXIT_NAMES, 1.0, 0), ('.*', 0.1, 0.1)),
      )
      changes = {'optimizer': optimizer}
    if experts := re.match(r'MoEfication, (\d+) of (\d+)', name):
      config = _moefied(config, *map(int, experts.groups()))
    init = None
    if name not in _FROM_SCRATCH:
      init = str(self._study.workdir(f'dense/{seed}').absolute())
    elif name != 'dense':
      more = self._variant('amod').train.num_steps
      changes = changes | {'train.num_steps': config.train.num_steps + more}
    if 'model.score' in changes:  # No prediction heads, which have a rate.
      changes = changes | {'optimizer': self._variant('amod').optimizer}
    common = {'seed': int(seed), 'init': init, 'log.tensorboard': False}
    return config_lib.replace(config, {**common, **changes})

  def _tell(self, config: ExperimentConfig, metrics: dict) -> dict:
    """Returns the result of a run."""
    lines = metrics_lib.read(self._study.workdir(config.name))
    before = [
      x['accuracy'] for x in lines if x['kind'] == 'eval' and not x['step']
    ]
    result = {'before': before[0] if before else None}
    result |= of_images(config, metrics)
    if 'mflops' in metrics:  # Each picture has its own.
      result['forward_flops'] = 1e6 * metrics['mflops']
    return result

  def _train(self, config: ExperimentConfig, directory: pathlib.Path):
    """Trains a run, and returns how it ended."""
    task = None
    if depth := re.match(r'A-ViT, depth (\d)', config.name):
      task = rival_tasks.Halting(config, depth=float(depth[1]))
    if threshold := re.match(r'Zero Time Waste, (\.\d)', config.name):
      task = rival_tasks.Exits(config, threshold=float(threshold[1]))
    if config.name.startswith('MoEfication'):
      before = directory / 'phase_relu'
      relu = rival_tasks.with_relu(config.model)
      result = phases.train(dataclasses.replace(config, model=relu), before)
      if not result.finished:
        return result
      config = dataclasses.replace(config, init=str(before.absolute()))
      task = rival_tasks.MoEfication(config)
    if task is None:
      return phases.train(config, directory)
    return loop.train(task, config, directory)

  def _draw(self, found: dict[str, dict]):
    """Returns a picture of accuracy over compute; bars are over seeds."""
    points = []
    for name, runs in study_tables.of_whole_seeds(found).items():
      accuracy = machine.spread([run['accuracy'] for run in runs])
      mega = machine.spread([run['forward_flops'] / 1e6 for run in runs])
      group = re.split(r',| (?=[\d.])', name)[0]
      points.append(machine.point(name, group, mega['mean'], accuracy))
    return viz.accuracy_flops(
      points,
      title=self._title,
      xlabel='MFLOPs (multiply-add = 2) of a forward pass over one picture',
      pareto=True,
    )
