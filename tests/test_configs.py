"""Every config file builds, in every variant, and its `tiny` one trains."""

import dataclasses
import functools
import inspect
import math
import pathlib
import re
import subprocess
import sys
import typing

from flax import linen as nn
import jax
import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import flops, parallel
from mod_jax import optimizer as optimizer_lib
from mod_jax.errors import UserError
from mod_jax.layers.acm import ACMConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.scores import SCORES
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Those of sweeps build another class: tests/sweeps/test_plan.py has them.
FILES = sorted(
  str(p.relative_to(ROOT))
  for p in (ROOT / 'configs').rglob('*.py')
  if p.parent.name != 'sweeps'
)


@functools.cache
def load(file):
  return config_lib.load(ROOT / file)


CASES = [(file, variant) for file in FILES for variant in load(file).VARIANTS]


@functools.cache
def build(file, variant):
  return load(file).get_config(variant)


def shapes_of(model):
  """Returns the boxed shapes of a model's variables; computes nothing.

  Of a vision transformer with as few blocks as have every kind of parameter;
  likewise of a model that reads pictures and text, without its routers.
  """
  if isinstance(model, ViTConfig):
    model = _shallow(model, 2)
  elif isinstance(model, DynamicViTConfig):
    # Before every other block, where those between are routed.
    step = 1 if model.routing is None else 2
    after = step * (len(model.stages) + 1)
    model = dataclasses.replace(
      model,
      backbone=_shallow(model.backbone, after),
      stages=tuple(range(step, after, step)),
    )
  elif isinstance(model, VLMConfig):
    language = dataclasses.replace(model.language, num_layers=2, routing=None)
    tower = model.tower
    if not isinstance(tower, DynamicViTConfig):  # Those are shallow already.
      tower = _shallow(tower, 2)
    model = dataclasses.replace(model, tower=tower, language=language)
  return _shapes_of(model)


def _shallow(model, num_layers):
  routing = model.routing
  if routing is not None:
    routing = VisionRoutingConfig(score=routing.score)
  # No axis of the mesh divides the classes.
  return dataclasses.replace(
    model,
    num_layers=num_layers,
    routing=routing,
    num_classes=1000,
    reduction=None,  # It has no parameters.
  )


@functools.cache  # Many experiments share a model.
def _shapes_of(model):
  rngs = {'params': jax.random.key(0), 'routing': jax.random.key(0)}
  return jax.eval_shape(lambda: model.build().init(rngs, model.example()))


@pytest.mark.parametrize('file', FILES)
def test_variants(file):
  assert load(file).__doc__.strip()
  assert {'', 'tiny'} < set(load(file).VARIANTS)
  load(file).get_config()  # A file without a variant is the plain command.
  with pytest.raises(UserError, match="unknown variant 'tiney'.*'tiny'"):
    load(file).get_config('tiney')


@pytest.mark.parametrize(('file', 'variant'), CASES)
def test_builds(file, variant):
  config = build(file, variant)
  again = config_lib.from_json(ExperimentConfig, config_lib.to_json(config))
  assert again == config
  optimizer_lib.make_optimizer(config.optimizer, config.train.num_steps)
  length = getattr(config.data, 'length', None)  # Images have none.
  if isinstance(config.model, Wav2Vec2Config):
    length = 16_000  # Samples of a second.
  assert flops.forward(config.model, length) > 0
  assert config.train.batch_size % config.train.grad_accum_steps == 0
  if variant.endswith('tiny'):  # Short already, by numbers of steps.
    return
  fields = ['train.num_steps'] + ['dense.num_steps'] * bool(config.dense)
  phased = getattr(config.objective, 'phases', {})
  fields += [f'objective.{name}.num_steps' for name in phased]
  short = config_lib.replace(config, dict.fromkeys(fields, 3))
  optimizer_lib.make_optimizer(short.optimizer, 3)


def groups(cls):
  """Yields a dataclass and those of its fields, at any depth."""
  if not inspect.isabstract(cls):
    yield cls
  for hint in typing.get_type_hints(cls).values():
    for member in (hint, *typing.get_args(hint)):
      if dataclasses.is_dataclass(member):
        yield from groups(member)


def example(cls):
  """Returns an instance by its defaults, and small where there are none."""
  fields = dataclasses.fields(cls)
  return cls(**{f.name: 1 for f in fields if f.default is dataclasses.MISSING})


GROUPS = sorted(set(groups(ExperimentConfig)), key=lambda cls: cls.__name__)
GROUPS += [Mode, RoutingMode, MLPConfig, ACMConfig, *SCORES.values()]


