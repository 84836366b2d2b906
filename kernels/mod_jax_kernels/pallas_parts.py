"""What the Pallas kernels of several operations share."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch

LANES = 128  # Of a TPU's vectors.


def product(a, b, contract=(1, 0)):
  """Returns a matrix product in float32, summed over an axis of each."""
  # Float32 in full: by default it would be rounded to bfloat16.
  exact = a.dtype == jnp.float32
  return jax.lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def block_of(length: int, most: int) -> int:
  """Returns the largest block of whole lanes that divides a length, or it."""
  fitting = range(LANES, min(length, most) + 1, LANES)
  return max((b for b in fitting if not length % b), default=length)


def interpret():
  """Returns `pallas_call`'s argument: whether memory is modelled on a CPU."""
  if dispatch.interpreting():
    return pltpu.InterpretParams(uninitialized_memory='nan')
  return False
