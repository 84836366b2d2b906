"""Adaptive transformers: what is replaced, what it costs, what stays."""

import dataclasses
import functools
import re

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import flops, trees
from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.dense import LinearConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import acm, lm, vit
from mod_jax.models.acm import acmize

DENSE = dataclasses.replace(tiny.VIT, patch_size=4)  # 5 tokens.
LANGUAGE = dataclasses.replace(
  tiny.LM,
  vocab_size=11,
  mlp='gelu',
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
)
N = 2
IMAGES = tiny.images()
GUMBEL = {'gumbel': jax.random.key(0)}
TOKENS_BL = jnp.arange(10).reshape(2, 5)


def adapted(config, **options):
  adaptive = AdaptiveConfig(**{'num_learners': N, **options})
  return dataclasses.replace(config, adaptive=adaptive)


BOTH = adapted(DENSE)
ALONE = adapted(DENSE, replace=(FFNS,))


@functools.cache
def dense_params(config=DENSE):
  return tiny.variables(config)['params']


@functools.cache
def converted(config=DENSE, **options):
  # A generator that compiles quickly.
  key = jax.random.key(0, impl='rbg')
  return acmize(
    config, dense_params(config), key=key, num_learners=N, **options
  )


def run(config, params, inputs, learners='gated', **kwargs):
  model = config.build(learners=learners)
  return tiny.apply(model, {'params': params}, inputs, **kwargs)


def choices(output):
  return stack.collect(output.aux, 'adaptive')


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
  @pytest.mark.slow
  def test_everything_is_replaced(self):
    config, params, report = converted()
    assert config == BOTH
    modules = acm.modules(config)
    assert set(modules) == paths(DENSE)
    names = trees.flatten(params)
    for name in modules:
      assert not any(n.startswith(f'{name}/') for n in names)
      assert re.fullmatch(acm.PARAMETERS, f'{name}_acm/up')
      assert re.fullmatch(acm.GATES, f'{name}_acm/gate/logits/bias')
      assert not re.fullmatch(acm.GATES, f'{name}_acm/up')
      assert acm.subtree(params, name)['up'] is names[f'{name}_acm/up']
    mlp, *_, last = report.splitlines()[1:]
    assert mlp.startswith('block_*/mlp')  # Blocks are alike.
    assert re.search(r'8->32.*2 x 8->16', mlp)
    for model in (DENSE, config):
      assert f'{flops.forward(model):.4e}' in last

  def test_the_rest_is_kept_bit_for_bit(self):
    config, params, _ = converted(replace=(FFNS,))
    dense, after = map(trees.flatten, (dense_params(), params))
    kept = [n for n in after if not re.fullmatch(acm.PARAMETERS, n)]
    assert 'block_0/mlp_norm/scale' in kept
    for name in kept:
      np.testing.assert_array_equal(after[name], dense[name])
    gone = {
      n
      for n in dense
      if any(n.startswith(f'{module}/') for module in acm.modules(config))
    }
    assert set(kept) == set(dense) - gone


def test_exact_learners_are_the_dense_model():
  dense = jax.tree.map(lambda x: x, dense_params())  # A copy.
  model, params, _ = converted(replace=(FFNS,))
  params = jax.tree.map(lambda x: x, params)
  for i in range(DENSE.num_layers):
    mlp = dense[f'block_{i}']['mlp']
    mlp['down']['bias'] *= 0
    logits = {
      'kernel': jnp.zeros((2, N + 1)),
      'bias': 9.0 * jax.nn.one_hot(N, N + 1),
    }
    params[f'block_{i}']['mlp_acm'] = {
      'up': mlp['up']['kernel'].reshape(8, N, -1).swapaxes(0, 1),
      'bias': mlp['up']['bias'].reshape(N, -1),
      'down': mlp['down']['kernel'].reshape(N, -1, 8),
      'gate': params[f'block_{i}']['mlp_acm']['gate'] | {'logits': logits},
    }
  want_BV = tiny.apply(DENSE, {'params': dense}, IMAGES).logits_BV
  for learners in ('gated', N):
    logits_BV = run(model, params, IMAGES, learners).logits_BV
    np.testing.assert_allclose(logits_BV, want_BV, atol=1e-4)
  fewer_BV = run(model, params, IMAGES, N - 1).logits_BV
  assert jnp.abs(fewer_BV - want_BV).max() > 0.01


def test_capture_is_what_dense_modules_see_and_say():
  params = dense_params()
  capture = jax.jit(acm.capture, static_argnums=0)
  captured = capture(BOTH, {'params': params}, IMAGES)
  assert set(captured) == paths(DENSE)
  for name, seen in captured.items():
    z_BLD, y_BLD = seen.z_BLD, seen.y_BLD
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
  only = capture(ALONE, {'params': params}, IMAGES)
  assert set(only) == {'block_0/mlp', 'block_1/mlp'}
  np.testing.assert_allclose(
    only['block_1/mlp'].y_BLD, captured['block_1/mlp'].y_BLD, atol=1e-5
  )


