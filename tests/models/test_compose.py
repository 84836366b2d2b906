"""Pruning, routing and adaptive width in one model, each within the last."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import routing
from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig

B, N = 3, 16  # Images and patches.
DENSE = dataclasses.replace(tiny.VIT, image_size=16, patch_size=4)
# Patches are dropped, then block 0 scores the rest, and block 1 runs on half of
# them, each through as many learners as its gate says.
ROUTED = dataclasses.replace(DENSE, routing=VisionRoutingConfig(capacity=0.5))
ADAPTIVE = AdaptiveConfig(num_learners=2, replace=(FFNS,))
PRUNED = DynamicViTConfig(backbone=ROUTED, stages=(0,), keep=0.7)
CONFIG = PRUNED.with_parts(adaptive=ADAPTIVE)
LEFT, CHOSEN = 12, 6  # Tokens after the stage, and of these in block 1.
IMAGES = tiny.images(B, size=16)


@functools.cache
def init(config):
  return tiny.variables(config, gain=2.0)['params']


def run(config, *args, params=None, **kwargs):
  params = init(CONFIG) if params is None else params
  model = config.build(**kwargs)
  return tiny.apply(model, {'params': params}, IMAGES, *args)


def choices(output):
  return stack.collect(output.aux, 'adaptive')


def masked(keep_SBN):
  """What training does, by given decisions."""
  return run(CONFIG, jnp.asarray(keep_SBN))


@functools.cache
def both():
  """What inference does, where patches are gone; and the same by masks."""
  removed = run(CONFIG)
  return removed, masked(removed.keep_SBN)


class TestMaskedIsRemoved:
  @staticmethod
  def in_place(value_BK, index_BK):
    """Returns values at their tokens' places, 0 elsewhere."""
    zeros_BL = jnp.zeros((B, 1 + N), value_BK.dtype)
    return routing.scatter_add_tokens(zeros_BL, index_BK, value_BK)

  def left(self, output):
    """Returns the places of the tokens that the stage leaves."""
    keep_BL = np.pad(output.keep_SBN[0], ((0, 0), (1, 0)), constant_values=1)
    return np.stack([np.flatnonzero(keep_L) for keep_L in keep_BL])

  @pytest.mark.slow
  def test_predictions(self):
    removed, masked = both()
    np.testing.assert_allclose(removed.logits_BV, masked.logits_BV, atol=1e-4)
    every = run(CONFIG, jnp.ones((1, B, N)))
    assert jnp.abs(every.logits_BV - removed.logits_BV).max() > 1e-2

  def test_a_mod_scores_and_chooses_among_what_is_left(self):
    removed, masked = both()
    (few,), (many,) = removed.routing, masked.routing
    assert few.chosen_BL.shape == (B, LEFT)
    index_BK = self.left(removed)
    np.testing.assert_array_equal(
      many.chosen_BL, self.in_place(few.chosen_BL.astype(int), index_BK)
    )
    np.testing.assert_allclose(
      many.score_BL, self.in_place(few.score_BL, index_BK), atol=1e-5
    )
    np.testing.assert_allclose(many.score_BL.sum(axis=-1), 1, rtol=1e-5)

  def test_gates_choose_alike_and_the_same_tokens_count(self):
    removed, masked = map(choices, both())
    assert removed.keys() == {'block_0/mlp', 'block_1/mlp'}
    for name, few in removed.items():
      many = masked[name]
      everywhere_BL = jnp.tile(jnp.arange(1 + N), (B, 1))
      index_BL = everywhere_BL if many.index_BL is None else many.index_BL
      counted_BL = self.in_place(many.valid_BL.astype(int), index_BL)
      ones_BK = jnp.ones_like(few.index_BL)
      np.testing.assert_array_equal(
        counted_BL, self.in_place(ones_BK, few.index_BL)
      )
      ran_BL = self.in_place(many.learners_BL * many.valid_BL, index_BL)
      np.testing.assert_array_equal(
        ran_BL, self.in_place(few.learners_BL, few.index_BL)
      )
    assert len(np.unique(removed['block_0/mlp'].learners_BL)) > 1


def test_each_image_routes_a_share_of_its_own_kept_tokens():
  # As many as of the whole image, or tokens that were dropped, would be wrong.
  counts = (3, 9, 16)
  keep_SBN = np.zeros((1, B, N), np.float32)
  for row, count in enumerate(counts):
    chosen = np.random.default_rng(row).permutation(N)[:count]
    keep_SBN[0, row, chosen] = 1
  output = masked(keep_SBN)
  (told,) = output.routing
  chosen_BL = np.asarray(told.chosen_BL)
  assert chosen_BL.sum(axis=-1).tolist() == [(1 + n) // 2 for n in counts]
  assert not chosen_BL[:, 1:][keep_SBN[0] == 0].any()
  found = choices(output)
  for name, want in (
    ('block_0/mlp', [1 + n for n in counts]),
    ('block_1/mlp', [(1 + n) // 2 for n in counts]),
  ):
    assert found[name].valid_BL.sum(axis=-1).tolist() == want


@pytest.mark.slow
def test_experts_stand_between_routing_and_learners():
  config = PRUNED.with_parts(
    experts=ExpertsConfig(num_experts=2, num_nulls=1),
    adaptive=AdaptiveConfig(num_learners=2, replace=('.*/attention/out',)),
  )
  params = init(config)
  removed = run(config, params=params)
  masked = run(config, jnp.asarray(removed.keep_SBN), params=params)
  np.testing.assert_allclose(removed.logits_BV, masked.logits_BV, atol=1e-4)
  for output in (removed, masked):
    counts = [int(told.valid_BL.sum()) for told in output.experts]
    assert counts == [B * LEFT, B * CHOSEN]
    for told in output.experts:  # Of these tokens some choose the no-op.
      assert 0 < told.ran_BLE.sum() < told.valid_BL.sum()
  rows = dict(config.flops_table())
  slots = config.experts.slots_per_expert(CHOSEN)
  one = sum(DENSE.block.mlp.flops(1).values())
  assert rows['block_1 (routed)']['experts'] == 2 * slots * one
