"""A server of one language model, for clients of OpenAI's API.

A thin front of the `Engine`: it reads requests, hands them to the one thread
that runs the engine, and writes what comes out, all at once or as a stream.
What a client leaves is cancelled. `scripts/serve.py` starts it.
"""

import asyncio
from collections.abc import AsyncIterator
import contextlib
import dataclasses
import json
import pathlib
import queue
import threading
import time
from typing import Any

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route

from mod_jax.errors import UserError
from mod_jax.serving import chat
from mod_jax.serving.engine import Engine
from mod_jax.serving.engine import Event

# What a request may ask for that changes nothing here.
_IGNORED = {'model', 'user', 'metadata', 'store'}
_ASKED = {
  'max_tokens',
  'max_completion_tokens',
  'temperature',
  'top_p',
  'stop',
  'seed',
  'stream',
  'stream_options',
  'logprobs',
}
# And what must be as if it were not there.
_NEUTRAL = {
  'n': 1,
  'best_of': 1,
  'echo': False,
  'presence_penalty': 0,
  'frequency_penalty': 0,
  'logit_bias': {},
  'suffix': None,
  'tools': [],
  'response_format': {'type': 'text'},
  'top_logprobs': 0,
}
_MOST_BYTES = 2**22  # Of a request's body.
# Seconds between two looks at whether the client, or the engine, is there.
_PATIENCE = 0.5
_FAILED = 'the engine has failed; restart the server.'


class _Refused(Exception):
  """A request that is answered by an error, with its status."""

  def __init__(self, message: str, status: int = 400):
    super().__init__(message)
    self.status = status


class Worker:
  """The thread that runs the engine, and how other threads talk to it.

  Whatever touches the engine is put into the inbox and done by that thread.
  """

  def __init__(self, engine: Engine):
    self._engine = engine
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._listeners: dict[int, Any] = {}
    self._thread = threading.Thread(target=self._run, daemon=True)
    self.failed: BaseException | None = None

  def start(self) -> None:
    self._thread.start()

  def stop(self) -> None:
    self._inbox.put(None)
    self._thread.join()

  def submit(self, prompt, settings, put) -> None:
    """Has a request taken.

    Args:
      prompt: text or tokens.
      settings: keywords of `Engine.submit`.
      put: is called in the engine's thread: first with the request's number and
        how many tokens its prompt has, or the exception that refuses it, and
        then with each event.
    """

    def do():
      try:
        tokens = self._engine.encode(prompt)
        id = self._engine.submit(tokens, **settings)
      except Exception as error:  # Others' requests go on in any case.
        put(error)
        return
      self._listeners[id] = put
      put((id, len(tokens)))

    self._inbox.put(do)

  def cancel(self, id: int) -> None:
    self._inbox.put(lambda: self._engine.cancel(id))

  def _run(self):
    try:
      while True:
        # Waits only when there is nothing else to do.
        while self._engine.idle or not self._inbox.empty():
          do = self._inbox.get()
          if do is None:
            return
          do()
        for event in self._engine.advance():
          put = self._listeners[event.id]
          if event.reason is not None:
            del self._listeners[event.id]
          put(event)
    except BaseException as error:
      # Nobody may wait for a thread that is gone.
      self.failed = error
      for put in self._listeners.values():
        put(error)
      raise


