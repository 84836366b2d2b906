"""Adaptive transformers: what is replaced, what it costs, what stays."""

import dataclasses
import functools
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import flops
from mod_jax import trees
from mod_jax.errors import UserError
from mod_jax.layers.acm import ACM
from mod_jax.layers.mod import VisionRoutingConfig
from mod_jax.models import acm
from mod_jax.models import vit
from mod_jax.models.acm import ACMModelConfig
from mod_jax.models.acm import acmize
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig

DENSE = ViTConfig(
  image_size=8,
  patch_size=4,
  num_classes=3,
  num_layers=2,
  width=8,
  num_heads=2,
)
LANGUAGE = LMConfig(
  vocab_size=11,
  mlp='gelu',
  num_layers=1,
  width=8,
  num_heads=4,
  num_kv_heads=2,
  mlp_dim=6,
  routing=None,
)
N = 2
BOTH = ACMModelConfig(backbone=DENSE, num_learners=N)
ALONE = ACMModelConfig(backbone=DENSE, num_learners=N, replace=(acm.FFNS,))


@pytest.fixture(scope='module', autouse=True)
def _compile_fast():
  before = jax.config.values['jax_disable_most_optimizations']
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@functools.cache
def dense_params(config=DENSE):
  """Returns parameters large enough to tell things apart."""
  shapes = nn.unbox(
    jax.eval_shape(
      lambda: config.build().init(jax.random.key(0), config.example())
    )
  )
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype),
    shapes['params'],
  )


@functools.cache
def converted(config=DENSE, **options):
  # A generator that compiles quickly.
  key = jax.random.key(0, impl='rbg')
  return acmize(
    config, dense_params(config), key=key, num_learners=N, **options
  )


def images():
  rng = np.random.default_rng(1)
  return jnp.asarray(rng.normal(size=(2, 8, 8, 3)), jnp.float32)


@pytest.fixture(scope='module')
def run(quick):
  @functools.partial(quick, static_argnames=('config', 'mode'))
  def run(config, params, inputs, mode='gated', key=None):
    rngs = {} if key is None else {'gumbel': key}
    return config.build(mode=mode).apply({'params': params}, inputs, rngs=rngs)

  return run


def paths(config):
  return {
    f'block_{i}/{part}'
    for i in range(config.num_layers)
    for part in (
      'mlp',
      *(f'attention/{name}' for name in ('query', 'key', 'value', 'out')),
    )
  }


class TestAcmize:
  def test_everything_is_replaced(self):
    config, params, _ = converted()
    assert config == BOTH
    assert set(config.modules) == paths(DENSE)
    names = trees.flatten(params)
    for name in config.modules:
      assert not any(n.startswith(f'{name}/') for n in names)
      assert f'{acm.parameter_name(name)}/up' in names
    mlp = config.modules['block_0/mlp']
    assert (mlp.min_learners, mlp.hidden, mlp.activation) == (0, 16, 'gelu')
    out = config.modules['block_1/attention/out']
    assert (out.inputs, out.outputs, out.min_learners) == (8, 8, 1)

  def test_ffns_only(self):
    config, params, report = converted(replace=(acm.FFNS,))
    assert set(config.modules) == {'block_0/mlp', 'block_1/mlp'}
    names = trees.flatten(params)
    assert 'block_0/attention/query/kernel' in names
    assert 'attention' not in report

  def test_some_by_rule(self):
    rules = ('block_1/mlp', r'block_0/.*/(query|key)')
    config = dataclasses.replace(BOTH, replace=rules)
    assert set(config.modules) == {
      *('block_1/mlp', 'block_0/attention/query', 'block_0/attention/key')
    }

  @pytest.mark.parametrize('options', [{}, {'replace': (acm.FFNS,)}])
  def test_the_rest_is_kept_bit_for_bit(self, options):
    config, params, _ = converted(**options)
    dense, after = map(trees.flatten, (dense_params(), params))
    kept = [n for n in after if not n.startswith('acm_')]
    assert 'block_0/mlp_norm/scale' in kept
    for name in kept:
      np.testing.assert_array_equal(after[name], dense[name])
    gone = {
      n
      for n in dense
      if any(n.startswith(f'{module}/') for module in config.modules)
    }
    assert set(kept) == set(dense) - gone

  def test_report(self):
    config, params, report = converted()
    lines = report.splitlines()
    assert len(lines) == 1 + 5 + 1  # Blocks are alike.
    (mlp,) = [x for x in lines if x.startswith('block_*/mlp')]
    before = sum(
      x.size for x in jax.tree.leaves(dense_params()['block_0']['mlp'])
    )
    after = sum(x.size for x in jax.tree.leaves(params['acm_block_0_mlp']))
    assert f'{before:,} -> {after:,}' in mlp
    assert '8->32' in mlp
    assert '2 x 8->16' in mlp
    assert '0..2' in mlp
    (out,) = [x for x in lines if x.startswith('block_*/attention/out')]
    assert '1..2' in out
    for model in (DENSE, config):
      assert f'{flops.forward(model):.4e}' in lines[-1]

  def test_options_reach_the_modules(self):
    config = ACMModelConfig(
      backbone=dataclasses.replace(DENSE, dtype='bfloat16'),
      num_learners=2,
      ffn_min_learners=1,
      projection_min_learners=0,
      projection_activation='linear',
      temperature=0.5,
    )
    mlp = config.modules['block_0/mlp']
    query = config.modules['block_0/attention/query']
    assert (mlp.min_learners, query.min_learners) == (1, 0)
    assert (mlp.activation, query.activation) == ('gelu', 'linear')
    assert (mlp.temperature, mlp.dtype) == (0.5, 'bfloat16')

  @pytest.mark.parametrize(
    ('backbone', 'options', 'message'),
    [
      (DENSE, {'num_learners': 3}, 'num_learners=3 does not divide the 32'),
      (DENSE, {'num_learners': 16}, 'num_learners=16 leaves no hidden unit'),
      (
        DENSE,
        {'replace': ('block_0/mpl',)},
        r"'block_0/mpl' matches no module.*nearest is block_0/mlp",
      ),
      (
        DENSE,
        {'replace': (acm.FFNS, 'block_7/.*')},
        r"'block_7/\.\*' matches no module",
      ),
      (DENSE, {'replace': ()}, r'replace=\(\)'),
      (DENSE, {'num_learners': 0}, 'num_learners=0'),
      (dataclasses.replace(DENSE, remat='full'), {}, "remat='none'"),
      (
        dataclasses.replace(DENSE, routing=VisionRoutingConfig()),
        {},
        r'backbone\.routing.*None',
      ),
      (LMConfig(), {}, r'backbone\.routing.*None'),
      (
        dataclasses.replace(LANGUAGE, scan_layers=True),
        {},
        'scan_layers=False',
      ),
    ],
  )
  def test_refused(self, backbone, options, message):
    with pytest.raises(UserError, match=message) as error:
      ACMModelConfig(**{'backbone': backbone, 'num_learners': N, **options})
    assert '\n' not in str(error.value)

  def test_parameters_of_another_model(self):
    params = dense_params(dataclasses.replace(DENSE, num_layers=1))
    key = jax.random.key(0, impl='rbg')
    with pytest.raises(UserError, match='the dense model does not fit'):
      acmize(DENSE, params, key=key, num_learners=N, replace=(acm.FFNS,))


