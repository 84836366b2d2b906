"""The routed layer: score, select, process, combine."""

import dataclasses
import functools
import re

import blocks
from blocks import BLOCK
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import losses, routing
from mod_jax.layers import rules as rules_lib
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig, Predictor
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.scores import Router
from mod_jax.layers.token_info import KINDS, TokenInfo
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

X_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
INFO = blocks.info(B, L)
# Left padding, right padding, and a hole between prompt and continuation.
HOLES = ['0001111111', '1111100000', '1110011111']
VALID_BL = np.array([list(row) for row in HOLES]) == '1'
POSITION_BL = jnp.array(np.maximum(np.cumsum(VALID_BL, axis=-1) - 1, 0))
PADDED = TokenInfo(POSITION_BL, jnp.array(VALID_BL))


def config_of(rule):
  return STRIDE if rule == 'fixed' else LEARNED


def given(params, threshold=THRESHOLD):
  """Returns variables whose moving average is the threshold."""
  moving = routing.MovingThreshold(threshold, jnp.ones(()))
  return {'params': params, 'moving': {'threshold': moving}}


def module(config=LEARNED, capacity=CAPACITY, **mode):
  layer = LayerConfig(block=BLOCK, routing=config, capacity=capacity)
  return Layer(layer, Mode(routing=RoutingMode(**mode)))


PARAMS = tiny.drawn(
  nn.unbox(jax.eval_shape(module().init, jax.random.key(0), X_BLD, INFO))
)['params']
SCORE_BL = np.asarray(X_BLD @ PARAMS['router']['kernel'])


@functools.partial(jax.jit, static_argnums=0)
def apply(module, x_BLD, info, params):
  done = module.apply(given(params), x_BLD, info)
  return done.x_BLD, done.aux['router']


def run(*args, info=INFO, x_BLD=X_BLD, params=PARAMS, **kwargs):
  """Returns the features after the layer, and what was routed."""
  return apply(module(*args, **kwargs), x_BLD, info, params)


def oracle(x_BLD, info, chosen_BL, weight_BL):
  """Processes all tokens, and hides those that are not chosen."""
  update_BLD = blocks.update(
    *(PARAMS, BLOCK, x_BLD, info.position_BL, chosen_BL),
    info.segment_BL,
  )
  weight_BL = np.where(chosen_BL, weight_BL, 0)
  return x_BLD + weight_BL[..., None] * update_BLD


class TestProcess:
  """Gathering the chosen ≡ processing all and hiding the others."""

  @pytest.mark.parametrize('rule', ['top_k', 'router', 'fixed'])
  def test_equals_the_dense_masked_oracle(self, rule):
    y_BLD, told = run(config_of(rule), rule=rule)
    chosen_BL = np.asarray(told.chosen_BL)
    assert chosen_BL.any()
    assert not chosen_BL.all()
    weight_BL = SCORE_BL if rule != 'fixed' else 1
    expected = oracle(X_BLD, INFO, chosen_BL, weight_BL)
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)
    np.testing.assert_array_equal(y_BLD[~chosen_BL], X_BLD[~chosen_BL])

  def test_with_padding_and_segments(self):
    segment_BL = np.where(np.arange(L) < 6, 1, 2) * np.ones((B, 1), int)
    info = PADDED.replace(segment_BL=jnp.array(segment_BL))
    y_BLD, told = run(info=info)
    expected = oracle(X_BLD, info, told.chosen_BL, SCORE_BL)
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)

  @pytest.mark.parametrize('part', ['attention', 'mlp'])
  def test_half_a_block_is_routed(self, part):
    """Each half by the oracle of a block whose other half adds nothing."""

    def half(other, name, x_BLD, seen_BL):
      idle = {name: {'kernel': 0 * PARAMS[other][name]['kernel']}}
      return blocks.update(
        *(PARAMS | {other: PARAMS[other] | idle}, BLOCK, x_BLD),
        *(PADDED.position_BL, seen_BL),
      )

    y_BLD, told = run(dataclasses.replace(LEARNED, part=part), info=PADDED)
    chosen_BL = np.asarray(told.chosen_BL)
    assert chosen_BL.any(axis=-1).all()
    weight_BL1 = np.where(chosen_BL, told.weight_BL, 0)[..., None]
    first, second, seen_BL = 1, weight_BL1, VALID_BL
    if part == 'attention':
      first, second, seen_BL = weight_BL1, 1, chosen_BL
    middle_BLD = X_BLD + first * half('mlp', 'down', X_BLD, seen_BL)
    update_BLD = half('attention', 'out', middle_BLD, VALID_BL)
    want_BLD = middle_BLD + second * update_BLD
    scored_BLD = X_BLD if part == 'attention' else middle_BLD
    score_BL = scored_BLD @ np.asarray(PARAMS['router']['kernel'])
    np.testing.assert_allclose(
      told.score_BL[VALID_BL], score_BL[VALID_BL], atol=1e-4
    )
    np.testing.assert_allclose(y_BLD[VALID_BL], want_BLD[VALID_BL], atol=1e-4)

  @pytest.mark.parametrize('gate', ['sigmoid', 'alpha_tanh'])
  def test_the_gate_weighs_the_update(self, gate):
    config = dataclasses.replace(LEARNED, gate=gate, gate_alpha=3.0)
    y_BLD, told = run(config)
    np.testing.assert_allclose(told.score_BL, SCORE_BL, atol=1e-5)
    weight_BL = routing.gate(gate, SCORE_BL, 3.0)
    np.testing.assert_allclose(told.weight_BL, weight_BL, atol=1e-5)
    expected = oracle(X_BLD, INFO, told.chosen_BL, weight_BL)
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)


