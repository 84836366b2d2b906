"""Learners as kernels: interpreted, and compiled for what is not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles
from mod_jax_kernels.acm_mlp import acm_mlp

# Nothing is a multiple of a block, and tiles have 16 tokens.
D, N, F, OUT = 20, 3, 24, 36
SMALL = {
  'pallas': {'rows': 16, 'hidden': 128},
  'triton': {
    'rows': 16,
    'inner': 16,
    **dict.fromkeys(
      [f'{name}_columns' for name in ('up', 'down', 'slope', 'weight')], 16
    ),
    'weight_rows': 16,
  },
}
TOLERANCE = {'float32': 1e-5, 'bfloat16': 1e-2}
NAMES = 'y', 'dx', 'dw1', 'db1', 'dw2'
QUICK = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}


@pytest.fixture(params=['pallas', 'triton'])
def backend(request):
  if request.param == 'triton':
    pytest.importorskip('triton', reason='triton is not installed')
  return request.param


def draw(tokens, dtype='float32', hidden=F):
  """Returns tokens, learners, and a gradient of the result."""
  rng = np.random.default_rng(tokens)

  def normal(*shape, fan_in=1):
    return jnp.asarray(rng.normal(size=shape) * fan_in**-0.5, dtype)

  return (
    normal(tokens, D),
    normal(N, D, hidden, fan_in=D),
    normal(N, hidden),
    normal(N, hidden, OUT, fan_in=hidden),
    normal(tokens, OUT),
  )


def dense(x_TD, w1_NDF, b1_NF, w2_NFD, k_T, activation):
  """All learners on all tokens, and then the chosen ones."""
  hidden_TNF = jnp.einsum('TD,NDF->TNF', x_TD, w1_NDF) + b1_NF
  if activation == 'gelu':
    hidden_TNF = jax.nn.gelu(hidden_TNF, approximate=False)
  each_TND = jnp.einsum('TNF,NFD->TND', hidden_TNF, w2_NFD)
  runs_TN = jnp.arange(len(w1_NDF)) < k_T[:, None]
  return jnp.where(runs_TN[..., None], each_TND, 0).sum(axis=1)


def both_ways(function, inputs, k_T, g_TD):
  """Returns the result and the gradients, by `NAMES`."""
  y_TD, pull = jax.vjp(lambda *inputs: function(*inputs, k_T), *inputs)
  return dict(zip(NAMES, (y_TD, *pull(g_TD)), strict=True))


@functools.cache
def compiled(backend, activation):
  def run(inputs, k_T, g_TD):
    function = functools.partial(
      acm_mlp, implementation=backend, activation=activation
    )
    return both_ways(function, inputs, k_T, g_TD)

  return jax.jit(run, compiler_options=QUICK)


def run(backend, inputs, k, g, activation='gelu'):
  with dispatch.interpret(), tiles.trying(**SMALL[backend]):
    return compiled(backend, activation)(inputs, jnp.asarray(k, jnp.int32), g)


def random_k(tokens):
  return np.random.default_rng(tokens).integers(0, N + 1, tokens)


def check(got, inputs, k, g, activation='gelu'):
  dtype = got['y'].dtype
  exact = [a.astype('float32') for a in inputs]
  want = both_ways(
    functools.partial(dense, activation=activation),
    *(exact, jnp.asarray(k), g.astype('float32')),
  )
  for name in NAMES:
    a, b = np.asarray(got[name], np.float32), np.asarray(want[name])
    assert got[name].dtype == dtype, name
    assert a.shape == b.shape, name
    # NaN, where nothing was written, is not smaller than anything.
    assert np.abs(a - b).max() <= TOLERANCE[str(dtype)] * np.abs(b).max(), name


# Sizes one off a tile; then groups that are empty, or all that there is.
@pytest.mark.parametrize(
  'k',
  [
    pytest.param(np.array([2]), id='one token'),
    pytest.param(random_k(15), id='one less than a tile'),
    pytest.param(random_k(17), id='one more than a tile'),
    *(pytest.param(np.full(17, k), id=f'all {k}') for k in (0, 1, N)),
    pytest.param(np.where(random_k(17) > 1, N, 0), id='all or none'),
  ],
)
def test_is_the_dense_computation(backend, k):
  *inputs, g = draw(len(k))
  got = run(backend, inputs, k, g)
  check(got, inputs, k, g)
  assert all(bool(np.any(a)) == bool(k.any()) for a in got.values())


@pytest.mark.parametrize(
  ('dtype', 'activation'), [('bfloat16', 'gelu'), ('float32', 'linear')]
)
def test_dtypes_and_activations(backend, dtype, activation):
  *inputs, g = draw(17, dtype)
  k = random_k(17)
  assert set(k) == {0, 1, 2, 3}
  got = run(backend, inputs, k, g, activation)
  check(got, inputs, k, g, activation)
  other = {'gelu': 'linear', 'linear': 'gelu'}[activation]
  with pytest.raises(AssertionError):
    check(got, inputs, k, g, other)


def test_several_steps_of_hidden_units():
  # More than one block of lanes on a TPU: two of 128.
  *inputs, g = draw(17, hidden=256)
  k = np.array([0, 0, 1, 3, 2, 0, 1] + [0] * 10)
  check(run('pallas', inputs, k, g), inputs, k, g)


def test_what_is_not_run_harms_nobody(backend):
  k = np.minimum(random_k(17), 2)
  (x, w1, b1, w2), g = draw(17)[:4], draw(17)[4]
  idle = jnp.asarray(k == 0)[:, None]
  got = run(
    backend,
    [
      jnp.where(idle, np.nan, x),
      *(a.at[2].set(np.nan) for a in (w1, b1, w2)),
    ],
    *(k, jnp.where(idle, np.nan, g)),
  )
  check(got, [x, w1, b1, w2], k, g)
  assert not any(got[name][2].any() for name in ('dw1', 'db1', 'dw2'))


def test_no_token(backend):
  *inputs, g = draw(0)
  got = run(backend, inputs, np.zeros(0), g)
  assert got['y'].shape == (0, OUT)
  assert got['dw1'].shape == (N, D, F)
  assert not any(a.any() for a in got.values())


# ViT-B: 128 images of 197 tokens.
def vit_shapes(dtype='bfloat16', tokens=128 * 197, width=768, hidden=768):
  shapes = (
    *((tokens, width), (4, width, hidden), (4, hidden), (4, hidden, width)),
    (tokens, width),
  )
  *inputs, g = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
  return inputs, jax.ShapeDtypeStruct((tokens,), jnp.int32), g


def test_compiles_for_hopper(for_hopper):
  text = for_hopper(
    lambda *args: both_ways(acm_mlp, *args), *vit_shapes('bfloat16')
  )
  # Two kernels forward; back one for the hidden units, and one for each
  # product of them.
  assert text.count('triton_kernel_call') == 6
  assert 'dot_general' not in text


def test_compiles_for_hopper_at_awkward_sizes(for_hopper):
  for_hopper(
    lambda *args: both_ways(acm_mlp, *args),
    *vit_shapes('float32', tokens=3, width=40, hidden=24),
  )


@pytest.mark.parametrize(
  ('kind', 'capability', 'kilobytes'),
  [('NVIDIA L4', 89, 99), ('NVIDIA H200', 90, 227)],
)
def test_the_first_product_fits_the_shared_memory(
  kind, capability, kilobytes, monkeypatch, tmp_path
):
  triton = pytest.importorskip('triton', reason='triton is not installed')
  from triton.backends.compiler import GPUTarget

  from mod_jax_kernels.acm_mlp import triton_gpu
  from mod_jax_kernels.acm_mlp.tiles import TILES

  monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
  monkeypatch.setattr(tiles, 'device_kind', lambda _: kind)
  sizes = tiles.choose(TILES, 'triton')
  constants = {
    **{'T': 1024, 'N': 4, 'D': 768, 'F': 768, 'GELU': True},
    **{'P': sizes['rows'], 'BF': sizes['up_columns'], 'BK': sizes['inner']},
  }
  pointers = {name: '*bf16' for name in ('x', 'w1', 'b1', 'hidden')}
  pointers |= {name: '*i32' for name in ('token', 'count')}
  source = triton.compiler.ASTSource(
    triton_gpu._up,
    {**pointers, **dict.fromkeys(constants, 'constexpr')},
    constants,
    # As XLA's buffers lie.
    {(i,): [['tt.divisibility', 16]] for i in range(len(pointers))},
  )
  found = triton.compile(
    source,
    target=GPUTarget('cuda', capability, 32),
    options={
      'num_warps': sizes['up_warps'],
      'num_stages': sizes['up_stages'],
    },
  )
  # More than one stage of the operands, else nothing is seen.
  assert 64 < found.metadata.shared / 1024 <= kilobytes


def test_compiles_for_tpus(for_tpu):
  program = for_tpu(lambda *args: both_ways(acm_mlp, *args), *vit_shapes())
  assert program.as_text().count('tpu_custom_call') == 3


@pytest.mark.parametrize('implementation', [None, 'pallas', 'triton'])
def test_never_a_product_of_all_tokens_with_all_learners(implementation):
  if implementation == 'triton':
    pytest.importorskip('triton', reason='triton is not installed')
  tokens = 5000
  shapes = vit_shapes(tokens=tokens)

  def rows(function):
    jaxpr = jax.make_jaxpr(lambda *args: both_ways(function, *args))(*shapes)
    sizes = [
      size
      for equation in equations(jaxpr.jaxpr)
      if equation.primitive.name == 'dot_general'
      for value in (*equation.invars, *equation.outvars)
      for size in value.aval.shape
    ]
    return max(sizes, default=0)

  assert rows(functools.partial(dense, activation='gelu')) == tokens
  # At most the inputs and hidden units of one learner: tiles are smaller. And
  # what Triton multiplies is not seen here, but in what it writes.
  assert rows(functools.partial(acm_mlp, implementation=implementation)) <= 768


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
      if _is_jaxpr(value):
        yield from equations(getattr(value, 'jaxpr', value))


def _is_jaxpr(value):
  return hasattr(value, 'eqns')


@pytest.mark.parametrize(
  ('implementation', 'lacking'),
  [('pallas', 'TPU'), ('triton', r'NVIDIA GPU|needs triton')],
)
def test_a_backend_that_cannot_run_says_so(implementation, lacking):
  *inputs, _ = draw(2)
  with pytest.raises(RuntimeError, match=lacking):
    acm_mlp(*inputs, jnp.ones(2, jnp.int32), implementation)


def test_a_backend_that_is_not_installed_says_so(monkeypatch):
  monkeypatch.setattr(
    dispatch, 'missing', {'triton': 'triton', 'pallas': None, 'xla': None}.get
  )
  *inputs, _ = draw(2)
  k = jnp.ones(2, jnp.int32)
  with pytest.raises(RuntimeError, match='needs triton, which is not'):
    acm_mlp(*inputs, k, 'triton')
  # Where nobody asks for it, it is not missed.
  assert acm_mlp(*inputs, k).shape == (2, OUT)


@pytest.mark.parametrize('implementation', ['pallas', 'triton'])
def test_dtypes_without_kernels_are_refused(implementation):
  *inputs, _ = draw(2, 'float16')
  k = jnp.ones(2, jnp.int32)
  with pytest.raises((ValueError, RuntimeError), match='float16|needs triton'):
    acm_mlp(*inputs, k, implementation)
  assert acm_mlp(*inputs, k).dtype == 'float16'
