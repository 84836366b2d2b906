"""A transformer block, pre-norm or post-norm, that returns its update."""

import collections
import dataclasses
import functools
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
  AttentionScore,
  BlockOutput,
)
from mod_jax.layers.cache import KVCache
from mod_jax.layers.mode import Mode, Part
from mod_jax.layers.reduction import BlockReduction
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(config_lib.Validated):
  attention: AttentionConfig
  # Cross-attention to `TokenInfo.source`, between attention and feed-forward;
  # None = no cross-attention.
  cross_attention: AttentionConfig | None = None
  mlp: Slot  # The feed-forward.
  # How the number of tokens is reduced after the attention; None = not at all.
  reduction: BlockReduction | None = None
  norm: Literal['rms', 'layer'] = 'rms'
  # Where the norms are: `pre`, on the input of attention and feed-forward; or
  # `post`, on the sum of input and result (Vaswani et al. 2017). With `post`,
  # the block's update is its output minus its input.
  norm_place: Literal['pre', 'post'] = 'pre'
  norm_epsilon: config_lib.Epsilon = 1e-6
  residual_scale: config_lib.Factor = 1.0  # Factor on the update of each part.
  # Probability in training that an element of an update becomes 0.
  dropout: config_lib.BelowOne = 0.0
  dtype: str = 'float32'  # Compute dtype; parameters are always float32.

  @property
  def slots(self) -> dict[str, Slot]:
    """The module slots (`slots.py`) by name: `mlp`, `attention/query`, …."""
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
    """Returns the config with the module slots of these names replaced."""
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

  def left(self, tokens: int) -> int:
    """Returns how many of a sequence's tokens are left after the attention."""
    return tokens if self.reduction is None else tokens - self.reduction.count

  def flops(
    self,
    tokens: int,
    mlp_tokens: int | None = None,
    *,
    source_tokens: int | None = None,
    **kwargs,
  ) -> dict[str, int]:
    """Returns forward FLOPs by part; keywords as in `AttentionConfig.flops`.

    `mlp_tokens` is how many tokens enter the feed-forward; None for all that
    are left after the attention. `source_tokens` is for cross-attention only.
    """
    left = self.left(tokens) if mlp_tokens is None else mlp_tokens
    counts = [self.attention.flops(tokens, **kwargs), self.mlp.flops(left)]
    if self.reduction is not None:
      merge = self.reduction.kind.flops(
        *(tokens, self.reduction.count),
        *(self.attention.width, self.attention.head_dim),
      )
      counts.append({'merge': merge})
    if self.cross_attention is not None:
      require(
        source_tokens is not None,
        'how many tokens cross-attention reads',
        source_tokens=source_tokens,
      )
      counts.append(
        self.cross_attention.flops(left, source_tokens=source_tokens)
      )
    return dict(sum(map(collections.Counter, counts), collections.Counter()))


class Block(nn.Module):
  """Attention, then feed-forward; returns the update that the caller adds to x.

  With `config.cross_attention` the tokens attend to `info.source` between them.

  Rng streams: `stochastic_depth`, where `drop_rate` or `config.dropout` is
  positive.
  """

  config: BlockConfig
  # Content of `aux['attention']` and, with cross-attention, of
  # `aux['source_attention']`; None to omit them.
  score: AttentionScore | None = None
  # Probability in training that a sequence skips the attention, and
  # independently the feed-forward, of this block (Huang et al. 2016).
  drop_rate: float = 0.0
  mode: Mode = Mode()
  # Part to run; a layer whose halves run on different tokens has two `Block`s.
  part: Part = dataclasses.field(default='block', kw_only=True)

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    rows_B: jax.Array | None = None,
  ) -> BlockOutput:
    """Returns update, cache and aux; for the arguments see `Attention`."""
    config = self.config
    reduction, reduced, score, evidence = config.reduction, None, self.score, ''
    if reduction is not None:
      evidence = reduction.kind.evidence
      score = 'first' if evidence == 'attention' else score

    def attention(name, score=None):
      return Attention(
        *(getattr(config, name), score, self.mode),
        tells_keys=evidence == 'keys',
        dtype=config.dtype,
        name=name,
      )

    def feed_forward(x_BLD, info):
      update_BLD, aux = config.mlp.run(
        x_BLD, info, name='mlp', dtype=config.dtype, mode=self.mode
      )
      return BlockOutput(update_BLD, aux={k: {'': x} for k, x in aux.items()})

    parts = {}
    if self.part != 'mlp':
      parts['attention'] = functools.partial(
        attention('attention', score), cache=cache, rows_B=rows_B
      )
    if config.cross_attention is not None:
      require(
        info.source is not None,
        'TokenInfo(source=…), which the cross-attention of a block reads',
        source=info.source,
      )
      parts['cross_attention'] = functools.partial(
        attention('cross_attention', self.score), source=info.source
      )
    if self.part != 'attention':
      parts['mlp'] = feed_forward
    pre_norm = config.norm_place == 'pre'
    y_BLD, updates, cache, aux = x_BLD, [], None, {}
    for name, run in parts.items():
      norm = dense.NORMS[config.norm](
        config.norm_epsilon, config.dtype, f'{name}_norm'
      )
      output = run(norm(y_BLD) if pre_norm else y_BLD, info)
      updates.append(self._residual(output.update_BLD))
      y_BLD = y_BLD + updates[-1]
      if not pre_norm:
        y_BLD = norm(y_BLD)
      if name == 'attention' and reduction is not None:
        reduced = reduction.run(y_BLD, info, output.aux.pop(evidence))
        aux['merged_into'] = reduced.place_BL
        # From here on, the block updates the tokens that are left.
        x_BLD = y_BLD = reduced.x_BKD
        info, updates = reduced.info, []
      cache = output.cache if cache is None else cache
      for kind, value in output.aux.items():
        if isinstance(value, dict):  # Keys are names of slots.
          by_slot = {
            f'{name}/{slot}'.rstrip('/'): x for slot, x in value.items()
          }
          aux.setdefault(kind, {}).update(by_slot)
        else:
          of_source = kind == 'attention' and name == 'cross_attention'
          aux['source_attention' if of_source else kind] = value
    update_BLD = sum(updates[1:], updates[0]) if pre_norm else y_BLD - x_BLD
    return BlockOutput(update_BLD, cache, aux, reduced)

  def _residual(self, update_BLD):
    """Scales an update and, in training, drops elements or whole sequences."""
    if self.config.residual_scale != 1:
      update_BLD = update_BLD * self.config.residual_scale
    if not self.mode.train:
      return update_BLD
    if dropout := self.config.dropout:
      kept_BLD = jax.random.bernoulli(
        self.make_rng('stochastic_depth'), 1 - dropout, update_BLD.shape
      )
      update_BLD = jnp.where(kept_BLD, update_BLD / (1 - dropout), 0)
    if not self.drop_rate:
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
