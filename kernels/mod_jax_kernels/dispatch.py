"""Which backend runs: chosen where a program is lowered, in one place.

An operation hands over one function per backend, all of one signature, that
take and return the same arrays. They are not differentiated: an operation with
gradients is a `custom_vjp` whose two sides are each dispatched.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import contextvars
import functools
import importlib.util

import jax
from jax.extend import core
from jax.interpreters import batching
from jax.interpreters import mlir

# Backend -> the platform that its kernels are compiled for.
PLATFORMS = {'pallas': 'tpu', 'triton': 'cuda'}
_DEVICES = {'tpu': 'a TPU', 'cuda': 'an NVIDIA GPU'}

# Whether kernels are interpreted, and which of them where none is named.
_INTERPRET = contextvars.ContextVar('interpret', default=(False, None))


@contextlib.contextmanager
def interpret(backend: str | None = None):
  """Runs kernels that are asked for by name in an interpreter, anywhere.

  For tests: slow. It counts while a program is traced.

  Args:
    backend: runs, interpreted, where no backend is asked for as well.
  """
  token = _INTERPRET.set((True, backend))
  try:
    yield
  finally:
    _INTERPRET.reset(token)


def interpreting() -> bool:
  """Returns whether kernels should be interpreted."""
  return _INTERPRET.get()[0]


def jit(**options):
  """Returns a decorator as `jax.jit`, for functions that call kernels.

  They are traced once for each shape, and apart when interpreted.
  """

  def decorate(function):
    plain = jax.jit(function, **options)
    # Another function, for jit would find the first one's trace.
    interpreted = jax.jit(
      functools.wraps(function)(lambda *a, **k: function(*a, **k)), **options
    )

    @functools.wraps(function)
    def call(*args, **kwargs):
      return (interpreted if interpreting() else plain)(*args, **kwargs)

    return call

  return decorate


@functools.cache
def missing(backend: str) -> str | None:
  """Returns what must be installed before a backend can be traced, or None."""
  if backend == 'triton':
    for module in ('triton', 'jax_triton'):
      if importlib.util.find_spec(module) is None:
        return f'{module} (pip install mod_jax[gpu])'
  return None


def check(implementation: str | None, backends) -> None:
  """Refuses a backend that does not exist, or that cannot run for a reason.

  Raises:
    ValueError: the operation has no such backend.
    RuntimeError: something that the backend needs is not installed.
  """
  if implementation is None:
    return
  if implementation not in backends:
    names = ', '.join(map(repr, backends))
    raise ValueError(
      f'implementation={implementation!r}: expected {names} or None.'
    )
  if (lacking := missing(implementation)) is not None:
    raise RuntimeError(
      f'implementation={implementation!r} needs {lacking}, which is not'
      ' installed.'
    )


def run(implementation: str | None, backends: Mapping[str, Callable], *arrays):
  """Returns what one of the backends makes of the arrays.

  Args:
    implementation: name of a backend; None for the one of the platform that
      the program is lowered for, and `xla` where there is none.
    backends: a function for each, `xla` among them. Those with kernels are
      decorated by `jit`, so that they are traced once for each shape, not at
      every call.
    *arrays: arguments; None stands for an absent one.

  Raises:
    ValueError, RuntimeError: see `check`. Lowering for another platform than
      that of a backend asked for by name raises RuntimeError too.
  """
  if implementation is None and _INTERPRET.get()[1] in backends:
    implementation = _INTERPRET.get()[1]
  check(implementation, backends)
  if implementation == 'xla':
    return backends['xla'](*arrays)
  if implementation is None:
    kernels = {
      PLATFORMS[name]: function
      for name, function in backends.items()
      if name != 'xla' and missing(name) is None
    }
    return jax.lax.platform_dependent(
      *arrays, **kernels, default=backends['xla']
    )
  function = backends[implementation]
  if interpreting():
    return function(*arrays)
  platform = PLATFORMS[implementation]

  def refuse(*arrays):
    shapes, tree = jax.tree.flatten(jax.eval_shape(function, *arrays))
    out = _refuse_p.bind(
      *jax.tree.leaves(arrays),
      shapes=tuple((x.shape, x.dtype) for x in shapes),
      implementation=implementation,
    )
    return tree.unflatten(out)

  return jax.lax.platform_dependent(
    *arrays, **{platform: function}, default=refuse
  )


# Stands for a kernel on a platform that it has not been written for. Tracing it
# is harmless, since a program may yet be lowered for the right platform.
_refuse_p = core.Primitive('mod_jax_kernel_refused')
_refuse_p.multiple_results = True


@_refuse_p.def_abstract_eval
def _(*_, shapes, implementation):
  del implementation
  return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


@_refuse_p.def_impl
def _(*_, shapes, implementation):
  del shapes
  _fail(implementation, (jax.default_backend(),))


def _refuse_batched(arrays, axes, *, shapes, implementation):
  # A program for the right platform has this beside its kernel.
  size = next(
    x.shape[axis]
    for x, axis in zip(arrays, axes, strict=True)
    if axis is not None
  )
  out = _refuse_p.bind(
    *arrays,
    shapes=tuple(((size, *shape), dtype) for shape, dtype in shapes),
    implementation=implementation,
  )
  return out, [0] * len(out)


batching.primitive_batchers[_refuse_p] = _refuse_batched


def _refuse_lowering(context, *_, shapes, implementation):
  del shapes
  _fail(implementation, context.platforms or context.module_context.platforms)


def _fail(implementation, platforms):
  raise RuntimeError(
    f'implementation={implementation!r} runs on'
    f' {_DEVICES[PLATFORMS[implementation]]} only, and this program is for'
    f" {', '.join(platforms)}: use None or 'xla'."
  )


mlir.register_lowering(_refuse_p, _refuse_lowering)
