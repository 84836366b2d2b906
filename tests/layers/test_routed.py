"""The routed layer: score, select, process, combine."""

import dataclasses
import functools
import re

from flax import errors as flax_errors
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import errors, losses, routing
from mod_jax.layers import rules as rules_lib
from mod_jax.layers.block import Block
from mod_jax.layers.cache import EMPTY, KVCache
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig, Predictor
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.rules import Routing
from mod_jax.layers.scores import Attention, Learned, Router
from mod_jax.losses import sums
from mod_jax.models.lm import LMConfig
from mod_jax.tasks import plain

B, L, D = 3, 10, 8
CAPACITY = 0.4
THRESHOLD = 0.2
LEARNED = MoDConfig(capacity=CAPACITY, predictor_width=4, threshold_decay=0.9)
STRIDE = MoDConfig(capacity=CAPACITY, score='stride')
GAUSSIAN = MoDConfig(capacity=CAPACITY, score='gaussian')
RULES = ('router', 'predictor', 'threshold', 'fixed')

# Left padding, right padding, and a hole between prompt and continuation.
VALID_BL = (
  np.array(
    [
      [0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
      [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
      [1, 1, 1, 0, 0, 1, 1, 1, 1, 1],
    ]
  )
  > 0
)


def config_of(rule):
  return STRIDE if rule == 'fixed' else LEARNED


def given(params, threshold=THRESHOLD):
  """Returns variables whose moving average is the threshold."""
  moving = routing.MovingThreshold(threshold, jnp.ones(()))
  return {'params': params, 'moving': {'threshold': moving}}


@functools.partial(jax.jit, static_argnums=0)
def apply(module, params, x_BLD, info, threshold=THRESHOLD, rngs=None):
  """Returns the features after the layer, and what was routed."""
  done = module.apply(given(params, threshold), x_BLD, info, rngs=rngs)
  return done.x_BLD, done.aux['router']


@pytest.fixture(scope='module')
def module(block_config):
  """Returns a routed layer of these tests' size."""

  def make(config=LEARNED, capacity=CAPACITY, **mode):
    layer = LayerConfig(block=block_config, routing=config, capacity=capacity)
    return Layer(layer, Mode(routing=RoutingMode(**mode)))

  return make


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(1), (B, L, D))


@pytest.fixture(scope='module')
def info(token_info):
  return token_info(np.broadcast_to(np.arange(L), (B, L)))


@pytest.fixture(scope='module')
def padded(token_info):
  position_BL = np.maximum(np.cumsum(VALID_BL, axis=-1) - 1, 0)
  return token_info(position_BL, jnp.array(VALID_BL))


@pytest.fixture(scope='module')
def params(module, x_BLD, info):
  init = jax.jit(module().init)
  params = nn.unbox(init(jax.random.key(0), x_BLD, info))['params']
  # Scores of size one, not of size .02: errors then show.
  params['router']['kernel'] = jax.random.normal(jax.random.key(2), (D,))
  return params


class TestProcess:
  """Gathering the chosen ≡ processing all and hiding the others."""

  @pytest.mark.parametrize('rule', ['top_k', *RULES])
  def test_equals_the_dense_masked_oracle(
    self, module, params, block_config, block_oracle, x_BLD, info, rule
  ):
    y_BLD, told = apply(module(config_of(rule), rule=rule), params, x_BLD, info)
    chosen_BL = np.asarray(told.chosen_BL)
    assert chosen_BL.any()
    assert not chosen_BL.all()
    update_BLD = block_oracle(
      params, block_config, x_BLD, info.position_BL, chosen_BL
    )
    weight_BL = np.ones((B, L))
    if rule != 'fixed':
      weight_BL = np.asarray(x_BLD @ params['router']['kernel'])
    expected = x_BLD + np.where(
      chosen_BL[..., None], weight_BL[..., None] * update_BLD, 0
    )
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)
    np.testing.assert_array_equal(y_BLD[~chosen_BL], x_BLD[~chosen_BL])

  def test_with_padding_and_segments(
    self, module, params, block_config, block_oracle, x_BLD, padded
  ):
    segment_BL = np.where(np.arange(L) < 6, 1, 2) * np.ones((B, 1), int)
    info = padded.replace(segment_BL=jnp.array(segment_BL))
    y_BLD, told = apply(module(), params, x_BLD, info)
    chosen_BL = np.asarray(told.chosen_BL)
    update_BLD = block_oracle(
      params, block_config, x_BLD, info.position_BL, chosen_BL, segment_BL
    )
    weight_BL1 = np.asarray(x_BLD @ params['router']['kernel'])[..., None]
    expected = x_BLD + np.where(
      chosen_BL[..., None], weight_BL1 * update_BLD, 0
    )
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)

  @pytest.mark.parametrize('gate', [g for g in routing.GATES if g != 'none'])
  def test_the_gate_weighs_the_update(self, module, params, x_BLD, info, gate):
    config = dataclasses.replace(LEARNED, gate=gate, gate_alpha=3.0)
    y_BLD, told = apply(module(config), params, x_BLD, info)
    raw_BLD, raw = apply(module(), params, x_BLD, info)
    score_BL = x_BLD @ params['router']['kernel']
    np.testing.assert_allclose(told.score_BL, score_BL, atol=1e-5)
    np.testing.assert_allclose(
      told.weight_BL, routing.gate(gate, score_BL, 3.0), atol=1e-5
    )
    np.testing.assert_array_equal(told.chosen_BL, raw.chosen_BL)
    ratio_BL1 = (told.weight_BL / raw.weight_BL)[..., None]
    expected = np.asarray(x_BLD + (raw_BLD - x_BLD) * ratio_BL1)
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)

  def test_capacity_one_with_gate_one_is_the_dense_block(
    self, module, params, block_config, x_BLD, padded
  ):
    config = dataclasses.replace(STRIDE, capacity=1.0)
    dense = {k: v for k, v in params.items() if k not in _ROUTING}

    @jax.jit
    def both(params, x_BLD, info):
      routed = module(config, 1.0).apply({'params': params}, x_BLD, info)
      done = Block(block_config).apply({'params': params}, x_BLD, info)
      return routed.x_BLD, x_BLD + done.update_BLD

    y_BLD, dense_BLD = both(dense, x_BLD, padded.replace(valid_BL=None))
    np.testing.assert_array_equal(y_BLD, dense_BLD)
    y_BLD, dense_BLD = both(dense, x_BLD, padded)
    np.testing.assert_array_equal(y_BLD[VALID_BL], dense_BLD[VALID_BL])

  def test_bfloat16_features_but_a_float32_router(
    self, module, params, block_config, x_BLD, info
  ):
    block = dataclasses.replace(block_config, dtype='bfloat16')
    routed = Layer(LayerConfig(block=block, routing=LEARNED, capacity=CAPACITY))
    half_BLD = x_BLD.astype('bfloat16')
    y_BLD, told = apply(routed, params, half_BLD, info)
    assert y_BLD.dtype == jnp.bfloat16
    assert told.score_BL.dtype == told.weight_BL.dtype == jnp.float32
    exact_BL = half_BLD.astype('float32') @ params['router']['kernel']
    np.testing.assert_allclose(told.score_BL, exact_BL, atol=1e-5)
    y32_BLD, told32 = apply(module(), params, half_BLD.astype('float32'), info)
    np.testing.assert_array_equal(told.chosen_BL, told32.chosen_BL)
    np.testing.assert_allclose(y_BLD.astype('float32'), y32_BLD, atol=0.1)


