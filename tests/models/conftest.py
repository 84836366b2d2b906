"""Tiny language models, and one compiled forward pass for all tests."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from mod_jax import routing
from mod_jax.layers import stack
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LanguageModel, LMCache, LMConfig

SIZES = {
  'vocab_size': 11,
  'num_layers': 3,
  'width': 8,
  'num_heads': 4,
  'num_kv_heads': 2,
  'mlp_dim': 6,
}


@pytest.fixture(scope='session')
def config():
  """Routed, dense, routed; trained for every learned causal rule."""
  mod = MoDConfig(
    capacity=0.3, offset=0, predictor_width=4, threshold_decay=0.5
  )
  return LMConfig(**SIZES, routing=mod)


@pytest.fixture(scope='session')
def stride_config():
  """The same sizes, with a fixed pattern in place of the router."""
  return LMConfig(
    **SIZES, routing=MoDConfig(capacity=0.3, offset=0, score='stride')
  )


@pytest.fixture(scope='session')
def config_of(config, stride_config):
  """Returns the config that a rule belongs to."""
  return lambda rule: stride_config if rule == 'fixed' else config


@pytest.fixture(scope='session')
def init():
  """Returns variables whose scores are large enough to show mistakes."""

  @functools.partial(jax.jit, static_argnums=0)
  def draw(config, key):
    tokens_BL = jnp.zeros((1, 2), jnp.int32)
    return nn.unbox(LanguageModel(config).init(key, tokens_BL))

  def make(config, seed=0):
    variables = draw(config, jax.random.key(seed))
    variables['params'] = jax.tree_util.tree_map_with_path(
      lambda path, x: 50 * x if 'router' in str(path) else x,
      variables['params'],
    )
    if 'moving' in variables:
      # For each routed layer another: 0.2, 0.3, …
      routed = [i for i, c in enumerate(config.capacities) if c is not None]
      moving = {
        f'block_{layer}': {
          'threshold': routing.MovingThreshold.zeros().update(
            jnp.float32(0.2 + i / 10), 0.5
          )
        }
        for i, layer in enumerate(routed)
      }
      if config.scan_layers:
        moving = stack.scanned(config.stack, moving)
      variables['moving'] = moving
    return variables

  return make


@pytest.fixture(scope='session')
def variables(config, init):
  """Fits `stride_config` too: what it does not ask for is left alone."""
  return init(config)


@pytest.fixture(scope='session')
def forward():
  """Returns LanguageModel(config).apply, compiled once for each setting."""

  @functools.partial(jax.jit, static_argnames=('config', 'mode'))
  def run(config, variables, tokens_BL, mode, **kwargs):
    return LanguageModel(config).apply(
      variables, tokens_BL, mode=mode, **kwargs
    )

  def forward(config, variables, tokens_BL, mode='top_k', **kwargs):
    mode = RoutingMode(rule=mode) if isinstance(mode, str) else mode
    return run(config, variables, tokens_BL, mode=mode, **kwargs)

  return forward


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