class TestSelection:
  def test_a_padded_row_chooses_as_many_as_it_would_alone(self):
    _, told = run(info=PADDED)
    assert not told.chosen_BL[~VALID_BL].any()
    counts = [2, 2, 3]
    lengths_B = VALID_BL.sum(axis=-1).tolist()
    assert [routing.num_chosen(CAPACITY, n) for n in lengths_B] == counts
    assert told.chosen_BL.sum(axis=-1).tolist() == counts
    score_BL = np.where(told.chosen_BL, told.score_BL, np.inf)
    np.testing.assert_array_equal(told.kth_B, score_BL.min(axis=-1))

  def test_rules_decide_by_what_they_were_trained_for(self):
    chosen = {}
    for rule in RULES:
      _, told = run(config_of(rule), rule=rule)
      chosen[rule] = np.asarray(told.chosen_BL)
      assert told.overflow_B.tolist() == [0] * B
      if rule != 'fixed':
        score_BL, logit_BL = told.score_BL, told.predictor_BL
    np.testing.assert_array_equal(chosen['router'], score_BL > 0)
    np.testing.assert_array_equal(chosen['predictor'], logit_BL > 0)
    np.testing.assert_array_equal(chosen['threshold'], score_BL >= THRESHOLD)
    assert np.flatnonzero(chosen['fixed'][0]).tolist() == [0, 3, 5, 8]
    assert len({x.tobytes() for x in chosen.values()}) == 4

  def test_drop_passes_by_the_latest_and_counts_them(self):
    wanted_BL = SCORE_BL > 0
    y_BLD, told = run(rule='router', overflow='drop', slack=1.0)
    kept_BL = wanted_BL & (np.cumsum(wanted_BL, axis=-1) <= 4)
    assert (kept_BL != wanted_BL).any()
    np.testing.assert_array_equal(told.chosen_BL, kept_BL)
    np.testing.assert_array_equal(
      told.overflow_B, (wanted_BL & ~kept_BL).sum(axis=-1)
    )
    np.testing.assert_array_equal(y_BLD[~kept_BL], X_BLD[~kept_BL])
    assert (y_BLD[kept_BL] != X_BLD[kept_BL]).any(axis=-1).all()


@pytest.mark.parametrize(
  ('mode', 'slots'),
  [
    ({'rule': 'top_k'}, 12),
    ({'rule': 'router'}, 100),
    ({'rule': 'router', 'overflow': 'drop'}, 16),
    ({'rule': 'router', 'overflow': 'drop', 'slack': 50.0}, 100),
  ],
)
def test_slots(mode, slots):
  assert RoutingMode(**mode).num_slots(0.125, 100) == slots


