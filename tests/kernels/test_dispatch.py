"""Which backend runs where, what is refused, block sizes, Triton's calls."""

import dataclasses
import importlib.util
import types

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax_kernels import dispatch, tiles, triton_call

X = np.arange(1024, dtype=np.float32).reshape(8, 128)
TILES = {
  'triton': {
    '': {'rows': 1, 'columns': 4},
    'NVIDIA': {'rows': 2, 'columns': 4},
    'NVIDIA H200': {'rows': 3, 'columns': 4},
  },
  'pallas': {'': {'rows': 5}},
}


def double_kernel(x_ref, y_ref):
  y_ref[...] = 2 * x_ref[...]


@dispatch.jit()
def double_by_pallas(x):
  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(
    double_kernel, out_shape=out, interpret=dispatch.interpreting()
  )(x)


def backend(name, function, **kwargs):
  module = types.SimpleNamespace(double=function)
  return dispatch.Backend(name=name, module=module, **kwargs)


def make_op(*more):
  return dispatch.Op(
    *more,
    backend('pallas', double_by_pallas, platform='tpu'),
    backend('xla', lambda x: x + x),
  )


OP = make_op()


def double(x, implementation=None, op=OP):
  return op.run('double', op.choose(implementation, x), x)


def lowered(platform, implementation=None):
  traced = jax.jit(lambda x: double(x, implementation)).trace(X)
  return traced.lower(lowering_platforms=(platform,)).as_text()


class TestRun:
  @pytest.mark.parametrize('jit', [False, True])
  @pytest.mark.parametrize('implementation', [None, 'xla'])
  def test_on_a_cpu_it_is_xla(self, implementation, jit):
    function = jax.jit(double, static_argnums=1) if jit else double
    np.testing.assert_array_equal(function(X, implementation), 2 * X)

  def test_the_platform_lowered_for_decides(self):
    assert 'tpu_custom_call' in lowered('tpu')
    assert 'tpu_custom_call' not in lowered('tpu', 'xla')
    for platform in ('cpu', 'cuda'):
      assert 'custom_call' not in lowered(platform)

  def test_a_name_is_never_replaced(self):
    assert 'tpu_custom_call' in lowered('tpu', 'pallas')
    with pytest.raises(RuntimeError, match="'pallas' runs on a TPU.*for cuda"):
      lowered('cuda', 'pallas')
    for function in (double, jax.jit(double, static_argnums=1)):
      with pytest.raises(RuntimeError, match="'pallas' runs on a TPU.*for cpu"):
        function(X, 'pallas')

  def test_an_unknown_name_is_refused(self):
    with pytest.raises(
      ValueError, match="='magic': expected '.*'xla'.* or None"
    ):
      double(X, 'magic')

  def test_under_vmap(self):
    traced = jax.jit(jax.vmap(lambda x: double(x, 'pallas'))).trace(X[None])
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
    assert 'tpu_custom_call' in text
    with pytest.raises(RuntimeError, match="'pallas' runs on a TPU.*for cpu"):
      traced.lower()

  @pytest.mark.parametrize('module', ['triton', 'jax_triton'])
  def test_what_is_not_installed_is_named(self, monkeypatch, module):
    find = importlib.util.find_spec
    monkeypatch.setattr(
      importlib.util, 'find_spec', lambda n: None if n == module else find(n)
    )
    dispatch.missing.cache_clear()
    try:
      op = make_op(backend('triton', pytest.fail, platform='cuda'))
      with pytest.raises(RuntimeError, match=f"'triton' needs {module} "):
        double(X, 'triton', op)
      # And is no hindrance to anybody else.
      np.testing.assert_array_equal(double(X, op=op), 2 * X)
    finally:
      dispatch.missing.cache_clear()


class TestOrder:
  """Several backends for one platform, and some that cannot or should not."""

  def test_the_first_for_a_platform_counts(self):
    op = make_op()
    second = backend('fast', lambda x: 3 * x, platform='cpu')
    op.register(second)
    np.testing.assert_array_equal(double(X, op=op), 3 * X)
    op.register(
      dataclasses.replace(second, name='faster', module=second.module)
    )
    assert op.choose(None, X) == ('faster', 'fast', 'pallas', 'xla')
    # The platform lowered for decides all the same.
    traced = jax.jit(lambda x: double(x, op=op)).trace(X)
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
    assert 'tpu_custom_call' in text
    with pytest.raises(RuntimeError, match="'fast' runs on cpu only"):
      jax.jit(lambda x: double(x, 'fast', op)).trace(X).lower(
        lowering_platforms=('tpu',)
      )

  def test_a_name_is_that_of_one_backend(self):
    op = make_op()
    with pytest.raises(ValueError, match="'xla' is that of another"):
      op.register(backend('xla', lambda x: 3 * x))

  def test_runs_anywhere_and_is_taken_on_some_platforms(self):
    op = make_op(backend('new', lambda x: 3 * x))
    np.testing.assert_array_equal(double(X, op=op), 3 * X)
    op = make_op(backend('new', lambda x: 3 * x, default_on=()))
    np.testing.assert_array_equal(double(X, op=op), 2 * X)
    np.testing.assert_array_equal(double(X, 'new', op), 3 * X)
    op = make_op(
      backend(
        'many', lambda x: 3 * x, default_on=('cpu',), suits=lambda x: x.size > 9
      )
    )
    np.testing.assert_array_equal(double(X, op=op), 3 * X)
    np.testing.assert_array_equal(double(X[0, :9], op=op), 2 * X[0, :9])
    np.testing.assert_array_equal(double(X[0, :9], 'many', op), 3 * X[0, :9])

  def test_what_it_cannot_take_is_told_or_left_to_another(self):
    def lacks(x):
      return None if x.ndim == 1 else "takes vectors: use None or 'xla'"

    op = make_op(backend('flat', lambda x: 3 * x, platform='cpu', lacks=lacks))
    np.testing.assert_array_equal(double(X[0], op=op), 3 * X[0])
    np.testing.assert_array_equal(double(X, op=op), 2 * X)
    with pytest.raises(ValueError, match="='flat' takes vectors: use None or"):
      double(X, 'flat', op)

  def test_a_module_is_imported_when_it_is_needed(self):
    op = make_op(
      dispatch.Backend(name='absent', module='no.such', platform='cpu')
    )
    assert 'absent' in op.choose(None, X)
    with pytest.raises(ModuleNotFoundError):
      double(X, 'absent', op)


