"""Continuous batching: many requests share the slots of one decoding state.

A slot is a row of that state, and serves one request at a time.
`slots.Program.prefill` reads a whole prompt into a cache of its own; it is
compiled for each power of two of prompt lengths and each number of pictures.
`insert` samples the first token and copies that cache into a free slot; `step`
adds a token to every active slot. Both donate the state, so caches are updated
in place. Settings of requests (temperature, limits, seed) are arrays with an
entry per slot, so nothing compiles after `warm_up`. The host reads the tokens
of one step while the next one runs. Penalties, biases, schemas and
log-probabilities of other tokens are computed by separately compiled programs,
which run only while a request that needs one of these has a slot.

Which tokens a JSON schema allows next depends on the token before. Threads
compute the mask of the allowed tokens (`grammar`); steps leave out a request
whose mask is not known yet.

The device makes the slot of a finished request inactive; the host reads this a
step later, and gives the slot to another request. The host itself releases the
slots of requests that are cancelled or meet a stop text.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import itertools
import numbers
import operator
from typing import Any, Literal

from absl import logging
import jax
import numpy as np

from mod_jax.errors import UserError, require
from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm, vlm
from mod_jax.sampling import generation
from mod_jax.sampling import logits as logits_lib
from mod_jax.serving import grammar as grammar_lib
from mod_jax.serving import slots as slots_lib
from mod_jax.serving.text_stream import TextStream

Reason = Literal['stop', 'length', 'cancelled', 'failed', 'too_complex']
FAILURES = {  # Messages for the reasons that leave an answer incomplete.
  'failed': "the model's tokenizer cannot turn its tokens to text.",
  'too_complex': 'the JSON schema takes too much computing; simplify it.',
}
# Tokens and their log-probabilities in nats, the likeliest first.
Likeliest = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Event:
  """A new token of a request, or the end of a request."""

  id: int  # The request's number.
  # New text that is final: complete characters that cannot be the beginning of
  # a stop text.
  text: str
  token: int | None = None  # None if the event only ends the request.
  log_prob: float | None = None  # In nats, under the model's own distribution.
  likeliest: Likeliest = ()  # At the token's position, if requested.
  # Why the request ended; None while it goes on. `stop`: it sampled the end
  # token, met a stop text or completed its JSON. `length`: it reached its limit
  # of tokens. `cancelled`: see `Engine.cancel`. `failed`: the tokenizer cannot
  # turn its tokens into text. `too_complex`: its schema takes too much
  # computing.
  reason: Reason | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """The whole continuation of a request."""

  text: str  # Without the stop text.
  tokens: tuple[int, ...]  # With a stop text's tokens, without the end token.
  log_probs: tuple[float, ...]  # Of these tokens, in nats.
  likeliest: tuple[Likeliest, ...]  # For each token, if requested.
  reason: Reason  # As in `Event`.


# Longest wait for the masks of schemas, in seconds: while no step can run, and
# between checks whether the device has finished the running step.
_PATIENCE, _GLANCE = 0.05, 0.0005


@dataclasses.dataclass
class _Request:
  """What the host keeps about a request until the request ends."""

  id: int
  # Token ids, and which of them are real, [1, P]. Padding may be on the right,
  # since only real tokens are written into the cache.
  prompt: tuple[np.ndarray, np.ndarray]
  pictures: dict[str, np.ndarray]  # Further arguments of a `VLM`.
  limit: int
  settings: tuple[float, ...]  # Arguments of `generation.Settings.of`.
  seed: int
  text: TextStream
  extras: dict[str, Any]  # Keywords of `slots.extras_of`; empty without extras.
  num_likeliest: int
  constraint: grammar_lib.Constraint | None
  cancelled: bool = False

  @property
  def plain(self) -> bool:
    """Whether the programs without `slots.Extras` suffice for the request."""
    return not self.extras and self.constraint is None

  @property
  def held(self) -> bool:
    """Whether the request must wait for the mask of its next token."""
    return self.constraint is not None and not self.constraint.known


@dataclasses.dataclass(frozen=True)
class Load:
  """How much of the engine is in use."""

  running: int  # Requests that have a slot.
  waiting: int  # Requests that wait for a slot.
  # Fraction of (token, block) pairs whose attention was skipped, over all
  # tokens in the slots' caches. Tokens of a request that has ended count until
  # another request takes its slot.
  skipped: float
  # Tokens of running requests, as a fraction of what all slots can hold.
  filled: float


class Engine:
  """Serves many requests of a language model at once.

      engine = Engine(mod_jax.load('runs/mod'), slots=8)
      first = engine.submit('def main(', max_new_tokens=64)
      for event in engine.run():
        print(event.id, event.text)

  A request's tokens depend only on its own prompt, settings and seed, up to
  rounding: matrix products for several requests may sum in another order.
  Models with random routing scores (a control) are an exception: the scores are
  drawn in each step for all slots together.

  Args:
    run: a language model, possibly one that reads pictures (a `VLM`), as
      `mod_jax.load` returns it.
    slots: number of requests that are decoded at a time.
    max_length: most tokens of a prompt and its continuation together, not
      counting those of pictures; None for the run's `default_length`. Every
      slot's cache is allocated for this many tokens, and for the pictures.
    mode: how routed blocks choose tokens, or the name of a rule; None for the
      first causal rule that the model was trained for.
    pictures: most pictures of a request; must be 0 for a model of text alone.
      None for the `data.pictures` of the run's config, or 0 for such a model.

  Raises:
    UserError: the run is not a language model, an argument is out of range, or
      the model was trained for no causal rule, or not for that of `mode`.
  """

  def __init__(
    self,
    run: Any,
    *,
    slots: int = 8,
    max_length: int | None = None,
    mode: RoutingMode | str | None = None,
    pictures: int | None = None,
  ):
    sees = isinstance(run.config, vlm.VLMConfig)
    if not sees and not isinstance(run.config, lm.LMConfig):
      raise UserError(
        'the engine continues texts: give a language model, and for pictures'
        ' use run.predict.'
      )
    config, variables = run.config.unrolled(run.variables)
    if max_length is None:
      max_length = run.default_length
    if pictures is None:
      pictures = run.experiment.data.pictures if sees else 0
    require(
      pictures >= 0 and (sees or not pictures),
      '0 or more, and 0 for a model of text alone',
      pictures=pictures,
    )
    for name, value in (('slots', slots), ('max_length', max_length)):
      if value < 1:
        raise UserError(f'{name}={value}: expected at least 1.')
    mode = config.decoding_mode if mode is None else mode
    mode = config.routing_mode(mode) if isinstance(mode, str) else mode
    generation.check_rule(config, mode)
    self.tokenizer, self._encode = run.tokenizer, run.encode
    self.slots, self.max_length, self.mode = slots, max_length, mode
    self.pictures = pictures
    end_tokens = () if run.tokenizer is None else run.tokenizer.end_ids
    if sees and run.task is not None:
      end_tokens = run.task.modality.end_tokens
    places = pictures * config.num_patches if sees else 0
    self._program = slots_lib.Program(
      *(config, mode, max_length + places, places, end_tokens)
    )
    self._grammars = None
    if run.tokenizer is not None and grammar_lib.available():
      self._grammars = grammar_lib.Grammars(
        run.tokenizer, config.vocab_size, end_tokens
      )
    self._variables = variables
    self._ids = itertools.count()
    self._steps = itertools.count()
    self._waiting: collections.deque[_Request] = collections.deque()
    self._in_slot: list[_Request | None] = [None] * slots
    self._requests: dict[int, _Request] = {}
    self._events: list[Event] = []  # Not delivered yet.
    # Calls whose output the host has not read yet: (the request of each row,
    # output arrays).
    self._pending: collections.deque[Any] = collections.deque()
    self._state = slots_lib.State(
      self._program.empty(slots), slots_lib.rows_of(slots)
    )
    # None while no request in the slots needs the programs with extras.
    self._extras: slots_lib.Extras | None = None

  # Requests.

  def submit(
    self,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    num_likeliest: int = 0,
    schema: Mapping[str, Any] | grammar_lib.Grammar | None = None,
    stop: str | list[str] | tuple[str, ...] = (),
    seed: int = 0,
    images: Sequence[np.ndarray] = (),
    kinds: Sequence[int] | None = None,
  ) -> int:
    """Queues a request, and returns the number that its events have as `id`.

    Args:
      prompt: a text, or its tokens, with one placeholder for each picture.
      max_new_tokens: most tokens to add; None for as many as fit.
      temperature: of sampling; 0 takes the likeliest token.
      top_k: sample among this many likeliest tokens; 0 for all.
      top_p: sample among the fewest likeliest tokens whose total probability
        reaches this (the nucleus).
      min_p: sample among tokens whose probability is at least this fraction of
        the likeliest token's.
      frequency_penalty: subtracted from a token's logit for each time that the
        token is in the continuation; -2 to 2.
      presence_penalty: subtracted once from the logit of a token that is in the
        continuation; -2 to 2.
      logit_bias: numbers from -100 to 100, by token, to add to the logits.
      num_likeliest: number of likeliest tokens, 20 at most, whose
        log-probabilities are returned at each position.
      schema: JSON schema that the continuation conforms to, or the schema as
        compiled by `compile`; None if any text is allowed.
      stop: the continuation ends before the first of these texts.
      seed: of the sampling, from 0 to 2**32 - 1.
      images: the pictures, as `run.preprocess` makes them.
      kinds: index into `token_info.KINDS` of each token of the prompt; None if
        all are of the kind `question`.

    Raises:
      UserError: the prompt is empty or has tokens outside the vocabulary; the
        prompt, its new tokens or its pictures do not fit a slot; a setting is
        out of range; or the schema is not supported.
    """
    stops = (stop,) if not isinstance(stop, list | tuple) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
      raise UserError(
        f'stop={stop!r}: expected a text, or several, none of them empty.'
      )
    if stops and self.tokenizer is None:
      raise UserError('this model has no tokenizer: give no stop texts.')
    tokens = self.encode(prompt)
    length = len(tokens) - len(images)
    if max_new_tokens is None:
      max_new_tokens = max(1, self.max_length - length)
    if max_new_tokens < 1 or max_new_tokens % 1:
      raise UserError(
        f'max_new_tokens={max_new_tokens}: expected a whole number, 1 or more.'
      )
    if length + max_new_tokens > self.max_length:
      raise UserError(
        f'A prompt of {length} tokens and {max_new_tokens} new ones do not'
        f' fit max_length={self.max_length}: shorten the prompt, ask for fewer'
        ' tokens, or raise max_length.'
      )
    arrays, pictures = self._prompt_and_pictures(tokens, images, kinds)
    logits_lib.check(temperature, top_k, top_p, min_p)
    require(
      0 <= seed < 2**32 and not seed % 1,
      'a whole number from 0 to 2**32 - 1',
      seed=seed,
    )
    extras = self._checked_extras(
      frequency_penalty, presence_penalty, logit_bias or {}, num_likeliest
    )
    constraint = None
    if schema is not None:
      if not isinstance(schema, grammar_lib.Grammar):
        schema = self.compile(schema)
      constraint = self._grammars.start(schema)
    request = _Request(
      id=next(self._ids),
      prompt=arrays,
      pictures=pictures,
      limit=max_new_tokens,
      settings=(temperature, top_k, top_p, min_p),
      seed=seed,
      text=TextStream(self.tokenizer, tokens, stops),
      extras=extras,
      num_likeliest=num_likeliest,
      constraint=constraint,
    )
    self._requests[request.id] = request
    self._waiting.append(request)
    return request.id

  def encode(self, prompt: str | Sequence[int]) -> list[int]:
    """Returns a prompt's tokens; raises UserError for none and unknown ones."""
    if isinstance(prompt, str):
      if self.tokenizer is None:
        raise UserError('this model has no tokenizer: give tokens.')
      prompt = self._encode(prompt)
    try:
      tokens = [operator.index(token) for token in prompt]
    except TypeError as error:
      raise UserError(
        f'prompt: {error}; expected a text, or a list of whole numbers.'
      ) from error
    if not tokens:
      raise UserError('the prompt has no token: give at least one.')
    size = self._program.config.vocab_size
    if not 0 <= min(tokens) <= max(tokens) < size:
      raise UserError(
        f'token ids {min(tokens)}..{max(tokens)} for a model of vocab_size='
        f"{size}: tokenise with the model's own tokenizer."
      )
    return tokens

  def _prompt_and_pictures(self, tokens, images, kinds):
    """Returns the fields `prompt` and `pictures` of a `_Request`."""
    config, text = self._program.config, len(tokens) - len(images)
    if not isinstance(config, vlm.VLMConfig):
      require(
        len(images) == 0,
        'none, for a model of text alone',
        images=len(images),
      )
      tokens_1P, valid_1P = generation.pad_prompts([tokens])
      padding = ((0, 0), (0, generation.bucket(text) - text))
      return (np.pad(tokens_1P, padding), np.pad(valid_1P, padding)), {}
    require(
      len(images) <= self.pictures,
      f'at most {self.pictures}, for which this engine has room: show fewer, or'
      ' raise its pictures',
      images=len(images),
    )
    placed = vlm.place_images(
      *(config, [tokens], [images], None if kinds is None else [kinds]),
      text=generation.bucket(text),
    )
    (tokens_1P, images_1IHWC), given = placed.inputs
    prompt = (tokens_1P, given.pop('valid_BL'))
    return prompt, {'images_BIHWC': images_1IHWC, **given}

  def num_read(self, tokens: Sequence[int]) -> int:
    """Returns a prompt's length if a picture counts as all of its patches."""
    config, count = self._program.config, len(tokens)
    if isinstance(config, vlm.VLMConfig):
      placed = list(tokens).count(config.image_token)
      count += placed * (config.num_patches - 1)
    return count

  def _checked_extras(self, frequency, presence, bias, num_likeliest):
    """Checks keywords of `extras_of`; returns those that are not defaults."""
    for name, value in (('frequency', frequency), ('presence', presence)):
      require(-2 <= value <= 2, '-2 to 2', **{f'{name}_penalty': value})
    size = self._program.config.vocab_size
    for token, value in bias.items():
      require(
        isinstance(token, numbers.Integral)
        and 0 <= token < size
        and -100 <= value <= 100,
        f'tokens from 0 to {size - 1}, and numbers from -100 to 100',
        logit_bias={token: value},
      )
    require(
      0 <= num_likeliest <= slots_lib.MAX_TOP and not num_likeliest % 1,
      f'a whole number from 0 to {slots_lib.MAX_TOP}',
      num_likeliest=num_likeliest,
    )
    extras = {'frequency': frequency, 'presence': presence, 'bias': bias}
    extras['top'] = bool(num_likeliest)
    return {name: value for name, value in extras.items() if value}

  def compile(self, schema: Mapping[str, Any]) -> grammar_lib.Grammar:
    """Compiles a JSON schema for `submit`; any thread may call this.

    Raises:
      UserError: the schema is not supported, the model has no tokenizer, or the
        extra `json` is not installed.
    """
    if self._grammars is None:
      grammar_lib.require_library()
      raise UserError('this model has no tokenizer: give no schema.')
    return self._grammars.compile(schema)

  def cancel(self, id: int) -> None:
    """Lets the next `advance` end a request; ignores unknown and ended ones."""
    request = self._requests.get(id)
    if request is not None:
      request.cancelled = True

  @property
  def idle(self) -> bool:
    """Whether all requests have ended and all events were delivered."""
    return not self._requests and not self._events

  # Steps.

  def run(self) -> Iterator[Event]:
    """Yields events until the engine is idle.

    Requests may be submitted and cancelled meanwhile. If the iterator is left
    early, the next one yields what follows.
    """
    while not self.idle:
      self._events = self.advance()
      while self._events:
        yield self._events.pop(0)

  def advance(self) -> list[Event]:
    """Dispatches one step, and returns the events of the steps before.

    First ends cancelled requests, and gives free slots to waiting requests. If
    no request can take part in a step, waits a little for a request's mask.
    """
    self._drop_cancelled()
    for slot, request in enumerate(self._in_slot):
      if request is None:
        self._fill(slot)
    stepped = self._step()
    # Read the output of earlier calls while the newest one still runs.
    while len(self._pending) > stepped:
      self._read()
    if not stepped and not self._events:
      self._wait_for_grammars()
    events, self._events = self._events, []
    return events

  def _fill(self, slot) -> None:
    """Puts the first waiting request that is not held into a slot."""
    for request in [r for r in self._waiting if not r.held]:
      self._waiting.remove(request)
      mask_W = self._taken(request)
      if request.id in self._requests:
        self._insert(request, slot, mask_W)
        break

  def _step(self) -> bool:
    """Dispatches a step; returns False if no request can take part in one."""
    gate = None
    if all(r is None or r.plain for r in self._in_slot):
      self._extras = None
    else:
      self._await_masks()
      gate = self._gate()
    if not any(self._in_slot) or (gate is not None and gate.held_B.all()):
      return False
    key = jax.random.key(next(self._steps) % 2**31)
    self._state, self._extras, outputs = self._program.step(
      self._variables, self._state, self._extras, gate, key
    )
    self._remember(tuple(self._in_slot), outputs)
    return True

  def _await_masks(self) -> None:
    """Waits for the masks of the next step as long as the device is busy."""
    requests = [r for r in self._in_slot if r is not None]
    while awaited := _awaited(requests):
      if not self._pending or self._pending[-1][1][0].is_ready():
        break
      concurrent.futures.wait(awaited, _GLANCE)

  def _gate(self) -> slots_lib.Gate:
    """Returns the next step's gate; may end requests, as `_taken` does."""
    held_B = np.array([r is None or r.held for r in self._in_slot])
    # If all requests in the slots have constraints, they take part in the same
    # steps: hold all of them until every mask is known.
    if all(r is None or r.constraint is not None for r in self._in_slot):
      held_B |= any(r is not None and r.held for r in self._in_slot)
    allowed_BW = self._all_allowed(self.slots)
    for slot, request in enumerate(self._in_slot):
      if not held_B[slot] and request.constraint is not None:
        mask_W = self._taken(request)
        if mask_W is None:
          held_B[slot] = True
        else:
          allowed_BW[slot] = mask_W
    return slots_lib.Gate(allowed_BW, held_B)

  def _all_allowed(self, batch) -> np.ndarray:
    words = -(-self._program.config.vocab_size // 32)
    return np.full((batch, words), 2**32 - 1, np.uint32)

  def _taken(self, request) -> np.ndarray | None:
    """Returns the mask of a request's next token; None without a constraint.

    Ends the request, and returns None, if its text is complete or its schema
    takes too much computing.
    """
    if request.constraint is None:
      return None
    reason = 'stop'
    try:
      mask_W = request.constraint.take()
    except UserError as error:
      logging.warning('%s', error)
      mask_W, reason = None, 'too_complex'
    if mask_W is None:
      self._remove(request)
      self._emit(request, request.text.end(), reason=reason)
    return mask_W

  def _emit(self, request, *args, **kwargs) -> None:
    self._events.append(Event(request.id, *args, **kwargs))

  def _wait_for_grammars(self) -> None:
    """Waits until a thread finds a mask, for `_PATIENCE` seconds at most."""
    if awaited := _awaited(self._requests.values()):
      concurrent.futures.wait(
        awaited, _PATIENCE, concurrent.futures.FIRST_COMPLETED
      )

  def generate(
    self, prompts: Iterable[str | Sequence[int]], **kwargs
  ) -> list[Completion]:
    """Submits prompts, and returns their continuations when all have ended.

    Keywords are those of `submit`. An exception cancels all the prompts.
    """
    events_by_id: dict[int, list[Event]] = {}
    others = []

    def collect(events):
      for event in events:
        events_by_id.get(event.id, others).append(event)

    try:
      for prompt in prompts:
        events_by_id[self.submit(prompt, **kwargs)] = []
      while not events_by_id.keys().isdisjoint(self._requests):
        collect(self.advance())
    except BaseException:
      for id in events_by_id:
        self.cancel(id)
      self._drop_cancelled()
      collect(self._events)
      self._events = []
      raise
    finally:
      self._events = others + self._events
    return [completion(events) for events in events_by_id.values()]

  def warm_up(self, report: Callable[[str], None] = lambda _: None) -> None:
    """Compiles everything that requests need, before the first one arrives.

    Runs requests for this, so the engine must be idle. Calls `report` with what
    is compiled next, such as '2 of 6: prompts of up to 16 tokens'.
    """
    lengths, most = [], self.max_length - 1
    while not lengths or lengths[-1] < most:
      longest = generation.bucket(lengths[-1] + 1 if lengths else 1)
      lengths.append(max(1, min(longest, most)))
    config, image, filler, size = self._program.config, None, 0, 0
    if isinstance(config, vlm.VLMConfig):
      image, size = config.image_token, config.image_size
      filler = int(image == 0)
    programs = []
    for count in range(self.pictures + 1):
      shown = [np.zeros((size, size, 3), np.float32)] * count
      beside = f' and {count} pictures' if self.pictures else ''
      programs += [
        (
          f'prompts of up to {n} tokens{beside}',
          {'prompt': [image] * count + [filler] * n, 'images': shown},
        )
        for n in lengths
      ]
    extras = {'prompt': [filler], 'presence_penalty': 1.0}
    programs.insert(1, ('penalties, biases and schemas', extras))
    for i, (name, settings) in enumerate(programs):
      report(f'{i + 1} of {len(programs)}: {name}')
      self.submit(**settings, max_new_tokens=1)
      for _ in self.run():
        pass

  def load(self) -> Load:
    """Returns how much of the engine is in use."""
    cache, config = self._state.cache, self._program.config
    read_B = np.asarray(cache.length_B)
    taken_B = np.array([request is not None for request in self._in_slot])
    skipped = sum(
      (read_B - np.asarray(block.length_B)).sum()
      for block, layer in zip(cache.blocks, config.stack.layers, strict=True)
      if layer.routing is not None
    )
    return Load(
      running=int(taken_B.sum()),
      waiting=len(self._waiting),
      skipped=float(skipped / max(1, read_B.sum() * config.num_layers)),
      filled=float(
        (read_B * taken_B).sum() / (self.slots * self._program.room)
      ),
    )

  def _drop_cancelled(self) -> None:
    for request in list(self._requests.values()):
      if not request.cancelled:
        continue
      if request in self._waiting:
        self._waiting.remove(request)
      self._remove(request)
      self._emit(request, request.text.end(), reason='cancelled')

  def _remove(self, request: _Request) -> None:
    """Forgets a request, and empties its slot if it has one."""
    del self._requests[request.id]
    if request in self._in_slot:
      slot = self._in_slot.index(request)
      self._in_slot[slot] = None
      self._state = self._program.release(self._state, slot)

  def _insert(self, request: _Request, slot: int, mask_W) -> None:
    rows = slots_lib.rows_of(
      1,
      limit=request.limit,
      seed=request.seed,
      active=True,
      settings=request.settings,
    )
    cache, logits_1V = self._program.prefill(
      self._variables, *request.prompt, rows, request.pictures
    )
    changes = gate = None
    if not request.plain and self._extras is None:
      self._extras = self._new_extras(self.slots)
    if self._extras is not None:
      changes = self._new_extras(1, **request.extras)
      allowed_1W = self._all_allowed(1) if mask_W is None else mask_W[None]
      gate = slots_lib.Gate(allowed_1W, np.zeros(1, bool))
    self._state, self._extras, outputs = self._program.insert(
      *(self._state, self._extras, cache, logits_1V, rows, changes, gate, slot)
    )
    self._remember((request,), outputs)
    self._in_slot[slot] = request

  def _new_extras(self, batch, **row) -> slots_lib.Extras:
    size = self._program.config.vocab_size
    return slots_lib.extras_of(batch, size, **row)

  def _remember(self, requests, arrays) -> None:
    for array in arrays:
      array.copy_to_host_async()
    self._pending.append((requests, arrays))

  def _read(self) -> None:
    requests, arrays = self._pending.popleft()
    token_B, log_prob_B, active_B, *likeliest = map(np.asarray, arrays)
    for b, request in enumerate(requests):
      # Skip requests that have ended since the step was dispatched.
      if request is None or request.id not in self._requests:
        continue
      if request.cancelled or not active_B[b]:
        continue
      top = ()
      if request.num_likeliest:
        rows = (array_BT[b].tolist() for array_BT in likeliest)
        top = tuple(zip(*rows, strict=True))[: request.num_likeliest]
      self._add(request, int(token_B[b]), float(log_prob_B[b]), top)

  def _add(self, request, token, log_prob, likeliest) -> None:
    """Emits a request's new token; ends the request if this is its last one."""
    request.limit -= 1
    ends = token in self._program.end_tokens
    text = '' if ends else request.text.add(token)
    reason = None
    if ends or request.text.stopped:
      reason = 'stop'
    elif not request.limit:
      reason = 'length'
    if reason is not None:
      text += request.text.end()
      if request.text.stopped:
        reason = 'stop'
    if request.text.failed:
      reason = 'failed'
    if reason is not None:
      self._remove(request)
    elif request.constraint is not None:
      request.constraint.push(token)
    if ends:
      token, log_prob, likeliest = None, None, ()
    self._emit(request, text, token, log_prob, likeliest, reason)


def _awaited(requests: Iterable[_Request]) -> list[concurrent.futures.Future]:
  """Returns the futures of requests' masks that threads are still computing."""
  masks = [r.constraint.awaited for r in requests if r.constraint is not None]
  return [mask for mask in masks if mask is not None and not mask.done()]


def completion(events: Sequence[Event]) -> Completion:
  """Joins all events of a request that has ended into a completion."""
  token_events = [event for event in events if event.token is not None]
  return Completion(
    text=''.join(event.text for event in events),
    tokens=tuple(event.token for event in token_events),
    log_probs=tuple(event.log_prob for event in token_events),
    likeliest=tuple(e.likeliest for e in token_events if e.likeliest),
    reason=events[-1].reason,
  )
