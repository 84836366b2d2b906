"""Blocks that also attend to tokens from elsewhere, such as an encoder's."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.layers import stack
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.token_info import Source

B, L, S, D = 2, 6, 5, 8
# The source of the second row ends after three tokens.
VALID_BS = np.array([[True] * 5, [True] * 3 + [False] * 2])


@pytest.fixture(scope='module')
def block(block_config):
  cross = dataclasses.replace(
    block_config.attention, num_heads=2, num_kv_heads=1
  )
  return dataclasses.replace(block_config, cross_attention=cross)


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(0), (B, L, D))


@pytest.fixture(scope='module')
def source():
  features = jax.random.normal(jax.random.key(1), (B, S, D))
  return Source(features, jnp.asarray(VALID_BS))


@pytest.fixture(scope='module')
def info(token_info, source):
  positions = np.broadcast_to(np.arange(L), (B, L))
  return token_info(positions).replace(source=source)


@pytest.fixture(scope='module')
def config(block):
  routing = MoDConfig(capacity=0.5, gate='sigmoid', router_std=1.0)
  return stack.StackConfig(
    layers=stack.layer_configs(block, 2, routing), period=2
  )


def init(config, x_BLD, info):
  run = jax.jit(stack.Stack(config).init)
  return nn.unbox(run(jax.random.key(2), x_BLD, info))['params']


@pytest.fixture(scope='module')
def params(config, x_BLD, info):
  return init(config, x_BLD, info)


@pytest.fixture(scope='module')
def run(config, params):
  return jax.jit(
    lambda x, info: stack.Stack(config).apply({'params': params}, x, info)
  )


def test_padding_of_the_source_is_not_read(run, x_BLD, info):
  @jax.jit
  @jax.value_and_grad
  def loss(features):
    source = info.source.replace(x_BSD=features)
    return (run(x_BLD, info.replace(source=source)).x_BLD ** 2).sum()

  features = info.source.x_BSD
  value, gradient = loss(features)
  assert (gradient[1, 3:] == 0).all()
  assert (gradient[VALID_BS] != 0).any(axis=-1).all()
  other = features.at[1, 3:].set(1e4)
  assert loss(other)[0] == value


@pytest.mark.slow
def test_loop_and_rematerialisation_change_nothing(config, x_BLD, info):
  config = dataclasses.replace(config, layers=2 * config.layers)
  params = init(config, x_BLD, info)
  looped = dataclasses.replace(config, scan=True, remat='full')

  def loss(params, features):
    given = info.replace(source=info.source.replace(x_BSD=features))
    model = stack.Stack(looped if 'layers' in params else config)
    return (model.apply({'params': params}, x_BLD, given).x_BLD ** 2).sum()

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
  features = info.source.x_BSD
  of_params, of_source = gradient(params, features)
  of_looped, of_looped_source = gradient(
    stack.scanned(looped, params), features
  )
  assert jnp.abs(of_source).max() > 1e-2
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4),
    (stack.unrolled(looped, of_looped), of_looped_source),
    (of_params, of_source),
  )


def test_decoding_equals_the_whole_sequence(config, params, x_BLD, info):
  """Row by row in a routed block, each row with its own source."""
  mode = RoutingMode(rule='router', chunk=1)
  model = stack.Stack(config, Mode(routing=mode))
  variables = {'params': params}
  whole = jax.jit(model.apply)(variables, x_BLD, info)
  routed = stack.collect(whole.aux, 'router')['block_1'].chosen_BL
  assert len(set(map(bool, routed[:, 3:].ravel()))) == 2  # Some, not all.
  caches = config.caches(B, L, mode)
  step = jax.jit(model.apply)
  for i in range(L):
    one = info.replace(position_BL=info.position_BL[:, i : i + 1])
    done = step(variables, x_BLD[:, i : i + 1], one, caches)
    caches = done.caches
    np.testing.assert_allclose(
      done.x_BLD[:, 0], whole.x_BLD[:, i], atol=1e-5, rtol=1e-5
    )


def test_slots_and_flops(block, block_config, config):
  cross = block.cross_attention
  projections = {
    'cross_attention/' + name: slot for name, slot in cross.projections.items()
  }
  assert block.slots == block_config.slots | projections
  # Two heads of four channels; one for keys and values.
  queries = 2 * L * (D * 8 + 8 * D) + 4 * 8 * L * S
  parts, plain = block.flops(L, source_tokens=S), block_config.flops(L)
  assert parts['attention'] - plain['attention'] == queries + 2 * S * D * 4 * 2
  assert parts['mlp'] == plain['mlp']
  # A routed block reads the source with its few tokens.
  half = config.layers[1].flops(L, source_tokens=S)
  assert half['attention'] == block.flops(3, source_tokens=S)['attention']
