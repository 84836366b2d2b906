"""Grouped-query attention, with or without rotary positions."""

import dataclasses
import functools
from typing import Any, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.layers import dense, rope
from mod_jax.layers.cache import KVCache
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import KINDS, Source, TokenInfo
import mod_jax_kernels
from mod_jax_kernels.attention import choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  width: config_lib.Size  # Features in and out.
  num_heads: config_lib.Size  # Query heads H.
  num_kv_heads: config_lib.Size  # Key and value heads G, a divisor of H.
  head_dim: config_lib.Size  # Channels per head C.
  causal: bool = True
  # Base of the rotary embedding's wavelengths; None for no rotary embedding.
  rope_theta: float | None = None
  rope_scaling: rope.RopeScaling | None = None  # Scaling of wavelengths.
  # How many tokens each token sees at most: itself and those right before it;
  # None = all. Also in a routed block, distances are those in the whole text.
  window: config_lib.Size | None = None
  # Epsilon of an RMS norm of each head's queries and keys before the rotation;
  # None for no norm.
  qk_norm: config_lib.Epsilon | None = None
  bias: bool = False  # Biases of all projections.
  qkv_bias: bool | None = None  # Biases of query, key, value; None = `bias`.
  out_scale: float = 1.0  # Factor on the initial std of the `out` kernel.
  implementation: str | None = None  # Backend, see mod_jax_kernels.attention.
  # Replacements of dense projections by name: `query`, `key`, `value`, `out`.
  slots: tuple[tuple[str, Slot], ...] = ()

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.window is None or self.causal, 'window=None', 'window', 'causal')
    check(
      self.num_heads % self.num_kv_heads == 0,
      'num_kv_heads to divide num_heads',
      *('num_kv_heads', 'num_heads'),
    )

  @classmethod
  def of_encoder(cls, width: int, num_heads: int, **fields):
    """Returns the config of attention from all tokens to all, with biases."""
    return cls(
      width=width,
      num_heads=num_heads,
      num_kv_heads=num_heads,
      head_dim=width // num_heads,
      causal=False,
      bias=True,
      **fields,
    )

  @functools.cached_property
  def projections(self) -> dict[str, Slot]:
    """Module slots (`slots.py`) `query`, `key`, `value` and `out`, by name."""
    inner = ('heads', 'head_dim')
    qkv_bias = self.bias if self.qkv_bias is None else self.qkv_bias
    projections = {
      name: dense.LinearConfig(
        inputs=(self.width,),
        outputs=(heads, self.head_dim),
        axes=('embed', *inner),
        bias=qkv_bias,
      )
      for name, heads in (
        ('query', self.num_heads),
        ('key', self.num_kv_heads),
        ('value', self.num_kv_heads),
      )
    }
    projections['out'] = dense.LinearConfig(
      inputs=(self.num_heads, self.head_dim),
      outputs=(self.width,),
      axes=(*inner, 'embed'),
      bias=self.bias,
      scale=self.out_scale,
    )
    return projections | dict(self.slots)

  def flops(
    self,
    tokens: int,
    *,
    full_pairs: bool = False,
    source_tokens: int | None = None,
    of: int | None = None,
  ) -> dict[str, int]:
    """Returns forward FLOPs by part for one sequence.

    Only pairs of query and key that the causal mask and the window leave count.
    With `full_pairs` all pairs count, as if an implementation computes them all
    and then masks. `source_tokens` is how many tokens cross-attention reads.
    `of` is the length of the text from which the tokens are chosen; None if
    they are the whole text. With a window, the number of pairs is the expected
    one for a random choice.
    """
    keys = tokens if source_tokens is None else source_tokens
    pairs = tokens * keys
    if source_tokens is None and self.causal and not full_pairs:
      of = tokens if of is None else of
      visible = min(of, self.window or of)
      # Two different tokens of the text are both chosen with probability
      # k (k - 1) / (L (L - 1)). Each token also sees itself.
      pairs_in_window = visible * (visible - 1) // 2 + (of - visible) * (
        visible - 1
      )
      ordered_pairs = tokens * (tokens - 1)
      pairs = tokens + round(
        pairs_in_window * ordered_pairs / max(1, of * (of - 1))
      )
    parts = {'attention': 4 * self.num_heads * self.head_dim * pairs}
    for name, slot in self.projections.items():
      slot_tokens = keys if name in ('key', 'value') else tokens
      for part, count in slot.flops(slot_tokens).items():
        part = 'attention' if part == 'linear' else part
        parts[part] = parts.get(part, 0) + count
    return parts


