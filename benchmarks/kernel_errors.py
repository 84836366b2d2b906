"""Errors of the device's kernels against plain XLA in float32.

    python benchmarks/kernel_errors.py

Each operation runs by every backend of the platform, forward and backward, in
float32 and in bfloat16; the reference is the XLA backend on the same arguments
in float32, with exact products. An error is the largest difference over the
largest value. Exits with 1 if one is above 1e-5, or 1e-2 in bfloat16, after
writing the result beside this file as JSON. With `--interpret=pallas` or
`triton`, that backend's kernels are interpreted at tiny sizes, on any machine.
"""

import contextlib

from absl import app, flags
import jax
import jax.numpy as jnp
import kernel_cases

import mod_jax_kernels
from mod_jax_kernels import dispatch
import results as results_lib

_INTERPRET = flags.DEFINE_enum(
  'interpret', None, ['pallas', 'triton'], 'A trial of this backend on a CPU.'
)
_OPS = flags.DEFINE_list('ops', list(kernel_cases.INPUTS), 'Which.')
_LIMITS = {'float32': 1e-5, 'bfloat16': 1e-2}


def backends(op: str) -> list[str]:
  """Returns the names of an operation's backends with kernels."""
  platform = {'gpu': 'cuda'}.get(*(jax.default_backend(),) * 2)
  names = [
    backend.name
    for backend in mod_jax_kernels.OPS[op].backends
    if backend.platform == platform
  ]
  wanted = _INTERPRET.value
  if wanted is None:
    return names
  known = [backend.name for backend in mod_jax_kernels.OPS[op].backends]
  return [wanted] if wanted in known else []


def errors(op: str, backend: str, dtype: str) -> dict[str, float]:
  """Returns the error of each result and gradient."""
  args = kernel_cases.arrays(op, dtype, tiny=_INTERPRET.value is not None)
  inputs = kernel_cases.INPUTS[op]
  wide = [x.astype('float32') if i < inputs else x for i, x in enumerate(args)]
  with jax.default_matmul_precision('highest'):
    want = jax.jit(kernel_cases.with_gradients(op, 'xla'))(*wide)
  context = contextlib.nullcontext()
  if _INTERPRET.value is not None:
    context = dispatch.interpret()
  with context:
    got = jax.jit(kernel_cases.with_gradients(op, backend))(*args)
  found = {}
  for kind, all_got, all_want in zip(
    ('result', 'gradient'), got, want, strict=True
  ):
    for i, (a, b) in enumerate(zip(all_got, all_want, strict=True)):
      a, b = a.astype(jnp.float32), b.astype(jnp.float32)
      largest = jnp.maximum(jnp.abs(b).max(), 1e-30)
      found[f'{kind} {i}'] = float(jnp.abs(a - b).max() / largest)
  return found


def main(_):
  found, wrong = {}, []
  for op in _OPS.value:
    for backend in backends(op):
      for dtype, limit in _LIMITS.items():
        name = f'{op} {backend} {dtype}'
        try:
          found[name] = errors(op, backend, dtype)
        except ValueError as refusal:  # Of a type of arrays.
          found[name] = str(refusal)
          continue
        # NaN is not smaller than anything.
        wrong += [name] * (not all(x <= limit for x in found[name].values()))
        print(name, found[name], flush=True)
  results_lib.save(
    __file__, {'limits': _LIMITS, 'errors': found, 'wrong': wrong}
  )
  if wrong:
    raise SystemExit(f'error: too far from the reference: {", ".join(wrong)}')


if __name__ == '__main__':
  app.run(main)
