"""Batches of text for language models, from shards of tokens.

Everything here is NumPy; the training loop places batches on devices. A batch
is a dict of arrays:

  tokens    int32 [B, L]
  targets   int32 [B, L]    the token after each of `tokens`
  weights   float32 [B, L]  1 where the target counts, else 0
  segments  int32 [B, L]    only if `config.segments`: 1 for the first document
                            of a row, 2 for the next, ...; 0 is padding
  valid     bool [B, L]     only in held-out batches without segments: False is
                            padding

The tokens of all documents are one stream, cut into windows of L + 1 tokens at
stride L, so that each token is a target exactly once. With segments, a target
that begins another document has weight 0.

`open_stream` opens a prepared corpus, or the files that `split_files` lists for
a source. Sources of another kind are read by `prepare` alone.
"""

from collections.abc import Iterator
import dataclasses
import functools
import os
import pathlib
import platform
from typing import Annotated, Any, Literal

from absl import logging
import grain
import numpy as np

from mod_jax import config as config_lib
from mod_jax import errors, paths
from mod_jax.data import (
  batches,
  bpe,
  common,
  corpus,
  environment,
  prepared,
  shards,
  tokenizers,
)
from mod_jax.data import fingerprint as fingerprints

Batch = dict[str, np.ndarray]

_OWN_FILES = ('files', 'huggingface')  # Sources that read files by glob.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig:
  """Where text comes from and how it becomes rows of tokens.

  Attributes:
    source: 'stdlib' is the source code of the Python standard library on this
      machine. 'environment' adds the source code of the packages that the
      project pins, about six times as much text in all. 'files' are local text
      files. 'prepared' is a corpus tokenised by `mod_jax.data.prepare` from any
      other source. Two sources are read by `prepare` alone: 'tfds', a prepared
      TFDS data set, and 'huggingface', local Arrow or Parquet files of
      `datasets`, where each row is a document.
    path: directory of a prepared corpus.
    files: globs of training files, separated by commas; `**` crosses
      directories, and `{txt,md}` stands for either.
    eval_files: globs of held-out files; '' holds out whole files of `files`,
      chosen by a hash of their relative names, or documents of 'huggingface',
      chosen by a hash of their text.
    eval_fraction: fraction to hold out if a hash chooses.
    text_column: the column of 'huggingface' with the text.
    tfds_name: data set name, or the directory of a prepared one.
    tfds_split: split for training.
    tfds_eval_split: split for evaluation.
    tfds_dir: where TFDS keeps data; '' is the default of TFDS.
    tfds_text_key: the feature with the text.
    tokenizer: 'bytes' needs no file; 'bpe' is learned from the training files
      and cached; the others read `tokenizer_path`. Ignored for a prepared
      corpus, which has its own tokeniser.
    tokenizer_path: local tokeniser file, or the directory that holds it.
    tokenizer_vocab_size: number of ids of the tokeniser 'bpe': the 256 bytes,
      the end-of-text token, and at least one merge.
    length: tokens per row.
    segments: mark the documents of a row, so that attention can be kept within
      each document.
    cache_dir: directory for the tokens of files and for learned tokenisers; ''
      is ~/.cache/mod_jax.
    read_threads: threads that read ahead during training; 0 reads without
      threads.
    prefetch: batches kept ready.
    max_epochs: most epochs over the training text; runs that would take more
      are refused.
  """

  source: Literal[
    'stdlib', 'environment', 'files', 'tfds', 'prepared', 'huggingface'
  ] = 'stdlib'
  path: str = ''
  files: str = ''
  eval_files: str = ''
  eval_fraction: config_lib.Proper = 0.05
  text_column: str = 'text'
  tfds_name: str = 'lm1b'
  tfds_split: str = 'train'
  tfds_eval_split: str = 'test'
  tfds_dir: str = ''
  tfds_text_key: str = 'text'
  tokenizer: Literal['bytes', 'bpe', 'sentencepiece', 'huggingface'] = 'bytes'
  tokenizer_path: str = ''
  tokenizer_vocab_size: Annotated[int, config_lib.Range(ge=258, le=2**20)] = (
    2048
  )
  length: Annotated[int, config_lib.Range(ge=2, le=2**27)] = 256
  segments: bool = False
  cache_dir: str = ''
  read_threads: config_lib.Workers = 1
  prefetch: Annotated[int, config_lib.Range(ge=1, le=10**5)] = 8
  max_epochs: config_lib.Positive = 1.0

  def __post_init__(self):
    check = config_lib.validate(self)
    paths.require_local(self.cache_dir, 'cache_dir')
    paths.require_local(self.path, 'path')
    check(
      self.prefetch >= self.read_threads,
      'prefetch >= read_threads',
      *('prefetch', 'read_threads'),
    )
    check(
      self.source not in _OWN_FILES or self.files.strip(' ,'),
      "files, a glob such as 'text/**/*.txt'",
      *('source', 'files'),
    )
    common.check_source(
      self,
      needed={
        'tfds': ['tfds_name', 'tfds_split', 'tfds_eval_split'],
        'prepared': ['path'],
        'huggingface': ['text_column'],
      },
      own={
        'files': _OWN_FILES,
        'eval_files': _OWN_FILES,
        'path': ['prepared'],
      },
    )
    has_own = self.source == 'prepared'
    reads_file = self.tokenizer in ('sentencepiece', 'huggingface')
    check(
      not self.tokenizer_path or (reads_file and not has_own),
      "tokenizer='sentencepiece' or 'huggingface', and no prepared corpus,"
      ' which has its own; or drop tokenizer_path',
      *('tokenizer_path', 'tokenizer', 'source'),
    )
    check(
      self.tokenizer_path or not reads_file or has_own,
      'the path of a local file',
      *('tokenizer_path', 'tokenizer'),
    )
    check(
      self.tokenizer != 'bpe' or self.source not in ('tfds', 'huggingface'),
      'a tokenizer file, as subwords are learned from files of text alone',
      *('tokenizer', 'source'),
    )

  @property
  def learns_tokenizer(self) -> bool:
    """Whether the tokenizer is learned from the training files."""
    return self.tokenizer == 'bpe' and self.source != 'prepared'


