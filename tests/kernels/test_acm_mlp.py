"""Adaptive MLPs: only the chosen learners of each token, and exactly those."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from op_tests import Case, OpTests, Target
import pytest

from mod_jax_kernels import dispatch, tiles
from mod_jax_kernels.acm_mlp import OP, acm_mlp, pallas_tpu, reference
from mod_jax_kernels.acm_mlp import order as order_lib
from mod_jax_kernels.acm_mlp.tiles import TILES

pytestmark = pytest.mark.slow

# Nothing is a multiple of a block. Triton's tiles have 16 tokens, a TPU's 128.
D, N, F, OUT = 20, 3, 24, 36


def random_k(tokens):
  return np.random.default_rng(tokens).integers(0, N + 1, tokens)


def draw(seed=0, k=(0, 3, 1, 2), dtype='float32', hidden=F, activation='gelu'):
  """Returns tokens, learners and their numbers."""
  rng = np.random.default_rng(seed)

  def normal(*shape, fan_in=1):
    return jnp.asarray(rng.normal(size=shape) * fan_in**-0.5, dtype)

  arrays = [
    normal(len(k), D),
    normal(N, D, hidden, fan_in=D),
    normal(N, hidden),
    normal(N, hidden, OUT, fan_in=hidden),
    jnp.asarray(k, jnp.int32),
  ]
  return arrays, {'activation': activation}


def plain(x_TD, w1_NDF, b1_NF, w2_NFD, k_T, activation='gelu'):
  """All learners on all tokens, and then the chosen ones."""
  hidden_TNF = jnp.einsum('TD,NDF->TNF', x_TD, w1_NDF) + b1_NF
  if activation == 'gelu':
    hidden_TNF = jax.nn.gelu(hidden_TNF, approximate=False)
  each_TND = jnp.einsum('TNF,NFD->TND', hidden_TNF, w2_NFD)
  runs_TN = jnp.arange(len(w1_NDF)) < k_T[:, None]
  return jnp.where(runs_TN[..., None], each_TND, 0).sum(axis=1)


def both_ways(function, inputs, k_T, g_TD):
  """Returns the result, and gradients of all inputs."""
  y_TD, pull = jax.vjp(lambda *inputs: function(*inputs, k_T), *inputs)
  return y_TD, *pull(g_TD)


def shapes(tokens=128 * 197, width=768, hidden=768, dtype='bfloat16'):
  """Returns shapes of arguments, by default of 128 images in a ViT-B."""
  of_tokens, of_units = (tokens, width), (4, hidden)
  of_inputs = of_tokens, (4, width, hidden), of_units, (*of_units, width)
  inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape in of_inputs]
  return *inputs, jax.ShapeDtypeStruct((tokens,), jnp.int32)


class TestACM(OpTests):
  name = 'acm_mlp'
  inputs = 4
  draw = staticmethod(draw)
  plain = staticmethod(plain)
  sizes = {
    **{'rows': 16, 'hidden': 128, 'inner': 16, 'weight_rows': 16},
    **{'up_columns': 16, 'down_columns': 16},
    **{'slope_columns': 16, 'weight_columns': 16},
  }
  # Sizes about those of tiles; then groups that are empty, or all there is.
  cases = (
    Case('one more than a tile', k=random_k(17)),
    Case('one token', k=[2]),
    *(Case(f'all {k}', k=[k] * 17) for k in (0, N)),
    Case('all or none', k=np.where(random_k(17) > 1, N, 0)),
    Case('bfloat16', k=random_k(17), dtype='bfloat16'),
    Case('linear', k=random_k(17), activation='linear'),
    # The first one's shapes, so that nothing compiles anew.
    Case('out of range', k=[-7, -1, N + 1, 99, *random_k(13)]),
    Case('no token', k=[]),
    Case('whole tiles', backends=['xla'], k=random_k(16)),
    # More than one block of lanes on a TPU: two of 128.
    Case(
      'steps of hidden units',
      backends=['pallas'],
      k=[0, 0, 1, 3, 2, 0, 1] + [0] * 10,
      hidden=256,
    ),
  )
  refused = (
    *(
      ({place: np.zeros(shape)}, r'expected \[T, D\], \[N, D, F\]')
      for place, shape in [
        (0, (4, D + 1)),
        (1, (N, D + 1, F)),
        (2, (N + 1, F)),
        (3, (N, F + 1, OUT)),
        (4, (3,)),
      ]
    ),
    ({0: np.zeros((4, D), np.int32)}, 'int32.*floating'),
    ({4: np.full(4, 1.5, np.float32)}, 'float32.*integers'),
    ({'activation': 'relu'}, "activation='relu'.*'gelu'"),
  )
  lacking = tuple(
    (backend, {'dtype': 'float16'}, 'x of float32 or bfloat16, not float16')
    for backend in ('pallas', 'triton')
  )
  targets = (
    # Two kernels forward; back one for the hidden units, and one for each
    # product of them.
    Target(platform='cuda', args=shapes(), calls=6, without='dot_general'),
    Target(
      platform='cuda',
      args=shapes(tokens=3, width=40, hidden=24, dtype='float32'),
      calls=6,
    ),
    Target(platform='tpu', args=shapes(), calls=2),
  )

  @pytest.fixture(autouse=True)
  def small_reference(self, monkeypatch):
    """The reference in tiles of 8 tokens in place of 256."""
    functions = {
      name: functools.partial(getattr(reference, name), tile=8)
      for name in ('forward', 'backward')
    }
    *kernels, xla = OP.backends
    xla = dataclasses.replace(xla, module=types.SimpleNamespace(**functions))
    monkeypatch.setattr(OP, 'backends', [*kernels, xla])

  def test_tiles_of_a_tpu_and_room_for_one_gradient_at_a_time(
    self, monkeypatch
  ):
    # Three tiles in two parts, so that one part runs out of them; and two
    # steps for each learner.
    monkeypatch.setattr(pallas_tpu, '_GRADIENT_BYTES', 1)
    (*inputs, k_T), _ = draw(k=random_k(300), hidden=256)
    g_TD = jnp.asarray(np.random.default_rng(3).normal(size=(300, OUT)))
    run = functools.partial(acm_mlp, implementation='pallas')
    with dispatch.interpret(), tiles.trying(**self.sizes):
      got = both_ways(run, inputs, k_T, g_TD)
    want = both_ways(plain, inputs, k_T, g_TD)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))

  def test_what_is_not_run_harms_nobody(self, backend):
    k = np.minimum(random_k(17), 2)
    (*inputs, k_T), _ = draw(k=k)
    g_TD = jnp.asarray(np.random.default_rng(3).normal(size=(17, OUT)))
    idle_T1 = (k_T == 0)[:, None]
    poisoned = [
      jnp.where(idle_T1, np.nan, inputs[0]),
      *(w.at[2].set(np.inf) for w in inputs[1:]),
    ]

    with dispatch.interpret(), tiles.trying(**self.sizes):
      got = jax.jit(both_ways, static_argnums=0)(
        functools.partial(acm_mlp, implementation=backend),
        *(poisoned, k_T, jnp.where(idle_T1, np.nan, g_TD)),
      )
    want = both_ways(plain, inputs, k_T, g_TD)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
    assert not any(dw[2].any() for dw in got[2:])


def test_order_is_a_stable_sort():
  k = np.random.default_rng(0).integers(-1, N + 2, 300)
  order = order_lib.order(jnp.asarray(k), N)
  clipped = np.clip(k, 0, N)
  np.testing.assert_array_equal(
    order.token_T, np.argsort(-clipped, kind='stable')
  )
  np.testing.assert_array_equal(order.slot_T, np.argsort(order.token_T))
  assert order.count_N.tolist() == [(clipped > n).sum() for n in range(N)]


@pytest.mark.parametrize(
  ('k', 'dtype', 'learners', 'want'),
  [([200, 255], 'uint8', 300, [200, 255]), ([2**32 - 1], 'uint32', 3, [3])],
)
def test_numbers_of_other_types(k, dtype, learners, want):
  order = order_lib.order(jnp.asarray(k, dtype), learners)
  assert order.num_learners_T.tolist() == want
  assert order.count_N.tolist() == [
    sum(n < k for k in want) for n in range(learners)
  ]


def test_integers_of_64_bits():
  """On a CPU the kernels are traced as well."""
  with jax.enable_x64():
    (*inputs, k_T), _ = draw()
    g_TD = jnp.ones((len(k_T), OUT), 'float32')
    got = both_ways(acm_mlp, inputs, k_T, g_TD)
    want = both_ways(plain, inputs, k_T, g_TD)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_wide_learners_run_in_blocks_on_a_tpu():
  *arrays, _ = shapes(tokens=500, width=16_384, hidden=4096)

  def plan(*arrays):
    order = order_lib.order(jnp.zeros(500, jnp.int32), 4)
    seen.append(pallas_tpu.forward_plan(*arrays, order))

  seen = []
  jax.eval_shape(plan, *arrays)
  assert seen[0].steps == 4 * 4096 // 128


@pytest.mark.parametrize('tokens', [1, 33, 70, reference.TILE + 1])
def test_numbers_of_tokens_with_tiles_of_the_size_that_is_used(tokens):
  arrays, _ = draw(k=random_k(tokens))
  got = jax.jit(acm_mlp)(*arrays)
  np.testing.assert_allclose(got, jax.jit(plain)(*arrays), atol=1e-5)


def test_weights_of_another_dtype_take_part_in_that_of_the_tokens():
  (x, *learners, k), _ = draw(k=random_k(17))
  low = x.astype('bfloat16')

  def loss(learners):
    y = acm_mlp(low, *learners, k)
    return y.astype('float32').sum(), y

  run = jax.jit(jax.grad(loss, has_aux=True))
  rounded = [a.astype('bfloat16') for a in learners]
  grads, got = run(learners)
  assert got.dtype == 'bfloat16'
  np.testing.assert_array_equal(got, run(rounded)[1])
  assert {d.dtype for d in grads} == {jnp.dtype('float32')}


def test_sums_in_float32():
  # Rounded after each learner, the small ones would be lost one by one.
  w2 = jnp.array([1.0] + [2**-9] * 4, jnp.bfloat16)[:, None, None]
  ones = jnp.ones((5, 1, 1), jnp.bfloat16)
  y = acm_mlp(
    *(ones[0], ones, jnp.zeros((5, 1), jnp.bfloat16), w2, jnp.array([5])),
    activation='linear',
  )
  assert float(y[0, 0]) == 1 + 2**-7


def in_tiles(*arrays, tile):
  *arrays, k = arrays
  arrays += [order_lib.order(k, N)]
  kwargs = {'activation': 'gelu', 'keep': False}
  return reference.forward(*arrays, **kwargs, tile=tile)[0]


def test_a_poisoned_token_keeps_it_for_itself():
  # Nine tokens in tiles of eight: the second is filled up by reading the last
  # token again and again.
  (x, *rest), _ = draw(k=[N] * 9)
  run = jax.jit(functools.partial(in_tiles, tile=8))
  got = run(x.at[8].set(np.nan), *rest)
  np.testing.assert_allclose(got[:8], plain(x, *rest)[:8], atol=1e-5)
  assert jnp.isnan(got[8]).all()


def test_only_the_learners_that_a_tile_needs_are_run(monkeypatch):
  ran = []
  learner = reference._learner

  def note(x_PD, *args):
    jax.debug.callback(lambda: ran.append(len(x_PD)))
    return learner(x_PD, *args)

  monkeypatch.setattr(reference, '_learner', note)
  arrays, _ = draw(k=[0, 3, 0, 1, 0, 2, 1, 0, 0, 1])
  # Its own function, so that what is compiled is forgotten with it.
  jax.jit(lambda *args: in_tiles(*args, tile=2))(*arrays)
  jax.effects_barrier()
  # In order 3 2 | 1 1 | 1 0 | 0 0 | 0 0: three, one and one.
  assert ran == [2] * 5


@pytest.mark.parametrize('implementation', [None, 'pallas', 'triton'])
def test_never_a_product_of_all_tokens_with_all_learners(
  implementation, equations
):
  if implementation == 'triton':
    pytest.importorskip('triton', reason='triton is not installed')
  tokens = 5000

  def rows(function):
    def loss(*args):
      return function(*args).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*shapes(tokens))
    sizes = [
      size
      for equation in equations(jaxpr.jaxpr)
      if equation.primitive.name == 'dot_general'
      for value in (*equation.invars, *equation.outvars)
      for size in value.aval.shape
    ]
    return max(sizes, default=0)

  assert rows(plain) == tokens
  # At most the inputs and hidden units of one learner: tiles are smaller. And
  # what Triton multiplies is not seen here, but in what it writes.
  assert rows(functools.partial(acm_mlp, implementation=implementation)) <= 768


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

  monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
  monkeypatch.setattr(tiles, 'device_kind', lambda _: kind)
  sizes = tiles.choose(TILES, 'triton')
  constants = {
    **{'T': 1024, 'N': 4, 'D': 768, 'F': 768, 'GELU': True, 'KEEP': True},
    **{'P': sizes['rows'], 'BF': sizes['up_columns'], 'BK': sizes['inner']},
  }
  pointers = {name: '*bf16' for name in ('x', 'w1', 'b1', 'hidden', 'before')}
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
