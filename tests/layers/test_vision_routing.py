"""Routing of image tokens: which blocks, which tokens, and by what score."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import errors
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import Block, BlockConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.token_info import TokenInfo

B, L, D = 3, 10, 8
CAPACITY = 0.4  # 4 of 10 tokens.
AMOD = VisionRoutingConfig(capacity=CAPACITY)
BLOCK = BlockConfig(
  attention=AttentionConfig(
    width=D, num_heads=2, num_kv_heads=2, head_dim=4, causal=False, bias=True
  ),
  mlp=MLPConfig(width=D, hidden=12, kind='gelu', bias=True),
  norm='layer',
)


@functools.partial(jax.jit, static_argnums=0)
def route(module, params, x_BLD, info, score_BL):
  done = module.apply({'params': params}, x_BLD, info, score_BL=score_BL)
  return done.x_BLD, done.aux['router']


@functools.partial(jax.jit, static_argnums=0)
def dense(module, params, x_BLD, info):
  return module.apply({'params': params}, x_BLD, info).update_BLD


def make(capacity=CAPACITY, rule='top_k', block=BLOCK, **changes):
  config = dataclasses.replace(AMOD, capacity=capacity, **changes)
  layer = LayerConfig(block=block, routing=config, capacity=capacity)
  return Layer(layer, Mode(routing=RoutingMode(rule=rule)))


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(1), (B, L, D))


@pytest.fixture(scope='module')
def score_BL():
  """As of an attention map: positive, and 1 in all."""
  return jax.nn.softmax(jax.random.normal(jax.random.key(2), (B, L)))


@pytest.fixture(scope='module')
def info():
  return TokenInfo(jnp.broadcast_to(jnp.arange(L), (B, L)))


@pytest.fixture(scope='module')
def params(x_BLD, info):
  init = jax.jit(Block(BLOCK).init)
  return nn.unbox(init(jax.random.key(0), x_BLD, info))['params']


def oracle(params, x_BLD, info, chosen_BL):
  """Returns the update of all tokens, by attention to the chosen alone."""
  hidden = info.replace(valid_BL=jnp.asarray(chosen_BL))
  return np.asarray(dense(Block(BLOCK), params, x_BLD, hidden))


class TestProcess:
  # The gate's factor on the update, from the score.
  GATES = {
    None: np.ones_like,
    'raw': np.asarray,
    'sigmoid': lambda x: 1 / (1 + np.exp(-x)),
  }

  @pytest.mark.parametrize('gate', GATES)
  def test_attention_routing_is_the_dense_oracle(
    self, params, x_BLD, info, score_BL, gate
  ):
    y_BLD, told = route(make(gate=gate), params, x_BLD, info, score_BL)
    chosen_BL = np.asarray(told.chosen_BL)
    assert chosen_BL.sum(axis=-1).tolist() == [4] * B
    weight_BL = self.GATES[gate](np.asarray(score_BL))
    np.testing.assert_allclose(told.weight_BL, weight_BL, atol=1e-6)
    update_BLD = oracle(params, x_BLD, info, chosen_BL)
    want = x_BLD + np.where(chosen_BL, weight_BL, 0)[..., None] * update_BLD
    np.testing.assert_allclose(y_BLD, want, atol=1e-5)
    np.testing.assert_array_equal(y_BLD[~chosen_BL], x_BLD[~chosen_BL])
    # Attention to all tokens would be something else.
    every = oracle(params, x_BLD, info, np.ones((B, L), bool))
    assert np.abs(every - update_BLD)[chosen_BL].max() > 0.01


class TestSelection:
  def chosen(self, params, x_BLD, info, score_BL, **changes):
    _, told = route(make(**changes), params, x_BLD, info, jnp.array(score_BL))
    return [np.flatnonzero(row).tolist() for row in told.chosen_BL], told

  def test_the_class_token_is_a_candidate_like_any_unless_it_is_kept(
    self, params, x_BLD, info
  ):
    score_BL = np.tile(np.arange(1.0, L + 1, dtype=np.float32), (B, 1))
    chosen, _ = self.chosen(params, x_BLD, info, score_BL)
    assert chosen == [[6, 7, 8, 9]] * B
    chosen, told = self.chosen(
      params, x_BLD, info, score_BL, keep_class_token=True
    )
    assert chosen == [[0, 7, 8, 9]] * B
    # Nothing but the choice changes: its score and weight stay what they are.
    np.testing.assert_array_equal(told.score_BL, score_BL)
    np.testing.assert_array_equal(told.weight_BL, 1)
    assert told.kth_B.tolist() == [1.0] * B

  def test_bfloat16_features_leave_the_score_alone(
    self, params, x_BLD, info, score_BL
  ):
    # Two scores that bfloat16 cannot tell apart.
    score_BL = np.asarray(score_BL).copy()
    score_BL[:, :5] = 0.5
    score_BL[:, 4] = 0.5001
    block = make(0.1, block=dataclasses.replace(BLOCK, dtype='bfloat16'))
    y_BLD, told = route(
      block, params, x_BLD.astype('bfloat16'), info, jnp.array(score_BL)
    )
    assert y_BLD.dtype == jnp.bfloat16
    assert told.score_BL.dtype == told.weight_BL.dtype == jnp.float32
    assert np.argmax(told.chosen_BL, axis=-1).tolist() == [4] * B


class TestGradients:
  @pytest.mark.parametrize('gate', [None, 'raw'])
  def test_a_score_learns_as_a_factor_alone(
    self, params, x_BLD, info, score_BL, gate
  ):
    @jax.jit
    def grad(score_BL):
      def loss(score_BL):
        done = make(gate=gate).apply(
          {'params': params}, x_BLD, info, score_BL=score_BL
        )
        return (done.x_BLD**2).sum(), done.aux['router'].chosen_BL

      return jax.grad(loss, has_aux=True)(score_BL)

    of_score_BL, chosen_BL = grad(score_BL)
    learns_BL = chosen_BL & (gate == 'raw')
    np.testing.assert_array_equal(of_score_BL != 0, learns_BL)


class TestPlacement:
  @pytest.mark.parametrize(
    ('changes', 'capacities'),
    [
      ({}, {1: 0.5, 3: 0.5, 5: 0.5, 7: 0.5}),
      ({'first': 4}, {5: 0.5, 7: 0.5}),
      ({'first': 5}, {5: 0.5, 7: 0.5}),
      ({'layers': (2, 7, 4)}, {2: 0.5, 4: 0.5, 7: 0.5}),
      # A list takes precedence.
      ({'layers': (2,), 'first': 5, 'period': 3, 'offset': 0}, {2: 0.5}),
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
