"""The engine's slots on the device, and the compiled functions on them.

A slot is a row of the `State`, and serves one request at a time; `engine`
decides which. (The slots of `layers.slots` are parts of a block.) `insert` and
`step` of `Program` are compiled twice; the version with `Extras` runs only
while a request that needs them has a slot.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm, vlm
from mod_jax.sampling import generation

# The number with which `_key` makes the key of the prompt's routing scores;
# other numbers are the indices of sampled tokens.
_ROUTING = 2**31 - 1
# Most likeliest tokens whose log-probabilities a request may ask for.
MAX_TOP = 20
_BITS = 32  # Tokens per uint32 word of a mask.


@flax.struct.dataclass
class Rows:
  """The state of each slot, besides the slot's cache."""

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


@flax.struct.dataclass
class Extras:
  """Penalties and biases for each slot's logits, and a flag for `likeliest`.

  The slots of requests without extras have zeros.
  """

  count_BV: jax.Array  # How often each token was sampled.
  bias_BV: jax.Array
  frequency_B: jax.Array  # Subtracted for each time that a token was sampled.
  presence_B: jax.Array  # Subtracted once if a token was sampled.
  # Whether the request wants log-probabilities of the likeliest tokens.
  top_B: jax.Array

  def changed(self, logits_BV, allowed_BW):
    """Returns logits with biases and penalties; -inf outside `allowed_BW`."""
    logits_BV = logits_BV + self.bias_BV
    logits_BV -= self.frequency_B[:, None] * self.count_BV
    logits_BV -= self.presence_B[:, None] * (self.count_BV > 0)
    bit = jnp.arange(_BITS, dtype=jnp.uint32)
    allowed_BV = ((allowed_BW[..., None] >> bit) & 1).reshape(
      len(logits_BV), -1
    )[:, : logits_BV.shape[1]]
    return jnp.where(allowed_BV == 1, logits_BV, -jnp.inf)

  def counted(self, token_B, active_B) -> 'Extras':
    """Returns the extras that also count a new token of each active row."""
    row_B = jnp.arange(len(token_B))
    count_BV = self.count_BV.at[row_B, token_B].add(active_B.astype(jnp.int32))
    return self.replace(count_BV=count_BV)

  def likeliest(self, logits_BV):
    """Returns (token_BT, log_prob_BT) of the `MAX_TOP` likeliest tokens.

    If no row wants the likeliest tokens, both arrays are zeros.
    """
    count = min(MAX_TOP, logits_BV.shape[1])

    def find():
      logit_BT, token_BT = jax.lax.top_k(logits_BV, count)
      total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
      return token_BT.astype(jnp.int32), logit_BT - total_B1

    def skip():
      shape = (len(logits_BV), count)
      return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(self.top_B.any(), find, skip)


@flax.struct.dataclass
class Gate:
  """Which tokens may be sampled in a step, and which rows take no part."""

  # Tokens that may be sampled: uint32 words, the first token in the lowest bit.
  allowed_BW: jax.Array
  held_B: jax.Array  # Rows that take no part in the step.


