"""Experts, against a loop over tokens and choices."""

import collections
import dataclasses
import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mod_jax import losses, parallel, routing
from mod_jax.layers.experts import ExpertMLP, ExpertMLPConfig, ExpertsConfig
from mod_jax.layers.mlp import MLP, MLPConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.token_info import TokenInfo

B, L, D, F = 3, 9, 6, 10
SWIGLU = MLPConfig(width=D, hidden=F)
BIASED = MLPConfig(width=D, hidden=F, kind='gelu', bias=True)
TRAIN = Mode(train=True)
CAUSAL = Mode(routing=RoutingMode(rule='threshold'))
VALID_BL = np.arange(L) < np.array([[9], [5], [1]])


def features(seed=0, batch=B):
  return jax.random.normal(jax.random.key(seed), (batch, L, D))


def info_of(valid_BL=None, batch=B):
  position_BL = jnp.broadcast_to(jnp.arange(L), (batch, L))
  return TokenInfo(position_BL, valid_BL)


@functools.cache
def variables_of(config):
  """Returns variables whose choices are no ties and whose biases are not 0."""
  module = ExpertMLP(config)
  init = jax.jit(module.init)
  variables = nn.unbox(init(jax.random.key(1), features(), info_of()))

  def change(path, x):
    name = jax.tree_util.keystr(path)
    if 'router' in name:
      return 40 * x
    if 'bias' in name:
      return jax.random.normal(jax.random.key(2), x.shape)
    return x

  params = jax.tree_util.tree_map_with_path(change, variables['params'])
  return {**variables, 'params': params}


def config_of(mlp=SWIGLU, **fields):
  return ExpertMLPConfig(mlp=mlp, experts=ExpertsConfig(**fields))


@functools.partial(jax.jit, static_argnums=(0, 1))
def apply(config, mode, variables, x_BLD, info):
  return ExpertMLP(config, mode).apply(variables, x_BLD, info)


def expert_of(config, params, expert):
  """Returns one expert as a function of features: a plain MLP's."""
  own = jax.tree.map(lambda x: x[expert], params)
  own.pop('router')
  return lambda x: MLP(config.mlp).apply({'params': own}, x)


@functools.partial(jax.jit, static_argnums=0)
def outputs_of(config, params, x_BLD):
  numbers = range(config.experts.num_experts)
  return [expert_of(config, dict(params), e)(x_BLD) for e in numbers]


def by_hand(config, params, x_BLD, valid_BL, slots):
  """Returns y_BLD, and the choices that ran and were dropped, in loops.

  `slots` gives those of each expert for a number of tokens; None for no limit.
  """
  experts = config.experts
  outputs_EBLD = np.asarray(outputs_of(config, params, x_BLD))
  logits_BLX = np.float64(x_BLD) @ np.float64(params['router']['kernel'])
  p_BLX = scipy.special.softmax(logits_BLX, axis=-1)
  y_BLD = np.zeros(x_BLD.shape)
  ran, dropped = set(), set()
  for b, valid_L in enumerate(valid_BL):
    most = math.inf if slots is None else slots(int(valid_L.sum()))
    wanted = []
    if experts.choice == 'token':
      for t in np.flatnonzero(valid_L):
        best = np.argsort(-p_BLX[b, t], kind='stable')[: experts.per_token]
        whole = 1.0
        if experts.per_token > 1 and not experts.num_nulls:
          whole = p_BLX[b, t, best].sum()
        wanted += [(t, e, p_BLX[b, t, e] / whole) for e in best]
    else:
      for e in range(experts.num_experts):
        score_L = np.where(valid_L, p_BLX[b, :, e], -1)
        best = np.argsort(-score_L, kind='stable')[:most]
        wanted += [(t, e, p_BLX[b, t, e]) for t in best]
    taken = collections.Counter()
    for t, e, weight in wanted:
      if e >= experts.num_experts:
        continue
      if taken[e] >= most:
        dropped.add((b, t, e))
        continue
      taken[e] += 1
      ran.add((b, t, e))
      y_BLD[b, t] += weight * outputs_EBLD[e, b, t]
  return y_BLD, ran, dropped


