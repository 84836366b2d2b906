"""Blocks that also attend to tokens from elsewhere, such as an encoder's."""

import dataclasses
import functools

import blocks
from blocks import BLOCK
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax.layers import stack
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.token_info import Source

B, L, S, D = 2, 6, 5, 8
# The source of the second row ends after three tokens.
VALID_BS = np.array([[True] * 5, [True] * 3 + [False] * 2])
X_BLD = jax.random.normal(jax.random.key(0), (B, L, D))
FEATURES_BSD = jax.random.normal(jax.random.key(1), (B, S, D))
INFO = blocks.info(B, L).replace(
  source=Source(FEATURES_BSD, jnp.asarray(VALID_BS))
)
CROSS = dataclasses.replace(BLOCK.attention, num_heads=2, num_kv_heads=1)
ROUTING = MoDConfig(capacity=0.5, gate='sigmoid')
LAYERS = stack.layer_configs(
  dataclasses.replace(BLOCK, cross_attention=CROSS), 2, ROUTING
)
CONFIG = stack.StackConfig(layers=LAYERS, period=2)


def init(config):
  init = stack.Stack(config).init
  shapes = jax.eval_shape(init, jax.random.key(2), X_BLD, INFO)
  return tiny.drawn(nn.unbox(shapes))['params']


PARAMS = init(CONFIG)


def loss(config, params, features_BSD):
  info = INFO.replace(source=INFO.source.replace(x_BSD=features_BSD))
  done = stack.Stack(config).apply({'params': params}, X_BLD, info)
  return (done.x_BLD**2).sum()


def test_padding_of_the_source_is_not_read():
  run = jax.jit(jax.value_and_grad(functools.partial(loss, CONFIG, PARAMS)))
  value, gradient = run(FEATURES_BSD)
  assert (gradient[1, 3:] == 0).all()
  assert (gradient[VALID_BS] != 0).any(axis=-1).all()
  assert run(FEATURES_BSD.at[1, 3:].set(1e4))[0] == value


@pytest.mark.slow
def test_loop_and_rematerialisation_change_nothing():
  config = dataclasses.replace(CONFIG, layers=2 * CONFIG.layers)
  looped = dataclasses.replace(config, scan=True, remat='full')
  params = init(config)
  gradient = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
  want = gradient(config, params, FEATURES_BSD)
  of_params, of_source = gradient(
    looped, stack.scanned(looped, params), FEATURES_BSD
  )
  assert jnp.abs(of_source).max() > 1e-2
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4),
    *((stack.unrolled(looped, of_params), of_source), want),
  )


def test_decoding_equals_the_whole_sequence():
  """Row by row in a routed block, each row with its own source."""
  mode = RoutingMode(rule='router', chunk=1)
  model = stack.Stack(CONFIG, Mode(routing=mode))
  variables = {'params': PARAMS}
  whole = jax.jit(model.apply)(variables, X_BLD, INFO)
  routed = stack.collect(whole.aux, 'router')['block_1'].chosen_BL
  assert len(set(map(bool, routed[:, 3:].ravel()))) == 2  # Some, not all.
  caches = CONFIG.caches(B, L, mode)
  step = jax.jit(model.apply)
  for i in range(L):
    one = INFO.replace(position_BL=INFO.position_BL[:, i : i + 1])
    done = step(variables, X_BLD[:, i : i + 1], one, caches)
    caches = done.caches
    np.testing.assert_allclose(
      done.x_BLD[:, 0], whole.x_BLD[:, i], atol=1e-5, rtol=1e-5
    )
