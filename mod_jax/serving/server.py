"""A server of one language model, for clients of OpenAI's API.

A thin HTTP front end of the `Engine`: it parses requests, passes them to the
single thread that runs the engine, and returns the output, whole or as a
stream. A `TextProcess` tokenises and detokenises, so that a slow tokenizer or
template blocks neither the event loop nor the engine; that process also checks
whether a JSON schema can be compiled within the limits. Requests of clients
that disconnect are cancelled. `scripts/serve.py` starts the server.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
import concurrent.futures
import contextlib
import hashlib
import hmac
import json
import queue
import threading
import time
from typing import Any

from absl import logging
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from mod_jax.data import resize
from mod_jax.errors import UserError
from mod_jax.models import vlm
from mod_jax.serving import engine as engine_lib
from mod_jax.serving import metrics as metrics_lib
from mod_jax.serving import pictures, requests
from mod_jax.serving.engine import FAILURES, Engine, Event, Load
from mod_jax.serving.text_process import TextProcess

LOOPBACK = ('localhost', '127.0.0.1', '[::1]')
MAX_JSON_BYTES = 2**20  # Largest body of a request, besides its pictures.
# Number of threads that call the text process, and so of its concurrent jobs.
_TEXTS = 4
# Seconds after which a running step of the engine is reported as stuck.
_STEP_LIMIT = 60.0
# Seconds that a running step gets to end when the server is stopped.
STOP_LIMIT = 10
# Seconds that /metrics waits for the engine's step.
_LOAD_LIMIT = 2.0


class _Refused(Exception):
  """Makes the server answer with an error: HTTP status, and the API's code."""

  def __init__(self, message: str, status: int = 400, code: str | None = None):
    super().__init__(message)
    self.status, self.code = status, code


class Worker:
  """The thread that runs the engine, with methods for other threads to call.

  The engine is not thread-safe: other threads put functions into the inbox, and
  this thread calls them.
  """

  def __init__(self, engine: Engine, metrics: metrics_lib.Metrics):
    self._engine, self._metrics = engine, metrics
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._listeners: dict[int, Any] = {}
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._failed: BaseException | None = None
    self._busy_since: float | None = None

  def start(self) -> None:
    self._thread.start()

  def stop(self) -> None:
    self._inbox.put(None)
    self._thread.join(STOP_LIMIT)

  @property
  def trouble(self) -> str | None:
    """Why no request can be served; None if the engine is healthy."""
    if self._failed is not None:
      return 'the engine has failed; restart the server.'
    since = self._busy_since
    if since is not None and time.monotonic() - since > _STEP_LIMIT:
      return f'a step of the engine has taken more than {_STEP_LIMIT} seconds.'
    return None

  def submit(self, asked: list[tuple[list[int], dict]], put) -> list[int]:
    """Has the engine's thread submit all (prompt, settings) pairs, or none.

    That thread calls `put` with None when the engine has accepted all pairs,
    then with (index of the pair, event) for each event. If a pair is refused or
    the engine fails, it calls `put` with the exception, and no event follows.
    Returns a list, to which the thread adds the requests' numbers later.
    """
    ids: list[int] = []

    def job():
      try:
        if self._failed is not None:
          raise _Refused(self.trouble, 503)
        for tokens, settings in asked:
          ids.append(self._engine.submit(tokens, **settings))
      except BaseException as error:  # Must not end other clients' requests.
        for id in ids:
          self._engine.cancel(id)
        put(error)
        return
      put(None)
      for i, id in enumerate(ids):
        self._listeners[id] = put, i

    self._inbox.put(job)
    return ids

  def cancel(self, ids: list[int]) -> None:
    self._inbox.put(lambda: [self._engine.cancel(id) for id in ids])

  def load(self) -> concurrent.futures.Future[Load]:
    """Returns a future of the engine's load, set by the engine's thread."""
    future = concurrent.futures.Future()

    def job():
      # The caller may have cancelled the future.
      if not future.set_running_or_notify_cancel():
        return
      try:
        future.set_result(self._engine.load())
      except BaseException as error:  # Such as the error of a failed engine.
        future.set_exception(error)

    self._inbox.put(job)
    return future

  def _run(self):
    try:
      self._work()
    except BaseException as error:
      logging.exception('the engine has failed.')
      self._failed = error
      for put, _ in self._listeners.values():
        put(_Refused(self.trouble, 503))
      # Keep answering: jobs submitted from now on report the failure.
      while (job := self._inbox.get()) is not None:
        job()

  def _work(self):
    while True:
      # `get` blocks, but only while the engine is idle.
      while self._engine.idle or not self._inbox.empty():
        self._busy_since = None
        job = self._inbox.get()
        if job is None:
          return
        self._busy_since = time.monotonic()
        job()
      self._busy_since = time.monotonic()
      events = self._engine.advance()
      self._metrics.count_events(events)
      for event in events:
        # Prompts cancelled by a failed `submit` still have events, but no
        # listener.
        if event.id in self._listeners:
          put, index = self._listeners[event.id]
          put((index, event))
          if event.reason is not None:
            del self._listeners[event.id]