class TestGradients:
  @pytest.mark.parametrize('gate', ['raw', 'sigmoid'])
  def test_the_router_learns_through_the_gate_of_the_chosen(self, gate):
    config = dataclasses.replace(LEARNED, gate=gate)
    weight_BLD = np.random.default_rng(0).normal(size=(B, L, D))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def loss(kernel_D):
      changed = PARAMS | {'router': {'kernel': kernel_D}}
      done = module(config).apply({'params': changed}, X_BLD, INFO)
      return jnp.sum(weight_BLD * done.x_BLD), done.aux['router']

    kernel_D = PARAMS['router']['kernel']
    grad_D, told = loss(kernel_D)
    chosen_BL = np.asarray(told.chosen_BL)
    update_BLD = oracle(X_BLD, INFO, chosen_BL, 1) - X_BLD
    # d loss / d r of a chosen token is <weight, f(x)>; of others nothing.
    score_BL = np.asarray(told.score_BL, np.float64)
    slope_BL = np.ones((B, L))
    if gate == 'sigmoid':
      slope_BL = np.exp(-score_BL) / (1 + np.exp(-score_BL)) ** 2
    by_score_BL = chosen_BL * slope_BL * (weight_BLD * update_BLD).sum(-1)
    expected = np.einsum('bl,bld->d', by_score_BL, np.asarray(X_BLD))
    np.testing.assert_allclose(grad_D, expected, atol=1e-4, rtol=1e-4)

  def test_an_unchosen_token_passes_its_gradient_unchanged(self):
    weight_BLD = jax.random.normal(jax.random.key(5), (B, L, D))

    def loss(x_BLD):
      done = module().apply({'params': PARAMS}, x_BLD, PADDED)
      return jnp.sum(weight_BLD * done.x_BLD), done.aux['router']

    grad_BLD, told = jax.jit(jax.grad(loss, has_aux=True))(X_BLD)
    chosen_BL = np.asarray(told.chosen_BL)
    np.testing.assert_array_equal(grad_BLD[~chosen_BL], weight_BLD[~chosen_BL])
    changed = (grad_BLD[chosen_BL] != weight_BLD[chosen_BL]).any(axis=-1)
    assert changed.all()


class TestRouter:
  def test_starts_as_a_narrow_normal_without_a_bias(self):
    assert MoDConfig().router_std == 0.02
    variables = Router(0.02).init(jax.random.key(0), jnp.ones((1, 20_000)))
    params = nn.unbox(variables)['params']
    assert set(params) == {'kernel'}
    assert params['kernel'].shape == (20_000,)
    assert params['kernel'].std() == pytest.approx(0.02, rel=0.03)
    assert abs(params['kernel'].mean()) < 1e-3
    # Not cut off, as a truncated normal would be.
    assert abs(params['kernel']).max() > 0.06

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


@pytest.mark.parametrize(
  ('scorer', 'products'), [(Router(0.02, hidden=4), 1), (Predictor(4), 2)]
)
def test_an_accelerator_must_not_round(scorer, products):
  x_BLD = jnp.ones((2, 3, D), jnp.bfloat16)
  params = jax.eval_shape(scorer.init, jax.random.key(0), x_BLD)
  text = jax.jit(scorer.apply).lower(params, x_BLD).as_text()
  found = re.findall(r'dot_general.*precision = \[(\w+), (\w+)\]', text)
  assert found == [('HIGHEST', 'HIGHEST')] * products


class TestCombine:
  """The other forms in which a block's result meets the residual stream."""

  @pytest.mark.parametrize('combine', ['weigh_bypass', 'replace'])
  def test_equals_the_oracle(self, combine):
    config = MoDConfig(capacity=CAPACITY, gate='sigmoid', combine=combine)
    y_BLD, told = run(config, info=PADDED)
    chosen_BL = np.asarray(told.chosen_BL)
    expected = oracle(X_BLD, PADDED, chosen_BL, told.weight_BL)
    # What the weight also falls on, other than the update.
    if combine == 'weigh_bypass':
      factor_BL = np.where(chosen_BL, 0, -told.weight_BL)
    else:
      factor_BL = np.where(chosen_BL, told.weight_BL - 1, 0)
    expected += factor_BL[..., None] * X_BLD
    np.testing.assert_allclose(y_BLD[VALID_BL], expected[VALID_BL], atol=1e-4)

  def test_a_token_that_is_no_candidate_is_not_weighed_away(self):
    config = MoDConfig(
      kinds=('image',),
      gate='sigmoid',
      combine='weigh_bypass',
      router_loss=0.0,
    )
    model = LMConfig(num_layers=2, width=8, num_heads=2, routing=config)
    layer = Layer(model.stack.layers[1])
    # Room is kept for more images than there are, and so too little for text.
    info = TokenInfo(
      jnp.arange(6)[None],
      kind_BL=jnp.full((1, 6), KINDS.index('text')),
      image_places=8,
    )
    x_BLD = jnp.ones((1, 6, 8))
    y_BLD, _ = layer.init_with_output(jax.random.key(0), x_BLD, info)
    assert y_BLD.aux['router'].overflow_B > 0
    assert (np.abs(y_BLD.x_BLD).sum(axis=-1) > 0).all()


