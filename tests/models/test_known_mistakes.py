"""Mistakes that implementations of Mixture-of-Depths are known to make.

Each test fails if its mistake is made here. `docs/mistakes.md` lists these and
others, with the tests of each.
"""

import dataclasses

import blocks
from blocks import BLOCK
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.routing import MovingThreshold

B, L, D = 3, 10, 8
K = 3  # Of the L tokens, by a router that reads feature 0 alone.
X_BLD = jax.random.normal(jax.random.key(0), (B, L, D))
INFO = blocks.info(B, L)
MOD = MoDConfig(threshold_decay=0.5)


def layer(routing, rule='top_k'):
  config = LayerConfig(block=BLOCK, routing=routing, capacity=K / L)
  return Layer(config, Mode(routing=RoutingMode(rule=rule)))


SHAPES = jax.eval_shape(layer(MOD).init, jax.random.key(0), X_BLD, INFO)
KERNEL_D = jnp.zeros(D).at[0].set(1.0)
PARAMS = tiny.drawn(nn.unbox(SHAPES))['params']
PARAMS |= {'router': {'kernel': KERNEL_D}}


def run(x_BLD, rule='top_k', threshold=0.0, info=INFO, routing=MOD):
  """Returns the features after the layer, and what was routed."""
  moving = MovingThreshold(threshold, jnp.ones(()))
  variables = {'params': PARAMS, 'moving': {'threshold': moving}}
  done = jax.jit(layer(routing, rule).apply)(variables, x_BLD, info)
  return done.x_BLD, done.aux['router']


def test_rope_takes_original_positions_not_compacted_ones():
  # The same three tokens, close together, far apart, and close but later.
  places = ((0, 1, 2), (0, 4, 9), (5, 6, 7))
  token_KD = jax.random.normal(jax.random.key(0), (K, D)).at[:, 0].set(1.0)
  x_BLD = jnp.zeros((B, L, D)).at[..., 0].set(-1.0)
  for row, place in enumerate(places):
    x_BLD = x_BLD.at[row, list(place)].set(token_KD)
  y_BLD, told = run(x_BLD)
  chosen_BL = told.chosen_BL
  near, far, later = (
    y_BLD[row, list(place)] for row, place in enumerate(places)
  )
  assert all(chosen_BL[row, list(p)].all() for row, p in enumerate(places))
  np.testing.assert_allclose(near, later, atol=1e-5)
  assert abs(near - far)[1:].max() > 1e-2


def test_slots_are_in_sequence_order_under_the_causal_mask():
  # The later, the higher the score: in score order, the last would be first.
  x_BLD = X_BLD.at[..., 0].set(jnp.arange(L) / L)
  before_BLD, told = run(x_BLD)
  assert np.flatnonzero(told.chosen_BL[0]).tolist() == [L - 3, L - 2, L - 1]
  # Other features of the last token, so that the choice stands.
  after_BLD, still = run(x_BLD.at[:, -1, 1:].add(1.0))
  np.testing.assert_array_equal(told.chosen_BL, still.chosen_BL)
  np.testing.assert_array_equal(before_BLD[:, :-1], after_BLD[:, :-1])
  assert (before_BLD[:, -1] != after_BLD[:, -1]).any()


@pytest.mark.parametrize(
  ('sign', 'found'),
  [(1, [[7, 8, 9], [8, 9], [9]]), (-1, [[0, 1, 2], [2, 3], [8]])],
)
def test_saturated_weights_neither_tie_nor_let_padding_in(sign, found):
  # By weights of 1 + tanh, all real tokens tie: at 2, or at 0 as padding does.
  routing = dataclasses.replace(MOD, gate='one_plus_tanh')
  valid_BL = jnp.arange(L) >= jnp.array([[0], [2], [8]])
  x_BLD = X_BLD.at[..., 0].set(sign * (100.0 + jnp.arange(L)))
  info = INFO.replace(valid_BL=valid_BL)
  _, told = run(x_BLD, info=info, routing=routing)
  assert set(np.unique(told.weight_BL[valid_BL])) == {1.0 + sign}
  assert [np.flatnonzero(row).tolist() for row in told.chosen_BL] == found


def test_the_kth_token_is_chosen_and_ties_do_not_add_to_it():
  _, told = run(X_BLD)
  assert told.chosen_BL.sum(axis=-1).tolist() == [K] * B
  kth_B = np.sort(X_BLD[..., 0], axis=-1)[:, -K]
  np.testing.assert_array_equal(told.kth_B, kth_B)
  _, tied = run(X_BLD.at[..., 0].set(0.5).at[:, 4, 0].set(2.0))
  assert np.flatnonzero(tied.chosen_BL[0]).tolist() == [0, 1, 4]
  # Nor does the threshold lose the token that it was taken from.
  for row in range(B):
    _, exact = run(X_BLD, 'threshold', kth_B[row])
    assert exact.chosen_BL[row].sum() == K
