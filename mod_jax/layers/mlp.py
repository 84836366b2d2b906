"""The feed-forward half of a transformer block."""

from collections.abc import Callable
import dataclasses
from typing import Literal

from flax import linen as nn
import jax

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.layers import dense
from mod_jax.layers.slots import Slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(Slot):
  """Sizes and kind of a dense feed-forward."""

  tells = False

  width: config_lib.Size  # Features in and out.
  hidden: config_lib.Size  # Hidden units.
  kind: Literal['swiglu', 'gelu', 'gelu_tanh', 'relu'] = 'swiglu'  # Activation.
  bias: bool = False  # Biases of the linear maps.
  out_scale: float = 1.0  # Factor on the last kernel's initial std.

  def run(self, x, info, *, name, dtype, mode):
    del info, mode
    return MLP(self, dtype=dtype, name=name)(x), {}

  def flops(self, tokens):
    return {'mlp': 2 * tokens * self._kernels * self.width * self.hidden}

  @property
  def num_params(self):
    biases = (self._kernels - 1) * self.hidden + self.width
    return self._kernels * self.width * self.hidden + self.bias * biases

  @property
  def _kernels(self):
    return 3 if self.kind == 'swiglu' else 2


def hidden_units(kind: str, up: Callable[[str], jax.Array]) -> jax.Array:
  """Returns the hidden units; `up` applies a linear map by name."""
  if kind == 'swiglu':
    return nn.silu(up('gate')) * up('up')
  if kind == 'relu':
    return nn.relu(up('up'))
  return nn.gelu(up('up'), approximate=kind == 'gelu_tanh')


class MLP(nn.Module):
  """x_BLD -> y_BLD: SwiGLU (Shazeer 2020), or two linears with GELU or ReLU."""

  config: MLPConfig
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    config = self.config
    axes = ('embed', 'mlp')

    def up(name):
      return dense.Linear(
        (config.hidden,), axes, bias=config.bias, dtype=self.dtype, name=name
      )(x_BLD)

    hidden_BLF = hidden_units(config.kind, up)
    hidden_BLF = parallel.constrain(hidden_BLF, 'batch', 'length', 'act_mlp')
    y_BLD = dense.Linear(
      (config.width,),
      ('mlp', 'embed'),
      bias=config.bias,
      scale=config.out_scale,
      dtype=self.dtype,
      name='down',
    )(hidden_BLF)
    return parallel.constrain(y_BLD, 'batch', 'length', 'act_embed')
