"""Grouped-query self-attention with rotary positions."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import errors
from mod_jax import parallel
from mod_jax.layers import dense
from mod_jax.layers import rope
from mod_jax.layers.cache import KVCache
from mod_jax.layers.tokens import TokenInfo
import mod_jax_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  width: int  # Features in and out.
  num_heads: int  # Query heads H.
  num_kv_heads: int  # Key and value heads G, a divisor of H.
  head_dim: int  # Channels per head C.
  causal: bool = True
  bias: bool = False
  out_scale: float = 1.0  # On the standard deviation of the last kernel.
  implementation: str | None = None  # See mod_jax_kernels.attention.

  def __post_init__(self):
    config_lib.validate(self)
    errors.require_positive(
      self, 'width', 'num_heads', 'num_kv_heads', 'head_dim'
    )
    if self.num_heads % self.num_kv_heads:
      raise errors.UserError(
        f'num_kv_heads={self.num_kv_heads} does not divide'
        f' num_heads={self.num_heads}.'
      )

  def flops(self, tokens: int, *, full_pairs: bool = False) -> int:
    """Returns the FLOPs of a forward pass over one sequence of tokens.

    Args:
      tokens: tokens processed.
      full_pairs: count every query-key pair, as an implementation that masks
        afterwards executes, instead of the exact causal ones.
    """
    all_heads = self.num_heads + self.num_kv_heads
    linear = 2 * tokens * self.width * 2 * all_heads * self.head_dim
    if self.causal and not full_pairs:
      pairs = tokens * (tokens + 1) // 2
    else:
      pairs = tokens**2
    return linear + 4 * self.num_heads * self.head_dim * pairs


class Attention(nn.Module):
  """Self-attention; with a cache, over the cached tokens and the new ones."""

  config: AttentionConfig
  dtype: str = 'float32'

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    rows_B: jax.Array | None = None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Returns the residual update_BLD and the cache with the tokens added.

    Args:
      x_BLD: normalised features.
      info: facts about the tokens, in ascending position.
      cache: what came before; None for a whole sequence at once.
      rows_B: rows of the cache that the batch stands for; None for all.
    """
    config = self.config

    def project(heads, name):
      return dense.linear(
        (heads, config.head_dim),
        ('embed', 'heads', 'head_dim'),
        bias=config.bias,
        dtype=self.dtype,
        name=name,
      )(x_BLD)

    q_BLHC = project(config.num_heads, 'query')
    k_BLGC = project(config.num_kv_heads, 'key')
    v_BLGC = project(config.num_kv_heads, 'value')
    if info.rotation_BLC is not None:
      q_BLHC = rope.rotate(q_BLHC, info.rotation_BLC)
      k_BLGC = rope.rotate(k_BLGC, info.rotation_BLC)
    q_BLHC, k_BLGC, v_BLGC = (
      parallel.constrain(x, 'batch', 'length', 'act_heads', None)
      for x in (q_BLHC, k_BLGC, v_BLGC)
    )
    if cache is None:
      out_BLHC = mod_jax_kernels.attention(
        q_BLHC,
        k_BLGC,
        v_BLGC,
        _visible(info),
        causal=config.causal,
        implementation=config.implementation,
      )
    else:
      append_to = jnp.arange(x_BLD.shape[0]) if rows_B is None else rows_B
      cache = cache.append(
        k_BLGC, v_BLGC, info.position_BL, info.valid_BL, append_to
      )
      key_BSGC, value_BSGC, position_BS = cache.read(rows_B)
      out_BLHC = mod_jax_kernels.attention(
        q_BLHC,
        key_BSGC,
        value_BSGC,
        info.position_BL[:, :, None] >= position_BS[:, None, :],
      )
    update_BLD = dense.linear(
      (config.width,),
      ('heads', 'head_dim', 'embed'),
      contract=2,
      bias=config.bias,
      scale=config.out_scale,
      dtype=self.dtype,
      name='out',
    )(out_BLHC)
    return parallel.constrain(update_BLD, 'batch', 'length', 'act_embed'), cache


def _visible(info: TokenInfo) -> jax.Array | None:
  """Returns mask_BQS without causality, or None if nothing is hidden."""
  mask_BQS = None
  if info.segment_BL is not None:
    mask_BQS = info.segment_BL[:, :, None] == info.segment_BL[:, None, :]
  if info.valid_BL is not None:
    valid_B1S = info.valid_BL[:, None, :]
    mask_BQS = valid_B1S if mask_BQS is None else mask_BQS & valid_B1S
    mask_BQS = jnp.broadcast_to(
      mask_BQS, (*info.valid_BL.shape, info.valid_BL.shape[-1])
    )
  return mask_BQS
