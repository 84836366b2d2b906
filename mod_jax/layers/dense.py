"""Linear maps and norms as the other layers want them: named axes, dtypes."""

import functools

from flax import linen as nn
import jax


def linear(
  features: tuple[int, ...],
  axes: tuple[str, ...],
  *,
  contract: int = 1,
  bias: bool = False,
  scale: float = 1.0,
  dtype: str = 'float32',
  out_dtype: str | None = None,
  name: str | None = None,
) -> nn.DenseGeneral:
  """Returns a linear map over the last `contract` axes, with named axes.

  The kernel starts as a truncated normal of standard deviation
  `scale / sqrt(fan_in)`, in float32 whatever the compute dtype.

  Args:
    features: sizes of the output axes.
    axes: logical names of the kernel's axes, inputs first.
    contract: how many trailing input axes are contracted.
    bias: whether to add one.
    scale: factor on the initial standard deviation.
    dtype: compute dtype.
    out_dtype: dtype of the result, unrounded from the sum; None = `dtype`.
    name: the module's name.
  """
  init = nn.initializers.variance_scaling(
    scale**2, 'fan_in', 'truncated_normal'
  )
  dot_general = None
  if out_dtype is not None:
    dot_general = functools.partial(
      jax.lax.dot_general, preferred_element_type=out_dtype
    )
  return nn.DenseGeneral(
    features,
    axis=tuple(range(-contract, 0)),
    use_bias=bias,
    dtype=dtype,
    kernel_init=nn.with_logical_partitioning(init, axes),
    bias_init=nn.with_logical_partitioning(
      nn.initializers.zeros, axes[contract:]
    ),
    dot_general=dot_general,
    name=name,
  )


def rms_norm(epsilon: float, dtype: str, name: str) -> nn.RMSNorm:
  """Returns root-mean-square normalisation (Zhang & Sennrich 2019)."""
  return nn.RMSNorm(
    epsilon=epsilon, dtype=dtype, scale_init=_replicated('ones'), name=name
  )


def layer_norm(epsilon: float, dtype: str, name: str) -> nn.LayerNorm:
  """Returns layer normalisation with scale and bias (Ba et al. 2016)."""
  return nn.LayerNorm(
    epsilon=epsilon,
    dtype=dtype,
    scale_init=_replicated('ones'),
    bias_init=_replicated('zeros'),
    # Variance around the mean, as other libraries do: checkpoints fit.
    use_fast_variance=False,
    name=name,
  )


NORMS = {'rms': rms_norm, 'layer': layer_norm}


def _replicated(init: str):
  return nn.with_logical_partitioning(
    getattr(nn.initializers, init), ('replicated',)
  )