@flax.struct.dataclass
class BlockOutput:
  """What attention, or a block, returns.

  Attributes:
    update_BLD: what the caller adds to the residual stream.
    cache: the cache with the tokens added; None if the module was given none.
    aux: further results by kind. `attention`, if requested, is float32
      attention_BL: what each token received; each row sums to 1.
      `source_attention` is the same for the tokens of a source. `merged_into`
      is `Reduced.place_BL`, from a block that reduces tokens. Module slots add
      other kinds, as dictionaries by slot name.
    reduced: a `Reduced`, the tokens that the update belongs to, if the block
      reduced their number; else None.
  """

  update_BLD: jax.Array
  cache: KVCache | None = None
  aux: dict[str, Any] = flax.struct.field(default_factory=dict)
  reduced: Any = None


# A token's score is the attention that it receives, averaged over heads: `mean`
# from all tokens (A-MoD's routing score), `first` from the class token only,
# `last` from the last token that is not of an answer (FastV's).
AttentionScore = Literal['mean', 'first', 'last']


class Attention(nn.Module):
  """Self-attention, also over cached tokens; or cross-attention to a source.

  In cross-attention every token sees the whole source, without rotation.

  For pictures of the attention, the module sows `queries`, `keys` and, where
  they matter, `valid` and `sizes` into the collection `intermediates`.
  """

  config: AttentionConfig
  dtype: str = dataclasses.field(default='float32', kw_only=True)
  # Content of `aux['attention']`; None to omit it.
  score: AttentionScore | None = None
  mode: Mode = Mode()
  # Whether `aux['keys']` has float32 key_BLC, averaged over heads.
  tells_keys: bool = dataclasses.field(default=False, kw_only=True)

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    rows_B: jax.Array | None = None,
    source: Source | None = None,
  ) -> BlockOutput:
    """Returns the residual update, the cache and the aux.

    Positions in `info` must ascend. `cache` has keys and values of earlier
    tokens; None for whole sequences. `rows_B` is the cache row of each row in
    the batch; None if row i is cache row i. With a `source` this is
    cross-attention, whose keys and values are not cached.
    """
    config = self.config
    aux = {}
    source_BSD, source_info = x_BLD, info
    if source is not None:
      source_BSD, source_info = source.x_BSD, source.info

    def project(name, x, info):
      slot = config.projections[name]
      if name in ('query', 'key') and info.place_BLD is not None:
        x = x + info.place_BLD
      y, slot_aux = slot.run(
        x, info, name=name, dtype=self.dtype, mode=self.mode
      )
      for kind, value in slot_aux.items():
        aux.setdefault(kind, {})[name] = value
      return y

    q_BLHC, k_BLGC, v_BLGC = (
      project(name, *inputs)
      for name, inputs in (
        ('query', (x_BLD, info)),
        ('key', (source_BSD, source_info)),
        ('value', (source_BSD, source_info)),
      )
    )
    if config.qk_norm is not None:
      q_BLHC, k_BLGC = (
        dense.rms_norm(config.qk_norm, self.dtype, name)(x)
        for name, x in (('query_norm', q_BLHC), ('key_norm', k_BLGC))
      )
    if source is None and config.rope_theta is not None:
      # Compute rotations here, not once per model: a routed block then gathers
      # only positions instead of rotations.
      rotation_BLC = rope.rotation(
        info.position_BL,
        config.head_dim,
        config.rope_theta,
        config.rope_scaling,
      )
      q_BLHC = rope.rotate(q_BLHC, rotation_BLC)
      k_BLGC = rope.rotate(k_BLGC, rotation_BLC)
    q_BLHC, k_BLGC, v_BLGC = (
      parallel.constrain(x, 'batch', 'length', 'act_heads', None)
      for x in (q_BLHC, k_BLGC, v_BLGC)
    )
    self.sow('intermediates', 'queries', q_BLHC)
    self.sow('intermediates', 'keys', k_BLGC)
    if info.valid_BL is not None:
      self.sow('intermediates', 'valid', info.valid_BL)
    if self.tells_keys:
      aux['keys'] = k_BLGC.mean(axis=2, dtype=jnp.float32)
    with jax.named_scope('attend'):  # For profiles.
      out_BLHC, score_BL, cache = self._attend(
        *(q_BLHC, k_BLGC, v_BLGC, info, cache, rows_B, source)
      )
    if score_BL is not None:
      aux['attention'] = score_BL
    update_BLD = project('out', out_BLHC, info)
    if self.score == 'first':
      # Recompute the weights of the first query, which is cheap, so that the
      # attention can use backends that return no weights.
      weight_BH1S = attention_map(q_BLHC[:, :1], k_BLGC, info.keep_BL)
      aux['attention'] = weight_BH1S.mean(axis=(1, 2))
    elif self.score == 'last':
      aux['attention'] = _last_score(config, q_BLHC, k_BLGC, info)
    update_BLD = parallel.constrain(update_BLD, 'batch', 'length', 'act_embed')
    return BlockOutput(update_BLD, cache, aux)

  def _attend(self, q_BLHC, k_BLGC, v_BLGC, info, cache, rows_B, source):
    """Returns out_BLHC, the score (None if it is not `mean`), and the cache."""
    config, scored, score_BL = self.config, self.score == 'mean', None
    if source is not None and scored:
      out_BLHC, score_BL = _scored_over(
        source, q_BLHC, k_BLGC, v_BLGC, info.valid_BL
      )
    elif source is not None:
      out_BLHC = _attended(config, q_BLHC, k_BLGC, v_BLGC, info, source)
    elif info.keep_BL is not None:
      out_BLHC = masked_attention(q_BLHC, k_BLGC, v_BLGC, info.keep_BL)
      if scored:
        score_BL = _masked_score(q_BLHC, k_BLGC, info.keep_BL)
    elif info.size_BL is not None:
      # The bias makes a key count `size` times. Use JAX's attention here, since
      # `mod_jax_kernels.attention` takes no bias.
      self.sow('intermediates', 'sizes', info.size_BL)
      bias_BHLS = jnp.log(info.size_BL)[:, None, None]
      out_BLHC = jax.nn.dot_product_attention(q_BLHC, k_BLGC, v_BLGC, bias_BHLS)
    elif scored:
      out_BLHC, score_BL = _scored(q_BLHC, k_BLGC, v_BLGC, info.valid_BL)
    elif cache is None:
      out_BLHC = _attended(config, q_BLHC, k_BLGC, v_BLGC, info)
    else:
      cache_rows_B = jnp.arange(len(q_BLHC)) if rows_B is None else rows_B
      cache = cache.append(
        k_BLGC, v_BLGC, info.position_BL, info.valid_BL, cache_rows_B
      )
      out_BLHC = _over_cache(config, q_BLHC, cache, rows_B, info.position_BL)
    return out_BLHC, score_BL, cache


