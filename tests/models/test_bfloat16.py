"""Gradients of a bfloat16 model are sums in float32, as those of a float32 one.

A sum over tokens in bfloat16 stops growing: 16,384 ones come to 256.
"""

import dataclasses

from flax import linen as nn
import jax
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import losses
from mod_jax.layers import acm
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models import dynamic_vit, vit
from mod_jax.models.lm import LMConfig

pytestmark = pytest.mark.slow

SIZES = {'num_layers': 2, 'width': 16, 'num_heads': 2}
LM = LMConfig(**SIZES, vocab_size=16, mlp_dim=16)
# At capacity 1 a router chooses alike, however its scores are rounded.
LEARNED = MoDConfig(capacity=1.0, predictor_width=2)
VIT = vit.deit_tiny(
  **SIZES, image_size=32, patch_size=4, mlp_dim=16, num_classes=5
)
BATCH, LENGTH = 64, 64
# As in a text, half of the tokens are the same.
TOKENS_BL = jnp.maximum(
  jax.random.randint(jax.random.key(1), (BATCH, LENGTH), -16, 16), 0
)
IMAGES = jax.random.normal(jax.random.key(2), (BATCH, 32, 32, 3))
LABELS_B = jax.random.randint(jax.random.key(3), (BATCH,), 0, 5)


def text_loss(output):
  total, weight = losses.next_token_loss(
    output.logits_BLV[:, :-1],
    TOKENS_BL[:, 1:],
    jnp.ones((BATCH, LENGTH - 1)),
  )
  return total / weight


def image_loss(output):
  log_prob_BV = jax.nn.log_softmax(output.logits_BV)
  return -log_prob_BV[jnp.arange(BATCH), LABELS_B].mean()


def total(output):
  y_BLD, _ = output
  return y_BLD.astype(jnp.float32).sum()


def build(config):
  if isinstance(config, acm.ACMConfig):
    return acm.ACM(config, 'train', noise=False, dtype='bfloat16')
  if isinstance(config, dynamic_vit.DynamicViTConfig):
    return config.build(train=True)
  return config.build()


def gradient(config, loss, inputs):
  """Returns a function from parameters to their gradients, and parameters."""
  model = build(config)
  rngs = {'params': jax.random.key(0), 'gumbel': jax.random.key(1)}
  variables = nn.unbox(jax.eval_shape(model.init, rngs, inputs[:1]))
  params = variables.pop('params')

  def mean(params):
    statistics = jax.tree.map(lambda x: jnp.ones(x.shape), variables)
    output, _ = model.apply(
      {'params': params, **statistics},
      inputs,
      rngs=rngs,
      mutable=['batch_stats'],
    )
    return loss(output)

  return jax.grad(mean), params


CONFIGS = {
  'text, tied': (
    dataclasses.replace(LM, routing=LEARNED, scan_layers=True, remat='dots'),
    text_loss,
    TOKENS_BL,
  ),
  'text, untied': (
    dataclasses.replace(
      LM, routing=MoDConfig(score='stride', capacity=0.5), tied_head=False
    ),
    text_loss,
    TOKENS_BL,
  ),
  'images': (dataclasses.replace(VIT, distilled=True), image_loss, IMAGES),
}


@pytest.mark.parametrize('name', ['text, tied', 'text, untied'])
def test_every_gradient_is_that_of_float32(name):
  config, loss, inputs = CONFIGS[name]
  half = dataclasses.replace(config, dtype='bfloat16')
  (run, _), (run_half, _) = (gradient(c, loss, inputs) for c in (config, half))
  init = jax.jit(
    lambda: nn.unbox(build(config).init(jax.random.key(4), inputs))
  )
  params = init()['params']
  expected, got = jax.jit(run)(params), jax.jit(run_half)(params)

  def compare(path, a, b):
    where = jax.tree_util.keystr(path)
    assert b.dtype == jnp.float32
    if not a.any():  # A predictor's, without its loss.
      assert 'predictor' in where
      assert not b.any()
      return
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    length_a, length_b = np.linalg.norm(a), np.linalg.norm(b)
    assert np.linalg.norm(a - b) < 0.03 * length_a, where
    assert a @ b > 0.9995 * length_a * length_b, where
    # The sum itself was not rounded: it has more digits than bfloat16.
    rounded = b.astype(jnp.bfloat16).astype(np.float64)
    assert (rounded != b).mean() > 0.5, where

  jax.tree_util.tree_map_with_path(compare, expected, got)
  # The commonest token, whose sum is the longest, alone.
  a, b = expected['embedding'][0], got['embedding'][0]
  np.testing.assert_allclose(b, a, atol=0.03 * np.linalg.norm(a))


def is_sum_in_bfloat16(eqn):
  """Whether it sums many numbers, other than in a product, in bfloat16."""
  return (
    eqn.primitive.name in ('reduce_sum', 'cumsum', 'scatter-add')
    and eqn.outvars[0].aval.dtype == jnp.bfloat16
    # Where no place is written twice, nothing is summed.
    and not eqn.params.get('unique_indices')
  )


@pytest.mark.parametrize(
  'config',
  [
    *(config for config, _, _ in CONFIGS.values()),
    dataclasses.replace(VIT, routing=VisionRoutingConfig()),
    vit.lvvit_small(**SIZES, image_size=32, num_classes=5),
    dynamic_vit.DynamicViTConfig(backbone=VIT, stages=(1,), keep=0.5),
    acm.ACMConfig(inputs=8, outputs=8, hidden=4),
  ],
  ids=[*CONFIGS, 'routed images', 'stem', 'pruned', 'adaptive'],
)
def test_nothing_is_summed_in_bfloat16(config, equations):
  inputs, loss = IMAGES, image_loss
  if isinstance(config, LMConfig):
    inputs, loss = TOKENS_BL, text_loss
  elif isinstance(config, acm.ACMConfig):
    inputs = jnp.zeros((2, 3, 8), jnp.bfloat16)
    loss = total
  if isinstance(config, dynamic_vit.DynamicViTConfig):
    backbone = dataclasses.replace(config.backbone, dtype='bfloat16')
    config = dataclasses.replace(config, backbone=backbone)
  elif not isinstance(config, acm.ACMConfig):  # It is told when it is called.
    config = dataclasses.replace(config, dtype='bfloat16')
  run, params = gradient(config, loss, inputs)
  jaxpr = jax.make_jaxpr(run)(params)
  assert 'bf16' in str(jaxpr)
  guilty = filter(is_sum_in_bfloat16, equations(jaxpr.jaxpr))
  assert not [str(eqn) for eqn in guilty]


def test_rematerialisation_finds_the_kernel_to_keep(equations):
  def kernels(remat):
    config = dataclasses.replace(
      LM, routing=None, dtype='bfloat16', remat=remat, attention='splash'
    )
    run, params = gradient(config, text_loss, TOKENS_BL)
    jaxpr = jax.make_jaxpr(run)(params).jaxpr
    # What nothing reads is still there, and leaves when it is compiled.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    return names.count('pallas_call')

  none, dots, attention, full = map(
    kernels, ('none', 'dots', 'attention', 'full')
  )
  assert none == dots == attention > 0
  assert full - none == 2  # Once more in each block.
