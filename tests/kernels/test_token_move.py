"""Moves of tokens, against numpy and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing
from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles
from mod_jax_kernels.token_move import gather_tokens
from mod_jax_kernels.token_move import scatter_add_tokens

TOLERANCE = {'float32': 1e-5, 'bfloat16': 1e-2}
SHAPES = [
  # batch, length, kept, width
  (1, 1, 1, 1),
  (2, 9, 4, 33),
  (3, 5, 5, 128),
  (2, 7, 1, 1030),
]


@pytest.fixture(params=['xla', 'triton'])
def implementation(request):
  """A backend; kernels run in an interpreter."""
  if request.param == 'triton':
    pytest.importorskip('triton')
  with dispatch.interpret():
    yield request.param


def draw(batch, length, kept, width, dtype='float32'):
  rng = np.random.default_rng(length)
  index = [np.sort(rng.permutation(length)[:kept]) for _ in range(batch)]
  return (
    jnp.array(rng.normal(size=(batch, length, width)), dtype),
    jnp.array(np.stack(index), jnp.int32),
    jnp.array(rng.normal(size=(batch, kept, width)), dtype),
    jnp.array(rng.normal(size=(batch, kept)), jnp.float32),
  )


def error(found, expected):
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  assert found.shape == expected.shape
  return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-9)


def oracle(x, index, update, gate):
  y = np.array(x, np.float64)
  for b, row in enumerate(np.asarray(index)):
    gated = np.asarray(update[b], np.float64)
    y[b, row] += gated if gate is None else gated * np.asarray(gate[b])[:, None]
  return y


@pytest.mark.parametrize(
  ('shape', 'dtype'), [*zip(SHAPES, ['float32', 'bfloat16'] * 2, strict=True)]
)
def test_forward(shape, dtype, implementation):
  x, index, update, gate = draw(*shape, dtype)
  out = gather_tokens(x, index, implementation)
  assert out.dtype == dtype
  np.testing.assert_array_equal(
    out, np.take_along_axis(np.asarray(x), np.asarray(index)[..., None], 1)
  )
  for factor in (gate, None):
    y = scatter_add_tokens(x, index, update, factor, implementation)
    assert y.dtype == dtype
    assert error(y, oracle(x, index, update, factor)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
  ('shape', 'dtype'),
  [(SHAPES[1], 'float32'), (SHAPES[2], 'bfloat16'), (SHAPES[3], 'float32')],
)
def test_gradients(shape, dtype, implementation):
  arrays = draw(*shape, dtype)
  x, index, update, gate = arrays
  rng = np.random.default_rng(1)
  factor = jnp.array(rng.normal(size=(2, *x.shape)), jnp.float32)

  def loss(gather, scatter, x, update, gate):
    y = scatter(x, index, update + gather(x, index), gate)
    z = scatter(y, index, update * update, None)
    return jnp.sum(y * factor[0] + z.astype(jnp.float32) * factor[1])

  def ours(*arrays):
    return loss(
      lambda x, i: gather_tokens(x, i, implementation),
      lambda x, i, u, g: scatter_add_tokens(x, i, u, g, implementation),
      *arrays,
    )

  def plain(*arrays):
    """The same by one-hot products, which are differentiated by JAX."""
    one_BKL = jax.nn.one_hot(index, x.shape[1])
    exact = jax.lax.Precision.HIGHEST

    def scatter(x, _, update, gate):
      gated = update if gate is None else update * gate[..., None]
      return x + jnp.einsum('BKL,BKD->BLD', one_BKL, gated, precision=exact)

    return loss(
      lambda x, _: jnp.einsum('BKL,BLD->BKD', one_BKL, x, precision=exact),
      scatter,
      *arrays,
    )

  found = jax.jit(jax.grad(ours, (0, 1, 2)))(x, update, gate)
  wide = (a.astype(jnp.float32) for a in (x, update, gate))
  expected = jax.jit(jax.grad(plain, (0, 1, 2)))(*wide)
  for a, b, given in zip(found, expected, (x, update, gate), strict=True):
    assert a.dtype == given.dtype
    assert error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize('dtype', TOLERANCE)
def test_equals_the_moves_of_the_models(dtype, implementation):
  x, index, update, gate = draw(2, 9, 4, 33, dtype)
  np.testing.assert_array_equal(
    gather_tokens(x, index, implementation), routing.gather_tokens(x, index)
  )
  y = scatter_add_tokens(x, index, update, gate, implementation)
  expected = routing.scatter_add_tokens(x, index, update * gate[..., None])
  if implementation == 'xla':
    np.testing.assert_array_equal(y, expected)
  assert error(y, expected) < TOLERANCE[dtype]


def test_tokens_that_pass_by_keep_their_bits(implementation):
  x, index, update, gate = draw(2, 9, 4, 33)
  x = x.at[:, ::2].set(-0.0)
  update = update.at[:, 0].set(np.nan)
  y = scatter_add_tokens(x, index, update, gate, implementation)
  passed = np.ones(x.shape[:2], bool)
  np.put_along_axis(passed, np.asarray(index), False, axis=1)
  assert (np.signbit(x) & passed[..., None]).any()
  np.testing.assert_array_equal(np.signbit(y)[passed], np.signbit(x)[passed])
  np.testing.assert_array_equal(y[passed], x[passed])


def test_no_token_is_chosen(implementation):
  x, index, update, gate = draw(2, 4, 0, 8)
  assert gather_tokens(x, index, implementation).shape == (2, 0, 8)

  def total(x, update, gate):
    y = scatter_add_tokens(x, index, update, gate, implementation)
    return jnp.sum(y + gather_tokens(x, index, implementation).sum())

  grads = jax.jit(jax.grad(total, (0, 1, 2)))(x, update, gate)
  np.testing.assert_array_equal(grads[0], jnp.ones_like(x))
  assert grads[1].shape == update.shape


def test_updates_of_another_type(implementation):
  x, index, update, gate = draw(2, 9, 4, 33, 'bfloat16')
  update = update.astype(jnp.float32)
  y = scatter_add_tokens(x, index, update, gate, implementation)
  assert y.dtype == jnp.bfloat16
  assert error(y, oracle(x, index, update, gate)) < 1e-2
  grad = jax.jit(
    jax.grad(
      lambda u: jnp.sum(scatter_add_tokens(x, index, u, None, implementation))
    )
  )(update)
  np.testing.assert_array_equal(grad, jnp.ones_like(update))
  assert grad.dtype == jnp.float32


@pytest.mark.parametrize('implementation', ['triton'], indirect=True)
def test_rows_of_several_blocks(implementation):
  x, index, update, gate = draw(2, 9, 4, 70)
  with tiles.trying(rows=2, block_d=32):
    y, vjp = jax.vjp(
      lambda *a: scatter_add_tokens(a[0], index, *a[1:], implementation),
      *(x, update, gate),
    )
    dx, du, dg = vjp(y)
  dy = np.take_along_axis(np.asarray(y), np.asarray(index)[..., None], 1)
  assert error(y, oracle(x, index, update, gate)) < 1e-5
  np.testing.assert_array_equal(dx, y)
  assert error(du, dy * gate[..., None]) < 1e-5
  assert error(dg, (dy * update).sum(axis=-1)) < 1e-5


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'x': (2, 9)}, r'x \(2, 9\).*expected \[B, L, D\]'),
    ({'index': (3, 4)}, r'index \(3, 4\): expected'),
    ({'index': (2, 10)}, 'K <= L'),
    ({'update': (2, 4, 32)}, r'update \(2, 4, 32\): expected \(2, 4, 33\)'),
    ({'gate': (2, 3)}, r'gate \(2, 3\): expected a factor for each'),
    ({'dtype': jnp.float32}, 'index of type float32: expected integers'),
    ({'implementation': 'pallas'}, "implementation='pallas': expected 'xla'"),
  ],
)
def test_refuses_what_does_not_fit(change, message):
  shapes = {'x': (2, 9, 33), 'index': (2, 4), 'update': (2, 4, 33)}
  shapes['gate'] = (2, 4)
  shapes |= {name: x for name, x in change.items() if name in shapes}
  x, index, update, gate = (jnp.zeros(shape) for shape in shapes.values())
  index = index.astype(change.get('dtype', jnp.int32))
  name = change.get('implementation')
  with pytest.raises(ValueError, match=message):
    scatter_add_tokens(x, index, update, gate, name)
  if not change.keys() & {'update', 'gate'}:
    with pytest.raises(ValueError, match=message):
      gather_tokens(x, index, name)


@pytest.mark.parametrize('dtype', TOLERANCE)
def test_compiles_for_hopper(for_hopper, dtype):
  def loss(x, index, update, gate):
    x_BKD = gather_tokens(x, index, 'triton')
    y = scatter_add_tokens(x, index, update * x_BKD, gate, 'triton')
    return jnp.sum(y.astype(jnp.float32) ** 2)

  shapes = (4, 2048, 1024), (4, 256), (4, 256, 1024), (4, 256)
  types = dtype, jnp.int32, dtype, jnp.float32
  text = for_hopper(
    jax.value_and_grad(loss, (0, 2, 3)),
    *map(jax.ShapeDtypeStruct, shapes, types),
  )
  # Both moves, and the transpose of each.
  assert text.count('triton_kernel_call') >= 4
