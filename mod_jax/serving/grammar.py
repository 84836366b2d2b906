"""Grammars: which tokens keep a text within a JSON schema.

llguidance (the extra `json`) computes a mask of these tokens, from the bytes
that each token stands for. A mask takes up to some milliseconds, and a
request's first mask longer, so threads compute masks while the device runs
steps. Steps leave out a request whose mask is not known yet.
"""

from collections.abc import Mapping
import concurrent.futures
import dataclasses
import functools
import json
import threading
from typing import Any

import numpy as np

from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import UserError

try:
  import llguidance
except ImportError:
  llguidance = None

_THREADS = 2
# The white space that JSON may have between its tokens: at most one line break,
# then at most 16 spaces. llguidance by default allows any number of both, and a
# small model may then write white space without end.
_OPTIONS = {'whitespace_pattern': r'\n? {0,16}'}
# Most states of a schema's lexer, of a kilobyte or two each.
_MOST_STATES = 20_000


@dataclasses.dataclass(frozen=True)
class Grammar:
  """A schema that is compiled for a vocabulary; see `Grammars.compile`."""

  matcher: Any  # At the beginning of a text; copied for each request.


class Constraint:
  """Computes masks of a request's next tokens, for the engine's thread only."""

  def __init__(self, grammar: Grammar, words: int, pool):
    self._matcher = grammar.matcher.deep_copy()
    self._words = words
    self._pool = pool
    self._next = pool.submit(self._mask)

  @property
  def known(self) -> bool:
    """Whether the next mask is known and has not been taken."""
    return self._next is not None and self._next.done()

  @property
  def awaited(self) -> concurrent.futures.Future | None:
    """The future of the next mask; None between `take` and `push`."""
    return self._next

  def take(self) -> np.ndarray | None:
    """Waits for the mask of the next token: a uint32 word for every 32 tokens.

    Returns None if the text is complete. Before the next `take`, `push` must
    get the token that was sampled.

    Raises:
      UserError: the schema takes too much computing.
    """
    future, self._next = self._next, None
    return future.result()

  def push(self, token: int) -> None:
    """Takes the token that was sampled; starts to compute the next mask."""
    self._next = self._pool.submit(self._mask, token)

  def _mask(self, token: int | None = None) -> np.ndarray | None:
    if token is not None:
      self._matcher.consume_token(token)
    mask = None
    if not self._matcher.is_stopped():
      data = self._matcher.compute_bitmask()
      mask = np.zeros(self._words, '<u4')
      found = np.frombuffer(data, '<u4')[: self._words]
      mask[: len(found)] = found
    if self._matcher.is_error():
      raise UserError(_too_much(self._matcher.get_error()))
    return mask


class Grammars:
  """Compiles schemas for a model's vocabulary, and starts their constraints.

  Threads may share one object.
  """

  def __init__(
    self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]
  ):
    """Creates the object; the first `compile` prepares the vocabulary.

    `vocab_size` is the number of the model's logits: masks have as many bits,
    rounded up to words of 32. `ends` are the model's end tokens; the first may
    follow a whole text, and the others are never allowed. Raises UserError if
    llguidance is not installed.
    """
    require_library()
    self._tokenizer, self._ends = tokenizer, ends
    self._words = -(-vocab_size // 32)
    self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, 'grammar')
    self._lock = threading.Lock()

  @functools.cached_property
  def _vocabulary(self):
    ends, surfaces = self._ends, list(self._tokenizer.surfaces)
    # llguidance marks special tokens by 0xFF, a byte that UTF-8 does not have.
    special = [i for i, text in enumerate(surfaces) if not text or i in ends]
    for i in special:
      surfaces[i] = b'\xff<%d>' % i
    if ends:
      end = ends[0]
    else:
      # llguidance needs an end token: add one whose id the model does not have.
      end = max(len(surfaces), 32 * self._words)
      surfaces += [b'\xff<%d>' % i for i in range(len(surfaces), end + 1)]
      special += range(len(self._tokenizer.surfaces), end + 1)
    vocabulary = _Vocabulary(surfaces, special, end)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))

  def compile(self, schema: Mapping[str, Any]) -> Grammar:
    """Compiles a JSON schema in up to seconds, or raises UserError."""
    with self._lock:
      vocabulary = self._vocabulary
    matcher = llguidance.LLMatcher(
      *(vocabulary, _source(schema)), log_level=0, limits=_limits()
    )
    if matcher.is_error():
      raise UserError(_refusal(matcher.get_error()))
    return Grammar(matcher)

  def start(self, grammar: Grammar) -> Constraint:
    """Returns a new request's constraint; a thread computes its first mask."""
    return Constraint(grammar, self._words, self._pool)


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
  """A vocabulary as llguidance reads it."""

  tokens: list[bytes]
  special_token_ids: list[int]
  eos_token_id: int
  bos_token_id: None = None

  def __call__(self, text) -> list[int]:
    return []  # Only needed to force tokens, which `_source` turns off.


def check(schema: Mapping[str, Any]) -> None:
  """Raises UserError if a schema is not supported, whatever the vocabulary."""
  require_library()
  message = llguidance.LLMatcher.validate_grammar(
    _source(schema), limits=_limits()
  )
  if message and not message.startswith('WARNING'):
    raise UserError(_refusal(message))


def _limits():
  return llguidance.LLParserLimits(max_lexer_states=_MOST_STATES)


def available() -> bool:
  """Whether llguidance is installed."""
  return llguidance is not None


def require_library() -> None:
  """Raises UserError if llguidance is not installed."""
  if not available():
    raise UserError("a schema needs llguidance: pip install 'mod_jax[json]'.")


def _source(schema) -> str:
  try:
    text = json.dumps({**schema, 'x-guidance': _OPTIONS})
  except (TypeError, ValueError, RecursionError) as error:
    raise UserError(_refusal(error)) from error
  # Where a schema leaves no choice of text, llguidance would force its own
  # choice of tokens. Without forcing, masks allow all tokens that spell the
  # text, and the model chooses those that it was trained with.
  return llguidance.LLMatcher.grammar_from_lark(
    f'%llguidance {{"no_forcing": true}}\nstart: %json {text}'
  )


def _refusal(why) -> str:
  # The first line has the reason; the next ones show the grammar.
  why = str(why).partition('\n')[0].rpartition('JSON schema: ')[2]
  return f'this JSON schema is not supported: {why:.300}'


def _too_much(why) -> str:
  why = str(why).partition('\n')[0]
  return f'the JSON schema takes too much computing; simplify it: {why:.300}'
