"""Drafts: cheap proposals of tokens that the model verifies several at a time.

Decoding reads all weights for each token of a sequence; verifying a few tokens
reads them once. Rejection sampling makes the result the model's own, whatever
was proposed: Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding", Algorithm 1.
"""

from collections.abc import Callable
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.errors import UserError
from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm

# Tokens at the end of a text that are looked up in it, at most.
_LOOKED_UP = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """What proposes tokens, and how many at a time.

  Attributes:
    kind: `early`, the first blocks of the model and its head (LayerSkip,
      Elhoushi et al. 2024); `never`, the model without its routed blocks;
      `lookup`, what followed when the text's last tokens came before (prompt
      lookup, Saxena 2023), which takes no model.
    tokens: proposals for each verification.
    layers: blocks that `early` runs; None for the `early_exit` that the model
      was trained with.
  """

  kind: Literal['early', 'never', 'lookup'] = 'early'
  tokens: config_lib.Size = 4
  layers: config_lib.Size | None = None

  def __post_init__(self):
    config_lib.validate(self)

  def mode(self, mode: RoutingMode) -> RoutingMode:
    """Returns how the draft's routed blocks choose, from how the model's do."""
    if self.kind == 'never':
      return dataclasses.replace(mode, rule='never')
    return mode

  def complete(self, config: lm.LMConfig) -> 'Draft':
    """Returns the draft with its number of blocks.

    Raises:
      UserError: the model has no such draft.
    """
    if self.kind == 'never' and not config.num_routed:
      raise UserError(
        "draft kind='never' leaves routed blocks out, and this model has none:"
        " use 'early' or 'lookup'."
      )
    if self.kind != 'early':
      return self
    layers = self.layers or config.early_exit
    if not 0 < layers < config.num_layers:
      raise UserError(
        f"draft kind='early' with layers={layers} of num_layers="
        f'{config.num_layers}: say how many of the first blocks to run, fewer'
        ' than all; a model trained with model.early_exit knows it.'
      )
    return dataclasses.replace(self, layers=layers)


def propose(
  read: Callable[..., tuple[jax.Array, lm.LMCache]],
  cache: lm.LMCache,
  token_B: jax.Array,
  valid_BD: jax.Array,
  key_B: jax.Array,
) -> tuple[jax.Array, jax.Array, lm.LMCache]:
  """Returns proposals of a part of the model, and what they were drawn from.

  Args:
    read: from cache, token_B, valid_B and the number of the proposal, returns
      logits_BV of the distribution to draw from, and the cache with the token.
    cache: what came before.
    token_B: the last token, which is not in the cache.
    valid_BD: whether a row still reads the token before each proposal.
    key_B: of each row.

  Returns:
    tokens_BD; their distributions, probability_BDV; and the cache, in which the
    draft's own keys and values stand for what it has read.
  """

  def step(carry, inputs):
    cache, token_B = carry
    number, valid_B = inputs
    logits_BV, cache = read(cache, token_B, valid_B, number)
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, number)
    token_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV)
    token_B = token_B.astype(jnp.int32)
    return (cache, token_B), (token_B, jax.nn.softmax(logits_BV))

  (cache, _), (tokens_DB, probability_DBV) = jax.lax.scan(
    step, (cache, token_B), (jnp.arange(valid_BD.shape[1]), valid_BD.T)
  )
  return tokens_DB.T, jnp.moveaxis(probability_DBV, 0, 1), cache


def look_up(text_BT: jax.Array, length_B: jax.Array, count: int) -> jax.Array:
  """Returns `count` tokens that may follow texts, as they did before.

  They followed the latest of the places that agree with the text's end in most
  of its last three tokens. Where a text is its own continuation, they go round.

  Args:
    text_BT: tokens of each row, and garbage behind them.
    length_B: how many are the row's, at least 1.
    count: tokens to propose.
  """
  place_T = jnp.arange(text_BT.shape[1])
  last_B1 = length_B[:, None] - 1
  agrees_BT = place_T < last_B1
  agreeing_BT = jnp.zeros(text_BT.shape, jnp.int32)
  for back in range(_LOOKED_UP):
    end_B1 = jnp.take_along_axis(text_BT, jnp.maximum(last_B1 - back, 0), -1)
    agrees_BT &= jnp.roll(text_BT, back, axis=-1) == end_B1
    agrees_BT &= place_T >= back  # What is rolled round the start is not.
    agreeing_BT += agrees_BT
  best_B1 = jnp.argmax(
    agreeing_BT * len(place_T) + place_T * (agreeing_BT > 0),
    axis=-1,
    keepdims=True,
  )
  period_B1 = jnp.maximum(last_B1 - best_B1, 1)
  after_BD = best_B1 + 1 + jnp.arange(count) % period_B1
  return jnp.take_along_axis(text_BT, after_BD, axis=-1, mode='clip')


def accept(
  proposed_BD: jax.Array,
  draft_BDV: jax.Array,
  model_BLV: jax.Array,
  wanted_BD: jax.Array,
  key_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns what the model makes of proposals: tokens_BL and count_B.

  Of each row the first `count_B` tokens count, 1 to L = D + 1: the proposals
  that were accepted, and one that the model has drawn. They are distributed as
  if the model had drawn all of them, one after another.

  Args:
    proposed_BD: tokens.
    draft_BDV: probabilities that each was drawn from.
    model_BLV: the model's own, for each of these places and the one after.
    wanted_BD: False where a row is to have no more tokens: from there on,
      proposals are neither accepted nor rejected.
    key_B: of each row.
  """
  of_draft_BD, of_model_BD = (
    jnp.take_along_axis(x, proposed_BD[..., None], axis=-1)[..., 0]
    for x in (draft_BDV, model_BLV[:, :-1])
  )
  count = proposed_BD.shape[1]
  uniform_BD = jax.vmap(
    lambda key: jax.random.uniform(jax.random.fold_in(key, 0), (count,))
  )(key_B)
  accepted_BD = wanted_BD & (uniform_BD * of_draft_BD < of_model_BD)
  accepted_B = jnp.cumprod(accepted_BD, axis=-1).sum(axis=-1)
  # What follows is drawn from what the draft has left of the distribution; all
  # is left where it has proposed nothing.
  draft_BDV = jnp.where(wanted_BD[..., None], draft_BDV, 0)
  draft_BLV = jnp.pad(draft_BDV, ((0, 0), (0, 1), (0, 0)))
  at_B11 = accepted_B[:, None, None]
  model_BV, draft_BV = (
    jnp.take_along_axis(x, at_B11, axis=1)[:, 0] for x in (model_BLV, draft_BLV)
  )
  left_BV = jnp.maximum(model_BV - draft_BV, 0)
  # Two distributions that are the same but for rounding leave nothing.
  left_BV = jnp.where(left_BV.any(axis=-1, keepdims=True), left_BV, model_BV)
  next_B = jax.vmap(
    lambda key, left_V: jax.random.categorical(
      jax.random.fold_in(key, 1), jnp.log(left_V)
    )
  )(key_B, left_BV)
  tokens_BL = jnp.pad(proposed_BD, ((0, 0), (0, 1)))
  is_next_BL = jnp.arange(count + 1) == accepted_B[:, None]
  tokens_BL = jnp.where(is_next_BL, next_B[:, None], tokens_BL)
  return tokens_BL.astype(jnp.int32), accepted_B + 1
