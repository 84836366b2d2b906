"""What every operation of `mod_jax_kernels` is tested for.

The tests of an operation are a class derived from `OpTests`: it draws
arguments, computes the same plainly, and has tables of cases. What is special
to the operation stands in its file as well.
"""

import abc
import dataclasses
import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax_kernels
from mod_jax_kernels import dispatch, tiles

# Backends whose kernels can be interpreted on a CPU.
INTERPRETED = ('pallas', 'splash', 'triton')
TPUS = ('v5e:2x2', 'v5p:2x2x1')
# How a kernel appears in the text of a program for a platform.
CALLS = {'tpu': 'tpu_custom_call', 'cuda': 'triton_kernel_call'}

needs_triton = pytest.mark.skipif(
  importlib.util.find_spec('triton') is None, reason='triton is not installed'
)


class Case:
  """Arguments for which backends must do what the plain computation does."""

  def __init__(self, name, *, backends=None, sizes=None, weights=None, **draw):
    """Describes arguments.

    Args:
      name: what is special about them.
      backends: that are tested with them; None for all that run here.
      sizes: of blocks, in place of the operation's `sizes`.
      weights: in place of the operation's `weights`.
      **draw: options of the operation's `draw`.
    """
    self.name = name
    self.backends = backends
    self.sizes = sizes
    self.weights = weights
    self.draw = draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A program that is compiled for a platform that is not here.

  Attributes:
    platform: `tpu` or `cuda`.
    args: shapes of the operation's arrays.
    static: its other arguments.
    calls: how many kernels the program has.
    without: a pattern that its text lacks, and that of a CPU's program has.
  """

  platform: str
  args: tuple
  static: dict = dataclasses.field(default_factory=dict)
  calls: int
  without: str | None = None


class OpTests(abc.ABC):
  """Tests of one operation and all of its backends.

  Attributes:
    name: of the operation.
    inputs: number of its arrays that have gradients; these come first.
    dtypes: of its results; None for that of the first array.
    weights: of the results in the loss that is differentiated; a result of
      weight 0 is not read at all.
    sizes: sizes of blocks for all backends, larger than some of the arrays.
    cases: the first one is small, and is for all backends.
    refused: changes of what `draw` returns, by place or by name, and the
      message of the error.
    lacking: a backend; options of `draw` for inputs that it refuses, though
      other backends take them; and the message of the error.
    targets: programs for other platforms.
  """

  name: str
  inputs: int
  dtypes: tuple = (None,)
  weights: tuple[float, ...] = (1.0,)
  sizes: dict = {}
  cases: tuple[Case, ...]
  refused: tuple[tuple[dict, str], ...]
  lacking: tuple[tuple[str, dict, str], ...]
  targets: tuple[Target, ...]

  @staticmethod
  @abc.abstractmethod
  def draw(seed=0, **options):
    """Returns a list of arrays and a dictionary of other arguments."""

  @staticmethod
  @abc.abstractmethod
  def plain(*arrays, **static):
    """Returns what the operation does, as its definition reads.

    Every backend is compared with it, the backend `xla` (`reference.py`), too.
    """

  @classmethod
  def call(cls, *arrays, **static):
    """Calls the operation."""
    return getattr(mod_jax_kernels, cls.name)(*arrays, **static)

  @classmethod
  def loss(cls, *arrays, **static):
    """Returns the squares of all results, added up."""
    results = jax.tree.leaves(cls.call(*arrays, **static))
    return sum((x.astype(jnp.float32) ** 2).sum() for x in results)

  @classmethod
  def run(
    cls,
    backend,
    arrays,
    static,
    *,
    sizes=None,
    weights=None,
    vmapped=False,
  ):
    """Returns results and gradients by name, kernels being interpreted.

    Args:
      backend: its name, or `plain` for the plain computation.
      arrays: the operation's.
      static: its other arguments.
      sizes: as `Case.sizes`.
      weights: as `Case.weights`.
      vmapped: whether the arrays have another dimension in front.
    """
    sizes = cls.sizes if sizes is None else sizes
    with dispatch.interpret(), tiles.trying(**sizes):
      results, grads = _program(
        *(cls, backend, weights or cls.weights),
        *(tuple(static.items()), tuple(sizes.items()), vmapped),
      )(*arrays)
    return {f'result {i}': x for i, x in enumerate(results)} | {
      f'gradient {i}': x for i, x in enumerate(grads)
    }

  @classmethod
  def check(cls, got, arrays, static, *, weights=None):
    """Compares what `run` returned with the plain computation in float32."""
    wide = [
      x.astype('float32') if i < cls.inputs else x for i, x in enumerate(arrays)
    ]
    want = cls.run('plain', wide, static, weights=weights)
    dtypes = [dtype or arrays[0].dtype for dtype in cls.dtypes]
    dtypes += [x.dtype for x in arrays[: cls.inputs]]
    assert got.keys() == want.keys()
    for (name, value), dtype in zip(got.items(), dtypes, strict=True):
      exact = np.asarray(want[name])
      assert value.dtype == dtype, name
      assert value.shape == exact.shape, name
      # A gradient of nothing but rounding is no larger than 0.1.
      limit = {'int32': 0, 'float32': 1e-5, 'bfloat16': 1e-2}[str(dtype)]
      limit *= np.abs(exact).max(initial=0.1)
      error = np.abs(np.asarray(value, exact.dtype) - exact)
      # NaN, which interpreters begin with, is not smaller than anything.
      assert error.max(initial=0) <= limit, name

  def pytest_generate_tests(self, metafunc):
    """Makes one test for each entry of a table."""
    every = mod_jax_kernels.OPS[self.name].backends
    here = [b.name for b in every if not b.platform or b.name in INTERPRETED]

    def row(backend, *more):
      marks = [needs_triton] if backend == 'triton' else []
      values = backend, *more
      name = ', '.join(getattr(x, 'name', str(x)) for x in values)
      return pytest.param(*values, id=name, marks=marks)

    def targets(platform):
      return [t for t in self.targets if t.platform == platform]

    tables = {
      'backend, case': lambda: [
        row(backend, case)
        for case in self.cases
        for backend in case.backends or here
      ],
      'backend': lambda: [row(name) for name in here],
      'changes, message': lambda: self.refused,
      'lacking, options, message': lambda: [row(*x) for x in self.lacking],
      # Each program is compiled for one of the two kinds of TPU, in turns.
      'topology, tpu_target': lambda: [
        *zip(itertools.cycle(TPUS), targets('tpu'), strict=False)
      ],
      'cuda_target': lambda: targets('cuda'),
    }
    for names, rows in tables.items():
      if set(names.split(', ')) <= set(metafunc.fixturenames):
        metafunc.parametrize(names, rows())
        break

  def test_is_the_plain_computation(self, backend, case):
    arrays, static = self.draw(**case.draw)
    got = self.run(
      *(backend, arrays, static), sizes=case.sizes, weights=case.weights
    )
    self.check(got, arrays, static, weights=case.weights)

  def test_under_vmap(self, backend):
    draws = [self.draw(seed, **self.cases[0].draw) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(x for x, _ in draws))
    got = self.run(backend, stacked, draws[0][1], vmapped=True)
    for i, (arrays, static) in enumerate(draws):
      self.check(jax.tree.map(lambda x, i=i: x[i], got), arrays, static)

  def test_without_triton_nothing_of_it_is_traced(self, monkeypatch):
    monkeypatch.setattr(
      dispatch, 'missing', lambda name: name if name == 'triton' else None
    )
    arrays, static = self.draw(**self.cases[0].draw)
    call = functools.partial(self.call, **static)
    assert 'triton' not in str(jax.make_jaxpr(call)(*arrays))

  def test_refuses_what_does_not_fit(self, changes, message):
    arrays, static = self.draw()
    arrays = [changes.get(i, x) for i, x in enumerate(arrays)]
    static |= {k: x for k, x in changes.items() if isinstance(k, str)}
    with pytest.raises(ValueError, match=message):
      self.call(*arrays, **static)

  def test_what_one_lacks_is_left_to_another(self, lacking, options, message):
    arrays, static = self.draw(**options)
    call = functools.partial(self.call, **static)
    match = f"implementation='{lacking}'.*{message}.*'xla'"
    with pytest.raises(ValueError, match=match):
      call(*arrays, implementation=lacking)
    text = str(jax.make_jaxpr(call)(*arrays))
    assert 'pallas_call' not in text
    assert 'triton' not in text

  def program(self, target, **more):
    call = functools.partial(self.loss, **target.static | more)
    if not self.inputs:
      return call
    return jax.grad(call, tuple(range(self.inputs)))

  def check_text(self, target, text):
    assert text.count(CALLS[target.platform]) == target.calls
    if target.without is not None:
      assert not re.search(target.without, text)
      on_cpu = jax.jit(self.program(target, implementation='xla'))
      text = on_cpu.lower(*target.args).as_text()
      assert re.search(target.without, text)

  @pytest.mark.slow
  def test_compiles_for_a_tpu(self, for_tpu, topology, tpu_target):
    compiled = for_tpu(topology, self.program(tpu_target), *tpu_target.args)
    self.check_text(tpu_target, compiled.as_text())

  @pytest.mark.slow
  def test_compiles_for_a_gpu(self, for_hopper, cuda_target):
    text = for_hopper(self.program(cuda_target), *cuda_target.args)
    self.check_text(cuda_target, text)


@functools.cache
def _program(tests, backend, weights, static, sizes, vmapped):
  """Returns a compiled function: arrays to results and gradients."""
  del sizes  # Each has a program of its own.
  function = tests.plain
  if backend != 'plain':
    function = functools.partial(tests.call, implementation=backend)
  function = functools.partial(function, **dict(static))

  def loss(inputs, rest):
    results = jax.tree.leaves(function(*inputs, *rest))
    rng = np.random.default_rng(2)
    along = [rng.normal(size=x.shape).astype('float32') for x in results]
    terms = zip(weights, results, along, strict=True)
    return sum((w * x * a).sum() for w, x, a in terms if w), results

  def run(*arrays):
    if not tests.inputs:
      return [function(*arrays)], []
    parts = arrays[: tests.inputs], arrays[tests.inputs :]
    grads, results = jax.grad(loss, has_aux=True)(*parts)
    return results, grads

  if backend == 'plain' and not tests.inputs:
    return run  # It may be NumPy's.
  return jax.jit(jax.vmap(run) if vmapped else run)
