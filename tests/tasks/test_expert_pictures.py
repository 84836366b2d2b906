"""Pictures of experts show what the layers tell, over whole sequences."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import viz
from mod_jax.layers.experts import Assigned, ExpertsConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.tasks import expert_pictures, make_task

pytestmark = pytest.mark.slow

NONE, AWAY = viz.NO_EXPERT, viz.NOT_THERE


def test_takers_stand_where_their_tokens_do():
  # Two experts and a no-op; a row of four of six tokens, one of them padding.
  assigned = Assigned(
    logits_BLX=jnp.array([[[1.0, 2, 9], [3, 1, 0], [0, 0, 1], [5, 5, 5]]]),
    wanted_BLX=jnp.array([[[1, 1, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0]]], bool),
    ran_BLE=jnp.array([[[1, 1], [0, 1], [0, 0], [0, 0]]], bool),
    valid_BL=jnp.array([[True, True, True, False]]),
    index_BL=jnp.array([[0, 2, 5, 0]]),
  )
  expert_RBL, more_RBL, dropped_RBL = expert_pictures.takers([assigned], 6)
  assert expert_RBL.tolist() == [[[1, AWAY, 1, AWAY, AWAY, NONE]]]
  assert np.argwhere(more_RBL).tolist() == [[0, 0, 0]]
  assert np.argwhere(dropped_RBL).tolist() == [[0, 0, 2]]


@pytest.fixture(scope='module')
def task():
  """Staged and integrated: the second block is routed, both have no-ops."""
  model = dataclasses.replace(
    tiny.LM,
    routing=MoDConfig(capacity=0.5, router_loss=0.01),
    experts=ExpertsConfig(num_experts=3, per_token=2, num_nulls=1),
  )
  return make_task(tiny.experiment(model))


def test_the_map_and_the_load_of_a_model(task):
  params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))['params']
  figures = task.pictures(params, {})
  assert set(figures) >= {'routing', 'expert_map', 'expert_load'}
  all_tokens, routed = [
    sum(bar.get_height() for bar in axes.patches)
    for axes in figures['expert_load'].axes
  ]
  # Two choices of each token, whoever gets them; the router may pass all by.
  assert all_tokens == pytest.approx(2)
  assert routed == pytest.approx(2) or routed == 0
