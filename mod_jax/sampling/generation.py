"""Generation: one prefill, then one token of every sequence at a time."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.errors import UserError
from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm
from mod_jax.sampling import logits as logits_lib


@flax.struct.dataclass
class Generated:
  """What `generate` returns.

  Attributes:
    tokens_BN: int32 new tokens; after the end token, repetitions of it.
    length_B: int32 how many of them count, the end token not included.
    log_prob_BN: float32 log-probability of each under the model's own
      distribution (before temperature and filters); 0 after the end.
    prompt_log_prob_BP: float32 log-probability of each prompt token given
      those before it; 0 for the first and for padding. Causal only if
      `causal_prompt`.
    causal_prompt: False where the prompt was read under top-k, which sees the
      future: its log-probabilities are then not a model's.
    routed: fraction of (token, routed layer) pairs that were processed.
    overflow: number of such pairs that the rule chose and that had no slot.
  """

  tokens_BN: jax.Array
  length_B: jax.Array
  log_prob_BN: jax.Array
  prompt_log_prob_BP: jax.Array
  causal_prompt: bool = flax.struct.field(pytree_node=False)
  routed: jax.Array
  overflow: jax.Array


def pad_prompts(
  prompts: list[list[int]], *, side: str = 'left'
) -> tuple[np.ndarray, np.ndarray]:
  """Pads token lists to one length: (tokens_BP int32, valid_BP).

  Raises:
    UserError: no prompt, or an empty one.
  """
  if not prompts or not all(len(prompt) for prompt in prompts):
    raise UserError(
      f'{len(prompts)} prompt(s), of which'
      f' {sum(not len(p) for p in prompts)} empty: every prompt needs at least'
      ' one token.'
    )
  length = max(len(prompt) for prompt in prompts)
  tokens_BP = np.zeros((len(prompts), length), np.int32)
  valid_BP = np.zeros((len(prompts), length), bool)
  for row, prompt in enumerate(prompts):
    start = length - len(prompt) if side == 'left' else 0
    tokens_BP[row, start : start + len(prompt)] = prompt
    valid_BP[row, start : start + len(prompt)] = True
  return tokens_BP, valid_BP


def generate(
  model: lm.LanguageModel,
  variables,
  tokens_BP,
  valid_BP=None,
  *,
  max_new_tokens: int,
  mode: RoutingMode | str = 'router',
  prefill: str = 'causal',
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  end_token: int | None = None,
  key: jax.Array | None = None,
  max_length: int | None = None,
) -> Generated:
  """Continues prompts, every sequence by its own routing.

  Args:
    model: the language model; scanned layers are unrolled on the way.
    variables: `params`, and `moving` for the threshold rule.
    tokens_BP: int prompts.
    valid_BP: False for padding, left or right, rows of any length; None if
      there is none.
    max_new_tokens: tokens to add to each sequence.
    mode: the causal rule that routes, and how; a string is a rule's name. A
      dense model ignores it.
    prefill: `causal` reads the prompt by the same rule, which equals reading
      it token by token; `top_k` reads it as in training, which sees ahead
      within the prompt.
    temperature: of sampling, as are top_k and top_p; see `filter_logits`.
    top_k: not that of routing.
    top_p: of sampling.
    end_token: a sequence stops after drawing it.
    key: random key; may be None at temperature 0.
    max_length: tokens that the caches have room for; prompt and new tokens by
      default.

  Raises:
    UserError: prompts that `lm.check_tokens` refuses, without a token, or
      longer than the cache; a rule that the model was not trained for;
      variables without parameters; settings out of range.
  """
  mode = RoutingMode(rule=mode) if isinstance(mode, str) else mode
  logits_lib.check(temperature, top_k, top_p)
  if 'params' not in variables:
    raise UserError(
      f"variables with {sorted(variables)} and no 'params': pass all that init"
      " returns, or {'params': params}."
    )
  try:
    tokens_BP = np.asarray(tokens_BP)
  except ValueError:
    raise UserError(
      'Prompts of several lengths: make them one array, tokens_BP, valid_BP ='
      ' mod_jax.sampling.pad_prompts(prompts).'
    ) from None
  if valid_BP is None:
    valid_BP = np.ones(tokens_BP.shape, bool)
  valid_BP = np.asarray(valid_BP, bool)
  lm.check_tokens(model.config, tokens_BP, valid_BP)
  tokens_BP = tokens_BP.astype(np.int32)
  _check(
    model.config, mode, valid_BP, prefill, max_new_tokens, max_length, end_token
  )
  if key is None and temperature:
    raise UserError(
      f'temperature={temperature} draws at random: pass key=jax.random.key(…),'
      ' or temperature=0.'
    )
  key = jax.random.key(0) if key is None else key
  batch, prompt = tokens_BP.shape
  prefill_mode = mode
  if prefill == 'top_k' and model.config.num_routed and prompt > 1:
    prefill_mode = dataclasses.replace(mode, rule='top_k')
  # A program for each power of two, whatever is asked for within it.
  padding, new = bucket(prompt) - prompt, bucket(max_new_tokens)
  options = _Options(
    new=new,
    room=max_length or bucket(prompt) + new,
    mode=mode,
    prefill=prefill_mode,
    end_token=end_token,
  )
  settings = Settings(
    temperature_B=jnp.full(batch, temperature, jnp.float32),
    top_k_B=jnp.full(batch, top_k, jnp.int32),
    top_p_B=jnp.full(batch, top_p, jnp.float32),
  )
  found = _generate(
    model.config,
    options,
    variables,
    np.pad(tokens_BP, ((0, 0), (padding, 0))),
    np.pad(valid_BP, ((0, 0), (padding, 0))),
    key,
    settings,
    max_new_tokens,
  )
  return found.replace(
    tokens_BN=found.tokens_BN[:, :max_new_tokens],
    log_prob_BN=found.log_prob_BN[:, :max_new_tokens],
    prompt_log_prob_BP=found.prompt_log_prob_BP[:, padding:],
  )


def bucket(count: int, least: int = 8) -> int:
  """Returns the power of two that a length is filled up to."""
  return max(least, 1 << (count - 1).bit_length())


@flax.struct.dataclass
class Settings:
  """How each row draws its tokens; see `filter_logits`."""

  temperature_B: jax.Array
  top_k_B: jax.Array
  top_p_B: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
  """What a program is compiled for; see `generate`."""

  new: int  # Room for new tokens in the result.
  room: int  # And in the caches, for all.
  mode: RoutingMode
  prefill: RoutingMode
  end_token: int | None


def _check(
  config, mode, valid_BP, prefill, max_new_tokens, max_length, end_token
):
  if max_new_tokens < 1:
    raise UserError(f'max_new_tokens={max_new_tokens}: expected 1 or more.')
  if prefill not in ('causal', 'top_k'):
    raise UserError(f"prefill={prefill!r}: expected 'causal' or 'top_k'.")
  if end_token is not None and not 0 <= end_token < config.vocab_size:
    raise UserError(
      f'end_token={end_token} for a model of vocab_size={config.vocab_size}:'
      f' expected an id from 0 to {config.vocab_size - 1}, or None.'
    )
  if not valid_BP.any(axis=-1).all():
    raise UserError(
      'valid_BP leaves a prompt without a token: expected at least one in every'
      ' row.'
    )
  check_rule(config, mode)
  longest = int(valid_BP.sum(axis=-1).max())
  if max_length is not None and longest + max_new_tokens > max_length:
    raise UserError(
      f'A prompt of {longest} tokens and {max_new_tokens} new ones do not fit'
      f' a cache of {max_length}: shorten the prompt, ask for fewer tokens, or'
      ' raise max_length.'
    )


def check_rule(config: lm.LMConfig, mode: RoutingMode) -> None:
  """Raises UserError for a rule that a model cannot generate by."""
  rule, known = mode.rule, config.rules
  if known and isinstance(rule, str) and rule not in known[1:]:
    if len(known) == 1:
      raise UserError(config.cannot_sample)
    raise UserError(
      f'rule={rule!r} cannot generate: this model was trained for {known[1:]}.'
    )


def read(model, variables, tokens_BL, valid_BL, cache, mode, key):
  """Returns logits_BLV, the cache with the tokens, and what was routed.

  The last is int32 [3]: pairs of token and routed layer that were processed,
  those that found no slot, and tokens.
  """
  output = model.apply(
    variables,
    tokens_BL,
    valid_BL=valid_BL,
    mode=mode,
    cache=cache,
    rngs={'routing': key},
  )
  chosen = sum(r.chosen_BL.sum() for r in output.routing)
  overflow = sum(r.overflow_B.sum() for r in output.routing)
  counts = jnp.stack(
    [jnp.int32(chosen), jnp.int32(overflow), valid_BL.sum(dtype=jnp.int32)]
  )
  return output.logits_BLV, output.cache, counts


def draw(logits_BV, key_B, settings: Settings) -> tuple[jax.Array, jax.Array]:
  """Returns a token for each row, by its own key, and its log-probability."""
  filtered_BV = logits_lib.filter_logits(
    logits_BV,
    temperature=settings.temperature_B,
    top_k=settings.top_k_B,
    top_p=settings.top_p_B,
  )
  token_B = jax.vmap(jax.random.categorical)(key_B, filtered_BV)
  token_B = token_B.astype(jnp.int32)
  return token_B, _log_prob(logits_BV, token_B)


def last_logits(logits_BPV, valid_BP) -> jax.Array:
  """Returns logits_BV of each row's last real token."""
  last_B = valid_BP.shape[1] - 1 - valid_BP[:, ::-1].argmax(axis=-1)
  return jnp.take_along_axis(logits_BPV, last_B[:, None, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=('config', 'options'))
def _generate(
  config, options, variables, tokens_BP, valid_BP, key, settings, num_tokens
):
  mode, end_token = options.mode, options.end_token
  config, params = lm.unrolled(config, variables['params'])
  variables = {**variables, 'params': params}
  model = lm.LanguageModel(config)
  batch = tokens_BP.shape[0]
  prefill_key, key = jax.random.split(key)
  key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))

  def next_token(logits_BV, step, done_B):
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, step)
    token_B, log_prob_B = draw(logits_BV, keys_B, settings)
    if end_token is not None:
      token_B = jnp.where(done_B, end_token, token_B)
    return token_B, jnp.where(done_B, 0.0, log_prob_B)

  def ended(token_B, done_B):
    return done_B if end_token is None else done_B | (token_B == end_token)

  # Each row's own length, so that its text does not depend on its neighbours.
  length_B = valid_BP.sum(axis=-1) + num_tokens
  cache = lm.LMCache.empty(config, batch, options.room, mode, length_B)
  logits_BPV, cache, counts = read(
    *(model, variables, tokens_BP, valid_BP, cache, options.prefill),
    prefill_key,
  )
  prompt_log_prob_BP = _prompt_log_prob(logits_BPV, tokens_BP, valid_BP)
  logits_BV = last_logits(logits_BPV, valid_BP)

  done_B = jnp.zeros(batch, bool)
  token_B, log_prob_B = next_token(logits_BV, 0, done_B)
  fill = 0 if end_token is None else end_token
  tokens_BN = jnp.full((batch, options.new), fill, jnp.int32)
  log_prob_BN = jnp.zeros((batch, options.new), jnp.float32)
  tokens_BN = tokens_BN.at[:, 0].set(token_B)
  log_prob_BN = log_prob_BN.at[:, 0].set(log_prob_B)

  def more(carry):
    step, done_B = carry[0], carry[1]
    return (step < num_tokens) & ~done_B.all()

  def advance(carry):
    step, done_B, token_B, cache, tokens_BN, log_prob_BN, counts = carry
    logits_B1V, cache, new = read(
      *(model, variables, token_B[:, None], ~done_B[:, None], cache, mode),
      jax.random.fold_in(key, step),
    )
    token_B, log_prob_B = next_token(logits_B1V[:, 0], step, done_B)
    tokens_BN = tokens_BN.at[:, step].set(token_B)
    log_prob_BN = log_prob_BN.at[:, step].set(log_prob_B)
    return (
      *(step + 1, ended(token_B, done_B), token_B, cache),
      *(tokens_BN, log_prob_BN, counts + new),
    )

  carry = (
    *(jnp.int32(1), ended(token_B, done_B), token_B, cache),
    *(tokens_BN, log_prob_BN, counts),
  )
  carry = jax.lax.while_loop(more, advance, carry)
  *_, tokens_BN, log_prob_BN, counts = carry
  chosen, overflow, tokens = counts
  length_B = jnp.full(batch, num_tokens)
  if end_token is not None:
    ends_BN = tokens_BN == end_token
    length_B = jnp.where(
      ends_BN.any(axis=-1), ends_BN.argmax(axis=-1), length_B
    )
  return Generated(
    tokens_BN=tokens_BN,
    length_B=length_B.astype(jnp.int32),
    log_prob_BN=log_prob_BN,
    prompt_log_prob_BP=prompt_log_prob_BP,
    causal_prompt=options.prefill.rule != 'top_k' or not config.num_routed,
    routed=chosen / jnp.maximum(tokens * max(config.num_routed, 1), 1),
    overflow=overflow,
  )


def _log_prob(logits, token):
  """Returns the log-probability of each token by the logits for its place."""
  log_prob = jax.nn.log_softmax(logits, axis=-1)
  return jnp.take_along_axis(log_prob, token[..., None], axis=-1)[..., 0]


def _prompt_log_prob(logits_BPV, tokens_BP, valid_BP):
  """Log-probability of each prompt token given the one before; else 0."""
  log_prob_BP = _log_prob(logits_BPV[:, :-1], tokens_BP[:, 1:])
  both_BP = valid_BP[:, 1:] & valid_BP[:, :-1]
  return jnp.pad(jnp.where(both_BP, log_prob_BP, 0.0), ((0, 0), (1, 0)))
