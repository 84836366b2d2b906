"""The slots of the engine on the device, and what is compiled for them."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm
from mod_jax.sampling import generation

# In place of a token's number, for what the routing of a prompt draws.
_ROUTING = 2**31 - 1


@flax.struct.dataclass
class Rows:
  """What each slot is doing.

  Attributes:
    token_B: its last token, which is not read yet.
    active_B: whether it goes on.
    count_B: tokens that it has drawn.
    limit_B: tokens that it may draw.
    seed_B: uint32, of what it draws.
    settings: how it draws.
  """

  token_B: jax.Array
  active_B: jax.Array
  count_B: jax.Array
  limit_B: jax.Array
  seed_B: jax.Array
  settings: generation.Settings


@flax.struct.dataclass
class State:
  cache: lm.LMCache
  rows: Rows


@dataclasses.dataclass(frozen=True)
class Program:
  """What the compiled functions depend on."""

  config: lm.LMConfig  # Layers not scanned.
  mode: RoutingMode
  room: int  # Tokens that a slot holds.
  end_token: int | None

  def empty(self, batch, length_B=None):
    return lm.LMCache.empty(self.config, batch, self.room, self.mode, length_B)

  @functools.partial(jax.jit, static_argnums=0)
  def prefill(self, variables, tokens_1P, valid_1P, rows: Rows):
    """Returns a cache of one row with a prompt, and its row."""
    # Its own length, so that its slots do not depend on its neighbours.
    length_1 = valid_1P.sum(axis=-1) + rows.limit_B
    key = _key(rows.seed_B[0], _ROUTING)
    logits_1V, _, cache, _ = generation.read_prompts(
      *(lm.LanguageModel(self.config), variables, tokens_1P, valid_1P),
      *(self.empty(1, length_1), self.mode, key),
    )
    rows, log_prob_1 = self._draw(rows, logits_1V)
    return cache, rows, log_prob_1

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
  def insert(self, state: State, cache, rows: Rows, slot):
    """Returns the state with a row in a slot."""
    one = State(cache, rows)
    return jax.tree.map(
      lambda all_B, one_1: all_B.at[slot].set(one_1[0]), state, one
    )

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
  def release(self, state: State, slot):
    """Returns the state with a slot that stands still."""
    active_B = state.rows.active_B.at[slot].set(False)
    return state.replace(rows=state.rows.replace(active_B=active_B))

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
  def step(self, variables, state: State, key):
    """Returns the state after one more token of each active row, and these.

    The last are token_B, log_prob_B, and whether the row was active.
    """
    rows = state.rows
    logits_B1V, cache, _ = generation.read(
      lm.LanguageModel(self.config),
      variables,
      *(rows.token_B[:, None], rows.active_B[:, None]),
      *(state.cache, self.mode, key),
    )
    drawn, log_prob_B = self._draw(rows, logits_B1V[:, 0])
    told = (drawn.token_B, log_prob_B, rows.active_B)
    # A row that stands still keeps its numbers until it is replaced.
    return State(cache, drawn), told

  def _draw(self, rows: Rows, logits_BV) -> tuple[Rows, jax.Array]:
    """Returns the rows with a token more, and its log-probability."""
    key_B = jax.vmap(_key)(rows.seed_B, rows.count_B)
    token_B, log_prob_B = generation.draw(logits_BV, key_B, rows.settings)
    count_B = rows.count_B + rows.active_B
    active_B = rows.active_B & (count_B < rows.limit_B)
    if self.end_token is not None:
      active_B &= token_B != self.end_token
    rows = rows.replace(token_B=token_B, active_B=active_B, count_B=count_B)
    return rows, log_prob_B


def _key(seed, number) -> jax.Array:
  """Returns the key of a request's token, whatever its slot."""
  return jax.random.fold_in(jax.random.key(seed), number)


def rows_of(limits, seeds, settings, *, active=True) -> Rows:
  """Returns rows that have drawn nothing yet."""
  batch = len(limits)

  def array(name, dtype):
    return jnp.asarray([row[name] for row in settings], dtype)

  return Rows(
    token_B=jnp.zeros(batch, jnp.int32),
    active_B=jnp.full(batch, active),
    count_B=jnp.zeros(batch, jnp.int32),
    limit_B=jnp.asarray(limits, jnp.int32),
    seed_B=jnp.asarray(seeds, jnp.uint32),
    settings=generation.Settings(
      temperature_B=array('temperature', jnp.float32),
      top_k_B=array('top_k', jnp.int32),
      top_p_B=array('top_p', jnp.float32),
    ),
  )