class TestTokenChoice:
  def test_metrics_say_what_wanted_in_and_what_was_dropped(self):
    config = MoDConfig(train_rule='router', balance_loss=0.1, router_loss=0.0)
    mode = {'rule': 'router', 'overflow': 'drop', 'slack': 1.0}
    _, told = run(config, 0.2, **mode, info=PADDED)
    assert told.overflow_B.sum() > 0
    (_, (total, count)), found = plain.routing_losses(
      config, [told], PADDED.valid_BL
    )
    loss = total / count
    wanted_BL = (np.asarray(told.score_BL) > 0) & VALID_BL
    assert found['router/wanted'] == (wanted_BL.sum(), VALID_BL.sum())
    assert found['router/dropped'] == (told.overflow_B.sum(), VALID_BL.sum())
    total, count = losses.path_balance(told.score_BL, 0.2, PADDED.valid_BL)
    np.testing.assert_allclose(loss, 0.1 * total / count, rtol=1e-5)


@pytest.mark.parametrize('kind', ['tokens', 'sequences', 'untrained', 'never'])
def test_at_capacity_1_low_scores_skip_nothing(kind):
  """A warm-up begins so, and a model that was just routed is its dense twin."""
  tokens = MoDConfig(train_rule='router', balance_loss=0.1, router_loss=0.0)
  config, mode = {
    'tokens': (tokens, Mode(train=True, routing=tokens.train_mode)),
    'sequences': (TestPerSequence.CONFIG, Mode(train=True)),
    'untrained': (MoDConfig(), Mode(routing=RoutingMode(rule='router'))),
    'never': (MoDConfig(), Mode(routing=RoutingMode(rule='never'))),
  }[kind]
  layer = LayerConfig(block=BLOCK, routing=config, capacity=1.0)
  x_BLD = jnp.broadcast_to(-PARAMS['router']['kernel'], (B, L, D))
  _, told = apply(Layer(layer, mode), x_BLD, PADDED, PARAMS)
  assert (np.asarray(told.score_BL) < 0).all()
  expected_BL = VALID_BL & (kind != 'never')
  np.testing.assert_array_equal(told.chosen_BL, expected_BL)


class TestPerSequence:
  CONFIG = MoDConfig(
    capacity=CAPACITY,
    per_sequence=True,
    balance_loss=0.1,
    router_loss=0.0,
    gate='sigmoid',
  )

  def test_a_router_of_nan_is_not_passed_by(self):
    kernel_D = PARAMS['router']['kernel'] * np.nan
    broken = PARAMS | {'router': {'kernel': kernel_D}}
    _, told = run(self.CONFIG, params=broken, info=PADDED)
    np.testing.assert_array_equal(told.chosen_BL, VALID_BL)

  def test_a_sequence_enters_where_its_mean_score_is_above_zero(self):
    # Of real tokens alone: with the padding, all rows would stay out.
    kernel_D = PARAMS['router']['kernel']
    one_D = kernel_D / jnp.sum(kernel_D**2)  # It adds 1 to a score.
    sign_B11 = jnp.array([1.0, -1.0, 1.0])[:, None, None]
    near_BLD = X_BLD + 2 * sign_B11 * one_D
    x_BLD = jnp.where(VALID_BL[..., None], near_BLD, -50 * one_D)
    # In a loop over the rows that enter, and by hiding the others.
    y_BLD, told = run(self.CONFIG, info=PADDED, x_BLD=x_BLD)
    hidden_BLD, _ = run(self.CONFIG, chunk=0, info=PADDED, x_BLD=x_BLD)
    np.testing.assert_allclose(y_BLD, hidden_BLD, atol=1e-5)
    score_BL = np.asarray(x_BLD @ kernel_D)
    assert (score_BL.mean(axis=-1) < 0).all()
    mean_B1 = score_BL.mean(axis=-1, keepdims=True, where=VALID_BL)
    np.testing.assert_allclose(told.score_BL, mean_B1 + 0 * score_BL, atol=1e-4)
    enters_B1 = mean_B1 > 0
    assert enters_B1.ravel().tolist() == [True, False, True]
    np.testing.assert_array_equal(told.chosen_BL, enters_B1 & VALID_BL)
    weight_B1 = np.where(enters_B1, 1 / (1 + np.exp(-mean_B1)), 0)
    expected = oracle(x_BLD, PADDED, VALID_BL, weight_B1)
    np.testing.assert_allclose(y_BLD, expected, atol=1e-4)

  def test_evaluation_tells_what_experts_chose(self):
    config = dataclasses.replace(
      tiny.LM, routing=self.CONFIG, experts=ExpertsConfig(num_experts=2)
    )
    run = config.build().apply
    output = jax.eval_shape(run, tiny.shapes(config), tiny.tokens())
    assert len(output.experts) == 2

  def test_evaluation_computes_nothing_for_rows_that_stay_out(self, equations):
    def products(routed):
      """Returns how many there are inside of loops, and outside."""
      run = functools.partial(routed.apply, {'params': PARAMS})
      jaxpr = jax.make_jaxpr(run)(X_BLD, PADDED).jaxpr
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

  def test_the_balance_is_of_sequences_however_long_they_are(self):
    valid_BL = PADDED.valid_BL.at[1].set(False)
    _, told = run(self.CONFIG, info=PADDED.replace(valid_BL=valid_BL))
    ((total, count),), found = plain.routing_losses(
      self.CONFIG, [told], valid_BL
    )
    real_BL = told.score_BL[::2, :1]
    expected, _ = losses.path_balance(real_BL, CAPACITY)
    assert count == 2
    np.testing.assert_allclose(total, 0.1 * expected, rtol=1e-5)
    assert found['router/wanted'] == ((real_BL > 0).sum(), 2)

  def test_a_row_of_padding_spoils_no_gradient(self):
    info = PADDED.replace(valid_BL=PADDED.valid_BL.at[1].set(False))
    train = module(self.CONFIG).clone(mode=Mode(train=True))

    def loss(params):
      done = train.apply({'params': params}, X_BLD, info)
      extra, _ = plain.routing_losses(
        self.CONFIG, [done.aux['router']], info.valid_BL
      )
      return jnp.sum(done.x_BLD**2) + sums.sum_of_means(extra)

    grads = jax.jit(jax.grad(loss))(PARAMS)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert grads['router']['kernel'].any()


