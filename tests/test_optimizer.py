"""The optimiser: the run's schedule, what decays, and clipping."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import tiny

from mod_jax import optimizer as optimizer_lib
from mod_jax import trees
from mod_jax.errors import UserError
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.detr import DETRConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.optimizer import OptimizerConfig


def test_warmup_and_cosine_fill_the_run():
  config = OptimizerConfig(
    learning_rate=2.0, warmup_steps=10, final_fraction=0.25
  )
  rate = optimizer_lib.schedule(config, 50)
  assert float(rate(0)) == 0
  np.testing.assert_allclose(rate(5), 1.0, rtol=1e-6)
  np.testing.assert_allclose(rate(10), 2.0, rtol=1e-6)
  np.testing.assert_allclose(rate(30), (2.0 + 0.5) / 2, rtol=1e-6)
  # Steps are counted from 0: the last of 50 is 49, one short of the end.
  last = 0.5 + 1.5 * (1 + math.cos(math.pi * 39 / 40)) / 2
  np.testing.assert_allclose(rate(49), last, rtol=1e-5)
  np.testing.assert_allclose(rate(50), 0.5, rtol=1e-6)
  rates = [float(rate(step)) for step in range(51)]
  assert rates[:11] == sorted(rates[:11])
  assert rates[10:] == sorted(rates[10:], reverse=True)


ALL = ('.', 1.0, 0)
# What a config, its steps or its parameters refuse.
REFUSED = {
  # Other numbers have ranges as those of any config: test_configs.py.
  'epsilon': {'epsilon': 1e-40},  # 0 in float32.
  'beta2': {'beta2': 1 - 1e-9},  # 1 in float32.
  'warmup_steps=-1': {'warmup_steps': -1},
  'no regular expression': {'rules': (('(', 1.0, 0),)},
  'no regular': {'rules': (('a{99999999999}', 1.0, 0),)},
  r'rules\[1\]\[1\]=-1\.0': {'rules': (ALL, ('.', -1.0, 0))},
  r'rules\[0\]\[2\]=-1': {'rules': (('.', 1.0, -1),)},
  'warmup_steps=20 .* 20 steps': {'warmup_steps': 20},
  'nothing in a run of 20': {'warmup_steps': 0, 'rules': (('.', 1.0, 20),)},
  'head/kernel, norm/scale, position:': {
    'rules': (('block_', 1.0, 0), ('patch', 1.0, 0))
  },
  r"rules\[0\].*'blok_1/mlp'.*block_1/m": {
    'rules': (('blok_1/mlp', 1, 0), ALL)
  },
  'freeze every parameter': {'rules': (('position', 0.0, 0), ('.', 0.0, 0))},
}


@pytest.mark.parametrize('words', REFUSED)
def test_refusals(words):
  def make():
    config = OptimizerConfig(**{'warmup_steps': 0} | REFUSED[words])
    optimizer_lib.make_optimizer(config, 20)
    optimizer_lib.check_rules(config, named_params())

  with pytest.raises(UserError, match=words):
    make()


def test_the_longest_warmup_and_the_last_step():
  config = OptimizerConfig(warmup_steps=20, rules=(('.', 1.0, 20),))
  optimizer_lib.make_optimizer(config, 21)


@pytest.mark.parametrize('num_steps', [1, 40])
def test_parts_of_a_run_follow_its_length(num_steps):
  config = OptimizerConfig(
    learning_rate=0.5, warmup_steps=0.25, rules=(('.*', 1.0, 0.5),)
  )
  rate = optimizer_lib.schedule(config, num_steps)
  assert rate(round(num_steps / 4) if num_steps > 1 else 0) == 0.5
  moved = train_ones(config, num_steps, named_params(['kernel']))
  first = next(i for i, step in enumerate(moved) if step['kernel'])
  assert first == num_steps // 2


def test_updates_follow_the_schedule():
  config = dataclasses.replace(CONSTANT, warmup_steps=3, final_fraction=0.1)
  rate = optimizer_lib.schedule(config, 8)
  # Adam divides a constant gradient by itself.
  moved = [step['head/kernel'] for step in train_ones(config, 8)]
  expected = [-rate(step) for step in range(8)]
  np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-7)


def model_params(**changes):
  """Parameters of ones, shaped as a model's that has everything."""
  routing = MoDConfig(predictor_width=8)
  model = dataclasses.replace(tiny.LM, num_layers=4, routing=routing)
  config = dataclasses.replace(model, tied_head=False, **changes)
  shapes = tiny.shapes(config)['params']
  return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_weight_decay_spares_norms_routers_and_biases(scan_layers):
  config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.25)
  optimizer = optimizer_lib.make_optimizer(config, 10)
  params = model_params(
    scan_layers=scan_layers, adaptive=AdaptiveConfig(replace=(FFNS,))
  )
  zeros = jax.tree.map(np.zeros_like, params)
  update = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])
  updates = update(zeros, params)
  spared = set()
  for name, update in trees.flatten(updates).items():
    if not np.any(update):
      spared.add(name)
      continue
    np.testing.assert_allclose(update, -0.5 * 0.25)
    assert name.split('/')[-1] in ('kernel', 'embedding', 'up', 'down')
    assert 'router' not in name
  assert 0 < len(spared) < len(trees.flatten(updates))
  for name in spared:
    assert name.endswith(('/scale', '/bias', 'router/kernel'))


