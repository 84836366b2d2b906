"""Low-rank adapters around the maps of models, and what they cost."""

import dataclasses
import functools
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import flops, trees
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models import lora
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig

pytestmark = pytest.mark.slow

MOD = MoDConfig(capacity=0.5)
ADAPTERS = LoRAConfig(rank=3, alpha=5.0)
VIT = dataclasses.replace(tiny.VIT, width=12, num_heads=3)
LM = dataclasses.replace(
  tiny.LM, vocab_size=11, mlp_dim=6, num_heads=4, num_kv_heads=2
)
language = functools.partial(dataclasses.replace, LM)


MODELS = {
  'dense': LM,
  'biased': language(mlp='gelu', qkv_bias=True),
  'routed': language(routing=MOD),
  'scanned': language(num_layers=4, routing=MOD, scan_layers=True),
  'experts': language(routing=MOD, experts=ExpertsConfig(num_experts=3)),
  'expert_choice': language(
    scan_layers=True,
    experts=ExpertsConfig(
      num_experts=3, choice='expert', capacity_factor=2.0, num_nulls=0
    ),
  ),
  'learners': language(routing=MOD, adaptive=AdaptiveConfig(num_learners=3)),
  'vit': dataclasses.replace(VIT, routing=VisionRoutingConfig(capacity=0.5)),
  'dynamic': DynamicViTConfig(backbone=VIT, stages=(1,)),
}


def logits(config, variables):
  if isinstance(config, LMConfig):
    tokens = tiny.tokens(length=12, vocab_size=config.vocab_size)
    return np.asarray(tiny.apply(config, variables, tokens).logits_BLV)
  return np.asarray(tiny.apply(config, variables, tiny.images()).logits_BV)


def fresh(config):
  key = jax.random.key(0)
  init = jax.jit(config.build().init)
  return dict(nn.unbox(init({'params': key, 'routing': key}, config.example())))


def trained(variables):
  """Returns variables with other values in the adapters."""
  flat, rng = trees.flatten(variables['params']), np.random.default_rng(7)
  for name, x in flat.items():
    if '_lora/' in name:
      flat[name] = rng.normal(0, 0.3, x.shape).astype(np.float32)
  return variables | {'params': trees.unflatten(flat)}


@pytest.mark.parametrize('name', MODELS)
def test_an_adapted_model_begins_as_its_base_and_merges_into_it(name):
  base = MODELS[name]
  config = base.with_parts(lora=ADAPTERS)
  assert config.dense_twin() == base.dense_twin()
  variables = fresh(config)
  flat = trees.flatten(variables['params'])
  bare = {k: x for k, x in flat.items() if '_lora/' not in k}
  shapes = trees.flatten(tiny.shapes(base)['params'])
  assert jax.tree.map(np.shape, bare) == jax.tree.map(np.shape, shapes)
  alone = logits(base, variables | {'params': trees.unflatten(bare)})
  np.testing.assert_array_equal(logits(config, variables), alone)

  adapted = trained(variables)
  expected = logits(config, adapted)
  assert np.abs(expected - alone).max() > 0.05
  merged, params = lora.merge(config, adapted['params'])
  assert merged == base
  params = jax.tree.map(jnp.asarray, params)
  found = logits(base, variables | {'params': params})
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', MODELS)
def test_slots_count_their_parameters_and_products(name):
  config = MODELS[name].with_parts(lora=ADAPTERS)
  flat = trees.flatten(tiny.shapes(config)['params'])
  in_blocks = 0
  for i, layer in enumerate(config.stack.layers):
    for slot_name, slot in layer.block.slots.items():
      in_blocks += slot.num_params
      parts, weights = slot.flops(7), slot.weight_flops(f'b/{slot_name}', 7)
      assert sum(weights.values()) == pytest.approx(sum(parts.values()))
      if isinstance(config, LMConfig) and not config.scan_layers:
        for kernel in weights:
          kernel = kernel.replace('b/', f'block_{i}/', 1)
          assert any(name.startswith(kernel) for name in flat), kernel
  assert in_blocks == sum(
    x.size
    for name, x in flat.items()
    if re.search(r'block_\d+/(?!router/|\w+_norm/)', name)
  )


def test_only_the_named_maps_are_adapted():
  maps = (r'block_[13]/attention/(query|value)', r'block_2/mlp/down')
  adapters = LoRAConfig(rank=2, maps=maps)
  config = language(num_layers=4, lora=adapters)
  found = {
    name.rpartition('_lora/')[0]
    for name in lora.adapters(tiny.shapes(config)['params'])
  }
  assert found == {
    *('block_1/attention/query', 'block_1/attention/value'),
    *('block_3/attention/query', 'block_3/attention/value'),
    'block_2/mlp/down',
  }
  base = config.with_parts(lora=None)
  extra = flops.forward(config, 10) - flops.forward(base, 10)
  # Two thin products for each token: width 8, 4 and 2 heads of 2, hidden 6.
  ranks = 2 * (8 + 8) + 2 * (8 + 4) + (6 + 8)
  assert extra == 2 * 10 * 2 * ranks
  assert flops.num_params(config) - flops.num_params(base) == 2 * ranks


def test_a_pattern_must_match_a_map():
  with pytest.raises(
    UserError, match=r'q_proj.*nearest is block_0/attention/q'
  ):
    language(lora=LoRAConfig(maps=('block_0/attention/q_proj',)))
  with pytest.raises(UserError, match='regular expression'):
    LoRAConfig(maps=('(',))
  with pytest.raises(UserError, match='names of maps'):
    LoRAConfig(maps=())
  with pytest.raises(UserError, match='adapters'):
    language(scan_layers=True, lora=LoRAConfig(maps=('block_1/mlp/up',)))


class TestTraining:
  """Frozen weights need no gradient, and what lies below them no pass."""

  config = language(
    num_layers=4,
    lora=LoRAConfig(rank=3, maps=(r'block_[23]/.*',)),
  )

  def frozen(self, name):
    return '_lora/' not in name

  def test_counts_what_is_left(self):
    length = 12
    rows = dict(self.config.flops_table(length))
    low = sum(flops.products(rows[f'block_{i}']) for i in (0, 1))
    saved = 2 * low + rows['head']['head']
    for i in (2, 3):
      base = self.config.with_parts(lora=None)
      parts = dict(base.flops_table(length))[f'block_{i}']
      # All but the pairs of the attention: 4 heads of 2 channels.
      pairs = 4 * 4 * 2 * length * (length + 1) // 2
      saved += flops.products(parts) - pairs
    full = flops.train(self.config, length)
    assert flops.train(self.config, length, self.frozen) == full - saved
    assert flops.train(self.config, length, lambda name: False) == full
    line = flops.report(self.config, length, self.frozen).splitlines()[-2]
    assert f'{full - saved:.4e}' in line