@dataclasses.dataclass(frozen=True)
class _Server:
  worker: Worker
  engine: Engine
  name: str
  template: jinja2.Template | None

  # Requests.

  async def models(self, request: Request) -> JSONResponse:
    del request
    return JSONResponse(
      {
        'object': 'list',
        'data': [{'id': self.name, 'object': 'model', 'owned_by': 'mod_jax'}],
      }
    )

  async def completions(self, request: Request):
    body = await _body(request, {'prompt'})
    prompt = body.get('prompt')
    several = isinstance(prompt, list) and any(
      isinstance(part, str | list) for part in prompt
    )
    return await self._answer(
      request, body, prompt if several else [prompt], chat=False, default=16
    )

  async def chat(self, request: Request):
    body = await _body(request, {'messages'})
    if self.template is None:
      raise _Refused(
        'this model has no chat template: use /v1/completions with a prompt.'
      )
    messages = _plain(body.get('messages'))
    try:
      text = self.template.render(messages=messages, add_generation_prompt=True)
    except Exception as error:  # Whatever a template may raise.
      raise _Refused(f'messages do not fit the template: {error}') from error
    tokens = self.engine.tokenizer.encode_chat(text)
    return await self._answer(request, body, [tokens], chat=True, default=None)

  async def _answer(self, request, body, prompts, *, chat, default):
    settings = _settings(body, default)
    logprobs, streamed = body.get('logprobs'), body.get('stream')
    if logprobs and (chat or streamed or logprobs not in (1, True)):
      raise _Refused(
        f'logprobs={logprobs!r}: they are told of the tokens themselves, by'
        ' /v1/completions, without stream; give 1, or leave them out.'
      )
    options = body.get('stream_options') or {}
    if not isinstance(options, dict) or options.keys() - {'include_usage'}:
      raise _Refused(f'stream_options={options!r}: give include_usage only.')
    streams = [_Stream(self.worker) for _ in prompts]
    try:
      for stream, prompt in zip(streams, prompts, strict=True):
        if not isinstance(prompt, str | list):
          raise _Refused(
            f'prompt={prompt!r}: expected a text, tokens, or a list of these.'
          )
        await stream.begin(prompt, settings)
    except BaseException:
      for stream in streams:
        stream.leave()
      raise
    head = {
      'id': f'{"chatcmpl" if chat else "cmpl"}-{streams[0].id}',
      'object': 'chat.completion' if chat else 'text_completion',
      'created': int(time.time()),
      'model': self.name,
    }
    if streamed:
      if chat:
        head['object'] += '.chunk'
      usage = options.get('include_usage')
      return StreamingResponse(
        _chunks(head, streams, chat, usage), media_type='text/event-stream'
      )
    return await _whole(request, head, streams, chat, logprobs)


class _Stream:
  """The events of one request, in the loop that serves its client."""

  def __init__(self, worker: Worker):
    self._worker = worker
    self._queue: asyncio.Queue = asyncio.Queue()
    self.id: int | None = None
    self.prompt_tokens = self.new_tokens = 0
    self.ended = False

  async def begin(self, prompt, settings) -> None:
    loop = asyncio.get_running_loop()

    def put(x):
      loop.call_soon_threadsafe(self._queue.put_nowait, x)

    self._worker.submit(prompt, settings, put)
    found = None
    while found is None:
      # Of a thread that is gone there is no answer to wait for.
      if self._worker.failed is not None:
        raise _Refused(_FAILED, 500)
      found = await self._get(_PATIENCE)
    if isinstance(found, UserError):
      full = 'wait already' in str(found)
      raise _Refused(str(found), 429 if full else 400)
    if isinstance(found, BaseException):
      raise _Refused(f'the request cannot be taken: {found}', 500)
    self.id, self.prompt_tokens = found

  async def next(self, seconds: float | None = None) -> Event | None:
    """Returns the next event, or None if none comes in time."""
    event = await self._get(seconds)
    if isinstance(event, BaseException):
      self.ended = True
      raise _Refused(_FAILED, 500)
    if event is not None:
      self.new_tokens += event.token is not None
      self.ended = event.reason is not None
    return event

  async def _get(self, seconds):
    try:
      return await asyncio.wait_for(self._queue.get(), seconds)
    except TimeoutError:
      return None

  def leave(self) -> None:
    """Cancels what has not ended."""
    if self.id is not None and not self.ended:
      self._worker.cancel(self.id)


async def _whole(request, head, streams, chat, logprobs) -> JSONResponse:
  choices = []
  try:
    for i, stream in enumerate(streams):
      events = []
      while not stream.ended:
        event = await stream.next(_PATIENCE)
        if event is not None:
          events.append(event)
        elif await request.is_disconnected():
          return JSONResponse({}, 499)
      told = [event for event in events if event.token is not None]
      text = ''.join(event.text for event in events)
      choice = _choice(i, text, events[-1].reason, chat, whole=True)
      if logprobs:
        choice['logprobs'] = {
          'tokens': [event.token for event in told],
          'token_logprobs': [event.log_prob for event in told],
        }
      choices.append(choice)
  finally:
    for stream in streams:
      stream.leave()
  return JSONResponse({**head, 'choices': choices, 'usage': _usage(streams)})


def _usage(streams) -> dict[str, int]:
  prompt = sum(stream.prompt_tokens for stream in streams)
  new = sum(stream.new_tokens for stream in streams)
  return {
    'prompt_tokens': prompt,
    'completion_tokens': new,
    'total_tokens': prompt + new,
  }


