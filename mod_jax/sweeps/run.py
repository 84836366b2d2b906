"""Trains the runs of a sweep; any number of workers may share its directory.

A worker that trains a run holds the lock of the run's directory, which is
released if the worker dies; see `runs/lock.py`. When the run has finished or
diverged, its result is written to `results/ID.json`, atomically and under the
lock. A run that has a result is never trained again, and a run that was stopped
is resumed.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import re
import sys
from typing import Any

from absl import flags, logging
from etils import epath
import jax

from mod_jax import cli, parallel
from mod_jax.data import fingerprint
from mod_jax.errors import UserError
from mod_jax.runs import lock as lock_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.run_config import fitted
from mod_jax.sweeps import manifest
from mod_jax.sweeps.manifest import Entry
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A run that one of several workers trains."""

  id: str
  config: ExperimentConfig
  folder: epath.Path  # Directory of the run.
  path: epath.Path  # File of the run's result.
  # Hash of the manifest, or of a grid point's config. The result repeats it as
  # `manifest`, which tells a result of this plan from one of an earlier plan.
  origin: str

  def result(self) -> dict[str, Any] | None:
    """Returns the result; None if there is none, or it has another origin."""
    result = _read(self.path)
    same = result is not None and result['manifest'] == self.origin
    return result if same else None

  def done(self) -> bool:
    """Whether there is a result; the first process decides this for all."""
    return parallel.first_says(self.result() is not None)


def run(
  workdir, chosen: slice = slice(None), *, allow_changed_data: bool = False
) -> list[str]:
  """Trains the runs that have no result and that no other worker trains.

  Args:
    workdir: directory of the sweep.
    chosen: lines of the manifest to train; all by default.
    allow_changed_data: as for `loop.train`.

  Returns:
    The ids of the chosen runs that have no result yet, because a signal stopped
    this worker or other workers train them.

  Raises:
    UserError: as `results`; no run is chosen; or as `loop.train`, for instance
      where a run with the same id and another config was begun here.
  """
  workdir = workdir_lib.expand(workdir)
  entries, digest = manifest.read(workdir)
  if not entries[chosen]:
    raise UserError(
      f'no run is chosen: {workdir} has {len(entries)} of them, counted from 0.'
    )
  results(workdir)  # Raises if there are results of another manifest.
  jobs = [
    Job(
      id=entry.id,
      # The mesh is adapted to the devices, which changes results by rounding
      # only.
      config=fitted(entry.config, jax.device_count()),
      folder=directory(workdir, entry),
      path=result_path(workdir, entry),
      origin=digest,
    )
    for entry in entries[chosen]
  ]
  return [job.id for job in train(jobs, allow_changed_data=allow_changed_data)]


def train(
  jobs: Sequence[Job],
  *,
  allow_changed_data: bool = False,
  after: Callable[[], None] = lambda: None,
) -> list[Job]:
  """Trains the jobs that no other worker trains, and writes their results.

  Calls `after` after each job that it found without a result. Returns the jobs
  that have no result in the end.
  """
  with stop_lib.listening():
    for job in jobs:
      if stop_lib.requested():
        break
      if job.done():
        continue
      _train(job, allow_changed_data)
      after()
      # Free the compiled programs of this run.
      jax.clear_caches()
  # Check again: other workers may have finished their runs meanwhile.
  unfinished = [job for job in jobs if not job.done()]
  if unfinished and jax.process_index() == 0:
    print(
      f'{len(unfinished)} of {len(jobs)} runs have no result yet, being stopped'
      ' or with other workers; the same command continues.',
      file=sys.stderr,
    )
  return unfinished


def _train(job, allow_changed_data) -> None:
  """Trains a job, unless another worker holds its lock."""
  try:
    with lock_lib.held(job.folder):
      if job.done():  # Another worker may have just finished it.
        return
      outcome = phases.complete(
        job.config, job.folder, allow_changed_data=allow_changed_data
      )
      if outcome is not None and jax.process_index() == 0:
        _write(job, outcome)
  except lock_lib.InUse as refusal:
    if jax.process_index() == 0:
      print(f'{job.id}: {refusal}', file=sys.stderr)


