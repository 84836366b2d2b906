"""The attention operation, against a loop over queries in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax_kernels
from mod_jax_kernels import dispatch
from mod_jax_kernels.attention import OP
from mod_jax_kernels.attention import choice
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


def error(found, expected):
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def documents(length):
  """Three documents in the first row, one in the second."""
  first = np.repeat([0, 1, 2], [3, length // 2, length - length // 2 - 3])
  return jnp.array([first, np.full(length, 7)], jnp.int32)


def test_segments_hide_other_documents():
  length = 9
  q, k, v = draw(length, length)
  segment = documents(length)
  same = np.asarray(segment)[:, :, None] == np.asarray(segment)[:, None]
  out = attention(q, k, v, segment_BL=segment)
  np.testing.assert_allclose(out, oracle(q, k, v, same), atol=1e-5)

  mask = np.random.default_rng(1).random(same.shape) < 0.5
  mask |= np.eye(length, dtype=bool)
  out = attention(q, k, v, jnp.array(mask), segment_BL=segment, causal=True)
  seen = same & mask & lower_triangle(length)
  np.testing.assert_allclose(out, oracle(q, k, v, seen), atol=1e-5)


@pytest.mark.parametrize(
  ('queries', 'keys', 'causal', 'segmented', 'dtype'),
  [
    (130, 130, True, True, 'float32'),
    (3, 140, False, False, 'float32'),
    (128, 128, True, False, 'bfloat16'),
  ],
)
def test_splash_equals_the_reference(queries, keys, causal, segmented, dtype):
  arrays = draw(queries, keys, channels=8, dtype=dtype)
  segment = documents(queries) if segmented else None

  def run(implementation, *arrays):
    def loss(*arrays):
      out = mod_jax_kernels.attention(
        *arrays,
        causal=causal,
        segment_BL=segment,
        implementation=implementation,
      )
      assert out.dtype == arrays[0].dtype
      return jnp.sum(jnp.sin(3 * out.astype(jnp.float32))), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)

  with dispatch.interpret():
    found = run('splash', *arrays)
  expected = run('xla', *(x.astype(jnp.float32) for x in arrays))
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert error(a, b) < {'float32': 1e-5, 'bfloat16': 1e-2}[dtype]


def test_splash_compiles_for_tpu(for_tpu):
  q = jax.ShapeDtypeStruct((1, 2048, 8, 128), jnp.bfloat16)
  kv = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)

  def loss(*arrays):
    out = mod_jax_kernels.attention(
      *arrays, causal=True, implementation='splash'
    )
    return jnp.sum(out.astype(jnp.float32) ** 2)

  text = for_tpu(jax.value_and_grad(loss, (0, 1, 2)), q, kv, kv).as_text()
  # Forward, and backward for the queries and for the keys and values.
  assert text.count('tpu_custom_call') == 3
  assert '2048,2048' not in text


def fitting(monkeypatch, platform, x, mask=None, segment=None, version=9.0):
  """Returns the backend for q, k and v like x, on another platform."""
  monkeypatch.setattr(choice, 'platform', lambda: platform)
  monkeypatch.setattr(choice, 'capability', lambda: version)
  return OP.choose(None, x, x, x, mask, segment)[0]


@pytest.mark.parametrize(
  ('platform', 'change', 'expected'),
  [
    ('cpu', {}, 'xla'),
    ('rocm', {}, 'xla'),
    ('tpu', {}, 'splash'),
    ('tpu', {'dtype': 'float32'}, 'splash'),
    ('tpu', {'dtype': 'float16'}, 'xla'),
    ('tpu', {'length': 250}, 'xla'),
    ('tpu', {'segmented': True}, 'splash'),
    ('tpu', {'masked': True}, 'xla'),
    ('cuda', {}, 'cudnn'),
    ('cuda', {'dtype': 'float32'}, 'xla'),
    ('cuda', {'channels': 12}, 'xla'),
    ('cuda', {'channels': 264}, 'xla'),
    ('cuda', {'masked': True}, 'cudnn'),
    ('cuda', {'length': 251}, 'cudnn'),
    ('cuda', {'length': 251, 'masked': True}, 'xla'),
    ('cuda', {'length': 251, 'segmented': True}, 'xla'),
  ],
)
def test_the_fitting_backend(platform, change, expected, monkeypatch):
  options = {'length': 256, 'channels': 64, 'dtype': 'bfloat16'} | change
  length = options['length']
  shape = 2, length, 4, options['channels']
  x = jax.ShapeDtypeStruct(shape, options['dtype'])
  mask = None
  if 'masked' in change:
    mask = jax.ShapeDtypeStruct((2, length, length), bool)
  segment = jax.ShapeDtypeStruct((2, length), jnp.int32)
  segment = segment if 'segmented' in change else None
  assert fitting(monkeypatch, platform, x, mask, segment) == expected


@pytest.mark.parametrize(('capability', 'most'), [(9.0, 256), (8.0, 128)])
def test_older_gpus_take_narrower_heads(capability, most, monkeypatch):
  for channels, expected in ((most, 'cudnn'), (most + 8, 'xla')):
    x = jax.ShapeDtypeStruct((1, 4, 2, channels), jnp.bfloat16)
    assert fitting(monkeypatch, 'cuda', x, version=capability) == expected
  assert fitting(monkeypatch, 'cuda', x, version=7.5) == 'xla'


@pytest.mark.parametrize(
  ('platform', 'alone'), [('tpu', 'splash'), ('cuda', 'cudnn')]
)
def test_nothing_is_left_to_the_compiler_to_split(platform, alone, monkeypatch):
  x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
  auto = jax.sharding.AxisType.Auto
  found = {}
  for size in (1, 2):
    mesh = jax.sharding.AbstractMesh((size,), ('data',), (auto,))
    with jax.sharding.use_abstract_mesh(mesh):
      found[size] = fitting(monkeypatch, platform, x)
  assert found == {1: alone, 2: 'xla'}


@pytest.mark.parametrize(
  ('implementation', 'change', 'message'),
  [
    ('splash', {'mask': True}, 'takes no mask_BQS: use causal=True and segm'),
    ('splash', {'dtype': 'float16'}, 'bfloat16 or float32, not float16'),
    ('cudnn', {'dtype': 'float32'}, 'bfloat16 or float16, not float32'),
    ('cudnn', {'channels': 6}, 'multiple of 8 channels up to 256, not 6'),
  ],
)
def test_says_what_a_backend_lacks(implementation, change, message):
  options = {'mask': None, 'dtype': 'bfloat16', 'channels': 8} | change
  mask = options.pop('mask') and jnp.ones((2, 4, 4), bool)
  q, k, v = draw(4, 4, **options)
  with pytest.raises(ValueError, match=message):
    mod_jax_kernels.attention(q, k, v, mask, implementation=implementation)


@pytest.mark.parametrize(
  'segment', [np.zeros((2, 3), np.int32), np.zeros((2, 4), np.float32)]
)
def test_refuses_segments_that_do_not_fit(segment):
  q, k, v = draw(4, 4)
  with pytest.raises(ValueError, match='expected an integer for each query'):
    mod_jax_kernels.attention(q, k, v, segment_BL=jnp.asarray(segment))


@pytest.mark.parametrize('implementation', ['cudnn', 'splash'])
@pytest.mark.parametrize('differentiated', [False, True])
def test_a_backend_asked_for_by_name_runs_or_raises(
  implementation, differentiated
):
  if jax.default_backend() != 'cpu':
    pytest.skip('It may run here.')
  q, k, v = draw(4, 4, channels=8, dtype='bfloat16')

  def run(q):
    return mod_jax_kernels.attention(
      q, k, v, causal=True, implementation=implementation
    ).sum()

  run = jax.jit(jax.grad(run) if differentiated else run)
  with pytest.raises(RuntimeError, match=f'{implementation!r}.*GPU|TPU only'):
    run(q)
