"""Generation: a prefill, then one token per sequence at a time."""

from collections.abc import Sequence
import dataclasses
import functools
import numbers

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.errors import UserError, require
from mod_jax.layers import vocabulary
from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm, vlm
from mod_jax.sampling import logits as logits_lib
from mod_jax.sampling import speculation
from mod_jax.sampling.speculation import Draft
from mod_jax_kernels.attention import choice

# Places in a cache are int32, and new tokens are padded to a power of two.
_MOST_TOKENS = 1_000_000_000


@flax.struct.dataclass
class Generated:
  """What `generate` returns.

  Attributes:
    tokens_BN: int32 new tokens; after an end token, repetitions of it.
    length_B: int32 number of new tokens, not counting an end token.
    log_prob_BN: float32 log-probability of each new token under the model's own
      distribution (before temperature and filters); 0 after the end.
    routed: fraction of (token, routed layer) pairs that were processed, of the
      layers whose attention is routed.
    overflow: number of (token, routed layer) pairs that the rule chose but that
      got no slot, including those of rejected draft tokens.
    passes: int32 number of forward passes of the model, including the prefill:
      one per new token, or fewer with a draft.
  """

  tokens_BN: jax.Array
  length_B: jax.Array
  log_prob_BN: jax.Array
  routed: jax.Array
  overflow: jax.Array
  passes: jax.Array


def pad_prompts(
  prompts: list[list[int]], *, side: str = 'left'
) -> tuple[np.ndarray, np.ndarray]:
  """Returns token lists padded at a side: (tokens_BP int32, valid_BP bool)."""
  lengths = [len(prompt) for prompt in prompts]
  require(
    all(lengths or [0]),
    'at least one prompt, and a token in each',
    lengths=lengths,
  )
  length = max(lengths)
  tokens_BP = np.zeros((len(prompts), length), np.int32)
  valid_BP = np.zeros((len(prompts), length), bool)
  for row, prompt in enumerate(prompts):
    start = length - len(prompt) if side == 'left' else 0
    tokens_BP[row, start : start + len(prompt)] = prompt
    valid_BP[row, start : start + len(prompt)] = True
  return tokens_BP, valid_BP


