"""Selection of tokens, against a stable sort in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from op_tests import Case, OpTests, Target
import pytest

from mod_jax_kernels import dispatch
from mod_jax_kernels.token_select import LONGEST, token_select

pytestmark = pytest.mark.slow


def draw(seed=0, rows=2, length=17, k=5, kind='ties', dtype='float32'):
  rng = np.random.default_rng(seed)
  score = rng.normal(size=(rows, length)).astype(np.float32)
  match kind:
    case 'ties':
      score = np.round(score)
    case 'equal':
      score = np.full_like(score, -0.5)
    case 'extreme':
      values = [np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0]
      score = rng.choice(np.array(values, np.float32), size=score.shape)
    case 'padded':
      score[:, length // 3 :] = -np.inf
      score[0] = -np.inf
    case 'nan':
      # Of either sign, which is the lowest as well as -inf is.
      score[:, 1::3] = np.nan
      score[:, ::5] = -np.nan
      score[:, 2::7] = -np.inf
  return [jnp.asarray(score, dtype)], {'k': k}


def plain(score, k):
  """Best first, the lowest position first among equals; then in order."""
  score = np.asarray(score, np.float32)
  score = np.where(np.isnan(score), -np.inf, score) + 0.0
  order = np.argsort(-score, axis=-1, kind='stable')
  return np.sort(order[..., :k], axis=-1)


def target(platform, length, k):
  return Target(
    platform=platform,
    args=(jax.ShapeDtypeStruct((12, length), jnp.float32),),
    static={
      'k': k,
      'implementation': {'tpu': 'pallas', 'cuda': 'triton'}[platform],
    },
    calls=1,
  )


class TestTokenSelect(OpTests):
  name = 'token_select'
  inputs = 0
  dtypes = ('int32',)
  draw = staticmethod(draw)
  plain = staticmethod(plain)
  cases = (
    Case('ties'),
    Case('one', rows=1, length=1, k=1, kind='random'),
    Case('the best', rows=9, k=1),
    Case('all', length=128, k=128, kind='random'),
    Case('more than a block', rows=3, length=129, k=64),
    Case('equal', length=127, k=100, kind='equal'),
    Case('extreme', rows=8, length=300, k=150, kind='extreme'),
    Case('padded', rows=3, length=130, k=60, kind='padded'),
    Case('not a number', length=40, k=20, kind='nan'),
    Case('bfloat16', dtype='bfloat16'),
    Case(
      'rows and slots of several blocks',
      backends=('pallas', 'triton'),
      sizes={'block': 128, 'block_l': 128, 'block_k': 128},
      length=300,
      k=150,
    ),
  )
  refused = (
    ({'k': 18}, 'k=18 tokens .* expected 1 <= k'),
    ({'k': 0}, 'k=0 tokens'),
    ({0: np.zeros((2, 17), np.int32)}, 'expected rows of floats'),
    ({0: np.float32(0)}, 'expected rows of floats'),
  )
  lacking = (
    ('pallas', {'length': LONGEST + 1}, f'rows of {LONGEST} scores, which fit'),
  )
  targets = (
    *(target('tpu', *x) for x in [(197, 98), (LONGEST, LONGEST)]),
    *(target('cuda', *x) for x in [(2048, 256), (20000, 9)]),
  )

  def test_under_vmap(self, backend):
    if backend == 'pallas':
      pytest.skip("JAX's interpreter for TPUs takes no vmap of such a grid.")
    super().test_under_vmap(backend)

  def test_any_leading_shape(self, backend):
    (score,), _ = draw(rows=6, length=40)
    score = score.reshape(2, 3, 40)
    index, none, row = (
      self.run(backend, [x], {'k': 11})['result 0']
      for x in (score, score[:0], score[0, 0])
    )
    np.testing.assert_array_equal(index, plain(score, 11))
    assert none.shape == (0, 3, 11)
    np.testing.assert_array_equal(row, index[0, 0])

  def test_no_gradient_passes(self, backend):
    (score,), _ = draw(length=20, kind='random')

    def loss(score):
      index = token_select(score, 3, backend)
      return jnp.take_along_axis(score, index, axis=-1).sum()

    with dispatch.interpret():
      grad = jax.jit(jax.grad(loss))(score)
    np.testing.assert_array_equal(np.flatnonzero(grad[0]), plain(score, 3)[0])
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
  (score,), _ = draw(length=length)
  traced = jax.jit(lambda x: token_select(x, length // 2)).trace(score)
  lowered = traced.lower(lowering_platforms=(platform,))
  assert ('top_k' in lowered.as_text()) == sorts
  if platform == 'cpu' == jax.default_backend():
    index = lowered.compile()(score)
    np.testing.assert_array_equal(index, plain(score, length // 2))
