"""Stacks of layers, and what may stand in the slots of a block."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.layers import acm, stack
from mod_jax.layers.dense import LinearConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.layers.token_info import TokenInfo

B, L, D = 2, 6, 8
MOD = MoDConfig(capacity=0.5)
AMOD = VisionRoutingConfig()


@pytest.fixture(scope='module')
def info(token_info):
  return token_info(np.broadcast_to(np.arange(L), (B, L)))


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(1), (B, L, D))


class TestSlots:
  @pytest.mark.parametrize(
    'slot',
    [
      MLPConfig(width=D, hidden=6),
      MLPConfig(width=D, hidden=6, kind='gelu', bias=True),
      LinearConfig(inputs=(D,), outputs=(2, 3), axes=('embed', None, None)),
      LinearConfig(inputs=(D,), outputs=(3,), axes=('embed', None), bias=True),
      acm.ffn_config(D, 12, num_learners=3),
      acm.projection_config(D, 6, num_learners=2, output_shape=(2, 3)),
    ],
    ids=lambda slot: type(slot).__name__,
  )
  def test_parameters_are_counted(self, slot, x_BLD):
    info = TokenInfo(jnp.zeros(x_BLD.shape[:2], jnp.int32))

    class Place(nn.Module):
      @nn.compact
      def __call__(self, x):
        return slot.run(x, info, name='it', dtype='float32', mode=Mode())[0]

    y, variables = jax.eval_shape(
      lambda: Place().init_with_output(jax.random.key(0), x_BLD)
    )
    leaves = jax.tree.leaves(nn.unbox(variables))
    assert slot.num_params == sum(x.size for x in leaves)
    assert y.shape[:2] == (B, L)
    assert all(count > 0 for count in slot.flops(L).values())


class TestStack:
  def test_who_is_asked_for_what(self, block_config):
    layers = functools.partial(stack.layer_configs, block_config, 4)
    assert [x.attention_score for x in layers(MOD)] == [None] * 4
    assert [x.routing for x in layers(MOD)] == [None, MOD] * 2
    assert [x.attention_score for x in layers(AMOD)] == ['mean', None] * 2
    depth = [x.drop_rate for x in layers(stochastic_depth=0.3)]
    assert depth == pytest.approx([0, 0.1, 0.2, 0.3])
