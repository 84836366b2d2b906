"""Tokenises a corpus once, for runs on any number of hosts.

  python -m mod_jax.data.prepare --out=corpus --config.tokenizer=bpe \\
    --config.source=files --config.files='text/**/*.txt'

`--config.FIELD=VALUE` sets a field of a `text.TextDataConfig`. A corpus is cut
into parts, whose number depends only on its size and on --shard_mb. Each part
becomes a shard, written atomically, so the same command continues if
interrupted. Runs read the result by `--config.data.source=prepared
--config.data.path=corpus`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import dataclasses
import functools
import json
import multiprocessing
import os
import signal
from typing import Any

from absl import flags
import tqdm

from mod_jax import cli, errors, paths
from mod_jax import config as config_lib
from mod_jax.data import (
  common,
  corpus,
  prepared,
  shards,
  tables,
  text,
  tfds_text,
  tokenizers,
)
from mod_jax.data import fingerprint as fingerprints

# A call of a part returns its documents, each in pieces of UTF-8.
Part = Callable[[], Iterable[Iterable[bytes]]]

# Fields that do not change the prepared tokens. The tokeniser's fingerprint is
# compared instead of its path.
_OF_READING = (
  *('length', 'segments', 'cache_dir', 'read_threads', 'prefetch'),
  *('max_epochs', 'path', 'tokenizer_path', 'tokenizer_vocab_size'),
)
_SAMPLED = 64  # TFDS records read to estimate the mean size of a document.
_CHUNK = 2**22  # Tokens read at a time to count their bytes.


def prepare(
  config: text.TextDataConfig,
  out: str,
  *,
  workers: int = 1,
  shard_bytes: int = 2**27,
) -> dict[str, Any]:
  """Makes a prepared corpus, or completes one that was begun; see `prepared`.

  Raises UserError if the data cannot be read, if `out` cannot be written, or if
  it holds another corpus.

  Args:
    config: what to read, and the tokenizer.
    out: directory of the corpus.
    workers: processes that tokenise.
    shard_bytes: approximate bytes of text per shard; documents and files are
      not cut.

  Returns:
    The corpus's index: for 'train' and 'held_out' the numbers of `tokens`,
    `documents` and `bytes` (of text), and `shards`.
  """
  if config.source == 'prepared':
    raise errors.UserError(
      "source='prepared' is a corpus that is prepared already: name what to "
      'make one of by source=…'
    )
  paths.require_local(out, 'out')
  out = os.path.expanduser(out)
  if config.learns_tokenizer:  # From here on it is read from a file.
    learned = str(text.learn_tokenizer(config))
    config = dataclasses.replace(
      config, tokenizer='huggingface', tokenizer_path=learned
    )
  index = _begin(config, out, shard_bytes)
  if 'train' in index:
    for group in prepared.GROUPS:
      prepared.check(out, group)
    return index
  jobs = [
    (prepared.shard_path(out, group, number), part)
    for group, parts in _parts(config, shard_bytes).items()
    for number, part in enumerate(parts)
  ]
  fingerprint = index['tokenizer']['fingerprint']
  write = functools.partial(_write_shard, config, fingerprint)
  counted = zip(jobs, _map(write, jobs, workers), strict=True)
  counted = {os.path.basename(path): counts for (path, _), counts in counted}
  for group in prepared.GROUPS:
    mine = {n: c for n, c in counted.items() if n.startswith(f'{group}-')}
    index[group] = {
      **{
        key: sum(counts[key] for counts in mine.values())
        for key in ('tokens', 'documents', 'bytes')
      },
      'shards': mine,
      'files': prepared.of_shards(out, mine),
    }
  if not index['train']['tokens']:
    raise errors.UserError(
      f'source={config.source!r} has no text to train on: give other files'
    )
  prepared.write_index(out, index)
  shards.remove_leftovers(out, '*')
  return index


def _begin(config, out, shard_bytes) -> dict[str, Any]:
  """Returns the index in `out`, writing a new one if there is none.

  Raises UserError if the index is of another corpus.
  """
  settings = json.loads(config_lib.to_json(config))
  made_of = {
    'settings': {
      f'config.{k}': v for k, v in settings.items() if k not in _OF_READING
    },
    'shard_bytes': shard_bytes,
    'data': _fingerprint(config),
  }
  index = prepared.read_index(out)
  if index is not None:
    changes = fingerprints.differences(index['made_of'], made_of)
    if changes:
      raise errors.UserError(
        f'--out={out} holds a corpus that was made otherwise '
        f'({"; ".join(changes[:5])}): give another directory, or delete '
        'that one'
      )
    return index
  index = {
    'made_of': made_of,
    'tokenizer': {
      'kind': config.tokenizer,
      'fingerprint': text.make_tokenizer(config).fingerprint,
    },
  }
  try:
    os.makedirs(out, exist_ok=True)
    tokenizers.copy(config.tokenizer, config.tokenizer_path, out)
    prepared.write_index(out, index)
  except OSError as e:
    raise errors.UserError(
      f'--out={out} cannot be written ({e.strerror}): name a directory that can'
    ) from e
  return index


def _fingerprint(config) -> dict[str, Any]:
  if config.source != 'tfds':
    return text.fingerprint(config)
  tokenizer = text.make_tokenizer(config).fingerprint
  splits = {
    group: tfds_text.fingerprint(config, split)
    for group, split in _splits(config).items()
  }
  return {'tokenizer': fingerprints.of_value(tokenizer)} | splits


def _splits(config) -> dict[str, str]:
  return {'train': config.tfds_split, 'held_out': config.tfds_eval_split}


# Parts of a corpus, and their documents.


def _parts(config, shard_bytes) -> dict[str, list[Part]]:
  """Returns the parts of each group, whatever the number of workers."""
  if config.source == 'tfds':
    return {
      group: [
        functools.partial(_records, config, split, numbers)
        for numbers in _cut_records(config, split, shard_bytes)
      ]
      for group, split in _splits(config).items()
    }
  train, held_out = text.split_files(config)
  if drawn := config.source == 'huggingface' and not config.eval_files:
    held_out = train

  def part(files, group) -> Part:
    if config.source == 'huggingface':
      return functools.partial(_rows, config, files, group if drawn else None)
    return functools.partial(_files, files)

  return {
    group: [part(files, group) for files in _cut_files(side, shard_bytes)]
    for group, side in (('train', train), ('held_out', held_out))
  }


def _files(files: Sequence[corpus.TextFile]) -> Iterator[Iterator[bytes]]:
  """Yields files as documents."""
  return (corpus.chunks(f.path) for f in files)


def _rows(config, files, group: str | None) -> Iterator[list[bytes]]:
  """Yields the rows of tables as documents; with a `group`, only its rows."""
  for file in files:
    for row in tables.read_column(file.path, config.text_column):
      document = row.encode('utf-8', 'replace')
      # Draw by a hash of the text, so that all copies of a text are in one
      # group.
      held_out = corpus.draw(document) < config.eval_fraction
      if group is None or held_out == (group == 'held_out'):
        yield [document]


def _records(config, split: str, numbers: range) -> Iterator[list[bytes]]:
  """Yields the non-empty records `numbers` of a TFDS split as documents."""
  records = tfds_text.open_documents(config, split)
  for i in numbers:
    if document := _text_of(config, records[i]):
      yield [document]


def _text_of(config, record) -> bytes:
  value = record[config.tfds_text_key]
  return value.encode('utf-8', 'replace') if isinstance(value, str) else value


def _cut_files(files, shard_bytes) -> list[list[corpus.TextFile]]:
  """Groups consecutive files; a group ends once it has `shard_bytes`."""
  parts, size = [], shard_bytes
  for file in files:
    if size >= shard_bytes:
      parts.append([])
      size = 0
    parts[-1].append(file)
    size += file.size
  return parts


def _cut_records(config, split, shard_bytes) -> list[range]:
  """Cuts a split into parts of equal length and about `shard_bytes` each."""
  records = tfds_text.open_documents(config, split)
  total = len(records)
  count = min(total, _SAMPLED)
  size = sum(
    len(_text_of(config, records[i * total // count])) for i in range(count)
  )
  parts = max(1, round(size * total / count / shard_bytes))
  return [
    range(i * total // parts, (i + 1) * total // parts) for i in range(parts)
  ]


# Shards.


@functools.cache
def _tokenizer(kind: str, path: str, fingerprint: str):
  del fingerprint  # Only a cache key: another corpus may have been at `path`.
  return tokenizers.make(kind, path)


def _write_shard(
  config, fingerprint: str, job: tuple[str, Part]
) -> dict[str, Any]:
  """Writes a shard unless it exists; returns its counts and its SHA-256.

  `fingerprint` is the tokenizer's.
  """
  path, part = job
  out = os.path.dirname(path)
  tokenizer = _tokenizer(config.tokenizer, out, fingerprint)
  separator = ()
  if config.source in ('tfds', 'huggingface'):
    # Texts from these sources, unlike files, rarely end with a newline.
    separator = tokenizer.encode('\n')[-1:]
  shard = shards.open_or_write(path, part(), tokenizer, separator)
  num_bytes = 0  # To convert nats per token to bits per byte.
  for start in range(0, shard.tokens, _CHUNK):
    ids = shard.read(start, min(_CHUNK, shard.tokens - start))
    num_bytes += int(tokenizer.token_bytes[ids].sum())
  return {
    'tokens': shard.tokens,
    'documents': shard.documents,
    'bytes': num_bytes,
    'sha256': corpus.whole_hash(path),
  }


def _map(function, jobs, workers) -> Iterator[Any]:
  """Yields the function's result for each job, with a progress bar."""
  progress = functools.partial(
    tqdm.tqdm, total=len(jobs), unit='shard', disable=None
  )
  if workers == 1:
    yield from progress(map(function, jobs))
    return
  with futures.ProcessPoolExecutor(
    min(workers, max(1, len(jobs))),
    multiprocessing.get_context('spawn'),
    initializer=_end_with_parent,
  ) as pool:
    try:
      yield from progress(pool.map(function, jobs))
    except futures.process.BrokenProcessPool as e:
      raise errors.UserError(
        'a worker was killed, perhaps for want of memory; the same command '
        'goes on, with fewer by --workers'
      ) from e
    except BaseException:
      # Let workers finish the current shards, which a later run can use.
      pool.shutdown(cancel_futures=True)
      raise


def _end_with_parent():
  """Makes a worker ignore Ctrl-C and exit when its parent process has ended."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  common.end_with_parent()


def main(argv: Sequence[str] | None = None):
  """Runs the command line `argv`, by default that of the process."""
  out = flags.DEFINE_string('out', None, 'Directory of the corpus.')
  workers = flags.DEFINE_integer(
    'workers', os.cpu_count(), 'Processes that tokenise.', lower_bound=1
  )
  shard_mb = flags.DEFINE_integer(
    'shard_mb', 128, 'Text in a shard, about, in MiB.', lower_bound=1
  )

  def run(_):
    if not out.value:
      raise errors.UserError(
        '--out is missing: give the directory of the corpus.'
      )
    index = prepare(
      cli.changed(text.TextDataConfig()),
      out.value,
      workers=workers.value,
      shard_bytes=shard_mb.value * 2**20,
    )
    for group in prepared.GROUPS:
      side = index[group]
      print(
        f'{group}: {side["tokens"]:,} tokens of {side["documents"]:,}'
        f' documents, {side["bytes"]:,} bytes of text, shards:'
        f' {len(side["shards"])}'
      )

  cli.run(run, argv)


if __name__ == '__main__':
  main()
