"""The attention operation, against a loop over queries in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax_kernels
from mod_jax_kernels.attention import reference

TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-2}

attention = jax.jit(
  mod_jax_kernels.attention, static_argnames=('causal', 'implementation')
)


def draw(queries, keys, heads=4, groups=2, channels=6, dtype='float32'):
  rng = np.random.default_rng(0)
  shapes = (queries, heads), (keys, groups), (keys, groups)
  return tuple(
    jnp.array(rng.normal(size=(2, length, count, channels)), dtype)
    for length, count in shapes
  )


def oracle(q_BQHC, k_BSGC, v_BSGC, mask_BQS):
  q, k, v = (np.asarray(x, np.float64) for x in (q_BQHC, k_BSGC, v_BSGC))
  out = np.zeros(q.shape)
  share = q.shape[2] // k.shape[2]
  for b, i, h in np.ndindex(q.shape[:3]):
    seen = np.flatnonzero(mask_BQS[b, i])
    score = k[b, seen, h // share] @ q[b, i, h] / np.sqrt(q.shape[-1])
    weight = np.exp(score - score.max())
    out[b, i, h] = weight / weight.sum() @ v[b, seen, h // share]
  return out


def lower_triangle(length):
  return np.broadcast_to(np.tri(length, dtype=bool), (2, length, length))


@pytest.mark.parametrize(
  ('queries', 'keys', 'groups', 'dtype'),
  [
    (5, 5, 1, 'float32'),
    (3, 7, 2, 'float32'),
    (1, 4, 4, 'float32'),
    (3, 7, 2, 'bfloat16'),
  ],
)
def test_masked(queries, keys, groups, dtype):
  q, k, v = draw(queries, keys, groups=groups, dtype=dtype)
  mask = np.random.default_rng(1).random((2, queries, keys)) < 0.5
  mask[..., 0] = True
  out = attention(q, k, v, jnp.array(mask))
  assert out.dtype == dtype
  np.testing.assert_allclose(
    out.astype(jnp.float32),
    oracle(q, k, v, mask),
    atol=TOLERANCE[dtype],
    rtol=TOLERANCE[dtype],
  )


@pytest.mark.parametrize('length', [1, 9, 128, 300])
def test_causal(length):
  q, k, v = draw(length, length, channels=2)
  out = attention(q, k, v, causal=True)
  expected = oracle(q, k, v, lower_triangle(length))
  np.testing.assert_allclose(out, expected, atol=1e-5)


def test_causal_and_masked_over_several_blocks():
  length = 150
  q, k, v = draw(length, length, channels=2)
  mask = np.random.default_rng(1).random((2, length, length)) < 0.5
  mask |= np.eye(length, dtype=bool)
  out = attention(q, k, v, jnp.array(mask), causal=True)
  expected = oracle(q, k, v, mask & lower_triangle(length))
  np.testing.assert_allclose(out, expected, atol=1e-5)


def test_blocks_change_neither_values_nor_gradients(monkeypatch):
  q, k, v = draw(150, 150, channels=2)

  def run():
    def loss(q, k, v):
      out = reference.attention(q, k, v, causal=True)
      return jnp.sum(jnp.sin(out) * jnp.arange(150.0)[:, None, None]), out

    traced = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)).trace(q, k, v)
    return traced.lower().compile()(q, k, v), len(str(traced.jaxpr))

  blocked, blocked_size = run()
  monkeypatch.setattr(reference, '_LEAST', 1000)
  whole, whole_size = run()
  assert blocked_size != whole_size  # Else one thing is compared with itself.
  pairs = zip(jax.tree.leaves(blocked), jax.tree.leaves(whole), strict=True)
  for a, b in pairs:
    np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_later_keys_change_nothing():
  q, k, v = draw(140, 140, channels=2)
  other_k, other_v = k.at[:, 100:].add(1), v.at[:, 100:].add(1)
  before = attention(q, k, v, causal=True)
  after = attention(q, other_k, other_v, causal=True)
  np.testing.assert_array_equal(before[:, :100], after[:, :100])
  assert (before[:, 100:] != after[:, 100:]).any()


def test_a_query_that_sees_nothing_is_finite_and_leaves_others_alone():
  q, k, v = draw(4, 4)
  mask = np.array(lower_triangle(4))
  mask[:, 1] = False
  mask[:, 0] = False

  def loss(q, k, v):
    out = attention(q, k, v, jnp.array(mask), causal=True)
    return jnp.sum(out[:, 2:] ** 2), out

  grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  assert all(jnp.isfinite(x).all() for x in (*grads, out))
  expected = oracle(q[:, 2:], k, v, mask[:, 2:])
  np.testing.assert_allclose(out[:, 2:], expected, atol=1e-5)
  assert not grads[0][:, :2].any()

  # Not even where the loss reads those queries.
  grads = jax.grad(lambda *x: jnp.sum(loss(*x)[1] ** 2), (0, 1, 2))(q, k, v)
  assert all(jnp.isfinite(x).all() for x in grads)


def test_scores_are_float32_under_bfloat16():
  # Two keys whose scores differ by less than bfloat16 resolves at 16: with
  # rounded scores both would weigh the same.
  q = jnp.full((1, 1, 1, 4), 4.0, jnp.bfloat16)
  k = jnp.array([[2.0] * 4, [2.0] * 3 + [2.015625]], jnp.bfloat16)
  v = jnp.array([[0.0] * 4, [1.0] * 4], jnp.bfloat16)
  score = np.asarray(k, np.float32) @ np.full(4, 4.0) / 2
  assert jnp.bfloat16(score[0]) == jnp.bfloat16(score[1])
  out = attention(q, k[None, :, None], v[None, :, None])
  expected = np.exp(score[1]) / np.exp(score).sum()
  assert float(out[0, 0, 0, 0]) == pytest.approx(expected, abs=2e-3)
  assert float(out[0, 0, 0, 0]) > 0.505


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'groups': 3}, 'number of heads that theirs divides'),
    ({'keys': 5, 'causal': True}, 'as many queries as keys, got 4 and 5'),
    ({'implementation': 'flash'}, "implementation='flash'"),
  ],
)
def test_refuses_what_does_not_fit(change, message):
  options = {'groups': 2, 'keys': 4, 'causal': False, 'implementation': None}
  options |= change
  q, k, v = draw(4, options.pop('keys'), groups=options.pop('groups'))
  with pytest.raises(ValueError, match=message):
    mod_jax_kernels.attention(q, k, v, **options)


def test_a_backend_asked_for_by_name_runs_or_raises():
  if jax.default_backend() == 'gpu':
    pytest.skip('A GPU may run it.')
  q, k, v = draw(4, 4, dtype='bfloat16')
  with pytest.raises(Exception, match='(?i)cudnn|cuda|gpu'):
    mod_jax_kernels.attention(q, k, v, causal=True, implementation='cudnn')
