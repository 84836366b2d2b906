"""Vision transformers: what is routed, gradients, sizes.

What they compute is compared with other libraries: `convert/`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import losses
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import vit

B, D = 3, tiny.VIT.width
AMOD = VisionRoutingConfig(capacity=0.4)  # 6 of 17 tokens.
DENSE = dataclasses.replace(tiny.VIT, image_size=16, patch_size=4, num_layers=4)
ROUTED = dataclasses.replace(DENSE, routing=AMOD)
# Two blocks where two will do: each takes its time to compile.
PAIR = dataclasses.replace(DENSE, num_layers=2)
IMAGES = tiny.images(B, size=16)
init = functools.partial(tiny.variables, gain=3.0)


@pytest.fixture(scope='module')
def variables():
  """Fits the dense model too: what it does not ask for is left alone."""
  learned = dataclasses.replace(AMOD, score='learned')
  return init(dataclasses.replace(DENSE, routing=learned))


class TestAttentionRouting:
  @pytest.fixture(scope='class')
  @staticmethod
  def looked(variables):
    return tiny.apply(ROUTED, variables, IMAGES, mutable='intermediates')

  def test_scores_are_column_means_of_the_map_before(self, looked):
    output, sown = looked
    assert len(output.routing) == ROUTED.num_routed == 2
    for layer, told in zip((0, 2), output.routing, strict=True):
      heard = sown['intermediates'][f'block_{layer}']['attention']
      (q,), (k,) = heard['queries'], heard['keys']
      logit = np.einsum('bqhc,bshc->bhqs', q, k) / np.sqrt(D / 2)
      weight = np.exp(logit - logit.max(axis=-1, keepdims=True))
      weight /= weight.sum(axis=-1, keepdims=True)
      want = weight.mean(axis=(1, 2))
      assert want.std() > 0.02
      np.testing.assert_allclose(told.score_BL, want, atol=1e-5)
      np.testing.assert_allclose(told.score_BL.sum(axis=-1), 1, atol=1e-6)

  def test_as_many_tokens_as_published(self):
    for capacity, k in ((0.125, 24), (0.5, 98)):
      config = vit.deit_small(routing=VisionRoutingConfig(capacity=capacity))
      assert config.num_tokens == 197
      assert config.tokens_per_block() == (197, k) * 6


TARGET_BV = np.eye(tiny.VIT.num_classes)[:B]


def _loss_gradient(config, stream=None):
  """Returns a compiled function: parameters to loss and gradients."""
  model = config.build(train=True)

  def loss(params, images):
    rngs = None if stream is None else {stream: jax.random.key(7)}
    output = model.apply({'params': params}, images, rngs=rngs)
    total, count = losses.classification_loss(output.logits_BV, TARGET_BV)
    return total / count

  return jax.jit(jax.value_and_grad(loss))


_QK = ('query', 'key')
_DROPPING = dataclasses.replace(
  PAIR,
  routing=VisionRoutingConfig(capacity=0.01),
  stochastic_depth=0.5,
)


@pytest.fixture(scope='module')
def one_token():
  """Gradients of a model whose second block runs on one token."""
  assert _DROPPING.tokens_per_block() == (17, 1)
  return _loss_gradient(_DROPPING, 'stochastic_depth')


class TestGradients:
  @pytest.mark.parametrize(
    'extreme', [None, 'attention', 'saturated', 'constant']
  )
  def test_are_finite_at_extremes(self, one_token, variables, extreme):
    params = variables['params']
    if extreme == 'attention':
      blocks = {}
      for name in ('block_0', 'block_1'):
        attention = params[name]['attention']
        far = {n: jax.tree.map(lambda x: 50 * x, attention[n]) for n in _QK}
        blocks[name] = params[name] | {'attention': attention | far}
      params = params | blocks
    if extreme == 'saturated':
      params = params | {
        'head': jax.tree.map(lambda x: 1e4 * x, params['head'])
      }
    if extreme == 'constant':
      # All tokens alike: every variance is 0, and every score ties.
      params = params | {
        name: jnp.zeros_like(params[name])
        for name in ('class_token', 'position')
      }
      params['patch'] = jax.tree.map(jnp.zeros_like, params['patch'])
    loss, grads = one_token(params, IMAGES)
    assert jnp.isfinite(loss)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert grads['head']['kernel'].any()
    if extreme is None:
      assert grads['block_0']['attention']['query']['kernel'].any()
    if extreme == 'saturated':
      assert loss > 1e4

  def test_are_the_same_rematerialised(self, variables, one_token):
    config = dataclasses.replace(_DROPPING, remat='full')
    run = _loss_gradient(config, 'stochastic_depth')
    jaxpr = str(run.trace(variables['params'], IMAGES).jaxpr)
    assert 'checkpoint' in jaxpr or 'remat' in jaxpr
    loss, grads = run(variables['params'], IMAGES)
    plain_loss, plain = one_token(variables['params'], IMAGES)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-3),
      grads,
      plain,
    )


class TestConfig:
  @pytest.mark.parametrize(
    ('name', 'layers', 'width', 'heads', 'mlp'),
    [
      ('deit_tiny', 12, 192, 3, 768),
      ('deit_small', 12, 384, 6, 1536),
      ('vit_base', 12, 768, 12, 3072),
      ('vit_large', 24, 1024, 16, 4096),
      ('lvvit_small', 16, 384, 6, 1152),
      ('lvvit_medium', 20, 512, 8, 1536),
    ],
  )
  def test_backbones(self, name, layers, width, heads, mlp):
    config = vit.BACKBONES[name]()
    assert config.num_tokens == 197
    block = config.block
    assert (config.num_layers, config.width) == (layers, width)
    assert (block.attention.num_heads, block.mlp.hidden) == (heads, mlp)
    assert block.attention.head_dim == 64
    lv = name.startswith('lvvit')
    assert block.residual_scale == (0.5 if lv else 1.0)
    assert block.attention.qkv_bias == (not lv)
    assert (config.stem is not None) == config.token_head == lv
