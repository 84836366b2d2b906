"""Selection of tokens, against a stable sort in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing
from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles
from mod_jax_kernels.token_select import pallas_tpu
from mod_jax_kernels.token_select import token_select

KERNELS = ['pallas', 'triton']
BACKENDS = ['xla', *KERNELS]


def select(score, k, implementation):
  if implementation == 'triton':
    pytest.importorskip('triton')
  with dispatch.interpret():
    run = jax.jit(token_select, static_argnums=(1, 2))
    return np.asarray(run(score, k, implementation))


def oracle(score, k):
  """Best first, the lowest position first among equals; then in order."""
  score = np.asarray(score, np.float32)
  score = np.where(np.isnan(score), -np.inf, score) + 0.0
  order = np.argsort(-score, axis=-1, kind='stable')
  return np.sort(order[..., :k], axis=-1)


def draw(rows, length, kind):
  rng = np.random.default_rng(length)
  score = rng.normal(size=(rows, length)).astype(np.float32)
  match kind:
    case 'ties':
      return np.round(score)
    case 'equal':
      return np.full_like(score, -0.5)
    case 'extreme':
      values = [np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0]
      return rng.choice(np.array(values, np.float32), size=score.shape)
    case 'padded':
      score[:, length // 3 :] = -np.inf
      score[0] = -np.inf
  return score


@pytest.mark.parametrize('implementation', BACKENDS)
@pytest.mark.parametrize(
  ('rows', 'length', 'k', 'kind'),
  [
    (1, 1, 1, 'random'),
    (9, 17, 1, 'ties'),
    (2, 128, 128, 'random'),
    (3, 129, 64, 'ties'),
    (2, 127, 100, 'equal'),
    (8, 300, 150, 'extreme'),
    (3, 130, 60, 'padded'),
  ],
)
def test_equals_a_stable_sort(rows, length, k, kind, implementation):
  score = draw(rows, length, kind)
  index = select(score, k, implementation)
  assert index.dtype == np.int32
  np.testing.assert_array_equal(index, oracle(score, k))


@pytest.mark.parametrize('implementation', KERNELS)
def test_rows_and_slots_of_several_blocks(implementation):
  score = draw(2, 300, 'ties')
  with tiles.trying(block=128, block_l=128, block_k=128):
    index = select(score, 150, implementation)
  np.testing.assert_array_equal(index, oracle(score, 150))


@pytest.mark.parametrize('implementation', ['xla', 'sort', 'triton'])
def test_nan_is_the_lowest(implementation):
  score = np.array([[-np.nan, 1.0, -np.inf, np.nan, -2.0]], np.float32)
  index = select(score, 3, implementation)
  np.testing.assert_array_equal(index, [[0, 1, 4]])


@pytest.mark.parametrize('implementation', ['sort', None])
def test_any_leading_shape_and_any_float(implementation):
  score = jnp.asarray(draw(6, 40, 'ties').reshape(2, 3, 40), jnp.bfloat16)
  index = select(score, 11, implementation)
  np.testing.assert_array_equal(index, oracle(score, 11))
  assert select(score[:0], 11, implementation).shape == (0, 3, 11)
  assert select(score[0, 0], 11, implementation).shape == (11,)


@pytest.mark.parametrize('implementation', [*BACKENDS, 'sort', None])
def test_chooses_what_the_models_choose(implementation):
  score = draw(4, 100, 'ties')
  assert np.signbit(score[score == 0]).any()
  expected, _ = routing.select_tokens(jnp.asarray(score), 30)
  np.testing.assert_array_equal(select(score, 30, implementation), expected)


@pytest.mark.parametrize('implementation', [None, 'triton'])
def test_no_gradient_passes(implementation):
  score = jnp.asarray(draw(2, 20, 'random'))

  def loss(score):
    index = token_select(score, 3, implementation)
    return jnp.take_along_axis(score, index, axis=-1).sum()

  if implementation == 'triton':
    pytest.importorskip('triton')
  with dispatch.interpret():
    grad = jax.jit(jax.grad(loss))(score)
  np.testing.assert_array_equal(np.flatnonzero(grad[0]), oracle(score, 3)[0])
  assert grad.sum() == 6


@pytest.mark.parametrize(
  ('platform', 'length', 'sorts'),
  [
    ('cpu', 4096, False),
    ('cpu', 64, True),
    ('tpu', 4096, True),
    ('cuda', 4096, True),
  ],
)
def test_sorts_where_nothing_else_was_measured_to_win(platform, length, sorts):
  score = jnp.asarray(draw(2, length, 'ties'))
  traced = jax.jit(lambda x: token_select(x, length // 2)).trace(score)
  lowered = traced.lower(lowering_platforms=(platform,))
  assert ('top_k' in lowered.as_text()) == sorts
  if platform == 'cpu' == jax.default_backend():
    index = lowered.compile()(score)
    np.testing.assert_array_equal(index, oracle(score, length // 2))


@pytest.mark.parametrize(
  ('score', 'k', 'implementation', 'message'),
  [
    (np.zeros((2, 4), np.float32), 5, None, 'k=5 tokens .* expected 1 <= k'),
    (np.zeros((2, 4), np.float32), 0, None, 'k=0 tokens'),
    (np.zeros((2, 4), np.int32), 2, None, 'expected rows of floats'),
    (np.float32(0), 1, None, 'expected rows of floats'),
    (np.zeros((2, 4), np.float32), 2, 'cub', "implementation='cub'"),
  ],
)
def test_refuses_what_does_not_fit(score, k, implementation, message):
  with pytest.raises(ValueError, match=message):
    token_select(score, k, implementation)


def test_refuses_rows_longer_than_the_memory():
  shape = jax.ShapeDtypeStruct((1, pallas_tpu.LONGEST + 1), jnp.float32)
  with (
    dispatch.interpret(),
    pytest.raises(ValueError, match="vector memory: use 'sort'"),
  ):
    jax.eval_shape(lambda x: token_select(x, 4, 'pallas'), shape)


@pytest.mark.parametrize('implementation', KERNELS)
def test_a_kernel_asked_for_by_name_runs_or_raises(implementation):
  if implementation == 'triton':
    pytest.importorskip('triton')
  if jax.default_backend() != 'cpu':
    pytest.skip('It may run here.')
  with pytest.raises(RuntimeError, match=f'{implementation!r} runs on'):
    token_select(jnp.zeros((2, 8)), 2, implementation)


@pytest.mark.parametrize(
  ('length', 'k'), [(197, 98), (pallas_tpu.LONGEST, 600)]
)
def test_compiles_for_tpu(for_tpu, length, k):
  score = jax.ShapeDtypeStruct((12, length), jnp.float32)
  compiled = for_tpu(lambda x: token_select(x, k, 'pallas'), score)
  assert 'tpu_custom_call' in compiled.as_text()


@pytest.mark.parametrize(('length', 'k'), [(2048, 256), (20000, 9)])
def test_compiles_for_hopper(for_hopper, length, k):
  score = jax.ShapeDtypeStruct((12, length), jnp.float32)
  text = for_hopper(lambda x: token_select(x, k, 'triton'), score)
  assert 'triton_kernel_call' in text
