"""A corpus that was tokenised once, by `prepare`, as runs read it.

A directory with these files, each written whole or not at all:

  index.json              what it was made of; last, the tokens of each side,
                          and the SHA-256 of each shard
  tokenizer.json          (or .model) the tokenizer, unless tokens are bytes
  train-00000.tokens …    shards: token caches of whole documents, see `corpus`
  held_out-00000.tokens …

The stream of a side is its shards, one after another, so that no batch depends
on how the corpus was cut into them.
"""

from collections.abc import Iterable
import functools
import hashlib
import json
import os
import pathlib
import threading
from typing import Any

from mod_jax import errors, paths
from mod_jax.data import corpus, tokenizers
from mod_jax.data import fingerprint as fingerprints

GROUPS = ('train', 'held_out')
_INDEX = 'index.json'
_FORMAT = 1


def shard_path(path: str, group: str, number: int) -> str:
  """Returns where a shard stands in the corpus at `path`."""
  return os.path.join(path, f'{group}-{number:05}.tokens')


def write_index(path: str, index: dict[str, Any]) -> None:
  """Writes the index of a corpus, complete or begun."""
  text = json.dumps({'format': _FORMAT} | index, indent=2)
  paths.write_bytes(pathlib.Path(path) / _INDEX, f'{text}\n'.encode())


def read_index(path: str) -> dict[str, Any] | None:
  """Returns the index of a corpus, complete or begun, or None without one.

  Raises:
    errors.UserError: it cannot be read.
  """
  file = pathlib.Path(path).expanduser() / _INDEX
  try:
    index = json.loads(file.read_bytes())
  except FileNotFoundError:
    return None
  except OSError as e:
    raise errors.UserError(
      f'{str(file)!r} cannot be read: {e.strerror}; check its permissions'
    ) from e
  except ValueError:
    index = None
  if not isinstance(index, dict) or index.get('format') != _FORMAT:
    raise errors.UserError(
      f'{str(file)!r} is no index of a prepared corpus that this version can '
      'read: prepare it again, in another directory'
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
  """Returns the kind of tokenizer that a corpus was made with.

  Raises:
    errors.UserError: there is no corpus.
  """
  return _complete_index(path)['tokenizer']['kind']


def make_tokenizer(path: str) -> tokenizers.Tokenizer:
  """Returns the tokenizer that a corpus was made with.

  Raises:
    errors.UserError: there is no corpus, or its tokenizer is another now.
  """
  saved = _complete_index(path)['tokenizer']
  folder = os.path.expanduser(path)
  found = tokenizers.make(saved['kind'], folder)
  if found.fingerprint != saved['fingerprint']:
    raise errors.UserError(
      f'the tokenizer in path={path!r} is not the one that the corpus was '
      'prepared with: restore it, or prepare the corpus again'
    )
  return found


def of_shards(path: str, shards: Iterable[str]) -> dict[str, Any]:
  """Returns the fingerprint of shards, by name: their sizes, and samples."""
  folder = os.path.expanduser(path)
  return fingerprints.of_files(
    [(name, os.path.join(folder, name)) for name in shards]
  )


def fingerprint(path: str, group: str) -> dict[str, Any]:
  """Returns what identifies a side, and checks that it is as it was made.

  At most 64 MiB are read.

  Raises:
    errors.UserError: there is no complete corpus, or a shard of it is missing,
      shorter, or another.
  """
  side = _complete_index(path)[group]
  found = of_shards(path, side['shards'])
  said = fingerprints.differences({group: side['files']}, {group: found})
  if said:
    raise errors.UserError(
      f'path={path!r} is not as it was prepared ({"; ".join(said)}): restore '
      'it from a copy, or prepare it again'
    )
  return found


def whole_hash(path: str) -> str:
  """Returns the SHA-256 of a file.

  Raises:
    OSError: it cannot be read.
  """
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def check(path: str, group: str) -> None:
  """Reads all of a side, and checks that it is as it was made.

  Raises:
    errors.UserError: as `fingerprint`, or a shard is damaged.
  """
  fingerprint(path, group)
  whole = _WholeCheck(_hashes(path, group))
  whole.run()
  whole.check()


def _hashes(path: str, group: str) -> tuple[tuple[str, str], ...]:
  """Returns the path and the hash of each shard; older corpora have none."""
  folder = os.path.expanduser(path)
  shards = _complete_index(path)[group]['shards']
  return tuple(
    (os.path.join(folder, name), shard['sha256'])
    for name, shard in shards.items()
    if 'sha256' in shard
  )


class _WholeCheck(threading.Thread):
  """Compares whole shards with their hashes, beside what goes on meanwhile."""

  def __init__(self, hashes: Iterable[tuple[str, str]]):
    super().__init__(daemon=True)
    self._hashes = hashes
    self._damage = ''  # A sentence, as soon as it is seen.

  def run(self):
    for path, digest in self._hashes:
      try:
        if whole_hash(path) == digest:
          continue
        said = 'its SHA-256 is not the one in the index'
      except OSError as e:
        said = str(e.strerror)
      self._damage = (
        f'{path!r} is not as it was prepared ({said}): restore it from a copy, '
        'or prepare the corpus again'
      )
      return

  def check(self) -> None:
    """Raises errors.UserError if damage was seen so far."""
    if self._damage:
      raise errors.UserError(self._damage)


@functools.cache
def _begin_check(hashes: tuple[tuple[str, str], ...]) -> _WholeCheck:
  """Begins to check shards, once in each process."""
  begun = _WholeCheck(hashes)
  begun.start()
  return begun


@functools.cache
def _vocab_size(path: str, fingerprint: str) -> int:
  del fingerprint  # Of the tokenizer: another one has another size.
  return make_tokenizer(path).vocab_size


def open_stream(
  path: str, group: str, *, shard_index: int = 0, shard_count: int = 1
) -> corpus.ShardStream:
  """Returns the tokens of a side, which is checked as by `fingerprint`.

  Its shards are also read as a whole, once in each process, in a thread of its
  own, a part by each of the hosts: where one turns out to be damaged, the next
  read raises errors.UserError.

  Args:
    path: directory of the corpus.
    group: the side.
    shard_index: of the host among those that read it together.
    shard_count: how many they are.

  Raises:
    errors.UserError: as `fingerprint`, or the side is empty.
  """
  index = _complete_index(path)
  shards = index[group]['shards']
  if not shards:
    raise errors.UserError(
      f'path={path!r} has nothing held out: prepare it with eval_files'
    )
  fingerprint(path, group)
  begun = _begin_check(_hashes(path, group)[shard_index::shard_count])
  folder = os.path.expanduser(path)
  return corpus.ShardStream(
    [(os.path.join(folder, n), s['tokens']) for n, s in shards.items()],
    _vocab_size(path, index['tokenizer']['fingerprint']),
    begun.check,
  )
