"""Linear maps and norms with named axes and float32 gradients."""

import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.layers.quantized import Quantized
from mod_jax.layers.slots import Slot
from mod_jax_kernels.attention import choice


def einsum(
  spec: str,
  x: jax.Array,
  kernel: jax.Array | Quantized,
  out_dtype: str | None = None,
  axes: tuple[str | None, ...] = (),
) -> jax.Array:
  """Returns the product of features and a parameter, in the features' dtype.

  The parameter's gradient is a float32 sum even if the features are bfloat16.
  Casting the parameter first would make its gradient bfloat16, and so the
  gradient's sum over devices.

  In `spec` each letter must be in at least two of x, kernel and result. With
  `out_dtype` the result has that dtype, without rounding to x's dtype first.
  `axes` are the kernel's logical axes; if `embed` is sharded, it is gathered
  once, in x's dtype. For a `Quantized` kernel `spec` and `axes` are ignored.
  """
  out_dtype = out_dtype or x.dtype
  if isinstance(kernel, Quantized):
    return kernel.product(x, out_dtype)
  operands, result = spec.split('->')
  of_x, of_kernel = operands.split(',')
  is_row = x.size == x.shape[-1] and of_x[0] == result[0] not in of_kernel
  if is_row and x.dtype == jnp.bfloat16 and choice.platform() == 'cpu':
    # A single row in bfloat16 takes XLA for CPUs longer than two do
    # (`benchmarks/one_row.py`).
    return einsum(spec, jnp.concatenate([x, x]), kernel, out_dtype, axes)[:1]
  if x.dtype == kernel.dtype:  # No cast: the plain product is enough.
    return jnp.einsum(spec, x, kernel, preferred_element_type=out_dtype)
  return _mixed_einsum(spec, out_dtype, axes, x, kernel)


def _gathered(x, kernel, axes):
  """Returns the kernel in x's dtype, gathered along its axis `embed`."""
  kernel = kernel.astype(x.dtype)
  if 'embed' not in axes or jax.sharding.get_abstract_mesh().empty:
    return kernel
  free = jax.sharding.PartitionSpec.UNCONSTRAINED
  spec = (None if name == 'embed' else free for name in axes)
  return jax.lax.with_sharding_constraint(
    kernel, jax.sharding.PartitionSpec(*spec)
  )


def _product(spec, out_dtype, axes, x, kernel):
  return _forward(spec, out_dtype, axes, x, kernel)[0]


def _forward(spec, out_dtype, axes, x, kernel):
  # Do not call `_mixed_einsum` here: rematerialisation policies do not see
  # products inside a custom_vjp, and so would not save them.
  kernel = _gathered(x, kernel, axes)
  y = jnp.einsum(spec, x, kernel, preferred_element_type=out_dtype)
  return y, (x, kernel)


def _backward(spec, out_dtype, axes, inputs, dy):
  del out_dtype, axes  # `dy` already has the result's dtype.
  x, kernel = inputs
  operands, result = spec.split('->')
  of_x, of_kernel = operands.split(',')
  dx = jnp.einsum(
    f'{result},{of_kernel}->{of_x}',
    dy,
    kernel,
    preferred_element_type=dy.dtype,
  )
  dkernel = jnp.einsum(
    f'{result},{of_x}->{of_kernel}',
    dy,
    x,
    preferred_element_type=jnp.float32,
  )
  return dx.astype(x.dtype), dkernel


_mixed_einsum = jax.custom_vjp(_product, nondiff_argnums=(0, 1, 2))
_mixed_einsum.defvjp(_forward, _backward)


def matrix(
  module: nn.Module, init, axes, shape: tuple[int, ...]
) -> jax.Array | Quantized:
  """Returns the parameter `kernel`; a `Quantized` if the model is quantized."""
  kernel = module.get_variable('params', 'kernel')
  if isinstance(kernel, Quantized):  # Its shape differs from `shape`.
    return kernel
  init = nn.with_logical_partitioning(init, axes)
  return module.param('kernel', init, shape)


