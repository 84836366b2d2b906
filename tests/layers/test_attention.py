"""The dense block: attention, rotary positions, MLP."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax.layers import rope, token_info
from mod_jax.layers.attention import Attention, AttentionConfig
from mod_jax.layers.mlp import MLP, MLPConfig

B, L, D = 2, 7, 8


X_BLD = jax.random.normal(jax.random.key(1), (B, L, D))


def test_positions_turn_in_float32_and_keep_the_dtype():
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
  def test_gelu(self, kind, function):
    config = MLPConfig(width=D, hidden=5, kind=kind, bias=True)
    variables = nn.unbox(MLP(config).init(jax.random.key(0), X_BLD))
    params = variables['params']
    hidden = function(3 * X_BLD @ params['up']['kernel'])
    np.testing.assert_allclose(
      MLP(config).apply(variables, 3 * X_BLD),
      hidden @ params['down']['kernel'],
      atol=1e-5,
    )
    assert config.flops(3) == {'mlp': 2 * 2 * 3 * D * 5}

  def test_a_backward_pass_computes_gelu_again(self):
    x_BLD = jnp.ones((1, 256, 8))
    module = MLP(MLPConfig(width=8, hidden=1024, kind='gelu'))
    params = nn.unbox(module.init(jax.random.key(0), x_BLD))
    grad = jax.jit(jax.grad(lambda *args: module.apply(*args).sum()))
    compiled = grad.lower(params, x_BLD).compile()
    hidden = 4 * 256 * 1024
    # What goes into it and comes out, and their gradients.
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * hidden


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

  for place, changed in ((0, [0, 1, 2]), (2, [2]), (3, [3, 4])):
    moved_LD = np.abs(run(x_BLD.at[:, place].add(1.0)) - run(x_BLD))
    assert np.flatnonzero(moved_LD.max(axis=-1) > 1e-4).tolist() == changed


def test_the_last_token_of_a_prompt_sees_no_padding():
  """On neither side, nor an answer: rows score as alone and without them."""
  attention = Attention(
    AttentionConfig(
      width=D, num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=10_000.0
    ),
    score='last',
  )
  image, question, answer = map(
    token_info.KINDS.index, ('image', 'question', 'answer')
  )
  kind_BL = jnp.array(
    [[question, question, image, image, question, answer, answer]] * B
  )
  # Padding before the row, and after it.
  valid_BL = jnp.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]) > 0
  position_BL = token_info.count_positions(valid_BL)
  info = token_info.TokenInfo(position_BL, valid_BL, kind_BL=kind_BL)
  variables = jax.jit(attention.init)(jax.random.key(0), X_BLD, info)
  score_BL = tiny.apply(attention, variables, X_BLD, info).aux['attention']
  for row, part in enumerate((np.s_[2:5], np.s_[0:5])):
    alone = token_info.TokenInfo(
      position_BL[row, part][None], kind_BL=kind_BL[row, part][None]
    )
    expected = tiny.apply(attention, variables, X_BLD[row, part][None], alone)
    np.testing.assert_allclose(
      score_BL[row, part], expected.aux['attention'][0], atol=1e-6
    )
    np.testing.assert_allclose(score_BL[row].sum(), 1, atol=1e-6)
