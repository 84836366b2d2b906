"""Calls of Triton kernels: through jax-triton, or interpreted on a CPU."""

import functools
import types

import jax
import ml_dtypes
import numpy as np

from mod_jax_kernels import dispatch


def triton_call(
  kernel,
  *args,
  out_type,
  grid: tuple[int, ...],
  num_warps: int,
  num_stages: int,
  **meta,
):
  """Returns what a kernel writes; see `jax_triton.triton_call`.

  Under `jax.vmap` there is one call after another: jax-triton knows none, and
  would refuse even a program for another platform, which has its kernels too.

  Args:
    kernel: a `triton.jit` function. Its parameters are the arguments, then a
      pointer for each result, then the constants.
    *args: arrays and Python numbers, in order.
    out_type: a `jax.ShapeDtypeStruct` or a tuple of them.
    grid: up to three numbers of programs.
    num_warps: warps of a program.
    num_stages: depth of software pipelining.
    **meta: the kernel's constants.
  """
  is_array = [isinstance(x, jax.Array) for x in args]
  numbers = [x for x, array in zip(args, is_array, strict=True) if not array]

  def with_numbers(arrays):
    arrays, rest = iter(arrays), iter(numbers)
    return [next(arrays if array else rest) for array in is_array]

  if dispatch.interpreting():

    def interpret(*arrays):
      return _interpret(kernel, with_numbers(arrays), out_type, grid, meta)

    def run(*arrays):
      return jax.pure_callback(interpret, out_type, *arrays)
  else:
    import jax_triton  # Only where a GPU is meant.

    def run(*arrays):
      return jax_triton.triton_call(
        *with_numbers(arrays),
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **meta,
      )

  return jax.custom_batching.sequential_vmap(run)(
    *(x for x, array in zip(args, is_array, strict=True) if array)
  )


class _Tensor:
  """A NumPy array as what Triton's interpreter takes for a tensor on a CPU."""

  def __init__(self, array: np.ndarray):
    self.array = array
    self.dtype = str(array.dtype)

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def new_empty(self, *_, **__):
    return _Tensor(self.array)

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return ()

  def set_(self, *_):
    """The storage is the same already."""

  def copy_(self, _):
    """The interpreter wrote into the array itself."""


def _interpret(kernel, values, out_type, grid, meta):
  out_types = jax.tree.leaves(out_type)
  # Poisoned, so that an element that no program writes is seen.
  outputs = [_poisoned(x.shape, np.dtype(x.dtype)) for x in out_types]
  tensors = [_Tensor(np.array(x)) if hasattr(x, 'shape') else x for x in values]
  interpreted(kernel)[grid](*tensors, *map(_Tensor, outputs), **meta)
  return jax.tree.unflatten(jax.tree.structure(out_type), outputs)


def _poisoned(shape, dtype):
  if dtype.kind == 'f' or dtype == ml_dtypes.bfloat16:
    return np.full(shape, np.nan, dtype)
  return np.full(shape, -1, dtype)


@functools.cache
def interpreted(kernel):
  """Returns a `triton.jit` function as one that Triton interprets."""
  from triton.runtime.interpreter import InterpretedFunction
  from triton.runtime.jit import JITFunction

  _mend_dot()
  function = kernel.fn
  names = dict(function.__globals__)
  # Those that it calls as well; in a copy, for the compiler needs them as
  # they are.
  for name in function.__code__.co_names:
    if isinstance(names.get(name), JITFunction):
      names[name] = interpreted(names[name])
  copy = types.FunctionType(
    function.__code__, names, function.__name__, function.__defaults__
  )
  copy.__annotations__ = function.__annotations__
  return InterpretedFunction(copy)


@functools.cache
def _mend_dot():
  """Lets the interpreter multiply bfloat16: it would multiply the bits."""
  import triton.language as tl
  from triton.runtime import interpreter

  builder = interpreter.interpreter_builder
  create_dot = builder.create_dot

  def widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
      return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)

  def mended(a, b, *rest):
    return create_dot(widened(a), widened(b), *rest)

  builder.create_dot = mended