@dataclasses.dataclass(frozen=True)
class Program:
  """The compiled functions, and the static values that they depend on."""

  config: lm.LMConfig | vlm.VLMConfig  # With unrolled layers.
  mode: RoutingMode
  room: int  # Most tokens that a slot's cache holds.
  image_places: int  # `TokenInfo.image_places` of each slot.
  end_tokens: tuple[int, ...]

  def empty(self, batch, length_B=None):
    return lm.LMCache.empty(
      *(self.config, batch, self.room, self.mode, length_B, self.image_places)
    )

  @functools.partial(jax.jit, static_argnums=0)
  def prefill(self, variables, tokens_1P, valid_1P, rows: Rows, pictures):
    """Returns the cache of a prompt, and logits_1V of the token after it.

    `rows` has the request's limit and seed. `pictures` are further arguments of
    a `VLM`; empty for other models.
    """
    # Pass the request's own length, so that the number of slots in the caches
    # of routed blocks does not depend on other requests.
    length_1 = valid_1P.sum(axis=-1) + rows.limit_B
    key = _key(rows.seed_B[0], _ROUTING)
    logits_11V, cache, _ = generation.read(
      *(self.config.build(), variables, tokens_1P, valid_1P),
      *(self.empty(1, length_1), self.mode, key),
      prompt=True,
      **pictures,
    )
    return cache, logits_11V[:, 0]

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
  def insert(self, state, extras, cache, logits_1V, rows, changes, gate, slot):
    """Samples a request's first token, and puts the request into a slot.

    `rows` and `changes` are the request's row of the state and of the extras,
    `cache` and `logits_1V` the results of `prefill`. `extras`, `changes` and
    `gate` are None without extras. Returns what `step` does.
    """
    rows, changes, outputs = self._draw(rows, logits_1V, changes, gate)
    state, extras = jax.tree.map(
      lambda all_B, one_1: all_B.at[slot].set(one_1[0]),
      (state, extras),
      (State(cache, rows), changes),
    )
    return state, extras, outputs

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
  def release(self, state: State, slot):
    """Returns the state with a slot made inactive."""
    active_B = state.rows.active_B.at[slot].set(False)
    return state.replace(rows=state.rows.replace(active_B=active_B))

  @generation.jit_steps(static_argnums=0, donate_argnums=(2, 3))
  def step(self, variables, state: State, extras, gate, key):
    """Adds a token to every active slot that is not held.

    `key` is for random routing scores. Returns the state, the extras, and the
    outputs (token_B, log_prob_B, whether the row sampled a token). With extras,
    the outputs also have (token_BT, log_prob_BT) of the likeliest tokens.
    """
    rows = state.rows
    reads_B = rows.active_B if gate is None else rows.active_B & ~gate.held_B
    logits_B1V, cache, _ = generation.read(
      self.config.build(),
      variables,
      *(rows.token_B[:, None], reads_B[:, None]),
      *(state.cache, self.mode, key),
    )
    rows, extras, outputs = self._draw(rows, logits_B1V[:, 0], extras, gate)
    return State(cache, rows), extras, outputs

  def _draw(self, rows: Rows, logits_BV, extras, gate):
    """Samples the rows' next tokens; returns new rows, extras and outputs."""
    key_B = jax.vmap(_key)(rows.seed_B, rows.count_B)
    draws_B, changed_BV, likeliest = rows.active_B, logits_BV, ()
    if extras is not None:
      draws_B = rows.active_B & ~gate.held_B
      changed_BV = extras.changed(logits_BV, gate.allowed_BW)
      likeliest = extras.likeliest(logits_BV)
    token_B = generation.draw(changed_BV, key_B, rows.settings)
    # Log-probabilities are those of the model's own distribution, before
    # extras, temperature and filters.
    outputs = (token_B, generation.log_prob(logits_BV, token_B), draws_B)
    if extras is not None:
      extras = extras.counted(token_B, draws_B)
      token_B = jnp.where(gate.held_B, rows.token_B, token_B)
    count_B = rows.count_B + draws_B
    active_B = rows.active_B & (count_B < rows.limit_B)
    active_B &= ~generation.ends(token_B, self.end_tokens)
    rows = rows.replace(token_B=token_B, active_B=active_B, count_B=count_B)
    return rows, extras, (*outputs, *likeliest)


def _key(seed, number) -> jax.Array:
  """Returns the random key for a request's seed and a number."""
  return jax.random.fold_in(jax.random.key(seed), number)


def rows_of(
  batch: int, *, limit=0, seed=0, active=False, settings=(0.0, 0, 1.0, 0.0)
) -> Rows:
  """Returns `batch` equal rows that have not sampled a token yet.

  `settings` are the arguments of `generation.Settings.of` after the batch.
  """
  return Rows(
    token_B=np.zeros(batch, np.int32),
    active_B=np.full(batch, active),
    count_B=np.zeros(batch, np.int32),
    limit_B=np.full(batch, limit, np.int32),
    seed_B=np.full(batch, seed, np.uint32),
    settings=generation.Settings.of(batch, *settings),
  )


def extras_of(batch: int, vocab_size: int, **row) -> Extras:
  """Returns extras of `batch` rows with the same settings, zero by default.

  `row` may have the keywords frequency, presence, bias (a dict from tokens to
  numbers) and top (whether the log-probabilities of the likeliest tokens are
  wanted).
  """
  bias_BV = np.zeros((batch, vocab_size), np.float32)
  for token, value in row.get('bias', {}).items():
    bias_BV[:, token] = value
  return Extras(
    count_BV=np.zeros((batch, vocab_size), np.int32),
    bias_BV=bias_BV,
    frequency_B=np.full(batch, row.get('frequency', 0), np.float32),
    presence_B=np.full(batch, row.get('presence', 0), np.float32),
    top_B=np.full(batch, row.get('top', False)),
  )
