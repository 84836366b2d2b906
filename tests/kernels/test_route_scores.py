"""Attention that also tells how much attention each token received."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from op_tests import Case, OpTests, Target
import pytest

from mod_jax_kernels import route_scores

pytestmark = pytest.mark.slow

PALLAS = ('pallas',)
XLA = ('xla',)


def draw(
  seed=0,
  shape=(2, 5, 2, 32),
  dtype='float32',
  masked=None,
  causal=False,
  scale=1.0,
):
  """Returns q, k, v and a mask, of `tokens`, of `pairs` or None."""
  rng = np.random.default_rng(seed)
  q, k, v = (
    jnp.array(factor * rng.normal(size=shape), dtype)
    for factor in (scale, scale, 1.0)
  )
  batch, length = shape[:2]
  mask = None
  if masked == 'tokens':
    mask = rng.random((batch, length)) < 0.6
    # The first row begins with a token that is not real.
    mask[0, 0], mask[:, -1] = False, True
  if masked == 'pairs':
    mask = rng.random((batch, length, length)) < 0.5
    mask |= np.eye(length, dtype=bool)
    # Queries that see no key take no part.
    mask[0, 2] = mask[1, :3] = False
  if masked == 'all':
    mask = np.zeros((batch, length, length), bool)
  arrays = [q, k, v, None if mask is None else jnp.array(mask)]
  return arrays, {'causal': causal}


def plain(q_BQHC, k_BSHC, v_BSHC, mask, causal):
  """The whole map, and the means of its columns."""
  _, length, heads, channels = q_BQHC.shape
  seen_BQS = jnp.ones((1, length, length), bool)
  if causal:
    seen_BQS = jnp.tril(seen_BQS)
  if mask is not None and mask.ndim == 2:
    mask = mask[:, :, None] & mask[:, None, :]
  if mask is not None:
    seen_BQS = seen_BQS & mask
  logit_BHQS = jnp.einsum('BQHC,BSHC->BHQS', q_BQHC, k_BSHC) / channels**0.5
  logit_BHQS = jnp.where(seen_BQS[:, None], logit_BHQS, -1e30)
  weight_BHQS = jax.nn.softmax(logit_BHQS) * seen_BQS[:, None]
  queries_B = seen_BQS.any(axis=-1).sum(axis=-1)
  score_BS = weight_BHQS.sum(axis=(1, 2)) / heads
  score_BS /= jnp.maximum(queries_B, 1)[:, None]
  return jnp.einsum('BHQS,BSHC->BQHC', weight_BHQS, v_BSHC), score_BS


def shapes(batch, length, heads, channels, dtype, masked=False):
  x = jax.ShapeDtypeStruct((batch, length, heads, channels), dtype)
  mask = jax.ShapeDtypeStruct((batch, length), bool) if masked else None
  return x, x, x, mask


def maps(length):
  """Returns a pattern of arrays [.., length, length] in a program's text."""
  return rf'(?<!\d){length}[x,]{length}(?!\d)'


