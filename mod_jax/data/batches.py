"""Batches of rows that Grain reads, in threads or worker processes.

The state of `Batches` is the index of the next batch. Checkpoints hold this
state, and that of Grain's iterators of text, as the position in the data
(`runs/checkpoints.py`).
"""

from collections.abc import Callable, Iterator
import contextlib
import signal
from typing import Any

from absl import flags
import grain
import numpy as np

from mod_jax import errors
from mod_jax.data import common

Batch = dict[str, np.ndarray]

PADDING = -1  # The index of rows that only fill a batch.
# Number of threads, and of prefetched batches, if there are no worker
# processes. Pillow releases the GIL while it decodes.
_THREADS = 4
# Batches that each worker process keeps ready.
_WORKER_BUFFER = 2


def require_rows(count: int, rows: int, what: str) -> None:
  """Raises UserError if `count` rows of training data do not fill a batch.

  `rows` is the number of rows of a global batch; `what` names the rows in the
  message, in the plural.
  """
  if count < rows:
    raise errors.UserError(
      f'there are {count} {what} to train on, fewer than the {rows} of one'
      ' batch: add some or lower the batch size.'
    )


def endless(
  make_row: Callable[[int, np.random.Generator], Batch],
  count: int,
  workers: int,
  *,
  what: str,
  batch_size: int,
  seed: int,
  shard_index: int = 0,
  shard_count: int = 1,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this shard's batches.

  `make_row(index, rng)` makes a row, for an index below `count`. Rows are
  reshuffled in every epoch. The global batch is the same for any number of
  shards; the first shard gets its first rows. `what` is as in `require_rows`.
  """
  require_rows(count, batch_size * shard_count, what)
  dataset = grain.MapDataset.source(range(count)).seed(seed)
  dataset = dataset.shuffle().repeat().random_map(make_row)
  dataset = GlobalRows(
    *(dataset, batch_size * shard_count, shard_index * batch_size, batch_size)
  )
  return Batches(dataset.batch(batch_size, drop_remainder=True), workers)


def held_out(
  make_row: Callable[[int], Batch],
  count: int,
  workers: int,
  *,
  batch_size: int,
  num_batches: int | None = None,
  shard_index: int = 0,
  shard_count: int = 1,
) -> Iterator[Batch]:
  """Returns this shard's held-out batches, always the same in the same order.

  All shards get the same number of batches; the last is padded with rows of
  weight 0, which `make_row(PADDING)` returns. Without `num_batches`, each of
  the `count` rows counts exactly once, over all shards. Otherwise, rows spread
  evenly over the held-out data fill at most `num_batches` batches per shard.
  """
  indices = eval_indices(
    count, batch_size, num_batches, shard_index, shard_count
  )
  dataset = grain.MapDataset.source(indices).map(make_row).batch(batch_size)
  return _finite(dataset, min(workers, len(indices) // batch_size))


def eval_indices(
  length: int,
  batch_size: int,
  num_batches: int | None,
  shard_index: int,
  shard_count: int,
) -> np.ndarray:
  """Returns the indices of the rows of this shard's batches, one after another.

  `length` counts the held-out rows. `PADDING` fills the last batch.
  """
  rows = batch_size * shard_count
  count = length
  if num_batches is not None:
    count = min(count, num_batches * rows)
  batches = -(-count // rows)
  indices = np.full(batches * rows, PADDING)
  indices[:count] = np.arange(count) * length // count
  # All shards need the same number of batches: the other hosts would wait
  # forever for one that has fewer.
  indices = indices.reshape(batches, shard_count, batch_size)
  return indices[:, shard_index].ravel()


class GlobalRows(grain.MapDataset):
  """Selects, from every global batch of an endless parent, the same rows.

  A global batch has `batch` rows, of which `count` are selected. `start` is the
  first of these; -1 is the last row of the batch, followed by its first rows.
  """

  def __init__(
    self, parent: grain.MapDataset, batch: int, start: int, count: int
  ):
    super().__init__(parent)
    self._batch, self._start, self._count = batch, start, count

  def __len__(self) -> int:
    return len(self._parent) // self._batch * self._count

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    batch, row = divmod(index, self._count)
    row = (self._start + row) % self._batch
    return self._parent[batch * self._batch + row]


def _start(dataset: grain.MapDataset, workers: int) -> grain.DatasetIterator:
  """Returns an iterator that reads ahead, in threads or processes."""
  if not workers:
    options = grain.ReadOptions(
      num_threads=_THREADS, prefetch_buffer_size=_THREADS
    )
    return iter(dataset.to_iter_dataset(options))
  if not flags.FLAGS.is_parsed():
    # Grain reads absl flags, which are unparsed in programs without `absl.app`.
    flags.FLAGS.mark_as_parsed()
  # A worker process makes one batch at a time, in a single thread.
  iterable = dataset.to_iter_dataset(
    grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
  )
  options = grain.MultiprocessingOptions(
    num_workers=workers, per_worker_buffer_size=_WORKER_BUFFER
  )
  return iter(iterable.mp_prefetch(options, _end_with_parent_alone))


def _end_with_parent_alone(worker: int, workers: int) -> None:
  """Makes a worker process ignore signals to stop, and end with its parent.

  Ctrl-C, a closed terminal, and schedulers signal all processes of a run at
  once, but the main process needs batches until all hosts have agreed to stop.
  Grain stops its workers by an event, not by a signal. A main process that is
  killed sets no event, and its workers would stay for ever.
  """
  common.end_with_parent()
  for name in ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1'):
    signal.signal(getattr(signal, name), signal.SIG_IGN)


def _finite(dataset: grain.MapDataset, workers: int) -> Iterator[Batch]:
  """Yields the batches of a finite data set."""
  with contextlib.closing(_start(dataset, workers)) as iterator, _reading():
    yield from iterator


@contextlib.contextmanager
def _reading() -> Iterator[None]:
  """Context manager: raises UserError if a worker process has been killed."""
  try:
    yield
  except RuntimeError as e:
    if 'was terminated unexpectedly' not in str(e):
      raise
    raise errors.UserError(
      'a process that reads pictures was killed, as the system does where '
      'memory is short: give fewer data.workers, or more memory; the same '
      'command continues'
    ) from e


class Batches(grain.DatasetIterator):
  """Iterates over batches; the state is only the index of the next batch.

  The state of Grain's own iterator has a part for each worker process, so a run
  could not resume with another number of workers. Here each batch depends only
  on its index, so resuming means starting from that index.
  """

  def __init__(self, dataset: grain.MapDataset, workers: int):
    super().__init__()
    self._dataset = dataset
    self._workers = workers
    self._next_batch = 0
    # The first `next` starts the iterator, so that restoring a state does not
    # start the workers twice.
    self._iterator = None

  def __next__(self) -> Batch:
    if self._iterator is None:
      self._iterator = _start(self._dataset[self._next_batch :], self._workers)
    with _reading():
      batch = next(self._iterator)
    self._next_batch += 1
    return batch

  def get_state(self) -> dict[str, Any]:
    return {'next_batch': self._next_batch}

  def set_state(self, state: dict[str, Any]):
    self.close()
    self._next_batch = int(state['next_batch'])

  def close(self):
    """Ends the threads or processes; the next batch starts them again."""
    if self._iterator is not None:
      self._iterator.close()
      self._iterator = None
