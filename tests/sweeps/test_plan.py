"""The runs of a sweep: their budgets, sizes and rates, and the manifest."""

import collections
import dataclasses
import pathlib

import pytest

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import TrainConfig
from mod_jax.sweeps import manifest, plan
from mod_jax.sweeps.plan import Group, SweepConfig
from mod_jax.tasks.experiment import (
  ConversionObjective,
  ExperimentConfig,
  PhaseConfig,
)

pytestmark = pytest.mark.slow

DENSE_FIRST = PhaseConfig(num_steps=9, batch_size=4, learning_rate=1e-3)
ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / 'configs/sweeps').glob('*.py'))
SHAPES = tuple((2, width, 1) for width in (8, 12, 16, 24, 32))


BASE = ExperimentConfig(
  model=LMConfig(),
  data=TextDataConfig(length=16),
  optimizer=OptimizerConfig(warmup_steps=0),
  train=TrainConfig(batch_size=4),
)


def with_train(name, value):
  changes = {f'train.{name}': value, 'checkpoint.best': 'loss'}
  if name == 'frozen':
    changes['optimizer.rules'] = (('norm', 0.0, 0), ('', 1.0, 0))
  return config_lib.replace(BASE, changes)


def small(**changes):
  """A sweep of the tiniest models, whose corpus is known."""
  settings = {
    'base': BASE,
    'budgets': (2e9, 8e9),
    'groups': (
      Group(name='dense', optimum=6.5e3),
      Group(name='mod', optimum=12e3, routing=MoDConfig()),
    ),
    'shapes': SHAPES,
    'num_sizes': (3,),
    'corpus_tokens': 1e9,
  }
  return SweepConfig(**settings | changes)


@pytest.mark.parametrize('file', FILES, ids=lambda file: file.stem)
def test_variants(file):
  module = config_lib.load(file)
  assert module.__doc__.strip()
  assert {'', 'tiny'} <= set(module.VARIANTS)
  for variant in module.VARIANTS:
    sweep = module.get_config(variant)
    assert isinstance(sweep, SweepConfig)
    text = config_lib.to_json(sweep)
    assert config_lib.from_json(SweepConfig, text) == sweep
  tiny = dataclasses.replace(module.get_config('tiny'), corpus_tokens=1e7)
  # As many sizes on each curve as a fit needs.
  sizes = collections.defaultdict(set)
  for entry in plan.entries(tiny):
    sizes[entry.group, entry.budget].add(entry.config.model)
  assert all(
    len(sizes[name, budget]) >= 4
    for name in ('dense', 'mod')
    for budget in tiny.budgets
  )


def test_runs():
  sweep = small(num_seeds=(2, 1), rate_width=16, warmup=0.25, evaluations=3)
  runs = plan.entries(sweep)
  counts = collections.Counter((e.group, e.budget) for e in runs)
  assert counts == {
    (group, budget): seeds * 3
    for group in ('dense', 'mod')
    for budget, seeds in ((2e9, 2), (8e9, 1))
  }
  assert len({entry.id for entry in runs}) == len(runs)
  # Whoever stops early has the first seed of all.
  assert [entry.seed for entry in runs] == [0] * 12 + [1] * 6
  for entry in runs:
    config, known = entry.config, entry.facts
    assert config.name == entry.id
    assert config.seed == entry.seed
    assert (config.model.routing is None) == (entry.group == 'dense')
    forward = flops.forward(config.model, 16)
    spent = 3 * forward * 4 * config.train.num_steps
    assert spent == known['train_flops']
    assert spent == pytest.approx(entry.budget, rel=0.01)
    assert known['tokens'] == 64 * config.train.num_steps
    assert known['epochs'] == known['tokens'] / 1e9
    width = config.model.width
    assert known['embedding_params'] == 256 * width
    assert known['head_flops'] == 2 * 16 * 256 * width
    rate = 1e-3 * (16 / width) ** 0.5
    assert config.optimizer.learning_rate == pytest.approx(rate, rel=1e-3)
    steps = config.train.num_steps
    assert config.optimizer.warmup_steps == int(0.25 * steps)
    assert config.evaluation.every == pytest.approx(steps / 4, abs=1)
  dense = [e.facts for e in runs if e.group == 'dense' and e.budget == 2e9]
  assert 1.0 in [known['relative_flops'] for known in dense]


def test_sizes_follow_the_optimum():
  sweep = small(growth=0.5)
  dense, mod = sweep.groups

  def widths(group, budget):
    return [shape[1] for shape in plan.choose_shapes(sweep, group, budget)]

  assert widths(dense, 2e9) == [8, 12, 16]
  # Its optimum is expected to be larger, and four budgets make it twice that.
  assert widths(mod, 2e9) == [12, 16, 24]
  assert widths(dense, 8e9) == [12, 16, 24]
  sweep = dataclasses.replace(sweep, num_sizes=(2, 3))
  assert widths(dense, 2e9) == [8, 12]
  assert widths(dense, 8e9) == [12, 16, 24]
  # Of what budget an optimum is does not hang on which budgets are planned.
  sweep = dataclasses.replace(sweep, budgets=(8e9,), num_sizes=(3,))
  assert widths(dense, 8e9) == [8, 12, 16]
  sweep = dataclasses.replace(sweep, optimum_budget=2e9)
  assert widths(dense, 8e9) == [12, 16, 24]
  own = dataclasses.replace(dense, shapes=SHAPES[:2], num_sizes=2)
  assert plan.choose_shapes(sweep, own, 2e9) == list(SHAPES[:2])
  # A search for a rate takes the sizes it is given, whatever the group's are.
  own = dataclasses.replace(own, budgets=(1,))
  sweep = small(groups=(own,), budgets=(2e9, 8e9))
  search = plan.rate_search(sweep, SHAPES[1:4:2], 1e-3)
  found = {(e.budget, e.config.model.width) for e in plan.entries(search)}
  assert found == {(2e9, 12), (2e9, 24)}


