"""DETR: published FLOPs, padding, and what A-MoD and MoD route."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import flops
from mod_jax.layers import stack
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models.detr import DETRConfig

pytestmark = pytest.mark.slow

AMOD = VisionRoutingConfig()
MOD = VisionRoutingConfig(score='learned', gate='one_plus_tanh', router_std=0.2)
TINY = DETRConfig(
  image_size=(24, 32),
  num_classes=4,
  num_queries=6,
  backbone=ConvStemConfig(width=4),
  patch_size=2,
  num_layers=2,
  num_decoder_layers=2,
  width=16,
  num_heads=2,
  mlp_dim=16,
  dropout=0.0,
)


LEARNED = VisionRoutingConfig(score='learned')


class TestPublishedFlops:
  """In G multiply-accumulates, as the papers count them."""

  @pytest.mark.parametrize(
    ('routing', 'routed', 'giga'),
    [
      (None, ('encoder',), 10.745),
      (AMOD, ('encoder', 'queries', 'memory'), 7.745),
      (LEARNED, ('encoder', 'queries', 'memory'), 7.746),
      # Readings that are not the paper's.
      (AMOD, ('encoder', 'queries'), 7.945),
      (AMOD, ('encoder',), 8.238),
    ],
  )
  def test_transformer_at_850_tokens(self, routing, routed, giga):
    config = DETRConfig(routing=routing, routed=routed)
    assert config.grid == (25, 34)
    total = sum(
      sum(parts.values())
      for name, parts in config.flops_table()
      if name.startswith(('encoder', 'decoder'))
    )
    assert round(total / 2e9, 3) == giga

  @pytest.mark.parametrize(('width', 'giga'), [(1066, 81.17), (1137, 86.70)])
  def test_totals(self, width, giga):
    config = DETRConfig(image_size=(800, width))
    assert flops.forward(config) / 2e9 == pytest.approx(giga, rel=1e-3)

  def test_both_readings_of_the_total_that_routing_leaves(self):
    """The paper's 83.2 is not below 86.56 by what 850 tokens save."""
    saved = {}
    for width in (1066, 1137):
      dense = DETRConfig(image_size=(800, width))
      amod = dataclasses.replace(dense, routing=AMOD)
      saved[width] = (flops.forward(dense) - flops.forward(amod)) / 2e9
    assert 86.56 - saved[1066] == pytest.approx(83.56, abs=0.02)
    assert 86.56 - saved[1137] == pytest.approx(83.34, abs=0.02)


IMAGES = jnp.float32(np.random.default_rng(0).normal(size=(3, 24, 32, 3)))


@functools.cache
def ran(config, padded=False, **mode):
  model = config.build(**mode)
  variables = model.init(jax.random.key(1), config.example())
  args = (jnp.array([[24, 32], [16, 32], [20, 24]]),) if padded else ()
  return variables, jax.jit(
    lambda v, x: model.apply(v, x, *args, mutable=['batch_stats'])[0]
  )(variables, IMAGES)


def routed(routing, **changes):
  return dataclasses.replace(TINY, routing=routing, **changes)


@pytest.mark.parametrize('routing', [AMOD, MOD], ids=['amod', 'mod'])
def test_padding_changes_nothing(routing):
  """Of tokens that lie whole in the picture; the stem sees beyond the edge."""
  config = routed(routing)
  variables, _ = ran(config)

  @functools.partial(jax.jit, static_argnames='grid')
  def transform(features, size, grid):
    return config.build().apply(
      variables, features, size, method=lambda m, x, s: m.detect(x, s, grid)
    )

  features = jax.random.normal(jax.random.key(2), (2, 4, 5, 16))
  alone = transform(features, None, (16, 20))
  wide = jnp.pad(features, ((0, 0), (0, 2), (0, 3), (0, 0)), constant_values=9)
  padded = transform(wide, jnp.array([[16, 20]] * 2), (24, 32))
  np.testing.assert_allclose(padded.boxes_BQ4, alone.boxes_BQ4, atol=1e-5)
  np.testing.assert_allclose(padded.logits_BQV, alone.logits_BQV, atol=1e-4)
  unmasked = transform(wide, None, (24, 32))
  assert jnp.abs(unmasked.logits_BQV - alone.logits_BQV).max() > 1e-2