class _Server:
  def __init__(self, engine: Engine, run: Any, name: str, queue: int):
    self.engine, self.name, self._run = engine, name, run
    self._tokenizer = run.tokenizer
    self._most_bytes = MAX_JSON_BYTES + engine.pictures * pictures.MAX_ENCODED
    self._metrics = metrics_lib.Metrics()
    self.worker = Worker(engine, self._metrics)
    self._begun = int(time.time())
    self._room = engine.slots + queue
    self._taken = 0  # Choices of all prompts that are not answered yet.
    self._text = None
    if engine.tokenizer is not None:
      self._text = engine.tokenizer = TextProcess(
        *run.task.modality.tokenizer_source, pretrained=run.foreign
      )
    self._readers = concurrent.futures.ThreadPoolExecutor(_TEXTS)

  @contextlib.asynccontextmanager
  async def lifespan(self, _):
    self.worker.start()
    yield
    # Stop the engine first: it would take the end of the text process for a
    # failure of the tokenizer.
    self.worker.stop()
    if self._text is not None:
      self._text.stop()
    self._readers.shutdown(wait=False, cancel_futures=True)

  @property
  def _trouble(self) -> str | None:
    if self._text is not None and not self._text.alive:
      return 'the process of the tokenizer has ended; restart the server.'
    return self.worker.trouble

  # Requests.

  async def health(self, request: Request) -> JSONResponse:
    del request
    trouble = self._trouble
    return JSONResponse(
      {'status': trouble or 'ok', 'requests': self._taken},
      503 if trouble else 200,
    )

  async def metrics(self, request: Request) -> Response:
    del request
    load = None
    with contextlib.suppress(Exception):  # The engine may be stuck or dead.
      future = asyncio.wrap_future(self.worker.load())
      load = await asyncio.wait_for(future, _LOAD_LIMIT)
    text = self._metrics.text(load, healthy=self._trouble is None)
    return Response(text, media_type=metrics_lib.CONTENT_TYPE)

  async def models(self, request: Request) -> JSONResponse:
    del request
    return JSONResponse({'object': 'list', 'data': [self._about]})

  async def model(self, request: Request) -> JSONResponse:
    self._check_model(request.path_params['name'])
    return JSONResponse(self._about)

  @property
  def _about(self) -> dict[str, Any]:
    return {
      'id': self.name,
      'object': 'model',
      'created': self._begun,
      'owned_by': 'mod_jax',
    }

  def _check_model(self, name: str) -> None:
    if name != self.name:
      raise _Refused(
        f'the model {name!r:.100} does not exist: this server has'
        f' {self.name!r}.',
        *(404, 'model_not_found'),
      )

  async def completions(self, request: Request) -> Response:
    return await self._serve(request, requests.Completion)

  async def chat(self, request: Request) -> Response:
    return await self._serve(request, requests.Chat)

  async def _serve(self, request, kind) -> Response:
    """Returns the answer to a request, which is counted by its status."""
    status = 500
    try:
      response = await self._answered(request, kind)
      status = response.status_code
      return response
    except _Refused as error:
      status = error.status
      raise
    except ClientDisconnect:
      status = 499
      raise
    finally:
      self._metrics.count_request(request.url.path, status)

  async def _answered(self, request, kind) -> Response:
    """Parses a request and answers it; raises _Refused for any bad input."""
    try:
      api_request = requests.parse(kind, await _body(request, self._most_bytes))
      return await _while_connected(request, self._answer(api_request))
    except UserError as error:
      raise _Refused(str(error)) from error
    except asyncio.CancelledError as error:
      raise _Refused('the server is being stopped.', 503) from error

  async def _answer(self, asked) -> Response:
    """Submits a parsed request to the engine, and returns what it generates."""
    chat = isinstance(asked, requests.Chat)
    if asked.model is not None:
      self._check_model(asked.model)
    with contextlib.ExitStack() as stack:
      count = (1 if chat else len(asked.prompts)) * asked.choices
      stack.enter_context(self._place(count))
      most, more = self.engine.max_length, {}
      if chat:
        prompts, more = await self._read_chat(asked)
      elif isinstance(asked.prompts[0], str):
        prompts = await self._read('encode', asked.prompts, most)
      else:
        prompts = asked.prompts
      if asked.schema is not None:
        more['schema'] = await self._compiled(asked.schema)
      # `settings` is called for each prompt: if the request has no seed, it
      # draws one for every prompt, so equal prompts are continued differently.
      wanted = [
        (prompt, choice | more)
        for prompt in prompts
        for choice in asked.settings()
      ]
      events = await self._submit(wanted, stack)
      read = sum(map(self.engine.num_read, prompts))
      self._metrics.count_prompt(read)
      head = {
        'id': f'{"chatcmpl" if chat else "cmpl"}-{time.time_ns()}',
        'object': 'chat.completion' if chat else 'text_completion',
        'created': int(time.time()),
        'model': self.name,
      }
      answer = _Answer(
        *(head, len(prompts), read, asked, events, self._tokenizer)
      )
      if not asked.stream:
        return await answer.whole()
      if chat:
        head['object'] += '.chunk'
      return _Stream(answer.chunks(), stack.pop_all())

  @contextlib.contextmanager
  def _place(self, count: int) -> Iterator[None]:
    """Context manager: reserves places for `count` choices that run or wait.

    Raises _Refused if too few places are free, or `_trouble` is not None.
    """
    if self._trouble is not None:
      raise _Refused(self._trouble, 503)
    if not 1 <= count <= self._room:
      raise _Refused(
        f'{count} prompts in one request, each of n choices counted: expected 1'
        f' to {self._room}, as many as may run and wait.'
      )
    if self._taken + count > self._room:
      raise _Refused(
        f'{self._taken} of {self._room} places are taken (slots and queue): try'
        ' again later.',
        429,
      )
    self._taken += count
    try:
      yield
    finally:
      self._taken -= count

  async def _read_chat(self, asked) -> tuple[list[list[int]], dict[str, Any]]:
    """Returns the tokens, as a list of one prompt, and a `VLM`'s settings."""
    most = self.engine.max_length
    messages = [m.model_dump(exclude_unset=True) for m in asked.messages]
    if not isinstance(self._run.config, vlm.VLMConfig):
      if any(isinstance(m.content, list) for m in asked.messages):
        raise UserError(
          'this model reads texts alone: leave the pictures out, or serve a'
          ' model that sees.'
        )
      return await self._read('encode_chat', messages, most), {}
    pieces, urls = pictures.pieces(messages)
    if len(urls) > self.engine.pictures:
      raise UserError(
        f'{len(urls)} pictures in one request: expected at most'
        f' {self.engine.pictures}.'
      )
    encoded = [pictures.base64_of(fields['url']) for fields in urls]
    images = [await self._picture(data) for data in encoded]

    def encode(text):
      return self._run.task.modality.encode(
        pieces, lambda texts: text.call('encode_parts', texts, most)
      )

    tokens, kinds = await self._with_text(encode)
    return [tokens], {'images': images, 'kinds': kinds}

  async def _picture(self, encoded: str) -> np.ndarray:
    """Returns a picture in base64 as the model's input, [size, size, 3]."""
    preprocess = self._run.preprocess
    fitted = await self._read('fit_picture', encoded, preprocess.fit.keywords)
    pixels = np.frombuffer(base64.b64decode(fitted), np.uint8)
    image_SSC = pixels.reshape(*[preprocess.image_size] * 2, 3)
    return resize.normalize(image_SSC, preprocess.mean, preprocess.std)

  async def _read(self, job, *args) -> Any:
    """Calls the method `job` of the text process, and returns its result."""
    return await self._with_text(lambda text: text.call(job, *args))

  async def _with_text(self, function: Callable[[TextProcess], Any]) -> Any:
    """Returns the result of a function of the text process, in a thread."""
    if self._text is None:
      raise UserError('this model has no tokenizer: give tokens.')
    try:
      return await self._in_thread(function, self._text)
    except OSError as error:
      raise _Refused(
        f'the tokenizer cannot be reached: {error}', 503
      ) from error

  async def _compiled(self, schema) -> Any:
    """Compiles a JSON schema, after `_Texts.check_schema` has accepted it."""
    await self._read('check_schema', schema)
    return await self._in_thread(self.engine.compile, schema)

  async def _in_thread(self, function, *args) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._readers, function, *args)

  async def _submit(self, asked, stack) -> asyncio.Queue:
    """Submits all (prompt, settings) pairs, and returns the queue of events.

    Raises UserError or _Refused if the engine refuses a pair. When `stack`
    closes, it cancels the requests that have not ended.
    """
    loop, events = asyncio.get_running_loop(), asyncio.Queue()

    def put(message):
      loop.call_soon_threadsafe(events.put_nowait, message)

    ids = self.worker.submit(asked, put)
    stack.callback(self.worker.cancel, ids)
    await _next(events)
    return events