@pytest.mark.parametrize(
  ('clip_norm', 'clipped'),
  [
    # By the global norm, and the predictor apart.
    (1.0, {'a': 0.6, 'b': 0.8, 'predictor': 1.0}),
    (50.0, {'a': 3.0, 'b': 4.0, 'predictor': 50.0}),
    (0.0, {'a': 3.0, 'b': 4.0, 'predictor': 120.0}),
    (1.0, {'a': 0.6, 'b': 0.8}),
  ],
)
def test_clipping(clip_norm, clipped):
  # Adam would divide the clipped norm away, unless its epsilon is large: the
  # update is then nearly proportional to the gradient.
  config = dataclasses.replace(
    CONSTANT, learning_rate=1.0, epsilon=1e6, clip_norm=clip_norm
  )
  optimizer = optimizer_lib.make_optimizer(config, 10)
  sizes = {'a': 3.0, 'b': 4.0, 'predictor': 120.0}
  grads = {name: {'kernel': np.float32([sizes[name]])} for name in clipped}
  updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
  seen = {
    name: float(-update['kernel'][0] * config.epsilon)
    for name, update in updates.items()
  }
  assert seen == pytest.approx(clipped, rel=1e-3)


# A model by names alone.
NAMES = (
  'position',
  'patch/kernel',
  'block_0/mlp/kernel',
  'block_1/mlp/kernel',
  'block_1/router/kernel',
  'norm/scale',
  'head/kernel',
)


def named_params(names=NAMES):
  return trees.unflatten({name: np.full(2, 3.0, np.float32) for name in names})


def train_ones(config, steps=6, params=None):
  """Returns how far each parameter went in each step, gradients being 1."""
  optimizer = optimizer_lib.make_optimizer(config, steps)
  params = named_params() if params is None else params
  state = optimizer.init(params)
  ones = jax.tree.map(np.ones_like, params)
  moved = []
  for _ in range(steps):
    updates, state = optimizer.update(ones, state, params)
    params = jax.tree.map(np.add, params, updates)
    flat = trees.flatten(updates)
    moved.append({name: float(update[0]) for name, update in flat.items()})
  return moved


CONSTANT = OptimizerConfig(
  learning_rate=0.5,
  warmup_steps=0,
  final_fraction=1.0,
  weight_decay=0.0,
  clip_norm=0.0,
)


class TestSGD:
  def test_momentum_without_nesterov(self):
    config = dataclasses.replace(CONSTANT, kind='sgd', momentum=0.5)
    steps = [moved['head/kernel'] for moved in train_ones(config, 3)]
    # Velocities 1, 1.5, 1.75.
    assert steps == pytest.approx([-0.5, -0.75, -0.875])

  def test_decays_within_the_gradient(self):
    config = dataclasses.replace(
      CONSTANT, kind='sgd', momentum=0.0, weight_decay=0.25
    )
    (moved,) = train_ones(config, 1)
    assert moved['head/kernel'] == pytest.approx(-0.5 * (1 + 0.25 * 3))
    for name in ('norm/scale', 'block_1/router/kernel', 'position'):
      assert moved[name] == pytest.approx(-0.5)


