"""Routed post-norm blocks; plain ones are compared with DETR's: `convert/`."""

import dataclasses

from flax import linen as nn
import jax
import numpy as np
import pytest

from mod_jax.layers import stack
from mod_jax.layers.routing_config import VisionRoutingConfig

B, L, D = 2, 6, 8


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(0), (B, L, D))


@pytest.fixture(scope='module')
def info(token_info):
  place_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
  info = token_info(np.broadcast_to(np.arange(L), (B, L)))
  return info.replace(place_BLD=place_BLD)


def test_a_routed_post_norm_layer_at_capacity_1_is_dense(
  block_config, x_BLD, info
):
  attention = dataclasses.replace(block_config.attention, causal=False)
  config = dataclasses.replace(
    block_config, attention=attention, norm='layer', norm_place='post'
  )
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
