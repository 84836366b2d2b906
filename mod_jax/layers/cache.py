"""Keys and values of the tokens that a layer has processed.

A dense layer caches all tokens. A routed layer caches only the tokens that it
chose, so each sequence has its own length, and the cache stores positions.
"""

import flax.struct
import jax
import jax.numpy as jnp

# Position of an empty slot: later than any query, so that the causal mask hides
# it.
EMPTY = jnp.iinfo(jnp.int32).max


@flax.struct.dataclass
class KVCache:
  """Slots for S tokens of each of B sequences.

  Attributes:
    key_BGSC: rotated keys. Heads come before slots, so that attention reads
      the cache without transposing it.
    value_BGSC: values.
    position_BS: int32 position of each token; EMPTY for empty slots.
    length_B: int32 number of slots in use.
    limit_B: int32 number of slots that `room` assigns: all, or fewer for
      sequences shorter than the longest.
    entered_BS: which cached tokens the feed-forward has processed, if only the
      feed-forward is routed and it has a limited number of slots; `room` counts
      these tokens. Otherwise None.
  """

  key_BGSC: jax.Array
  value_BGSC: jax.Array
  position_BS: jax.Array
  length_B: jax.Array
  limit_B: jax.Array
  entered_BS: jax.Array | None = None

  @classmethod
  def empty(
    cls,
    batch: int,
    slots: int,
    groups: int,
    channels: int,
    dtype,
    limit_B: jax.Array | None = None,
    *,
    counts_entered: bool = False,
  ) -> 'KVCache':
    """Returns a cache without tokens; `limit_B=None` allows all slots."""
    if limit_B is None:
      limit_B = jnp.full(batch, slots, jnp.int32)
    shape = (batch, groups, slots, channels)
    return cls(
      jnp.zeros(shape, dtype),
      jnp.zeros(shape, dtype),
      jnp.full((batch, slots), EMPTY, jnp.int32),
      jnp.zeros(batch, jnp.int32),
      limit_B,
      jnp.zeros((batch, slots), bool) if counts_entered else None,
    )

  @property
  def num_slots(self) -> int:
    return self.position_BS.shape[-1]

  def append(
    self,
    key_RTGC: jax.Array,
    value_RTGC: jax.Array,
    position_RT: jax.Array,
    valid_RT: jax.Array | None,
    rows_R: jax.Array,
  ) -> 'KVCache':
    """Returns the cache with the valid tokens added, as far as slots suffice.

    There are T new tokens for each of R rows of the cache, `rows_R`. Indices
    past the batch are ignored.
    """
    if valid_RT is None:
      valid_RT = jnp.ones(position_RT.shape, bool)
    length_R = self.length_B.at[rows_R].get(mode='clip')
    slot_RT = length_R[:, None] + jnp.cumsum(valid_RT, axis=-1) - 1
    slot_RT = jnp.where(valid_RT, slot_RT, self.num_slots)
    index = (rows_R[:, None], slot_RT)
    # Index every axis but the last: if axes were skipped, XLA would transpose
    # the whole cache for the scatter.
    group_G = jnp.arange(self.key_BGSC.shape[1])
    head_index = (rows_R[:, None, None], group_G, slot_RT[:, :, None])
    return self.replace(
      key_BGSC=self.key_BGSC.at[head_index].set(key_RTGC, mode='drop'),
      value_BGSC=self.value_BGSC.at[head_index].set(value_RTGC, mode='drop'),
      position_BS=self.position_BS.at[index].set(position_RT, mode='drop'),
      length_B=self.length_B.at[rows_R].add(
        valid_RT.sum(axis=-1, dtype=jnp.int32), mode='drop'
      ),
    )

  def enter(self, position_BT: jax.Array, entered_BT: jax.Array) -> 'KVCache':
    """Returns the cache with tokens marked in `entered_BS`, if not None."""
    if self.entered_BS is None:
      return self
    # The cache has all tokens so far: the slot of each is its position.
    slot_BT = jnp.where(entered_BT, position_BT, self.num_slots)
    row_B1 = jnp.arange(len(slot_BT))[:, None]
    entered_BS = self.entered_BS.at[row_B1, slot_BT].set(True, mode='drop')
    return self.replace(entered_BS=entered_BS)

  def read(
    self, rows_R: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns key_RSGC, value_RSGC, position_RS of cache rows (None = all)."""
    arrays = (self.key_BGSC, self.value_BGSC, self.position_BS)
    if rows_R is not None:
      arrays = (x.at[rows_R].get(mode='clip') for x in arrays)
    key_RGSC, value_RGSC, position_RS = arrays
    return (
      jnp.moveaxis(key_RGSC, 1, 2),
      jnp.moveaxis(value_RGSC, 1, 2),
      position_RS,
    )

  def prefix(self, count: int) -> 'KVCache':
    """Returns a cache of the first `count` slots; no other may hold a token."""
    return self.replace(
      key_BGSC=self.key_BGSC[:, :, :count],
      value_BGSC=self.value_BGSC[:, :, :count],
      position_BS=self.position_BS[:, :count],
    )

  def before(self, position_B: jax.Array) -> 'KVCache':
    """Returns the cache without tokens at positions >= `position_B`."""
    kept_BS = self.position_BS < position_B[:, None]
    entered_BS = self.entered_BS
    return self.replace(
      position_BS=jnp.where(kept_BS, self.position_BS, EMPTY),
      length_B=kept_BS.sum(axis=-1, dtype=jnp.int32),
      entered_BS=None if entered_BS is None else entered_BS & kept_BS,
    )

  def room(self, wanted_BT: jax.Array) -> jax.Array:
    """Returns mask_BT: the wanted tokens that get one of `limit_B` slots.

    Earlier tokens come first.
    """
    used_B = self.length_B
    if self.entered_BS is not None:
      used_B = self.entered_BS.sum(axis=-1, dtype=jnp.int32)
    slot_BT = used_B[:, None] + jnp.cumsum(wanted_BT, axis=-1) - 1
    return wanted_BT & (slot_BT < self.limit_B[:, None])