class TestForward:
  def test_choices_of_every_module(self, run):
    config, params, _ = converted()
    output = run(config, params, images())
    assert set(output.choices) == paths(DENSE)
    assert output.logits_BV.shape == (2, 3)
    learners = {n: c.learners_BL for n, c in output.choices.items()}
    for name, learners_BL in learners.items():
      assert learners_BL.shape == (2, DENSE.num_tokens)
      assert learners_BL.min() >= config.modules[name].min_learners

  def test_exact_learners_are_the_dense_model(self, run, quick):
    params = jax.tree.map(lambda x: x, dense_params())  # A copy.
    model, adaptive, _ = converted(replace=(acm.FFNS,))
    adaptive = dict(adaptive)
    for i in range(DENSE.num_layers):
      dense = params[f'block_{i}']['mlp']
      dense['down']['bias'] *= 0
      gate = {
        **adaptive[f'acm_block_{i}_mlp']['gate'],
        'logits': {
          'kernel': jnp.zeros((2, N + 1)),
          'bias': 9.0 * jax.nn.one_hot(N, N + 1),
        },
      }
      adaptive[f'acm_block_{i}_mlp'] = {
        'up': dense['up']['kernel'].reshape(8, N, -1).swapaxes(0, 1),
        'bias': dense['up']['bias'].reshape(N, -1),
        'down': dense['down']['kernel'].reshape(N, -1, 8),
        'gate': gate,
      }
    dense = quick(DENSE.build().apply)({'params': params}, images())
    want_BV = dense.logits_BV
    for mode in ('gated', N):
      logits_BV = run(model, adaptive, images(), mode).logits_BV
      np.testing.assert_allclose(logits_BV, want_BV, atol=1e-4)
    fewer_BV = run(model, adaptive, images(), N - 1).logits_BV
    assert jnp.abs(fewer_BV - want_BV).max() > 0.01

  def test_a_language_model(self, run):
    config, params, report = converted(LANGUAGE)
    assert f'dense {flops.forward(LANGUAGE, 1):.4e}' in report
    longer = acm.report(config, 9)
    assert f'dense {flops.forward(LANGUAGE, 9):.4e}' in longer
    assert set(config.modules) == paths(LANGUAGE)
    output = run(config, params, jnp.arange(10).reshape(2, 5))
    assert output.output.logits_BLV.shape == (2, 5, 11)
    assert output.choices['block_0/attention/key'].learners_BL.shape == (2, 5)
    # Queries of four heads, keys of two.
    assert config.modules['block_0/attention/query'].outputs == 8
    assert config.modules['block_0/attention/key'].outputs == 4
    assert 'block_*/attention/key' in report


