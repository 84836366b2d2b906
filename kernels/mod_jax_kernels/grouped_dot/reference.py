"""XLA's ragged products: the reference, and the backend for accelerators."""

import jax
import jax.numpy as jnp

_ROWS_ARE_SUMMED = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


def product(x_TD, w_EDF, size_E):
  """See `mod_jax_kernels.grouped_dot`."""
  return jax.lax.ragged_dot(
    x_TD, w_EDF, size_E, preferred_element_type=x_TD.dtype
  )


def weight_gradient(x_TD, dy_TF, size_E):
  """Returns dw_EDF, float32: the sum of xᵀ · dy over each group's rows."""
  return jax.lax.ragged_dot_general(
    *(x_TD, dy_TF, size_E, _ROWS_ARE_SUMMED),
    preferred_element_type=jnp.float32,
  )
