"""Continuous batching: many requests share the slots of one decoding state.

`slots.Program.prefill`, compiled for each power of two of prompt lengths, reads
a whole prompt into its own cache, and `insert` copies that into a free slot;
`step` adds a token to every active slot. `insert` and `step` donate the state,
so caches are updated in place. Settings of requests (temperature, limits, seed)
are arrays with an entry per slot, so nothing compiles after `warm_up`. The host
reads the tokens of one step while the next one runs.

A finished slot becomes inactive on the device; the host learns of it a step
later and refills the slot. The host itself releases the slots of requests that
are cancelled or meet a stop text.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import operator
from typing import Any, Literal

import jax
import numpy as np

from mod_jax.errors import UserError
from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm
from mod_jax.sampling import generation
from mod_jax.sampling import logits as logits_lib
from mod_jax.serving import slots as slots_lib
from mod_jax.serving.text_stream import TextStream

Reason = Literal['stop', 'length', 'cancelled', 'failed']


@dataclasses.dataclass(frozen=True)
class Event:
  """A new token of a request, or its end."""

  id: int  # The request's number.
  # New text that is final: complete characters that cannot be the beginning of
  # a stop text.
  text: str
  token: int | None = None  # None if the event only ends the request.
  log_prob: float | None = None  # In nats, under the model's own distribution.
  # None while the request goes on. It ends with `stop` at its end token or a
  # stop text, with `length` at its limit, and has `failed` where the tokenizer
  # cannot turn its tokens into text.
  reason: Reason | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """The whole continuation of a request."""

  text: str  # Without the stop text.
  tokens: tuple[int, ...]  # With those of a stop text, without the end token.
  log_probs: tuple[float, ...]  # Of these tokens, in nats.
  reason: Reason  # As in `Event`.


_MAX_LENGTH = 2048  # By default.
# Settings of slots that have not been used yet.
_GREEDY = {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0}


@dataclasses.dataclass
class _Request:
  """The host's record of a request."""

  id: int
  tokens: list[int]
  limit: int
  settings: dict[str, float]
  seed: int
  text: TextStream
  cancelled: bool = False


