"""A matrix product per group of rows, as mixtures of experts need."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.grouped_dot import loop, reference


def _lacks(x_TD, *_) -> str | None:
  """Returns why the kernels do not support the rows, or None."""
  if not x_TD.size:
    return f"takes no empty arrays {x_TD.shape}: use None or 'xla'"
  return dispatch.wrong_types('x', [x_TD])


Implementation = Literal['xla', 'loop', 'triton']
OP = dispatch.Op(
  # `xla` multiplies all rows with the matrices of all groups on CPUs and on
  # NVIDIA GPUs (JAX 0.11.2): eight times the work with eight groups.
  dispatch.Backend(
    name='triton',
    module='mod_jax_kernels.grouped_dot.triton_gpu',
    platform='cuda',
    lacks=_lacks,
  ),
  dispatch.Backend(name='loop', module=loop, default_on=('cpu',)),
  dispatch.Backend(name='xla', module=reference),
)


def grouped_dot(
  x_TD: jax.Array,
  w_EDF: jax.Array,
  size_E: jax.Array,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns y_TF: each row's product with the matrix of its group.

  The first `size_E[0]` rows belong to the first group, and so on. The results
  of rows after the last group are 0, without a gradient; backends may skip
  their products.

  Args:
    x_TD: rows, sorted by group; the products are in their dtype.
    w_EDF: a matrix for each group, float32 or in the dtype of x. Its gradient
      is a float32 sum.
    size_E: int32 numbers of rows of the groups; their sum is at most T.
    implementation: `xla`, which is `jax.lax.ragged_dot`; `loop`, over blocks of
      rows of one group; `triton` (GPU); or None for `loop` on CPUs, `triton` on
      NVIDIA GPUs and `xla` elsewhere.

  Raises:
    ValueError: shapes do not match, or the backend is unknown or does not
      support these rows.
    RuntimeError: the requested backend cannot run here.
  """
  if (
    x_TD.ndim != 2
    or w_EDF.ndim != 3
    or w_EDF.shape[1] != x_TD.shape[1]
    or size_E.shape != w_EDF.shape[:1]
    or not len(size_E)
  ):
    raise ValueError(
      f'x {list(x_TD.shape)}, w {list(w_EDF.shape)}, size'
      f' {list(size_E.shape)}: expected [T, D], [E, D, F] and [E], and one'
      ' group at least.'
    )
  chosen = OP.choose(implementation, x_TD, w_EDF, size_E)
  return _grouped_dot(chosen, x_TD, w_EDF, size_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(chosen, x_TD, w_EDF, size_E):
  return OP.run('product', chosen, x_TD, w_EDF.astype(x_TD.dtype), size_E)


def _forward(chosen, x_TD, w_EDF, size_E):
  return _grouped_dot(chosen, x_TD, w_EDF, size_E), (x_TD, w_EDF, size_E)


def _backward(chosen, inputs, dy_TF):
  x_TD, w_EDF, size_E = inputs
  w_EFD = jnp.swapaxes(w_EDF.astype(x_TD.dtype), 1, 2)
  dx_TD = OP.run('product', chosen, dy_TF, w_EFD, size_E)
  dw_EDF = OP.run('weight_gradient', chosen, x_TD, dy_TF, size_E)
  return dx_TD, dw_EDF.astype(w_EDF.dtype), None


_grouped_dot.defvjp(_forward, _backward)
