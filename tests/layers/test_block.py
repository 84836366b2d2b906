"""Post-norm blocks, and positions that queries and keys alone see."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.layers import stack
from mod_jax.layers.attention import Attention
from mod_jax.layers.block import Block
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.token_info import Source

B, L, S, D = 2, 6, 5, 8


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(0), (B, L, D))


@pytest.fixture(scope='module')
def info(token_info):
  place_BLD, source_BSD, place_BSD = (
    jax.random.normal(jax.random.key(i), (B, length, D))
    for i, length in ((1, L), (2, S), (3, S))
  )
  source = Source(source_BSD, place_BSD=place_BSD)
  info = token_info(np.broadcast_to(np.arange(L), (B, L)))
  return info.replace(place_BLD=place_BLD, source=source)


@pytest.fixture(scope='module')
def config(block_config):
  attention = dataclasses.replace(block_config.attention, causal=False)
  return dataclasses.replace(
    block_config,
    attention=attention,
    cross_attention=attention,
    norm='layer',
    norm_place='post',
  )


@pytest.fixture(scope='module')
def params(config, x_BLD, info):
  variables = jax.jit(Block(config).init)(jax.random.key(4), x_BLD, info)
  # Norms that do something.
  return jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
    nn.unbox(variables)['params'],
  )


def layer_norm(x, params):
  x = x - x.mean(axis=-1, keepdims=True)
  x = x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
  return x * params['scale'] + params['bias']


def test_norms_follow_the_residual_sums(config, params, x_BLD, info):
  update_BLD = Block(config).apply({'params': params}, x_BLD, info).update_BLD

  def attend(name, x, **kwargs):
    attention = Attention(config.attention)
    variables = {'params': params[name]}
    return attention.apply(variables, x, info, **kwargs).update_BLD

  def add(name, x, update):
    return layer_norm(x + update, params[f'{name}_norm'])

  y = add('attention', x_BLD, attend('attention', x_BLD))
  read = attend('cross_attention', y, source=info.source)
  y = add('cross_attention', y, read)
  mlp = {name: p['kernel'] for name, p in params['mlp'].items()}
  hidden = nn.silu(y @ mlp['gate']) * (y @ mlp['up'])
  y = add('mlp', y, hidden @ mlp['down'])
  np.testing.assert_allclose(x_BLD + update_BLD, y, atol=1e-5)


def test_places_are_seen_by_queries_and_keys_alone(config, x_BLD, info):
  attention = Attention(config.attention)
  variables = nn.unbox(attention.init(jax.random.key(5), x_BLD, info))
  without = info.replace(place_BLD=None)
  moved = attention.apply(variables, x_BLD, info).update_BLD
  plain = attention.apply(variables, x_BLD, without).update_BLD
  assert np.abs(moved - plain).max() > 1e-3
  # Tokens that are all alike have one value, whatever the weights are.
  same_BLD = jnp.broadcast_to(x_BLD[:, :1], x_BLD.shape)
  moved = attention.apply(variables, same_BLD, info).update_BLD
  plain = attention.apply(variables, same_BLD, without).update_BLD
  np.testing.assert_allclose(moved, plain, atol=1e-5)


def test_a_routed_post_norm_layer_at_capacity_1_is_dense(config, x_BLD, info):
  config = dataclasses.replace(config, cross_attention=None)
  info = info.replace(source=None)
  whole, half = (
    stack.LayerConfig(
      block=config,
      routing=VisionRoutingConfig(score='stride'),
      capacity=capacity,
    )
    for capacity in (1.0, 0.5)
  )
  dense = stack.Layer(stack.LayerConfig(block=config))
  variables = nn.unbox(dense.init(jax.random.key(6), x_BLD, info))
  expected = dense.apply(variables, x_BLD, info).x_BLD
  y_BLD = stack.Layer(whole).apply(variables, x_BLD, info).x_BLD
  np.testing.assert_allclose(y_BLD, expected, atol=1e-6)
  # Tokens that pass by are not normalised: they stay as they were.
  output = stack.Layer(half).apply(variables, x_BLD, info)
  chosen_BL = np.asarray(output.aux['router'].chosen_BL)
  assert (chosen_BL.sum(axis=-1) == L // 2).all()
  np.testing.assert_array_equal(
    np.asarray(output.x_BLD)[~chosen_BL], np.asarray(x_BLD)[~chosen_BL]
  )