async def _chunks(head, streams, chat, usage) -> AsyncIterator[str]:
  """Yields server-sent events; the client may leave between any two."""

  def sent(**fields):
    return f'data: {json.dumps({**head, **fields})}\n\n'

  try:
    for i, stream in enumerate(streams):
      while not stream.ended:
        event = await stream.next()
        if not event.text and event.reason is None:
          continue
        choice = _choice(i, event.text, event.reason, chat, whole=False)
        yield sent(choices=[choice])
    if usage:
      yield sent(choices=[], usage=_usage(streams))
    yield 'data: [DONE]\n\n'
  finally:
    for stream in streams:
      stream.leave()


def _choice(index, text, reason, chat, *, whole) -> dict[str, Any]:
  choice = {'index': index, 'finish_reason': reason, 'logprobs': None}
  if not chat:
    return {**choice, 'text': text}
  message = {'role': 'assistant', 'content': text}
  return {**choice, 'message' if whole else 'delta': message}


def _settings(body, default: int | None) -> dict[str, Any]:
  """Returns keywords of `Engine.submit`.

  Raises:
    _Refused: a value of another type.
  """

  def number(name, kind, usual):
    value = body.get(name)
    if value is None:
      return usual
    # JSON knows whole numbers that no float can hold.
    with contextlib.suppress(TypeError, OverflowError):
      if not isinstance(value, bool | str) and kind(value) == value:
        return kind(value)
    raise _Refused(f'{name}={value!r}: expected a number.')

  tokens = number('max_tokens', int, default)
  stop = body.get('stop') or ()
  return {
    'max_new_tokens': number('max_completion_tokens', int, tokens),
    'temperature': number('temperature', float, 1.0),
    'top_p': number('top_p', float, 1.0),
    'seed': number('seed', int, time.time_ns() % 2**32),
    'stop': stop,
  }


async def _body(request: Request, known: set[str]) -> dict[str, Any]:
  """Returns the fields of a request.

  Raises:
    _Refused: it is too long, no JSON, or asks for what there is not.
  """
  data = b''
  async for part in request.stream():
    data += part
    if len(data) > _MOST_BYTES:
      raise _Refused(f'the request has more than {_MOST_BYTES} bytes.', 413)
  try:
    body = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise _Refused(f'the request is no JSON: {error}') from error
  if not isinstance(body, dict):
    raise _Refused('the request is no JSON object.')
  for name, value in body.items():
    if name in known | _IGNORED | _ASKED:
      continue
    if name not in _NEUTRAL or value not in (None, _NEUTRAL[name]):
      raise _Refused(f'{name}={value!r} is not supported: leave it out.')
  return body


def _plain(messages) -> Any:
  """Returns messages whose parts, where there are several, are one text.

  Raises:
    _Refused: a part is no text.
  """
  found = []
  for message in messages if isinstance(messages, list) else [messages]:
    if not isinstance(message, dict):
      raise _Refused('messages: expected a list of objects.')
    parts = message.get('content')
    if isinstance(parts, list):
      try:
        text = ''.join(part['text'] for part in parts)
      except (TypeError, KeyError) as error:
        raise _Refused('messages: only texts are read.') from error
      message = {**message, 'content': text}
    found.append(message)
  return found


def app(engine: Engine, *, name: str, tokenizer_folder=None) -> Starlette:
  """Returns the application, which any ASGI server runs.

  Args:
    engine: which from then on is the server's alone.
    name: of the model.
    tokenizer_folder: directory of its tokenizer, where a chat template may lie.
  """
  worker = Worker(engine)
  template = None
  if tokenizer_folder is not None:
    template = chat.read_template(pathlib.Path(tokenizer_folder))
  server = _Server(worker, engine, name, template)

  @contextlib.asynccontextmanager
  async def lifespan(_):
    worker.start()
    yield
    worker.stop()

  def refused(request, error):
    del request
    kind = 'invalid_request_error' if error.status < 500 else 'server_error'
    return JSONResponse(
      {'error': {'message': str(error), 'type': kind}}, error.status
    )

  return Starlette(
    routes=[
      Route('/v1/models', server.models),
      Route('/v1/completions', server.completions, methods=['POST']),
      Route('/v1/chat/completions', server.chat, methods=['POST']),
    ],
    exception_handlers={_Refused: refused},
    lifespan=lifespan,
  )
