"""Helpers that the Pallas kernels of several operations share."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch

LANES = 128  # Lanes of a TPU's vector registers.
# On-chip memory for kernels with large blocks: more than the compiler's
# default, and less than any current TPU has.
VMEM_BYTES = 60 * 2**20


def product(a, b, contract=(1, 0)):
  """Returns a float32 product, summed over the axes `contract` of a and b."""
  # By default float32 operands would be rounded to bfloat16.
  exact = a.dtype == jnp.float32
  return jax.lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def as_column(row_1N):
  """Transposes [1, N] to [N, 1]; Mosaic can only transpose whole tiles."""
  tile = jnp.broadcast_to(row_1N, (LANES, row_1N.shape[1]))
  return tile.T[:, :1]


def block_of(length: int, most: int) -> int:
  """Returns the largest multiple of LANES, up to `most`, that divides `length`.

  Returns `length` if there is none.
  """
  sizes = range(LANES, min(length, most) + 1, LANES)
  return max((b for b in sizes if not length % b), default=length)


def of_present(kernel, inputs):
  """Returns a kernel that takes blocks only of the inputs that are not None.

  The returned kernel calls `kernel` with None in place of every absent input.
  """

  def present(*refs):
    remaining = iter(refs)
    kernel(
      *(None if x is None else next(remaining) for x in inputs), *remaining
    )

  return present


def interpret():
  """Returns the argument `interpret` of `pallas_call`; False to compile."""
  if dispatch.interpreting():
    return pltpu.InterpretParams(uninitialized_memory='nan')
  return False