_ROUTING = ('router', 'predictor')


class TestSelection:
  def test_top_k_takes_the_best_of_each_row(self, module, params, x_BLD, info):
    _, told = apply(module(), params, x_BLD, info)
    score_BL = np.asarray(told.score_BL)
    for row in range(B):
      best = np.sort(np.argsort(-score_BL[row])[:4])
      assert np.flatnonzero(told.chosen_BL[row]).tolist() == best.tolist()
      assert told.kth_B[row] == np.sort(score_BL[row])[-4]
    np.testing.assert_array_equal(told.top_k_BL, told.chosen_BL)
    assert told.overflow_B.tolist() == [0] * B

  def test_a_padded_row_chooses_as_many_as_it_would_alone(
    self, module, params, x_BLD, padded
  ):
    _, told = apply(module(), params, x_BLD, padded)
    assert not told.chosen_BL[~VALID_BL].any()
    counts = [
      routing.num_chosen(CAPACITY, int(n)) for n in VALID_BL.sum(axis=-1)
    ]
    assert counts == [2, 2, 3]
    assert told.chosen_BL.sum(axis=-1).tolist() == counts
    score_BL = np.where(told.chosen_BL, told.score_BL, np.inf)
    np.testing.assert_array_equal(told.kth_B, score_BL.min(axis=-1))

  @pytest.mark.parametrize('capacity', [0.33333, 0.29])
  def test_counts_are_floored_exactly_for_any_row_length(
    self, params, block_config, token_info, capacity
  ):
    # Row n has n real tokens; 0.33333 · 6 is not quite 2.
    length = 100
    valid_BL = np.arange(length) < np.arange(1, length + 1)[:, None]
    info = token_info(np.zeros((length, length), int), jnp.array(valid_BL))
    routed = Layer(
      LayerConfig(block=block_config, routing=LEARNED, capacity=capacity)
    )
    x_BLD = jax.random.normal(jax.random.key(3), (length, length, D))
    _, told = apply(routed, params, x_BLD, info)
    expected = [routing.num_chosen(capacity, n) for n in range(1, length + 1)]
    assert told.chosen_BL.sum(axis=-1).tolist() == expected

  def test_rules_decide_by_what_they_were_trained_for(
    self, module, params, x_BLD, info
  ):
    chosen = {}
    for rule in RULES:
      _, told = apply(module(config_of(rule), rule=rule), params, x_BLD, info)
      chosen[rule] = np.asarray(told.chosen_BL)
      assert told.overflow_B.tolist() == [0] * B
      if rule != 'fixed':
        score_BL, logit_BL = told.score_BL, told.predictor_BL
    np.testing.assert_array_equal(chosen['router'], score_BL > 0)
    np.testing.assert_array_equal(chosen['predictor'], logit_BL > 0)
    np.testing.assert_array_equal(chosen['threshold'], score_BL >= THRESHOLD)
    assert np.flatnonzero(chosen['fixed'][0]).tolist() == [0, 3, 5, 8]
    assert len({x.tobytes() for x in chosen.values()}) == 4

  def test_threshold_takes_the_token_that_just_reaches_it(
    self, module, params, x_BLD, info
  ):
    _, told = apply(module(), params, x_BLD, info)
    routed = module(rule='threshold')
    for row in range(B):
      _, at = apply(routed, params, x_BLD, info, told.kth_B[row])
      np.testing.assert_array_equal(at.chosen_BL[row], told.chosen_BL[row])

  def test_drop_passes_by_the_latest_and_counts_them(
    self, module, params, x_BLD, info
  ):
    wanted_BL = np.asarray(x_BLD @ params['router']['kernel']) > 0
    routed = module(rule='router', overflow='drop', slack=1.0)
    y_BLD, told = apply(routed, params, x_BLD, info)
    kept_BL = wanted_BL & (np.cumsum(wanted_BL, axis=-1) <= 4)
    assert (kept_BL != wanted_BL).any()
    np.testing.assert_array_equal(told.chosen_BL, kept_BL)
    np.testing.assert_array_equal(
      told.overflow_B, (wanted_BL & ~kept_BL).sum(axis=-1)
    )
    np.testing.assert_array_equal(y_BLD[~kept_BL], x_BLD[~kept_BL])
    assert (y_BLD[kept_BL] != x_BLD[kept_BL]).any(axis=-1).all()

  def test_nothing_chosen_is_the_identity(self, module, params, x_BLD, info):
    y_BLD, told = apply(module(rule='threshold'), params, x_BLD, info, jnp.inf)
    assert not told.chosen_BL.any()
    np.testing.assert_array_equal(y_BLD, x_BLD)


