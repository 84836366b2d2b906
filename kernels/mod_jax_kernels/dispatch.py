"""Choice of the backend that runs an operation.

An operation is an `Op`: an ordered list of backends, with possibly several per
platform. Backends with kernels are chosen when a program is lowered, so that a
program lowered for a TPU on a laptop has the TPU's kernel. Each operation lists
its backends and their conditions in its `__init__.py`.
"""

from collections.abc import Callable, Sequence
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import batching, mlir

# Backend -> platform for which its kernels are compiled and tuned.
PLATFORMS = {'pallas': 'tpu', 'triton': 'cuda'}
_DEVICES = {'tpu': 'a TPU', 'cuda': 'an NVIDIA GPU'}

# (Whether kernels are interpreted, the backend to use if none is requested).
_INTERPRET = contextvars.ContextVar('interpret', default=(False, None))
# Block sizes to try, as (name, size) pairs; see `tiles`.
TRIED = contextvars.ContextVar('tried', default=())


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value):
  """Context manager: gives a context variable another value for its body."""
  token = variable.set(value)
  try:
    yield
  finally:
    variable.reset(token)


def interpret(backend: str | None = None):
  """Returns a context manager; programs traced in it interpret the kernels.

  For tests: slow, but works on any machine. Kernels must be requested by name.
  Where no backend is requested, `backend` is interpreted, if given.
  """
  return setting(_INTERPRET, (True, backend))


def interpreting() -> bool:
  """Returns whether kernels should be interpreted."""
  return _INTERPRET.get()[0]


def jit(**options):
  """Returns a decorator like `jax.jit`, for functions that call kernels.

  It traces separately for each setting of this module's context variables.
  """

  def decorate(function):
    @functools.cache
    def compiled(*settings):
      # A new function for each setting, or jit would reuse the first trace.
      return jax.jit(
        functools.wraps(function)(lambda *a, **k: function(*a, **k)), **options
      )

    @functools.wraps(function)
    def call(*args, **kwargs):
      return compiled(interpreting(), TRIED.get())(*args, **kwargs)

    return call

  return decorate


def is_concrete(*args) -> bool:
  """Returns whether the arrays' shapes are numbers and not symbols.

  `jax.export` can trace a program for any batch size, with symbolic dimensions
  that do not support comparisons. Arguments that are None are ignored.
  """
  shapes = [arg.shape for arg in args if arg is not None]
  return all(isinstance(n, int) for shape in shapes for n in shape)


def at_most(size, most: int) -> int:
  """Returns the minimum of a dimension and `most`; `most` if it is symbolic."""
  return min(size, most) if isinstance(size, int) else most


def wrong_types(
  names: str, arrays, types=('float32', 'bfloat16')
) -> str | None:
  """Returns why kernels do not support the arrays' dtypes, or None if they do.

  Args:
    names: names of the arrays, for the message (see `Backend.lacks`).
    arrays: arrays, which must all have the same dtype.
    types: names of the dtypes that kernels support.
  """
  found = [x.dtype.name for x in arrays]
  if found[0] in types and len(set(found)) == 1:
    return None
  reason = f'takes {names} of {" or ".join(types)}, not {", ".join(found)}'
  return f"{reason}: cast them, or use None or 'xla'"


@functools.cache
def missing(backend: str) -> str | None:
  """Returns a missing package that a backend needs, with a remedy, or None."""
  if backend == 'triton':
    for module in ('triton', 'jax_triton'):
      if importlib.util.find_spec(module) is None:
        return f'{module} (pip install mod_jax[gpu])'
  return None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
  """One way to compute an operation.

  Attributes:
    name: name by which the backend is requested.
    module: module with the operation's functions, of equal names and signatures
      in all backends; or its dotted name, to import it when needed. The
      functions need no gradients: a differentiable operation is a `custom_vjp`
      that runs one of them in each direction. Those with kernels are decorated
      by `jit`.
    platform: platform for which the kernels are compiled; None if it runs
      anywhere.
    default_on: platforms on which the backend may run if none is requested; the
      first such backend in the list runs. None for all platforms that it
      supports, () for none.
    lacks: takes the operation's arguments; returns why the backend does not
      support them, as the end of a sentence that also names a remedy, or None.
    suits: takes the operation's arguments; returns whether the backend is
      efficient for them. Only called if no backend is requested.
  """

  name: str
  module: Any
  platform: str | None = None
  default_on: tuple[str, ...] | None = None
  lacks: Callable[..., str | None] = lambda *args: None
  suits: Callable[..., bool] = lambda *args: True

  def function(self, name: str) -> Callable:
    """Returns the function of this name in `module`, imported if needed."""
    module = self.module
    if isinstance(module, str):
      module = importlib.import_module(module)
    return getattr(module, name)