class Engine:
  """Serves many requests of a language model at once.

      engine = Engine(mod_jax.load('runs/mod'), slots=8)
      first = engine.submit('def main(', max_new_tokens=64)
      for event in engine.run():
        print(event.id, event.text)

  A request's tokens depend only on its own prompt, settings and seed, up to
  rounding: matrix products of several rows may sum in another order. Models
  with random routing scores (a control) are an exception: the scores are drawn
  in each step for all slots together.

  Args:
    run: a language model, as `mod_jax.load` returns it.
    slots: number of requests that are decoded at a time.
    max_length: most tokens of a prompt and its continuation together; None for
      the model's own, but no more than 2,048, since every slot's cache has room
      for so many from the beginning.
    mode: how routed blocks choose tokens; None for the first causal rule that
      the model was trained for.

  Raises:
    UserError: the run is not a language model, or has no causal rule.
  """

  def __init__(
    self,
    run: Any,
    *,
    slots: int = 8,
    max_length: int | None = None,
    mode: RoutingMode | str | None = None,
  ):
    if not isinstance(run.config, lm.LMConfig):
      raise UserError(
        'the engine continues texts: give a language model, and for pictures'
        ' use run.predict.'
      )
    config, variables = lm.unrolled_variables(run.config, run.variables)
    if max_length is None:
      max_length = min(run.max_length, _MAX_LENGTH)
    for name, value in (('slots', slots), ('max_length', max_length)):
      if value < 1:
        raise UserError(f'{name}={value}: expected at least 1.')
    mode = config.decoding_mode if mode is None else mode
    mode = RoutingMode(rule=mode) if isinstance(mode, str) else mode
    generation.check_rule(config, mode)
    self.tokenizer, self._encode = run.tokenizer, run.encode
    self.slots, self.max_length, self.mode = slots, max_length, mode
    end_token = None if run.tokenizer is None else run.tokenizer.eos_id
    self._program = slots_lib.Program(config, mode, max_length, end_token)
    self._variables = variables
    self._ids = itertools.count()
    self._steps = itertools.count()
    self._waiting: collections.deque[_Request] = collections.deque()
    self._in_slot: list[_Request | None] = [None] * slots
    self._requests: dict[int, _Request] = {}
    # Events of other requests that occurred while `generate` ran.
    self._held_events: list[Event] = []
    # Calls whose output the host has not read yet: (the request of each row,
    # output arrays).
    self._pending: collections.deque[Any] = collections.deque()
    self._state = slots_lib.State(
      self._program.empty(slots),
      slots_lib.rows_of(
        [0] * slots, [0] * slots, [_GREEDY] * slots, active=False
      ),
    )

  # Requests.

  def submit(
    self,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: str | list[str] | tuple[str, ...] = (),
    seed: int = 0,
  ) -> int:
    """Queues a request, and returns its number.

    Args:
      prompt: a text, or its tokens.
      max_new_tokens: most tokens to add; None for as many as fit.
      temperature: of sampling; 0 takes the likeliest token.
      top_k: sample among this many likeliest tokens; 0 for all.
      top_p: sample from the nucleus of this probability.
      stop: the continuation ends before the first of these texts.
      seed: of the sampling.

    Raises:
      UserError: the prompt is empty or has tokens outside the vocabulary; it
        does not fit a slot; or a setting is out of range.
    """
    stops = (stop,) if not isinstance(stop, list | tuple) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
      raise UserError(
        f'stop={stop!r}: expected a text, or several, none of them empty.'
      )
    if stops and self.tokenizer is None:
      raise UserError('this model has no tokenizer: give no stop texts.')
    tokens = self.encode(prompt)
    if max_new_tokens is None:
      max_new_tokens = max(1, self.max_length - len(tokens))
    if max_new_tokens < 1:
      raise UserError(f'max_new_tokens={max_new_tokens}: expected 1 or more.')
    if len(tokens) + max_new_tokens > self.max_length:
      raise UserError(
        f'A prompt of {len(tokens)} tokens and {max_new_tokens} new ones do not'
        f' fit max_length={self.max_length}: shorten the prompt, ask for fewer'
        ' tokens, or raise max_length.'
      )
    logits_lib.check(temperature, top_k, top_p)
    if not 0 <= seed < 2**32:
      raise UserError(f'seed={seed}: expected 0 to 2**32 - 1.')
    request = _Request(
      id=next(self._ids),
      tokens=tokens,
      limit=max_new_tokens,
      settings={'temperature': temperature, 'top_k': top_k, 'top_p': top_p},
      seed=seed,
      text=TextStream(self.tokenizer, tokens, stops),
    )
    self._requests[request.id] = request
    self._waiting.append(request)
    return request.id

  def encode(self, prompt: str | Sequence[int]) -> list[int]:
    """Returns the prompt's tokens, checked against the vocabulary."""
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

  def cancel(self, id: int) -> None:
    """Ends a request; does nothing if it is unknown or has ended."""
    request = self._requests.get(id)
    if request is not None:
      request.cancelled = True

  @property
  def idle(self) -> bool:
    """Whether no request is unfinished and no event undelivered."""
    return not self._requests and not self._held_events

  # Work.

  def run(self) -> Iterator[Event]:
    """Yields events until the engine is idle.

    Requests may be submitted and cancelled meanwhile.
    """
    while not self.idle:
      yield from self.advance()

  def advance(self) -> list[Event]:
    """Runs one step, and returns the new events."""
    events = self._held_events + self._drop_cancelled()
    self._held_events = []
    for slot, request in enumerate(self._in_slot):
      if request is None and self._waiting:
        self._insert(self._waiting.popleft(), slot)
    if any(request is not None for request in self._in_slot):
      key = jax.random.key(next(self._steps) % 2**31)
      self._state, outputs = self._program.step(
        self._variables, self._state, key
      )
      self._remember(tuple(self._in_slot), outputs)
    # Read the output of earlier calls while the newest one still runs.
    while len(self._pending) > 1:
      events += self._read()
    if self._pending and all(r is None for r in self._in_slot):
      events += self._read()
    return events

  def generate(
    self, prompts: Iterable[str | Sequence[int]], **kwargs
  ) -> list[Completion]:
    """Returns the prompts' continuations; keywords are those of `submit`."""
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
      collect(self._drop_cancelled())
      raise
    finally:
      self._held_events += others
    return [completion(events) for events in events_by_id.values()]

  def warm_up(self) -> None:
    """Compiles everything that requests need, before the first one arrives."""
    length = 0
    while length < self.max_length - 1:
      length = min(generation.bucket(length + 1), self.max_length - 1)
      self.generate([[0] * length], max_new_tokens=1)

  def _drop_cancelled(self) -> list[Event]:
    events = []
    for request in list(self._requests.values()):
      if not request.cancelled:
        continue
      if request in self._waiting:
        self._waiting.remove(request)
      self._remove(request)
      events.append(Event(request.id, request.text.end(), reason='cancelled'))
    return events

  def _remove(self, request: _Request) -> None:
    """Forgets a request, and empties its slot if it has one."""
    del self._requests[request.id]
    if request in self._in_slot:
      slot = self._in_slot.index(request)
      self._in_slot[slot] = None
      self._state = self._program.release(self._state, slot)

  def _insert(self, request: _Request, slot: int) -> None:
    count = len(request.tokens)
    # Right-padded: the cache takes real tokens only.
    tokens_1P = np.zeros((1, generation.bucket(count)), np.int32)
    tokens_1P[0, :count] = request.tokens
    valid_1P = np.arange(tokens_1P.shape[1])[None] < count
    rows = slots_lib.rows_of(
      [request.limit], [request.seed], [request.settings]
    )
    cache, rows, log_prob_1 = self._program.prefill(
      self._variables, tokens_1P, valid_1P, rows
    )
    self._remember((request,), (rows.token_B, log_prob_1, np.ones(1, bool)))
    self._state = self._program.insert(self._state, cache, rows, slot)
    self._in_slot[slot] = request

  def _remember(self, requests, arrays) -> None:
    for array in arrays:
      if isinstance(array, jax.Array):
        array.copy_to_host_async()
    self._pending.append((requests, arrays))

  def _read(self) -> list[Event]:
    requests, arrays = self._pending.popleft()
    token_B, log_prob_B, active_B = map(np.asarray, arrays)
    events = []
    for b, request in enumerate(requests):
      # Skip requests that have ended since the step was dispatched.
      if request is None or request.id not in self._requests:
        continue
      if not request.cancelled and active_B[b]:
        events.append(
          self._event(request, int(token_B[b]), float(log_prob_B[b]))
        )
    return events

  def _event(self, request, token, log_prob) -> Event:
    """Returns the event of a token, which may be the request's last."""
    request.limit -= 1
    ends = token == self._program.end_token
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
    if ends:
      token = log_prob = None
    return Event(request.id, text, token, log_prob, reason)


def completion(events: Sequence[Event]) -> Completion:
  """Joins all events of a request that has ended into a completion."""
  token_events = [event for event in events if event.token is not None]
  return Completion(
    text=''.join(event.text for event in events),
    tokens=tuple(event.token for event in token_events),
    log_probs=tuple(event.log_prob for event in token_events),
    reason=events[-1].reason,
  )