class TestRouteScores(OpTests):
  name = 'route_scores'
  inputs = 3
  dtypes = (None, 'float32')
  # The gradients of scores, which are means, are small.
  weights = (1.0, 10.0)
  draw = staticmethod(draw)
  plain = staticmethod(plain)
  cases = (
    Case('tokens and causal', masked='tokens', causal=True),
    Case('one token', shape=(2, 1, 2, 32)),
    # Lengths of several blocks, the last of them not full, and blocks that hold
    # the whole row. Triton's interpreter is slow, so it gets shorter rows.
    *(
      Case(name + kind, backends=PALLAS, sizes=sizes, **options)
      for name, options in {
        'long': {
          **{'shape': (2, 129, 2, 48), 'masked': 'tokens', 'causal': True}
        },
        'bfloat16': {'shape': (1, 197, 1, 128), 'dtype': 'bfloat16'},
      }.items()
      for kind, sizes in {
        ', blocks': {'block': 128, 'row': 0},
        ', whole rows': {},
      }.items()
    ),
    # Rows that are interleaved, in groups of heads or all of them.
    Case('interleaved', backends=PALLAS, shape=(8, 9, 3, 48), masked='tokens'),
    Case(
      'interleaved, bfloat16',
      backends=PALLAS,
      shape=(32, 21, 4, 64),
      dtype='bfloat16',
      masked='tokens',
      causal=True,
    ),
    *(
      Case(str(options), backends=['triton'], **options)
      for options in [
        {'shape': (1, 31, 1, 40), 'causal': True},
        {'shape': (1, 32, 3, 64)},
        {'shape': (1, 33, 1, 16), 'masked': 'tokens'},
        {'shape': (1, 65, 1, 64), 'dtype': 'bfloat16', 'causal': True},
        {'shape': (1, 1, 1, 96), 'dtype': 'bfloat16'},
      ]
    ),
    Case(
      'blocks of queries and keys that differ',
      backends=['triton'],
      sizes={
        **{'forward_queries': 16, 'score_keys': 16},
        **{'dq_keys': 16, 'dkv_queries': 16},
      },
      shape=(1, 33, 1, 16),
      causal=True,
    ),
    Case('causal alone', backends=XLA, causal=True),
    Case('tokens alone', backends=XLA, masked='tokens'),
    Case('pairs', backends=XLA, masked='pairs'),
    Case('pairs, bfloat16', backends=XLA, masked='pairs', dtype='bfloat16'),
    Case('pairs and causal', backends=XLA, masked='pairs', causal=True),
    Case('nobody sees anything', backends=XLA, masked='all'),
    Case('only out is read', weights=(1.0, 0.0), masked='tokens', causal=True),
    Case('only scores are read', weights=(0.0, 10.0), backends=XLA),
  )
  refused = (
    ({0: np.zeros((2, 4, 2, 32), np.float32)}, r'q \(2, 4, 2, 32\).*one'),
    ({2: np.zeros((2, 5, 2, 1), np.float32)}, 'one shape'),
    (dict.fromkeys(range(3), np.zeros((2, 0, 2, 32))), 'one token at least'),
    *(
      ({3: mask}, r'mask of .*expected bool \(2, 5\)')
      for mask in (np.ones((2, 5)), np.ones((2, 4), bool))
    ),
  )
  lacking = (
    ('pallas', {'masked': 'pairs'}, 'takes no mask of queries'),
    ('pallas', {'shape': (1, 4, 1, 192)}, 'heads of 192 channels, 128 at most'),
    ('pallas', {'dtype': 'float16'}, 'not float16, float16, float16: cast'),
    ('triton', {'dtype': 'float16'}, 'not float16, float16, float16: cast'),
    ('pallas', {'shape': (0, 4, 1, 32)}, r'empty arrays \(0, 4, 1, 32\)'),
  )
  # Forward, scores, and both sides of the gradient; on a TPU one kernel each
  # way where a row fits.
  targets = tuple(
    Target(platform=platform, calls=calls, **program)
    for program, all_calls in [
      (
        {'args': shapes(8, 1024, 6, 64, 'bfloat16'), 'without': maps(1024)},
        {'tpu': 4, 'cuda': 4},
      ),
      (
        {
          'args': shapes(2, 197, 3, 48, 'float32', masked=True),
          'static': {'causal': True},
          'without': maps(197),
        },
        {'tpu': 2, 'cuda': 4},
      ),
      (
        {'args': shapes(16, 197, 4, 64, 'bfloat16', masked=True)},
        {'tpu': 2},
      ),
    ]
    for platform, calls in all_calls.items()
  )

  # Hidden keys may have infinite weights, in rows that are then set to 0.
  @pytest.mark.filterwarnings('ignore::RuntimeWarning')
  def test_a_row_without_a_token_and_large_logits(self, backend):
    arrays, static = draw(shape=(2, 18, 1, 32), scale=60.0, masked='tokens')
    logit = np.einsum('bqhc,bshc->bhqs', *arrays[:2]) / np.sqrt(32)
    assert logit.max() > 1e4
    assert logit.min() < -1e4
    arrays[3] = arrays[3].at[1].set(False)
    got = self.run(backend, arrays, static)
    want = self.run('plain', arrays, static)
    assert all(jnp.isfinite(x).all() for x in got.values())
    for name, value in got.items():
      np.testing.assert_array_equal(value[1], 0, err_msg=name)
    for name in ('result 1', 'gradient 1', 'gradient 2'):
      hidden = got[name][~np.asarray(arrays[3])]
      np.testing.assert_array_equal(hidden, 0, err_msg=name)
    # A float32 logit of 1e4 is only known to 1e-3.
    for name, limit in (('result 0', 5e-3), ('result 1', 1e-3)):
      np.testing.assert_allclose(got[name], want[name], atol=limit)
    np.testing.assert_allclose(got['result 1'].sum(axis=-1), [1, 0], atol=1e-6)


@pytest.mark.parametrize('gradient', [False, True])
def test_scores_are_summed_exactly_on_accelerators_too(gradient, equations):
  # Those round the factors of a float32 product unless told otherwise; then
  # the scores do not even add up to 1, and near ties fall the wrong way.
  def function(q, k, v):
    return route_scores(q, k, v, implementation='xla')

  inputs = draw()[0][:3]
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


def test_one_trace_has_a_map_on_a_cpu_and_none_on_a_tpu():
  # The choice is made at lowering, and needs no compiler to be seen.
  function = jax.grad(TestRouteScores.loss, (0, 1, 2))
  traced = jax.jit(function).trace(*shapes(2, 150, 2, 32, 'float32'))
  pattern = maps(150)
  assert re.search(pattern, traced.lower().as_text())
  text = traced.lower(lowering_platforms=('tpu',)).as_text()
  assert 'tpu_custom_call' in text
  assert not re.search(pattern, text)


def test_a_grid_counts_in_its_first_dimension_only():
  # CUDA counts the others to 65535.
  pytest.importorskip('jax_triton')
  function = jax.grad(TestRouteScores.loss, (0, 1, 2))
  args = shapes(70_000, 40, 2, 16, 'bfloat16')
  jaxpr = jax.make_jaxpr(lambda *x: function(*x, implementation='triton'))(
    *args
  )
  grids = re.findall(r'grid=\(([^)]*)\)', str(jaxpr))
  assert len(grids) == 4
  assert {grid.rstrip(',').count(',') for grid in grids} == {0}
