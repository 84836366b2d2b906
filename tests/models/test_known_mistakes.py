"""Mistakes that implementations of Mixture-of-Depths are known to make.

Each test fails if its mistake is made here. Others are in `test_causality.py`,
that what is called causal is not; and in `test_lm.py`: top-k of a single token
(`test_one_token_cannot_be_chosen_by_top_k`), and one threshold for the prompt
and another one for decoding (`TestDecoding`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import routing
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.token_info import TokenInfo

# Sizes of `test_lm.py`, whose compiled programs serve here too.
B, L, D = 3, 10, 8
K = 3
TOKENS_BL = jax.random.randint(jax.random.key(3), (B, L), 0, 11)
EVERY_BL = jnp.ones((B, L), bool)
ROUTER = RoutingMode(rule='router')


def chosen(out):
  """[R, B, L]: what each routed layer processed."""
  return np.stack([told.chosen_BL for told in out.routing])


@pytest.fixture(scope='module')
def params(variables):
  """A routed block's, with a router that reads feature 0 alone."""
  kernel_D = jnp.zeros(D).at[0].set(1.0)
  return variables['params']['block_0'] | {'router': {'kernel': kernel_D}}


@pytest.fixture(scope='module')
def run(config):
  """Returns a routed layer that chooses K of L tokens."""

  @functools.partial(jax.jit, static_argnames='rule')
  def run(params, x_BLD, rule='top_k', threshold=0.0):
    position_BL = jnp.broadcast_to(jnp.arange(L), x_BLD.shape[:2])
    info = TokenInfo(position_BL)
    layer = LayerConfig(
      block=config.block, routing=config.routing, capacity=K / L
    )
    moving = routing.MovingThreshold(threshold, jnp.ones(()))
    done = Layer(layer, Mode(routing=RoutingMode(rule=rule))).apply(
      {'params': params, 'moving': {'threshold': moving}}, x_BLD, info
    )
    told = done.aux['router']
    return done.x_BLD, told.chosen_BL, told.kth_B

  return run


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(0), (B, L, D))


def test_rope_takes_original_positions_not_compacted_ones(params, run):
  # The same three tokens, close together, far apart, and close but later.
  places = ((0, 1, 2), (0, 4, 9), (5, 6, 7))
  token_KD = jax.random.normal(jax.random.key(0), (K, D)).at[:, 0].set(1.0)
  x_BLD = jnp.zeros((B, L, D)).at[..., 0].set(-1.0)
  for row, place in enumerate(places):
    x_BLD = x_BLD.at[row, list(place)].set(token_KD)
  y_BLD, chosen_BL, _ = run(params, x_BLD)
  near, far, later = (
    y_BLD[row, list(place)] for row, place in enumerate(places)
  )
  assert all(chosen_BL[row, list(p)].all() for row, p in enumerate(places))
  np.testing.assert_allclose(near, later, atol=1e-5)
  assert abs(near - far)[1:].max() > 1e-2


def test_slots_are_in_sequence_order_under_the_causal_mask(params, run, x_BLD):
  # The later, the higher the score: in score order, the last would be first.
  x_BLD = x_BLD.at[..., 0].set(jnp.arange(L) / L)
  before_BLD, chosen_BL, _ = run(params, x_BLD)
  assert np.flatnonzero(chosen_BL[0]).tolist() == [L - 3, L - 2, L - 1]
  # Other features of the last token, so that the choice stands.
  other_BLD = x_BLD.at[:, -1, 1:].add(1.0)
  after_BLD, still_BL, _ = run(params, other_BLD)
  np.testing.assert_array_equal(chosen_BL, still_BL)
  np.testing.assert_array_equal(before_BLD[:, :-1], after_BLD[:, :-1])
  assert (before_BLD[:, -1] != after_BLD[:, -1]).any()


def test_residual_is_added_once_and_never_multiplied(params, run, x_BLD):
  # A block that does nothing leaves its input, whatever the router's weight.
  idle = dict(params)
  for part, name in (('attention', 'out'), ('mlp', 'down')):
    kernel = jnp.zeros_like(params[part][name]['kernel'])
    idle[part] = params[part] | {name: {'kernel': kernel}}
  y_BLD, chosen_BL, _ = run(idle, x_BLD)
  assert chosen_BL.any()
  np.testing.assert_array_equal(y_BLD, x_BLD)

  # And the update is proportional to the router's weight.
  double = params | {'router': {'kernel': 2 * params['router']['kernel']}}
  once_BLD, _, _ = run(params, x_BLD)
  twice_BLD, _, _ = run(double, x_BLD)
  np.testing.assert_allclose(
    twice_BLD - x_BLD, 2 * (once_BLD - x_BLD), atol=1e-5
  )


def test_the_weight_is_on_the_attention_too(params, run, x_BLD):
  # A block whose feed-forward does nothing.
  kernel_FD = jnp.zeros_like(params['mlp']['down']['kernel'])
  params = params | {'mlp': params['mlp'] | {'down': {'kernel': kernel_FD}}}
  double = params | {'router': {'kernel': 2 * params['router']['kernel']}}
  once_BLD, _, _ = run(params, x_BLD)
  twice_BLD, _, _ = run(double, x_BLD)
  assert abs(once_BLD - x_BLD).max() > 1e-2
  np.testing.assert_allclose(
    twice_BLD - x_BLD, 2 * (once_BLD - x_BLD), atol=1e-5
  )


