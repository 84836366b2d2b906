"""Merging of similar tokens: which are merged, and their means.

Merging turns L tokens into K. A *place map* `place_BL` says, for each of the L
tokens, which of the K tokens contains it.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from mod_jax.routing.selection import mark_tokens, select_top_k


def match_tokens(metric_BLC: jax.Array, count: int, prefix: int) -> jax.Array:
  """Returns place_BL that merges `count` pairs of similar tokens.

  Bipartite soft matching (Bolya et al. 2023, section 3): the even tokens point
  to the odd token of the largest cosine similarity, and the strongest of these
  edges are merged. The even tokens that are left come first, then the odd ones.

  Args:
    metric_BLC: features by which tokens are compared.
    count: number of pairs, 0 < count <= (L - prefix) // 2.
    prefix: 1 if the first token is never merged and stays the first; 2 for the
      first two.
  """
  metric_BLC = metric_BLC.astype(jnp.float32)
  square_BL1 = (metric_BLC**2).sum(axis=-1, keepdims=True)
  # A token whose features are all zero gets similarity 0, not NaN.
  metric_BLC *= jax.lax.rsqrt(jnp.maximum(square_BL1, 1e-30))
  even_BEC, odd_BOC = metric_BLC[:, ::2], metric_BLC[:, 1::2]
  # Multiply in full precision: rounded factors would make close similarities
  # equal.
  similar_BEO = jnp.einsum(
    'BEC,BOC->BEO', even_BEC, odd_BOC, precision='highest'
  )
  similar_BEO = similar_BEO.at[:, 0].set(-jnp.inf)
  if prefix == 2:
    similar_BEO = similar_BEO.at[:, :, 0].set(-jnp.inf)
  merged_BE = mark_tokens(
    select_top_k(similar_BEO.max(axis=-1), count), even_BEC.shape[1]
  )
  left = even_BEC.shape[1] - count
  odd_O = left + jnp.arange(odd_BOC.shape[1], dtype=jnp.int32)
  rank_BE = jnp.cumsum(~merged_BE, axis=-1, dtype=jnp.int32) - 1
  into_BE = left + similar_BEO.argmax(axis=-1).astype(jnp.int32)
  place_BL = jnp.zeros(metric_BLC.shape[:2], jnp.int32)
  place_BL = place_BL.at[:, ::2].set(jnp.where(merged_BE, into_BE, rank_BE))
  place_BL = place_BL.at[:, 1::2].set(odd_O)
  if prefix == 2:  # Move token 1, the first odd one, to place 1.
    later_BL = (place_BL > 0) & (place_BL < left)
    place_BL = jnp.where(place_BL == left, 1, place_BL + later_BL)
  return place_BL


def merge_means(
  x_BLD: jax.Array, size_BL: jax.Array, place_BL: jax.Array, left: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the merged tokens x_BKD and their sizes size_BK, float32.

  A merged token is the mean of its tokens, weighted by their sizes. Its size is
  the sum of these sizes. `left` is K; each of the K places must hold a token.
  """

  def total(value_BL):
    return jax.vmap(lambda v, place: jax.ops.segment_sum(v, place, left))(
      value_BL, place_BL
    )

  size_BL = size_BL.astype(jnp.float32)
  size_BK = total(size_BL)
  x_BKD = total(x_BLD.astype(jnp.float32) * size_BL[..., None])
  return (x_BKD / size_BK[..., None]).astype(x_BLD.dtype), size_BK


def trace(places: Iterable[jax.Array]) -> list[jax.Array]:
  """Composes successive place maps (see the module's docstring).

  Returns, for each step, the map from the original tokens to their places then.
  """
  traced = []
  for place_BL in places:
    if traced:
      place_BL = jnp.take_along_axis(place_BL, traced[-1], axis=1)
    traced.append(place_BL)
  return traced
