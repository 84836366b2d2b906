"""Metrics: sums that are divided once, and the files they are written to.

A metric is a pair `(total, weight)`. Pairs add over microbatches, batches and
hosts, and only the finished sum is divided: the mean over tokens does not
depend on how the tokens were batched.
"""

from collections.abc import Iterator, Mapping
import contextlib
import importlib.util
import json
import math
import numbers
import tempfile
import time
from typing import Any
import uuid

from absl import logging
import jax
import numpy as np

from mod_jax import parallel, paths
from mod_jax.errors import UserError
from mod_jax.losses.sums import MetricSums, Rows

_FILE = 'metrics.jsonl'
_EVENT = 'event'  # Kind of the lines about the run itself (see history.py).
_WANDB_ID = 'wandb_id.txt'
_REWRITE_SECS = 30.0  # Minimum time between rewrites in an object store.
_EVENTS_SECS = 10.0  # Minimum time between flushes of TensorBoard's file.


def finalize(metric_sums: MetricSums) -> dict[str, Any]:
  """Divides each total by its weight, on the host and in double precision.

  Metrics of weight 0, which were not measured, are left out. If a pair has
  arrays, their quotients are added up. The batches of `Rows` are concatenated,
  with the rows of all hosts.
  """
  metrics = {}
  for name, value in on_host(metric_sums).items():
    if isinstance(value, Rows):
      batches = jax.tree.map(parallel.whole, value.batches)
      metrics[name] = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    elif np.any(value[1]):
      total, weight = value
      metrics[name] = float(np.sum(total / np.where(weight, weight, 1)))
  return metrics


def on_host(metric_sums: MetricSums) -> MetricSums:
  """Waits for the sums, and returns them as float64; `Rows` stay unchanged.

  In float32, the sums of many batches would lose their last digits.
  """
  pairs = {k: v for k, v in metric_sums.items() if not isinstance(v, Rows)}
  return metric_sums | jax.tree.map(np.float64, jax.device_get(pairs))