class TestDecoding:
  """Prefill and steps ≡ the whole row, whatever the rule."""

  PROMPT = 4

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ('rule', 'overflow'),
    [
      ('router', 'exact'),
      ('router', 'drop'),
      ('predictor', 'drop'),
      ('threshold', 'exact'),
      ('fixed', 'drop'),
    ],
  )
  def test_equals_the_full_forward(
    self, module, params, x_BLD, padded, rule, overflow
  ):
    # Fewer slots than the learned rules want, for something to be dropped.
    capacity = CAPACITY if rule == 'fixed' else 0.2
    chunks = (0, 1, 2, 3)
    blocks = [
      module(
        config_of(rule),
        capacity,
        rule=rule,
        overflow=overflow,
        slack=1.0,
        chunk=chunk,
      )
      for chunk in chunks
    ]

    @jax.jit
    def run(params, x_BLD, info):
      full = _call(blocks[0], params, x_BLD, info, None)
      mode = blocks[0].mode.routing
      cache = KVCache.empty(
        B,
        mode.slots(capacity, L),
        *_kv_shape(blocks[0]),
        'float32',
        mode.row_slots(capacity, L, info.valid_BL.sum(axis=-1)),
      )
      # A prompt is prefilled alike whatever the chunk.
      prompt = jax.tree.map(lambda x: x[:, : self.PROMPT], (x_BLD, info))
      *prefilled, cache = _call(blocks[0], params, *prompt, cache)
      decoded = []
      for block in blocks:

        def step(cache, t, block=block):
          x_B1D, now = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1),
            (x_BLD, info),
          )
          *told, cache = _call(block, params, x_B1D, now, cache)
          return cache, told

        end, (y_TB1D, chosen_TB1, overflow_TB) = jax.lax.scan(
          step, cache, jnp.arange(self.PROMPT, L)
        )
        decoded.append(
          (
            jnp.concatenate(
              [prefilled[0], y_TB1D[:, :, 0].swapaxes(0, 1)], axis=1
            ),
            jnp.concatenate([prefilled[1], chosen_TB1[..., 0].T], axis=1),
            prefilled[2] + overflow_TB.sum(axis=0),
            end,
          )
        )
      return full, decoded

    (full_BLD, full_chosen_BL, full_overflow_B, _), decoded = run(
      params, x_BLD, padded
    )
    if rule != 'fixed':
      assert (overflow == 'drop') == full_overflow_B.any()
    for y_BLD, chosen_BL, overflow_B, cache in decoded:
      np.testing.assert_array_equal(chosen_BL, full_chosen_BL)
      np.testing.assert_array_equal(overflow_B, full_overflow_B)
      np.testing.assert_allclose(y_BLD, full_BLD, atol=1e-5)

      # The cache holds the routed tokens and no others, each row its own.
      lengths = cache.length_B.tolist()
      assert lengths == chosen_BL.sum(axis=-1).tolist()
      assert overflow == 'drop' or len(set(lengths)) > 1
      for row in range(B):
        held = padded.position_BL[row][chosen_BL[row]].tolist()
        slots = cache.position_BS[row].tolist()
        assert slots == held + [EMPTY] * (len(slots) - len(held))

  @pytest.mark.parametrize(
    ('capacity', 'batch', 'rows'),
    [
      (0.125, 1, 1),
      (0.125, 4, 2),
      (0.125, 8, 4),
      (0.125, 32, 8),
      (0.125, 64, 16),
      (1.0, 6, 6),
    ],
  )
  def test_rows_at_a_time_follow_the_batch(self, capacity, batch, rows):
    assert RoutingMode().rows_at_a_time(capacity, batch) == rows
    assert RoutingMode(chunk=3).rows_at_a_time(capacity, batch) == min(3, batch)

  @pytest.mark.parametrize('chunk', [0, 2])
  def test_steps_that_route_no_row(self, module, params, x_BLD, info, chunk):
    routed = module(rule='threshold', chunk=chunk)
    cache = KVCache.empty(B, 4, *_kv_shape(routed), 'float32')
    first = jax.tree.map(lambda x: x[:, :1], info)
    done = jax.jit(routed.apply)(
      given(params, jnp.inf), x_BLD[:, :1], first, cache
    )
    assert not done.aux['router'].chosen_BL.any()
    np.testing.assert_array_equal(done.x_BLD, x_BLD[:, :1])
    jax.tree.map(np.testing.assert_array_equal, done.cache, cache)

  def test_prefill_by_top_k_keeps_what_it_chose(
    self, module, params, x_BLD, padded
  ):
    routed = module()
    full_BLD, full = apply(routed, params, x_BLD, padded)
    cache = KVCache.empty(B, L, *_kv_shape(routed), 'float32')
    done = jax.jit(routed.apply)({'params': params}, x_BLD, padded, cache)
    chosen_BL = done.aux['router'].chosen_BL
    np.testing.assert_array_equal(chosen_BL, full.chosen_BL)
    np.testing.assert_allclose(done.x_BLD, full_BLD, atol=1e-5)
    lengths = done.cache.length_B.tolist()
    assert lengths == full.chosen_BL.sum(axis=-1).tolist()

  @pytest.mark.parametrize(
    ('mode', 'slots'),
    [
      ({'rule': 'top_k'}, 12),
      ({'rule': 'router'}, 100),
      ({'rule': 'router', 'overflow': 'drop'}, 16),
      ({'rule': 'router', 'overflow': 'drop', 'slack': 1.0}, 13),
      ({'rule': 'router', 'overflow': 'drop', 'slack': 50.0}, 100),
    ],
  )
  def test_slots(self, mode, slots):
    assert RoutingMode(**mode).slots(0.125, 100) == slots