def make_tokenizer(config: TextDataConfig) -> tokenizers.Tokenizer:
  """Returns the config's tokeniser; learns a 'bpe' that is not cached."""
  if config.source == 'prepared':
    return prepared.make_tokenizer(config.path)
  return tokenizers.make(*tokenizer_source(config))


def tokenizer_source(config: TextDataConfig) -> tuple[str, str]:
  """Returns a tokenizer's kind and path for `tokenizers.make`; may learn it."""
  if config.source == 'prepared':
    return prepared.tokenizer_kind(config.path), config.path
  if config.learns_tokenizer:
    return 'huggingface', str(learn_tokenizer(config))
  return config.tokenizer, config.tokenizer_path


def learn_tokenizer(config: TextDataConfig) -> pathlib.Path:
  """Returns the file of the tokenizer 'bpe'; learns it if it is not cached."""
  train, _ = split_files(config)
  return bpe.open_tokenizer(
    train, config.tokenizer_vocab_size, _cache_dir(config)
  )


def fingerprint(config: TextDataConfig) -> dict[str, Any]:
  """Returns the fingerprint of data and tokeniser (`data/fingerprint.py`)."""
  result = {
    'source': config.source,
    'tokenizer': fingerprints.of_value(make_tokenizer(config).fingerprint),
  }
  if config.source == 'prepared':
    return result | {
      group: prepared.fingerprint(config.path, group)
      for group in prepared.GROUPS
    }
  if config.source == 'stdlib':
    result['python'] = platform.python_version()
  if config.source == 'environment':
    result['versions'] = environment.versions()
  train, held_out = split_files(config)
  for group, files in (('train', train), ('held_out', held_out)):
    result[group] = fingerprints.of_files([(f.name, f.path) for f in files])
  return result


