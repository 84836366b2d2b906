"""Low-rank adapters (LoRA, Hu et al. 2021) of frozen linear maps.

Equation 3: `h = W x + (alpha / rank) · B A x`, with W frozen. A starts as a
Gaussian and B as zero, so that an adapted model begins as the base model.
"""

from collections.abc import Sequence
import dataclasses
import re

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import errors
from mod_jax.layers import dense
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.dense import LinearConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo

# Regular expression of the names of the adapters' parameters.
PARAMETERS = r'.*_lora/(down|up)/kernel'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
  """Which linear maps have low-rank adapters, and of what rank."""

  rank: config_lib.Size = 16  # Width between the two matrices of an adapter.
  alpha: config_lib.Positive = 32.0  # Updates are multiplied by alpha / rank.
  # Regular expressions of the maps to adapt, such as block_0/attention/query or
  # block_0/mlp/up; each must match a full name.
  maps: tuple[str, ...] = (r'block_\d+/.*',)

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.maps, "names of maps, such as (r'block_\\d+/mlp/.*',)", 'maps')
    for pattern in self.maps:
      errors.require_pattern(pattern, 'lora.maps')

  def adapt(self, blocks: Sequence[BlockConfig]) -> list[BlockConfig]:
    """Returns a model's blocks with adapters beside the linear maps that match.

    Raises UserError if a pattern matches no map.
    """
    names = [
      name
      for i, block in enumerate(blocks)
      for slot_name, slot in block.slots.items()
      for name in linear_maps(f'block_{i}/{slot_name}', slot)
    ]
    expected = 'linear maps such as block_0/mlp/up, block_0/attention/query'
    errors.require_matches(self.maps, names, expected, 'lora.maps')
    return [
      block.with_slots(
        {
          name: new
          for name, slot in block.slots.items()
          if (new := self._adapted(f'block_{i}/{name}', slot)) != slot
        }
      )
      for i, block in enumerate(blocks)
    ]

  def _adapted(self, name: str, slot: Slot) -> Slot:
    """Returns the slot of this full name, with adapters where maps match."""
    if not isinstance(slot, LinearConfig):
      maps = {
        inner: self._adapted(f'{name}/{inner}', inner_slot)
        for inner, inner_slot in slot.maps.items()
      }
      return slot if maps == slot.maps else slot.with_maps(maps)
    if not any(re.fullmatch(pattern, name) for pattern in self.maps):
      return slot
    return AdaptedConfig(base=slot, rank=self.rank, alpha=self.alpha)


def linear_maps(name: str, slot: Slot) -> dict[str, Slot]:
  """Returns the linear maps in a slot by full name, such as block_0/mlp/up.

  `name` is the full name of the module slot. Maps with adapters are included.
  """
  if isinstance(slot, LinearConfig | AdaptedConfig):
    return {name: slot}
  found = {}
  for inner, inner_slot in slot.maps.items():
    found |= linear_maps(f'{name}/{inner}', inner_slot)
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedConfig(Slot):
  """A linear map with an adapter beside it.

  The map's parameters have the same names and shapes as without an adapter, so
  a dense checkpoint provides all parameters but those of the adapters.
  """

  tells = False

  base: LinearConfig  # The map itself.
  rank: config_lib.Size  # Width between the two matrices of the adapter.
  alpha: config_lib.Positive  # The update is multiplied by alpha / rank.

  def run(self, x, info, *, name, dtype, mode):
    y, aux = self.base.run(x, info, name=name, dtype=dtype, mode=mode)
    adapter = Adapter(self, mode, dtype=dtype, name=f'{name}_lora')
    return y + adapter(x, info), aux

  def flops(self, tokens):
    adapter = (
      self.down.flops(tokens)['linear'] + self.up.flops(tokens)['linear']
    )
    return self.base.flops(tokens) | {'adapters': adapter}

  def weight_flops(self, name, tokens):
    return (
      self.base.weight_flops(name, tokens)
      | self.down.weight_flops(f'{name}_lora/down', tokens)
      | self.up.weight_flops(f'{name}_lora/up', tokens)
    )

  @property
  def num_params(self):
    return sum(x.num_params for x in (self.base, self.down, self.up))

  @property
  def scale(self) -> float:
    """Factor on the adapter's update, alpha / rank."""
    return self.alpha / self.rank

  @property
  def down(self) -> LinearConfig:
    """The map A, from the inputs to `rank` features."""
    axes = self.base.axes[: len(self.base.inputs)]
    return LinearConfig(
      inputs=self.base.inputs,
      outputs=(self.rank,),
      axes=(*axes, 'replicated'),
    )

  @property
  def up(self) -> LinearConfig:
    """The map B, from `rank` features to the outputs; initially zero."""
    axes = self.base.axes[len(self.base.inputs) :]
    return LinearConfig(
      inputs=(self.rank,),
      outputs=self.base.outputs,
      axes=('replicated', *axes),
      scale=0.0,
    )


class Adapter(nn.Module):
  """Computes an adapter's scaled update from the inputs of the map."""

  config: AdaptedConfig
  mode: Mode = Mode()
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x: jax.Array, info: TokenInfo) -> jax.Array:
    config, kwargs = self.config, {'dtype': self.dtype, 'mode': self.mode}
    x, _ = config.down.run(x, info, name='down', **kwargs)
    y, _ = config.up.run(x, info, name='up', **kwargs)
    return config.scale * y


class StackedUpdate(nn.Module):
  """Returns update_NIO: adapters' scaled updates of N kernels of equal shape.

  Experts and learners run several maps in one product, whose kernels are sums
  of the maps' kernels and these updates. The backward pass computes the
  gradients of these sums, so here adapters save memory but no time.
  """

  config: AdaptedConfig
  count: int  # N.
  axis: str  # Logical name of the axis of maps.

  @nn.compact
  def __call__(self) -> jax.Array:
    a_NIR, _ = dense.Kernels(
      self.config.down, self.count, self.axis, name='down'
    )()
    b_NRO, _ = dense.Kernels(self.config.up, self.count, self.axis, name='up')()
    return self.config.scale * jnp.einsum('NIR,NRO->NIO', a_NIR, b_NRO)


def adapted(
  slot: LinearConfig | AdaptedConfig,
  kernel_NIO: jax.Array,
  axis: str,
  name: str,
) -> jax.Array:
  """Returns the kernels of N maps, plus updates if the slot has adapters."""
  if not isinstance(slot, AdaptedConfig):
    return kernel_NIO
  update = StackedUpdate(slot, len(kernel_NIO), axis, name=f'{name}_lora')
  return kernel_NIO + update()


def stacked_flops(
  slot: LinearConfig | AdaptedConfig, name: str, tokens: int
) -> dict[str, int]:
  """Returns `Slot.weight_flops` of maps that run in one product.

  `tokens` is the number of tokens of all these maps together. With adapters,
  the FLOPs count under an adapter's name: the adapter's gradient takes as many,
  even if the maps are frozen (see `StackedUpdate`).
  """
  if isinstance(slot, LinearConfig):
    return slot.weight_flops(name, tokens)
  return {f'{name}_lora/up/kernel': slot.base.flops(tokens)['linear']}