def _call(block, params, x_BLD, info, cache):
  done = block.apply(given(params), x_BLD, info, cache)
  told = done.aux['router']
  return done.x_BLD, told.chosen_BL, told.overflow_B, done.cache


def _kv_shape(routed):
  attention = routed.config.block.attention
  return attention.num_kv_heads, attention.head_dim


class TestGradients:
  @pytest.mark.parametrize('gate', ['raw', 'sigmoid'])
  def test_the_router_learns_through_the_gate_of_the_chosen(
    self, module, params, block_config, block_oracle, x_BLD, info, gate
  ):
    config = dataclasses.replace(LEARNED, gate=gate)
    routed = module(config)
    weight_BLD = np.random.default_rng(0).normal(size=(B, L, D))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(kernel_D):
      changed = params | {'router': {'kernel': kernel_D}}
      done = routed.apply({'params': changed}, x_BLD, info)
      return jnp.sum(weight_BLD * done.x_BLD), done.aux['router']

    kernel_D = params['router']['kernel']
    (_, told), grad_D = loss(kernel_D)
    chosen_BL = np.asarray(told.chosen_BL)
    update_BLD = block_oracle(
      params, block_config, x_BLD, info.position_BL, chosen_BL
    )
    # d loss / d r of a chosen token is <weight, f(x)>; of others nothing.
    score_BL = np.asarray(told.score_BL, np.float64)
    slope_BL = np.ones((B, L))
    if gate == 'sigmoid':
      slope_BL = np.exp(-score_BL) / (1 + np.exp(-score_BL)) ** 2
    by_score_BL = chosen_BL * slope_BL * (weight_BLD * update_BLD).sum(-1)
    expected = np.einsum('bl,bld->d', by_score_BL, np.asarray(x_BLD))
    np.testing.assert_allclose(grad_D, expected, atol=1e-4, rtol=1e-4)

    # And it is the slope of the loss itself, as long as the choice stands.
    direction_D = np.asarray(grad_D / jnp.linalg.norm(grad_D))
    step = 1e-2
    (above, up), _ = loss(kernel_D + step * direction_D)
    (below, down), _ = loss(kernel_D - step * direction_D)
    np.testing.assert_array_equal(up.chosen_BL, chosen_BL)
    np.testing.assert_array_equal(down.chosen_BL, chosen_BL)
    slope = (above - below) / (2 * step)
    assert slope == pytest.approx(np.linalg.norm(grad_D), rel=1e-2)

  def test_an_unchosen_token_passes_its_gradient_unchanged(
    self, module, params, x_BLD, padded
  ):
    routed = module()
    weight_BLD = jax.random.normal(jax.random.key(5), (B, L, D))

    def loss(x_BLD):
      done = routed.apply({'params': params}, x_BLD, padded)
      return jnp.sum(weight_BLD * done.x_BLD), done.aux['router']

    grad_BLD, told = jax.jit(jax.grad(loss, has_aux=True))(x_BLD)
    chosen_BL = np.asarray(told.chosen_BL)
    np.testing.assert_array_equal(grad_BLD[~chosen_BL], weight_BLD[~chosen_BL])
    changed = (grad_BLD[chosen_BL] != weight_BLD[chosen_BL]).any(axis=-1)
    assert changed.all()

  def test_the_predictor_learns_alone(self, module, params, x_BLD, info):
    def loss(params, x_BLD):
      done = module().apply({'params': params}, x_BLD, info)
      return jnp.sum(done.aux['router'].predictor_BL ** 2)

    grads, grad_BLD = jax.jit(jax.grad(loss, (0, 1)))(params, x_BLD)
    assert not grad_BLD.any()
    own = grads.pop('predictor')
    assert all(x.any() for x in jax.tree.leaves(own))
    assert not any(x.any() for x in jax.tree.leaves(grads))