def test_capture_is_what_dense_modules_see_and_say(quick):
  params = dense_params()
  capture = quick(acm.capture, static_argnums=0)
  captured = capture(BOTH, {'params': params}, images())
  assert set(captured) == paths(DENSE)
  for name, (z_BLD, y_BLD) in captured.items():
    assert z_BLD.shape == y_BLD.shape == (2, 5, 8)
    block, *path = name.split('/')
    layer = functools.reduce(lambda tree, key: tree[key], path, params[block])
    if path == ['mlp']:
      hidden = z_BLD @ layer['up']['kernel'] + layer['up']['bias']
      hidden = nn.gelu(hidden, approximate=False)
      layer = layer['down']
    else:
      hidden = z_BLD
    kernel = layer['kernel'].reshape(hidden.shape[-1], 8)
    want_BLD = hidden @ kernel + layer['bias'].reshape(8)
    np.testing.assert_allclose(y_BLD, want_BLD, atol=1e-4)
  only = capture(ALONE, {'params': params}, images())
  assert set(only) == {'block_0/mlp', 'block_1/mlp'}
  np.testing.assert_allclose(
    only['block_1/mlp'][1], captured['block_1/mlp'][1], atol=1e-5
  )


def test_modules_run_as_they_would_alone(run, quick):
  # The first block's input is the dense model's, whatever replaces it.
  config, params, _ = converted()
  name = 'block_0/attention/query'
  module = config.modules[name]
  capture = quick(acm.capture, static_argnums=0)
  z_BLD, _ = capture(config, {'params': dense_params()}, images())[name]
  _, alone = ACM(module).apply(
    {'params': params[acm.parameter_name(name)]}, z_BLD
  )
  choice = run(config, params, images()).choices[name]
  np.testing.assert_allclose(choice.logits_BLM, alone.logits_BLM, atol=1e-5)


@pytest.fixture(scope='module')
def base():
  return ACMModelConfig(backbone=vit.vit_base())


class TestFlops:
  def test_a_base_model_costs_what_the_dense_one_does(self, base):
    dense = flops.forward(base.dense_twin())
    assert abs(flops.forward(base) / dense - 1) < 0.01
    gates = sum(row.get('gate', 0) for _, row in base.flops_table())
    assert 0.005 < gates / dense < 0.015
    assert base.modules['block_3/attention/out'].hidden == 96
    assert base.modules['block_3/mlp'].hidden == 768

  def test_linear_in_the_number_of_learners(self, base):
    def total(learners):
      table = base.flops_table(learners=learners)
      return sum(sum(row.values()) for _, row in table)

    totals = [total(k) for k in (0, 1, 2, 2.5, 4)]
    step = totals[1] - totals[0]
    np.testing.assert_allclose(
      totals, [totals[0] + k * step for k in (0, 1, 2, 2.5, 4)], rtol=1e-6
    )
    assert totals[-1] == flops.forward(base)
    learners = sum(m.learner_flops for m in base.modules.values())
    assert step == 197 * learners

  def test_by_name(self):
    means = dict.fromkeys(BOTH.modules, 0.0)
    none = sum(sum(r.values()) for _, r in BOTH.flops_table(learners=means))
    means['block_1/mlp'] = 1.5
    rows = dict(BOTH.flops_table(learners=means))
    assert rows['block_0']['learners'] == 0
    spent = DENSE.num_tokens * 1.5 * BOTH.modules['block_1/mlp'].learner_flops
    assert rows['block_1']['learners'] == spent
    assert sum(sum(r.values()) for r in rows.values()) - none == spent

  def test_what_is_left_is_counted_as_before(self):
    dense, rows = dict(DENSE.flops_table()), dict(BOTH.flops_table())
    assert rows['embed'] == dense['embed']
    assert rows['head'] == dense['head']
    assert rows['block_0']['mlp'] == 0
    # Of attention the products of queries, keys and values.
    tokens = DENSE.num_tokens
    assert rows['block_0']['attention'] == 4 * 8 * tokens**2
    alone = dict(ALONE.flops_table())
    assert alone['block_0']['attention'] == dense['block_0']['attention']

  @pytest.mark.parametrize('mlp', ['gelu', 'swiglu'])
  def test_a_language_models_ffn_costs_what_it_replaces(self, mlp):
    backbone = dataclasses.replace(LANGUAGE, mlp=mlp, mlp_dim=8)
    config = ACMModelConfig(
      backbone=backbone, num_learners=N, replace=(acm.FFNS,)
    )
    dense = acm.dense_modules(backbone)['block_0/mlp'].flops
    assert config.modules['block_0/mlp'].learner_flops * N == dense
    rows = dict(config.flops_table(7))
    assert rows['block_0']['learners'] == 7 * dense

  def test_parameters_are_counted(self):
    params = converted()[1]
    total = sum(x.size for x in jax.tree.leaves(params))
    assert flops.num_params(BOTH) == total
    assert f'{total:,}' in flops.report(BOTH)


def test_names_of_parameters_are_told_apart():
  names = [acm.parameter_name(name) for name in BOTH.modules]
  assert len(set(names)) == len(names)
  assert all(re.fullmatch(r'acm_\w+', name) for name in names)