class TestAMoD:
  def test_memory_is_scored_by_the_attention_of_the_layer_before(self):
    _, output = ran(routed(AMOD))
    attention_BS = output.aux[2]['source_attention']
    np.testing.assert_allclose(attention_BS.sum(axis=-1), 1, rtol=1e-5)
    choice = stack.collect(output.aux, 'source_router')['block_3']
    np.testing.assert_array_equal(choice.score_BL, attention_BS)
    best = np.sort(np.argsort(-attention_BS, axis=-1)[:, :24], axis=-1)
    chosen = np.nonzero(np.asarray(choice.chosen_BL))[1].reshape(3, 24)
    np.testing.assert_array_equal(chosen, best)

  def test_the_second_decoder_layer_takes_the_same_queries(self):
    """Their content is zero in the layer that scores them."""
    _, output = ran(routed(AMOD))
    encoder, queries = (x.chosen_BL for x in output.routing)
    assert (queries == queries[0]).all()
    assert queries.sum(axis=-1).tolist() == [3] * 3
    assert not (encoder == encoder[0]).all()
    # A router, which sees what the queries have read, chooses by picture.
    _, output = ran(routed(MOD))
    assert not (
      output.routing[1].score_BL == output.routing[1].score_BL[0]
    ).all()

  def test_padding_is_never_chosen(self):
    _, output = ran(routed(AMOD), padded=True)
    chosen = (
      output.routing[0].chosen_BL,
      output.aux[3]['source_router'].chosen_BL,
    )
    for chosen_BL in chosen:
      grid_BHW = np.asarray(chosen_BL).reshape(3, 6, 8)
      assert not grid_BHW[1, 4:].any()
      assert not grid_BHW[2, 5:].any()
      assert not grid_BHW[2, :, 6:].any()
      # Half of each picture's own tokens.
      assert grid_BHW.sum(axis=(1, 2)).tolist() == [24, 16, 15]


def test_routers_get_a_gradient():
  config = routed(MOD)
  variables, _ = ran(config)
  model = config.build()

  @jax.jit
  @jax.grad
  def gradient(params):
    output = model.apply({**variables, 'params': params}, IMAGES)
    return (output.boxes_BQ4**2).sum() + (output.logits_BQV**2).sum()

  found = gradient(variables['params'])
  decoder = found['decoder']['block_1']
  for router in (
    *(found['encoder']['block_1']['router'], decoder['router']),
    decoder['source'],
  ):
    assert jnp.abs(jax.tree.leaves(router)[0]).max() > 1e-6


def test_earlier_layers_share_the_heads_in_training():
  _, output = ran(routed(AMOD), train=True)
  logits_BNQV, boxes_BNQ4 = output.earlier
  assert logits_BNQV.shape == (3, 1, 6, 5)
  assert boxes_BNQ4.shape == (3, 1, 6, 4)
  assert ran(TINY)[1].earlier is None


def test_bfloat16_does_not_round_what_is_found():
  _, output = ran(dataclasses.replace(TINY, dtype='bfloat16'))
  box_logits_BQ4 = jax.scipy.special.logit(output.boxes_BQ4)
  for logits in (output.logits_BQV, box_logits_BQ4):
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    assert (jnp.abs(logits - rounded) > 2e-4 * jnp.abs(logits)).mean() > 0.5


def test_tokens_tell_their_place_where_that_is_asked_for():
  """Of a picture that is everywhere alike, the encoder's tokens are, too."""
  alike = jnp.ones((1, 3, 4, 16))
  variables, _ = ran(TINY)
  spreads = {}
  for placed in (False, True):
    config = dataclasses.replace(TINY, place_tokens=placed)
    _, state = config.build().apply(
      variables,
      alike,
      method=lambda m, x: m.detect(x, None, (24, 32)),
      capture_intermediates=lambda m, _: m.name == 'encoder',
      mutable=['intermediates'],
    )
    (encoded,) = state['intermediates']['encoder']['__call__']
    spreads[placed] = float(jnp.std(encoded.x_BLD, axis=1).max())
  assert spreads[False] < 1e-5
  assert spreads[True] > 0.1
