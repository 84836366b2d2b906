"""Batches of text for language models: files, prepared tokens, or TFDS.

Everything here is NumPy; the training loop places batches on devices. A batch
is a dict of arrays:

  tokens    int32 [B, L]
  targets   int32 [B, L]    the token after each of `tokens`
  weights   float32 [B, L]  1 where the target counts, else 0
  segments  int32 [B, L]    only if `config.segments`: 1 for the first document
                            of a row, 2 for the next, ...; 0 is padding
  valid     bool [B, L]     only in held-out batches without segments: False is
                            padding

Files and prepared corpora are one stream of tokens, cut into windows of L + 1
tokens at stride L, so that each token is a target exactly once. Documents of
TensorFlow Datasets are packed by Grain. With segments, a target that begins
another document has weight 0.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import itertools
import math
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
  bpe,
  common,
  corpus,
  environment,
  prepared,
  tfds_text,
  tokenizers,
)
from mod_jax.data import fingerprint as fingerprints

Batch = dict[str, np.ndarray]

# Rows that first-fit packing fills at the same time. More rows mean less
# padding but mix more documents; 64 leave about 1% padding for sentences in
# rows of 256.
_PACKING_BINS = 64
_OWN_FILES = ('files', 'huggingface')  # Sources that read files by glob.
# TFDS documents tokenised to estimate the size of a split.
_SAMPLED = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig:
  """Where text comes from and how it becomes rows of tokens.

  Attributes:
    source: 'stdlib' is the source code of the Python standard library on this
      machine. 'environment' adds the source code of the packages that the
      project pins, about six times as much text in all. 'files' are local text
      files. 'tfds' is a prepared TFDS data set. 'prepared' is a corpus
      tokenised by `mod_jax.data.prepare` from any other source. 'huggingface',
      which only `prepare` reads, are local Arrow or Parquet files of
      `datasets`, where each row is a document.
    path: directory of a prepared corpus.
    files: globs of training files, separated by commas; `**` crosses
      directories, and `{txt,md}` stands for either.
    eval_files: globs of held-out files; '' holds out whole files of `files`,
      chosen by a hash of their relative names, or documents of 'huggingface',
      chosen by a hash of their text.
    eval_fraction: fraction to hold out where a hash chooses.
    text_column: the column of 'huggingface' with the text.
    tfds_name: data set name, or the directory of a prepared one.
    tfds_split: split for training.
    tfds_eval_split: split for evaluation.
    tfds_dir: where TFDS keeps data; '' is its own default.
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
    read_threads: threads that read ahead (and tokenise TFDS documents) during
      training; 0 reads without threads.
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
    """Refuses settings that cannot work or would silently do nothing."""
    config_lib.validate(self)
    paths.require_local(self.cache_dir, 'cache_dir')
    paths.require_local(self.path, 'path')
    if self.source in _OWN_FILES and not self.files.strip(' ,'):
      raise errors.UserError(
        f'source={self.source!r} needs files, a glob such as '
        "files='text/**/*.txt'"
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
    if self.source == 'prepared' and self.tokenizer_path:
      raise errors.UserError(
        f"tokenizer_path={self.tokenizer_path!r} and source='prepared', which "
        'has the tokenizer that it was prepared with: drop tokenizer_path'
      )
    reads_file = self.tokenizer in ('sentencepiece', 'huggingface')
    if self.tokenizer_path and not reads_file:
      raise errors.UserError(
        f'tokenizer_path={self.tokenizer_path!r} is not read by tokenizer='
        f"{self.tokenizer!r}: set tokenizer='sentencepiece' or 'huggingface', "
        'or drop it'
      )
    if self.tokenizer == 'bpe' and self.source in ('tfds', 'huggingface'):
      raise errors.UserError(
        "tokenizer='bpe' is learned from files of text, and source="
        f'{self.source!r} has none: give a tokenizer file by tokenizer and '
        'tokenizer_path'
      )
    needs_path = reads_file and self.source != 'prepared'
    if needs_path and not self.tokenizer_path:
      raise errors.UserError(
        f'tokenizer={self.tokenizer!r} needs tokenizer_path, a local file'
      )
    if self.prefetch < self.read_threads:
      raise errors.UserError(
        f'prefetch={self.prefetch}: expected at least '
        f'read_threads={self.read_threads}'
      )

  @property
  def learns_tokenizer(self) -> bool:
    """Whether the tokenizer is learned from the training files."""
    return self.tokenizer == 'bpe' and self.source != 'prepared'


def make_tokenizer(config: TextDataConfig) -> tokenizers.Tokenizer:
  """Returns the tokeniser that the config names.

  Raises:
    errors.UserError: its file is missing or is not such a tokeniser; or there
      are no training files to learn one from.
  """
  if config.source == 'prepared':
    return prepared.make_tokenizer(config.path)
  return tokenizers.make(*tokenizer_source(config))


def tokenizer_source(config: TextDataConfig) -> tuple[str, str]:
  """Returns kind and path of a config's tokenizer, for `tokenizers.make`.

  Raises:
    errors.UserError: there are no training files to learn one from, or no
      prepared corpus.
  """
  if config.source == 'prepared':
    return prepared.tokenizer_kind(config.path), config.path
  if config.learns_tokenizer:
    return 'huggingface', str(learn_tokenizer(config))
  return config.tokenizer, config.tokenizer_path


def learn_tokenizer(config: TextDataConfig) -> pathlib.Path:
  """Returns the file of the tokenizer 'bpe', learning it if it is not cached.

  Raises:
    errors.UserError: the training files cannot be read, or are too few.
  """
  train, _ = split_files(config)
  return bpe.open_tokenizer(
    train, config.tokenizer_vocab_size, _cache_dir(config)
  )


def fingerprint(config: TextDataConfig) -> dict[str, Any]:
  """Returns a fingerprint of the data and the tokeniser.

  Raises:
    errors.UserError: the data cannot be read.
  """
  result = {
    'source': config.source,
    'tokenizer': fingerprints.of_value(make_tokenizer(config).fingerprint),
  }
  if config.source == 'tfds':
    splits = {'train': config.tfds_split, 'held_out': config.tfds_eval_split}
    return result | {
      group: tfds_text.fingerprint(
        config.tfds_name, split, data_dir=config.tfds_dir
      )
      for group, split in splits.items()
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
  gets the first rows. Rows from files are reshuffled in every epoch, and each
  is seen once per epoch. TFDS documents are shuffled the same way. Every shard
  then packs all documents, because where a row begins depends on all documents
  before it.

  Args:
    config: what to read.
    batch_size: rows per batch of one shard.
    seed: of the shuffle, in [0, 2**31).
    shard_index: which shard (host) this is.
    shard_count: number of shards.
    num_batches: global batches that the run will take, None if unknown. More
      than `config.max_epochs` allows are refused; more than one epoch logs a
      warning.

  Returns:
    A Grain iterator of batches, described at the top of this module.
    `get_state()` is a small JSON-ready dict that is the same on all shards and
    for any number of shards; after `set_state()` the iterator continues with
    the next batch.

  Raises:
    errors.UserError: the data cannot be read, is less than a global batch, or
      would be seen too often.
  """
  common.check_request(batch_size, shard_index, shard_count, seed=seed)
  rows_needed = batch_size * shard_count
  if config.source == 'tfds':
    documents, pack = _open_tfds(config, config.tfds_split)
    _check_enough(documents, config, rows_needed)
    if num_batches is not None:
      _check_epochs(config, _estimate(documents), num_batches, rows_needed)
    dataset = pack(_shuffled(documents, seed), seed=seed)
    dataset = dataset.batch(rows_needed, drop_remainder=True)
    start = batch_size * shard_index
    dataset = dataset.map(common.Rows(start, start + batch_size))
    if config.read_threads:
      dataset = grain.experimental.ThreadPrefetchIterDataset(
        dataset, prefetch_buffer_size=config.prefetch
      )
    return iter(dataset)

  stream = open_stream(
    config, 'train', shard_index=shard_index, shard_count=shard_count
  )
  windows = Windows(stream, config.length, segments=config.segments)
  if not len(windows):
    raise errors.UserError(
      f'the training text holds {len(stream)} tokens, too few for one row of '
      f'length + 1 = {config.length + 1}: add text or lower length'
    )
  if len(windows) < rows_needed:
    raise errors.UserError(
      f'the training text holds {len(windows)} rows of length={config.length}, '
      f'fewer than the {rows_needed} of one batch ({batch_size} rows on each '
      f'of {shard_count} shards): add text or lower length or the batch size'
    )
  if len(windows) > 2**32:
    raise errors.UserError(
      f'the training text holds {len(windows)} rows of length='
      f'{config.length}, more than the 2**32 that can be shuffled: raise length'
    )
  if num_batches is not None:
    available = len(windows) * config.length
    _check_epochs(config, available, num_batches, rows_needed)
  dataset = _shuffled(grain.MapDataset.source(windows), seed)
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
  batch_size: int,
  num_batches: int | None = None,
  shard_index: int = 0,
  shard_count: int = 1,
) -> Iterator[Batch]:
  """Returns this shard's held-out batches, always the same in the same order.

  All shards get the same number of batches; the last is padded with rows of
  weight 0. Without a limit, every held-out target counts exactly once over all
  batches of all shards.

  Args:
    config: what to read.
    batch_size: rows per batch of one shard.
    num_batches: most batches to return, their rows spread evenly over the
      held-out data; None for all.
    shard_index: which shard (host) this is.
    shard_count: number of shards.

  Returns:
    A finite iterator of batches, described at the top of this module.

  Raises:
    errors.UserError: nothing is held out, or it cannot be read.
  """
  common.check_request(
    batch_size, shard_index, shard_count, num_batches=num_batches
  )
  limit = num_batches and num_batches * batch_size * shard_count
  if config.source == 'tfds':
    documents, pack = _open_tfds(config, config.tfds_eval_split)
    if limit is not None:
      documents = grain.MapDataset.source(_Spread(documents))
    rows = iter(pack(documents))
    first = next(rows, None)
    if first is None:
      raise errors.UserError(
        f'split {config.tfds_eval_split!r} of tfds_name={config.tfds_name!r} '
        'holds no text: choose another tfds_eval_split'
      )
    rows = itertools.islice(itertools.chain([first], rows), limit)
    return _padded_batches(
      rows, lambda row: row, config, batch_size, shard_index, shard_count
    )

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
  count = len(windows) if limit is None else min(limit, len(windows))
  indices = (i * len(windows) // count for i in range(count))
  return _padded_batches(
    indices, windows.__getitem__, config, batch_size, shard_index, shard_count
  )


def num_train_tokens(config: TextDataConfig) -> int:
  """Returns the number of training targets per epoch: tokens in full rows.

  Files are tokenised for this unless their tokens are cached. For TFDS the
  number is estimated from 1,000 documents.

  Raises:
    errors.UserError: the data cannot be read.
  """
  if config.source == 'tfds':
    return _estimate(_open_tfds(config, config.tfds_split)[0])
  stream = open_stream(config, 'train')
  return len(Windows(stream, config.length)) * config.length


def _check_epochs(
  config: TextDataConfig, there: int, num_batches: int, rows: int
):
  """Raises if the batches need more than `config.max_epochs` of the data.

  Args:
    config: has the limit.
    there: training targets per epoch.
    num_batches: global batches that the run will take.
    rows: rows per global batch.
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


def split_files(
  config: TextDataConfig,
) -> tuple[list[corpus.TextFile], list[corpus.TextFile]]:
  """Returns the (training, held-out) files; no content is in both.

  Raises:
    errors.UserError: a glob matches nothing usable, nothing is left to train
      on, or the source has no files of text.
  """
  if config.source in ('tfds', 'prepared'):
    raise errors.UserError(f'source={config.source!r} has no files of text')
  if config.source == 'environment':  # Its listing has no copies.
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
    stream: corpus.TokenStream,
    length: int,
    *,
    segments: bool = False,
    partial: bool = False,
  ):
    """Initializes the windows; reads nothing.

    Args:
      stream: tokens and where documents start.
      length: L, tokens per row.
      segments: whether rows have `segments`, and weight 0 where a target
        begins another document.
      partial: whether the targets after the last full row (fewer than L) form
        a padded row; otherwise they are left out.
    """
    self._stream = stream
    self._length = length
    self._segments = segments
    targets = max(0, len(stream) - 1)
    self._rows = -(-targets // length) if partial else targets // length

  def __len__(self) -> int:
    """Returns the number of rows."""
    return self._rows

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    """Returns row `index`: a batch's arrays without the batch axis, [L]."""
    if not 0 <= index < self._rows:
      raise IndexError(index)
    start = index * self._length
    stop = min(start + self._length + 1, len(self._stream))
    chunk = self._stream.read(start, stop)
    n = len(chunk) - 1
    row = _empty_row(self._length, self._segments)
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


class _Spread:
  """Reorders a source so that any prefix is spread over the whole source.

  Steps by the golden ratio, so that each element falls into one of the largest
  gaps so far: an evaluation of a few batches samples the whole split.
  """

  def __init__(self, source: grain.MapDataset):
    self._source = source
    step = max(1, round(len(source) * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, len(source)) != 1:
      step += 1
    self._step = step

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Any:
    return self._source[index * self._step % len(self._source)]


def open_stream(
  config: TextDataConfig,
  group: Literal['train', 'held_out'],
  *,
  shard_index: int = 0,
  shard_count: int = 1,
) -> corpus.TokenStream:
  """Returns all tokens to train on, or those held out.

  Args:
    config: what to read.
    group: training or held-out tokens.
    shard_index: which host this is; each verifies its part of prepared files.
    shard_count: number of hosts.

  Raises:
    errors.UserError: the data cannot be read, nothing is held out, or the
      source has documents instead of a stream.
  """
  if config.source in ('tfds', 'huggingface'):
    raise errors.UserError(
      f'source={config.source!r} is no stream of tokens: make one by `python '
      "-m mod_jax.data.prepare`, and read it by source='prepared'"
    )
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
  if config.tokenizer == 'bytes':
    return corpus.ByteStream(files)
  return corpus.open_cache(files, make_tokenizer(config), _cache_dir(config))


def _cache_dir(config: TextDataConfig) -> str:
  return os.path.expanduser(
    config.cache_dir or os.path.join('~', '.cache', 'mod_jax')
  )


def _shuffled(dataset: grain.MapDataset, seed: int) -> grain.MapDataset:
  """Repeats a data set endlessly, reshuffled in every epoch.

  Shards are cut from this endless sequence and not from an epoch: shards of
  unequal size would drift apart, and a global batch would mix epochs.
  """
  return dataset.seed(seed).shuffle().repeat()


def _empty_row(length: int, segments: bool) -> dict[str, np.ndarray]:
  row = {
    'tokens': np.zeros(length, np.int32),
    'targets': np.zeros(length, np.int32),
    'weights': np.zeros(length, np.float32),
  }
  if segments:
    row['segments'] = np.zeros(length, np.int32)
  return row


def _padded_batches(
  items: Iterable[Any],
  load: Callable[[Any], dict[str, np.ndarray]],
  config: TextDataConfig,
  batch_size: int,
  shard_index: int,
  shard_count: int,
) -> Iterator[Batch]:
  """Yields a shard's batches of the rows `load(item)`.

  `items` must be the same on every shard, so that all yield the same number of
  batches: the other hosts would wait forever for one that has fewer.
  """
  items = iter(items)
  while group := list(itertools.islice(items, batch_size * shard_count)):
    start = batch_size * shard_index
    rows = [load(item) for item in group[start : start + batch_size]]
    empty = _empty_row(config.length, config.segments)
    rows += [empty] * (batch_size - len(rows))
    batch = {k: np.stack([row[k] for row in rows]) for k in empty}
    if not config.segments:  # Then only padding has weight 0.
      batch['valid'] = batch['weights'] > 0
    yield batch


# Documents of a data set.


def _open_tfds(config: TextDataConfig, split: str):
  """Returns a split as (tokens, targets) arrays and a function to pack them."""
  tokenizer = make_tokenizer(config)
  records = tfds_text.open_documents(
    config.tfds_name,
    split,
    data_dir=config.tfds_dir,
    text_key=config.tfds_text_key,
  )
  to_pair = _DocumentPair(tokenizer, config.tfds_text_key)
  documents = grain.MapDataset.source(records).map(to_pair)
  lengths = {'tokens': config.length, 'targets': config.length}

  def pack(dataset, *, seed: int | None = None) -> grain.IterDataset:
    # A single thread prefetches at the pipeline's end instead; more tokenise in
    # parallel here.
    threads = config.read_threads if config.read_threads > 1 else 0
    dataset = dataset.filter(lambda pair: len(pair['targets']) > 0)
    dataset = dataset.to_iter_dataset(
      grain.ReadOptions(num_threads=threads, prefetch_buffer_size=8 * threads)
    )
    if config.segments:
      # First-fit keeps short documents whole; cutting the stream at row ends
      # would separate tokens from the beginning of their document.
      dataset = grain.experimental.FlatMapIterDataset(
        dataset, _Pieces(config.length)
      )
      dataset = grain.experimental.FirstFitPackIterDataset(
        dataset,
        length_struct=lengths,
        num_packing_bins=_PACKING_BINS,
        seed=seed or 0,
        shuffle_bins=seed is not None,
      )
    else:
      dataset = _TupleState(
        grain.experimental.ConcatThenSplitIterDataset(
          dataset, length_struct=lengths
        )
      )
    return dataset.map(to_row)

  def to_row(packed):
    ids = packed['tokens_segment_ids']
    row = {key: packed[key] for key in lengths}
    row['weights'] = (ids > 0).astype(np.float32)
    return row | ({'segments': ids} if config.segments else {})

  return documents, pack


def _estimate(documents: grain.MapDataset) -> int:
  """Returns an estimate of the number of targets in a split."""
  count = min(_SAMPLED, len(documents))
  indices = [i * len(documents) // count for i in range(count)]
  sampled = sum(len(documents[i]['targets']) for i in indices)
  return sampled * len(documents) // count


def _check_enough(
  documents: grain.MapDataset, config: TextDataConfig, rows: int
):
  """Raises if a split has fewer targets than one global batch of rows."""
  targets = 0
  for i in range(len(documents)):
    targets += len(documents[i]['targets'])
    if targets >= rows * config.length:
      return
  raise errors.UserError(
    f'split {config.tfds_split!r} of tfds_name={config.tfds_name!r} holds '
    f'{targets} tokens, fewer than the {rows} rows of length={config.length} '
    'of one batch: choose a larger split or lower length or the batch size'
  )


class _DocumentPair(grain.transforms.Map):
  """Maps a record to the tokens and targets of its document.

  The separator precedes the document's tokens and follows its targets. It is
  also the last target of the preceding document, so the concatenated targets
  are the concatenated tokens shifted by one.
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer, key: str):
    self._tokenizer = tokenizer
    self._key = key
    if tokenizer.eos_id is not None:
      self._separator = [tokenizer.eos_id]
    else:
      self._separator = tokenizer.encode('\n')

  def map(self, element: dict[str, Any]) -> dict[str, np.ndarray]:
    text = element[self._key]
    if isinstance(text, str):
      text = text.encode('utf-8', 'replace')
    ids = self._tokenizer.encode_bytes(text)
    if not len(ids):
      return {'tokens': ids, 'targets': ids}
    ids = np.concatenate([self._separator[-1:], ids, self._separator])
    ids = ids.astype(np.int32)
    return {'tokens': ids[:-1], 'targets': ids[1:]}


class _Pieces(grain.experimental.FlatMapTransform):
  """Cuts documents that are longer than a row."""

  # Unused: only data sets with random access need a bound.
  max_fan_out = 1

  def __init__(self, length: int):
    self._length = length

  def flat_map(self, element: dict[str, np.ndarray]) -> list[Any]:
    return [
      {k: v[i : i + self._length] for k, v in element.items()}
      for i in range(0, len(element['tokens']), self._length)
    ]


class _TupleState(grain.IterDataset):
  """Lets a concat-then-split parent resume from a state that was JSON.

  The parent marks "no remainder of a document" by a tuple, which JSON turns
  into a list. It does not recognise the list and would drop the next document.
  """

  def __iter__(self) -> grain.DatasetIterator:
    return _TupleStateIterator(iter(self._parent))


class _TupleStateIterator(grain.DatasetIterator):
  def __next__(self) -> dict[str, np.ndarray]:
    return next(self._parent)

  def get_state(self) -> dict[str, Any]:
    return self._parent.get_state()

  def set_state(self, state: dict[str, Any]):
    slices = {k: tuple(v) for k, v in state['remainder_slices'].items()}
    self._parent.set_state({**state, 'remainder_slices': slices})
