"""Chosen tokens out of their sequence, and their updates back into it.

The two moves are each other's transposes. For a TPU there is no kernel: blocks
of single rows would make a grid step of every token, slow by construction.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.token_move import reference

Implementation = Literal['xla', 'triton']
_BACKENDS = ('xla', 'triton')


def gather_tokens(
  x_BLD: jax.Array,
  index_BK: jax.Array,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns x_BKD, the tokens at the given positions.

  Args:
    x_BLD: features of all tokens.
    index_BK: integer positions in 0..L-1, ascending and unique in each row. It
      is a promise: others give meaningless results.
    implementation: `xla`; `triton` (GPU); or None, which is `xla` until the
      kernel is measured.

  Raises:
    ValueError: shapes that do not fit, positions that are no integers, or an
      unknown backend.
    RuntimeError: a backend that was asked for by name and cannot run.
  """
  x_BLD, index_BK = jnp.asarray(x_BLD), jnp.asarray(index_BK)
  _check(x_BLD, index_BK)
  dispatch.check(implementation, _BACKENDS)
  return _gather(
    x_BLD, index_BK.astype(jnp.int32), x_BLD.shape[1], implementation or 'xla'
  )


def scatter_add_tokens(
  x_BLD: jax.Array,
  index_BK: jax.Array,
  update_BKD: jax.Array,
  gate_BK: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns y_BLD: x, with `gate · update` added at the given positions.

  The product is taken in float32 and rounded to the type of x; so is the sum.

  Args:
    x_BLD: features of all tokens.
    index_BK: see `gather_tokens`.
    update_BKD: what to add, of any floating type.
    gate_BK: factors on the updates; None for 1.
    implementation: see `gather_tokens`.

  Raises:
    ValueError, RuntimeError: see `gather_tokens`.
  """
  x_BLD, index_BK = jnp.asarray(x_BLD), jnp.asarray(index_BK)
  update_BKD = jnp.asarray(update_BKD)
  _check(x_BLD, index_BK)
  if update_BKD.shape != (*index_BK.shape, x_BLD.shape[-1]):
    raise ValueError(
      f'update {update_BKD.shape}: expected'
      f' {(*index_BK.shape, x_BLD.shape[-1])}, a row for each of index'
      f' {index_BK.shape}, as wide as x {x_BLD.shape}.'
    )
  if gate_BK is not None:
    gate_BK = jnp.asarray(gate_BK)
    if gate_BK.shape != index_BK.shape:
      raise ValueError(
        f'gate {gate_BK.shape}: expected a factor for each of index'
        f' {index_BK.shape}.'
      )
  dispatch.check(implementation, _BACKENDS)
  return _scatter(
    x_BLD,
    index_BK.astype(jnp.int32),
    update_BKD,
    gate_BK,
    implementation or 'xla',
  )


def _check(x_BLD, index_BK):
  if (
    x_BLD.ndim != 3
    or index_BK.ndim != 2
    or x_BLD.shape[0] != index_BK.shape[0]
    or index_BK.shape[1] > x_BLD.shape[1]
  ):
    raise ValueError(
      f'x {x_BLD.shape}, index {index_BK.shape}: expected [B, L, D] and [B, K],'
      ' K <= L.'
    )
  if not jnp.issubdtype(index_BK.dtype, jnp.integer):
    raise ValueError(f'index of type {index_BK.dtype}: expected integers.')


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather(x_BLD, index_BK, length, implementation):
  del length  # For the gradient.
  return _run('gather', implementation, x_BLD, index_BK)


def _gather_forward(x_BLD, index_BK, length, implementation):
  return _gather(x_BLD, index_BK, length, implementation), index_BK


def _gather_backward(length, implementation, index_BK, dy_BKD):
  batch, _, width = dy_BKD.shape
  x_BLD = jnp.zeros((batch, length, width), dy_BKD.dtype)
  return _run('scatter', implementation, x_BLD, index_BK, dy_BKD, None), None


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scatter(x_BLD, index_BK, update_BKD, gate_BK, implementation):
  return _run('scatter', implementation, x_BLD, index_BK, update_BKD, gate_BK)


def _scatter_forward(x_BLD, index_BK, update_BKD, gate_BK, implementation):
  y_BLD = _scatter(x_BLD, index_BK, update_BKD, gate_BK, implementation)
  # Without a gate the update is only wanted for its type.
  kept = update_BKD[:0] if gate_BK is None else update_BKD
  return y_BLD, (index_BK, kept, gate_BK)


def _scatter_backward(implementation, residuals, dy_BLD):
  index_BK, update_BKD, gate_BK = residuals
  if gate_BK is None:
    d_BKD = _run('gather', implementation, dy_BLD, index_BK)
    return dy_BLD, None, d_BKD.astype(update_BKD.dtype), None
  d_BKD, d_BK = _run(
    'gather_gated', implementation, dy_BLD, index_BK, update_BKD, gate_BK
  )
  return dy_BLD, None, d_BKD, d_BK


_scatter.defvjp(_scatter_forward, _scatter_backward)


def _run(move, implementation, *arrays):

  def triton(*arrays):
    from mod_jax_kernels.token_move import triton_gpu

    return getattr(triton_gpu, move)(*arrays)

  backends = {'xla': getattr(reference, move), 'triton': triton}
  return dispatch.run(implementation, backends, *arrays)
