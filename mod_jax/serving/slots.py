"""The engine's slots on the device, and the compiled functions on them."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm
from mod_jax.sampling import generation

# Stands for a token's index in `_key`, for the routing scores of the prompt.
_ROUTING = 2**31 - 1


@flax.struct.dataclass
class Rows:
  """The state of each slot, besides its cache."""

  token_B: jax.Array  # The last token, which the model has not read yet.
  active_B: jax.Array  # Whether the slot is generating.
  count_B: jax.Array  # Tokens sampled so far.
  limit_B: jax.Array  # Most tokens to sample.
  seed_B: jax.Array
  settings: generation.Settings


@flax.struct.dataclass
class State:
  cache: lm.LMCache
  rows: Rows


@dataclasses.dataclass(frozen=True)
class Program:
  """The compiled functions, and the static values that they depend on."""

  config: lm.LMConfig  # With unrolled layers.
  mode: RoutingMode
  room: int  # Tokens that a slot holds.
  end_token: int | None

  def empty(self, batch, length_B=None):
    return lm.LMCache.empty(self.config, batch, self.room, self.mode, length_B)

  @functools.partial(jax.jit, static_argnums=0)
  def prefill(self, variables, tokens_1P, valid_1P, rows: Rows):
    """Returns the cache of a prompt, its row, and the log-probability."""
    # The request's own length, so that the room in the caches of routed blocks
    # does not depend on other requests.
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
    """Returns the state with a request's cache and row put into a slot."""
    request_state = State(cache, rows)
    return jax.tree.map(
      lambda all_B, one_1: all_B.at[slot].set(one_1[0]), state, request_state
    )

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
  def release(self, state: State, slot):
    """Returns the state with a slot made inactive."""
    active_B = state.rows.active_B.at[slot].set(False)
    return state.replace(rows=state.rows.replace(active_B=active_B))

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
  def step(self, variables, state: State, key):
    """Returns the state, and (token_B, log_prob_B, active_B before it)."""
    rows = state.rows
    logits_B1V, cache, _ = generation.read(
      lm.LanguageModel(self.config),
      variables,
      *(rows.token_B[:, None], rows.active_B[:, None]),
      *(state.cache, self.mode, key),
    )
    drawn, log_prob_B = self._draw(rows, logits_B1V[:, 0])
    outputs = (drawn.token_B, log_prob_B, rows.active_B)
    return State(cache, drawn), outputs

  def _draw(self, rows: Rows, logits_BV) -> tuple[Rows, jax.Array]:
    """Samples a token for each row; returns rows and log-probabilities."""
    key_B = jax.vmap(_key)(rows.seed_B, rows.count_B)
    token_B, log_prob_B = generation.draw(logits_BV, key_B, rows.settings)
    count_B = rows.count_B + rows.active_B
    active_B = rows.active_B & (count_B < rows.limit_B)
    if self.end_token is not None:
      active_B &= token_B != self.end_token
    rows = rows.replace(token_B=token_B, active_B=active_B, count_B=count_B)
    return rows, log_prob_B


def _key(seed, number) -> jax.Array:
  """Returns the random key of a token, which does not depend on the slot."""
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
