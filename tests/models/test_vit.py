"""Vision transformers: what is routed, gradients, sizes.

What they compute is compared with other libraries: `convert/`.
"""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
import tiny

from mod_jax import losses, trees
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


# They fit the dense model too: what it does not ask for is left alone.
LEARNED = dataclasses.replace(AMOD, score='learned')
VARIABLES = init(dataclasses.replace(DENSE, routing=LEARNED))


class TestAttentionRouting:
  def test_scores_are_column_means_of_the_map_before(self):
    output, sown = tiny.apply(
      ROUTED, VARIABLES, IMAGES, mutable='intermediates'
    )
    assert len(output.routing) == ROUTED.num_routed == 2
    for layer, told in zip((0, 2), output.routing, strict=True):
      heard = sown['intermediates'][f'block_{layer}']['attention']
      (q,), (k,) = heard['queries'], heard['keys']
      logit = np.einsum('bqhc,bshc->bhqs', q, k) / np.sqrt(D / 2)
      want = special.softmax(logit, axis=-1).mean(axis=(1, 2))
      assert want.std() > 0.02
      np.testing.assert_allclose(told.score_BL, want, atol=1e-5)
      np.testing.assert_allclose(told.score_BL.sum(axis=-1), 1, atol=1e-6)

  def test_as_many_tokens_as_published(self):
    for capacity, k in ((0.125, 24), (0.5, 98)):
      config = vit.deit_small(routing=VisionRoutingConfig(capacity=capacity))
      assert config.num_tokens == 197
      assert config.tokens_per_block() == (197, k) * 6


# Its second block runs on one token.
DROPPING = dataclasses.replace(
  PAIR,
  routing=VisionRoutingConfig(capacity=0.01),
  stochastic_depth=0.5,
)
# Which parameters go to an extreme, and by which factor.
EXTREMES = {
  'none': ('$^', 1),
  'attention': ('attention/(query|key)/', 50),
  'saturated': ('^head/', 1e4),
  # All tokens alike: every variance is 0, and every score ties.
  'constant': ('^(class_token|position|patch/)', 0),
}


@functools.partial(jax.jit, static_argnums=0)
def gradient(config, params):
  """Returns the loss and its gradient."""

  def loss(params):
    rngs = {'stochastic_depth': jax.random.key(7)}
    model = config.build(train=True)
    output = model.apply({'params': params}, IMAGES, rngs=rngs)
    target_BV = np.eye(tiny.VIT.num_classes)[:B]
    total, count = losses.classification_loss(output.logits_BV, target_BV)
    return total / count

  return jax.value_and_grad(loss)(params)


class TestGradients:
  @pytest.mark.parametrize('extreme', EXTREMES)
  def test_are_finite_at_extremes(self, extreme):
    assert DROPPING.tokens_per_block() == (17, 1)
    pattern, factor = EXTREMES[extreme]
    flat = trees.flatten(VARIABLES['params'])
    flat |= {n: factor * x for n, x in flat.items() if re.search(pattern, n)}
    loss, grads = gradient(DROPPING, trees.unflatten(flat))
    assert jnp.isfinite(loss)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert grads['head']['kernel'].any()
    if extreme == 'none':
      assert grads['block_0']['attention']['query']['kernel'].any()
    if extreme == 'saturated':
      assert loss > 1e4

  def test_are_the_same_rematerialised(self):
    config = dataclasses.replace(DROPPING, remat='full')
    params = VARIABLES['params']
    jaxpr = jax.make_jaxpr(gradient, 0)(config, params)
    assert re.search('checkpoint|remat', str(jaxpr))
    found, want = gradient(config, params), gradient(DROPPING, params)
    chex.assert_trees_all_close(found, want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize('name', vit.BACKBONES)
def test_backbones(name):
  block = vit.BACKBONES[name]().block
  assert block.attention.head_dim == 64
  lv = name.startswith('lvvit')
  assert block.residual_scale == (0.5 if lv else 1.0)
  assert block.attention.qkv_bias == (not lv)
