"""Mistakes that implementations of Mixture-of-Depths are known to make.

Each test fails if its mistake is made here. `docs/mistakes.md` lists these and
others, with the tests of each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.token_info import TokenInfo

B, L, D = 3, 10, 8
K = 3


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