class TestRouter:
  def test_starts_as_a_narrow_normal_without_a_bias(self):
    variables = Router(0.02).init(jax.random.key(0), jnp.ones((1, 20_000)))
    params = nn.unbox(variables)['params']
    assert set(params) == {'kernel'}
    assert params['kernel'].shape == (20_000,)
    assert params['kernel'].std() == pytest.approx(0.02, rel=0.03)
    assert abs(params['kernel'].mean()) < 1e-3
    # Not cut off, as a truncated normal would be.
    assert abs(params['kernel']).max() > 0.06

  def test_config_default(self):
    assert MoDConfig().router_std == 0.02

  def test_is_float32_under_bfloat16(self):
    kernel_D = jax.random.normal(jax.random.key(0), (64,))
    x_BLD = jax.random.normal(jax.random.key(1), (2, 3, 64), jnp.bfloat16)
    score_BL = Router(0.02).apply({'params': {'kernel': kernel_D}}, x_BLD)
    assert score_BL.dtype == jnp.float32
    exact = np.asarray(x_BLD, np.float64) @ np.asarray(kernel_D, np.float64)
    np.testing.assert_allclose(score_BL, exact, atol=1e-4)

  @pytest.mark.parametrize('activation', ['gelu', 'tanh'])
  def test_a_hidden_layer_and_biases(self, activation):
    router = Router(0.5, bias=True, hidden=5, activation=activation)
    x_BLD = jax.random.normal(jax.random.key(1), (2, 3, D))
    params = nn.unbox(router.init(jax.random.key(0), x_BLD))['params']
    assert not params['bias'].any()
    assert not params['hidden_bias'].any()
    params['bias'], params['hidden_bias'] = jnp.float32(0.7), jnp.arange(5.0)
    hidden_BLF = x_BLD @ params['hidden_kernel'] + params['hidden_bias']
    want_BL = getattr(nn, activation)(hidden_BLF) @ params['kernel'] + 0.7
    score_BL = router.apply({'params': params}, x_BLD)
    np.testing.assert_allclose(score_BL, want_BL, atol=1e-5)

  def test_an_accelerator_must_not_round_the_hidden_layer(self):
    x_BLD = jnp.ones((2, 3, D), jnp.bfloat16)
    router = Router(0.02, hidden=4)
    params = jax.eval_shape(router.init, jax.random.key(0), x_BLD)
    text = jax.jit(router.apply).lower(params, x_BLD).as_text()
    products = re.findall(r'dot_general.*precision = \[(\w+), (\w+)\]', text)
    assert products == [('HIGHEST', 'HIGHEST')]

  def test_normalized_does_not_see_how_large_features_are(self):
    kernel_D = jax.random.normal(jax.random.key(0), (64,))
    x_BLD = jax.random.normal(jax.random.key(1), (2, 3, 64))
    params = {'params': {'kernel': kernel_D}}
    scores = [
      np.asarray(Router(0.02, normalized).apply(params, factor * x_BLD))
      for normalized in (True, False)
      for factor in (1.0, 50.0)
    ]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)
    np.testing.assert_allclose(50 * scores[2], scores[3], rtol=1e-4)
    scale_BL1 = np.sqrt(np.mean(np.square(x_BLD), axis=-1))
    np.testing.assert_allclose(scores[0], scores[2] / scale_BL1, rtol=1e-3)


def test_an_accelerator_must_not_round_the_predictor_either():
  x_BLD = jnp.ones((2, 3, D), jnp.bfloat16)
  predictor = Predictor(4)
  params = jax.eval_shape(predictor.init, jax.random.key(0), x_BLD)
  text = jax.jit(predictor.apply).lower(params, x_BLD).as_text()
  products = re.findall(r'dot_general.*precision = \[(\w+), (\w+)\]', text)
  assert products == [('HIGHEST', 'HIGHEST')] * 2


class TestCombine:
  """The other forms in which a block's result meets the residual stream."""

  @pytest.mark.parametrize('combine', ['weigh_bypass', 'replace'])
  def test_equals_the_oracle(
    self, module, params, block_config, block_oracle, x_BLD, padded, combine
  ):
    config = MoDConfig(capacity=CAPACITY, gate='sigmoid', combine=combine)
    y_BLD, told = apply(module(config), params, x_BLD, padded)
    chosen_BL = np.asarray(told.chosen_BL)
    update_BLD = block_oracle(
      params, block_config, x_BLD, padded.position_BL, chosen_BL
    )
    chosen_BL1, x_BLD = chosen_BL[..., None], np.asarray(x_BLD)
    weight_BL1 = np.asarray(told.weight_BL)[..., None]
    if combine == 'weigh_bypass':
      processed_BLD = x_BLD + weight_BL1 * update_BLD
      expected = np.where(chosen_BL1, processed_BLD, (1 - weight_BL1) * x_BLD)
    else:
      processed_BLD = weight_BL1 * (x_BLD + update_BLD)
      expected = np.where(chosen_BL1, processed_BLD, x_BLD)
    np.testing.assert_allclose(y_BLD[VALID_BL], expected[VALID_BL], atol=1e-4)


class TestTokenChoice:
  def test_the_balance_leads_to_the_capacity(self):
    """From all tokens in, and from none, whatever the features."""
    config = MoDConfig(
      train_rule='router', balance_loss=1.0, router_loss=0.0, router_bias=True
    )
    x_BLD = jax.random.normal(jax.random.key(0), (8, 64, D))
    router = config.scorer.router()
    params = nn.unbox(router.init(jax.random.key(1), x_BLD))['params']

    @jax.jit
    def train(params):
      def loss(params):
        score_BL = router.apply({'params': params}, x_BLD)
        told = Routing(
          score_BL=score_BL,
          weight_BL=score_BL,
          chosen_BL=score_BL > 0,
          overflow_B=jnp.zeros(8, jnp.int32),
          capacity=jnp.float32(0.25),
          top_k_BL=score_BL > 0,
        )
        pairs, found = plain.routing_losses(config, [told], None)
        return sums.sum_of_means(pairs), found

      def step(params, _):
        grads, found = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        return params, found['router/wanted'][0] / found['router/wanted'][1]

      return jax.lax.scan(step, params, length=300)[1]

    for bias, first in ((3.0, 1.0), (-3.0, 0.0)):
      share_T = train(params | {'bias': jnp.float32(bias)})
      assert share_T[0] == first
      assert share_T[-50:].mean() == pytest.approx(0.25, abs=0.03)

  def test_is_trained_with_slots_in_order_and_counts_them(self, block_config):
    config = MoDConfig(
      train_rule='router', balance_loss=0.1, router_loss=0.0, train_slack=1.5
    )
    assert config.causal_rules == ('router',)
    # What `TestSelection` and `TestDecoding` hold to be causal and counted.
    mode = RoutingMode(rule='router', overflow='drop', slack=1.5)
    assert config.train_mode == mode
    layer = LayerConfig(block=block_config, routing=config, capacity=0.125)
    assert layer.tokens(64) == 12

  def test_metrics_say_what_wanted_in_and_what_was_dropped(
    self, module, params, x_BLD, padded
  ):
    config = MoDConfig(train_rule='router', balance_loss=0.1, router_loss=0.0)
    mode = {'rule': 'router', 'overflow': 'drop', 'slack': 1.0}
    _, told = apply(module(config, 0.2, **mode), params, x_BLD, padded)
    assert told.overflow_B.sum() > 0
    (_, (total, count)), found = plain.routing_losses(
      config, [told], padded.valid_BL
    )
    loss = total / count
    wanted_BL = (np.asarray(told.score_BL) > 0) & VALID_BL
    assert found['router/wanted'] == (wanted_BL.sum(), VALID_BL.sum())
    assert found['router/dropped'] == (told.overflow_B.sum(), VALID_BL.sum())
    total, count = losses.path_balance(told.score_BL, 0.2, padded.valid_BL)
    np.testing.assert_allclose(loss, 0.1 * total / count, rtol=1e-5)