class TestRules:
  RULES = (
    ('block_1/', 0.5, 3),
    ('^block_', 0.0, 0),
    ('kernel$|position', 2.0, 0),
    ('.', 1.0, 0),
  )

  @pytest.mark.parametrize('kind', ['adamw', 'sgd'])
  def test_first_match_counts_and_frozen_is_frozen(self, kind):
    config = dataclasses.replace(
      CONSTANT, kind=kind, weight_decay=0.1, rules=self.RULES
    )
    plain = dataclasses.replace(config, rules=())
    ruled, free = train_ones(config), train_ones(plain)
    for step in range(6):
      assert ruled[step]['block_0/mlp/kernel'] == 0
      for name in ('block_1/mlp/kernel', 'block_1/router/kernel'):
        assert (ruled[step][name] == 0) == (step < 3)
      assert ruled[step]['norm/scale'] == pytest.approx(
        free[step]['norm/scale'], rel=1e-5
      )
    assert ruled[0]['head/kernel'] == pytest.approx(2 * free[0]['head/kernel'])
    assert ruled[0]['position'] == pytest.approx(2 * free[0]['position'])
    if kind == 'adamw':
      # The moments are as large as if it had trained all along.
      assert ruled[3]['block_1/router/kernel'] == pytest.approx(
        0.5 * free[3]['block_1/router/kernel'], rel=1e-4
      )

  def test_what_is_frozen_for_ever_is_not_clipped_for(self):
    rules = (('block_', 0.0, 0), ('.', 1.0, 0))
    config = dataclasses.replace(
      CONSTANT, kind='sgd', momentum=0.0, clip_norm=1.0, rules=rules
    )
    (moved,) = train_ones(config, 1)
    free = 2 * sum(not name.startswith('block_') for name in NAMES)
    assert moved['head/kernel'] == pytest.approx(-0.5 / math.sqrt(free))

  def test_a_frozen_parameter_ignores_nan(self):
    config = dataclasses.replace(CONSTANT, rules=(('.', 1.0, 2),))
    optimizer = optimizer_lib.make_optimizer(config, 4)
    params = named_params()
    bad = jax.tree.map(lambda x: x * np.nan, params)
    updates, _ = optimizer.update(bad, optimizer.init(params), params)
    assert all(not np.any(x) for x in jax.tree.leaves(updates))


class TestLayerDecay:
  FACTORS = {
    'position': 1 / 8,
    'patch/kernel': 1 / 8,
    'block_0/mlp/kernel': 1 / 4,
    'block_1/mlp/kernel': 1 / 2,
    'block_1/router/kernel': 1 / 2,
    'norm/scale': 1,
    'head/kernel': 1,
  }

  def test_by_the_distance_from_the_head(self):
    config = dataclasses.replace(
      CONSTANT, kind='sgd', momentum=0.0, layer_decay=0.5
    )
    (moved,) = train_ones(config, 1)
    assert moved == pytest.approx(
      {name: -0.5 * factor for name, factor in self.FACTORS.items()}
    )

  @pytest.mark.parametrize(
    ('params', 'words'),
    [
      (lambda: model_params(scan_layers=True), 'scan_layers=False'),
      (lambda: named_params(('head/kernel',)), 'has none'),
      (lambda: tiny.shapes(DETRConfig())['params'], 'decoder and encoder'),
      (lambda: tiny.shapes(VLMConfig())['params'], 'language and tower'),
    ],
  )
  def test_needs_one_stack_of_numbered_blocks(self, params, words):
    with pytest.raises(UserError, match=words):
      optimizer_lib.check_rules(OptimizerConfig(layer_decay=0.5), params())

  def test_what_reads_the_input_comes_before_the_blocks(self):
    config = OptimizerConfig(layer_decay=0.5)
    last = {'norm', 'head', 'head_distilled'}
    for model in (
      dataclasses.replace(tiny.VIT, distilled=True),
      dataclasses.replace(tiny.VIT, input_norm=True),
      Wav2Vec2Config(num_layers=2),
    ):
      params = tiny.shapes(model)['params']
      optimizer_lib.check_rules(config, params)
      for name in trees.flatten(params):
        if not name.startswith('block'):
          factor = optimizer_lib.scale_of(config, name, 2).factor
          assert factor == (1 if name.split('/')[0] in last else 1 / 8), name


@pytest.mark.parametrize('kind', ['adamw', 'sgd'])
def test_means_of_gradients_in_bfloat16(kind):
  params = {'kernel': jax.numpy.ones((2, 3))}
  config = OptimizerConfig(kind=kind, mu_dtype='bfloat16', warmup_steps=0)
  optimizer = optimizer_lib.make_optimizer(config, 10)
  state = optimizer.init(params)
  _, state = optimizer.update(params, state, params)
  arrays = [x for x in jax.tree.leaves(state) if x.shape == (2, 3)]
  # AdamW's mean squares stay.
  expected = ['bfloat16', 'float32'] if kind == 'adamw' else ['bfloat16']
  assert [x.dtype.name for x in arrays] == expected


def test_the_state_of_a_plain_run_is_what_it_was():
  # Checkpoints find arrays by these paths.
  params = named_params(('head/kernel',))
  state = optimizer_lib.make_optimizer(OptimizerConfig(), 200).init(params)
  paths = {
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, _ in jax.tree_util.tree_leaves_with_path(state)
  }
  assert paths == {
    '2/count',
    '2/mu/head/kernel',
    '2/nu/head/kernel',
    '4/count',
  }
