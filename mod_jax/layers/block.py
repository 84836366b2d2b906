"""A pre-norm transformer block that returns its residual update."""

import dataclasses

from flax import linen as nn
import jax

from mod_jax import config as config_lib
from mod_jax.layers import dense
from mod_jax.layers.attention import Attention
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.cache import KVCache
from mod_jax.layers.mlp import MLP
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.tokens import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
  attention: AttentionConfig
  mlp: MLPConfig
  norm_epsilon: float = 1e-6
  dtype: str = 'float32'  # Of the computation; parameters are float32.

  def __post_init__(self):
    config_lib.validate(self)

  def flops(self, tokens: int, **kwargs) -> dict[str, int]:
    """Returns forward FLOPs by part, for one sequence of so many tokens."""
    return {
      'attention': self.attention.flops(tokens, **kwargs),
      'mlp': self.mlp.flops(tokens),
    }


class Block(nn.Module):
  """Attention, then MLP. Callers add: the output is `x + update`."""

  config: BlockConfig

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    rows_B: jax.Array | None = None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Returns update_BLD and the cache; arguments as `Attention`'s."""
    config = self.config

    def norm(name):
      return dense.rms_norm(config.norm_epsilon, config.dtype, name)

    attended_BLD, cache = Attention(
      config.attention, config.dtype, name='attention'
    )(norm('attention_norm')(x_BLD), info, cache, rows_B)
    mixed_BLD = MLP(config.mlp, config.dtype, name='mlp')(
      norm('mlp_norm')(x_BLD + attended_BLD)
    )
    return attended_BLD + mixed_BLD, cache
