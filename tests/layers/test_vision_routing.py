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
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
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
  init = jax.jit(make(score='learned').init)
  params = nn.unbox(init(jax.random.key(0), x_BLD, info))['params']
  params['router']['kernel'] = jax.random.normal(jax.random.key(3), (D,))
  return params


def without_router(params):
  return {k: v for k, v in params.items() if k != 'router'}


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
    update_BLD = oracle(without_router(params), x_BLD, info, chosen_BL)
    want = x_BLD + np.where(chosen_BL, weight_BL, 0)[..., None] * update_BLD
    np.testing.assert_allclose(y_BLD, want, atol=1e-5)
    np.testing.assert_array_equal(y_BLD[~chosen_BL], x_BLD[~chosen_BL])
    # Attention to all tokens would be something else.
    every = oracle(without_router(params), x_BLD, info, np.ones((B, L), bool))
    assert np.abs(every - update_BLD)[chosen_BL].max() > 0.01

  @pytest.mark.parametrize('gate', [None, 'sigmoid'])
  def test_a_learned_router_is_multiplied(self, params, x_BLD, info, gate):
    block = make(score='learned', gate=gate)
    y_BLD, told = route(block, params, x_BLD, info, None)
    score_BL = np.asarray(x_BLD @ params['router']['kernel'])
    np.testing.assert_allclose(told.score_BL, score_BL, atol=1e-5)
    weight_BL = self.GATES[gate or 'raw'](score_BL)
    chosen_BL = np.asarray(told.chosen_BL)
    update_BLD = oracle(without_router(params), x_BLD, info, chosen_BL)
    want = x_BLD + np.where(chosen_BL, weight_BL, 0)[..., None] * update_BLD
    np.testing.assert_allclose(y_BLD, want, atol=1e-4)

  def test_capacity_one_is_the_dense_block_exactly(
    self, params, x_BLD, info, score_BL
  ):
    params = without_router(params)

    @jax.jit
    def both(params, x_BLD, info, score_BL):
      routed = make(1.0).apply(
        {'params': params}, x_BLD, info, score_BL=score_BL
      )
      done = Block(BLOCK).apply({'params': params}, x_BLD, info)
      return routed.x_BLD, x_BLD + done.update_BLD

    y_BLD, dense_BLD = both(params, x_BLD, info, score_BL)
    np.testing.assert_array_equal(y_BLD, dense_BLD)
    assert jnp.abs(y_BLD - x_BLD).min() > 0

  def test_one_token_alone(self, params, x_BLD, info, score_BL):
    y_BLD, told = route(make(0.01), params, x_BLD, info, score_BL)
    best_B = np.argmax(score_BL, axis=-1)
    assert np.argmax(told.chosen_BL, axis=-1).tolist() == best_B.tolist()
    assert told.chosen_BL.sum() == B
    one_B1D = x_BLD[np.arange(B), best_B][:, None]
    alone = jax.tree.map(lambda x: x[:, :1], info)
    update_B1D = dense(Block(BLOCK), without_router(params), one_B1D, alone)
    np.testing.assert_allclose(
      y_BLD[np.arange(B), best_B], (one_B1D + update_B1D)[:, 0], atol=1e-5
    )

  def test_attention_routing_has_no_parameters(self, x_BLD, info, score_BL):
    def names(block, *args):
      shapes = jax.eval_shape(block.init, jax.random.key(0), x_BLD, info, *args)
      return set(shapes['params'])

    plain = names(Block(BLOCK))
    assert names(make(), None, score_BL) == plain
    assert names(make(score='learned')) == plain | {'router'}


class TestSelection:
  def chosen(self, params, x_BLD, info, score_BL, **changes):
    _, told = route(make(**changes), params, x_BLD, info, jnp.array(score_BL))
    return [np.flatnonzero(row).tolist() for row in told.chosen_BL], told

  def test_ties_go_to_the_lowest_position(self, params, x_BLD, info):
    score_BL = np.full((B, L), 0.1, np.float32)
    score_BL[1, [2, 5]] = 0.2
    score_BL[2, 0] = 0.05
    chosen, _ = self.chosen(params, x_BLD, info, score_BL)
    assert chosen == [[0, 1, 2, 3], [0, 1, 2, 5], [1, 2, 3, 4]]

  def test_the_class_token_is_a_candidate_like_any(self, params, x_BLD, info):
    score_BL = np.tile(np.arange(1.0, L + 1, dtype=np.float32), (B, 1))
    score_BL[0, 0] = 100
    chosen, _ = self.chosen(params, x_BLD, info, score_BL)
    assert chosen == [[0, 7, 8, 9], [6, 7, 8, 9], [6, 7, 8, 9]]

  def test_a_kept_class_token_is_one_of_the_k(self, params, x_BLD, info):
    score_BL = np.tile(np.arange(1.0, L + 1, dtype=np.float32), (B, 1))
    chosen, told = self.chosen(
      params, x_BLD, info, score_BL, keep_class_token=True
    )
    assert chosen == [[0, 7, 8, 9]] * B
    # Nothing but the choice changes: its score and weight stay what they are.
    np.testing.assert_array_equal(told.score_BL, score_BL)
    np.testing.assert_array_equal(told.weight_BL, 1)
    assert told.kth_B.tolist() == [1.0] * B

  def test_a_kept_class_token_where_there_is_one_slot(
    self, params, x_BLD, info, score_BL
  ):
    chosen, _ = self.chosen(
      params, x_BLD, info, score_BL, capacity=0.1, keep_class_token=True
    )
    assert chosen == [[0]] * B

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
  """NaN-free, and as far as they should reach."""

  @pytest.mark.parametrize(
    ('capacity', 'score'), [(0.01, 'attention'), (CAPACITY, 'learned')]
  )
  def test_are_finite(self, params, x_BLD, info, score_BL, capacity, score):
    block = make(capacity, score=score)

    @jax.jit
    def grads(params, x_BLD, score_BL):
      def loss(params, x_BLD, score_BL):
        done = block.apply({'params': params}, x_BLD, info, score_BL=score_BL)
        return (done.x_BLD**2).sum()

      return jax.grad(loss, (0, 1, 2))(params, x_BLD, score_BL)

    of_params, of_x, of_score = grads(params, x_BLD, score_BL)
    leaves = jax.tree.leaves((of_params, of_x, of_score))
    assert all(jnp.isfinite(x).all() for x in leaves)
    assert of_params['mlp']['up']['kernel'].any()
    # Indices carry none: a score learns only as a factor.
    assert not of_score.any()
    assert of_params['router']['kernel'].any() == (score == 'learned')

  def test_the_multiplied_score_learns(self, params, x_BLD, info, score_BL):
    @jax.jit
    def grad(score_BL):
      def loss(score_BL):
        done = make(gate='raw').apply(
          {'params': params}, x_BLD, info, score_BL=score_BL
        )
        return (done.x_BLD**2).sum(), done.aux['router'].chosen_BL

      return jax.grad(loss, has_aux=True)(score_BL)

    of_score_BL, chosen_BL = grad(score_BL)
    np.testing.assert_array_equal(of_score_BL != 0, chosen_BL)