class Op:
  """An operation: its backends in order of preference.

  The last backend, the reference, runs anywhere and supports all arguments.
  """

  def __init__(self, *backends: Backend):
    self.backends = list(backends)

  def register(self, backend: Backend) -> None:
    """Adds a backend, which is preferred to the existing backends.

    Raises ValueError if there is a backend of this name.
    """
    if any(backend.name == other.name for other in self.backends):
      raise ValueError(f'name={backend.name!r} is that of another backend.')
    self.backends.insert(0, backend)

  def choose(self, implementation: str | None, *args) -> tuple[str, ...]:
    """Returns the names of the backends that may run, in order of preference.

    Args:
      implementation: name of the requested backend; None for any.
      *args: the operation's arguments, for `Backend.lacks` and `suits`.

    Raises:
      ValueError: the requested backend does not exist or does not support the
        arguments.
      RuntimeError: a package that the backend needs is not installed.
    """
    by_name = {backend.name: backend for backend in self.backends}
    if implementation is None:
      return tuple(
        name
        for name, backend in by_name.items()
        if backend.default_on != ()
        # Kernels need concrete shapes.
        and (backend.platform is None or is_concrete(*args))
        and missing(name) is None
        and backend.lacks(*args) is None
        and backend.suits(*args)
      )
    if implementation not in by_name:
      names = ', '.join(map(repr, by_name))
      raise ValueError(
        f'implementation={implementation!r}: expected {names} or None.'
      )
    if (package := missing(implementation)) is not None:
      raise RuntimeError(
        f'implementation={implementation!r} needs {package}, which is not'
        ' installed.'
      )
    if (reason := by_name[implementation].lacks(*args)) is not None:
      raise ValueError(f'implementation={implementation!r} {reason}.')
    return (implementation,)

  def run(self, function: str, chosen: Sequence[str], *arrays, **static):
    """Runs a function of one of the backends, and returns its results.

    Args:
      function: name of the function in the backends' modules.
      chosen: result of `choose`. A single backend runs or raises; of several,
        the first that supports the platform of lowering runs.
      *arrays: array arguments; None for an absent one.
      **static: arguments that are not arrays.

    Raises:
      RuntimeError: the program is lowered for a platform on which the single
        chosen backend does not run.
    """
    by_name = {backend.name: backend for backend in self.backends}
    interpreted = _INTERPRET.get()[1]
    if len(chosen) > 1 and interpreted in chosen:
      chosen = (interpreted,)

    def compute(name):
      settings = interpreting(), TRIED.get()
      static_args = tuple(sorted(static.items()))
      return _compute(by_name[name], function, static_args, settings)

    if len(chosen) == 1:
      backend = by_name[chosen[0]]
      if backend.platform is not None and not interpreting():
        first, *rest = arrays
        arrays = only_on(first, backend.platform, backend.name), *rest
      return compute(backend.name)(*arrays)
    platforms = {}
    for name in chosen:
      backend = by_name[name]
      if backend.platform is None and backend.default_on is None:
        break  # Runs anywhere; at the latest, the reference is reached.
      for platform in backend.default_on or (backend.platform,):
        platforms.setdefault(platform, compute(name))
    return jax.lax.platform_dependent(
      *arrays, **platforms, default=compute(name)
    )


@functools.cache
def _compute(backend, function, static_args, settings):
  """Returns a jitted function of arrays, which imports the backend when called.

  Equal arguments give the same function, which is hence compiled only once,
  even if called outside of `jax.jit`. With other `settings`, JAX traces anew.
  """
  del settings

  def compute(*arrays):
    return backend.function(function)(*arrays, **dict(static_args))

  return jax.jit(compute, inline=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def only_on(x, platform: str, implementation: str):
  """Returns x; raises RuntimeError when lowered for another platform.

  Tracing does not raise, since it does not determine the platform.

  Args:
    x: an operand of the kernel, so that the check comes before the kernel.
    platform: platform for which the kernel is compiled.
    implementation: name of the backend, for the message.
  """
  return _only_on_p.bind(x, platform=platform, implementation=implementation)


@only_on.defjvp
def _(platform, implementation, primals, tangents):
  return only_on(*primals, platform, implementation), tangents[0]


_only_on_p = core.Primitive('mod_jax_kernel_only_on')
_only_on_p.def_abstract_eval(lambda x, **_: x)
_only_on_p.def_impl(
  lambda x, **which: jax.jit(only_on, static_argnames=which)(x, **which)
)
batching.defvectorized(_only_on_p)


def _lower(context, x, *, platform, implementation):
  platforms = context.platforms or context.module_context.platforms
  if set(platforms) != {platform}:
    raise RuntimeError(
      f'implementation={implementation!r} runs on'
      f' {_DEVICES.get(platform, platform)} only, and this program is for'
      f" {', '.join(platforms)}: use None or 'xla'."
    )
  return [x]


mlir.register_lowering(_only_on_p, _lower)
