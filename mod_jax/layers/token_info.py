"""What a layer needs to know about its tokens besides their features."""

import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import routing

# Kinds of token; `TokenInfo.kind_BL` holds indices into this tuple. `text` is
# text around a question, such as instructions; `answer` includes the tokens
# that a model generates. `MoDConfig.kinds` lists the kinds among which blocks
# may choose, and `data.conversations.Kind` the kinds that text can have.
KINDS = ('image', 'text', 'question', 'answer')
IMAGE = KINDS.index('image')


@flax.struct.dataclass
class Source:
  """Tokens that cross-attention reads, such as the output of an encoder.

  Attributes:
    x_BSD: features of S tokens, as wide as those of the tokens that read them.
    valid_BS: False for padding; None if every token is real.
    place_BSD: position embedding for keys but not values; see
      `TokenInfo.place_BLD`.
    attention_BS: attention that each token received from the previous layer;
      None if no layer needs it.
  """

  x_BSD: jax.Array
  valid_BS: jax.Array | None = None
  place_BSD: jax.Array | None = None
  attention_BS: jax.Array | None = None

  @property
  def info(self) -> 'TokenInfo':
    """Facts about these tokens, with consecutive positions."""
    info = in_order(self.x_BSD, place_BLD=self.place_BSD)
    return info.replace(valid_BL=self.valid_BS)

  def gather(self, selection: routing.Selection) -> 'Source':
    """Returns the chosen tokens, without the attention they received."""
    chosen = jax.tree.map(
      lambda x: routing.gather_tokens(x, selection.index_BK),
      self.replace(attention_BS=None, valid_BS=None),
    )
    return chosen.replace(valid_BS=selection.valid_BK)


@flax.struct.dataclass
class TokenInfo:
  """Facts about tokens, which are gathered together with their features.

  Attributes:
    position_BL: int32 position in the sequence, padding not counted.
    valid_BL: False for padding and empty slots; None if every token is real.
    segment_BL: document numbers of packed rows; None for one document per row.
    keep_BL: 1 for tokens that others may attend to and 0 for dropped ones,
      differentiable; None if nothing is dropped. See
      `attention.masked_attention`. Dropped tokens are not valid either.
    index_BL: int32 position of each token in the row that the model was called
      with; None if all tokens of that row are present, in order.
    count_B: int32 length by which a row gets its slots, see
      `ExpertsConfig.slots_per_expert`; None for its number of valid tokens.
    size_BL: number of original tokens that each token was merged from; it
      counts as often in attention. None if no tokens were merged.
    place_BLD: position embedding that each attention adds to the inputs of its
      queries and keys, but not of its values (Carion et al. 2020); None if the
      features contain positions, or rotary embedding adds them.
    source: tokens that cross-attention reads, the same for all tokens of a
      sequence; None without cross-attention.
    kind_BL: int32 index into `KINDS`; None if tokens have no kind.
    image_places: number of places of each sequence that are reserved for image
      tokens; a sequence may have fewer image tokens. Static.
  """

  position_BL: jax.Array
  valid_BL: jax.Array | None = None
  segment_BL: jax.Array | None = None
  keep_BL: jax.Array | None = None
  index_BL: jax.Array | None = None
  count_B: jax.Array | None = None
  size_BL: jax.Array | None = None
  place_BLD: jax.Array | None = None
  source: Source | None = None
  kind_BL: jax.Array | None = None
  image_places: int = flax.struct.field(pytree_node=False, default=0)

  def of_kinds(self, kinds: tuple[str, ...]) -> jax.Array:
    """Returns mask_BL: the real tokens of one of these kinds."""
    if self.kind_BL is None:
      return jnp.zeros(self.position_BL.shape, bool)
    numbers = jnp.array([KINDS.index(kind) for kind in kinds])
    is_one_BL = jnp.isin(self.kind_BL, numbers)
    return is_one_BL if self.valid_BL is None else is_one_BL & self.valid_BL

  def gather(
    self, selection: routing.Selection, count_B: jax.Array | None = None
  ) -> 'TokenInfo':
    """Returns the facts of the chosen tokens; empty slots become invalid.

    `count_B` is the field of the result: the length of each row, for experts
    within the block. A row's number of slots is taken for it, since the number
    of chosen tokens may depend on later tokens.
    """
    gathered = jax.tree.map(
      lambda x: routing.gather_tokens(x, selection.index_BK),
      self.replace(source=None, count_B=None),
    )
    keep_BK = gathered.keep_BL
    if keep_BK is not None and selection.valid_BK is not None:
      # An empty slot may hold a token that was kept, but not chosen.
      keep_BK = jnp.where(selection.valid_BK, keep_BK, 0)
    index_BK = gathered.index_BL
    return gathered.replace(
      # A valid slot always holds a real token, so self.valid_BL adds nothing.
      valid_BL=selection.valid_BK,
      keep_BL=keep_BK,
      index_BL=selection.index_BK if index_BK is None else index_BK,
      count_B=count_B,
      source=self.source,
    )

  def dropped(self, keep_BL: jax.Array) -> 'TokenInfo':
    """Returns the facts after tokens with `keep_BL` of 0 have been dropped."""
    kept_BL = keep_BL > 0
    if self.valid_BL is not None:
      kept_BL &= self.valid_BL
    return self.replace(keep_BL=keep_BL, valid_BL=kept_BL)

  def rows(self, rows_R: jax.Array, valid_RL: jax.Array) -> 'TokenInfo':
    """Returns the facts of some rows, with `valid_RL` as their `valid_BL`.

    Row indices past the batch are clipped.
    """
    taken = jax.tree.map(
      lambda x: jnp.asarray(x).at[rows_R].get(mode='clip'), self
    )
    return taken.replace(valid_BL=valid_RL)


def in_order(
  x: jax.Array, valid_BL: jax.Array | None = None, **facts
) -> TokenInfo:
  """Returns the facts about tokens [B, L, …], with ascending positions.

  Padding, where `valid_BL` is False, is not counted. `facts` are other fields.
  """
  if valid_BL is None:
    position_BL = jnp.arange(x.shape[1], dtype=jnp.int32)
  else:
    position_BL = count_positions(valid_BL)
  position_BL = jnp.broadcast_to(position_BL, x.shape[:2])
  return TokenInfo(position_BL, valid_BL, **facts)


def count_positions(valid_BL: jax.Array) -> jax.Array:
  """Returns each real token's position in its row, padding not counted."""
  return jnp.maximum(jnp.cumsum(valid_BL, axis=-1, dtype=jnp.int32) - 1, 0)