def train_iterator(
  config: TextDataConfig,
  *,
  batch_size: int,
  seed: int,
  shard_index: int = 0,
  shard_count: int = 1,
  num_batches: int | None = None,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this shard's training batches.

  The order depends only on the data, the seed and the position. A global batch
  is the same for any number of shards: it is split evenly, and the first shard
  gets the first rows. Rows are reshuffled in every epoch, and each is seen once
  per epoch.

  `num_batches` is how many global batches the run will take: more than
  `config.max_epochs` allows are refused, more than one epoch logs a warning.
  `get_state()` is a small JSON-ready dict that is the same on all shards and
  for any number of shards; after `set_state()` the iterator continues with the
  next batch.
  """
  rows_needed = batch_size * shard_count
  stream = open_stream(
    config, 'train', shard_index=shard_index, shard_count=shard_count
  )
  windows = Windows(stream, config.length, segments=config.segments)
  if len(windows) < rows_needed:
    raise errors.UserError(
      f'the training text holds {len(stream)} tokens, {len(windows)} rows of '
      f'length={config.length}, fewer than the {rows_needed} of one batch '
      f'({batch_size} rows on each of {shard_count} shards): add text or lower '
      'length or the batch size'
    )
  if len(windows) > 2**32:
    raise errors.UserError(
      f'the training text holds {len(windows)} rows of length='
      f'{config.length}, more than the 2**32 that can be shuffled: raise length'
    )
  if num_batches is not None:
    available = len(windows) * config.length
    _check_epochs(config, available, num_batches, rows_needed)
  # Shards are cut from this endless sequence and not from an epoch: shards of
  # unequal size would drift apart, and a global batch would mix epochs.
  dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
  # Take every `shard_count`-th local batch, so that a shard reads only its own
  # rows.
  dataset = dataset.batch(batch_size, drop_remainder=True)
  dataset = dataset[shard_index::shard_count]
  options = grain.ReadOptions(
    num_threads=config.read_threads, prefetch_buffer_size=config.prefetch
  )
  return iter(dataset.to_iter_dataset(options))


def eval_batches(
  config: TextDataConfig,
  *,
  shard_index: int = 0,
  shard_count: int = 1,
  **kwargs,
) -> Iterator[Batch]:
  """Returns held-out batches; keywords are those of `batches.held_out`.

  Every held-out target is in exactly one row.
  """
  stream = open_stream(
    config, 'held_out', shard_index=shard_index, shard_count=shard_count
  )
  windows = Windows(
    stream, config.length, segments=config.segments, partial=True
  )
  if not len(windows):
    raise errors.UserError(
      f'the held-out text holds {len(stream)} tokens, too few for one target: '
      'hold out more by eval_files or eval_fraction'
    )
  return batches.held_out(
    *(functools.partial(_eval_row, windows), len(windows), 0),
    shard_index=shard_index,
    shard_count=shard_count,
    **kwargs,
  )


def num_train_tokens(config: TextDataConfig) -> int:
  """Returns the number of training targets per epoch: tokens in full rows."""
  stream = open_stream(config, 'train')
  return len(Windows(stream, config.length)) * config.length


def _check_epochs(
  config: TextDataConfig, there: int, num_batches: int, rows: int
):
  """Checks how many epochs over `there` tokens the batches take.

  Raises UserError if these are more than `max_epochs`; warns if more than one.
  """
  needed = num_batches * rows * config.length
  epochs = needed / max(1, there)
  usage = (
    f'{num_batches:,} steps of {rows} rows of length={config.length} take '
    f'{needed:,} tokens, and the training text has {there:,}'
  )
  if epochs > config.max_epochs:
    limit = int(config.max_epochs * there / (rows * config.length))
    raise errors.UserError(
      f'{usage}, which would be seen {epochs:.3g} times, more than max_epochs='
      f'{config.max_epochs:g}: add text, take at most {limit:,} steps, or '
      'raise max_epochs'
    )
  if epochs > 1:
    logging.warning('%s: it is seen %.3g times.', usage, epochs)


def _only_prepared(config: TextDataConfig) -> errors.UserError:
  return errors.UserError(
    f'source={config.source!r} is not read in training: make a corpus of it by '
    "`python -m mod_jax.data.prepare`, and read that by source='prepared'"
  )


def split_files(
  config: TextDataConfig,
) -> tuple[list[corpus.TextFile], list[corpus.TextFile]]:
  """Returns the (training, held-out) files; no content is in both.

  No file is held out if 'huggingface' holds out documents instead.
  """
  if config.source == 'tfds':
    raise _only_prepared(config)
  if config.source == 'environment':  # Copies are left out of its list.
    return corpus.hold_out(environment.list_files(), config.eval_fraction)
  if config.source == 'stdlib':
    train, held_out = corpus.hold_out(
      corpus.list_stdlib(), config.eval_fraction
    )
  elif config.eval_files:
    train = corpus.list_files(config.files)
    held_out = corpus.list_files(config.eval_files, 'eval_files')
  elif config.source == 'huggingface':  # Documents are held out, not files.
    return corpus.list_files(config.files), []
  else:
    train, held_out = corpus.hold_out(
      corpus.list_files(config.files), config.eval_fraction
    )
  distinct = corpus.without_copies(train, held_out)
  if not distinct:
    raise errors.UserError(
      f'all {len(train)} training files are also held out (same file or same '
      'content): give eval_files other than files'
    )
  return distinct, held_out


class Windows:
  """Rows cut from a token stream: row i has targets [i*L + 1, i*L + L + 1).

  A random-access source for Grain; rows are read on access.
  """

  def __init__(
    self,
    stream: shards.Tokens,
    length: int,
    *,
    segments: bool = False,
    partial: bool = False,
  ):
    """Takes tokens and L; reads nothing.

    If `partial`, the targets after the last full row form a padded row;
    otherwise they are left out.
    """
    self._stream = stream
    self._length = length
    self._segments = segments
    targets = max(0, len(stream) - 1)
    self._rows = -(-targets // length) if partial else targets // length

  def __len__(self) -> int:
    return self._rows

  def empty_row(self) -> dict[str, np.ndarray]:
    """Returns a row of padding, as `windows[i]` returns a row: arrays [L]."""
    dtypes = {'tokens': np.int32, 'targets': np.int32, 'weights': np.float32}
    if self._segments:
      dtypes['segments'] = np.int32
    return {key: np.zeros(self._length, dtype) for key, dtype in dtypes.items()}

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    if not 0 <= index < self._rows:
      raise IndexError(index)
    start = index * self._length
    stop = min(start + self._length + 1, len(self._stream))
    chunk = self._stream.read(start, stop)
    n = len(chunk) - 1
    row = self.empty_row()
    row['tokens'][:n] = chunk[:-1]
    row['targets'][:n] = chunk[1:]
    row['weights'][:n] = 1
    if self._segments:
      starts = self._stream.starts
      first, last = np.searchsorted(starts, [start, stop - 1], side='right')
      document = np.searchsorted(
        starts[first:last], np.arange(start, stop), side='right'
      )
      row['segments'][:n] = document[:-1] + 1
      row['weights'][:n] = document[:-1] == document[1:]
    return row


def open_stream(
  config: TextDataConfig,
  group: Literal['train', 'held_out'],
  *,
  shard_index: int = 0,
  shard_count: int = 1,
) -> shards.Tokens:
  """Returns the tokens of a group; tokenises the files if they are not cached.

  Each of `shard_count` hosts verifies its part of prepared files.
  """
  if config.source == 'huggingface':
    raise _only_prepared(config)
  if config.source == 'prepared':
    return prepared.open_stream(
      config.path, group, shard_index=shard_index, shard_count=shard_count
    )
  train, held_out = split_files(config)
  files = train if group == 'train' else held_out
  if not files:
    raise errors.UserError(
      'no file is held out, because only one matches and it is trained on: set '
      'eval_files, or give more files'
    )
  return shards.open_cache(files, make_tokenizer(config), _cache_dir(config))


def _cache_dir(config: TextDataConfig) -> str:
  return os.path.expanduser(
    config.cache_dir or os.path.join('~', '.cache', 'mod_jax')
  )


def _eval_row(windows: Windows, index: np.integer) -> Batch:
  real = index != batches.PADDING
  row = windows[int(index)] if real else windows.empty_row()
  if 'segments' not in row:  # Without segments, only padding has weight 0.
    row['valid'] = row['weights'] > 0
  return row
