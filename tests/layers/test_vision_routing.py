"""Routing of image tokens: which blocks, which tokens, and by what score."""

import dataclasses

import blocks
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
import tiny

from mod_jax import errors
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import Block, BlockConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.routing_config import VisionRoutingConfig

B, L, D = 3, 10, 8
AMOD = VisionRoutingConfig(capacity=0.4)  # 4 of 10 tokens.
BLOCK = BlockConfig(
  attention=AttentionConfig(
    width=D, num_heads=2, num_kv_heads=2, head_dim=4, causal=False, bias=True
  ),
  mlp=MLPConfig(width=D, hidden=12, kind='gelu', bias=True),
  norm='layer',
)


X_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
# As of an attention map: positive, and 1 in all.
ATTENTION_BL = jax.nn.softmax(jax.random.normal(jax.random.key(2), (B, L)))
INFO = blocks.info(B, L)
PARAMS = tiny.drawn(
  nn.unbox(jax.eval_shape(Block(BLOCK).init, jax.random.key(0), X_BLD, INFO))
)['params']


def layer(block=BLOCK, **changes):
  config = dataclasses.replace(AMOD, **changes)
  return Layer(
    LayerConfig(block=block, routing=config, capacity=config.capacity)
  )


def route(attention_BL=ATTENTION_BL, **changes):
  done = jax.jit(layer(**changes).apply)(
    {'params': PARAMS}, X_BLD, INFO, attention_BL=attention_BL
  )
  return done.x_BLD, done.aux['router']


def oracle(chosen_BL):
  """Returns the update of all tokens, by attention to the chosen alone."""
  info = INFO.replace(valid_BL=jnp.asarray(chosen_BL))
  return np.asarray(
    Block(BLOCK).apply({'params': PARAMS}, X_BLD, info).update_BLD
  )


# The gate's factor on the update, from the score.
GATES = {None: np.ones_like, 'raw': np.asarray, 'sigmoid': special.expit}


@pytest.mark.parametrize('gate', GATES)
def test_attention_routing_is_the_dense_oracle(gate):
  y_BLD, told = route(gate=gate)
  chosen_BL = np.asarray(told.chosen_BL)
  assert chosen_BL.sum(axis=-1).tolist() == [4] * B
  weight_BL = GATES[gate](np.asarray(ATTENTION_BL))
  np.testing.assert_allclose(told.weight_BL, weight_BL, atol=1e-6)
  update_BLD = oracle(chosen_BL)
  want = X_BLD + np.where(chosen_BL, weight_BL, 0)[..., None] * update_BLD
  np.testing.assert_allclose(y_BLD, want, atol=1e-5)
  np.testing.assert_array_equal(y_BLD[~chosen_BL], X_BLD[~chosen_BL])
  # Attention to all tokens would be something else.
  every = oracle(np.ones((B, L), bool))
  assert np.abs(every - update_BLD)[chosen_BL].max() > 0.01


def test_the_class_token_is_a_candidate_like_any_unless_it_is_kept():
  attention_BL = jnp.tile(jnp.arange(1.0, L + 1), (B, 1))
  for kept, chosen in ((False, [6, 7, 8, 9]), (True, [0, 7, 8, 9])):
    _, told = route(attention_BL, keep_class_token=kept)
    found = [np.flatnonzero(row).tolist() for row in told.chosen_BL]
    assert found == [chosen] * B
  # Nothing but the choice changes: its score and weight stay what they are.
  np.testing.assert_array_equal(told.score_BL, attention_BL)
  np.testing.assert_array_equal(told.weight_BL, 1)
  assert told.kth_B.tolist() == [1.0] * B


def test_bfloat16_features_leave_the_score_alone():
  # Two scores that bfloat16 cannot tell apart.
  attention_BL = ATTENTION_BL.at[:, :5].set(0.5).at[:, 4].set(0.5001)
  half = layer(dataclasses.replace(BLOCK, dtype='bfloat16'), capacity=0.1)
  done = jax.jit(half.apply)(
    {'params': PARAMS},
    X_BLD.astype('bfloat16'),
    INFO,
    attention_BL=attention_BL,
  )
  told = done.aux['router']
  assert done.x_BLD.dtype == jnp.bfloat16
  assert told.score_BL.dtype == told.weight_BL.dtype == jnp.float32
  assert np.argmax(told.chosen_BL, axis=-1).tolist() == [4] * B


@pytest.mark.parametrize('gate', [None, 'raw'])
def test_a_score_learns_as_a_factor_alone(gate):
  def loss(attention_BL):
    done = layer(gate=gate).apply(
      {'params': PARAMS}, X_BLD, INFO, attention_BL=attention_BL
    )
    return (done.x_BLD**2).sum(), done.aux['router'].chosen_BL

  of_attention_BL, chosen_BL = jax.jit(jax.grad(loss, has_aux=True))(
    ATTENTION_BL
  )
  learns_BL = chosen_BL & (gate == 'raw')
  np.testing.assert_array_equal(of_attention_BL != 0, learns_BL)


class TestPlacement:
  @pytest.mark.parametrize(
    ('changes', 'capacities'),
    [
      ({}, {1: 0.5, 3: 0.5, 5: 0.5, 7: 0.5}),
      ({'first': 5}, {5: 0.5, 7: 0.5}),
      ({'layers': (2, 7, 4)}, {2: 0.5, 4: 0.5, 7: 0.5}),
      ({'first': 4, 'capacity': (0.5, 0.25)}, {5: 0.5, 7: 0.25}),
      # Only attention routing needs a dense block before it.
      ({'score': 'gaussian', 'layers': (0, 1)}, {0: 0.5, 1: 0.5}),
    ],
  )
  def test_routed_blocks_and_their_capacities(self, changes, capacities):
    found = VisionRoutingConfig(**changes).capacities(8)
    assert found == tuple(capacities.get(i) for i in range(8))

  @pytest.mark.parametrize(
    ('changes', 'block'),
    [({'layers': (1, 2)}, 2), ({'period': 1, 'offset': 0}, 0)],
  )
  def test_refuses(self, changes, block):
    with pytest.raises(
      errors.UserError, match=f'block={block}: .*before it.*learned'
    ):
      VisionRoutingConfig(**changes).capacities(12)

  @pytest.mark.parametrize(
    ('changes', 'gate'),
    [
      ({}, 'none'),
      ({'gate': 'raw'}, 'raw'),
      ({'score': 'learned'}, 'raw'),
      ({'score': 'learned', 'gate': 'sigmoid'}, 'sigmoid'),
      ({'score': 'gaussian', 'gate': 'raw'}, 'none'),
      ({'score': 'stride'}, 'none'),
    ],
  )
  def test_gates(self, changes, gate):
    assert VisionRoutingConfig(**changes).gate_kind == gate