def check(config, mode, valid_BL, slots, seed=0):
  variables = variables_of(config)
  x_BLD = features(seed)
  info = info_of(None if valid_BL is None else jnp.array(valid_BL))
  y_BLD, assigned = apply(config, mode, variables, x_BLD, info)
  valid_BL = np.ones((B, L), bool) if valid_BL is None else valid_BL
  want_BLD, ran, dropped = by_hand(
    config, variables['params'], x_BLD, valid_BL, slots
  )
  np.testing.assert_allclose(y_BLD, want_BLD, atol=2e-5)
  assert set(map(tuple, np.argwhere(assigned.ran_BLE))) == ran
  load = losses.experts.load(assigned.wanted_BLX, assigned.ran_BLE)
  assert load['dropped'] == (len(dropped), len(dropped) + len(ran))
  return dropped


CASES = {
  'one choice': config_of(num_experts=4, capacity_factor=0.8),
  'two choices': config_of(num_experts=3, per_token=2, capacity_factor=0.9),
  'no-ops': config_of(
    num_experts=3, num_nulls=1, compute_share=0.5, capacity_factor=1.0
  ),
  'two choices, no-ops, biases': config_of(
    BIASED, num_experts=3, per_token=2, num_nulls=2, capacity_factor=0.7
  ),
  'experts choose': config_of(
    num_experts=3, choice='expert', capacity_factor=1.5
  ),
  'experts choose, no-ops': config_of(
    BIASED, num_experts=3, choice='expert', num_nulls=1, capacity_factor=1.5
  ),
}


class TestForward:
  @pytest.mark.parametrize(
    ('name', 'padded'), [('one choice', False), *((x, True) for x in CASES)]
  )
  def test_is_the_loop_over_tokens(self, name, padded):
    config, valid_BL = CASES[name], VALID_BL if padded else None
    slots = config.experts.slots_per_expert
    dropped = check(config, TRAIN, valid_BL, slots)
    assert bool(dropped) == (config.experts.choice == 'token')
    if config.experts.choice == 'token':  # After training nothing is dropped.
      check(config, Mode(), valid_BL, None)

  @pytest.mark.parametrize('name', ['one choice', 'experts choose'])
  def test_masked_tokens_of_a_pruned_model_are_as_padding(self, name):
    config, x_BLD = CASES[name], features(3)
    valid_BL = jnp.array(VALID_BL)
    padded, masked = (
      apply(config, TRAIN, variables_of(config), x_BLD, info)[0]
      for info in (
        info_of(valid_BL),
        info_of().dropped(valid_BL.astype(jnp.float32)),
      )
    )
    assert not padded[~VALID_BL].any()
    np.testing.assert_allclose(masked, padded, atol=1e-6)


class TestGradients:
  @pytest.mark.parametrize(
    ('name', 'mode'),
    [
      ('one choice', TRAIN),
      ('two choices', TRAIN),
      ('two choices, no-ops, biases', TRAIN),
      ('experts choose, no-ops', TRAIN),
      # Experts that choose do as in training.
      ('no-ops', Mode()),
      ('two choices, no-ops, biases', Mode()),
    ],
    ids=lambda x: x if isinstance(x, str) else ('slots' if x.train else 'all'),
  )
  def test_are_those_of_masked_products(self, name, mode):
    config = CASES[name]
    variables, x_BLD = variables_of(config), features()
    _, assigned = apply(config, mode, variables, x_BLD, info_of())
    along_BLD = features(7)

    def loss(params, x_BLD):
      y_BLD, _ = apply(config, mode, {'params': params}, x_BLD, info_of())
      return (y_BLD * along_BLD).sum()

    def masked(params, x_BLD):
      p_BLX = jax.nn.softmax(x_BLD @ params['router']['kernel'])
      if config.experts.per_token > 1 and not config.experts.num_nulls:
        chosen_BLX = jnp.where(assigned.wanted_BLX, p_BLX, 0)
        p_BLX /= chosen_BLX.sum(axis=-1, keepdims=True)
      total = 0.0
      for e in range(config.experts.num_experts):
        y_BLD = expert_of(config, dict(params), e)(x_BLD)
        weight_BL = jnp.where(assigned.ran_BLE[..., e], p_BLX[..., e], 0)
        total += (weight_BL[..., None] * y_BLD * along_BLD).sum()
      return total

    got, want = (
      jax.jit(jax.grad(f, (0, 1)))(variables['params'], x_BLD)
      for f in (loss, masked)
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), got, want
    )
    # A softmax over the chosen alone would leave the router of one choice
    # without a gradient.
    assert abs(got[0]['router']['kernel']).max() > 1e-3


