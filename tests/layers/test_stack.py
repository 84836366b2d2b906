"""Stacks of layers."""

import functools

from blocks import BLOCK
import pytest

from mod_jax.layers import stack
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig

MOD = MoDConfig(capacity=0.5)
AMOD = VisionRoutingConfig()


def test_who_is_asked_for_what():
  layers = functools.partial(stack.layer_configs, BLOCK, 4)
  assert [x.attention_score for x in layers(MOD)] == [None] * 4
  assert [x.routing for x in layers(MOD)] == [None, MOD] * 2
  assert [x.attention_score for x in layers(AMOD)] == ['mean', None] * 2
  depth = [x.drop_rate for x in layers(stochastic_depth=0.3)]
  assert depth == pytest.approx([0, 0.1, 0.2, 0.3])