@pytest.mark.parametrize('kind', ['tokens', 'sequences'])
def test_a_warm_up_begins_with_all_tokens(kind, block_config, params, padded):
  """Also of those that decide by their own scores, which are below 0 here."""
  config = TestPerSequence.CONFIG
  if kind == 'tokens':
    config = MoDConfig(train_rule='router', balance_loss=0.1, router_loss=0.0)
  layer = LayerConfig(block=block_config, routing=config, capacity=1.0)
  kernel_D = params['router']['kernel']
  x_BLD = jnp.broadcast_to(-kernel_D, (B, L, D))
  module = Layer(layer, Mode(train=True, routing=config.train_mode))
  _, told = apply(module, params, x_BLD, padded)
  np.testing.assert_array_equal(told.chosen_BL, VALID_BL)


@pytest.mark.parametrize('rule', ['router', 'never'])
def test_at_capacity_1_an_untrained_router_skips_nothing(
  rule, block_config, params, padded
):
  """So a model that was just routed generates as its dense twin does."""
  layer = LayerConfig(block=block_config, routing=MoDConfig(), capacity=1.0)
  x_BLD = jnp.broadcast_to(-params['router']['kernel'], (B, L, D))
  module = Layer(layer, Mode(routing=RoutingMode(rule=rule)))
  _, routed = apply(module, params, x_BLD, padded)
  assert (np.asarray(routed.score_BL) < 0).all()
  expected_BL = VALID_BL if rule == 'router' else np.zeros_like(VALID_BL)
  np.testing.assert_array_equal(routed.chosen_BL, expected_BL)


