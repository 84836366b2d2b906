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
MAX_CHOICES = 128
MAX_BIASES = 1024


def _expected(what: str) -> pydantic.WrapValidator:
  """Returns a validator that replaces all errors of a union by one sentence."""

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


def _biases(value: dict) -> dict[int, float]:
  # Checked by hand: pydantic would report an error for each of a million
  # entries.
  if len(value) <= MAX_BIASES and all(
    # The limits exclude integers of more digits than Python parses and prints.
    token.isdecimal()
    and len(token) < 10
    and type(bias) in (int, float)
    and abs(bias) < 2**31
    for token, bias in value.items()
  ):
    return {int(token): bias for token, bias in value.items()}
  raise ValueError


_Biases = Annotated[
  dict,
  pydantic.AfterValidator(_biases),
  _expected(f'numbers by token, in quotes, for {MAX_BIASES} tokens at most'),
]


class _Fields(pydantic.BaseModel):
  """A JSON object, of which the first unknown field is reported as an error."""

  # Unknown fields are allowed at first, and `_knows_all` refuses the first one:
  # `forbid` would report an error for each of them.
  model_config = pydantic.ConfigDict(
    extra='allow', strict=True, allow_inf_nan=False
  )

  @pydantic.model_validator(mode='after')
  def _knows_all(self):
    for name, value in self.model_extra.items():
      # OpenAI's clients send null for None, which means the default.
      if value is not None:
        raise PydanticCustomError(
          'unsupported',
          '{shown} is not supported: leave it out.',
          {'shown': _shown(name, value)},
        )
    return self


class _StreamOptions(_Fields):
  include_usage: bool | None = None


class _JsonSchema(_Fields):
  name: str
  description: Any = None
  # Has no effect: texts always conform to the schema.
  strict: bool | None = None
  schema_: Annotated[dict[str, Any], Field(alias='schema')]


class _ResponseFormat(_Fields):
  type: Literal['text', 'json_object', 'json_schema']
  json_schema: _JsonSchema | None = None

  @pydantic.model_validator(mode='after')
  def _has_its_schema(self):
    if (self.type == 'json_schema') != (self.json_schema is not None):
      raise PydanticCustomError(
        'schema', 'json_schema belongs to the type json_schema, and only to it.'
      )
    return self


class _Request(_Fields):
  """Fields that completions and chats have in common."""

  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  frequency_penalty: float | None = None
  presence_penalty: float | None = None
  logit_bias: _Biases | None = None
  n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
  seed: int | None = None
  stop: _Stops | None = None
  stream: bool | None = None
  stream_options: _StreamOptions | None = None

  model: str | None = None
  user: Any = None
  metadata: Any = None
  store: Any = None

  @pydantic.model_validator(mode='after')
  def _streams_if_it_says_how(self):
    if self.stream_options is not None and not self.stream:
      raise PydanticCustomError(
        'stream', 'stream_options come with stream: set stream=true.'
      )
    return self

  @property
  def choices(self) -> int:
    """The number of continuations of each prompt."""
    return 1 if self.n is None else self.n

  @property
  def schema(self) -> dict[str, Any] | None:
    """The JSON schema that continuations conform to; None if there is none."""
    return None

  def settings(self) -> list[dict[str, Any]]:
    """Returns keywords of `Engine.submit` for each choice of a prompt.

    Choices differ in their seeds only; without a seed, the clock gives one. The
    keyword `schema` is not included.
    """
    seed = time.time_ns() % 2**32 if self.seed is None else self.seed
    shared = {
      'max_new_tokens': self._max_new_tokens,
      'temperature': 1.0 if self.temperature is None else self.temperature,
      'top_p': 1.0 if self.top_p is None else self.top_p,
      'top_k': self.top_k or 0,
      'min_p': self.min_p or 0.0,
      'frequency_penalty': self.frequency_penalty or 0.0,
      'presence_penalty': self.presence_penalty or 0.0,
      'logit_bias': self.logit_bias,
      'num_likeliest': self.num_likeliest,
      'stop': self.stop or (),
    }
    # Pass the first seed unchanged, so that the engine refuses an invalid one.
    seeds = [seed, *((seed + i) % 2**32 for i in range(1, self.choices))]
    return [{**shared, 'seed': seed} for seed in seeds]


class Completion(_Request):
  """A request to /v1/completions."""

  prompt: _Prompts
  logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

  best_of: Annotated[
    Literal[1] | None,
    _expected('1: ask for n choices, and rank them by their logprobs'),
  ] = None
  echo: Literal[False] | None = None
  suffix: None = None

  @property
  def wants_logprobs(self) -> bool:
    return self.logprobs is not None

  @property
  def num_likeliest(self) -> int:
    return self.logprobs or 0

  @property
  def _max_new_tokens(self) -> int:
    # OpenAI's default is 16 tokens.
    return 16 if self.max_tokens is None else self.max_tokens

  @property
  def prompts(self) -> list[str] | list[list[int]]:
    is_single = isinstance(self.prompt, str) or (
      self.prompt and isinstance(self.prompt[0], int)
    )
    return [self.prompt] if is_single else self.prompt


class _Text(pydantic.BaseModel):
  type: Literal['text'] = 'text'
  text: str


class _ImageUrl(pydantic.BaseModel):
  url: str
  detail: Any = None


class _Picture(pydantic.BaseModel):
  type: Literal['image_url']
  image_url: _ImageUrl


def _joined(content):
  """Returns a list of parts as one text, unless a part is a picture."""
  if isinstance(content, list) and all(isinstance(x, _Text) for x in content):
    return ''.join(part.text for part in content)
  return content


class _Message(pydantic.BaseModel):
  """A message; unknown fields are passed on to the chat template."""

  model_config = pydantic.ConfigDict(extra='allow', strict=True)

  role: str
  content: Annotated[
    str | _list(_Text | _Picture) | None,
    pydantic.AfterValidator(_joined),
    _expected(
      'a text, or a list of parts: of the type text, with a text, or image_url,'
      ' with a url'
    ),
  ] = None


class Chat(_Request):
  """A request to /v1/chat/completions."""

  messages: _list(_Message)
  max_completion_tokens: int | None = None

  logprobs: bool | None = None
  top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
  tools: _list(Any, max_length=0) | None = None
  response_format: _ResponseFormat | None = None

  @pydantic.model_validator(mode='after')
  def _has_its_logprobs(self):
    if self.top_logprobs and not self.logprobs:
      raise PydanticCustomError(
        'logprobs', 'top_logprobs come with logprobs: set logprobs=true.'
      )
    return self

  @property
  def wants_logprobs(self) -> bool:
    return bool(self.logprobs)

  @property
  def num_likeliest(self) -> int:
    return self.top_logprobs or 0

  @property
  def schema(self) -> dict[str, Any] | None:
    form = self.response_format
    if form is None or form.type == 'text':
      return None
    if form.type == 'json_object':
      return {'type': 'object'}
    return form.json_schema.schema_

  @property
  def _max_new_tokens(self) -> int | None:
    if self.max_completion_tokens is not None:
      return self.max_completion_tokens
    return self.max_tokens


def parse[Body: _Request](kind: type[Body], data: bytes) -> Body:
  """Parses the JSON body of a request; raises UserError if it is invalid."""
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
