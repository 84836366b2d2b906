"""Calls of Triton kernels through jax-triton, or interpreted on a CPU."""

import functools
import types

import jax
import ml_dtypes
import numpy as np

from mod_jax_kernels import dispatch

_OPTIONS = {
  # Version of PTX that Triton writes. JAX assembles PTX with the assembler of
  # CUDA, which may be older than the one that Triton writes for by default. The
  # assemblers of CUDA 12.8 and later read this version.
  'ptx_version': 87,
  'enable_fp_fusion': True,
}


def triton_call(
  kernel,
  *args,
  out_type,
  grid: tuple[int, ...],
  num_warps: int,
  num_stages: int,
  **meta,
):
  """Calls a kernel and returns its outputs; see `jax_triton.triton_call`.

  `jax.vmap` makes sequential calls: jax-triton has no batching rule, and would
  raise even in programs for other platforms, which trace the kernels too.

  Args:
    kernel: a `triton.jit` function. Its parameters are the arguments, then a
      pointer for each output, then the constants.
    *args: arrays and Python numbers, in order.
    out_type: a `jax.ShapeDtypeStruct` or a tuple of them.
    grid: up to three numbers of programs.
    num_warps: warps per program.
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
    import jax_triton  # Only installed for GPUs.

    def run(*arrays):
      return jax_triton.triton_call(
        *with_numbers(arrays),
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        backend_options=_OPTIONS,
        **meta,
      )

  return jax.custom_batching.sequential_vmap(run)(
    *(x for x, array in zip(args, is_array, strict=True) if array)
  )


def block_of(dimension: int, most: int) -> int:
  """Returns a block size for a dimension: the next power of two, up to `most`.

  It is at least 16, the smallest size that Triton's products support.
  """
  return min(most, max(16, 1 << (dimension - 1).bit_length()))


class _Tensor:
  """A NumPy array with the PyTorch methods that Triton's interpreter calls."""

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
    """Does nothing: the storage is already shared."""

  def copy_(self, _):
    """Does nothing: the interpreter wrote into the array itself."""


def _interpret(kernel, values, out_type, grid, meta):
  out_types = jax.tree.leaves(out_type)
  # Fill with NaN or -1, so that tests notice elements that are not written.
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
  """Returns a `triton.jit` function to interpret; patches the interpreter."""
  from triton.runtime.interpreter import InterpretedFunction
  from triton.runtime.jit import JITFunction

  _mend_dot()
  function = kernel.fn
  names = dict(function.__globals__)
  # Also replace the `triton.jit` functions that the kernel calls, in a copy of
  # its globals, because the compiler needs the original functions.
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
  """Patches the interpreter, which multiplies bits of bfloat16 as integers."""
  import triton.language as tl
  from triton.runtime import interpreter

  builder = interpreter.interpreter_builder
  create_dot = builder.create_dot

  def to_float32(handle):
    if handle.dtype.scalar != tl.bfloat16:
      return handle
    values = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)

  def create_dot_float32(a, b, *rest):
    return create_dot(to_float32(a), to_float32(b), *rest)

  builder.create_dot = create_dot_float32