class TestThreshold:
  CONFIG = config_of(
    num_experts=3, choice='expert', capacity_factor=1.5, threshold_decay=0.5
  )

  def test_is_the_mean_of_the_least_chosen(self):
    variables, x_BLD = variables_of(self.CONFIG), features()
    info = info_of(jnp.array(VALID_BL))
    train = ExpertMLP(self.CONFIG, TRAIN).apply
    (_, assigned), state = jax.jit(train, static_argnames='mutable')(
      variables, x_BLD, info, mutable='moving'
    )
    p_BLE = np.asarray(jax.nn.softmax(assigned.logits_BLX))
    ran_BLE = np.asarray(assigned.ran_BLE)
    want_E = np.where(ran_BLE, p_BLE, np.inf).min(axis=1).mean(axis=0)
    got_E = state['moving']['threshold'].value()
    np.testing.assert_allclose(got_E, want_E, rtol=1e-5)
    variables = {**variables, **state}
    _, assigned = apply(self.CONFIG, CAUSAL, variables, x_BLD, info)
    want_BLE = (p_BLE >= want_E) & VALID_BL[..., None]
    np.testing.assert_array_equal(assigned.ran_BLE, want_BLE)
    assert want_BLE.any()
    assert not want_BLE[VALID_BL].all()


class TestCausality:
  """A later token changes nothing before it, where that is claimed."""

  def prefix_changes(self, config, mode, variables=None):
    variables = variables or variables_of(config)
    x_BLD = features(5)
    other_BLD = x_BLD.at[:, 6:].set(features(6)[:, 6:])
    info = info_of()
    y_BLD, z_BLD = (
      apply(config, mode, variables, x, info)[0] for x in (x_BLD, other_BLD)
    )
    assert not np.array_equal(y_BLD[:, 6:], z_BLD[:, 6:])
    return not np.allclose(y_BLD[:, :6], z_BLD[:, :6], atol=1e-6)

  @pytest.mark.parametrize(
    'name',
    ['one choice', 'two choices', 'no-ops', 'two choices, no-ops, biases'],
  )
  def test_where_tokens_choose(self, name):
    # Slots are given out by position: were first choices served before second
    # ones, a later token could take the slot of an earlier one.
    assert not self.prefix_changes(CASES[name], TRAIN)
    assert not self.prefix_changes(CASES[name], Mode())

  def test_where_experts_choose(self):
    config = TestThreshold.CONFIG
    variables = variables_of(config)
    moving = routing.MovingThreshold.zeros((3,)).update(jnp.full(3, 0.4), 0.5)
    variables = {**variables, 'moving': {'threshold': moving}}
    assert self.prefix_changes(config, Mode(), variables)
    assert not self.prefix_changes(config, CAUSAL, variables)


