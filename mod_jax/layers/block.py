"""A pre-norm transformer block that returns its residual update."""

import collections
import dataclasses
from typing import Literal

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.errors import require
from mod_jax.layers import dense
from mod_jax.layers.attention import (
  Attention,
  AttentionConfig,
  BlockOutput,
  Score,
  add_aux,
)
from mod_jax.layers.cache import KVCache
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
  attention: AttentionConfig
  # Cross-attention to `TokenInfo.source`, between attention and feed-forward;
  # None for none.
  cross_attention: AttentionConfig | None = None
  mlp: Slot  # The feed-forward.
  norm: Literal['rms', 'layer'] = 'rms'
  norm_epsilon: config_lib.Epsilon = 1e-6
  residual_scale: config_lib.Factor = 1.0  # Factor on both updates.
  dtype: str = 'float32'  # Compute dtype; parameters are always float32.

  def __post_init__(self):
    config_lib.validate(self)

  @property
  def slots(self) -> dict[str, Slot]:
    """The block's slots by name: `mlp`, `attention/query` and so on."""
    return {'mlp': self.mlp} | {
      f'{kind}/{name}': slot
      for kind in self._attentions
      for name, slot in getattr(self, kind).projections.items()
    }

  @property
  def _attentions(self) -> tuple[str, ...]:
    if self.cross_attention is None:
      return ('attention',)
    return ('attention', 'cross_attention')

  def with_slots(self, slots: dict[str, Slot]) -> 'BlockConfig':
    """Returns the block with the named slots replaced."""
    changed = {'mlp': slots.get('mlp', self.mlp)}
    for kind in self._attentions:
      attention = getattr(self, kind)
      projections = tuple(
        (name.removeprefix(f'{kind}/'), slot)
        for name, slot in slots.items()
        if name.startswith(f'{kind}/')
      )
      changed[kind] = dataclasses.replace(
        attention, slots=attention.slots + projections
      )
    return dataclasses.replace(self, **changed)

  def flops(
    self, tokens: int, *, source_tokens: int | None = None, **kwargs
  ) -> dict[str, int]:
    """Returns forward FLOPs by part; keywords as in `AttentionConfig.flops`."""
    counts = [self.attention.flops(tokens, **kwargs), self.mlp.flops(tokens)]
    if self.cross_attention is not None:
      require(
        source_tokens is not None,
        'how many tokens cross-attention reads',
        source_tokens=source_tokens,
      )
      counts.append(
        self.cross_attention.flops(tokens, source_tokens=source_tokens)
      )
    return dict(sum(map(collections.Counter, counts), collections.Counter()))


class Block(nn.Module):
  """Attention, then feed-forward; returns the update that the caller adds to x.

  With `config.cross_attention` the tokens attend to `info.source` in between.

  Rng streams: `stochastic_depth`, where `drop_rate` is positive.
  """

  config: BlockConfig
  score: Score | None = None  # Content of `aux['attention']`; None to omit it.
  # Probability in training that a sequence skips the attention, and
  # independently the feed-forward, of this block (Huang et al. 2016).
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
    """Returns update, cache and aux; arguments are those of `Attention`."""
    config = self.config
    aux = {}

    def norm(name):
      return dense.NORMS[config.norm](config.norm_epsilon, config.dtype, name)

    def attend(name, x_BLD, score, *args, **kwargs):
      attention = Attention(
        *(getattr(config, name), score, self.mode),
        dtype=config.dtype,
        name=name,
      )
      output = attention(norm(f'{name}_norm')(x_BLD), info, *args, **kwargs)
      for kind, value in output.aux.items():
        if isinstance(value, dict):  # By the names of slots.
          by_slot = {f'{name}/{slot}': x for slot, x in value.items()}
          aux.setdefault(kind, {}).update(by_slot)
        else:
          aux[kind] = value
      return self._residual(output.update_BLD), output.cache

    attended_BLD, cache = attend('attention', x_BLD, self.score, cache, rows_B)
    if config.cross_attention is not None:
      require(
        info.source is not None,
        'TokenInfo(source=…), which the cross-attention of a block reads',
        source=info.source,
      )
      cross_BLD, _ = attend(
        'cross_attention', x_BLD + attended_BLD, None, source=info.source
      )
      attended_BLD = attended_BLD + cross_BLD
    mlp_BLD, mlp_aux = config.mlp.run(
      norm('mlp_norm')(x_BLD + attended_BLD),
      info,
      name='mlp',
      dtype=config.dtype,
      mode=self.mode,
    )
    add_aux(aux, 'mlp', mlp_aux)
    update_BLD = attended_BLD + self._residual(mlp_BLD)
    return BlockOutput(update_BLD, cache, aux)

  def _residual(self, update_BLD):
    """Scales an update, and drops it for some sequences (stochastic depth)."""
    if self.config.residual_scale != 1:
      update_BLD = update_BLD * self.config.residual_scale
    if not (self.drop_rate and self.mode.train):
      return update_BLD
    kept_B = jax.random.bernoulli(
      self.make_rng('stochastic_depth'),
      1 - self.drop_rate,
      update_BLD.shape[:1],
    )
    factor_B = kept_B / (1 - self.drop_rate)
    return update_BLD * jnp.expand_dims(factor_B, (1, 2)).astype(
      update_BLD.dtype
    )