async def _next(events: asyncio.Queue):
  """Returns the next message that `Worker.submit` puts, or raises it.

  Raises UserError or _Refused for an exception, or an event of `FAILURES`.
  """
  message = await events.get()
  if isinstance(message, UserError | _Refused):
    raise message
  if isinstance(message, BaseException):
    raise _Refused(f'the request cannot be taken: {message!r:.200}', 500)
  reason = message and message[1].reason
  if reason in FAILURES:
    raise _Refused(FAILURES[reason], 503 if reason == 'failed' else 400)
  return message


class _Answer:
  """Makes the answer to a request from the events of all its choices."""

  def __init__(self, head, prompts, read, asked, events, tokenizer):
    # `read` is the number of tokens in all prompts together.
    self._head, self._read, self._asked = head, read, asked
    self._events, self._tokenizer = events, tokenizer
    self._chat = isinstance(asked, requests.Chat)
    self._count = prompts * asked.choices
    self._new = 0  # Tokens that were generated.

  async def _until_ended(self) -> AsyncIterator[tuple[int, Event]]:
    """Yields (index of the choice, event) until all choices have ended."""
    left = self._count
    while left:
      index, event = await _next(self._events)
      left -= event.reason is not None
      self._new += event.token is not None
      yield index, event

  async def whole(self) -> JSONResponse:
    events_by_choice = [[] for _ in range(self._count)]
    async for i, event in self._until_ended():
      events_by_choice[i].append(event)
    choices = []
    for i, events in enumerate(events_by_choice):
      whole = engine_lib.completion(events)
      choices.append(
        self._choice(i, whole.text, whole.reason, events, 'message')
      )
    usage = self._usage()
    return JSONResponse({**self._head, 'choices': choices, 'usage': usage})

  async def chunks(self) -> AsyncIterator[str]:
    """Yields server-sent events; a disconnect cancels this generator."""

    def encode_event(**fields):
      return f'data: {json.dumps(fields)}\n\n'

    begun = set()  # Choices of which a chunk was sent.
    head, options = self._head, self._asked.stream_options
    tells_usage = options is not None and options.include_usage
    if tells_usage:
      head = {**head, 'usage': None}  # OpenAI's API: null in all but the last.
    try:
      async for i, event in self._until_ended():
        with_token = self._asked.wants_logprobs and event.token is not None
        if event.text or event.reason is not None or with_token:
          choice = self._choice(i, event.text, event.reason, [event], 'delta')
          if self._chat and i in begun:
            # Send the role once: clients concatenate the fields of all chunks.
            del choice['delta']['role']
          begun.add(i)
          yield encode_event(**head, choices=[choice])
    except _Refused as error:
      # The HTTP status has been sent already, so the error becomes an event.
      yield encode_event(**_error(error))
      return
    if tells_usage:
      yield encode_event(**{**head, 'usage': self._usage()}, choices=[])
    yield 'data: [DONE]\n\n'

  def _usage(self) -> dict[str, int]:
    return {
      'prompt_tokens': self._read,
      'completion_tokens': self._new,
      'total_tokens': self._read + self._new,
    }

  def _choice(self, index, text, reason, events, key) -> dict[str, Any]:
    choice = {'index': index, 'finish_reason': reason, 'logprobs': None}
    if self._asked.wants_logprobs:
      found = [event for event in events if event.token is not None]
      choice['logprobs'] = (
        {'content': [self._log_prob(event) for event in found]}
        if self._chat
        else self._log_probs(found)
      )
    if not self._chat:
      return {**choice, 'text': text}
    return {**choice, key: {'role': 'assistant', 'content': text}}

  def _log_probs(self, events) -> dict[str, Any]:
    """Returns log-probabilities as /v1/completions has them: by column."""
    likeliest = None
    if self._asked.num_likeliest:
      likeliest = [self._by_spelling(event) for event in events]
    return {
      'tokens': [self._spelled(event.token) for event in events],
      'token_logprobs': [event.log_prob for event in events],
      'top_logprobs': likeliest,
    }

  def _by_spelling(self, event) -> dict[str, float]:
    """Returns log-probabilities of the token and of the likeliest tokens.

    OpenAI adds the token itself where it is not among the likeliest. Of tokens
    with the same spelling the token itself counts, and then the likeliest.
    """
    found = {}
    for token, log_prob in ((event.token, event.log_prob), *event.likeliest):
      found.setdefault(self._spelled(token), log_prob)
    return found

  def _log_prob(self, event) -> dict[str, Any]:
    """Returns log-probabilities at a token as /v1/chat/completions has them."""

    def about(token, log_prob):
      data = None
      if self._tokenizer is not None and token < self._tokenizer.vocab_size:
        data = list(self._tokenizer.surfaces[token])
      text = self._spelled(token)
      return {'token': text, 'bytes': data, 'logprob': log_prob}

    likeliest = [about(*pair) for pair in event.likeliest]
    return {**about(event.token, event.log_prob), 'top_logprobs': likeliest}

  def _spelled(self, token: int) -> str:
    if self._tokenizer is None:
      return f'token_id:{token}'
    return self._tokenizer.spelled(token)