def _last_score(config: AttentionConfig, q_BLHC, k_BLGC, info: TokenInfo):
  """Returns score_BL: attention that the last token of a row's prompt gives."""
  asks_BL = info.of_kinds(tuple(kind for kind in KINDS if kind != 'answer'))
  seen_BL = jnp.cumsum(asks_BL[:, ::-1], axis=-1)[:, ::-1] > 0
  if info.valid_BL is not None:
    seen_BL &= info.valid_BL
  last_B = seen_BL.shape[1] - 1 - asks_BL[:, ::-1].argmax(axis=-1)
  if config.window is not None:
    position_B1 = jnp.take_along_axis(info.position_BL, last_B[:, None], axis=1)
    seen_BL &= position_B1 - info.position_BL < config.window
  q_B1HC = jnp.take_along_axis(q_BLHC, last_B[:, None, None, None], axis=1)
  heads = q_BLHC.shape[2] // k_BLGC.shape[2]
  k_BLHC = jnp.repeat(k_BLGC, heads, axis=2)
  return attention_map(q_B1HC, k_BLHC, seen_BL).mean(axis=(1, 2))


def attention_map(
  q_BQHC: jax.Array, k_BSHC: jax.Array, keep_BS: jax.Array | None = None
) -> jax.Array:
  """Returns weight_BHQS: attention probabilities, float32, 0 for dropped keys.

  `keep_BS` is 0 for dropped keys, and positive for others.
  """
  logit_BHQS = jnp.einsum(
    'BQHC,BSHC->BHQS', q_BQHC, k_BSHC, preferred_element_type=jnp.float32
  )
  logit_BHQS *= q_BQHC.shape[-1] ** -0.5
  if keep_BS is not None:
    logit_BHQS = jnp.where(keep_BS[:, None, None] > 0, logit_BHQS, _LOWEST)
  return jax.nn.softmax(logit_BHQS, axis=-1)