class TestConfigs:
  @pytest.mark.parametrize(
    ('config', 'rules'),
    [
      ({'router_loss': 0.0}, ()),
      ({}, ('router',)),
      ({'predictor_width': 3, 'router_loss': 0.0}, ('predictor',)),
      ({'threshold_decay': 0.9}, ('threshold', 'router')),
      ({'score': 'stride', 'predictor_width': 3}, ('fixed',)),
      ({'score': 'gaussian'}, ('fixed',)),
      # The one that training chooses by comes first.
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
    if rules:  # A model generates by the first.
      rule = LMConfig(routing=config).decoding_mode.rule
      assert getattr(rule, 'name', rule) == rules[0]

  @pytest.mark.parametrize(
    ('config', 'capacities'),
    [
      ({}, (None, 0.125, None, 0.125, None)),
      ({'period': 1, 'offset': 0}, (0.125,) * 5),
      ({'period': 3, 'offset': 2}, (None, None, 0.125, None, None)),
      ({'capacity': (0.5, 0.25)}, (None, 0.5, None, 0.25, None)),
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

  def test_flops_count_all_slots_and_a_router_that_learns(self):
    layer = LayerConfig(
      block=BLOCK, routing=MoDConfig(router_width=3), capacity=0.125
    )
    assert layer.flops(64)['router'] == 2 * 64 * (D * 3 + 3)
    tokens = MoDConfig(
      train_rule='router', balance_loss=0.1, router_loss=0.0, train_slack=1.5
    )
    for routed, count in ((tokens, 12), (TestPerSequence.CONFIG, 64)):
      assert dataclasses.replace(layer, routing=routed).tokens(64) == count
    for control in (STRIDE, GAUSSIAN):
      control = dataclasses.replace(control, predictor_width=4)
      fixed = dataclasses.replace(layer, routing=control)
      assert fixed.flops(64) == BLOCK.flops(8)


class TestMovingThreshold:
  """The moving average of the k-th best score is a variable of the layer."""

  def test_moves_where_it_is_mutable_and_is_used_as_it_was(self):
    step = functools.partial(module(rule='threshold').apply, mutable=['moving'])
    done, changed = jax.jit(step)(given(PARAMS), X_BLD, INFO)
    told = done.aux['router']
    # This call still chose by the average before it.
    np.testing.assert_array_equal(told.chosen_BL, told.score_BL >= THRESHOLD)
    before = given(PARAMS)['moving']['threshold']
    after = changed['moving']['threshold']
    want = before.update(told.kth_B.mean(), LEARNED.threshold_decay)
    np.testing.assert_allclose(after.total, want.total, rtol=1e-6)
    np.testing.assert_allclose(after.weight, want.weight, rtol=1e-6)
    assert after.value() != THRESHOLD
