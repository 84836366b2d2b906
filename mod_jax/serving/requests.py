"""Schemas of the OpenAI API's requests, as far as the server supports them.

Fields without any effect here (`user`, `metadata`) accept any value. Fields of
unsupported features accept only the value that turns the feature off.
"""

import reprlib
import time
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from mod_jax.errors import UserError

MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 128


def _expected(what: str) -> pydantic.WrapValidator:
  """Replaces the errors of all alternatives of a union by one sentence."""

  def check(value, validate):
    try:
      return validate(value)
    except pydantic.ValidationError as error:
      raise PydanticCustomError('shape', f'expected {what}.') from error

  return pydantic.WrapValidator(check)


# `fail_fast`: a list of a million wrong values must not yield a million errors.
def _list(of, **limits):
  return Annotated[list[of], Field(fail_fast=True, **limits)]


_Tokens = _list(int)
_Prompts = Annotated[
  str
  | _Tokens
  | _list(str, max_length=MAX_PROMPTS)
  | _list(_Tokens, max_length=MAX_PROMPTS),
  Field(union_mode='left_to_right'),
  _expected(f'a text, tokens, or a list of {MAX_PROMPTS} of these at most'),
]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = Annotated[
  _Stop | _list(_Stop, max_length=MAX_STOPS),
  _expected(
    f'a text of 1 to {MAX_STOP_LENGTH} characters, or a list of {MAX_STOPS} of'
    ' these at most'
  ),
]
_Zero = Annotated[float, Field(ge=0, le=0)]


class _Fields(pydantic.BaseModel):
  """An object without unknown fields."""

  # Unknown fields are allowed at first, and `_knows_all` refuses the first one:
  # `forbid` would report an error for each of them.
  model_config = pydantic.ConfigDict(
    extra='allow', strict=True, allow_inf_nan=False
  )

  @pydantic.model_validator(mode='after')
  def _knows_all(self):
    for name, value in self.model_extra.items():
      raise PydanticCustomError(
        'unsupported',
        '{shown} is not supported: leave it out.',
        {'shown': _shown(name, value)},
      )
    return self


class _StreamOptions(_Fields):
  include_usage: bool | None = None


class _ResponseFormat(_Fields):
  type: Literal['text']


class _Request(_Fields):
  """Fields that completions and chats have in common."""

  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  seed: int | None = None
  stop: _Stops | None = None
  stream: bool | None = None
  stream_options: _StreamOptions | None = None

  model: Any = None
  user: Any = None
  metadata: Any = None
  store: Any = None

  n: Literal[1] | None = None
  presence_penalty: _Zero | None = None
  frequency_penalty: _Zero | None = None
  logit_bias: Annotated[dict, Field(max_length=0)] | None = None

  @property
  def usage_wanted(self) -> bool:
    return bool(self.stream_options and self.stream_options.include_usage)

  def settings(self) -> dict[str, Any]:
    """Returns keywords of `Engine.submit`."""
    seed = time.time_ns() % 2**32 if self.seed is None else self.seed
    return {
      'max_new_tokens': self.max_tokens,
      'temperature': 1.0 if self.temperature is None else self.temperature,
      'top_p': 1.0 if self.top_p is None else self.top_p,
      'seed': seed,
      'stop': self.stop or (),
    }


class Completion(_Request):
  """A request to /v1/completions."""

  prompt: _Prompts
  logprobs: Annotated[
    bool | Literal[0, 1] | None,
    _expected('1, since those of other tokens are not given'),
  ] = None

  best_of: Literal[1] | None = None
  echo: Literal[False] | None = None
  suffix: None = None

  @pydantic.model_validator(mode='after')
  def _has_its_logprobs(self):
    if self.logprobs and self.stream:
      raise PydanticCustomError(
        'logprobs', 'logprobs are given without stream only: leave one out.'
      )
    return self

  @property
  def prompts(self) -> list[str] | list[list[int]]:
    is_single = isinstance(self.prompt, str) or (
      self.prompt and isinstance(self.prompt[0], int)
    )
    return [self.prompt] if is_single else self.prompt

  def settings(self) -> dict[str, Any]:
    # OpenAI's default is 16 tokens.
    most = 16 if self.max_tokens is None else self.max_tokens
    return super().settings() | {'max_new_tokens': most}


class _Part(pydantic.BaseModel):
  type: Literal['text'] = 'text'
  text: str


def _joined(content):
  if isinstance(content, list):
    return ''.join(part.text for part in content)
  return content


class _Message(pydantic.BaseModel):
  """A message; unknown fields are passed on to the chat template."""

  model_config = pydantic.ConfigDict(extra='allow', strict=True)

  role: str
  content: Annotated[
    str | _list(_Part) | None,
    pydantic.AfterValidator(_joined),
    _expected('a text, or a list of parts; only texts are read'),
  ] = None


class Chat(_Request):
  """A request to /v1/chat/completions."""

  messages: _list(_Message)
  max_completion_tokens: int | None = None

  logprobs: Literal[False] | None = None
  top_logprobs: Literal[0] | None = None
  tools: _list(Any, max_length=0) | None = None
  response_format: _ResponseFormat | None = None

  def settings(self) -> dict[str, Any]:
    settings = super().settings()
    if self.max_completion_tokens is not None:
      settings['max_new_tokens'] = self.max_completion_tokens
    return settings


def parse[Body: _Request](kind: type[Body], data: bytes) -> Body:
  """Parses and validates the JSON body of a request."""
  try:
    return kind.model_validate_json(data)
  except pydantic.ValidationError as error:
    first = error.errors(include_url=False, include_context=False)[0]
  name = '.'.join(map(str, first['loc']))
  if name and first['type'] not in ('missing', 'unsupported'):
    name = _shown(name, first['input'])
  raise UserError(f'{name}: {first["msg"]}' if name else first['msg'])


def _shown(name, value) -> str:
  return f'{name:.40}={reprlib.repr(value)}'