class MetricWriter(contextlib.AbstractContextManager):
  """Writes metrics to `metrics.jsonl`, TensorBoard and Weights & Biases.

  `metrics.jsonl` holds one object per line, `{"step": 10, "kind": "train",
  "loss": 2.5}`, flushed line by line. Numbers read back bit for bit; NaN and
  infinities, which JSON lacks, are null. Only the first process writes.

  Object stores cannot append to a file, so there it is rewritten, at most every
  30 seconds and whenever `flush` is called.
  """

  def __init__(
    self,
    workdir,
    *,
    tensorboard: bool = True,
    wandb: bool = False,
    resume_step: int | None = None,
    config_json: str | None = None,
    name: str | None = None,
  ):
    """Opens the files, and rewinds them to `resume_step`.

    Args:
      workdir: directory of the run; created if missing.
      tensorboard: whether to write events into `workdir/tensorboard`.
      wandb: whether to log to Weights & Biases.
      resume_step: the step of the restored checkpoint: lines of later steps,
        which will be taken again, are removed. None for a new run: existing
        files are replaced. Events stay.
      config_json: the run's config, logged with the curves.
      name: name of the run in Weights & Biases; None for the directory's name.

    Raises:
      UserError: wandb is wanted but not installed, or `metrics.jsonl` is not
        what this class writes.
    """
    check_wandb(wandb)
    self._file = self._tensorboard = self._wandb = None
    if jax.process_index() != 0:
      return
    workdir = paths.expand(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / _FILE
    _rewind(path, -math.inf if resume_step is None else resume_step)
    self._file = (
      _RewrittenFile(path) if paths.is_remote(path) else path.open('a')
    )
    if tensorboard and paths.is_remote(workdir):
      logging.warning(
        'no TensorBoard events in %s, as they are written to file systems only:'
        ' metrics.jsonl has the numbers.',
        workdir,
      )
    elif tensorboard:
      with self._giving_up_tensorboard():
        self._tensorboard = _TensorBoard(
          workdir / 'tensorboard', resume_step, config_json
        )
    if wandb:
      self._wandb = _open_wandb(workdir, resume_step, config_json, name)

  def __exit__(self, *exc_info):
    self.close()

  def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
    """Writes one line; values may be NumPy's and JAX's scalars, too.

    TensorBoard and Weights & Biases show them as `kind/name`, such as
    `train/loss`.
    """
    if self._file is None:
      return
    if reserved := {'step', 'kind'} & set(values):
      raise ValueError(f'values named {sorted(reserved)} are reserved')
    values = {name: _number(value) for name, value in values.items()}
    self._file.write(_line(step, kind, values))
    self._file.flush()
    if kind != 'train':  # Rare, and should be visible at once.
      self.flush()
    if self._tensorboard is not None:
      with self._giving_up_tensorboard():
        self._tensorboard.write(int(step), kind, values)
    if self._wandb is not None:
      # W&B ignores steps it already has; resuming repeats them bit for bit.
      self._wandb.log(
        {f'{kind}/{name}': value for name, value in values.items()},
        step=int(step),
      )

  def event(self, event: str, step: int, **fields) -> None:
    """Writes an event (see `history`), with the current time unless given."""
    if self._file is not None:
      self._file.write(_event_line(event, step, fields))
      self._file.flush()
      self.flush()

  def flush(self) -> None:
    """Rewrites the file in an object store; elsewhere nothing is pending."""
    if isinstance(self._file, _RewrittenFile):
      self._file.rewrite()

  def close(self) -> None:
    """Flushes and closes everything; may be called twice."""
    if self._tensorboard is not None:
      with self._giving_up_tensorboard():
        self._tensorboard.close()
    if self._wandb is not None:
      self._wandb.finish()
    if self._file is not None:  # Close it last: a full disk raises here.
      self._file.close()
    self._file = self._tensorboard = self._wandb = None

  @contextlib.contextmanager
  def _giving_up_tensorboard(self) -> Iterator[None]:
    """Context manager: drops TensorBoard if its file cannot be written."""
    try:
      yield
    except OSError as error:
      self._tensorboard = None
      logging.warning(
        'TensorBoard lacks the rest of this run (%s): free some space, or look'
        ' at metrics.jsonl, or set log.tensorboard=False.',
        error.strerror,
      )


def to_json(value, *, indent: int | None = None) -> str:
  """Returns strict JSON, with null for NaN and infinities."""
  return json.dumps(_strict(value), indent=indent, allow_nan=False)


def write_json(path, value) -> None:
  """Writes a value as a file of indented strict JSON, atomically."""
  paths.write_bytes(path, f'{to_json(value, indent=2)}\n'.encode())


def _strict(value):
  if isinstance(value, Mapping):
    return {name: _strict(inner) for name, inner in value.items()}
  if isinstance(value, list | tuple):
    return [_strict(inner) for inner in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _line(step, kind, values) -> str:
  values = {name: _number(value) for name, value in values.items()}
  return to_json({'step': int(step), 'kind': kind, **values}) + '\n'


def _event_line(event, step, fields) -> str:
  line = {'step': step, 'kind': _EVENT, _EVENT: event, 'time': time.time()}
  return to_json(line | fields) + '\n'


def check_wandb(wanted: bool) -> None:
  """Raises UserError if Weights & Biases is wanted but not installed."""
  if wanted and importlib.util.find_spec('wandb') is None:
    raise UserError(
      'wandb=True, but the package wandb is not installed: run '
      '"pip install wandb", or set wandb=False'
    )


def read(workdir) -> list[dict[str, Any]]:
  """Reads `metrics.jsonl`, also while the run is training.

  Returns:
    One dictionary per line, with `step`, `kind` and the values; values that
    were not finite are NaN. Events, and a last line that a kill cut short, are
    left out. There may be several evaluations at one step, as of a finished run
    that is run again with other settings: take the last one.

  Raises:
    UserError: a line is not what `MetricWriter` writes, or the file cannot be
      read.
  """
  return [x for x in _read_all(workdir) if x['kind'] != _EVENT]


def read_events(workdir) -> list[dict[str, Any]]:
  """Reads the events in `metrics.jsonl`, the lines that `read` leaves out."""
  return [x for x in _read_all(workdir) if x['kind'] == _EVENT]


def add_event(workdir, event: str, step: int, **fields) -> None:
  """Adds an event to `metrics.jsonl` while no writer has the file open."""
  path = paths.expand(workdir) / _FILE
  *lines, _ = _read(path).split(b'\n')  # A kill may have cut the last line.
  lines.append(_event_line(event, step, fields).encode())
  paths.write_bytes(path, b'\n'.join(lines))


def _read_all(workdir):
  path = paths.expand(workdir) / _FILE
  return [record for _, record in _parse(path, _read(path))]


def _read(path) -> bytes:
  try:
    return path.read_bytes()
  except FileNotFoundError:
    return b''
  except OSError as error:
    raise UserError(
      f'{path} cannot be read ({error.strerror}): restore it from a copy, or'
      ' move it away, which loses the curves so far'
    ) from error


def holds(workdir, step: int, kind: str, values: Mapping[str, Any]) -> bool:
  """Returns whether `metrics.jsonl` has the exact line that `write` adds."""
  path = paths.expand(workdir) / _FILE
  line = _line(step, kind, values).encode()
  return line in _read(path).splitlines(keepends=True)


def _parse(path, data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
  """Returns the complete lines, each with its parsed record; NaN for null."""
  # A line that a kill cut short has no newline.
  *lines, _ = data.split(b'\n')
  result = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
      valid = isinstance(record['step'], int) and 'kind' in record
      record = {k: math.nan if v is None else v for k, v in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
      valid = False
    if not valid:
      raise UserError(
        f'line {number} of {path} is not a metrics line ({line[:40]!r}): '
        'delete that line, or move the file away'
      )
    result.append((line, record))
  return result


def _rewind(path, last_step):
  """Removes lines after `last_step` and a truncated last line, atomically.

  Events stay. Warns if lines before `last_step` are missing, since all of them
  were written before the checkpoint was.
  """
  before = _read(path)
  lines = _parse(path, before)
  steps = [x['step'] for _, x in lines if x['kind'] != _EVENT]
  reached = max(steps, default=0)
  if last_step == -math.inf:
    if steps:
      logging.warning(
        '%s is of an earlier start of which there is no checkpoint: it is'
        ' replaced.',
        path,
      )
  elif before and not before.endswith(b'\n'):
    logging.warning('%s ended within a line, which is removed.', path)
  if reached < last_step:
    logging.warning(
      '%s ends at step %d, before the checkpoint at step %d: what lay between'
      ' is lost.',
      *(path, reached, last_step),
    )
  after = b''.join(
    line + b'\n'
    for line, x in lines
    if x['kind'] == _EVENT or x['step'] <= last_step
  )
  if after != before:
    paths.write_bytes(path, after)


class _RewrittenFile:
  """A file in an object store, which is rewritten as a whole."""

  def __init__(self, path):
    self._path = path
    self._text = path.read_bytes() if path.exists() else b''
    self._written = time.monotonic()

  def write(self, text: str):
    self._text += text.encode()

  def flush(self):
    if time.monotonic() - self._written > _REWRITE_SECS:
      self.rewrite()

  def rewrite(self):
    paths.write_bytes(self._path, self._text)
    self._written = time.monotonic()

  def close(self):
    self.rewrite()


class _TensorBoard:
  """A TensorBoard event file.

  It is written in the calling thread: the thread of tensorboardX's
  SummaryWriter dies if the disk is full, and then writes to its queue block.
  """

  def __init__(self, folder, resume_step, config_json):
    # Slow to import.
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    self._summary, self._event = summary, event_pb2.Event
    folder.mkdir(exist_ok=True)
    # File names have a resolution of one second; without the suffix, a second
    # writer within the same second would overwrite the first file.
    suffix = f'.{time.time_ns()}'
    self._file = event_file_writer.EventsWriter(str(folder / 'events'), suffix)
    # TensorBoard then hides events of older files from this step on.
    self._add(
      0 if resume_step is None else resume_step + 1,
      session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
    )
    if config_json is not None:
      text = f'```json\n{config_json}\n```'
      self._add(None, summary=summary.text('config', text))
    self._flush()

  def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._add(step, summary=self._summary.scalar(f'{kind}/{name}', value))
    if time.monotonic() - self._flushed > _EVENTS_SECS:
      self._flush()

  def close(self) -> None:
    self._file.close()

  def _flush(self):
    self._file.flush()
    self._flushed = time.monotonic()

  def _add(self, step, **what):
    event = self._event(wall_time=time.time(), step=step, **what)
    self._file.write_event(event)


def _number(value):
  if isinstance(value, numbers.Integral):
    return int(value)
  value = np.asarray(value)
  return value.item() if value.dtype.kind in 'biu' else float(value)


def _open_wandb(workdir, resume_step, config_json, name):
  import wandb  # Slow to import, and optional.

  # The same id continues the same curves.
  path = workdir / _WANDB_ID
  if resume_step is None or not path.exists():
    path.write_text(uuid.uuid4().hex[:12])
  return wandb.init(
    project='mod_jax',
    name=name or workdir.name,
    id=path.read_text().strip(),
    resume='allow',
    # Weights & Biases writes to a local directory before it uploads.
    dir=tempfile.mkdtemp() if paths.is_remote(workdir) else str(workdir),
    config=None if config_json is None else json.loads(config_json),
  )
