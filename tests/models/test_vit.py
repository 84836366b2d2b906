"""Vision transformers: what goes in, what comes out, and what is routed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import losses
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models import vit

B, D = 3, tiny.VIT.width
AMOD = VisionRoutingConfig(capacity=0.4)  # 6 of 17 tokens.
DENSE = dataclasses.replace(tiny.VIT, image_size=16, patch_size=4, num_layers=4)
ROUTED = dataclasses.replace(DENSE, routing=AMOD)
# Two blocks where two will do: each takes its time to compile.
PAIR = dataclasses.replace(DENSE, num_layers=2)
LV = dataclasses.replace(
  DENSE,
  num_layers=1,
  stem=ConvStemConfig(width=4, depth=1),
  residual_scale=0.5,
  token_head=True,
  qkv_bias=False,
)
IMAGES = tiny.images(B, size=16)
init = functools.partial(tiny.variables, gain=3.0)


@pytest.fixture(scope='module')
def variables():
  """Fits the dense model too: what it does not ask for is left alone."""
  learned = dataclasses.replace(AMOD, score='learned')
  return init(dataclasses.replace(DENSE, routing=learned))


class TestEmbed:
  @pytest.mark.parametrize('distilled', [False, True])
  def test_patches_by_row_after_the_prefix(self, distilled):
    config = dataclasses.replace(DENSE, num_layers=1, distilled=distilled)
    variables = init(config)
    x_BLD = tiny.apply(config, variables, IMAGES, method='embed')
    params = variables['params']
    rows = [np.tile(params['class_token'], (B, 1))]
    if distilled:
      rows.append(np.tile(params['distillation_token'], (B, 1)))
    for i, j in np.ndindex(4, 4):
      pixels = IMAGES[:, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
      pixels = np.asarray(pixels).reshape(B, -1)
      rows.append(pixels @ params['patch']['kernel'] + params['patch']['bias'])
    want = np.stack(rows, axis=1) + params['position']
    assert x_BLD.shape == (B, config.num_tokens, D) == (B, 17 + distilled, D)
    np.testing.assert_allclose(x_BLD, want, atol=1e-4)


class TestOutput:
  def linear(self, x, module):
    return np.asarray(x) @ module['kernel'] + module['bias']

  def test_logits_are_read_from_the_class_token(self, variables):
    output = tiny.apply(PAIR, variables, IMAGES)
    assert output.features_BLD.shape == (B, 17, D)
    assert output.routing == ()
    want = self.linear(output.features_BLD[:, 0], variables['params']['head'])
    np.testing.assert_allclose(output.logits_BV, want, atol=1e-4)
    norm = variables['params']['norm']
    plain = (np.asarray(output.features_BLD) - norm['bias']) / norm['scale']
    np.testing.assert_allclose(plain.mean(axis=-1), 0, atol=1e-4)
    np.testing.assert_allclose(plain.std(axis=-1), 1, atol=1e-3)

  def test_distilled_logits_are_averaged(self):
    config = dataclasses.replace(DENSE, num_layers=1, distilled=True)
    variables = init(config)
    params, output = variables['params'], tiny.apply(config, variables, IMAGES)
    features = output.features_BLD
    want = self.linear(features[:, 0], params['head'])
    want += self.linear(features[:, 1], params['head_distilled'])
    np.testing.assert_allclose(output.logits_BV, want / 2, atol=1e-4)

  def test_lv_vit_adds_half_the_largest_of_the_patches(self):
    variables = init(LV)
    params, output = variables['params'], tiny.apply(LV, variables, IMAGES)
    features = output.features_BLD
    assert features.shape == (B, 17, D)
    most = self.linear(features[:, 1:], params['head_tokens']).max(axis=1)
    want = self.linear(features[:, 0], params['head']) + 0.5 * most
    np.testing.assert_allclose(output.logits_BV, want, atol=1e-3)


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


class TestPositions:
  POSITION = np.random.default_rng(0).normal(size=(2 + 16, 3)).astype('float32')

  def test_the_same_grid_changes_nothing(self):
    out = vit.resize_positions(self.POSITION, 2, 4)
    np.testing.assert_array_equal(out, self.POSITION)

  @pytest.mark.parametrize('grid', [2, 7])
  def test_rows_stay_rows_and_the_prefix_stays(self, grid):
    # Along the rows a ramp, along the columns nothing.
    ramp = np.repeat(np.arange(4.0), 4)[:, None]
    position = np.concatenate([[[50.0], [60.0]], ramp])
    out = np.asarray(vit.resize_positions(jnp.array(position), 2, grid))
    assert out.shape == (2 + grid**2, 1)
    assert out[:2, 0].tolist() == [50, 60]
    square = out[2:].reshape(grid, grid)
    np.testing.assert_allclose(square, square[:, :1] + 0 * square, atol=1e-5)
    assert (np.diff(square[:, 0]) > 0).all()
    assert square.mean() == pytest.approx(1.5, abs=1e-4)


class TestConfig:
  def test_isoflop_twin_is_the_first_layers_of_the_dense_model(self, variables):
    twin = ROUTED.isoflop_twin()
    assert twin == dataclasses.replace(DENSE, num_layers=3)
    shapes = jax.eval_shape(
      twin.build().init, jax.random.key(0), twin.example()
    )
    assert set(shapes['params']) < set(variables['params'])
    # Refused if a shape did not fit.
    jax.eval_shape(twin.build().apply, variables, IMAGES)

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
