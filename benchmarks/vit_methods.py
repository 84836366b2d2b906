"""Methods that skip work, on a task of pictures: runs, table and picture.

For each seed a dense model learns from scratch. Every method starts from its
weights and is trained as long as the others; so are the dense model itself and
its first blocks, which cost about what A-MoD does. A narrower dense model of
that cost is trained from scratch for as long as both together. Controls choose
tokens at random or by a fixed stride, drop patches at random, or pool them.
Accuracies are those of all held-out pictures, before that training and after
it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import re
from typing import Any

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

# Returns a run of the config file by the name of its variant.
Variants = Callable[[str], ExperimentConfig]


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


def _of(name: str, changes: Mapping[str, Any] | None = None):
  """Returns what makes a variant, with fields changed by dotted name."""
  return lambda variants: config_lib.replace(variants(name), changes or {})


def _whole(variants: Variants) -> ExperimentConfig:
  """Returns the dense model with all of its blocks, trained on."""
  return dataclasses.replace(variants('isoflop'), model=variants('').model)


def _narrower(variants: Variants) -> ExperimentConfig:
  """Returns a narrower dense model, which is trained as long as two others."""
  steps = [variants(name).train.num_steps for name in ('', 'amod')]
  return config_lib.replace(
    variants(''), {'model.width': 52, 'train.num_steps': sum(steps)}
  )


def _without_heads(changes: Mapping[str, Any]):
  """Returns what makes a DynamicViT without heads, which have a rate."""
  return lambda variants: config_lib.replace(
    variants('dynamic'), {'optimizer': variants('amod').optimizer, **changes}
  )


def _with_exits(variants: Variants) -> ExperimentConfig:
  """Returns the dense model, with rates for exits, which learn at the first."""
  optimizer = dataclasses.replace(
    variants('dynamic').optimizer,
    rules=((rival_tasks.EXIT_NAMES, 1.0, 0), ('.*', 0.1, 0.1)),
  )
  return dataclasses.replace(_whole(variants), optimizer=optimizer)


def _moefied(k: int, experts: int):
  """Returns what makes a run of MoEfication, of half the steps: it has two."""

  def make(variants):
    config = _whole(variants)
    width = config.model.width
    slot = rivals.MoEfied(
      width=width, hidden=4 * width, num_experts=experts, k=k, router=experts
    )
    changes = {
      'model.feed_forward': slot,
      'train.num_steps': config.train.num_steps // 2,
    }
    return config_lib.replace(config, changes)

  return make


def _adaptive(variants: Variants) -> ExperimentConfig:
  """Returns ACM's conversion, whose last phase is as long as others."""
  config = machine.configs('acm/vit.py').get_config('digits')
  dense = variants('')
  steps = variants('amod').train.num_steps
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


def _as_rival(task: Callable[..., rival_tasks.Rival], **settings):
  """Returns what trains a run as a task of `rival_tasks.py`."""
  return lambda config, directory: loop.train(
    task(config, **settings), config, directory
  )


def _relu_first(config: ExperimentConfig, directory: pathlib.Path):
  """Trains the model with ReLU, and then the experts that it is split into."""
  before = directory / 'phase_relu'
  relu = dataclasses.replace(config, model=rival_tasks.with_relu(config.model))
  result = phases.train(relu, before)
  if not result.finished:
    return result
  config = dataclasses.replace(config, init=str(before.absolute()))
  return loop.train(rival_tasks.MoEfication(config), config, directory)


@dataclasses.dataclass(frozen=True)
class Method:
  """A model of the study.

  Attributes:
    make: returns its run, given the variants on the task.
    train: trains the run in a directory, and returns how that ended.
    from_dense: whether it starts from the dense model's weights.
  """

  make: Callable[[Variants], ExperimentConfig]
  train: Callable[[ExperimentConfig, pathlib.Path], loop.Result] = phases.train
  from_dense: bool = True


