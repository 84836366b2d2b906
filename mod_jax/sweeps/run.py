"""Trains the runs of a sweep; any number of workers may share its directory.

A run lies in `runs/ID/`. The worker that trains it holds the lock there, which
is released if the worker dies; see `runs/lock.py`. When the run has finished
or diverged, its result is written to `results/ID.json`, atomically. A run that
has a result is never trained again, and one that was stopped is resumed.
"""

from collections.abc import Sequence
import json
import re
import sys
from typing import Any

from absl import flags, logging
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
    UserError: there is no manifest, or runs of another one were begun here; no
      run is chosen; or as `loop.train`.
  """
  workdir = workdir_lib.expand(workdir)
  number = len(manifest.read(workdir))
  if not range(number)[chosen]:
    raise UserError(
      f'no run is chosen: {workdir} has {number} of them, counted from 0.'
    )
  entries, digest = manifest.begin(workdir)
  todo = entries[chosen]
  with stop_lib.listening():
    for entry in todo:
      if stop_lib.requested():
        break
      if _done(workdir, entry):
        continue
      _train(workdir, entry, digest, allow_changed_data)
      # Free the compiled programs of this run.
      jax.clear_caches()
  # Check again: other workers may have finished their runs meanwhile.
  unfinished = [entry.id for entry in todo if not _done(workdir, entry)]
  if unfinished and jax.process_index() == 0:
    print(
      f'{len(unfinished)} of {len(todo)} runs have no result yet, being stopped'
      ' or with other workers; the same command continues.',
      file=sys.stderr,
    )
  return unfinished


def results(workdir) -> list[tuple[Entry, dict[str, Any]]]:
  """Returns the finished runs with their results, in the order of the plan.

  A result is a dict of `diverged`, a message, or '' if the run did not diverge;
  `metrics`, all held-out metrics at the end; `loss`, that of them which the run
  was trained for, None if it diverged; and `data`, a digest of the data's
  fingerprint.

  Raises:
    UserError: as `manifest.read`; or a result is of another manifest.
  """
  entries, digest = manifest.read_with_hash(workdir)
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
  # Results of older versions have no such digest.
  data = {r['data'] for _, r in finished if 'data' in r}
  if len(data) > 1:
    logging.warning(
      'The runs in %s saw %d different sets of data, so that their losses are'
      ' not comparable: see `data` in their results.',
      *(workdir, len(data)),
    )
  return finished


def directory(workdir, entry: Entry):
  """Returns the directory of a run."""
  return workdir_lib.expand(workdir) / 'runs' / entry.id


def result_path(workdir, entry: Entry):
  """Returns the path of a run's result."""
  return workdir_lib.expand(workdir) / 'results' / f'{entry.id}.json'


def _read(path) -> dict[str, Any] | None:
  """Reads a result; None if the file is missing or damaged."""
  if not path.is_file():
    return None
  try:
    result = json.loads(path.read_text())
    if {'id', 'manifest', 'diverged', 'loss', 'metrics'} <= result.keys():
      return result
  except (ValueError, AttributeError):
    pass
  logging.warning(
    '%s is damaged, so that its run counts as one without a result: `python -m'
    ' mod_jax.sweeps run` writes it again.',
    path,
  )
  return None


def _done(workdir, entry) -> bool:
  return parallel.first_says(_read(result_path(workdir, entry)) is not None)


def _train(workdir, entry, digest, allow_changed_data) -> None:
  """Trains a run, unless another worker holds its lock.

  The lock is held until the result is written, so no other worker trains the
  run again in between.
  """
  folder = directory(workdir, entry)
  try:
    with lock_lib.held(folder):
      if _done(workdir, entry):  # Another worker may have just finished it.
        return
      # Another mesh changes results by rounding only.
      config = fitted(entry.config, jax.device_count())
      outcome = phases.complete(
        config, folder, allow_changed_data=allow_changed_data
      )
      if outcome is not None and jax.process_index() == 0:
        _write(workdir, entry, digest, outcome)
  except lock_lib.InUse as refusal:
    if jax.process_index() == 0:
      print(f'{entry.id}: {refusal}', file=sys.stderr)


def _write(workdir, entry, digest, outcome):
  metrics = outcome.metrics
  task = make_task(entry.config, directory(workdir, entry))
  # Keep only what diverged and when. The rest of the message names the last
  # checkpoint, which depends on earlier interruptions of the run.
  diverged = outcome.diverged.partition(';')[0]
  result = {
    'id': entry.id,
    'manifest': digest,
    'data': fingerprint.digest(task.data_fingerprint()),
    'diverged': diverged,
    'loss': metrics.get('top_k/loss', metrics.get('loss')),
    # Sorted, since the order differs if a finished run is only read again.
    'metrics': dict(sorted(metrics.items())),
  }
  text = metrics_lib.to_json(result, indent=2) + '\n'
  workdir_lib.write_text(result_path(workdir, entry), text)
  message = (
    f'diverged: {diverged}' if diverged else f'loss {result["loss"]:.4f}'
  )
  print(f'{entry.id}: {message}', flush=True)


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.')
  flags.DEFINE_integer('index', None, 'Only this line of the manifest, from 0.')
  flags.DEFINE_string('range', None, 'Only the lines A:B, B not included.')
  flags.DEFINE_bool(
    'allow_changed_data',
    False,
    'Continue even where the data are not those that a run began with.',
  )


def main(_: Sequence[str]) -> None:
  """`python -m mod_jax.sweeps run`."""
  args = flags.FLAGS
  if not args.workdir:
    raise UserError('--workdir is missing: give the directory of the sweep.')
  chosen = _slice(args.index, args.range)
  cli.start_backend()
  run(args.workdir, chosen, allow_changed_data=args.allow_changed_data)


def _slice(index, text) -> slice:
  """Returns the lines that --index or --range choose."""
  if index is not None and text is not None:
    raise UserError('--index and --range: give one of them.')
  if index is not None:
    if index < 0:
      raise UserError(f'--index={index}: expected 0 or more.')
    return slice(index, index + 1)
  if text is None:
    return slice(None)
  match = re.fullmatch(r'(\d*):(\d*)', text)
  if not match:
    raise UserError(f'--range={text}: expected A:B, as in 0:10.')
  return slice(*(int(end) if end else None for end in match.groups()))