@pytest.mark.parametrize('sign', [1, -1])
def test_saturated_weights_neither_tie_nor_let_padding_in(
  config, params, x_BLD, sign
):
  # By weights of 1 + tanh, all real tokens tie: at 2, or at 0 as padding does.
  routing_config = dataclasses.replace(config.routing, gate='one_plus_tanh')
  layer = Layer(
    LayerConfig(block=config.block, routing=routing_config, capacity=K / L)
  )
  score_L = sign * (100.0 + jnp.arange(L))
  valid_BL = jnp.arange(L) >= jnp.array([[0], [2], [8]])
  position_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
  done = jax.jit(layer.apply)(
    {'params': params},
    x_BLD.at[..., 0].set(score_L),
    TokenInfo(position_BL, valid_BL),
  )
  told = done.aux['router']
  assert set(np.unique(told.weight_BL[valid_BL])) == {1.0 + sign}
  found = [np.flatnonzero(row).tolist() for row in told.chosen_BL]
  assert found == [[7, 8, 9] if sign > 0 else [0, 1, 2]] + (
    [[8, 9], [9]] if sign > 0 else [[2, 3], [8]]
  )


def test_the_kth_token_is_chosen_and_ties_do_not_add_to_it(params, run, x_BLD):
  _, chosen_BL, kth_B = run(params, x_BLD)
  assert chosen_BL.sum(axis=-1).tolist() == [K] * B
  np.testing.assert_array_equal(kth_B, np.sort(x_BLD[..., 0], axis=-1)[:, -K])
  tied_BLD = x_BLD.at[..., 0].set(0.5).at[:, 4, 0].set(2.0)
  _, chosen_BL, _ = run(params, tied_BLD)
  assert np.flatnonzero(chosen_BL[0]).tolist() == [0, 1, 4]
  # Nor does the threshold lose the token that it was taken from.
  for row in range(B):
    _, exact_BL, _ = run(params, x_BLD, 'threshold', kth_B[row])
    assert exact_BL[row].sum() == K


def test_decoding_skips_tokens(config, variables, generate):
  # max(1, int(capacity · 1)) tokens of each step would be all of them.
  prompt = 2
  _, chosen_RBL, cache = generate(
    config, variables, TOKENS_BL, EVERY_BL, mode=ROUTER, prompt=prompt
  )
  routed = chosen_RBL[..., prompt:].mean(axis=-1)
  assert (routed < 1).all()
  assert (routed > 0).any()
  routed_R = cache.blocks[0].length_B, cache.blocks[2].length_B
  assert (jnp.stack(routed_R) < L).all()
  assert cache.blocks[1].length_B.tolist() == [L] * B


def test_each_sequence_has_its_own_cache(config, variables, generate):
  # Chunk 0 processes all rows at once, where sharing would happen.
  mode = RoutingMode(rule='router', chunk=0)
  run = functools.partial(generate, config, variables, mode=mode, prompt=2)
  logits_BLV, chosen_RBL, cache = run(TOKENS_BL, EVERY_BL)
  # Sequences skip differently, or this would prove nothing.
  assert len(set(cache.blocks[0].length_B.tolist())) > 1
  for row in range(B):
    one = slice(row, row + 1)
    alone_BLV, alone_RBL, alone = run(TOKENS_BL[one], EVERY_BL[one])
    np.testing.assert_array_equal(alone_RBL, chosen_RBL[:, one])
    np.testing.assert_allclose(alone_BLV, logits_BLV[one], atol=1e-5)
    for layer in (0, 2):
      many, own = cache.blocks[layer], alone.blocks[layer]
      np.testing.assert_array_equal(many.length_B[one], own.length_B)
      np.testing.assert_array_equal(many.position_BS[one], own.position_BS)


def test_empty_cache_slots_are_not_attended(config, variables, generate):
  run = functools.partial(
    generate, config, variables, TOKENS_BL, EVERY_BL, mode=ROUTER, prompt=2
  )
  tight_BLV, _, _ = run()
  roomy_BLV, _, cache = run(room=3 * L)
  assert cache.blocks[0].slots == 3 * L
  np.testing.assert_allclose(roomy_BLV, tight_BLV, atol=1e-5)


def test_empty_slots_of_a_choice_are_not_attended(config, variables):
  # The same choice in as many slots as tokens, and in about half of them.
  roomy = tiny.apply(config, variables, TOKENS_BL, mode=ROUTER)
  most = int(chosen(roomy).sum(axis=-1).max())
  slack = most / (config.routing.capacity * L)
  assert most < L
  assert slack >= 1
  few = RoutingMode(rule='router', overflow='drop', slack=slack)
  tight = tiny.apply(config, variables, TOKENS_BL, mode=few)
  np.testing.assert_array_equal(chosen(tight), chosen(roomy))
  np.testing.assert_allclose(tight.logits_BLV, roomy.logits_BLV, atol=1e-5)