METHODS = {
  'dense': Method(_of(''), from_dense=False),
  'dense, trained on': Method(_whole),
  'dense, 4 blocks': Method(_of('isoflop')),
  'A-MoD 50%': Method(_of('amod')),
  'MoD 50%': Method(_of('mod')),
  'random 50%': Method(_of('mod', {'model.routing.score': 'gaussian'})),
  'stride 50%': Method(_of('mod', {'model.routing.score': 'stride'})),
  'DynamicViT .7': Method(_of('dynamic')),
  'patches dropped at random': Method(
    _without_heads({'model.score': 'random'})
  ),
  'pooling': Method(
    _without_heads({'model.score': 'structural', 'model.stages': (3,)})
  ),
  'ToMe, r = 6': Method(_of('tome')),
  'EViT .7': Method(_of('evit')),
  'ACM, β = .5': Method(_adaptive),
  'A-ViT, depth 4': Method(_whole, _as_rival(rival_tasks.Halting, depth=4.0)),
  'A-ViT, depth 3': Method(_whole, _as_rival(rival_tasks.Halting, depth=3.0)),
  'Zero Time Waste, .9': Method(
    _with_exits, _as_rival(rival_tasks.Exits, threshold=0.9)
  ),
  'Zero Time Waste, .7': Method(
    _with_exits, _as_rival(rival_tasks.Exits, threshold=0.7)
  ),
  'MoEfication, 8 of 16': Method(_moefied(8, 16), _relu_first),
  'MoEfication, 4 of 16': Method(_moefied(4, 16), _relu_first),
  'A-MoD 12.5%': Method(_of('amod', {'model.routing.capacity': 0.125})),
  'MoD 12.5%': Method(_of('mod', {'model.routing.capacity': 0.125})),
  'random 12.5%': Method(
    _of(
      'mod',
      {'model.routing.score': 'gaussian', 'model.routing.capacity': 0.125},
    )
  ),
  'ToMe, r = 11': Method(_of('tome', {'model.reduction.r': 11})),
  'EViT .4': Method(_of('evit', {'model.reduction.keep': 0.4})),
  'dense, narrower': Method(_narrower, from_dense=False),
}


class Methods:
  """A study of all methods on one task.

  Args:
    study: with the results.
    variants: of the config file, on this task.
    title: of the picture.
  """

  def __init__(
    self,
    study: Study,
    variants: Variants,
    title: str,
  ):
    self._study, self._variants, self._title = study, variants, title

  def run(self, seeds: Sequence[str]) -> None:
    """Trains all models, prints the table and draws the picture."""
    if not self._study.only_table:  # Else pictures need not be there.
      configs = {
        f'{name}/{seed}': self._config(name, seed)
        for seed in seeds
        for name in METHODS
      }
      self._study.train(configs, self._tell, self._train)
    found = self._study.results()
    print(study_tables.methods(found))
    viz.save(self._draw(found), self._study.path('.png'))

  def _config(self, name: str, seed: str) -> ExperimentConfig:
    method = METHODS[name]
    init = None
    if method.from_dense:
      init = str(self._study.workdir(f'dense/{seed}').absolute())
    common = {'seed': int(seed), 'init': init, 'log.tensorboard': False}
    return config_lib.replace(method.make(self._variants), common)

  def _tell(self, config: ExperimentConfig, metrics: dict) -> dict:
    """Returns the result of a run."""
    lines = metrics_lib.read(self._study.workdir(config.name))
    curve = {x['step']: x['accuracy'] for x in lines if x['kind'] == 'eval'}
    result = {'before': curve.get(0), 'curve': curve}
    result |= of_images(config, metrics)
    if 'mflops' in metrics:  # Each picture has its own.
      result['forward_flops'] = 1e6 * metrics['mflops']
    return result

  def _train(self, config: ExperimentConfig, directory: pathlib.Path):
    name, _ = config.name.rsplit('/', 1)
    return METHODS[name].train(config, directory)

  def _draw(self, found: dict[str, dict]):
    """Returns a picture of accuracy over compute; bars are over seeds."""
    points = []
    for name, of_seed in study_tables.by_model(found).items():
      runs = list(of_seed.values())
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