_LOWEST = float(jnp.finfo(jnp.float32).min) / 2


def masked_attention(
  q_BLHC: jax.Array,
  k_BLHC: jax.Array,
  v_BLHC: jax.Array,
  keep_BL: jax.Array,
  epsilon: float = 1e-6,
) -> jax.Array:
  """Returns out_BLHC of attention to kept tokens; `keep_BL` has a gradient.

  The attention probabilities are `(e · mask + ε/N) / (Σ e · mask + ε)`, in
  float32, where every token also sees itself (DynamicViT, Rao et al. 2021,
  section 3.3); ε is from the authors' code. Up to ε, kept tokens get the same
  result as if dropped tokens were removed. `keep_BL` is 1 for kept tokens and 0
  for dropped ones.
  """
  out_BLHC = jnp.einsum(
    'BHQS,BSHC->BQHC',
    _masked_map(q_BLHC, k_BLHC, keep_BL, epsilon).astype(v_BLHC.dtype),
    v_BLHC,
    preferred_element_type=jnp.float32,
  )
  return out_BLHC.astype(q_BLHC.dtype)


def _masked_map(q_BLHC, k_BLHC, keep_BL, epsilon=1e-6):
  """Returns the probabilities of `masked_attention`, weight_BHQS, float32."""
  length = q_BLHC.shape[1]
  logit_BHQS = jnp.einsum(
    'BQHC,BSHC->BHQS', q_BLHC, k_BLHC, preferred_element_type=jnp.float32
  )
  logit_BHQS *= q_BLHC.shape[-1] ** -0.5
  keep_B1LS = keep_BL[:, None, None].astype(jnp.float32)
  keep_B1QS = keep_B1LS + (1 - keep_B1LS) * jnp.eye(length)
  # Subtract the largest logit among visible keys, so that ε stays small
  # relative to the sum. Logits of dropped keys may be far larger; bound them,
  # because exp could overflow, and inf · 0 is NaN.
  visible_BHQS = jnp.where(keep_B1QS > 0, logit_BHQS, _LOWEST)
  top_BHQ1 = jax.lax.stop_gradient(visible_BHQS.max(axis=-1, keepdims=True))
  weight_BHQS = jnp.exp(jnp.minimum(logit_BHQS - top_BHQ1, 20.0)) * keep_B1QS
  total_BHQ1 = weight_BHQS.sum(axis=-1, keepdims=True)
  return (weight_BHQS + epsilon / length) / (total_BHQ1 + epsilon)


def _masked_score(q_BLHC, k_BLHC, keep_BL):
  """Returns score_BL: the attention that kept tokens give each other.

  Dropped tokens score 0. Up to ε, kept tokens score what
  `mod_jax_kernels.route_scores` gives if dropped tokens are removed.
  """
  keep_BL = keep_BL.astype(jnp.float32)
  # XLA merges this with the same map in `masked_attention`.
  weight_BHQS = _masked_map(q_BLHC, k_BLHC, keep_BL)
  # Use full precision: rounded factors would make nearby scores tie.
  column_BS = keep_BL * jnp.einsum(
    'BHQS,BQ->BS', weight_BHQS, keep_BL, precision='highest'
  )
  total_B1 = column_BS.sum(axis=-1, keepdims=True)
  return column_BS / jnp.where(total_B1 > 0, total_B1, 1)


# Caches with fewer slots than this are cheap enough to read whole.
_SHORT = 64
# On GPUs, at most this many queries (for decoding, or to check draft tokens)
# attend by XLA's operations.
_FEW = 16