def _write(job, outcome) -> None:
  metrics = outcome.metrics
  data = make_task(job.config, job.folder).modality.data_fingerprint()
  # Keep only what diverged and when. The rest of the message names the last
  # checkpoint, which depends on earlier interruptions of the run.
  diverged = outcome.diverged.partition(';')[0]
  result = {
    'id': job.id,
    'manifest': job.origin,
    'data': fingerprint.digest(data),
    'diverged': diverged,
    'loss': metrics.get('top_k/loss', metrics.get('loss')),
    # Sort them: their order differs if the run had finished earlier.
    'metrics': dict(sorted(metrics.items())),
  }
  metrics_lib.write_json(job.path, result)
  message = f'diverged: {diverged}'
  if not diverged:
    loss = result['loss']
    message = 'finished' if loss is None else f'loss {loss:.4f}'
  print(f'{job.id}: {message}', flush=True)


def results(workdir) -> list[tuple[Entry, dict[str, Any]]]:
  """Returns the finished runs with their results, in the order of the plan.

  A result is a dict of `diverged`, a message or ''; `metrics`, all held-out
  metrics at the end; `loss`, the loss among these, of a routed model that under
  top-k, None if it diverged; and `data`, a digest of the data's fingerprint.

  Raises:
    UserError: as `manifest.read`; or a result belongs to another manifest.
  """
  entries, digest = manifest.read(workdir)
  finished = []
  for entry in entries:
    path = result_path(workdir, entry)
    result = _read(path)
    if result is None:
      continue
    if result['manifest'] != digest:
      raise UserError(
        f'{path} is of another manifest than {workdir} holds: restore the'
        ' manifest that the runs were begun with, or move the results away.'
      )
    finished.append((entry, result))
  # Results that older versions wrote have no digest of the data.
  data = {r['data'] for _, r in finished if 'data' in r}
  if len(data) > 1:
    logging.warning(
      'The runs in %s saw %d different sets of data, so that their losses are'
      ' not comparable: see `data` in their results.',
      *(workdir, len(data)),
    )
  return finished


def directory(workdir, entry: Entry):
  """Returns the directory of a run, `WORKDIR/runs/ID`."""
  return workdir_lib.expand(workdir) / manifest.RUNS / entry.id


def result_path(workdir, entry: Entry):
  """Returns the path of a run's result, `WORKDIR/results/ID.json`."""
  return workdir_lib.expand(workdir) / manifest.RESULTS / f'{entry.id}.json'


def _read(path) -> dict[str, Any] | None:
  """Reads a result; None if the file is missing or, with a warning, damaged."""
  if not path.is_file():
    return None
  try:
    result = json.loads(path.read_text())
    if {'id', 'manifest', 'diverged', 'loss', 'metrics'} <= result.keys():
      return result
  except (ValueError, AttributeError):
    pass
  logging.warning(
    '%s is damaged, so that its run counts as one without a result: the command'
    ' that trains the sweep writes it again.',
    path,
  )
  return None


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.', required=True)
  flags.DEFINE_integer(
    'index', None, 'Only this line of the manifest, from 0.', lower_bound=0
  )
  flags.DEFINE_string('range', None, 'Only the lines A:B, B not included.')
  flags.DEFINE_bool(
    'allow_changed_data',
    False,
    'Continue even where the data are not those that a run began with.',
  )


def main(_: Sequence[str]) -> None:
  """`python -m mod_jax.sweeps run`."""
  args = flags.FLAGS
  chosen = _slice(args.index, args.range)
  cli.start_backend()
  run(args.workdir, chosen, allow_changed_data=args.allow_changed_data)


def _slice(index, text) -> slice:
  """Returns the lines that --index or --range choose."""
  if index is not None and text is not None:
    raise UserError('--index and --range: give one of them.')
  if index is not None:
    return slice(index, index + 1)
  match = re.fullmatch(r'(\d*):(\d*)', ':' if text is None else text)
  if not match:
    raise UserError(f'--range={text}: expected A:B, as in 0:10.')
  return slice(*(int(end) if end else None for end in match.groups()))
