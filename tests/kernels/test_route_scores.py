"""Attention with its column means, against loops over queries in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax_kernels

TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-2}
B, H, C = 2, 3, 4

# The programs are tiny: compiling them well takes longer than running them.
quick = functools.partial(
  jax.jit,
  compiler_options={
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
  },
)
route_scores = quick(
  mod_jax_kernels.route_scores, static_argnames='implementation'
)


def draw(length, dtype='float32', scale=1.0):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.array(factor * rng.normal(size=(B, length, H, C)), dtype)
    for factor in (scale, scale, 1.0)
  )


def oracle(q, k, v, mask_BQS=None):
  """Returns out and score, one query at a time, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  length = q.shape[1]
  if mask_BQS is None:
    mask_BQS = np.ones((B, length, length), bool)
  out, score_BS = np.zeros(q.shape), np.zeros((B, length))
  seeing_B = mask_BQS.any(axis=-1).sum(axis=-1)
  for b, i, h in np.ndindex(B, length, H):
    seen = np.flatnonzero(mask_BQS[b, i])
    if not seen.size:
      continue
    logit = k[b, seen, h] @ q[b, i, h] / np.sqrt(C)
    weight = np.exp(logit - logit.max())
    weight /= weight.sum()
    out[b, i, h] = weight @ v[b, seen, h]
    score_BS[b, seen] += weight / (H * seeing_B[b])
  return out, score_BS


def naive(q, k, v, mask_BQS):
  """The same for automatic differentiation; each query must see a key."""
  logit = jnp.einsum('BQHC,BSHC->BHQS', q, k) / C**0.5
  logit = jnp.where(mask_BQS[:, None], logit, -jnp.inf)
  weight = jax.nn.softmax(logit)
  return jnp.einsum('BHQS,BSHC->BQHC', weight, v), weight.mean(axis=(1, 2))


@quick
def squared(q, k, v, mask):
  """Returns gradients of a loss that reads all outputs, and those."""

  def loss(q, k, v):
    out, score = mod_jax_kernels.route_scores(q, k, v, mask)
    return (out**2).sum() + (score**2).sum(), (out, score)

  return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def random_mask(length):
  mask = np.random.default_rng(1).random((B, length, length)) < 0.5
  return mask | np.eye(length, dtype=bool)


@pytest.mark.parametrize(
  ('length', 'masked', 'dtype'),
  [
    (5, False, 'float32'),
    (5, True, 'float32'),
    (5, True, 'bfloat16'),
    (1, False, 'bfloat16'),
  ],
)
def test_is_the_oracle(length, masked, dtype):
  q, k, v = draw(length, dtype)
  mask = random_mask(length) if masked else None
  out, score = route_scores(q, k, v, mask, implementation='xla')
  want_out, want_score = oracle(q, k, v, mask)
  assert out.dtype == dtype
  assert score.dtype == jnp.float32
  tolerance = TOLERANCE[dtype]
  np.testing.assert_allclose(
    out.astype(jnp.float32), want_out, atol=tolerance, rtol=tolerance
  )
  # Whatever the dtype: products of rounded numbers, added up in float32.
  np.testing.assert_allclose(score, want_score, atol=1e-6, rtol=1e-5)
  np.testing.assert_allclose(score.sum(axis=-1), 1, atol=1e-6)


def test_a_query_without_any_key_takes_no_part():
  length = 5
  q, k, v = draw(length)
  mask = random_mask(length)
  mask[0, 2] = mask[1, :3] = False

  grads, (out, score) = squared(q, k, v, mask)
  want_out, want_score = oracle(q, k, v, mask)
  seeing = mask.any(axis=-1)
  assert not seeing.all()
  np.testing.assert_allclose(out[seeing], want_out[seeing], atol=1e-5)
  np.testing.assert_allclose(score, want_score, atol=1e-6)
  assert all(jnp.isfinite(x).all() for x in (*grads, out))


def test_nobody_sees_anything():
  q, k, v = draw(5)
  _, (out, score) = squared(q, k, v, np.zeros((B, 5, 5), bool))
  assert jnp.isfinite(out).all()
  np.testing.assert_array_equal(score, 0)


def test_large_logits():
  q, k, v = draw(5, scale=100.0)
  logit = np.einsum('bqhc,bshc->bhqs', q, k) / np.sqrt(C)
  assert logit.max() > 1e4
  assert logit.min() < -1e4
  grads, (out, score) = squared(q, k, v, np.ones((B, 5, 5), bool))
  want_out, want_score = oracle(q, k, v)
  np.testing.assert_allclose(out, want_out, atol=1e-4)
  np.testing.assert_allclose(score, want_score, atol=1e-5)
  assert all(jnp.isfinite(x).all() for x in grads)