def _over_cache(config, q_BLHC, cache: KVCache, rows_B, position_BL):
  """Returns out_BLHC of queries over a cache that already has their tokens.

  Reading caches dominates the time of decoding, so only the first eighth,
  quarter or half of a large cache is read while all sequences fit into that
  part. Parts with fewer slots than there are queries, as in a long prompt, are
  not compiled. A GPU always reads the whole cache, since the host would have to
  wait for each block before it could choose a part.
  """
  on_gpu = choice.platform() == 'cuda'
  # Use XLA: cuDNN needs heads after slots, and so a copy of the whole cache.
  own = on_gpu and q_BLHC.shape[1] <= _FEW

  def attend(slots):
    key_BSGC, value_BSGC, position_BS = cache.prefix(slots).read(rows_B)
    return mod_jax_kernels.attention(
      q_BLHC,
      key_BSGC,
      value_BSGC,
      _seen(config, position_BL, position_BS),
      implementation='xla' if own else None,
    )

  if on_gpu:
    return attend(cache.num_slots)
  fractions = [cache.num_slots // n for n in (8, 4, 2)]
  least = max(_SHORT, q_BLHC.shape[1])
  sizes = [n for n in fractions if n >= least] + [cache.num_slots]
  if len(sizes) == 1:
    return attend(cache.num_slots)
  longest = cache.length_B.max()
  return jax.lax.switch(
    sum((longest > n).astype(jnp.int32) for n in sizes[:-1]),
    [functools.partial(attend, n) for n in sizes],
  )


def _seen(config: AttentionConfig, position_BL, position_BS):
  """Returns seen_BLS: whether causal mask and window let a query see a key."""
  position_BL1, position_B1S = position_BL[:, :, None], position_BS[:, None]
  visible_BLS = position_BL1 >= position_B1S
  if config.window is not None:
    visible_BLS &= position_BL1 - position_B1S < config.window
  return visible_BLS


# Axes of queries, keys and values: batch and heads may be sharded over devices,
# but not tokens.
_HEADS = ('batch', 'length', 'act_heads', None)


def _scored(q_BLHC, k_BLHC, v_BLHC, valid_BL):
  """Returns out_BLHC, and score_BL: the attention that each token received."""

  def run(*args):
    out_BLHC, score_BL = mod_jax_kernels.route_scores(*args)
    return out_BLHC, parallel.mean_over(score_BL, 'act_heads')

  tokens = ('batch', 'length')
  return parallel.per_device(
    run, (_HEADS, _HEADS, _HEADS, tokens), (_HEADS, tokens)
  )(q_BLHC, k_BLHC, v_BLHC, valid_BL)


def _attended(
  config: AttentionConfig,
  q_BLHC,
  k_BSGC,
  v_BSGC,
  info: TokenInfo,
  source: Source | None = None,
):
  """Returns out_BLHC of attention in whole sequences, or to a whole source."""
  segment_BL = visible_BLS = None
  if source is not None:
    if source.valid_BS is not None:
      visible_BLS = source.valid_BS[:, None]
  else:
    segment_BL = info.segment_BL
    if info.valid_BL is not None:
      # The kernels take document numbers, not an L x L mask. Padding becomes a
      # separate document, so that no real token sees it. It gets the lowest
      # int32; a document with that number gets the next one.
      padding = jnp.iinfo(jnp.int32).min
      number_BL = 0 if segment_BL is None else segment_BL.astype(jnp.int32)
      number_BL = jnp.maximum(number_BL, padding + 1)
      segment_BL = jnp.where(info.valid_BL, number_BL, padding)
    if config.window is not None:
      visible_BLS = _seen(config, info.position_BL, info.position_BL)

  def run(q_BLHC, k_BSGC, v_BSGC, segment_BL, visible_BLS):
    return (
      mod_jax_kernels.attention(
        q_BLHC,
        k_BSGC,
        v_BSGC,
        visible_BLS,
        causal=config.causal and source is None,
        segment_BL=segment_BL,
        implementation=config.implementation,
      ),
    )

  (out_BLHC,) = parallel.per_device(
    run,
    (_HEADS, _HEADS, _HEADS, ('batch', 'length'), ('batch', None, None)),
    (_HEADS,),
  )(q_BLHC, k_BSGC, v_BSGC, segment_BL, visible_BLS)
  return out_BLHC


def _scored_over(source: Source, q_BLHC, k_BSHC, v_BSHC, valid_BL):
  """Returns out_BLHC of attention to a source, and the source's score_BS.

  The score is the attention that each token of the source received, averaged
  over heads and real queries.
  """
  weight_BHLS = attention_map(q_BLHC, k_BSHC, source.valid_BS)
  out_BLHC = jnp.einsum(
    'BHLS,BSHC->BLHC',
    weight_BHLS.astype(v_BSHC.dtype),
    v_BSHC,
    preferred_element_type=jnp.float32,
  )
  if valid_BL is None:
    score_BS = weight_BHLS.mean(axis=(1, 2))
  else:
    real_BHL1 = jnp.broadcast_to(
      valid_BL[:, None, :, None], (*weight_BHLS.shape[:3], 1)
    )
    score_BS = weight_BHLS.mean(axis=(1, 2), where=real_BHL1)
  return out_BLHC.astype(q_BLHC.dtype), score_BS