class TestLosses:
  @pytest.mark.parametrize(
    ('logits', 'chosen', 'parts', 'want'),
    [
      ([0, 0, 0, 0], [[0], [1], [2], [3]], [1 / 4] * 4, 1),
      ([99, 0, 0, 0], [[0], [0], [0], [0]], [1 / 4] * 4, 4),
      # With two choices each, balance is 1 as well.
      ([0, 0, 0, 0], [[0, 1], [1, 2], [2, 3], [3, 0]], [1 / 4] * 4, 1),
      # Unequal parts: a no-op that should get half of the choices, and does.
      (
        np.log([1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        *([[0], [1], [2], [3], [3], [3]], [1 / 6, 1 / 6, 1 / 6, 1 / 2], 1),
      ),
    ],
  )
  def test_balance(self, logits, chosen, parts, want):
    wanted_LX = jax.nn.one_hot(jnp.array(chosen), 4).any(axis=1)
    wanted_BLX = jnp.stack([wanted_LX] * 2)
    got = losses.experts.balance_loss(
      *(jnp.broadcast_to(jnp.float32(logits), wanted_BLX.shape), wanted_BLX),
      *(jnp.ones(wanted_BLX.shape[:2], bool), tuple(parts)),
    )
    assert got == pytest.approx(want)

  def test_padding_counts_for_nothing(self):
    logits_BLX = jax.random.normal(jax.random.key(0), (1, 8, 4))
    wanted_BLX = jax.nn.one_hot(logits_BLX.argmax(-1), 4, dtype=bool)
    valid_BL = jnp.arange(8)[None] < 5
    every = logits_BLX, wanted_BLX & valid_BL[..., None], valid_BL
    got, want = (
      losses.experts.balance_loss(*x, (0.25,) * 4)
      for x in (every, [x[:, :5] for x in every])
    )
    assert got == pytest.approx(float(want), rel=1e-6)
    total, count = losses.experts.z_loss(logits_BLX, valid_BL)
    square_L = jax.nn.logsumexp(logits_BLX[0, :5], axis=-1) ** 2
    assert count == 5
    assert total == pytest.approx(float(square_L.sum()), rel=1e-6)


class TestCost:
  # So wide that products outweigh the rest.
  MLP = MLPConfig(width=64, hidden=128)

  @staticmethod
  def compiled_flops(config):
    x_BLD = jax.ShapeDtypeStruct((1, 64, 64), jnp.float32)
    module = ExpertMLP(config, TRAIN)
    info = TokenInfo(jnp.arange(64)[None])
    variables = jax.eval_shape(
      lambda x_BLD: nn.unbox(module.init(jax.random.key(0), x_BLD, info)), x_BLD
    )
    run = jax.jit(lambda *args: module.apply(*args, info)[0])
    return run.lower(variables, x_BLD).compile().cost_analysis()['flops']

  def test_is_what_is_compiled_and_no_ops_cost_nothing(self):
    every = config_of(self.MLP, num_experts=4)
    half = config_of(self.MLP, num_experts=4, num_nulls=1, compute_share=0.5)
    counts = []
    for config in (every, half):
      counted = sum(config.flops(64).values())
      assert self.compiled_flops(config) == pytest.approx(counted, rel=0.05)
      counts.append(counted)
    assert counts[1] < 0.55 * counts[0]

  def test_slots(self):
    config = ExpertsConfig(num_experts=4, capacity_factor=1.25)
    slots = [config.slots_per_expert(n) for n in (1, 8, 16, 100)]
    assert slots == [1, 3, 5, 32]
    # No more slots than there are tokens.
    many = ExpertsConfig(num_experts=2, capacity_factor=9.0)
    assert many.slots_per_expert(4) == 4
    nulls = dataclasses.replace(config, num_nulls=1, compute_share=0.25)
    assert nulls.slots_per_expert(16) == math.ceil(1.25 * 0.25 * 16 / 4)
    assert nulls.targets == pytest.approx([1 / 16] * 4 + [3 / 4])


@pytest.mark.slow
@pytest.mark.parametrize('choice', ['token', 'expert'])
@pytest.mark.parametrize('mode', [TRAIN, Mode()], ids=['train', 'eval'])
def test_on_devices_of_their_own(choice, mode):
  fields = {'num_experts': 4, 'choice': choice}
  config = config_of(BIASED, **fields)
  variables = variables_of(config)
  x_BLD = features(0, 8)
  valid_BL = jnp.array(np.arange(L) < np.array([[9], [5]] * 4))
  info = info_of(valid_BL, 8)
  along_BLD = features(1, 8)

  def loss(params, x_BLD, info):
    module = ExpertMLP(config, mode)
    y_BLD, assigned = module.apply({'params': params}, x_BLD, info)
    return (y_BLD * along_BLD).sum(), (y_BLD, assigned)

  step = jax.value_and_grad(loss, has_aux=True)
  want = jax.jit(step)(variables['params'], x_BLD, info)
  mesh = parallel.make_mesh(parallel.MeshConfig(data=2, expert=2, tensor=2))
  boxed = jax.eval_shape(
    lambda: ExpertMLP(config).init(jax.random.key(0), x_BLD, info)
  )
  places = parallel.shardings(boxed['params'], mesh)
  with jax.set_mesh(mesh):
    params = jax.device_put(variables['params'], places)
    args = params, *parallel.put_batch((x_BLD, info), mesh)
    compiled = jax.jit(step).lower(*args).compile()
    got = compiled(*args)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4),
    *(got, want),
  )
  kernel = got[1]['up']['kernel']
  assert kernel.addressable_shards[0].data.shape == (2, D, F // 2)
  if mode.train:
    assert 'all-to-all' in compiled.as_text()


def test_each_expert_chooses_a_token_of_the_shortest_row():
  config = config_of(num_experts=6, choice='expert', capacity_factor=1.0)
  info = info_of(jnp.array(VALID_BL))
  y_BLD, assigned = apply(config, TRAIN, variables_of(config), features(), info)
  assert (assigned.ran_BLE.sum(axis=1) == 1).all()
  assert y_BLD[2, 0].any()
