"""What a layer needs to know of its tokens besides their features."""

import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import routing


@flax.struct.dataclass
class Source:
  """What cross-attention reads, such as the output of an encoder.

  Attributes:
    x_BSD: features of S tokens, of the same width as those that read them.
    valid_BS: False for padding; None if every token is real.
  """

  x_BSD: jax.Array
  valid_BS: jax.Array | None = None


@flax.struct.dataclass
class TokenInfo:
  """Facts about tokens that travel with them when a few are gathered.

  Attributes:
    position_BL: int32 place in the sequence, padding not counted.
    valid_BL: False for padding and empty slots; None if every token is real.
    segment_BL: document number of packed rows; None for one document a row.
    keep_BL: 1 for tokens that others may attend to, 0 for dropped ones, where
      gradients reach that choice; None if nothing is dropped. See
      `attention.masked_attention`.
    source: what blocks with cross-attention read, the same for all tokens of a
      sequence; None if there is none.
  """

  position_BL: jax.Array
  valid_BL: jax.Array | None = None
  segment_BL: jax.Array | None = None
  keep_BL: jax.Array | None = None
  source: Source | None = None

  def gather(self, selection: routing.Selection) -> 'TokenInfo':
    """Returns the facts of the chosen tokens; empty slots become invalid."""
    gathered = jax.tree.map(
      lambda x: routing.gather_tokens(x, selection.index_BK),
      self.replace(source=None),
    )
    # A slot is valid only if its token is real, so our own mask adds nothing.
    return gathered.replace(valid_BL=selection.valid_BK, source=self.source)

  def rows(self, rows_R: jax.Array, valid_RL: jax.Array) -> 'TokenInfo':
    """Returns the facts of some sequences, those past the batch clipped."""
    taken = jax.tree.map(lambda x: x.at[rows_R].get(mode='clip'), self)
    return taken.replace(valid_BL=valid_RL)


def count_positions(valid_BL: jax.Array) -> jax.Array:
  """Returns each real token's place in its row, padding not counted."""
  return jnp.maximum(jnp.cumsum(valid_BL, axis=-1, dtype=jnp.int32) - 1, 0)