@pytest.mark.parametrize('cls', GROUPS)
def test_every_number_has_a_range(cls):
  """And is checked: neither infinity nor what would take for ever gets in.

  Likewise no word but those of a field's choices.
  """
  base = example(cls)
  tried = 0
  for name, hint in typing.get_type_hints(cls, include_extras=True).items():
    bad = []
    if 'float' in str(hint):
      bad += [math.inf, -math.inf, math.nan, 1e39]
    if 'Literal' in str(hint) and 'ClassVar' not in str(hint):
      bad += ['no such choice']
    if re.search(r'\bint\b', str(hint)):
      bad += [10**20, -(10**20)]
      # Without a range it would be the bare type.
      assert str(hint).count('Range(') >= len(re.findall(r'\bint\b', str(hint)))
    for value in bad:
      for given in (value, (value,), (value,) * 3, (('.', value, value),)):
        with pytest.raises(UserError, match=name):
          dataclasses.replace(base, **{name: given})
      tried += 1
  numbers = [f for f in vars(base).values() if type(f) in (int, float)]
  assert bool(tried) >= bool(numbers)


@pytest.mark.slow
def test_random_overrides():
  """The first of those that `python tools/fuzz_configs.py` goes on with."""
  command = [sys.executable, 'tools/fuzz_configs.py', '--count=60', '--seed=0']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  counts = re.search(r'60 overrides: (\d+) accepted, (\d+) ref', done.stdout)
  assert min(map(int, counts.groups())) > 5


@pytest.mark.parametrize('file', FILES)
def test_batches_and_parameters_fit_their_mesh_and_have_rules(file):
  for variant in load(file).VARIANTS:
    config = build(file, variant)
    sizes = [getattr(config.mesh, axis) for axis in parallel.MESH_AXES]
    # The rest of the devices: enough that the batch is really divided.
    sizes = tuple(2 if size == -1 else size for size in sizes)
    mesh = jax.sharding.AbstractMesh(sizes, parallel.MESH_AXES)
    rows = config.train.batch_size // config.train.grad_accum_steps
    parallel.check_batch(rows, mesh, 'batch_size')
    parallel.check_batch(config.evaluation.batch_size, mesh, 'batch_size')
    shapes = shapes_of(config.model)
    parallel.shardings(shapes, mesh)
    optimizer_lib.check_rules(config.optimizer, nn.unbox(shapes)['params'])


def test_amod_as_published():
  """Gadhikar et al. 2024: recipes, backbones, depths at equal FLOPs."""
  file = 'configs/vit/imagenet.py'
  names = ('deit_tiny', 'deit_small', 'vit_base', 'vit_large')
  for suffix, depths in (
    ('_isoflop', (9, 9, 9, 18)),
    ('_isoflop_eighth', (7, 6, 6, 13)),
  ):
    for name, depth in zip(names, depths, strict=True):
      config = build(file, name + suffix)
      assert config.model == dataclasses.replace(
        build(file, f'{name}_dense').model, num_layers=depth
      )
      shorter = build('configs/vit/sweep.py', name + suffix)
      assert shorter.model == config.model

  file = 'configs/vit/transfer.py'
  assert build(file, 'pets') == build(file, 'pets_deit_small')
  for data in ('cars', 'pets', 'flowers'):
    for name in names:
      capacities = build(file, f'{data}_{name}').model.capacities
      first = next(i for i, c in enumerate(capacities) if c is not None)
      late = data == 'cars' and name in ('deit_small', 'vit_base')
      assert first == (5 if late else 1)
      assert build(file, f'{data}_{name}_dense').model.routing is None


def test_dynamic_vit_as_published():
  """Rao et al. 2021: the ablations cost 2.9 GMACs; DeiT's averages, warm-up."""
  file = 'configs/vit/dynamic.py'
  for name in ('deit_small', 'one_stage', 'two_stages'):
    assert 2.9e9 <= flops.published_macs(build(file, name).model) < 3e9
  model = build(file, 'one_stage').model
  assert (model.stages, model.keep) == ((6,), 0.25)
  config = build(file, 'deit_small')
  assert config.train.ema_decay == 0.9999
  assert config.optimizer.warmup_steps == 5 / 30
  assert config.data.augment.cutmix == 1.0


# The others differ from these in numbers alone, once they are tiny: those of
# the vision transformers all train on digits. A conversion, which learns from a
# dense run in several phases, has tests of its own; those of other tasks are
# trained by the tests of these.
TINY = (
  'configs/lm/mod.py',
  'configs/vit/transfer.py',
  'configs/vit/compose.py',  # Pruned and routed.
  'configs/detection/scenes.py',
  'configs/speech/words.py',
  'configs/vlm/scenes.py',
)


def test_every_kind_is_tried():
  """Whatever is new in some file's `tiny` needs a line above."""

  def kinds(file):
    config = build(file, 'tiny')
    return {type(config.model), type(config.data), config.optimizer.kind}

  files = [file for file in FILES if not file.startswith('configs/acm/')]
  assert set().union(*map(kinds, files)) == set().union(*map(kinds, TINY))


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize('file', TINY[:3])
def test_tiny_trains(file, tmp_path):
  phases.train(build(file, 'tiny'), tmp_path, max_steps=2)
  losses = [x['loss'] for x in metrics_lib.read(tmp_path) if 'loss' in x]
  assert np.isfinite(losses).all()
  assert len(losses) >= 2
