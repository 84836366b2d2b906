"""A server of one language model, for clients of OpenAI's API.

A thin HTTP front end of the `Engine`: it parses requests, passes them to the
single thread that runs the engine, and returns the output, whole or as a
stream. A `TextProcess` tokenises and detokenises, so that a slow tokenizer or
template blocks neither the event loop nor the engine. Requests of clients that
disconnect are cancelled. `scripts/serve.py` starts the server.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
import concurrent.futures
import contextlib
import json
import queue
import threading
import time
from typing import Any

from absl import logging
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from mod_jax.errors import UserError
from mod_jax.serving import engine as engine_lib
from mod_jax.serving import requests
from mod_jax.serving.engine import Engine
from mod_jax.serving.text_process import TextProcess

LOOPBACK = ('localhost', '127.0.0.1', '[::1]')
MAX_BYTES = 2**20  # Largest body of a request.
# Threads that wait for the text process, and so its concurrent jobs.
_TEXTS = 4
# Seconds after which a running step of the engine is reported as stuck.
_STEP_LIMIT = 60.0
# Seconds that running requests get to finish when the server is stopped.
STOP_LIMIT = 10


class _Refused(Exception):
  """Answers a request with an error of this HTTP status."""

  def __init__(self, message: str, status: int = 400):
    super().__init__(message)
    self.status = status


class Worker:
  """The thread that runs the engine, and its interface for other threads.

  The engine is not thread-safe: other threads put functions into the inbox, and
  this thread calls them.
  """

  def __init__(self, engine: Engine):
    self._engine = engine
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

  def submit(self, prompts: list[list[int]], settings, put) -> list[int]:
    """Submits all prompts to the engine, or none of them.

    The engine's thread calls `put` with None once the prompts are accepted,
    then with (index of the prompt, event) for each event; or with the exception
    that ends all of them. It fills the list that is returned with the requests'
    numbers later.
    """
    ids: list[int] = []

    def job():
      try:
        if self._failed is not None:
          raise _Refused(self.trouble, 503)
        for tokens in prompts:
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
      for event in self._engine.advance():
        # Prompts cancelled by a failed `submit` still have events, but no
        # listener.
        if event.id in self._listeners:
          put, index = self._listeners[event.id]
          put((index, event))
          if event.reason is not None:
            del self._listeners[event.id]


class _Server:
  def __init__(self, engine: Engine, run: Any, name: str, queue: int):
    self.engine, self.name = engine, name
    self.worker = Worker(engine)
    self._room = engine.slots + queue
    self._taken = 0  # Prompts that are not answered yet.
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
    # The engine first: it would take the end of the tokenizer's process for a
    # fault of the tokenizer.
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

  async def models(self, request: Request) -> JSONResponse:
    del request
    return JSONResponse(
      {
        'object': 'list',
        'data': [{'id': self.name, 'object': 'model', 'owned_by': 'mod_jax'}],
      }
    )

  async def completions(self, request: Request) -> Response:
    return await self._serve(request, requests.Completion)

  async def chat(self, request: Request) -> Response:
    return await self._serve(request, requests.Chat)

  async def _serve(self, request, kind) -> Response:
    try:
      api_request = requests.parse(kind, await _body(request))
      return await _while_connected(request, self._answer(api_request))
    except UserError as error:
      raise _Refused(str(error)) from error
    except asyncio.CancelledError as error:
      raise _Refused('the server is being stopped.', 503) from error

  async def _answer(self, asked) -> Response:
    chat = isinstance(asked, requests.Chat)
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._place(1 if chat else len(asked.prompts)))
      if chat:
        messages = [m.model_dump(exclude_unset=True) for m in asked.messages]
        prompts = await self._read('encode_chat', messages)
      elif isinstance(asked.prompts[0], str):
        prompts = await self._read('encode', asked.prompts)
      else:
        prompts = asked.prompts
      events = await self._submit(prompts, asked.settings(), stack)
      head = {
        'id': f'{"chatcmpl" if chat else "cmpl"}-{time.time_ns()}',
        'object': 'chat.completion' if chat else 'text_completion',
        'created': int(time.time()),
        'model': self.name,
      }
      if not asked.stream:
        return await _whole(head, prompts, events, asked)
      if chat:
        head['object'] += '.chunk'
      chunks = _chunks(head, prompts, events, asked)
      return _Stream(chunks, stack.pop_all())

  @contextlib.contextmanager
  def _place(self, count: int) -> Iterator[None]:
    """Reserves places among the prompts that may run and wait.

    Refuses them if there are too few places or the engine has failed.
    """
    if self._trouble is not None:
      raise _Refused(self._trouble, 503)
    if not 1 <= count <= self._room:
      raise _Refused(
        f'{count} prompts in one request: expected 1 to {self._room}, as many'
        ' as may run and wait.'
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

  async def _read(self, job, texts) -> list[list[int]]:
    """Tokenises texts, or a chat, in the text process; returns the prompts."""
    if self._text is None:
      raise UserError('this model has no tokenizer: give tokens.')
    loop = asyncio.get_running_loop()
    try:
      return await loop.run_in_executor(
        self._readers, self._text.call, job, texts, self.engine.max_length
      )
    except OSError as error:
      raise _Refused(
        f'the tokenizer cannot be reached: {error}', 503
      ) from error

  async def _submit(self, prompts, settings, stack) -> asyncio.Queue:
    """Submits prompts, and returns the queue of their events.

    Closing the stack cancels those that have not ended.
    """
    loop, events = asyncio.get_running_loop(), asyncio.Queue()

    def put(message):
      loop.call_soon_threadsafe(events.put_nowait, message)

    ids = self.worker.submit(prompts, settings, put)
    stack.callback(self.worker.cancel, ids)
    await _next(events)
    return events


async def _next(events: asyncio.Queue):
  """Returns (index of the prompt, event) of the next event."""
  message = await events.get()
  if isinstance(message, UserError | _Refused):
    raise message
  if isinstance(message, BaseException):
    raise _Refused(f'the request cannot be taken: {message!r:.200}', 500)
  if message is not None and message[1].reason == 'failed':
    raise _Refused("the model's tokenizer cannot turn its tokens to text.", 503)
  return message


async def _until_ended(events, count) -> AsyncIterator[tuple[int, Any]]:
  """Yields (index of the prompt, event) until `count` prompts have ended."""
  while count:
    index, event = await _next(events)
    count -= event.reason is not None
    yield index, event


async def _whole(head, prompts, events, asked) -> JSONResponse:
  events_by_prompt = [[] for _ in prompts]
  async for i, event in _until_ended(events, len(prompts)):
    events_by_prompt[i].append(event)
  choices, count = [], 0
  for i, whole in enumerate(map(engine_lib.completion, events_by_prompt)):
    choice = _choice(i, whole.text, whole.reason, asked, 'message')
    if asked.logprobs:
      choice['logprobs'] = {
        'tokens': whole.tokens,
        'token_logprobs': whole.log_probs,
      }
    choices.append(choice)
    count += len(whole.tokens)
  usage = _usage(prompts, count)
  return JSONResponse({**head, 'choices': choices, 'usage': usage})


async def _chunks(head, prompts, events, asked) -> AsyncIterator[str]:
  """Yields server-sent events; a disconnect may cancel it between any two."""

  def encode_event(**fields):
    return f'data: {json.dumps(fields)}\n\n'

  count = 0
  try:
    async for i, event in _until_ended(events, len(prompts)):
      count += event.token is not None
      if event.text or event.reason is not None:
        choice = _choice(i, event.text, event.reason, asked, 'delta')
        yield encode_event(**head, choices=[choice])
  except _Refused as error:
    # The HTTP status has been sent already, so the error becomes an event.
    yield encode_event(**_error(error))
    return
  if asked.usage_wanted:
    yield encode_event(**head, choices=[], usage=_usage(prompts, count))
  yield 'data: [DONE]\n\n'


class _Stream(StreamingResponse):
  """A stream that closes its stack at its end, even if it never starts."""

  def __init__(self, chunks, stack: contextlib.ExitStack):
    super().__init__(chunks, media_type='text/event-stream')
    self._stack = stack

  async def __call__(self, scope, receive, send):
    with self._stack:
      await super().__call__(scope, receive, send)


def _usage(prompts, new: int) -> dict[str, int]:
  prompt = sum(map(len, prompts))
  return {
    'prompt_tokens': prompt,
    'completion_tokens': new,
    'total_tokens': prompt + new,
  }


def _choice(index, text, reason, asked, key) -> dict[str, Any]:
  choice = {'index': index, 'finish_reason': reason, 'logprobs': None}
  if not isinstance(asked, requests.Chat):
    return {**choice, 'text': text}
  return {**choice, key: {'role': 'assistant', 'content': text}}


async def _body(request: Request) -> bytes:
  """Returns the body of a request; refuses long ones and other content types.

  Insisting on JSON guards against cross-site requests: browsers send other
  content types without a CORS preflight.
  """
  kind = request.headers.get('content-type', '').partition(';')[0].strip()
  if kind.lower() != 'application/json':
    raise _Refused(f'Content-Type {kind!r}: expected application/json.', 415)
  data = bytearray()
  async for part in request.stream():
    data += part
    if len(data) > MAX_BYTES:
      raise _Refused(f'the request has more than {MAX_BYTES} bytes.', 413)
  return bytes(data)


async def _while_connected(request: Request, answer) -> Response:
  """Awaits a coroutine; cancels it if the client disconnects."""

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
  return {'error': {'message': message, 'type': kind}}


def app(
  engine: Engine, run: Any, *, name: str, queue: int = 64, hosts=LOOPBACK
) -> ASGIApp:
  """Returns the ASGI application.

  Only the server may use the engine from now on. `name` is the model's in the
  API, and `queue` the number of prompts that may wait for a slot. `hosts` are
  allowed values of the Host header, such as `*.example.com`, or `*` for any;
  the check prevents DNS rebinding.
  """
  server = _Server(engine, run, name, queue)

  def handle_refused(_, error):
    return JSONResponse(_error(error), error.status)

  application = Starlette(
    routes=[
      Route('/health', server.health),
      Route('/v1/models', server.models),
      Route('/v1/completions', server.completions, methods=['POST']),
      Route('/v1/chat/completions', server.chat, methods=['POST']),
    ],
    exception_handlers={
      _Refused: handle_refused,
      ClientDisconnect: lambda *_: Response(status_code=499),
    },
    lifespan=server.lifespan,
  )
  try:
    return TrustedHostMiddleware(application, hosts, www_redirect=False)
  except AssertionError as error:
    raise UserError(f'allowed_hosts={",".join(hosts)}: {error}') from error
