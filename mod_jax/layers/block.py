"""A pre-norm transformer block that returns its residual update."""

import dataclasses
from typing import Literal

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.layers import dense
from mod_jax.layers.attention import Attention
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.attention import BlockOutput
from mod_jax.layers.attention import Score
from mod_jax.layers.attention import add_aux
from mod_jax.layers.cache import KVCache
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
  attention: AttentionConfig
  mlp: Slot  # The feed-forward.
  norm: Literal['rms', 'layer'] = 'rms'
  norm_epsilon: config_lib.Epsilon = 1e-6
  residual_scale: config_lib.Factor = 1.0  # Factor on both updates.
  dtype: str = 'float32'  # Compute dtype; parameters are always float32.

  def __post_init__(self):
    config_lib.validate(self)

  @property
  def slots(self) -> dict[str, Slot]:
    """What stands in the block, by name: `mlp`, `attention/query` and so on."""
    projections = self.attention.projections
    return {'mlp': self.mlp} | {
      f'attention/{name}': slot for name, slot in projections.items()
    }

  def with_slots(self, slots: dict[str, Slot]) -> 'BlockConfig':
    """Returns the block with other slots in some places, by name."""
    projections = tuple(
      (name.removeprefix('attention/'), slot)
      for name, slot in slots.items()
      if name != 'mlp'
    )
    attention = dataclasses.replace(
      self.attention, slots=self.attention.slots + projections
    )
    return dataclasses.replace(
      self, attention=attention, mlp=slots.get('mlp', self.mlp)
    )

  def flops(self, tokens: int, **kwargs) -> dict[str, int]:
    """Returns forward FLOPs by part; see `AttentionConfig.flops`."""
    parts = self.attention.flops(tokens, **kwargs)
    for part, count in self.mlp.flops(tokens).items():
      parts[part] = parts.get(part, 0) + count
    return parts


class Block(nn.Module):
  """Attention, then feed-forward. Callers add: the output is `x + update`.

  Rng streams: `stochastic_depth`, where `drop_rate` is positive.
  """

  config: BlockConfig
  score: Score | None = None  # What `aux['attention']` holds.
  # Probability that a sequence goes without the attention, and without the
  # feed-forward, of this block when training (Huang et al. 2016).
  drop_rate: float = 0.0
  mode: Mode = Mode()

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    rows_B: jax.Array | None = None,
  ) -> BlockOutput:
    """Returns the update, the cache and the aux; arguments as Attention's."""
    config = self.config

    def norm(name):
      return dense.NORMS[config.norm](config.norm_epsilon, config.dtype, name)

    attended = Attention(
      *(config.attention, self.score, self.mode),
      dtype=config.dtype,
      name='attention',
    )(norm('attention_norm')(x_BLD), info, cache, rows_B)
    aux = {}
    for kind, value in attended.aux.items():
      if isinstance(value, dict):  # From the slots, by name.
        value = {f'attention/{name}': x for name, x in value.items()}
      aux[kind] = value
    attended_BLD = self._residual(attended.update_BLD)
    mixed_BLD, more = config.mlp.run(
      norm('mlp_norm')(x_BLD + attended_BLD),
      name='mlp',
      dtype=config.dtype,
      mode=self.mode,
    )
    add_aux(aux, 'mlp', more)
    update_BLD = attended_BLD + self._residual(mixed_BLD)
    return BlockOutput(update_BLD, attended.cache, aux)

  def _residual(self, update_BLD):
    """Scales an update, and leaves it out for some sequences."""
    if self.config.residual_scale != 1:
      update_BLD = update_BLD * self.config.residual_scale
    if not (self.drop_rate and self.mode.train):
      return update_BLD
    stays_B = jax.random.bernoulli(
      self.make_rng('stochastic_depth'),
      1 - self.drop_rate,
      update_BLD.shape[:1],
    )
    factor_B = stays_B / (1 - self.drop_rate)
    return update_BLD * jnp.expand_dims(factor_B, (1, 2)).astype(
      update_BLD.dtype
    )
