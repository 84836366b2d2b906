"""Reduction of the number of tokens in a block, by merging or fusing them."""

import abc
import dataclasses
import math
from typing import ClassVar, Literal

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.errors import require
from mod_jax.layers.decisions import SELECTION_NAME
from mod_jax.layers.token_info import TokenInfo, in_order


@flax.struct.dataclass
class Reduced:
  """The tokens after a reduction.

  Attributes:
    x_BKD: features of the K tokens that are left.
    info: facts about the K tokens.
    place_BL: int32, for each of the L tokens before the reduction: index of the
      one of the K tokens that contains it.
  """

  x_BKD: jax.Array
  info: TokenInfo
  place_BL: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction(config_lib.Validated, abc.ABC):
  """How blocks reduce the tokens of an image, after their attention.

  Subclasses must be frozen dataclasses, in any module. A saved config names the
  module, which must be imported before the config is read.

  Attributes:
    evidence: what `run` receives from the block's attention. `keys`: float32
      key_BLC, averaged over heads; `attention`: float32 attention_BL, the
      class token's attention averaged over heads.
  """

  evidence: ClassVar[Literal['keys', 'attention']]

  @abc.abstractmethod
  def counts(
    self, num_layers: int, tokens: int, prefix: int
  ) -> tuple[int, ...]:
    """Returns by how much each block reduces the number of tokens.

    `tokens` is the number that reaches the first block. The first `prefix` of
    them, such as the class token, are not patches.
    """

  @abc.abstractmethod
  def run(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    evidence: jax.Array,
    count: int,
    prefix: int,
  ) -> Reduced:
    """Reduces the number of tokens by `count` > 0; keeps the first `prefix`."""

  @abc.abstractmethod
  def flops(self, tokens: int, count: int, width: int, head_dim: int) -> int:
    """Returns the forward FLOPs of `run`."""

  def adapt(self, layers, tokens: int, prefix: int) -> tuple:
    """Returns the layers of a stack, each with its `BlockReduction` or None."""
    counts = self.counts(len(layers), tokens, prefix)
    reductions = [
      BlockReduction(kind=self, count=count, prefix=prefix) if count else None
      for count in counts
    ]
    return tuple(
      dataclasses.replace(
        layer, block=dataclasses.replace(layer.block, reduction=reduction)
      )
      for layer, reduction in zip(layers, reductions, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockReduction:
  """A `Reduction`, and the arguments of its `run` for one block."""

  kind: Reduction
  count: int
  prefix: int

  def run(self, x_BLD, info: TokenInfo, evidence: jax.Array) -> Reduced:
    return self.kind.run(x_BLD, info, evidence, self.count, self.prefix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToMe(Reduction):
  """Token merging (Bolya et al. 2023): similar tokens become their mean.

  It has no parameters, so it also suits a model that was trained without it.
  Tokens are compared by their keys. In attention a merged token counts as many
  times as the number of tokens in it (Eq. 1, proportional attention).
  """

  evidence: ClassVar[str] = 'keys'

  # Pairs of tokens that each block merges, at most half of the patches.
  r: config_lib.Count = 8
  # `falling`: the number falls linearly from 2r in the first block to 0.
  schedule: Literal['constant', 'falling'] = 'constant'

  def counts(self, num_layers, tokens, prefix):
    counts = []
    for i in range(num_layers):
      wanted = self.r
      if self.schedule == 'falling' and num_layers > 1:
        wanted = 2 * self.r * (num_layers - 1 - i) // (num_layers - 1)
      counts.append(min(wanted, max(0, tokens - prefix) // 2))
      tokens -= counts[-1]
    return tuple(counts)

  def run(self, x_BLD, info, evidence, count, prefix):
    place_BL = checkpoint_name(
      routing.match_tokens(jax.lax.stop_gradient(evidence), count, prefix),
      SELECTION_NAME,
    )
    size_BL = info.size_BL
    if size_BL is None:
      size_BL = jnp.ones(x_BLD.shape[:2], jnp.float32)
    left = x_BLD.shape[1] - count
    x_BKD, size_BK = routing.merge_means(x_BLD, size_BL, place_BL, left)
    return Reduced(x_BKD, in_order(x_BKD, size_BL=size_BK), place_BL)

  def flops(self, tokens, count, width, head_dim):
    return 2 * (tokens - tokens // 2) * (tokens // 2) * head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class EViT(Reduction):
  """Token reorganisation (Liang et al. 2022): fuses inattentive patches.

  The patches that the class token attends to most are kept, in their order. The
  other patches are fused into one token, the last: their sum weighted by the
  class token's attention, which is not scaled to sum to 1. Later blocks treat
  the fused token like a patch. The method has no parameters. A block that would
  fuse a single patch keeps all.
  """

  evidence: ClassVar[str] = 'attention'

  # Blocks that fuse tokens.
  stages: tuple[config_lib.Layer, ...] = (3, 6, 9)
  # Fraction of the patches that each of these blocks keeps, rounded up.
  keep: config_lib.Fraction = 0.7

  def counts(self, num_layers, tokens, prefix):
    stages = self.stages
    require(
      max(stages, default=0) < num_layers and len(set(stages)) == len(stages),
      f'different blocks from 0 to {num_layers - 1}',
      **{'reduction.stages': stages},
    )
    counts = []
    for i in range(num_layers):
      patches = tokens - prefix
      # Rounded to nine decimals first, so that 0.7 · 10 is 7 patches.
      kept = math.ceil(round(self.keep * patches, 9))
      counts.append(max(0, patches - kept - 1) if i in stages else 0)
      tokens -= counts[-1]
    return tuple(counts)

  def run(self, x_BLD, info, evidence, count, prefix):
    patches_BND, weight_BN = x_BLD[:, prefix:], evidence[:, prefix:]
    patches = patches_BND.shape[1]
    kept = patches - count - 1
    selection = checkpoint_name(
      routing.select_top_k(weight_BN, kept), SELECTION_NAME
    )
    kept_BN = routing.mark_tokens(selection, patches)
    fused_BD = jnp.einsum(
      'BN,BND->BD',
      jnp.where(kept_BN, 0, weight_BN),
      patches_BND,
      preferred_element_type=jnp.float32,
    )
    x_BKD = jnp.concatenate(
      [
        x_BLD[:, :prefix],
        routing.gather_tokens(patches_BND, selection.index_BK),
        fused_BD[:, None].astype(x_BLD.dtype),
      ],
      axis=1,
    )
    rank_BN = jnp.cumsum(kept_BN, axis=-1, dtype=jnp.int32) - 1
    place_BN = prefix + jnp.where(kept_BN, rank_BN, kept)
    prefix_P = jnp.arange(prefix, dtype=jnp.int32)
    prefix_BP = jnp.broadcast_to(prefix_P, (x_BLD.shape[0], prefix))
    place_BL = jnp.concatenate([prefix_BP, place_BN], axis=1)
    return Reduced(x_BKD, in_order(x_BKD), place_BL)

  def flops(self, tokens, count, width, head_dim):
    return 2 * (count + 1) * width
