"""A corpus that was tokenised once, by `prepare`, as runs read it.

A directory with these files, each written whole or not at all:

  index.json              what it was made of; last, the tokens of each side
  tokenizer.json          (or .model) the tokenizer, unless tokens are bytes
  train-00000.tokens …    shards: token caches of whole documents, see `corpus`
  held_out-00000.tokens …

The stream of a side is its shards, one after another, so that no batch depends
on how the corpus was cut into them.
"""

from collections.abc import Iterable
import json
import os
import pathlib
from typing import Any

from mod_jax import errors
from mod_jax import paths
from mod_jax.data import corpus
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data import tokenizers

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


def open_stream(path: str, group: str) -> corpus.ShardStream:
  """Returns the tokens of a side, which is checked as by `fingerprint`.

  Raises:
    errors.UserError: as `fingerprint`, or the side is empty.
  """
  shards = _complete_index(path)[group]['shards']
  if not shards:
    raise errors.UserError(
      f'path={path!r} has nothing held out: prepare it with eval_files'
    )
  fingerprint(path, group)
  folder = os.path.expanduser(path)
  return corpus.ShardStream(
    [(os.path.join(folder, n), s['tokens']) for n, s in shards.items()]
  )