class _Stream(StreamingResponse):
  """Streams chunks, then closes `stack`, even if no chunk was ever sent."""

  def __init__(self, chunks, stack: contextlib.ExitStack):
    super().__init__(chunks, media_type='text/event-stream')
    self._stack = stack

  async def __call__(self, scope, receive, send):
    with self._stack:
      await super().__call__(scope, receive, send)


async def _body(request: Request, most: int) -> bytes:
  """Returns the body of a request.

  Raises _Refused if the body has more than `most` bytes, or is not declared as
  JSON. Insisting on JSON guards against cross-site requests: browsers send
  other content types without a CORS preflight.
  """
  kind = request.headers.get('content-type', '').partition(';')[0].strip()
  if kind.lower() != 'application/json':
    raise _Refused(f'Content-Type {kind!r}: expected application/json.', 415)
  data = bytearray()
  async for part in request.stream():
    data += part
    if len(data) > most:
      raise _Refused(f'the request has more than {most} bytes.', 413)
  return bytes(data)


async def _while_connected(request: Request, answer) -> Response:
  """Returns a coroutine's response; if the client disconnects, cancels it."""

  async def until_disconnect():
    while (await request.receive())['type'] != 'http.disconnect':
      pass

  task = asyncio.ensure_future(answer)
  disconnect = asyncio.ensure_future(until_disconnect())
  try:
    await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    return task.result() if task.done() else Response(status_code=499)
  finally:
    task.cancel()
    disconnect.cancel()