def test_routed_blocks_removed():
  """The dense half of a model takes its steps, and fewer FLOPs."""
  routing = MoDConfig()
  removed = Group(
    name='removed',
    optimum=12e3,
    routing=routing,
    without_routed_blocks=True,
    budgets=(0,),
  )
  sweep = small(groups=(*small().groups, removed))
  by_group = collections.defaultdict(list)
  for entry in plan.entries(sweep):
    if entry.budget == 2e9:
      by_group[entry.group].append(entry)
  assert {e.budget for e in plan.entries(sweep) if e.group == 'removed'} == {
    2e9
  }
  for mod, half in zip(by_group['mod'], by_group['removed'], strict=True):
    assert half.config.model == dataclasses.replace(
      mod.config.model, routing=None, num_layers=1
    )
    assert half.config.train.num_steps == mod.config.train.num_steps
    assert half.facts['of_budget'] < 0.97


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'budgets': (1e6,)}, 'budget 1e.06 is too small for 2 x .*: 1 step'),
    ({'num_sizes': (5,)}, 'has 4 sizes .*num_sizes=5'),
    ({'shapes': SHAPES[2:], 'spread': 8.0}, 'all on one side .*: add shapes'),
    ({'base': ExperimentConfig(dense=DENSE_FIRST)}, 'base.dense='),
    (
      {'base': ExperimentConfig(objective=ConversionObjective())},
      'base.objective=.*not planned for',
    ),
    (
      {'base': ExperimentConfig(model=LMConfig(adaptive=AdaptiveConfig()))},
      'base.model.adaptive=.*not planned for',
    ),
    ({'corpus_tokens': 1e5}, r'reads \S+ tokens .* the corpus has 100k'),
    ({'budgets': (2e9, 2e9)}, 'each once'),
    ({'budgets': (8e9, 2e9)}, 'lowest first'),
    ({'shapes': (*SHAPES, (2, 12, 2))}, 'would be called dense_2e09_2x12_s0'),
    ({'num_seeds': (1, 2, 3)}, 'one number for all of them, or one for each'),
    ({'groups': (Group(name='a', budgets=(2,)),)}, 'counted from 0'),
    # Each changes how many steps are taken, or what a step costs.
    ({'base': with_train('num_epochs', 0.5)}, 'num_epochs=.*not planned for'),
    ({'base': with_train('early_stop', 2)}, 'early_stop=.*not planned for'),
    ({'base': with_train('frozen', 'float32')}, 'frozen=.*not planned for'),
  ],
)
def test_bad_plans(changes, message):
  with pytest.raises(UserError, match=message):
    plan.entries(small(**changes))


def test_corpus_is_counted(tmp_path, command):
  for name, size in (('text', 5000), ('held_out', 500)):
    (tmp_path / name).write_text('x' * size)
  data = {
    'source': 'files',
    'files': f'{tmp_path}/text',
    'eval_files': f'{tmp_path}/held_out',
    'length': 16,
  }
  status, _, err = command(
    *('plan', f'--config={ROOT}/configs/sweeps/laptop.py:tiny'),
    f'--workdir={tmp_path}',
    *(f'--config.base.data.{name}={value}' for name, value in data.items()),
  )
  assert status == 2
  assert err.startswith('counting the tokens of the corpus')
  assert 'the corpus has 4.99k' in err


@pytest.mark.parametrize('begun', [manifest.RUNS, manifest.RESULTS])
def test_a_plan_may_be_replaced_before_anything_ran(begun, tmp_path):
  runs = plan.entries(small())
  digest = manifest.write(tmp_path, runs)
  assert manifest.write(tmp_path, runs) == digest
  assert manifest.write(tmp_path, runs[:-1]) != digest
  manifest.write(tmp_path, runs)
  (tmp_path / begun).mkdir()
  assert manifest.read(tmp_path) == (runs, digest)
  manifest.write(tmp_path, runs)
  with pytest.raises(UserError, match='runs of another manifest'):
    manifest.write(tmp_path, runs[:-1])


@pytest.mark.parametrize('what', ['edited', 'lost', 'added', 'no JSON'])
def test_edited_manifest(what, tmp_path):
  manifest.write(tmp_path, plan.entries(small()))
  path = tmp_path / manifest.FILE
  lines = path.read_text().splitlines()
  lines[1:2] = {
    'edited': [lines[1].replace('"seed": 0', '"seed": 7')],
    'lost': [],
    'added': [lines[1]] * 2,
    'no JSON': [lines[1][:-1]],
  }[what]
  path.write_text('\n'.join(lines) + '\n')
  with pytest.raises(UserError, match='not as it was planned'):
    manifest.read(tmp_path)


def test_command_line(tmp_path, command):
  file = f'{ROOT}/configs/sweeps/laptop.py:tiny'
  status, out, _ = command(
    *('plan', f'--config={file}', f'--workdir={tmp_path}'),
    *('--config.corpus_tokens=1e7', '--config.base.train.batch_size=4'),
  )
  assert status == 0
  assert out.startswith((tmp_path / plan.FILE).read_text())
  runs, _ = manifest.read(tmp_path)
  assert {entry.config.train.batch_size for entry in runs} == {4}
  status, _, err = command('plam')
  assert status == 2
  assert "Did you mean 'plan'" in err