class TestPlacement:
  def routed(self, num_layers=12, **changes):
    capacities = VisionRoutingConfig(**changes).capacities(num_layers)
    assert len(capacities) == num_layers
    return [i for i, capacity in enumerate(capacities) if capacity is not None]

  def test_every_other_block(self):
    assert self.routed() == [1, 3, 5, 7, 9, 11]
    assert self.routed(24) == list(range(1, 24, 2))

  def test_late(self):
    assert self.routed(first=4) == [5, 7, 9, 11]
    assert self.routed(first=5) == [5, 7, 9, 11]
    assert self.routed(first=6) == [7, 9, 11]

  def test_a_list(self):
    config = VisionRoutingConfig(layers=(2, 7, 4))
    capacities = config.capacities(9)
    assert [i for i, c in enumerate(capacities) if c] == [2, 4, 7]

  def test_a_list_takes_precedence(self):
    config = VisionRoutingConfig(layers=(2,), first=5, period=3, offset=0)
    assert config.capacities(4) == (None, None, 0.5, None)

  def test_a_capacity_for_each(self):
    config = VisionRoutingConfig(capacity=(0.5, 0.25), first=4)
    assert config.capacities(8) == (*(None,) * 5, 0.5, None, 0.25)
    with pytest.raises(errors.UserError, match='3'):
      config.capacities(10)

  def test_language_models_have_the_same_places(self):
    config = MoDConfig(first=2)
    assert [i for i in range(6) if config.is_routed(i)] == [3, 5]
    config = MoDConfig(layers=(0, 1))
    assert [i for i in range(6) if config.is_routed(i)] == [0, 1]
    assert config.capacities(2) == (0.125, 0.125)

  @pytest.mark.parametrize(
    ('changes', 'message'),
    [
      ({'layers': (1, 2)}, 'block=2: .*before it'),
      ({'period': 1, 'offset': 0}, 'block=0: .*before it'),
      ({'layers': (0,)}, 'block=0: .*before it.*learned'),
      (
        {'layers': (3, 12)},
        r'\(3, 12\): expected different blocks from 0 to 11',
      ),
      ({'layers': (-1,)}, r'layers\[0\]=-1: expected an integer from 0'),
      ({'layers': ()}, 'num_layers=12: .*routing=None'),
      ({'first': 12}, 'num_layers=12: .*first'),
    ],
  )
  def test_refuses(self, changes, message):
    with pytest.raises(errors.UserError, match=message):
      VisionRoutingConfig(**changes).capacities(12)

  @pytest.mark.parametrize(
    ('changes', 'message'),
    [
      ({'first': -1}, 'first=-1: expected an integer from 0'),
      ({'capacity': 0.0}, r'capacity=0.0: expected.*\(0, 1\]'),
      ({'capacity': (0.5, 1.5)}, r'capacity\[1\]=1\.5'),
      ({'offset': 2}, 'offset=2.*period=2'),
      ({'score': 'attenton'}, 'attenton.*attention'),
      ({'gate': 'rew'}, 'rew.*raw'),
      ({'score': 'learned', 'gate': 'none'}, "gate='none'.*gradient"),
    ],
  )
  def test_refuses_when_built(self, changes, message):
    with pytest.raises(errors.UserError, match=message):
      VisionRoutingConfig(**changes)

  @pytest.mark.parametrize('score', ['learned', 'gaussian', 'stride'])
  def test_other_scores_route_any_block(self, score):
    config = VisionRoutingConfig(score=score, layers=(0, 1))
    assert config.capacities(2) == (0.5, 0.5)

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


def test_flops_of_attention_routing_are_the_block_s_alone():
  assert make().config.flops(L) == BLOCK.flops(4)
  learned = make(score='learned').config
  assert learned.flops(L)['router'] == 2 * L * D
