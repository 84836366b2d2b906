"""Kernels of `route_scores`: interpreted, and compiled for what is not here."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax_kernels
from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles

TOLERANCE = {'float32': 1e-5, 'bfloat16': 1e-2}

needs_triton = pytest.mark.skipif(
  importlib.util.find_spec('triton') is None, reason='triton is not installed'
)
BACKENDS = ['pallas', pytest.param('triton', marks=needs_triton)]


def draw(shape, dtype='float32', scale=1.0):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.array(factor * rng.normal(size=shape), dtype)
    for factor in (scale, scale, 1.0)
  )


def tokens(batch, length):
  """Draws a mask whose first row begins with a token that is not real."""
  valid = np.random.default_rng(1).random((batch, length)) < 0.6
  valid[0, 0], valid[:, -1] = False, True
  return jnp.array(valid)


def results(implementation, inputs, mask, causal, scored=True):
  """Returns out, score and the gradients of a loss that reads them."""
  rng = np.random.default_rng(2)
  batch, length = inputs[0].shape[:2]
  along_out = jnp.array(rng.normal(size=inputs[0].shape), jnp.float32)
  along_score = jnp.array(10 * rng.normal(size=(batch, length)), jnp.float32)

  def loss(*inputs):
    out, score = mod_jax_kernels.route_scores(
      *inputs, mask, implementation, causal=causal
    )
    value = (out * along_out).sum()
    if scored:
      value += (score * along_score).sum()
    return value, (out, score)

  with dispatch.interpret():
    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    grads, (out, score) = run(*inputs)
  return {
    'out': out,
    'score': score,
    **{name: grad for name, grad in zip('qkv', grads, strict=True)},
  }


def compare(
  backend, shape, dtype='float32', *, masked=False, causal=False, **kwargs
):
  inputs = draw(shape, dtype)
  mask = tokens(*shape[:2]) if masked else None
  got = results(backend, inputs, mask, causal, **kwargs)
  want = results(
    'xla', [x.astype(jnp.float32) for x in inputs], mask, causal, **kwargs
  )
  for name, value in got.items():
    assert value.dtype == ('float32' if name == 'score' else dtype)
    exact = want[name]
    # Nothing is left as it was before: interpreters begin with NaN.
    assert jnp.isfinite(value).all(), name
    error = jnp.linalg.norm(value.astype(jnp.float32) - exact)
    # Of one token a query has no gradient, but what rounding leaves.
    size = jnp.maximum(jnp.linalg.norm(exact), 1)
    assert error / size < TOLERANCE[dtype], name
  np.testing.assert_allclose(got['score'].sum(axis=-1), 1, atol=1e-6)
  np.testing.assert_allclose(got['score'], want['score'], atol=1e-6, rtol=1e-5)
  if masked:
    np.testing.assert_array_equal(got['score'][~mask], 0)
    np.testing.assert_array_equal(got['k'][~mask], 0)
  return got


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize(
  ('shape', 'dtype', 'options'),
  [
    ((2, 1, 2, 32), 'float32', {}),
    ((2, 129, 2, 48), 'float32', {'masked': True, 'causal': True}),
    ((1, 197, 1, 128), 'bfloat16', {}),
  ],
)
def test_is_the_reference(backend, shape, dtype, options):
  # More than one block, and one that is not whole.
  with tiles.trying(block=128):
    compare(backend, shape, dtype, **options)


@needs_triton
@pytest.mark.parametrize(
  ('shape', 'dtype', 'options'),
  [
    ((1, 31, 1, 40), 'float32', {'causal': True}),
    ((1, 32, 3, 64), 'float32', {}),
    ((1, 33, 1, 16), 'float32', {'masked': True}),
    ((1, 65, 1, 64), 'bfloat16', {'causal': True}),
    ((1, 65, 1, 32), 'bfloat16', {'scored': False}),
    ((1, 1, 1, 96), 'bfloat16', {}),
  ],
)
def test_triton_at_more_sizes(shape, dtype, options):
  compare('triton', shape, dtype, **options)


@needs_triton
def test_blocks_of_queries_and_keys_may_differ():
  sizes = {
    'forward_queries': 16,
    'score_keys': 16,
    'dq_keys': 16,
    'dkv_queries': 16,
  }
  with tiles.trying(**sizes):
    compare('triton', (1, 33, 1, 16), causal=True)


# Hidden keys may have infinite weights, in rows that are then set to 0.
@pytest.mark.filterwarnings('ignore::RuntimeWarning')
@pytest.mark.parametrize('backend', BACKENDS)
def test_a_row_without_a_token_and_large_logits(backend):
  inputs = draw((2, 18, 1, 32), scale=60.0)
  logit = np.einsum('bqhc,bshc->bhqs', *inputs[:2]) / np.sqrt(32)
  assert logit.max() > 1e4
  assert logit.min() < -1e4
  mask = tokens(2, 18).at[1].set(False)
  got = results(backend, inputs, mask, causal=False)
  want = results('xla', inputs, mask, causal=False)
  assert all(jnp.isfinite(x).all() for x in got.values())
  for name, value in got.items():
    np.testing.assert_array_equal(value[1], 0, err_msg=name)
  # A float32 logit of 1e4 is only known to 1e-3.
  np.testing.assert_allclose(got['out'], want['out'], atol=5e-3)
  np.testing.assert_allclose(got['score'], want['score'], atol=1e-3)
  np.testing.assert_allclose(got['score'].sum(axis=-1), [1, 0], atol=1e-6)


def step(implementation, causal=False):
  def loss(q, k, v, mask):
    out, score = mod_jax_kernels.route_scores(
      q, k, v, mask, implementation, causal=causal
    )
    return (out.astype(jnp.float32) ** 2).sum() + (score**2).sum()

  return jax.grad(loss, (0, 1, 2))


def shapes(batch, length, heads, channels, dtype, masked=False):
  x = jax.ShapeDtypeStruct((batch, length, heads, channels), dtype)
  mask = jax.ShapeDtypeStruct((batch, length), bool) if masked else None
  return x, x, x, mask


def has_map(text, length):
  """Returns whether a program has arrays [.., length, length]."""
  return re.search(rf'(?<!\d){length}[x,]{length}(?!\d)', text) is not None


LARGE = shapes(8, 1024, 6, 64, 'bfloat16')


def test_compiles_for_hopper_without_a_map(for_hopper):
  text = for_hopper(step(None), *LARGE)
  # Forward, scores, and both sides of the gradient.
  assert text.count('stablehlo.custom_call') >= 4
  assert not has_map(text, 1024)
  assert has_map(jax.jit(step('xla')).lower(*LARGE).as_text(), 1024)


def test_compiles_for_hopper_with_masks(for_hopper):
  args = shapes(2, 197, 3, 48, 'bfloat16', masked=True)
  assert not has_map(for_hopper(step('triton', causal=True), *args), 197)


@needs_triton
def test_a_grid_counts_in_its_first_dimension_only():
  # CUDA counts the others to 65535.
  pytest.importorskip('jax_triton')
  args = shapes(70_000, 40, 2, 16, 'bfloat16')
  text = str(jax.make_jaxpr(step('triton'))(*args))
  grids = re.findall(r'grid=\(([^)]*)\)', text)
  assert len(grids) == 4
  assert {grid.rstrip(',').count(',') for grid in grids} == {0}


def test_compiles_for_tpu_without_a_map(for_tpu):
  program = for_tpu(step(None), *LARGE)
  assert program.as_text().count('tpu_custom_call') >= 4
  assert not has_map(program.as_text(), 1024)


def test_compiles_for_tpu_with_masks(for_tpu):
  args = shapes(2, 197, 3, 48, 'float32', masked=True)
  assert not has_map(for_tpu(step('pallas', causal=True), *args).as_text(), 197)


@pytest.mark.parametrize('gradient', [False, True])
def test_one_trace_has_a_map_on_a_cpu_and_none_on_a_tpu(gradient):
  # The choice is made at lowering, and needs no compiler to be seen.
  function = step(None) if gradient else mod_jax_kernels.route_scores
  traced = jax.jit(function).trace(*shapes(2, 150, 2, 32, 'float32'))
  assert has_map(traced.lower().as_text(), 150)
  text = traced.lower(lowering_platforms=('tpu',)).as_text()
  assert 'tpu_custom_call' in text
  assert not has_map(text, 150)


@pytest.mark.parametrize(
  ('backend', 'message'),
  [
    ('pallas', "'pallas' runs on a TPU only"),
    pytest.param(
      'triton', "'triton' runs on an NVIDIA GPU only", marks=needs_triton
    ),
  ],
)
def test_a_kernel_asked_for_by_name_does_not_run_on_a_cpu(backend, message):
  with pytest.raises(RuntimeError, match=message):
    mod_jax_kernels.route_scores(*draw((1, 4, 1, 32)), implementation=backend)


@pytest.mark.parametrize(
  ('shape', 'dtype', 'mask', 'message'),
  [
    ((1, 4, 1, 32), 'float32', (1, 4, 4), "'pallas' takes no mask of queries"),
    ((1, 4, 1, 192), 'float32', None, 'heads of 192 channels, 128 at most'),
    ((1, 4, 1, 32), 'float16', None, 'of float16, float16, float16: cast'),
    ((1, 0, 1, 32), 'float32', None, r'empty arrays \(1, 0, 1, 32\)'),
  ],
)
def test_what_no_kernel_takes_is_refused_by_name_only(
  shape, dtype, mask, message
):
  inputs = draw(shape, dtype)
  mask = None if mask is None else jnp.ones(mask, bool)
  with pytest.raises(ValueError, match=message):
    mod_jax_kernels.route_scores(*inputs, mask, 'pallas')
  if inputs[0].size:
    text = str(jax.make_jaxpr(mod_jax_kernels.route_scores)(*inputs, mask))
    assert 'pallas_call' not in text
    assert 'dot_general' in text


def test_without_triton_nothing_of_it_is_traced(monkeypatch):
  monkeypatch.setattr(
    dispatch, 'missing', lambda name: name if name == 'triton' else None
  )
  text = str(jax.make_jaxpr(mod_jax_kernels.route_scores)(*draw((1, 4, 1, 32))))
  assert 'pallas_call' in text
  assert 'triton' not in text
  with pytest.raises(RuntimeError, match="'triton' needs triton"):
    mod_jax_kernels.route_scores(*draw((1, 4, 1, 32)), implementation='triton')
