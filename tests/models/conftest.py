"""Tiny language models, and how tokens are fed to their caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import tiny

from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LanguageModel, LMCache

SIZES = dataclasses.replace(
  tiny.LM, vocab_size=11, num_layers=3, num_heads=4, num_kv_heads=2
)


@pytest.fixture(scope='session')
def config():
  """Routed, dense, routed; trained for every learned causal rule."""
  mod = MoDConfig(
    capacity=0.3, offset=0, predictor_width=4, threshold_decay=0.5
  )
  return dataclasses.replace(SIZES, routing=mod)


@pytest.fixture(scope='session')
def stride_config():
  """The same sizes, with a fixed pattern in place of the router."""
  mod = MoDConfig(capacity=0.3, offset=0, score='stride')
  return dataclasses.replace(SIZES, routing=mod)


@pytest.fixture(scope='session')
def config_of(config, stride_config):
  """Returns the config that a rule belongs to."""
  return lambda rule: stride_config if rule == 'fixed' else config


@pytest.fixture(scope='session')
def variables(config):
  """Fits `stride_config` too: what it does not ask for is left alone."""
  return tiny.variables(config)


@pytest.fixture(scope='session')
def generate():
  """Returns a function that feeds tokens to a cache: a prompt, then steps."""

  @functools.partial(
    jax.jit, static_argnames=('config', 'mode', 'prompt', 'room')
  )
  def run(config, variables, tokens_BL, valid_BL, mode, prompt, room=None):
    """Returns logits_BLV, what each layer chose [R, B, L], and the cache."""
    batch, length = tokens_BL.shape
    length_B = valid_BL.sum(axis=-1)
    cache = LMCache.empty(config, batch, room or length, mode, length_B)
    apply = functools.partial(LanguageModel(config).apply, variables, mode=mode)
    first = apply(
      tokens_BL[:, :prompt], valid_BL=valid_BL[:, :prompt], cache=cache
    )

    def step(cache, column):
      token_B, valid_B = column
      out = apply(token_B[:, None], valid_BL=valid_B[:, None], cache=cache)
      return out.cache, (out.logits_BLV[:, 0], chosen(out)[..., 0])

    def chosen(out):
      return jnp.stack([told.chosen_BL for told in out.routing])

    cache, (logits_TBV, chosen_TRB) = jax.lax.scan(
      step, first.cache, (tokens_BL[:, prompt:].T, valid_BL[:, prompt:].T)
    )
    logits_BLV = jnp.concatenate(
      [first.logits_BLV, logits_TBV.swapaxes(0, 1)], axis=1
    )
    chosen_RBL = jnp.concatenate(
      [chosen(first), jnp.moveaxis(chosen_TRB, 0, 2)], axis=2
    )
    return logits_BLV, chosen_RBL, cache

  return run
