"""Drafts: cheap proposals of tokens that the model verifies several at a time.

Decoding reads all weights for each token; verifying several tokens reads them
only once. Rejection sampling makes the result follow the model's distribution
whatever the draft proposes: Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding", Algorithm 1.
"""

from collections.abc import Callable
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.errors import require
from mod_jax.layers import vocabulary
from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm

# Longest suffix of a text, in tokens, that is searched for earlier in the text.
_LOOKED_UP = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft(config_lib.Validated):
  """How tokens are proposed, and how many at a time.

  Attributes:
    kind: what proposes tokens. `early`: the model's first blocks and its head
      (LayerSkip, Elhoushi et al. 2024). `never`: the model without its routed
      blocks. `lookup`: no model; the tokens after an earlier occurrence of the
      text's last tokens are taken (prompt lookup, Saxena 2023).
    tokens: number of proposals per verification.
    layers: number of blocks that `early` runs; None for the model's
      `early_exit`.
  """

  kind: Literal['early', 'never', 'lookup'] = 'early'
  tokens: config_lib.Size = 4
  layers: config_lib.Size | None = None

  def mode(self, mode: RoutingMode) -> RoutingMode:
    """Returns `mode`, with the rule `never` if the draft is of that kind."""
    if self.kind == 'never':
      return dataclasses.replace(mode, rule='never')
    return mode

  def complete(self, config: lm.LMConfig) -> 'Draft':
    """Returns the draft for a model, with `layers` set if its kind is `early`.

    Raises UserError if the model cannot have this draft.
    """
    require(
      self.kind != 'never'
      or config.num_routed
      and config.routing.kinds is None,
      "'early' or 'lookup', since the model has no routed blocks that a rule"
      ' may leave out',
      draft=self.kind,
    )
    if self.kind != 'early':
      return self
    layers = self.layers or config.early_exit
    require(
      0 < layers < config.num_layers,
      'draft.layers, how many of the first blocks to run, from 1 to fewer than'
      ' all; a model trained with model.early_exit has a default',
      **{'draft.layers': layers, 'num_layers': config.num_layers},
    )
    return dataclasses.replace(self, layers=layers)


def propose(
  read: Callable[..., tuple[jax.Array, lm.LMCache]],
  cache: lm.LMCache,
  token_B: jax.Array,
  valid_BD: jax.Array,
  key_B: jax.Array,
) -> tuple[jax.Array, jax.Array, lm.LMCache]:
  """Samples proposals from a part of the model.

  `read` maps cache, token_B, valid_B and the index of the proposal to logits_BV
  and the cache with the token. `token_B` is each row's last token, which is not
  in the cache. `valid_BD` is True where a row needs the proposal, and so must
  read the token before it.

  Returns:
    tokens_BD; the distributions that they were sampled from, probability_BDV;
    and the cache with the draft's keys and values of the tokens that it read.
  """

  def step(carry, inputs):
    cache, token_B = carry
    number, valid_B = inputs
    logits_BV, cache = read(cache, token_B, valid_B, number)
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, number)
    probability_BV = jax.nn.softmax(logits_BV)
    token_B = jax.vmap(vocabulary.draw)(keys_B, probability_BV)
    return (cache, token_B), (token_B, probability_BV)

  (cache, _), (tokens_DB, probability_DBV) = jax.lax.scan(
    step, (cache, token_B), (jnp.arange(valid_BD.shape[1]), valid_BD.T)
  )
  return tokens_DB.T, jnp.moveaxis(probability_DBV, 0, 1), cache


def look_up(text_BT: jax.Array, length_B: jax.Array, count: int) -> jax.Array:
  """Returns `count` tokens that followed the text's last tokens earlier on.

  Of the earlier positions that match the longest suffix, of up to three tokens,
  takes the latest; without a match, the tokens are arbitrary. Proposals that
  would run past the end of the text repeat periodically. `text_BT` holds
  garbage after `length_B` tokens.
  """
  place_T = jnp.arange(text_BT.shape[1])
  last_B1 = length_B[:, None] - 1
  is_match_BT = place_T < last_B1
  matches_BT = jnp.zeros(text_BT.shape, jnp.int32)
  for back in range(_LOOKED_UP):
    end_B1 = jnp.take_along_axis(text_BT, jnp.maximum(last_B1 - back, 0), -1)
    is_match_BT &= jnp.roll(text_BT, back, axis=-1) == end_B1
    is_match_BT &= place_T >= back  # Exclude tokens that wrapped around.
    matches_BT += is_match_BT
  best_B1 = jnp.argmax(
    matches_BT * len(place_T) + place_T * (matches_BT > 0),
    axis=-1,
    keepdims=True,
  )
  period_B1 = jnp.maximum(last_B1 - best_B1, 1)
  proposal_BD = best_B1 + 1 + jnp.arange(count) % period_B1
  return jnp.take_along_axis(text_BT, proposal_BD, axis=-1, mode='clip')


def accept(
  proposed_BD: jax.Array,
  draft_BDV: jax.Array,
  model_BLV: jax.Array,
  wanted_BD: jax.Array,
  key_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Verifies proposals; returns tokens_BL and count_B.

  The first `count_B` tokens of each row, 1 to L = D + 1, are the accepted
  proposals and one token sampled from the model. These tokens are distributed
  as if the model had sampled them one by one.

  `draft_BDV` are the distributions that the proposals were sampled from, and
  `model_BLV` the model's distributions at these positions and the next one.
  `wanted_BD` is False for proposals that a row does not need; they are neither
  accepted nor rejected.
  """
  draft_BD, model_BD = (
    jnp.take_along_axis(x, proposed_BD[..., None], axis=-1)[..., 0]
    for x in (draft_BDV, model_BLV[:, :-1])
  )
  count = proposed_BD.shape[1]
  uniform_BD = jax.vmap(
    lambda key: jax.random.uniform(jax.random.fold_in(key, 0), (count,))
  )(key_B)
  accepted_BD = wanted_BD & (uniform_BD * draft_BD < model_BD)
  accepted_B = jnp.cumprod(accepted_BD, axis=-1).sum(axis=-1)
  # Sample the next token from the residual max(model - draft, 0), or from the
  # model's distribution where there was no proposal.
  draft_BDV = jnp.where(wanted_BD[..., None], draft_BDV, 0)
  draft_BLV = jnp.pad(draft_BDV, ((0, 0), (0, 1), (0, 0)))
  place_B11 = accepted_B[:, None, None]
  model_BV, draft_BV = (
    jnp.take_along_axis(x, place_B11, axis=1)[:, 0]
    for x in (model_BLV, draft_BLV)
  )
  residual_BV = jnp.maximum(model_BV - draft_BV, 0)
  # The residual of equal distributions is 0: then sample from the model's.
  residual_BV = jnp.where(
    residual_BV.any(axis=-1, keepdims=True), residual_BV, model_BV
  )
  next_B = jax.vmap(
    lambda key, residual_V: vocabulary.draw(
      jax.random.fold_in(key, 1), residual_V
    )
  )(key_B, residual_BV)
  tokens_BL = jnp.pad(proposed_BD, ((0, 0), (0, 1)))
  is_next_BL = jnp.arange(count + 1) == accepted_B[:, None]
  tokens_BL = jnp.where(is_next_BL, next_B[:, None], tokens_BL)
  return tokens_BL.astype(jnp.int32), accepted_B + 1