class TestFlops:
  def test_a_base_model_costs_what_the_dense_one_does(self):
    base = adapted(vit.vit_base(), num_learners=4)
    dense = flops.forward(base.dense_twin())
    assert abs(flops.forward(base) / dense - 1) < 0.01
    gates = sum(row.get('gate', 0) for _, row in base.flops_table())
    assert 0.005 < gates / dense < 0.015
    modules = acm.modules(base)
    for name, hidden, replaced in (
      ('attention/out', 96, 2 * 768**2),
      ('mlp', 768, 2 * 2 * 768 * 3072),
    ):
      assert modules[f'block_3/{name}'].hidden == hidden
      assert 4 * modules[f'block_3/{name}'].learner_flops == replaced

  @pytest.mark.parametrize('mlp', ['gelu', 'swiglu'])
  def test_a_language_models_ffn_costs_what_it_replaces(self, mlp):
    backbone = dataclasses.replace(LANGUAGE, mlp=mlp, mlp_dim=8)
    config = adapted(backbone, replace=(FFNS,))
    dense = backbone.block.mlp.flops(1)['mlp']
    assert acm.modules(config)['block_0/mlp'].learner_flops * N == dense
    rows = dict(config.flops_table(7))
    assert rows['block_0']['learners'] == 7 * dense

  def test_so_does_anybodys_feed_forward(self):
    width = LANGUAGE.width
    slot = LinearConfig(inputs=(width,), outputs=(width,), axes=('embed', None))
    backbone = dataclasses.replace(LANGUAGE, feed_forward=slot)
    (module,) = acm.modules(adapted(backbone, replace=(FFNS,))).values()
    assert module.inputs == module.outputs == width
    assert module.learner_flops * N == slot.flops(1)['linear']


# What an adaptive model shares with any other: how its layers are run.
FOUR_SLOTS = ('mlp', 'attention/query')
FOUR = adapted(
  dataclasses.replace(
    LANGUAGE, num_layers=4, routing=MoDConfig(capacity=0.5, offset=1)
  ),
  replace=(FFNS, r'block_\d+/attention/query'),
)
SLOTS = {f'block_{i}/{slot}' for i in range(4) for slot in FOUR_SLOTS}


def drawn(config):
  """Returns parameters large enough to tell things apart."""
  params = jax.tree.map(lambda x: x, dense_params(config))  # A copy.
  for name in acm.modules(config):
    # Gates that say something else of every token.
    gate = acm.subtree(params, name)['gate']
    gate['logits']['kernel'] = 9 * gate['logits']['kernel']
  return params


def graded(config, params):
  """Returns loss, choices and gradients; those of unrolled layers."""
  model = config.build(learners='train', noise=False, train=True)

  def loss(params):
    output = model.apply({'params': params}, TOKENS_BL)
    return (output.logits_BLV**2).mean(), choices(output)

  grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, found), grads = grad(params)
  return value, found, stack.unrolled(config.stack, grads)


class TestLayouts:
  """Scanned ≡ unrolled; rematerialised ≡ not."""

  @pytest.mark.slow
  def test_scanned_and_rematerialised_equals_neither(self):
    params = drawn(FOUR)
    want = graded(FOUR, params)
    found = want[1]
    assert set(found) == SLOTS
    seen = [choice.learners_BL for choice in found.values()]
    assert len({int(n) for x in seen for n in x.ravel()}) == N + 1
    config, looped = lm.scanned(FOUR, params)
    assert looped['layers']['block_1']['mlp_acm']['up'].shape[0] == 2
    got = graded(dataclasses.replace(config, remat='full'), looped)
    chex.assert_trees_all_close(got, want, atol=1e-5, rtol=1e-3)

  @pytest.mark.slow
  def test_scanned_layers_draw_apart(self):
    config, looped = lm.scanned(FOUR, drawn(FOUR))
    same = jax.tree.map(lambda x: x.at[1].set(x[0]), looped['layers'])
    gate = same['block_0']['mlp_acm']['gate']['logits']
    gate['kernel'] *= 0
    params = looped | {'layers': same}
    output = run(config, params, TOKENS_BL, 'train', rngs=GUMBEL)
    found = choices(output)
    first, other = (found[f'block_{i}/mlp'].learners_BL for i in (0, 2))
    assert (first != other).any()

  def test_capture_looks_into_scanned_and_rematerialised_twins(self):
    twin = acm.without(FOUR)
    params = dense_params(twin)
    capture = jax.jit(acm.capture, static_argnums=0)
    want = capture(FOUR, {'params': params}, TOKENS_BL)
    assert set(want) == SLOTS
    _, looped = lm.scanned(twin, params)
    config = dataclasses.replace(FOUR, scan_layers=True, remat='full')
    got = capture(config, {'params': looped}, TOKENS_BL)
    chex.assert_trees_all_close(got, want, atol=1e-5)

  def test_a_scanned_dense_model_is_acmized(self):
    config = dataclasses.replace(
      FOUR, adaptive=None, routing=None, scan_layers=True
    )
    model, params, report = acmize(
      config, dense_params(config), num_learners=N, replace=(FFNS,)
    )
    assert model == adapted(config, replace=(FFNS,))
    assert 'block_*/mlp' in report
    block = params['layers']['block_0']
    assert 'mlp' not in block
    up = block['mlp_acm']['up']
    assert up.shape[0] == 4
    assert (up[0] != up[1]).all()
    before = dense_params(config)['layers']['block_0']['attention']
    tiny.same(block['attention'], before)


@pytest.mark.parametrize(
  ('rule', 'slots'), [('top_k', 2), ('router', 5), ('never', 1)]
)
def test_a_routed_block_s_gates_see_the_tokens_that_it_runs_on(rule, slots):
  output = jax.eval_shape(
    functools.partial(FOUR.build().apply, mode=rule),
    {'params': dense_params(FOUR)},
    TOKENS_BL,
  )
  found = choices(output)
  assert found['block_0/mlp'].learners_BL.shape == (2, 5)
  assert found['block_1/mlp'].learners_BL.shape == (2, slots)
