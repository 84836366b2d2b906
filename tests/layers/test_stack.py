"""Stacks of layers, and what may stand in the slots of a block."""

import dataclasses
import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.layers import acm, stack
from mod_jax.layers.dense import LinearConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo

B, L, D = 2, 6, 8
MOD = MoDConfig(capacity=0.5)
AMOD = VisionRoutingConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Slot):
  """A feed-forward that nobody in the library has heard of."""

  width: int
  outputs: tuple[int, ...]

  def run(self, x, info, *, name, dtype, mode):
    y = nn.DenseGeneral(self.outputs, use_bias=False, name=name)(x)
    return 2 * y, {'told': (x.mean(), mode.train)}

  def flops(self, tokens):
    return {'scaled': 2 * tokens * self.num_params}

  @property
  def num_params(self):
    return self.width * math.prod(self.outputs)


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

  def test_any_may_stand_in_a_block(self, block_config, x_BLD, info):
    slots = {
      'mlp': Scaled(width=D, outputs=(D,)),
      'attention/value': Scaled(width=D, outputs=(2, 4)),
    }
    block = block_config.with_slots(slots)
    assert {n: block.slots[n] for n in slots} == slots
    assert block.slots.keys() == block_config.slots.keys()
    assert block.slots['attention/key'] == block_config.slots['attention/key']
    layer = Layer(LayerConfig(block=block), Mode(train=True))
    init, apply = jax.jit(layer.init), jax.jit(layer.apply)
    variables = nn.unbox(init(jax.random.key(0), x_BLD, info))
    params = variables['params']
    assert set(params['mlp']) == set(params['attention']['value']) == {'kernel'}
    done = apply(variables, x_BLD, info)
    told = stack.collect([{}, done.aux], 'told')
    assert set(told) == {'block_1/mlp', 'block_1/attention/value'}
    assert all(train for _, train in told.values())
    # What it does matters.
    none = params | {'mlp': jax.tree.map(jnp.zeros_like, params['mlp'])}
    other = apply({'params': none}, x_BLD, info)
    assert (other.x_BLD != done.x_BLD).any()
    parts, plain = block.flops(L), block_config.flops(L)
    assert parts['scaled'] == 2 * L * (D * D + D * 8)
    assert parts['attention'] == plain['attention'] - 2 * L * D * 8
    assert 'mlp' not in parts


class TestStack:
  def test_who_is_asked_for_what(self, block_config):
    layers = functools.partial(stack.layer_configs, block_config, 4)
    assert [x.attention_score for x in layers(MOD)] == [None] * 4
    assert [x.routing for x in layers(MOD)] == [None, MOD] * 2
    assert [x.attention_score for x in layers(AMOD)] == ['mean', None] * 2
    depth = [x.drop_rate for x in layers(stochastic_depth=0.3)]
    assert depth == pytest.approx([0, 0.1, 0.2, 0.3])