def _error(error: _Refused) -> dict[str, Any]:
  kind = 'invalid_request_error' if error.status < 500 else 'server_error'
  # Messages from a chat template may contain lone surrogates.
  message = str(error).encode('utf-8', 'replace').decode()
  return {
    'error': {
      'message': message,
      'type': kind,
      'param': None,
      'code': error.code,
    }
  }


class _KeyRequired:
  """Answers 401 to requests without the key, unless they are to /health."""

  def __init__(self, app: ASGIApp, key: str):
    self._app, self._key = app, self._digest(key.encode())

  @staticmethod
  def _digest(key: bytes) -> bytes:
    # Digests have one length, so the time to compare two of them does not
    # depend on the length of the key.
    return hashlib.sha256(key).digest()

  async def __call__(self, scope, receive, send):
    if scope['type'] == 'http' and scope['path'] != '/health':
      given = dict(scope['headers']).get(b'authorization', b'')
      scheme, _, key = given.partition(b' ')
      same = hmac.compare_digest(self._digest(key.strip()), self._key)
      if not same or scheme.lower() != b'bearer':
        refused = _Refused(
          'this server needs its API key, as in Authorization: Bearer KEY.',
          *(401, 'invalid_api_key'),
        )
        response = JSONResponse(
          _error(refused), 401, {'WWW-Authenticate': 'Bearer'}
        )
        await response(scope, receive, send)
        return
    await self._app(scope, receive, send)


