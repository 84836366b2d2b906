"""The feed-forward half of a transformer block."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Literal

from flax import linen as nn
import jax

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.layers import dense
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(Slot):
  """Sizes and kind of a dense feed-forward."""

  tells = False  # `run` returns no aux.

  width: config_lib.Size  # Features in and out.
  hidden: config_lib.Size  # Hidden units.
  # Activation; swiglu has a third linear map, `gate`.
  kind: Literal['swiglu', 'gelu', 'gelu_tanh', 'quick_gelu', 'relu'] = 'swiglu'
  bias: bool = False  # Biases of the linear maps.
  out_scale: float = 1.0  # Factor on the last kernel's initial std.
  # Replacements of linear maps by name: `gate`, `up`, `down`.
  slots: tuple[tuple[str, Slot], ...] = ()

  def run(self, x, info, *, name, dtype, mode):
    return MLP(self, mode, dtype=dtype, name=name)(x, info), {}

  def flops(self, tokens):
    parts = {}
    for slot in self.maps.values():
      for part, count in slot.flops(tokens).items():
        part = 'mlp' if part == 'linear' else part
        parts[part] = parts.get(part, 0) + count
    return parts

  def weight_flops(self, name, tokens):
    counts = {}
    for map_name, slot in self.maps.items():
      counts |= slot.weight_flops(f'{name}/{map_name}', tokens)
    return counts

  @property
  def num_params(self):
    return sum(slot.num_params for slot in self.maps.values())

  @functools.cached_property
  def maps(self):
    up = dense.LinearConfig(
      inputs=(self.width,),
      outputs=(self.hidden,),
      axes=('embed', 'mlp'),
      bias=self.bias,
    )
    down = dense.LinearConfig(
      inputs=(self.hidden,),
      outputs=(self.width,),
      axes=('mlp', 'embed'),
      bias=self.bias,
      scale=self.out_scale,
    )
    gate = {'gate': up} if self.kind == 'swiglu' else {}
    return gate | {'up': up, 'down': down} | dict(self.slots)


def hidden_units(kind: str, up: Callable[[str], jax.Array]) -> jax.Array:
  """Returns hidden units; `up` maps a linear map's name to the map's output."""
  if kind == 'swiglu':
    return nn.silu(up('gate')) * up('up')
  if kind == 'relu':
    return nn.relu(up('up'))
  if kind == 'quick_gelu':  # The activation of CLIP (Radford et al. 2021).
    hidden = up('up')
    return hidden * nn.sigmoid(1.702 * hidden)
  return gelu(up('up'), approximate=kind == 'gelu_tanh')


def gelu(x: jax.Array, approximate: bool = False) -> jax.Array:
  """Returns GELU of x; the backward pass recomputes it.

  Otherwise XLA would save up to four intermediate arrays. To write and read
  them takes longer on two CPU cores than to recompute them, and they would take
  a quarter of a ViT's memory on a GPU.
  """
  return jax.checkpoint(functools.partial(nn.gelu, approximate=approximate))(x)


class MLP(nn.Module):
  """SwiGLU (Shazeer 2020), or two linear maps, the first with GELU or ReLU."""

  config: MLPConfig
  mode: Mode = Mode()
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, info: TokenInfo | None = None
  ) -> jax.Array:
    def run(name, x):
      slot = self.config.maps[name]
      return slot.run(x, info, name=name, dtype=self.dtype, mode=self.mode)[0]

    hidden_BLF = hidden_units(self.config.kind, lambda name: run(name, x_BLD))
    hidden_BLF = parallel.constrain(hidden_BLF, 'batch', 'length', 'act_mlp')
    y_BLD = run('down', hidden_BLF)
    return parallel.constrain(y_BLD, 'batch', 'length', 'act_embed')