class Linear(nn.Module):
  """A linear map over the last `contract` axes, with named axes.

  The kernel starts as a truncated normal of standard deviation
  `scale / sqrt(fan_in)`. Parameters and their gradients are float32 whatever
  the compute dtype.

  Attributes:
    features: sizes of the output axes.
    axes: logical names of the kernel's axes, inputs first.
    contract: number of trailing input axes to contract.
    bias: whether to add a bias.
    scale: factor on the initial standard deviation.
    dtype: compute dtype.
    out_dtype: dtype of the result, without rounding to `dtype` first; None =
      `dtype`.
  """

  features: tuple[int, ...]
  axes: tuple[str, ...]
  contract: int = 1
  bias: bool = False
  scale: float = 1.0
  dtype: str = dataclasses.field(default='float32', kw_only=True)
  out_dtype: str | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.astype(self.dtype)
    inputs, outputs = self.contract, len(self.features)
    init = nn.initializers.variance_scaling(
      self.scale**2,
      'fan_in',
      'truncated_normal',
      in_axis=tuple(range(inputs)),
      out_axis=tuple(range(inputs, inputs + outputs)),
    )
    shape = (*x.shape[-inputs:], *self.features)
    kernel = matrix(self, init, self.axes, shape)
    # Flatten to a product of matrices: for the gradient of a kernel with
    # several input axes, XLA would transpose all features first.
    batch = x.shape[: x.ndim - inputs]
    x_TI = x.reshape(math.prod(batch), -1)
    kernel_IO = kernel
    if not isinstance(kernel, Quantized):
      kernel_IO = kernel.reshape(x_TI.shape[1], math.prod(self.features))
    # Flattened axes (heads and channels) have no single name.
    axes = tuple(
      names[0] if len(names) == 1 else None
      for names in (self.axes[:inputs], self.axes[inputs:])
    )
    y_TO = einsum('TI,IO->TO', x_TI, kernel_IO, self.out_dtype, axes)
    # Add the bias before splitting the features into heads: otherwise a TPU
    # would write them split, and copy them before their use.
    y = y_TO.reshape(*batch, y_TO.shape[1])
    if self.bias:
      bias = self.param(
        'bias',
        nn.with_logical_partitioning(nn.initializers.zeros, self.axes[inputs:]),
        self.features,
      )
      # Add in float32 and cast afterwards, so that the bias gets a float32
      # gradient.
      y = (y + bias.reshape(-1)).astype(y.dtype)
    return y.reshape(*batch, *self.features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(Slot):
  """Config of a `Linear` in a module slot (`slots.py`).

  Attributes:
    inputs: sizes of the axes that are contracted.
    outputs: sizes of the output axes.
    axes: logical names of the kernel's axes, inputs first.
    bias: whether to add a bias.
    scale: factor on the initial standard deviation.
  """

  tells = False

  inputs: tuple[config_lib.Size, ...]
  outputs: tuple[config_lib.Size, ...]
  axes: tuple[str | None, ...]
  bias: bool = False
  scale: float = 1.0

  def run(self, x, info, *, name, dtype, mode):
    del info, mode
    linear = Linear(
      self.outputs,
      self.axes,
      contract=len(self.inputs),
      bias=self.bias,
      scale=self.scale,
      dtype=dtype,
      name=name,
    )
    return linear(x), {}

  def flops(self, tokens):
    return {'linear': 2 * tokens * math.prod(self.inputs + self.outputs)}

  def weight_flops(self, name, tokens):
    return {f'{name}/kernel': self.flops(tokens)['linear']}

  @property
  def num_params(self):
    bias = self.bias * math.prod(self.outputs)
    return math.prod(self.inputs + self.outputs) + bias


class Kernels(nn.Module):
  """Parameters of N maps of equal shapes: kernel_NIO, and bias_NO or None."""

  config: LinearConfig  # Config of one map, with one input and one output axis.
  count: int  # N.
  axis: str  # Logical name of the axis of maps.

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array | None]:
    config = self.config
    # The fan-in is that of one map.
    init = nn.initializers.variance_scaling(
      config.scale**2,
      *('fan_in', 'truncated_normal'),
      in_axis=1,
      out_axis=2,
      batch_axis=0,
    )
    kernel_NIO = self.param(
      'kernel',
      nn.with_logical_partitioning(init, (self.axis, *config.axes)),
      (self.count, *config.inputs, *config.outputs),
    )
    if not config.bias:
      return kernel_NIO, None
    zeros = nn.with_logical_partitioning(
      nn.initializers.zeros, (self.axis, config.axes[-1])
    )
    return kernel_NIO, self.param('bias', zeros, (self.count, *config.outputs))


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
    # Two-pass variance, as in the libraries that checkpoints come from.
    use_fast_variance=False,
    name=name,
  )


NORMS = {'rms': rms_norm, 'layer': layer_norm}


def _replicated(init: str):
  return nn.with_logical_partitioning(
    getattr(nn.initializers, init), ('replicated',)
  )
