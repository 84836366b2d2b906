"""Which backend of an operation runs: chosen in one place.

An operation is an `Op`: an ordered list of backends, several of them for one
platform if need be. Those with kernels are chosen where a program is lowered,
so that a program for a TPU, made on a laptop, has the TPU's kernel.
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

# Backend -> the platform that its kernels are compiled for, and tuned on.
PLATFORMS = {'pallas': 'tpu', 'triton': 'cuda'}
_DEVICES = {'tpu': 'a TPU', 'cuda': 'an NVIDIA GPU'}

# Whether kernels are interpreted, and which of them where none is named.
_INTERPRET = contextvars.ContextVar('interpret', default=(False, None))
# Block sizes to try, as items; see `tiles`.
TRIED = contextvars.ContextVar('tried', default=())


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value):
  """Gives a variable another value for a while."""
  token = variable.set(value)
  try:
    yield
  finally:
    variable.reset(token)


def interpret(backend: str | None = None):
  """Returns a context in which kernels asked for by name are interpreted.

  For tests: slow, but on any machine. It counts while a program is traced.

  Args:
    backend: runs, interpreted, where no backend is asked for as well.
  """
  return setting(_INTERPRET, (True, backend))


def interpreting() -> bool:
  """Returns whether kernels should be interpreted."""
  return _INTERPRET.get()[0]


def jit(**options):
  """Returns a decorator as `jax.jit`, for functions that call kernels.

  They are traced once for each shape, and apart for other settings of this
  module's variables.
  """

  def decorate(function):
    @functools.cache
    def compiled(*settings):
      # Another function each time, for jit would find the first one's trace.
      return jax.jit(
        functools.wraps(function)(lambda *a, **k: function(*a, **k)), **options
      )

    @functools.wraps(function)
    def call(*args, **kwargs):
      return compiled(interpreting(), TRIED.get())(*args, **kwargs)

    return call

  return decorate


def is_concrete(*args) -> bool:
  """Returns whether the shapes of arrays are numbers, and not symbols.

  `jax.export` traces a program for all batches at once with symbols in their
  place, of which nothing can be asked. None is no array.
  """
  shapes = [arg.shape for arg in args if arg is not None]
  return all(isinstance(n, int) for shape in shapes for n in shape)


def at_most(size, most: int) -> int:
  """Returns the smaller of a dimension and `most`, which a symbol may reach."""
  return min(size, most) if isinstance(size, int) else most


@functools.cache
def missing(backend: str) -> str | None:
  """Returns what must be installed before a backend can be traced, or None."""
  if backend == 'triton':
    for module in ('triton', 'jax_triton'):
      if importlib.util.find_spec(module) is None:
        return f'{module} (pip install mod_jax[gpu])'
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
  """One way to compute an operation.

  Attributes:
    name: by which it is asked for.
    module: has the operation's functions by name, all backends' of one
      signature; or the dotted name of a module, imported when it is needed.
      They are not differentiated: an operation with gradients is a `custom_vjp`
      whose two sides are each run. Those with kernels are decorated by `jit`.
    platform: that its kernels are compiled for; None if it runs anywhere.
    default_on: platforms on which it is taken where none is named, if none
      before it in the list is; None for all that it runs on, () for none.
    lacks: takes the operation's arguments; returns why the backend cannot
      compute them, as the end of a sentence that also names a way out, or None.
    suits: likewise; returns whether it is worth taking where none is named.
  """

  name: str
  module: Any
  platform: str | None = None
  default_on: tuple[str, ...] | None = None
  lacks: Callable[..., str | None] = lambda *args: None
  suits: Callable[..., bool] = lambda *args: True

  def function(self, name: str) -> Callable:
    """Returns one of the operation's functions."""
    module = self.module
    if isinstance(module, str):
      module = importlib.import_module(module)
    return getattr(module, name)


class Op:
  """An operation: its backends in order of preference.

  The last one runs anywhere, and takes all arguments: the reference.
  """

  def __init__(self, *backends: Backend):
    self.backends = list(backends)

  def register(self, backend: Backend) -> None:
    """Adds a backend, preferred to those that are there."""
    self.backends.insert(0, backend)

  def choose(self, implementation: str | None, *args) -> tuple[str, ...]:
    """Returns the names of the backends that may run, in order.

    Args:
      implementation: the only one that may; None leaves the choice.
      *args: the operation's arguments, for `Backend.lacks` and `suits`.

    Raises:
      ValueError: there is no backend of this name, or it cannot take the
        arguments.
      RuntimeError: something that it needs is not installed.
    """
    named = {backend.name: backend for backend in self.backends}
    if implementation is None:
      return tuple(
        name
        for name, backend in named.items()
        if backend.default_on != ()
        # Kernels are cut to the shapes that they are traced with.
        and (backend.platform is None or is_concrete(*args))
        and missing(name) is None
        and backend.lacks(*args) is None
        and backend.suits(*args)
      )
    if implementation not in named:
      names = ', '.join(map(repr, named))
      raise ValueError(
        f'implementation={implementation!r}: expected {names} or None.'
      )
    if (lacking := missing(implementation)) is not None:
      raise RuntimeError(
        f'implementation={implementation!r} needs {lacking}, which is not'
        ' installed.'
      )
    if (reason := named[implementation].lacks(*args)) is not None:
      raise ValueError(f'implementation={implementation!r} {reason}.')
    return (implementation,)

  def run(self, function: str, chosen: Sequence[str], *arrays, **static):
    """Returns what one of the backends makes of the arrays.

    Args:
      function: its name in the backends' modules.
      chosen: what `choose` returned. One alone was asked for by name, and runs
        or raises; of several, the first for the platform that the program is
        lowered for.
      *arrays: arguments; None stands for an absent one.
      **static: those that are no arrays.

    Raises:
      RuntimeError: the program is lowered for another platform than that of a
        backend that was asked for by name.
    """
    named = {backend.name: backend for backend in self.backends}
    interpreted = _INTERPRET.get()[1]
    if len(chosen) > 1 and interpreted in chosen:
      chosen = (interpreted,)

    def load(name):
      return functools.partial(named[name].function(function), **static)

    def lazily(name):
      return lambda *arrays: load(name)(*arrays)

    if len(chosen) == 1:
      backend = named[chosen[0]]
      compute = load(backend.name)
      if backend.platform is not None and not interpreting():
        first, *rest = arrays
        arrays = only_on(first, backend.platform, backend.name), *rest
      return compute(*arrays)
    *_, default = (n for n in chosen if named[n].platform is None)
    platforms = {}
    for name in chosen:
      backend = named[name]
      own = () if backend.platform is None else (backend.platform,)
      for platform in own if backend.default_on is None else backend.default_on:
        platforms.setdefault(platform, lazily(name))
    return jax.lax.platform_dependent(
      *arrays, **platforms, default=lazily(default)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def only_on(x, platform: str, implementation: str):
  """Returns an array, and refuses to be lowered for other platforms than one.

  Tracing is harmless, since a program may yet be lowered for the right one.

  Args:
    x: an operand of the kernel, which is thus lowered later than this.
    platform: that the kernel is compiled for.
    implementation: the backend's name, for the message.

  Raises:
    RuntimeError: when lowered for any other platform.
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