def app(
  engine: Engine,
  run: Any,
  *,
  name: str,
  queue: int = 64,
  hosts=LOOPBACK,
  key: str | None = None,
) -> ASGIApp:
  """Returns the ASGI application of a server.

  Moves the engine's tokenizer into a process of its own; only the server may
  use the engine from now on. `name` is the model's name in the API, and `queue`
  the number of choices that may wait for a slot. `hosts` are allowed values of
  the Host header, such as `*.example.com`, or `*` for any; the check prevents
  DNS rebinding. If there is a `key`, all requests except those to /health must
  have it as a bearer token. Raises UserError if a host is not a valid pattern.
  """
  server = _Server(engine, run, name, queue)

  def handle_refused(_, error):
    return JSONResponse(_error(error), error.status)

  def handle_unknown(_, error):  # Another address, or another method.
    body = _error(_Refused(error.detail, error.status_code))
    return JSONResponse(body, error.status_code, error.headers)

  application = Starlette(
    routes=[
      Route('/health', server.health),
      Route('/metrics', server.metrics),
      Route('/v1/models', server.models),
      Route('/v1/models/{name:path}', server.model),
      Route('/v1/completions', server.completions, methods=['POST']),
      Route('/v1/chat/completions', server.chat, methods=['POST']),
    ],
    exception_handlers={
      _Refused: handle_refused,
      HTTPException: handle_unknown,
      ClientDisconnect: lambda *_: Response(status_code=499),
    },
    lifespan=server.lifespan,
  )
  if key is not None:
    application = _KeyRequired(application, key)
  try:
    return TrustedHostMiddleware(application, hosts, www_redirect=False)
  except AssertionError as error:
    raise UserError(f'allowed_hosts={",".join(hosts)}: {error}') from error