@pytest.mark.parametrize('masked', [False, True])
def test_gradients_are_those_of_a_naive_version(masked):
  length = 5
  inputs = draw(length)
  mask = random_mask(length) if masked else np.ones((B, length, length), bool)
  rng = np.random.default_rng(2)
  along_out = rng.normal(size=(B, length, H, C))
  along_score = 10 * rng.normal(size=(B, length))

  def grads(function, mask):
    def loss(q, k, v):
      out, score = function(q, k, v, mask)
      return (out * along_out).sum() + (score * along_score).sum()

    return quick(jax.grad(loss, (0, 1, 2)))(*inputs)

  ours = grads(
    mod_jax_kernels.route_scores, jnp.array(mask) if masked else None
  )
  for got, want in zip(ours, grads(naive, jnp.array(mask)), strict=True):
    assert jnp.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-4)


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      equation.params, is_leaf=lambda x: hasattr(x, 'jaxpr')
    ):
      if hasattr(inner, 'jaxpr'):
        yield from equations(inner.jaxpr)


@pytest.mark.parametrize('gradient', [False, True])
def test_scores_are_summed_exactly_on_accelerators_too(gradient):
  # Those round the factors of a float32 product unless told otherwise; then
  # the scores do not even add up to 1, and near ties fall the wrong way.
  def function(q, k, v):
    return mod_jax_kernels.route_scores(q, k, v, implementation='xla')

  inputs = draw(5)
  if gradient:
    gradients = jax.vjp(function, *inputs)[1]
    jaxpr = jax.make_jaxpr(gradients)(function(*inputs)).jaxpr
  else:
    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
  of_score = [
    eqn
    for eqn in equations(jaxpr)
    if eqn.primitive.name == 'dot_general'
    and 4 in (ranks := [v.aval.ndim for v in eqn.invars])
    and min(ranks) < 4
  ]
  assert len(of_score) == 1
  for eqn in of_score:
    assert eqn.params['precision'] == (jax.lax.Precision.HIGHEST,) * 2


def test_masks_of_tokens_and_causality_are_masks_of_queries_and_keys():
  inputs = draw(6)
  valid = np.array([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
  pairs = valid[:, :, None] & valid[:, None, :] & np.tri(6, dtype=bool)
  out, score = mod_jax_kernels.route_scores(*inputs, valid, causal=True)
  want_out, want_score = oracle(*inputs, pairs)
  np.testing.assert_allclose(out, want_out, atol=1e-5)
  np.testing.assert_allclose(score, want_score, atol=1e-6)
  np.testing.assert_array_equal(score[~valid], 0)
  both = mod_jax_kernels.route_scores(
    *inputs, valid[:, :, None] & valid[:, None, :], causal=True
  )
  np.testing.assert_allclose(score, both[1], atol=1e-6)
  causal = mod_jax_kernels.route_scores(*inputs, causal=True)
  want_out, want_score = oracle(
    *inputs, np.broadcast_to(np.tri(6, dtype=bool), (B, 6, 6))
  )
  np.testing.assert_allclose(causal[0], want_out, atol=1e-5)
  np.testing.assert_allclose(causal[1], want_score, atol=1e-6)


@pytest.mark.parametrize('read', ['out', 'score'])
def test_gradients_of_one_result_alone_and_recomputed(read):
  inputs = draw(5)
  mask = jnp.array(random_mask(5))
  # Not its square: the sum of all scores has no gradient.
  along = jnp.arange(5.0)[None, :, None, None]

  def loss(function, *inputs):
    out, score = function(*inputs, mask)
    return (
      (out * along).sum() if read == 'out' else (score * along[..., 0, 0]).sum()
    )

  def grads(function):
    return jax.grad(lambda *x: loss(function, *x), (0, 1, 2))(*inputs)

  want = grads(naive)
  got = grads(mod_jax_kernels.route_scores)
  again = grads(jax.checkpoint(mod_jax_kernels.route_scores))
  assert jnp.abs(want[0]).max() > 0.01
  for x, y, z in zip(got, again, want, strict=True):
    np.testing.assert_allclose(x, z, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(y, z, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
  ('shapes', 'message'),
  [
    (((1, 4, 2, 3), (1, 5, 2, 3), (1, 5, 2, 3)), r'q \(1, 4, 2, 3\).*one'),
    (((1, 4, 2, 3), (1, 4, 1, 3), (1, 4, 1, 3)), 'one shape'),
    (((1, 4, 2, 3), (1, 4, 2, 3), (1, 4, 2, 1)), 'one shape'),
  ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
  with pytest.raises(ValueError, match=message):
    mod_jax_kernels.route_scores(*(jnp.zeros(shape) for shape in shapes))


def test_an_unknown_backend_is_refused():
  with pytest.raises(ValueError, match=r"implementation='magic'.*'xla'"):
    mod_jax_kernels.route_scores(*draw(3), implementation='magic')


@pytest.mark.parametrize(
  'mask', [np.ones((B, 3)), np.ones((B, 4), bool), np.ones((1, 3, 3), bool)]
)
def test_a_mask_that_does_not_fit_is_refused(mask):
  with pytest.raises(ValueError, match=r'mask of .*expected bool \(2, 3\)'):
    mod_jax_kernels.route_scores(*draw(3), mask)
