"""The attention operation: whom a query sees, and which library computes it."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from op_tests import Case, OpTests, Target
import pytest

import mod_jax_kernels
from mod_jax_kernels import dispatch
from mod_jax_kernels.attention import OP, choice, reference

pytestmark = pytest.mark.slow

XLA = ('xla',)
SPLASH = ('splash',)
TRITON = ('triton',)
# Lengths of several blocks of causal attention, and of several documents.
SEVERAL = {'queries': 150, 'keys': 150}
DOCUMENTS = {'queries': 9, 'keys': 9, 'segmented': True}


def draw(
  seed=0,
  queries=4,
  keys=4,
  groups=4,
  channels=8,
  dtype='bfloat16',
  masked=None,
  causal=False,
  segmented=False,
):
  """Returns q, k, v, mask_BQS or None, and segment_BL or None.

  `masked` is the number of sequences and of queries that the mask tells apart.
  """
  rng = np.random.default_rng(seed)
  q, k, v = (
    jnp.array(rng.normal(size=(2, length, heads, channels)), dtype)
    for length, heads in ((queries, 4), (keys, groups), (keys, groups))
  )
  mask = segment = None
  if masked:
    # Each query sees a key, and under a causal mask too: itself or the first.
    own = np.eye(masked[1], keys, dtype=bool)
    mask = jnp.array((rng.random((*masked, keys)) < 0.5) | own)
  if segmented:
    # Three documents in the first row, one in the second.
    counts = [3, queries // 2, queries - queries // 2 - 3]
    first = np.repeat([0, 1, 2], counts)
    segment = jnp.array([first, np.full(queries, 7)], jnp.int32)
  return [q, k, v, mask, segment], {'causal': causal}


def plain(q_BQHC, k_BSGC, v_BSGC, mask_BQS, segment_BL, causal=False):
  """Softmax over the keys that a query sees, of each head."""
  queries, heads, channels = q_BQHC.shape[1:]
  keys, groups = k_BSGC.shape[1:3]
  k_BSHC, v_BSHC = (
    jnp.repeat(x, heads // groups, axis=2) for x in (k_BSGC, v_BSGC)
  )
  seen_BQS = jnp.ones((1, queries, keys), bool)
  if causal:
    seen_BQS = jnp.tril(seen_BQS)
  if mask_BQS is not None:
    seen_BQS = seen_BQS & mask_BQS
  if segment_BL is not None:
    seen_BQS = seen_BQS & (segment_BL[:, :, None] == segment_BL[:, None])
  logit_BHQS = jnp.einsum('BQHC,BSHC->BHQS', q_BQHC, k_BSHC) / channels**0.5
  weight_BHQS = jax.nn.softmax(
    jnp.where(seen_BQS[:, None], logit_BHQS, -jnp.inf)
  )
  return jnp.einsum('BHQS,BSHC->BQHC', weight_BHQS, v_BSHC)


class TestAttention(OpTests):
  name = 'attention'
  inputs = 3
  draw = staticmethod(draw)
  plain = staticmethod(plain)
  cases = (
    Case('small', causal=True, dtype='float32'),
    Case('bfloat16', backends=XLA + SPLASH, causal=True, groups=2),
    *(
      Case(name, backends=XLA, masked=masked, dtype='float32', **options)
      for name, masked, options in [
        ('one group', (2, 5), {'queries': 5, 'keys': 5, 'groups': 1}),
        ('more keys', (2, 3), {'queries': 3, 'keys': 7, 'groups': 2}),
        ('a group for each head', (2, 1), {'queries': 1}),
        ('masked blocks', (2, 150), SEVERAL | {'causal': True}),
        ('one mask for all queries', (2, 1), SEVERAL),
        ('one mask for all sequences', (1, 150), SEVERAL),
        ('one mask for all', (1, 1), SEVERAL | {'causal': True}),
        ('segments', (2, 9), DOCUMENTS),
        ('all', (2, 9), DOCUMENTS | {'causal': True}),
      ]
    ),
    *(
      Case(f'causal {n}', causal=True, queries=n, keys=n, dtype='float32')
      for n in (1, 300)
    ),
    Case('odd', backends=XLA + TRITON, queries=21, keys=21, dtype='float32'),
    Case('filled up', backends=SPLASH, queries=3, keys=140, dtype='float32'),
    Case(
      'documents',
      backends=XLA + SPLASH,
      **{'queries': 130, 'keys': 130, 'causal': True, 'segmented': True},
      dtype='float32',
    ),
  )
  refused = (
    (
      dict.fromkeys((1, 2), np.zeros((2, 4, 3, 8), np.float32)),
      'number of heads that theirs divides',
    ),
    (
      dict.fromkeys((1, 2), np.zeros((2, 4, 2, 6))),
      'batch and the channels of q',
    ),
    # An additive mask reads as the opposite of what it means.
    *(
      ({3: mask}, r'expected booleans \[2, 4, 4\]')
      for mask in (np.zeros((2, 4, 4), np.float32), np.ones((2, 4, 5), bool))
    ),
    (
      dict.fromkeys((1, 2), np.zeros((2, 5, 2, 8))) | {'causal': True},
      'as many queries as keys, got 4 and 5',
    ),
    ({4: np.zeros((2, 3), np.int32)}, 'expected an integer for each query'),
  )
  lacking = (
    ('splash', {'masked': (2, 4)}, 'takes no mask_BQS: use causal=True'),
    ('splash', {'dtype': 'float16'}, 'float32 or bfloat16, not float16'),
    ('cudnn', {'dtype': 'float32'}, 'bfloat16 or float16, not float32'),
    ('triton', {'masked': (2, 4)}, 'takes no mask_BQS and no segm'),
    (
      'triton',
      {'groups': 2},
      r'takes q and k of one shape, not \(2, 4, 4, 8\) and',
    ),
    ('triton', {'channels': 136}, 'takes no heads of 136 channels'),
    ('cudnn', {'channels': 6}, 'multiple of 8 channels up to 256, not 6'),
  )
  # Forward, and backward for the queries and for the keys and values.
  targets = (
    Target(
      platform='tpu',
      args=tuple(
        jax.ShapeDtypeStruct((1, 2048, heads, 128), jnp.bfloat16)
        for heads in (8, 2, 2)
      ),
      static={'causal': True, 'implementation': 'splash'},
      calls=3,
      # XLA's causal attention takes a quarter of the queries at a time.
      without=r'(?<!\d)(512|2048)[x,]2048(?!\d)',
    ),
  )

  @staticmethod
  def call(q, k, v, mask=None, segment=None, **static):
    return mod_jax_kernels.attention(
      q, k, v, mask, segment_BL=segment, **static
    )


def test_a_causal_call_multiplies_no_keys_that_nobody_sees(equations):
  q, k, v, *_ = draw(**SEVERAL)[0]
  causal = functools.partial(reference.attention, causal=True)
  products = [
    equation.outvars[0].aval.shape
    for equation in equations(jax.make_jaxpr(causal)(q, k, v, None, None).jaxpr)
    if equation.primitive.name == 'dot_general'
  ]
  keys = [shape[-1] for shape in products if shape[-1] != 8]
  assert keys == [64, 128, 150]


@pytest.mark.parametrize(
  ('queries', 'keys', 'causal'), [(0, 0, True), (0, 4, False), (3, 0, False)]
)
def test_no_queries_or_no_keys(queries, keys, causal):
  arrays, static = draw(queries=queries, keys=keys, causal=causal)
  out = TestAttention.call(*arrays, **static)
  assert out.shape == arrays[0].shape
  assert not out.any()


def test_a_query_that_sees_nothing_is_finite_and_leaves_others_alone():
  arrays, static = draw(masked=(2, 4), causal=True, dtype='float32')
  arrays[3] = arrays[3].at[:, :2].set(False)

  def grads(function, along_Q):
    def loss(*inputs):
      out = function(*inputs, *arrays[3:], **static)
      return jnp.sum((out * along_Q[:, None, None]) ** 2), out

    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays[:3])

  seeing_Q = jnp.arange(4) >= 2
  got, out = grads(TestAttention.call, seeing_Q)
  assert all(jnp.isfinite(x).all() for x in (*got, out))
  expected = plain(*arrays, **static)
  np.testing.assert_allclose(out[:, 2:], expected[:, 2:], atol=1e-5)
  assert not got[0][:, :2].any()
  # Not even where the loss reads those queries.
  got, _ = grads(TestAttention.call, jnp.ones(4))
  assert all(jnp.isfinite(x).all() for x in got)


def test_scores_are_float32_under_bfloat16():
  # Two keys whose scores differ by less than bfloat16 resolves at 16: with
  # rounded scores both would weigh the same.
  q = jnp.full((1, 1, 1, 4), 4.0, jnp.bfloat16)
  k = jnp.array([[2.0] * 4, [2.0] * 3 + [2.015625]], jnp.bfloat16)
  v = jnp.array([[0.0] * 4, [1.0] * 4], jnp.bfloat16)
  score = np.asarray(k, np.float32) @ np.full(4, 4.0) / 2
  assert jnp.bfloat16(score[0]) == jnp.bfloat16(score[1])
  out = mod_jax_kernels.attention(q, k[None, :, None], v[None, :, None])
  expected = np.exp(score[1]) / np.exp(score).sum()
  assert float(out[0, 0, 0, 0]) == pytest.approx(expected, abs=2e-3)
  assert float(out[0, 0, 0, 0]) > 0.505


def test_another_backend(monkeypatch):
  monkeypatch.setattr(OP, 'backends', list(OP.backends))
  other = types.SimpleNamespace(attention=lambda q, *_, causal: 3 * q)
  OP.register(dispatch.Backend(name='other', module=other))
  arrays, static = draw()
  for implementation in (None, 'other'):
    out = TestAttention.call(*arrays, implementation=implementation, **static)
    np.testing.assert_array_equal(out, 3 * arrays[0])


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
    ('tpu', {'dtype': 'float32'}, 'splash'),
    ('tpu', {'dtype': 'float16'}, 'xla'),
    ('tpu', {'length': 250}, 'xla'),
    ('tpu', {'segmented': True}, 'splash'),
    ('tpu', {'masked': True}, 'xla'),
    ('cuda', {}, 'cudnn'),
    ('cuda', {'dtype': 'float32'}, 'xla'),
    ('cuda', {'channels': 12}, 'xla'),
    ('cuda', {'channels': 256}, 'cudnn'),
    ('cuda', {'channels': 264}, 'xla'),
    # Older GPUs take narrower heads, or none.
    ('cuda', {'channels': 136, 'version': 8.0}, 'xla'),
    ('cuda', {'version': 7.5}, 'xla'),
    ('cuda', {'masked': True}, 'cudnn'),
    ('cuda', {'length': 251}, 'triton'),
    ('cuda', {'length': 251, 'masked': True}, 'cudnn'),
    ('cuda', {'length': 1025}, 'cudnn'),
    ('cuda', {'length': 251, 'segmented': True}, 'cudnn'),
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
  version = change.get('version', 9.0)
  found = fitting(monkeypatch, platform, x, mask, segment, version)
  assert found == expected


@pytest.mark.parametrize(
  ('platform', 'alone'), [('tpu', 'splash'), ('cuda', 'cudnn')]
)
def test_nothing_is_left_to_the_compiler_to_split(platform, alone, monkeypatch):
  x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
  for size, kind, expected in (
    (1, 'Auto', alone),
    (2, 'Auto', 'xla'),
    (2, 'Explicit', 'xla'),
    (2, 'Manual', alone),
  ):
    kinds = (jax.sharding.AxisType[kind],)
    mesh = jax.sharding.AbstractMesh((size,), ('data',), kinds)
    with jax.sharding.use_abstract_mesh(mesh):
      assert fitting(monkeypatch, platform, x) == expected


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'keys': 5},
    {'queries': 4},
    {'masked': (2, 7)},
    {'causal': True},
    DOCUMENTS | {'causal': True},
  ],
)
def test_odd_lengths_for_cudnn(options, monkeypatch):
  """JAX has its gradient for even ones only; XLA computes it here."""
  arrays, causal = draw(dtype='float32', **{'queries': 7, 'keys': 7} | options)
  given = []
  by_xla = jax.nn.dot_product_attention

  def by_cudnn(q_BQHC, k_BSGC, v_BSGC, *, implementation, **settings):
    given.append((implementation, q_BQHC.shape[1] % 2, k_BSGC.shape[1] % 2))
    return by_xla(q_BQHC, k_BSGC, v_BSGC, implementation='xla', **settings)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', by_cudnn)
  monkeypatch.setattr(choice, 'platform', lambda: 'cuda')
  monkeypatch.setattr(OP, 'choose', lambda *_: ('cudnn',))

  def found(function):
    def scalar(*inputs):
      return jnp.square(function(*inputs, *arrays[3:], **causal)).sum()

    return jax.value_and_grad(scalar, (0, 1, 2))(*arrays[:3])

  with dispatch.interpret():  # Not for a GPU, as it says.
    ours = found(TestAttention.call)
  for actual, expected in zip(
    jax.tree.leaves(ours), jax.tree.leaves(found(plain)), strict=True
  ):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)
  assert given == [('cudnn', 0, 0)]
