"""Every model's config offers what tasks, FLOPs and sweeps ask of it."""

import inspect

import pytest

from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.protocol import ModelConfig
from mod_jax.models.vit import ViTConfig


@pytest.mark.parametrize('cls', [LMConfig, ViTConfig, DynamicViTConfig])
def test_offers_all(cls):
  config = cls()
  assert isinstance(config, ModelConfig)
  assert isinstance(config.dense_twin(), ModelConfig)
  for name, wanted in vars(ModelConfig).items():
    if inspect.isfunction(wanted) and not name.startswith('_'):
      assert callable(getattr(config, name)), name
  length = (16,) if cls is LMConfig else ()
  assert len(config.tokens_per_block(*length)) == len(config.capacities)
  assert config.dense_twin().routing is None
  assert config.dense_twin().adaptive is None
