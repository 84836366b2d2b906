"""The first blocks of a language model and its head, as a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import losses
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

CONFIG = dataclasses.replace(
  tiny.LM,
  vocab_size=20,
  num_layers=3,
  routing=MoDConfig(capacity=0.5),
  early_exit=2,
  early_loss=0.5,
)


VARIABLES = tiny.variables(CONFIG)


def _batch():
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, 20, (2, 9))
  return {
    'tokens': jnp.asarray(tokens_BL[:, :-1]),
    'targets': jnp.asarray(tokens_BL[:, 1:]),
    'weights': jnp.asarray(rng.integers(0, 2, (2, 8)), jnp.float32),
  }


def test_is_the_model_of_fewer_blocks():
  batch = _batch()
  got = tiny.apply(CONFIG, VARIABLES, batch['tokens'], depth=2)
  # Its kernels start smaller, but these are not drawn.
  shallow = dataclasses.replace(CONFIG, num_layers=2, early_exit=0)
  params = dict(VARIABLES['params'])
  params.pop('block_2')
  want = tiny.apply(shallow, {'params': params}, batch['tokens'])
  np.testing.assert_allclose(got.logits_BLV, want.logits_BLV, atol=1e-6)
  whole = tiny.apply(CONFIG, VARIABLES, batch['tokens'])
  assert np.abs(whole.logits_BLV - got.logits_BLV).max() > 0.1


def test_leaves_the_other_caches_as_they_are():
  mode = RoutingMode(rule='router')
  cache = lm.LMCache.empty(CONFIG, 2, 8, mode)
  output = tiny.apply(
    CONFIG, VARIABLES, _batch()['tokens'], mode=mode, cache=cache, depth=1
  )
  lengths = [block.length_B.tolist() for block in output.cache.blocks]
  assert lengths == [[8, 8], [0, 0], [0, 0]]


@pytest.mark.slow
def test_its_loss_is_trained_and_reported():
  task = make_task(ExperimentConfig(model=CONFIG))
  batch = _batch()
  key = jax.random.key(0)

  @functools.partial(jax.jit, static_argnums=1)
  def loss(params, early_loss):
    model = dataclasses.replace(CONFIG, early_loss=early_loss)
    task.config = task.modality.config = ExperimentConfig(model=model)
    total, (sums, _) = task.loss(params, {}, batch, key, 0.0)
    return total, sums

  with_it, sums = loss(VARIABLES['params'], 0.5)
  without, _ = loss(VARIABLES['params'], 0.0)
  early = tiny.apply(CONFIG, VARIABLES, batch['tokens'], depth=2)
  want = losses.next_token_loss(
    early.logits_BLV, batch['targets'], batch['weights']
  )
  np.testing.assert_allclose(sums['early_loss'], want, rtol=1e-5)
  np.testing.assert_allclose(
    with_it - without, 0.5 * want[0] / want[1], rtol=1e-4
  )
  # It is no part of evaluation.
  output = tiny.apply(
    CONFIG, VARIABLES, batch['tokens'], targets_BL=batch['targets']
  )
  assert output.early_loss is None