class TestPerSequence:
  CONFIG = MoDConfig(
    capacity=CAPACITY,
    per_sequence=True,
    balance_loss=0.1,
    router_loss=0.0,
    gate='sigmoid',
  )

  def test_a_router_of_nan_is_not_passed_by(
    self, module, params, x_BLD, padded
  ):
    broken = params | {
      'router': {'kernel': params['router']['kernel'] * np.nan}
    }
    y_BLD, routed = apply(module(self.CONFIG), broken, x_BLD, padded)
    np.testing.assert_array_equal(routed.chosen_BL, VALID_BL)
    assert np.isnan(y_BLD)[VALID_BL].all()

  def test_a_sequence_enters_where_its_mean_score_is_above_zero(
    self, module, params, block_config, block_oracle, x_BLD, padded
  ):
    # Of real tokens alone: with the padding, all rows would stay out.
    kernel_D = params['router']['kernel']
    far_BLD = -50 * kernel_D / jnp.sum(kernel_D**2)
    sign_B11 = jnp.array([1.0, -1.0, 1.0])[:, None, None]
    x_BLD = x_BLD + sign_B11 * kernel_D / jnp.sum(kernel_D**2) * 2
    x_BLD = jnp.where(VALID_BL[..., None], x_BLD, far_BLD)
    # In a loop over the rows that enter, and by hiding the others.
    y_BLD, told = apply(module(self.CONFIG), params, x_BLD, padded)
    hidden_BLD, _ = apply(module(self.CONFIG, chunk=0), params, x_BLD, padded)
    np.testing.assert_allclose(y_BLD, hidden_BLD, atol=1e-5)
    score_BL = np.asarray(x_BLD @ kernel_D)
    assert (score_BL.mean(axis=-1) < 0).all()
    mean_B1 = score_BL.mean(axis=-1, keepdims=True, where=VALID_BL)
    np.testing.assert_allclose(told.score_BL, mean_B1 + 0 * score_BL, atol=1e-4)
    enters_B1 = mean_B1 > 0
    assert enters_B1.ravel().tolist() == [True, False, True]
    np.testing.assert_array_equal(told.chosen_BL, enters_B1 & VALID_BL)
    update_BLD = block_oracle(
      params, block_config, x_BLD, padded.position_BL, VALID_BL
    )
    weight_B11 = (1 / (1 + np.exp(-mean_B1)))[..., None]
    expected = x_BLD + np.where(
      told.chosen_BL[..., None], weight_B11 * update_BLD, 0
    )
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)

  def test_evaluation_tells_what_experts_chose(self):
    config = LMConfig(
      vocab_size=8,
      num_layers=2,
      width=8,
      num_heads=1,
      routing=self.CONFIG,
      experts=ExpertsConfig(num_experts=2),
    )
    token_BL = jnp.arange(8).reshape(2, 4)
    model = config.build()

    def run(key):
      return model.apply(model.init(key, token_BL), token_BL)

    assert len(jax.eval_shape(run, jax.random.key(0)).experts) == 2

  def test_evaluation_computes_nothing_for_rows_that_stay_out(
    self, module, params, x_BLD, padded, equations
  ):
    def products(routed):
      """Returns how many there are inside of loops, and outside."""
      run = functools.partial(routed.apply, {'params': params})
      jaxpr = jax.make_jaxpr(run)(x_BLD, padded).jaxpr
      loops = [e for e in equations(jaxpr) if e.primitive.name == 'while']
      inside = sum(
        e.primitive.name == 'dot_general'
        for loop in loops
        for e in equations(loop.params['body_jaxpr'].jaxpr)
      )
      every = [e.primitive.name for e in equations(jaxpr)].count('dot_general')
      return inside, every - inside

    inside, outside = products(module(self.CONFIG, chunk=0))
    assert inside == 0 < outside
    assert products(module(self.CONFIG)) == (outside, 0)

  def test_a_row_of_padding_spoils_no_gradient(
    self, block_config, params, x_BLD, padded
  ):
    info = padded.replace(valid_BL=padded.valid_BL.at[1].set(False))
    layer = LayerConfig(
      block=block_config, routing=self.CONFIG, capacity=CAPACITY
    )
    routed = Layer(layer, Mode(train=True))

    def loss(params):
      done = routed.apply({'params': params}, x_BLD, info)
      extra, _ = plain.routing_losses(
        self.CONFIG, [done.aux['router']], info.valid_BL
      )
      return jnp.sum(done.x_BLD**2) + sums.sum_of_means(extra)

    grads = jax.jit(jax.grad(loss))(params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert grads['router']['kernel'].any()

  def test_all_slots_are_counted(self, block_config):
    layer = LayerConfig(
      block=block_config, routing=self.CONFIG, capacity=CAPACITY
    )
    assert layer.flops(64) == block_config.flops(64) | {'router': 2 * 64 * D}


class TestControls:
  def test_gaussian_scores_follow_the_key(self, module, params, x_BLD, info):
    dense = {k: v for k, v in params.items() if k not in _ROUTING}

    def told(seed):
      rngs = {'routing': jax.random.key(seed)}
      return apply(module(GAUSSIAN), dense, x_BLD, info, rngs=rngs)[1]

    first, again, other = told(0), told(0), told(1)
    np.testing.assert_array_equal(first.score_BL, again.score_BL)
    assert (first.score_BL != other.score_BL).all()
    assert (first.weight_BL == 1).all()
    assert first.chosen_BL.sum(axis=-1).tolist() == [4] * B

  def test_gaussian_needs_its_rng(self, module, params, x_BLD, info):
    dense = {k: v for k, v in params.items() if k not in _ROUTING}
    with pytest.raises(flax_errors.InvalidRngError, match='routing'):
      apply(module(GAUSSIAN), dense, x_BLD, info)

  def test_stride_chooses_alike_by_top_k_and_by_rule(
    self, module, params, x_BLD, info
  ):
    dense = {k: v for k, v in params.items() if k not in _ROUTING}
    config = dataclasses.replace(STRIDE, capacity=0.7)
    chosen = [
      apply(module(config, 0.7, rule=rule), dense, x_BLD, info)[1]
      for rule in ('top_k', 'fixed')
    ]
    np.testing.assert_array_equal(chosen[0].chosen_BL, chosen[1].chosen_BL)
    assert (chosen[0].weight_BL == 1).all()
    assert chosen[0].chosen_BL.sum(axis=-1).tolist() == [7] * B


class TestConfigs:
  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      ({'offset': 2}, 'offset=2.*period=2'),
      ({'gate': 'none'}, "gate='none': .*gradient"),
      (
        {'router_width': 4, 'score': 'stride'},
        "router_width=4, score='stride'",
      ),
      ({'shared_router': True, 'score': Learned()}, 'shared_router=True'),
      ({'combine': 'replace', 'score': 'stride'}, "combine='replace'.*gate"),
      ({'combine': 'weigh_bypass'}, "combine='weigh_bypass', .*gate='sigmoid'"),
      (
        {'capacity_schedule': 'shifted_cosine', 'capacity_decay': 0.5},
        "capacity_decay=0.5, capacity_schedule='shifted_cosine'",
      ),
      (
        {'capacity_schedule': 'shifted_cosine', 'capacity': (0.5, 0.25)},
        r'capacity=\(0.5, 0.25\), .*one way',
      ),
      ({'capacity': (0.5, 1), 'capacity_decay': 0.5}, r'capacity_decay=0\.5'),
      ({'score': Attention()}, r'score=Attention\(.*from later ones'),
      ({'balance_loss': 0.1}, r"balance_loss=0\.1, .*train_rule='router'"),
      (
        {'per_sequence': True, 'balance_loss': 0.1, 'threshold_decay': 0.9},
        r'per_sequence=True, router_loss=0\.01: ',
      ),
      (
        {'per_sequence': True, 'router_loss': 0.0},
        r'per_sequence=True, .*balance_loss=0\.0',
      ),
      ({'train_rule': 'router', 'router_loss': 0.0}, 'balance_loss'),
    ],
  )
  def test_refused(self, change, message):
    with pytest.raises(errors.UserError, match=message):
      MoDConfig(**change)

  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      ({'rule': 'topk'}, "rule.*'topk'"),
      ({'overflow': 'wrap'}, "overflow.*'wrap'"),
      ({'slack': 0.5}, r'slack=0\.5: expected a number of 1 or more'),
      ({'chunk': -1}, 'chunk=-1: expected an integer from 0'),
    ],
  )
  def test_refused_modes(self, change, message):
    with pytest.raises(errors.UserError, match=message):
      RoutingMode(**change)

  @pytest.mark.parametrize(
    ('config', 'rules'),
    [
      ({'router_loss': 0.0}, ()),
      ({}, ('router',)),
      ({'predictor_width': 3, 'router_loss': 0.0}, ('predictor',)),
      ({'threshold_decay': 0.9}, ('router', 'threshold')),
      ({'score': 'stride', 'predictor_width': 3}, ('fixed',)),
      ({'score': 'gaussian'}, ('fixed',)),
      # The one that training chooses by comes first: a model generates by it.
      (
        {'threshold_decay': 0.9, 'train_rule': 'threshold'},
        ('threshold', 'router'),
      ),
      ({'train_rule': rules_lib.Positive()}, ('positive', 'router')),
      (
        {'score': 'stride', 'train_rule': rules_lib.Never()},
        ('never', 'fixed'),
      ),
    ],
  )
  def test_rules_are_those_trained_for(self, config, rules):
    config = MoDConfig(**config)
    assert config.causal_rules == rules
    if config.train_rule != 'top_k':
      mode = LMConfig(routing=config).decoding_mode
      assert mode.rule == config.train_rule

  @pytest.mark.parametrize(
    ('config', 'capacities'),
    [
      ({}, (None, 0.125, None, 0.125, None)),
      ({'offset': 0}, (0.125, None, 0.125, None, 0.125)),
      ({'period': 1, 'offset': 0}, (0.125,) * 5),
      ({'period': 3, 'offset': 2}, (None, None, 0.125, None, None)),
      ({'capacity': (0.5, 0.25)}, (None, 0.5, None, 0.25, None)),
      ({'capacity_floor': 0.75}, (None, 0.75, None, 0.75, None)),
      (
        {'capacity': (0.5, 0.25), 'capacity_floor': 0.3},
        (None, 0.5, None, 0.3, None),
      ),
      # Each block has what stands beside its number.
      (
        {'layers': (3, 1), 'capacity': (0.1, 0.9)},
        (None, 0.9, None, 0.1, None),
      ),
      # A decay runs over depth, however the blocks are named.
      (
        {'layers': (3, 1), 'capacity': 0.5, 'capacity_decay': 0.25},
        (None, 0.8, None, 0.2, None),
      ),
      (
        {'capacity_schedule': 'shifted_cosine', 'period': 1, 'offset': 0},
        (None, None, 0.5, 0.15, 0.15),
      ),
      (
        {'capacity_schedule': 'shifted_cosine', 'layers': (1, 4, 2)},
        (None, None, 0.5, None, 0.15),
      ),
    ],
  )
  def test_capacities(self, config, capacities):
    got = MoDConfig(**config).capacities(5)
    assert [c is None for c in got] == [c is None for c in capacities]
    assert [c for c in got if c] == pytest.approx([c for c in capacities if c])

  def test_a_block_is_named_once(self):
    with pytest.raises(
      errors.UserError, match=r'\(1, 3, 1\): expected different'
    ):
      MoDConfig(layers=(1, 3, 1)).capacities(5)

  def test_a_schedule_that_leaves_no_block_routed(self):
    config = MoDConfig(capacity_schedule='shifted_cosine', layers=(0, 1))
    with pytest.raises(
      errors.UserError, match='num_layers=5: .*not leave dense'
    ):
      config.capacities(5)

  def test_flops_count_the_chosen_only(self, block_config):
    config = MoDConfig(predictor_width=4)
    layer = LayerConfig(block=block_config, routing=config, capacity=0.125)
    assert layer.tokens(64) == 8
    assert layer.flops(64) == block_config.flops(8) | {
      'router': 2 * 64 * D,
      'predictor': 2 * 64 * (D * 4 + 4),
    }
    two = dataclasses.replace(config, router_width=3)
    two = dataclasses.replace(layer, routing=two)
    assert two.flops(64)['router'] == 2 * 64 * (D * 3 + 3)
    fixed = dataclasses.replace(layer, routing=STRIDE)
    assert 'router' not in fixed.flops(64)
    assert LayerConfig(block=block_config).flops(64) == block_config.flops(64)


