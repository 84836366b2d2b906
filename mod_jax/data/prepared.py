"""Reads a corpus that `prepare` tokenised.

The corpus is a directory with these files, each written atomically:

  index.json              settings and data of the corpus; once it is complete,
                          also the tokens of each group ('train', 'held_out')
                          and the SHA-256 of each shard
  tokenizer.json          (or .model) the tokenizer, unless tokens are bytes
  train-00000.npy …       shards of whole documents, see `shards`
  held_out-00000.npy …

The stream of a group is the concatenation of its shards, so that batches do not
depend on how the corpus was cut into shards.
"""

from collections.abc import Iterable
import contextlib
import functools
import json
import os
import pathlib
import threading
from typing import Any

from mod_jax import errors, paths
from mod_jax.data import corpus, shards, tokenizers
from mod_jax.data import fingerprint as fingerprints

GROUPS = ('train', 'held_out')
_INDEX = 'index.json'
_FORMAT = 2  # Format 1 had shards that only this library could read.


def shard_path(path: str, group: str, number: int) -> str:
  """Returns the path of a shard of the corpus at `path`."""
  return os.path.join(path, f'{group}-{number:05}.npy')


def write_index(path: str, index: dict[str, Any]) -> None:
  """Writes the index of a complete or incomplete corpus."""
  text = json.dumps({'format': _FORMAT} | index, indent=2)
  paths.write_bytes(pathlib.Path(path) / _INDEX, f'{text}\n'.encode())


def read_index(path: str) -> dict[str, Any] | None:
  """Returns the index of a complete or incomplete corpus; None if absent."""
  file = pathlib.Path(path).expanduser() / _INDEX
  try:
    index = json.loads(file.read_bytes())
  except FileNotFoundError:
    return None
  except OSError as e:
    raise errors.UserError(
      f'{str(file)!r} cannot be read: {e.strerror}; check its permissions'
    ) from e
  except (ValueError, RecursionError):
    index = None
  if not isinstance(index, dict) or index.get('format') != _FORMAT:
    raise errors.UserError(
      f'{str(file)!r} is no index of a prepared corpus that this version can '
      'read: prepare it again, by the same command with another --out'
    )
  return index


def _complete_index(path: str) -> dict[str, Any]:
  index = read_index(path)
  if index is None:
    raise errors.UserError(
      f'path={path!r} holds no prepared corpus ({_INDEX} is missing): name the '
      'directory of one, which `python -m mod_jax.data.prepare` makes'
    )
  if 'train' not in index:
    raise errors.UserError(
      f'path={path!r} holds a corpus that is not finished: give the command '
      'that prepares it again, which goes on'
    )
  return index


def tokenizer_kind(path: str) -> str:
  """Returns the kind of tokenizer that a corpus was made with."""
  return _complete_index(path)['tokenizer']['kind']


def make_tokenizer(path: str) -> tokenizers.Tokenizer:
  """Returns the tokenizer that a corpus was made with; refuses another one."""
  saved = _complete_index(path)['tokenizer']
  tokenizer = tokenizers.make(saved['kind'], os.path.expanduser(path))
  if tokenizer.fingerprint != saved['fingerprint']:
    raise errors.UserError(
      f'the tokenizer in path={path!r} is not the one that the corpus was '
      'prepared with: restore it, or prepare the corpus again'
    )
  return tokenizer


def of_shards(path: str, names: Iterable[str]) -> dict[str, Any]:
  """Returns the fingerprint of shards: sizes and hashed samples, by name."""
  folder = os.path.expanduser(path)
  return fingerprints.of_files([(n, os.path.join(folder, n)) for n in names])


def fingerprint(path: str, group: str) -> dict[str, Any]:
  """Returns a group's fingerprint; UserError if the index has another."""
  side = _complete_index(path)[group]
  current = of_shards(path, side['shards'])
  changes = fingerprints.differences({group: side['files']}, {group: current})
  if changes:
    raise errors.UserError(
      f'path={path!r} is not as it was prepared ({"; ".join(changes)}): '
      'restore it from a copy, or prepare it again'
    )
  return current


def texts(path: str, group: str, known: dict[str, Any]) -> dict[str, Any]:
  """Returns the fingerprint of the files that a group's shards were made of.

  Returns `known`, the fingerprint of the shards themselves, if the corpus at
  `path` has others by now, or is of a source that only `prepare` reads.
  """
  with contextlib.suppress(errors.UserError):
    index = _complete_index(path)
    made_of = index['made_of']
    source = made_of['settings']['config.source']
    whole = source not in ('tfds', 'huggingface')
    if whole and index[group]['files'] == known:
      return made_of['data'][group]
  return known


def check(path: str, group: str) -> None:
  """Raises errors.UserError unless a group's shards match their hashes."""
  fingerprint(path, group)
  verification = _WholeCheck(_hashes(path, group))
  verification.run()
  verification.check()


def _hashes(path: str, group: str) -> tuple[tuple[str, str], ...]:
  """Returns (path, SHA-256 in the index) of each shard of a group."""
  folder = os.path.expanduser(path)
  return tuple(
    (os.path.join(folder, name), shard['sha256'])
    for name, shard in _complete_index(path)[group]['shards'].items()
  )


class _WholeCheck(threading.Thread):
  """A background thread that compares whole shards with their hashes."""

  def __init__(self, hashes: Iterable[tuple[str, str]]):
    super().__init__(daemon=True)
    self._hashes = hashes
    self._damage = ''  # The error message, once there is damage.

  def run(self):
    for path, digest in self._hashes:
      try:
        if corpus.whole_hash(path) == digest:
          continue
        reason = 'its SHA-256 is not the one in the index'
      except errors.UserError as e:
        reason = str(e)
      _begin_check.cache_clear()  # So that a restored corpus is checked anew.
      self._damage = (
        f'{path!r} is not as it was prepared ({reason}): restore it from a '
        'copy, or prepare the corpus again'
      )
      return

  def check(self) -> None:
    """Raises errors.UserError if there is damage so far."""
    if self._damage:
      raise errors.UserError(self._damage)


@functools.cache
def _begin_check(hashes: tuple[tuple[str, str], ...]) -> _WholeCheck:
  """Returns the thread that checks these shards; the first call starts it."""
  thread = _WholeCheck(hashes)
  thread.start()
  return thread


@functools.cache
def _vocab_size(path: str, fingerprint: str) -> int:
  del fingerprint  # Only a cache key: the size changes with the tokenizer.
  return make_tokenizer(path).vocab_size


def open_stream(
  path: str, group: str, *, shard_index: int = 0, shard_count: int = 1
) -> shards.Tokens:
  """Returns the tokens of a group, after comparing samples with the index.

  A background thread also compares whole shards with their hashes, once per
  process; each of `shard_count` hosts compares a part of the shards. After
  damage is found, reads raise errors.UserError.
  """
  index = _complete_index(path)
  counts = {n: s['tokens'] for n, s in index[group]['shards'].items()}
  if not counts:
    raise errors.UserError(
      f'path={path!r} has nothing held out: prepare it with eval_files'
    )
  fingerprint(path, group)
  verification = _begin_check(_hashes(path, group)[shard_index::shard_count])
  folder = os.path.expanduser(path)
  return shards.Tokens(
    {os.path.join(folder, name): count for name, count in counts.items()},
    _vocab_size(path, index['tokenizer']['fingerprint']),
    verification.check,
  )
