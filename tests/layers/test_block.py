"""Routed post-norm blocks; plain ones are compared with DETR's: `convert/`."""

import dataclasses
import functools

import blocks
from blocks import BLOCK
from flax import linen as nn
import jax
import numpy as np
import pytest

from mod_jax.layers import stack
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig

B, L, D = 2, 6, 8


X_BLD = jax.random.normal(jax.random.key(0), (B, L, D))
PLACE_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
INFO = blocks.info(B, L).replace(place_BLD=PLACE_BLD)


def test_a_routed_post_norm_layer_at_capacity_1_is_dense():
  attention = dataclasses.replace(BLOCK.attention, causal=False)
  config = dataclasses.replace(
    BLOCK, attention=attention, norm='layer', norm_place='post'
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
  variables = nn.unbox(dense.init(jax.random.key(6), X_BLD, INFO))
  expected = dense.apply(variables, X_BLD, INFO).x_BLD
  y_BLD = stack.Layer(whole).apply(variables, X_BLD, INFO).x_BLD
  np.testing.assert_allclose(y_BLD, expected, atol=1e-6)
  # Tokens that pass by are not normalised: they stay as they were.
  output = stack.Layer(half).apply(variables, X_BLD, INFO)
  chosen_BL = np.asarray(output.aux['router'].chosen_BL)
  assert (chosen_BL.sum(axis=-1) == L // 2).all()
  np.testing.assert_array_equal(
    np.asarray(output.x_BLD)[~chosen_BL], np.asarray(X_BLD)[~chosen_BL]
  )


def test_which_layer_of_a_stack_is_asked_for_what():
  mod, amod = MoDConfig(capacity=0.5), VisionRoutingConfig()
  layers = functools.partial(stack.layer_configs, BLOCK, 4)
  assert [x.attention_score for x in layers(mod)] == [None] * 4
  assert [x.routing for x in layers(mod)] == [None, mod] * 2
  assert [x.attention_score for x in layers(amod)] == ['mean', None] * 2
  depth = [x.drop_rate for x in layers(stochastic_depth=0.3)]
  assert depth == pytest.approx([0, 0.1, 0.2, 0.3])