def generate(
  model: lm.LanguageModel | vlm.VLM,
  variables,
  tokens_BP,
  valid_BP=None,
  *,
  images_BIHWC=None,
  kind_BP=None,
  max_new_tokens: int,
  mode: RoutingMode | str = 'router',
  prefill: str = 'causal',
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  end_token: int | Sequence[int] | None = None,
  key: jax.Array | None = None,
  max_length: int | None = None,
  draft: Draft | None = None,
) -> Generated:
  """Continues prompts; each sequence is routed independently of the others.

  Args:
    model: the language model, or a `VLM`; scanned layers are unrolled.
    variables: `params`, and `moving` for the rule `threshold`.
    tokens_BP: int prompts.
    valid_BP: False for padding, left or right; None if there is none.
    images_BIHWC: pictures of a `VLM`'s prompts, whose tokens then include
      placeholders for the pictures, as from `models.vlm.place_images`.
    kind_BP: kinds of the tokens, as `kind_BL` of a `VLM`.
    max_new_tokens: number of tokens to add to each sequence.
    mode: the causal rule and its options; a string is a rule's name. Dense
      models ignore it.
    prefill: `causal` reads the prompt by the same rule, with the same result as
      reading it token by token; `top_k` reads it as in training, where routing
      sees later tokens of the prompt.
    temperature: temperature of sampling; see `filter_logits`.
    top_k: of sampling, not of routing; see `filter_logits`.
    top_p: of sampling; see `filter_logits`.
    min_p: of sampling; see `filter_logits`.
    end_token: id of the token after which a sequence stops; several ids if it
      stops after any of these, or None.
    key: random key; may be None at temperature 0.
    max_length: number of tokens that the caches hold; by default those of the
      prompt and the new tokens. If blocks choose among image tokens, every row
      takes the places of all I pictures, even if it has fewer.
    draft: proposes tokens that the model verifies several at a time; None for
      one token at a time. A draft changes the speed, but neither the greedy
      text nor the distribution of samples.

  Raises:
    UserError: an argument is not valid, or does not suit the model.
  """
  if isinstance(mode, str):
    mode = model.config.routing_mode(mode)
  logits_lib.check(temperature, top_k, top_p, min_p)
  require(
    'params' in variables,
    "all that init returns, or {'params': params}",
    variables=sorted(variables),
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
  end_tokens = () if end_token is None else np.atleast_1d(end_token).tolist()
  _check(model.config, mode, valid_BP, prefill, max_new_tokens, end_tokens)
  require(
    key is not None or not temperature,
    'key=jax.random.key(…) to draw with, or temperature=0',
    temperature=temperature,
    key=key,
  )
  key = jax.random.key(0) if key is None else key
  batch, prompt = tokens_BP.shape
  pictures, image_places = {}, 0
  if isinstance(model.config, vlm.VLMConfig):
    vlm.check_images(model.config, tokens_BP, images_BIHWC, valid_BP)
    pictures = {'images_BIHWC': images_BIHWC, 'kind_BL': kind_BP}
    if images_BIHWC is not None:
      image_places = images_BIHWC.shape[1] * model.config.num_patches
  if max_length is not None:
    _check_room(
      *(model.config, tokens_BP, valid_BP, image_places),
      *(max_new_tokens, max_length),
    )
  prefill_mode = mode
  if prefill == 'top_k' and model.config.rules and prompt > 1:
    prefill_mode = dataclasses.replace(mode, rule='top_k')
  # Pad the number of text tokens and of new tokens to powers of two, so that
  # few programs are compiled.
  length = image_places + bucket(max(1, prompt - image_places))
  padding, new = length - prompt, bucket(max_new_tokens)
  if (kind_BP := pictures.get('kind_BL')) is not None:
    pictures['kind_BL'] = np.pad(kind_BP, ((0, 0), (padding, 0)))
  options = _Options(
    new=new,
    room=max_length or length + new,
    image_places=image_places,
    mode=mode,
    prefill=prefill_mode,
    end_tokens=tuple(end_tokens),
    draft=None if draft is None else draft.complete(model.config),
  )
  settings = Settings.of(batch, temperature, top_k, top_p, min_p)
  generated = _generate(
    model.config,
    options,
    variables,
    np.pad(tokens_BP, ((0, 0), (padding, 0))),
    np.pad(valid_BP, ((0, 0), (padding, 0))),
    pictures,
    key,
    settings,
    max_new_tokens,
  )
  return generated.replace(
    tokens_BN=generated.tokens_BN[:, :max_new_tokens],
    log_prob_BN=generated.log_prob_BN[:, :max_new_tokens],
  )


def bucket(count: int, least: int = 8) -> int:
  """Returns the power of two, at least `least`, to which a length is padded."""
  return max(least, 1 << (int(count) - 1).bit_length())


@flax.struct.dataclass
class Settings:
  """How each row samples its tokens; see `filter_logits`."""

  temperature_B: jax.Array
  top_k_B: jax.Array
  top_p_B: jax.Array
  min_p_B: jax.Array

  @classmethod
  def of(cls, batch: int, temperature, top_k, top_p, min_p) -> 'Settings':
    """Returns the same settings for all rows."""
    return cls(
      temperature_B=np.full(batch, temperature, np.float32),
      top_k_B=np.full(batch, top_k, np.int32),
      top_p_B=np.full(batch, top_p, np.float32),
      min_p_B=np.full(batch, min_p, np.float32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
  """Static arguments of the compiled program; see `generate`."""

  new: int  # Maximum number of new tokens in the result.
  room: int  # Maximum number of tokens in the caches, prompt included.
  image_places: int  # As `TokenInfo.image_places`.
  mode: RoutingMode
  prefill: RoutingMode
  end_tokens: tuple[int, ...]
  draft: Draft | None


def _check(config, mode, valid_BP, prefill, max_new_tokens, end_tokens):
  require(
    isinstance(max_new_tokens, numbers.Integral)
    and 1 <= max_new_tokens <= _MOST_TOKENS,
    f'a whole number from 1 to {_MOST_TOKENS:,}',
    max_new_tokens=max_new_tokens,
  )
  require(
    prefill in ('causal', 'top_k'), "'causal' or 'top_k'", prefill=prefill
  )
  for end_token in end_tokens:
    require(
      0 <= end_token < config.vocab_size,
      f'an id from 0 to {config.vocab_size - 1}, or None',
      end_token=end_token,
    )
  lengths_B = valid_BP.sum(axis=-1)
  require(
    lengths_B.all(),
    'valid_BP with at least one token in every row',
    lengths=lengths_B,
  )
  check_rule(config, mode)


def _check_room(
  config, tokens_BP, valid_BP, image_places, max_new_tokens, max_length
):
  """Raises UserError if prompts and new tokens do not fit `max_length`."""
  counted_BP, kept, expected = valid_BP, 0, ''
  kinds = config.routing.kinds if config.num_routed else None
  if image_places and 'image' in (kinds or ()):
    # For the places of pictures, caches of routed blocks only have slots for
    # the image tokens that the blocks choose. So text cannot use the places of
    # pictures that a row lacks.
    counted_BP = valid_BP & (tokens_BP != config.image_token)
    kept = image_places
    expected = f', where each takes {kept} places for pictures beside its text'
  longest = kept + int(counted_BP.sum(axis=-1).max())
  require(
    longest + max_new_tokens <= max_length,
    f'prompt + max_new_tokens <= max_length, the size of the cache{expected}',
    prompt=longest,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
  )
  most = f'{_MOST_TOKENS:,} at most'
  require(max_length <= _MOST_TOKENS, most, max_length=max_length)


def check_rule(config: lm.LMConfig, mode: RoutingMode) -> None:
  """Raises UserError if the model cannot generate with the rule of `mode`."""
  rule, rules = mode.rule, config.rules
  if rules and isinstance(rule, str) and rule not in rules[1:]:
    if len(rules) == 1:
      raise UserError(config.cannot_sample)
    raise UserError(
      f'rule={rule!r} cannot generate: this model was trained for {rules[1:]}.'
    )


def read(
  model, variables, tokens_BL, valid_BL, cache, mode, key, **kwargs
) -> tuple[jax.Array, lm.LMCache, jax.Array]:
  """Returns logits_BLV, the cache with the tokens, and the overflow.

  The overflow is the int32 number of (token, routed layer) pairs that the rule
  chose but that got no slot. Keywords are those of `LanguageModel` or `VLM`.
  """
  output = model.apply(
    variables,
    tokens_BL,
    valid_BL=valid_BL,
    mode=mode,
    cache=cache,
    rngs={'routing': key},
    **kwargs,
  )
  overflow = jnp.int32(sum(r.overflow_B.sum() for r in output.routing))
  return output.logits_BLV, output.cache, overflow


def filtered(logits_BV, settings: Settings) -> jax.Array:
  """Returns logits of the distribution that each row samples from."""
  return logits_lib.filter_logits(
    logits_BV,
    temperature=settings.temperature_B,
    top_k=settings.top_k_B,
    top_p=settings.top_p_B,
    min_p=settings.min_p_B,
  )


def draw(logits_BV, key_B, settings: Settings) -> jax.Array:
  """Returns an int32 token for each row, sampled with the row's key."""

  def sampled():
    weight_BV = jax.nn.softmax(filtered(logits_BV, settings))
    return jax.vmap(vocabulary.draw)(key_B, weight_BV)

  return jax.lax.cond(
    (settings.temperature_B > 0).any(),
    sampled,
    lambda: vocabulary.argmax(logits_BV),
  )


def log_prob(logits, token) -> jax.Array:
  """Returns each token's log-probability under the logits at its position."""
  logit = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
  return logit - jax.nn.logsumexp(logits, axis=-1)


def ends(token, end_tokens: tuple[int, ...]) -> jax.Array:
  """Returns whether tokens are among `end_tokens`, in their shape."""
  return jnp.isin(token, jnp.array(end_tokens, jnp.int32))


# XLA for GPUs turns the product of a matrix and a single row into an
# elementwise product, which it writes to memory, and a sum. A step for one
# sequence then moves 1.3 to 2.3 times the bytes
# (`benchmarks/compiled_decode.py`).
GPU_OPTIONS = {'xla_disable_hlo_passes': 'dot-strength-reduction'}


def jit_steps(**options):
  """Returns a decorator like `jax.jit` that uses `GPU_OPTIONS` on GPUs."""

  def decorate(function):
    @functools.cache
    def compiled(platform):
      more = {'compiler_options': GPU_OPTIONS} if platform == 'cuda' else {}
      return jax.jit(function, **options, **more)

    @functools.wraps(function)
    def call(*args, **kwargs):
      return compiled(choice.platform())(*args, **kwargs)

    return call

  return decorate


@jit_steps(static_argnames=('config', 'options'))
def _generate(
  config,
  options,
  variables,
  tokens_BP,
  valid_BP,
  pictures,
  key,
  settings,
  num_tokens,
):
  config, variables = config.unrolled(variables)
  model = config.build()
  batch = tokens_BP.shape[0]
  prefill_key, key = jax.random.split(key)
  row_key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
  writer = _Writer(
    *(model, variables, options, settings, num_tokens, key, row_key_B)
  )
  # Size each row's cache by the row's own length, so that its text does not
  # depend on other rows.
  start_B = valid_BP.sum(axis=-1)
  cache = lm.LMCache.empty(
    *(config, batch, options.room, options.mode, start_B + num_tokens),
    options.image_places,
  )
  logits_B1V, cache, overflow = read(
    *(model, variables, tokens_BP, valid_BP, cache, options.prefill),
    prefill_key,
    prompt=True,
    **pictures,
  )
  text = _Text.empty(tokens_BP, valid_BP, options.new)
  first_token = writer.draw(logits_B1V[:, 0], text)
  text = text.add(*first_token, options.end_tokens, num_tokens)

  def advance(carry):
    cache, text, overflow = carry
    read_more = writer.one_more if options.draft is None else writer.some_more
    cache, new_tokens, more_overflow = read_more(cache, text)
    text = text.replace(passes=text.passes + 1)
    return (
      cache,
      text.add(*new_tokens, options.end_tokens, num_tokens),
      overflow + more_overflow,
    )

  cache, text, overflow = jax.lax.while_loop(
    lambda carry: carry[1].active_B.any(), advance, (cache, text, overflow)
  )
  place_N = jnp.arange(options.new)
  tokens_BN = jnp.take_along_axis(
    text.tokens_BT, text.start_B[:, None] + place_N, axis=-1
  )
  is_new_BN = place_N < text.count_B[:, None]
  tokens_BN = jnp.where(is_new_BN, tokens_BN, text.last_B[:, None])
  told = [
    block.length_B.sum()
    for block, layer in zip(cache.blocks, config.stack.layers, strict=True)
    if layer.caches_chosen
  ]
  pairs, chosen = cache.length_B.sum() * len(told), sum(told)
  return Generated(
    tokens_BN=tokens_BN,
    length_B=text.count_B - text.ended_B,
    log_prob_BN=text.log_prob_BN,
    routed=jnp.float32(chosen) / jnp.maximum(pairs, 1),
    overflow=overflow,
    passes=text.passes,
  )


@dataclasses.dataclass(frozen=True)
class _Writer:
  """Samples the next tokens of texts, one or several per forward pass."""

  model: lm.LanguageModel | vlm.VLM  # With unrolled layers.
  variables: dict
  options: _Options
  settings: Settings
  num_tokens: jax.Array  # New tokens that each row should get.
  key: jax.Array  # For random routing scores in the forward passes.
  row_key_B: jax.Array  # Each row's key for sampling.

  def draw(self, logits_BV, text: '_Text'):
    """Returns tokens_B1, their log-probabilities [B, 1], and count_B, all 1."""
    token_B = draw(logits_BV, self._keys(text), self.settings)
    count_B = jnp.ones(token_B.shape, jnp.int32)
    return token_B[:, None], log_prob(logits_BV, token_B)[:, None], count_B

  def one_more(self, cache, text: '_Text'):
    """Reads each last token; returns the cache, `draw`'s result, overflow."""
    logits_B1V, cache, overflow = self._read(
      *(text.last_B[:, None], text.active_B[:, None]),
      *(cache, self.options.mode, self._pass_key(text)),
    )
    return cache, self.draw(logits_B1V[:, 0], text), overflow

  def some_more(self, cache, text: '_Text'):
    """Reads the last token and draft tokens; returns results as `one_more`.

    Of tokens_BL in these results, the first `count_B` of each row are new.
    """
    draft, mode = self.options.draft, self.options.mode
    vocab_size = self.model.config.vocab_size
    draft_key_B, accept_key_B = jax.vmap(jax.random.split)(self._keys(text)).T
    pass_key = self._pass_key(text)
    read_count_B, remaining_B = cache.length_B, self.num_tokens - text.count_B
    # The last token that a row needs is sampled but never read.
    valid_BL = jnp.arange(draft.tokens + 1) < remaining_B[:, None]
    valid_BL &= text.active_B[:, None]
    if draft.kind == 'lookup':
      proposed_BD = speculation.look_up(
        text.tokens_BT, text.start_B + text.count_B, draft.tokens
      )
      draft_BDV = jax.nn.one_hot(proposed_BD, vocab_size)
    else:
      proposed_BD, draft_BDV, cache = speculation.propose(
        functools.partial(self._read_draft, pass_key),
        *(cache, text.last_B, valid_BL[:, :-1], draft_key_B),
      )
      cache = cache.before(read_count_B)
    read_BL = jnp.concatenate([text.last_B[:, None], proposed_BD], axis=1)
    logits_BLV, cache, overflow = self._read(
      *(read_BL, valid_BL, cache, mode, pass_key)
    )
    model_TV = filtered(
      logits_BLV.reshape(-1, vocab_size),
      jax.tree.map(
        lambda x_B: jnp.repeat(x_B, draft.tokens + 1), self.settings
      ),
    )
    tokens_BL, new_B = speculation.accept(
      proposed_BD,
      draft_BDV,
      jax.nn.softmax(model_TV).reshape(logits_BLV.shape),
      valid_BL[:, 1:],
      accept_key_B,
    )
    # Discard tokens after an end token.
    ends_BL = ends(tokens_BL, self.options.end_tokens)
    first_B = jnp.where(ends_BL.any(-1), ends_BL.argmax(-1), draft.tokens)
    new_B = jnp.minimum(new_B, first_B + 1)
    cache = cache.before(read_count_B + jnp.where(text.active_B, new_B, 0))
    return cache, (tokens_BL, log_prob(logits_BLV, tokens_BL), new_B), overflow

  def _read_draft(self, key, cache, token_B, valid_B, number):
    draft = self.options.draft
    logits_B1V, cache, _ = self._read(
      *(token_B[:, None], valid_B[:, None], cache),
      *(draft.mode(self.options.mode), jax.random.fold_in(key, number)),
      depth=draft.layers,
    )
    return filtered(logits_B1V[:, 0], self.settings), cache

  def _read(self, *args, **kwargs):
    return read(self.model, self.variables, *args, **kwargs)

  def _keys(self, text: '_Text'):
    """Returns each row's key for its next token."""
    return jax.vmap(jax.random.fold_in)(self.row_key_B, text.count_B)

  def _pass_key(self, text: '_Text'):
    return jax.random.fold_in(self.key, text.passes)


@flax.struct.dataclass
class _Text:
  """The prompts, with the tokens that were added to them so far.

  Attributes:
    tokens_BT: each row's prompt without padding, its new tokens, then garbage.
    start_B: int32 number of tokens of the prompt.
    count_B: int32 number of new tokens, including an end token.
    log_prob_BN: log-probabilities of the new tokens.
    ended_B: whether the last new token is an end token.
    active_B: whether the row still needs more tokens.
    passes: int32 number of forward passes, including the prefill.
  """

  tokens_BT: jax.Array
  start_B: jax.Array
  count_B: jax.Array
  log_prob_BN: jax.Array
  ended_B: jax.Array
  active_B: jax.Array
  passes: jax.Array

  @classmethod
  def empty(cls, tokens_BP, valid_BP, room: int) -> '_Text':
    """Returns texts of the prompts, with room for `room` new tokens each."""
    batch = tokens_BP.shape[0]
    order_BP = jnp.argsort(~valid_BP, axis=-1, stable=True)
    tokens_BP = jnp.take_along_axis(tokens_BP, order_BP, axis=-1)
    return cls(
      jnp.pad(tokens_BP, ((0, 0), (0, room))),
      valid_BP.sum(axis=-1, dtype=jnp.int32),
      jnp.zeros(batch, jnp.int32),
      jnp.zeros((batch, room), jnp.float32),
      jnp.zeros(batch, bool),
      jnp.ones(batch, bool),
      jnp.int32(1),
    )

  @property
  def last_B(self) -> jax.Array:
    """Each row's last token."""
    last_B1 = (self.start_B + self.count_B - 1)[:, None]
    return jnp.take_along_axis(self.tokens_BT, last_B1, axis=-1)[:, 0]

  def add(self, tokens_BL, log_prob_BL, new_B, end_tokens, most) -> '_Text':
    """Returns the text with the first `new_B` tokens added to each active row.

    A row is active until it has an end token or `most` new tokens.
    """
    new_B = jnp.where(self.active_B, new_B, 0)
    place_L = jnp.arange(tokens_BL.shape[1])
    counts_BL = place_L < new_B[:, None]

    def put(array_BT, start_B, values_BL):
      at_BL = jnp.where(
        counts_BL, start_B[:, None] + place_L, array_BT.shape[1]
      )
      row_B1 = jnp.arange(len(array_BT))[:, None]
      return array_BT.at[row_B1, at_BL].set(values_BL, mode='drop')

    ends_BL = counts_BL & ends(tokens_BL, end_tokens)
    ended_B = self.ended_B | ends_BL.any(axis=-1)
    count_B = self.count_B + new_B
    return self.replace(
      tokens_BT=put(self.tokens_BT, self.start_B + self.count_B, tokens_BL),
      log_prob_BN=put(self.log_prob_BN, self.count_B, log_prob_BL),
      count_B=count_B,
      ended_B=ended_B,
      active_B=self.active_B & ~ended_B & (count_B < most),
    )
