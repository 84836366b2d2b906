"""The dense block: attention, rotary positions, MLP."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import errors
from mod_jax.layers import rope, token_info
from mod_jax.layers.attention import Attention, AttentionConfig
from mod_jax.layers.block import Block
from mod_jax.layers.mlp import MLP, MLPConfig

B, L, D = 2, 7, 8


@functools.partial(jax.jit, static_argnums=0)
def apply(module, variables, *args):
  return module.apply(variables, *args)


@pytest.fixture(scope='module')
def x_BLD():
  return jax.random.normal(jax.random.key(1), (B, L, D))


@pytest.fixture(scope='module')
def params(block_config, token_info, x_BLD):
  info = token_info(jnp.zeros((B, L), int))
  init = jax.jit(Block(block_config).init)
  return nn.unbox(init(jax.random.key(0), x_BLD, info))['params']


class TestBlock:
  def update(self, block_config, params, x_BLD, info):
    done = apply(Block(block_config), {'params': params}, x_BLD, info)
    assert done.cache is None
    assert not done.aux
    return done.update_BLD

  def test_returns_the_update_alone(
    self, block_config, block_oracle, token_info, params, x_BLD
  ):
    position_BL = np.broadcast_to(np.arange(L), (B, L))
    update_BLD = self.update(
      block_config, params, x_BLD, token_info(position_BL)
    )
    every_BL = np.ones((B, L), bool)
    expected = block_oracle(params, block_config, x_BLD, position_BL, every_BL)
    np.testing.assert_allclose(update_BLD, expected, atol=1e-5)

  @pytest.mark.parametrize('first', [1, -1])
  def test_segments_and_padding_hide_keys(
    self, block_config, block_oracle, token_info, params, x_BLD, first
  ):
    position_BL = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]])
    segment_BL = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2]])
    segment_BL += first  # Documents may be numbered by anything.
    valid_BL = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]) > 0
    info = token_info(position_BL, jnp.array(valid_BL), jnp.array(segment_BL))
    update_BLD = self.update(block_config, params, x_BLD, info)
    expected = block_oracle(
      params, block_config, x_BLD, position_BL, valid_BL, segment_BL
    )
    assert jnp.isfinite(update_BLD).all()
    np.testing.assert_allclose(
      update_BLD[valid_BL], expected[valid_BL], atol=1e-5
    )

  def test_bfloat16_computes_in_it_and_keeps_float32_parameters(
    self, block_config, token_info, params, x_BLD
  ):
    config = dataclasses.replace(block_config, dtype='bfloat16')
    info = token_info(jnp.broadcast_to(jnp.arange(L), (B, L)))
    init = jax.eval_shape(Block(config).init, jax.random.key(0), x_BLD, info)
    assert {x.dtype for x in jax.tree.leaves(init)} == {jnp.dtype('float32')}
    update_BLD = self.update(config, params, x_BLD.astype('bfloat16'), info)
    assert update_BLD.dtype == jnp.bfloat16
    exact_BLD = self.update(block_config, params, x_BLD, info)
    np.testing.assert_allclose(
      update_BLD.astype('float32'), exact_BLD, atol=0.1
    )

  def test_flops_are_added_up(self, block_config):
    flops = block_config.flops(10)
    # 4 + 2 + 2 heads in and 4 out, of 4 channels; 55 pairs; 3 kernels.
    assert flops == {
      'attention': 2 * 10 * 8 * 12 * 4 + 4 * 4 * 4 * 55,
      'mlp': 3 * 2 * 10 * 8 * 6,
    }
    assert (
      block_config.flops(10, full_pairs=True)['attention']
      == flops['attention'] + 4 * 4 * 4 * 45
    )


class TestAttention:
  def test_not_causal_sees_all(self, x_BLD):
    config = AttentionConfig(
      width=D, num_heads=2, num_kv_heads=2, head_dim=4, causal=False
    )
    info = token_info.TokenInfo(jnp.zeros((B, L), int))
    module = Attention(config)
    init = jax.jit(module.init)
    variables = nn.unbox(init(jax.random.key(0), x_BLD, info))
    update_BLD = apply(module, variables, x_BLD, info).update_BLD
    flipped_BLD = apply(module, variables, x_BLD[:, ::-1], info).update_BLD
    # Without positions and order, attention commutes with permutations.
    np.testing.assert_allclose(flipped_BLD[:, ::-1], update_BLD, atol=1e-5)

  def test_bias_and_output_scale(self, x_BLD):
    config = AttentionConfig(
      width=D, num_heads=2, num_kv_heads=1, head_dim=4, bias=True, out_scale=0.0
    )
    info = token_info.TokenInfo(jnp.zeros((B, L), int))
    init = jax.jit(Attention(config).init)
    variables = nn.unbox(init(jax.random.key(0), x_BLD, info))
    attention = variables['params']
    assert attention['query']['bias'].shape == (2, 4)
    assert attention['key']['bias'].shape == (1, 4)
    assert attention['out']['bias'].shape == (D,)
    assert not attention['out']['kernel'].any()

  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      ({'num_kv_heads': 3}, 'num_kv_heads=3, num_heads=4: .*divide'),
      ({'num_heads': 0}, 'AttentionConfig.num_heads=0'),
      ({'head_dim': -2}, 'AttentionConfig.head_dim=-2'),
      ({'width': 2.5}, 'AttentionConfig.width'),
    ],
  )
  def test_refused_configs(self, change, message):
    sizes = {'width': 8, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 2}
    with pytest.raises(errors.UserError, match=message):
      AttentionConfig(**sizes | change)


class TestRope:
  def test_is_the_half_split_kind(self):
    x_BLHC = jax.random.normal(jax.random.key(0), (1, 3, 2, 6))
    position_BL = jnp.array([[0, 2, 5]])
    rotated = rope.rotate(x_BLHC, rope.rotation(position_BL, 6, 10_000.0))
    for slot, position in enumerate([0, 2, 5]):
      for c in range(3):
        angle = position * 10_000.0 ** (-2 * c / 6)
        a, b = x_BLHC[0, slot, :, c], x_BLHC[0, slot, :, c + 3]
        expected = a * np.cos(angle) - b * np.sin(angle)
        np.testing.assert_allclose(rotated[0, slot, :, c], expected, atol=1e-6)
        expected = b * np.cos(angle) + a * np.sin(angle)
        np.testing.assert_allclose(
          rotated[0, slot, :, c + 3], expected, atol=1e-6
        )

  def test_products_depend_on_distance_alone(self):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(i, j):
      def turn(x, position):
        return rope.rotate(x, rope.rotation(jnp.array([[position]]), 8, 50.0))

      return float(jnp.sum(turn(q, i) * turn(k, j)))

    assert product(3, 1) == pytest.approx(product(10, 8), abs=1e-5)
    assert abs(product(3, 1) - product(3, 2)) > 1e-3

  def test_keeps_the_dtype_and_turns_in_float32(self):
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    rotation = rope.rotation(jnp.array([[1001]]), 4, 10_000.0)
    assert rotation.dtype == jnp.float32
    rotated = rope.rotate(x, rotation)
    assert rotated.dtype == jnp.bfloat16
    expected = np.cos(1001.0) - np.sin(1001.0)
    assert float(rotated[0, 0, 0, 0]) == pytest.approx(expected, rel=1e-2)


class TestMLP:
  @pytest.mark.parametrize(
    ('kind', 'function'),
    [
      ('gelu', lambda x: jax.nn.gelu(x, approximate=False)),
      ('gelu_tanh', lambda x: jax.nn.gelu(x, approximate=True)),
    ],
  )
  def test_gelu(self, x_BLD, kind, function):
    config = MLPConfig(width=D, hidden=5, kind=kind, bias=True)
    variables = nn.unbox(MLP(config).init(jax.random.key(0), x_BLD))
    params = variables['params']
    hidden = function(3 * x_BLD @ params['up']['kernel'])
    np.testing.assert_allclose(
      MLP(config).apply(variables, 3 * x_BLD),
      hidden @ params['down']['kernel'],
      atol=1e-5,
    )
    assert config.flops(3) == {'mlp': 2 * 2 * 3 * D * 5}

  def test_refused_configs(self):
    with pytest.raises(errors.UserError, match='MLPConfig.hidden=0'):
      MLPConfig(width=4, hidden=0)
    with pytest.raises(errors.UserError, match="'relu'"):
      MLPConfig(width=4, hidden=4, kind='relu')


def test_positions_do_not_count_padding():
  valid_BL = jnp.array([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]) > 0
  position_BL = token_info.count_positions(valid_BL)
  assert position_BL.dtype == jnp.int32
  np.testing.assert_array_equal(position_BL[valid_BL], [0, 1, 2, 0, 1, 2])
  assert position_BL.min() == 0


def test_a_window_counts_distances_in_the_text():
  config = AttentionConfig(
    width=8, num_heads=2, num_kv_heads=1, head_dim=4, window=3
  )
  module = Attention(config)
  # As a routed block gathers them: neighbours here, and far apart in the text.
  info = token_info.TokenInfo(jnp.array([[0, 1, 2, 5, 6]], jnp.int32))
  x_BLD = jax.random.normal(jax.random.key(0), (1, 5, 8))
  variables = module.init(jax.random.key(1), x_BLD, info)

  def run(x_BLD):
    return module.apply(variables, x_BLD, info).update_BLD[0]

  changed_LD = np.abs(run(x_BLD.at[:, :1].add(1.0)) - run(x_BLD)).max(axis=-1)
  assert (changed_LD > 1e-4).tolist() == [True, True, True, False, False]
  changed_LD = np.abs(run(x_BLD.at[:, 2].add(1.0)) - run(x_BLD)).max(axis=-1)
  assert (changed_LD > 1e-4).tolist() == [False, False, True, False, False]
  changed_LD = np.abs(run(x_BLD.at[:, 3].add(1.0)) - run(x_BLD)).max(axis=-1)
  assert (changed_LD > 1e-4).tolist() == [False, False, False, True, True]
