"""Adaptive MLPs: only the chosen learners of each token, and exactly those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mod_jax_kernels.acm_mlp import acm_mlp
from mod_jax_kernels.acm_mlp import order as order_lib
from mod_jax_kernels.acm_mlp import reference

D, N, F, OUT = 5, 3, 4, 6
TOLERANCE = {'float32': 1e-5, 'bfloat16': 5e-2}


# The programs are tiny: compiling them well takes longer than running them.
QUICK = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}
in_tiles = jax.jit(
  reference.acm_mlp, static_argnames='tile', compiler_options=QUICK
)
public = functools.partial(
  jax.jit, static_argnames='activation', compiler_options=QUICK
)(acm_mlp)


def draw(tokens, dtype='float32', seed=0):
  """Returns tokens and learners."""
  rng = np.random.default_rng(seed)
  shapes = ((tokens, D), (N, D, F), (N, F), (N, F, OUT))
  return tuple(
    jnp.asarray(rng.normal(size=s).astype(np.float32), dtype) for s in shapes
  )


def oracle(x, w1, b1, w2, k, activation='gelu'):
  """One token and one learner after the other."""
  x, w1, b1, w2 = (np.asarray(a, np.float32) for a in (x, w1, b1, w2))
  y = np.zeros((len(x), w2.shape[-1]), np.float32)
  for t, learners in enumerate(np.clip(k, 0, len(w1))):
    for n in range(learners):
      hidden = x[t] @ w1[n] + b1[n]
      if activation == 'gelu':
        hidden = hidden * (1 + scipy.special.erf(hidden / np.sqrt(2))) / 2
      y[t] += hidden @ w2[n]
  return y


def random_k(tokens, seed=1):
  return np.random.default_rng(seed).integers(0, N + 1, tokens).astype(np.int32)


def close(got, want, dtype='float32'):
  assert got.dtype == dtype
  tolerance = TOLERANCE[dtype]
  np.testing.assert_allclose(
    np.asarray(got, np.float32), want, atol=tolerance, rtol=tolerance
  )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('activation', ['gelu', 'linear'])
def test_is_the_oracle(activation, dtype):
  inputs, k = draw(20, dtype), random_k(20)
  assert set(k) == {0, 1, 2, 3}
  got = public(*inputs, jnp.asarray(k), activation=activation)
  close(got, oracle(*inputs, k, activation), dtype)
  other = oracle(*inputs, k, {'gelu': 'linear', 'linear': 'gelu'}[activation])
  assert np.abs(np.asarray(got, np.float32) - other).max() > 0.1


@pytest.mark.parametrize('tokens', [1, 7, 8, 9, 24, 25])
def test_any_number_of_tokens_fits_the_tiles(tokens):
  inputs, k = draw(tokens), random_k(tokens, seed=tokens)
  got = in_tiles(*inputs, jnp.asarray(k), tile=8)
  close(got, oracle(*inputs, k))


@pytest.mark.parametrize('more', [-1, 0, 1])
def test_any_number_of_tokens_fits_the_tiles_that_are_used(more):
  tokens = reference.TILE + more
  inputs, k = draw(tokens), random_k(tokens)
  close(public(*inputs, jnp.asarray(k)), oracle(*inputs, k))


@pytest.mark.parametrize('k', range(N + 1))
def test_all_tokens_alike(k):
  inputs = draw(11)
  got = in_tiles(*inputs, jnp.full(11, k, jnp.int32), tile=4)
  close(got, oracle(*inputs, np.full(11, k)))
  assert bool(jnp.any(got)) == (k > 0)


def test_order_of_the_tokens_does_not_matter():
  x, *learners = draw(30)
  k, order = random_k(30), np.random.default_rng(2).permutation(30)
  got = in_tiles(x, *learners, jnp.asarray(k), tile=8)
  shuffled = in_tiles(x[order], *learners, jnp.asarray(k[order]), tile=8)
  np.testing.assert_allclose(shuffled, got[order], atol=1e-6)


def test_numbers_out_of_range_count_as_the_nearest():
  inputs = draw(4)
  got = public(*inputs, jnp.array([-7, -1, N + 1, 99]))
  close(got, oracle(*inputs, np.array([0, 0, N, N])))


def test_no_token():
  assert public(*draw(0), jnp.zeros(0, jnp.int32)).shape == (0, OUT)


def all_learners(x, w1, b1, w2, k, activation):
  """Returns y of the dense computation, which JAX differentiates."""
  hidden = jnp.einsum('TD,NDF->TNF', x, w1) + b1
  if activation == 'gelu':
    hidden = jax.nn.gelu(hidden, approximate=False)
  runs = jnp.arange(N) < k[:, None]
  return jnp.einsum('TNF,NFD->TD', hidden * runs[..., None], w2)


@pytest.mark.parametrize(
  ('dtype', 'activation', 'tokens'),
  [('float32', 'gelu', 9), ('float32', 'linear', 8), ('bfloat16', 'gelu', 20)],
)
def test_gradient_is_that_of_all_learners(dtype, activation, tokens):
  inputs, k = draw(tokens, dtype), jnp.asarray(random_k(tokens))
  g = jnp.asarray(np.random.default_rng(3).normal(size=(tokens, OUT)), dtype)
  got = jax.jit(
    functools.partial(reference.backward, activation=activation, tile=8),
    compiler_options=QUICK,
  )(*inputs, g, order_lib.order(k, N))
  exact = [a.astype('float32') for a in inputs]
  _, pull = jax.vjp(
    lambda *inputs: all_learners(*inputs, k, activation), *exact
  )
  for a, b in zip(got, pull(g.astype('float32')), strict=True):
    assert a.dtype == dtype
    error = np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max()
    assert error < {'float32': 1e-5, 'bfloat16': 1e-2}[dtype]


def test_gradient_of_the_public_function():
  inputs, k = draw(20), jnp.asarray(random_k(20))

  def loss(function):
    return lambda *inputs: jnp.sum(jnp.sin(function(*inputs)))

  got = jax.grad(loss(lambda *a: acm_mlp(*a, k)), (0, 1, 2, 3))(*inputs)
  want = jax.grad(loss(lambda *a: all_learners(*a, k, 'gelu')), (0, 1, 2, 3))(
    *inputs
  )
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_gradients_of_what_is_not_run_are_zero():
  x, w1, b1, w2 = draw(9)
  k = jnp.array([2, 0, 1, 2, 0, 2, 1, 1, 0])
  idle = (k == 0)[:, None]
  inputs = (
    jnp.where(idle, jnp.nan, x),
    *(a.at[2].set(jnp.inf) for a in (w1, b1, w2)),
  )
  g = jnp.where(idle, jnp.nan, jnp.ones((9, OUT)))
  dx, *weights = jax.jit(
    functools.partial(reference.backward, activation='gelu', tile=8)
  )(*inputs, g, order_lib.order(k, N))
  assert not dx[k == 0].any()
  assert jnp.isfinite(dx).all()
  assert dx[k > 0].any(axis=1).all()
  for d in weights:
    assert jnp.isfinite(d).all()
    assert d[:2].any()
    assert not d[2].any()


@pytest.mark.parametrize('tokens', [1, 2, 300])
def test_order_is_a_stable_sort(tokens):
  k = np.random.default_rng(tokens).integers(-1, N + 2, tokens)
  order = order_lib.order(jnp.asarray(k), N)
  clipped = np.clip(k, 0, N)
  np.testing.assert_array_equal(
    order.token_T, np.argsort(-clipped, kind='stable')
  )
  np.testing.assert_array_equal(order.slot_T, np.argsort(order.token_T))
  assert order.count_N.tolist() == [(clipped > n).sum() for n in range(N)]


def test_weights_of_another_dtype_take_part_in_that_of_the_tokens():
  x, *learners = draw(20)
  k = jnp.asarray(random_k(20))
  low = x.astype('bfloat16')
  got = acm_mlp(low, *learners, k)
  assert got.dtype == 'bfloat16'
  rounded = [a.astype('bfloat16') for a in learners]
  np.testing.assert_array_equal(got, acm_mlp(low, *rounded, k))
  gradient = jax.grad(lambda w: acm_mlp(low, w, *learners[1:], k).sum())
  assert gradient(learners[0]).dtype == 'float32'


def test_tokens_of_integers_are_refused():
  x, *learners = draw(3)
  with pytest.raises(ValueError, match='int32.*floating'):
    acm_mlp(x.astype('int32'), *learners, jnp.zeros(3, jnp.int32))


def test_sums_in_float32():
  # Rounded after each learner, the small ones would be lost one by one.
  w2 = jnp.array([1.0] + [2**-9] * 4, jnp.bfloat16)[:, None, None]
  ones = jnp.ones((5, 1, 1), jnp.bfloat16)
  y = public(
    *(ones[0], ones, jnp.zeros((5, 1), jnp.bfloat16), w2, jnp.array([5])),
    activation='linear',
  )
  assert float(y[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_what_is_not_run_harms_nobody(poison):
  # Nine tokens in tiles of eight: the second is filled up by reading the last
  # token again and again.
  x, w1, b1, w2 = draw(9)
  k = np.array([2, 0, 1, 2, 0, 2, 1, 1, 0], np.int32)
  poisoned = x.at[jnp.asarray(k) == 0].set(poison)
  got = in_tiles(
    poisoned,
    *(w1.at[2].set(poison), b1.at[2].set(poison), w2.at[2].set(poison)),
    jnp.asarray(k),
    tile=8,
  )
  close(got, oracle(x, w1, b1, w2, k))


def test_a_poisoned_token_keeps_it_for_itself():
  x, *learners = draw(9)
  k = np.full(9, N, np.int32)
  got = in_tiles(x.at[8].set(np.nan), *learners, jnp.asarray(k), tile=8)
  close(got[:8], oracle(x, *learners, k)[:8])
  assert jnp.isnan(got[8]).all()


def test_only_the_learners_that_a_tile_needs_are_run(monkeypatch):
  ran = []
  learner = reference._learner

  def note(x_PD, *args):
    jax.debug.callback(lambda: ran.append(len(x_PD)))
    return learner(x_PD, *args)

  monkeypatch.setattr(reference, '_learner', note)
  inputs = draw(10)
  k = np.array([0, 3, 0, 1, 0, 2, 1, 0, 0, 1])
  # Its own function, so that what is compiled is forgotten with it.
  run = jax.jit(lambda *args: reference.acm_mlp(*args, tile=2))
  got = run(*inputs, jnp.asarray(k))
  jax.effects_barrier()
  close(got, oracle(*inputs, k))
  # In order 3 2 | 1 1 | 1 0 | 0 0 | 0 0: three, one and one.
  assert ran == [2] * 5


@pytest.mark.parametrize(
  ('place', 'shape'),
  [
    (0, (4, D + 1)),
    (0, (2, 2, D)),
    (1, (N, D + 1, F)),
    (1, (N, D)),
    (2, (N, F + 1)),
    (2, (N + 1, F)),
    (3, (N, F + 1, OUT)),
    (3, (N, F)),
    (4, (3,)),
    (4, (4, 1)),
  ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape):
  inputs = [*draw(4), jnp.zeros(4, jnp.int32)]
  inputs[place] = jnp.zeros(shape, inputs[place].dtype)
  with pytest.raises(ValueError, match=r'expected \[T, D\], \[N, D, F\]'):
    acm_mlp(*inputs)


def test_a_fraction_of_a_learner_is_refused():
  with pytest.raises(ValueError, match='float32.*integers'):
    acm_mlp(*draw(4), jnp.full(4, 1.5))


def test_an_unknown_choice_is_refused():
  inputs = (*draw(3), jnp.zeros(3, jnp.int32))
  with pytest.raises(ValueError, match=r"implementation='magic'.*'xla'"):
    acm_mlp(*inputs, implementation='magic')
  with pytest.raises(ValueError, match=r"activation='relu'.*'gelu'"):
    acm_mlp(*inputs, activation='relu')