class TestInterpret:
  def test_runs_by_name_anywhere_and_only_inside(self):
    with dispatch.interpret():
      assert dispatch.interpreting()
      np.testing.assert_array_equal(double(X, 'pallas'), 2 * X)
    with dispatch.interpret('pallas'), pytest.MonkeyPatch.context() as patch:
      patch.setattr(OP.backends[-1].module, 'double', pytest.fail)
      np.testing.assert_array_equal(double(X), 2 * X)
    assert not dispatch.interpreting()
    with pytest.raises(RuntimeError, match='runs on a TPU'):
      double(X, 'pallas')

  def test_traced_once_for_a_shape_and_apart(self):
    traces = []

    @dispatch.jit(static_argnames='k')
    def function(x, k):
      traces.append((x.shape, k, dispatch.interpreting()))
      return k * x

    for _ in range(2):
      function(X, k=2)
      function(X[:1], k=2)
      with dispatch.interpret():
        function(X, k=2)
    assert traces == [
      *(((8, 128), 2, False), ((1, 128), 2, False), ((8, 128), 2, True)),
    ]

  def test_compiled_once_even_outside_of_jit(self):
    traces = []
    op = make_op(backend('counted', lambda x: traces.append(x) or 2 * x))
    for _ in range(2):
      double(X, op=op)
    assert len(traces) == 1


class TestTiles:
  def test_the_longest_start_of_the_kind_counts(self, monkeypatch):
    for kind, rows in (
      ('', 1),
      ('AMD', 1),
      ('NVIDIA A100', 2),
      ('NVIDIA H200 NVL', 3),
    ):
      monkeypatch.setattr(tiles, 'device_kind', lambda _, kind=kind: kind)
      assert tiles.choose(TILES, 'triton') == {'rows': rows, 'columns': 4}

  def test_others_can_be_tried(self):
    with tiles.trying(rows=64):
      assert tiles.choose(TILES, 'triton') == {'rows': 64, 'columns': 4}
    assert tiles.choose(TILES, 'triton')['rows'] == 1

  def test_the_device_that_is_meant(self):
    from jax.sharding import AbstractDevice, AbstractMesh

    assert tiles.device_kind('cuda') == ''
    assert tiles.device_kind('cpu') == jax.devices()[0].device_kind
    device = AbstractDevice('NVIDIA H200', 132, 'cuda')
    mesh = AbstractMesh((1,), ('x',), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
      assert tiles.choose(TILES, 'triton')['rows'] == 3


triton = pytest.importorskip('triton')
tl = pytest.importorskip('triton.language')


@triton.jit
def half(x):
  return x * 0.5


@triton.jit
def scale(x_ptr, count, factor, y_ptr, SIZE: tl.constexpr):
  """Writes factor · x / 2 up to `count`."""
  index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
  mask = index < count
  x = tl.load(x_ptr + index, mask=mask).to(tl.float32)
  y = half(x) * factor
  tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=mask)


class TestTriton:
  @dispatch.jit(static_argnames='count')
  def scale(x, count):
    return triton_call.triton_call(
      *(scale, x, count, 3.0),
      out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
      grid=(triton.cdiv(count, 64),),
      num_warps=4,
      num_stages=1,
      SIZE=64,
    )

  @pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
  def test_interpreted(self, dtype):
    x = jnp.arange(100, dtype=dtype)
    with dispatch.interpret():
      y = TestTriton.scale(x, 100)
    assert y.dtype == dtype
    # The interpreter rounds towards 0.
    rtol = 1e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(
      np.float32(y), 1.5 * np.arange(100, dtype=np.float32), rtol=rtol
    )

  def test_what_is_not_written_is_seen(self):
    with dispatch.interpret():
      y = TestTriton.scale(jnp.ones(100), 90)
    np.testing.assert_array_equal(np.isnan(y), np.arange(100) >= 90)

  def test_under_vmap_it_does_not_hinder_other_platforms(self, for_hopper):
    op = dispatch.Op(
      backend('triton', lambda x: TestTriton.scale(x, 100), platform='cuda'),
      backend('xla', lambda x: 1.5 * x),
    )
    function = jax.vmap(lambda x: double(x, op=op))
    x = jnp.arange(300.0).reshape(3, 100)
    np.testing.assert_array_equal(jax.jit(function)(x), 1.5 * x)
    assert 'triton_kernel_call' in for_hopper(function, x)