def test_never_passes_every_token_by(module, params, x_BLD, info):
  out_BLD, told = apply(module(rule='never'), params, x_BLD, info)
  np.testing.assert_array_equal(out_BLD, x_BLD)
  assert not told.chosen_BL.any()
  # What it is compared with.
  assert told.top_k_BL.sum() == B * int(CAPACITY * L)


class TestMovingThreshold:
  """The moving average of the k-th best score is a variable of the layer."""

  def test_moves_where_it_is_mutable_and_is_used_as_it_was(
    self, module, params, x_BLD, info
  ):
    routed = module(rule='threshold')

    @jax.jit
    def step(variables):
      return routed.apply(variables, x_BLD, info, mutable=['moving'])

    done, changed = step(given(params))
    told = done.aux['router']
    # This call still chose by the average before it.
    np.testing.assert_array_equal(told.chosen_BL, told.score_BL >= THRESHOLD)
    before = given(params)['moving']['threshold']
    after = changed['moving']['threshold']
    want = before.update(told.kth_B.mean(), LEARNED.threshold_decay)
    np.testing.assert_allclose(after.total, want.total, rtol=1e-6)
    np.testing.assert_allclose(after.weight, want.weight, rtol=1e-6)
    assert after.value() != THRESHOLD

  def test_starts_from_nothing_and_only_where_it_is_asked_for(
    self, module, x_BLD, info
  ):
    key = jax.random.key(0)
    moving = module().init(key, x_BLD, info)['moving']
    assert moving['threshold'].total == moving['threshold'].weight == 0
    assert moving['threshold'].value() == jnp.inf
    without = module(dataclasses.replace(LEARNED, threshold_decay=0.0))
    assert 'moving' not in jax.eval_shape(without.init, key, x_BLD, info)

  def test_its_rule_needs_it(self, module, params, x_BLD, info):
    with pytest.raises(errors.UserError, match="'moving' collection"):
      module(rule='threshold').apply({'params': params}, x_BLD, info)
