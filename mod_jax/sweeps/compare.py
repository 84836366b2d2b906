"""Compares two or more runs: one table, one picture.

The picture shows their losses over steps, training FLOPs and time. Time is
computed from a run's mean seconds per step, including evaluations and saves but
not restarts, according to its history.

Two held-out losses are not compared if the runs' kinds of data, held-out data
or tokenizers are known to differ (`RecordedRun.comparable`).
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any

from absl import flags
import numpy as np

from mod_jax import config as config_lib
from mod_jax import flops, tables, viz
from mod_jax.data import prepared
from mod_jax.errors import UserError
from mod_jax.runs import checkpoints as checkpoints_lib
from mod_jax.runs import history
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import origin as origin_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
  """A run, as read from its files."""

  name: str  # In the table and the picture.
  config: ExperimentConfig
  records: Sequence[dict[str, Any]]  # The lines of its metrics file.
  step: int  # The last step in `records`.
  flops_S: np.ndarray  # Training FLOPs up to each step, 0 for step 0.
  seconds_per_step: float | None  # Mean time of a step; None if unknown.
  # Losses are comparable only between runs where these are equal: the kind of
  # data, and the tokenizer's fingerprint (None without a tokenizer).
  measured: tuple[str, str | None]
  held_out: Any  # Fingerprint of the held-out data; None if not known.

  def comparable(self, other: 'RecordedRun') -> bool:
    """Whether the two runs' losses are of the same data and tokens."""
    # Of a run without a checkpoint, nobody knows the data.
    known = None not in (self.held_out, other.held_out)
    same = not known or self.held_out == other.held_out
    return same and self.measured == other.measured

  def last(self, kind: str) -> float | None:
    """Returns the newest loss of a kind, 'train' or 'eval'; None if absent."""
    for line in reversed(self.records):
      if line['kind'] == kind:
        loss = line.get('top_k/loss', line.get('loss'))
        if loss is not None:
          return loss
    return None


def read(workdir, name: str | None = None) -> RecordedRun:
  """Reads the run in a directory, whose name the run gets if `name` is None.

  Raises:
    UserError: there is no run, or it has no metrics yet.
  """
  config = workdir_lib.read_config(workdir, ExperimentConfig)
  records = metrics_lib.read(workdir)
  if not records:
    raise UserError(
      f'{workdir} has no metrics yet: let the run take some steps first.'
    )
  task = make_task(config, workdir)
  step = max(line['step'] for line in records)
  # Count each step by itself: during a capacity warm-up, steps cost more.
  per_step = functools.cache(task.flops_per_step)
  spent = [per_step(task.static_args(i)) for i in range(step)]
  return RecordedRun(
    name=name or workdir_lib.expand(workdir).name,
    config=config,
    records=records,
    step=step,
    flops_S=np.cumsum([0.0, *spent]),
    seconds_per_step=history.seconds_per_step(metrics_lib.read_events(workdir)),
    measured=(type(task.modality).__name__, _tokenizer(task.modality)),
    held_out=_held_out(workdir, config.data),
  )


def _held_out(workdir, data) -> Any:
  """Returns the fingerprint of held-out data in the newest checkpoint.

  That of a prepared corpus is of its texts, which may also be read directly, or
  be in other shards.
  """
  directory = workdir_lib.checkpoints(workdir)
  for step in checkpoints_lib.steps(directory)[-1:]:
    if saved := checkpoints_lib.peek(directory, step):
      held_out = origin_lib.held_out(saved)
      if data.source == 'prepared':
        return prepared.texts(data.path, 'held_out', held_out)
      return held_out
  return None


def _tokenizer(modality) -> str | None:
  """Returns the tokenizer's fingerprint; None if none exists or can be read."""
  with contextlib.suppress(UserError):
    tokenizer = getattr(modality, 'tokenizer', None)
    return tokenizer and tokenizer.fingerprint
  return None


_FORMS = {
  'params': ',d',
  'steps': ',d',
  'train_flops': '.3g',
  'steps_per_second': '.3g',
  'hours': '.3g',
  'train_loss': '.4f',
  'held_out_loss': '.4f',
  'difference': '+.4f',
}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison of runs; `str()` returns the table as text."""

  runs: Sequence[RecordedRun]

  @property
  def rows(self) -> list[dict[str, Any]]:
    """A row of the table and of `compare.csv` for each run, by column."""
    return list(map(self._row, self.runs))

  def _row(self, run: RecordedRun) -> dict[str, Any]:
    first, loss = self.runs[0].last('eval'), run.last('eval')
    incomparable = None in (first, loss) or not run.comparable(self.runs[0])
    rate = run.seconds_per_step
    return {
      'run': run.name,
      'params': flops.num_params(run.config.model),
      'steps': run.step,
      'train_flops': run.flops_S[run.step],
      'steps_per_second': rate and 1 / rate,
      'hours': rate and rate * run.step / 3600,
      'train_loss': run.last('train'),
      'held_out_loss': loss,
      'difference': None if incomparable else loss - first,
    }

  def __str__(self) -> str:
    """Returns the rows, and how each config differs from the first run's."""
    lines = [[name.replace('_', ' ') for name in ('run', *_FORMS)]]
    for row in self.rows:
      cells = (
        '-' if row[name] is None else format(row[name], form)
        for name, form in _FORMS.items()
      )
      lines.append([row['run'], *cells])
    text = tables.aligned(lines)
    first, *others = self.runs
    for run in others:
      differences = [
        f'  {line}'
        for line in config_lib.diff(first.config, run.config)
        if not line.startswith('name:')
      ]
      text += ['', f'{run.name} differs from {first.name} in']
      text += differences or ['  nothing']
      if not run.comparable(first):
        text.append(
          'The losses are of other held-out data or by another tokenizer, and'
          ' so not compared.'
        )
    return '\n'.join(text)

  def figure(self, title: str = ''):
    """Returns the runs' losses over steps, training FLOPs and time."""
    names = ('name', 'records', 'flops_S', 'seconds_per_step')
    runs = [{name: getattr(run, name) for name in names} for run in self.runs]
    return viz.compared_curves(runs, title=title)


def names(workdirs: Sequence[str]) -> list[str]:
  """Returns unique ends of paths as names; equal paths raise UserError."""
  paths = [pathlib.PurePath(str(workdir)).parts for workdir in workdirs]
  for count in range(1, max(map(len, paths)) + 1):
    short = ['/'.join(parts[-count:]) for parts in paths]
    if len(set(short)) == len(short):
      return short
  raise UserError(f'{", ".join(workdirs)}: a run is named twice.')


def compare(workdirs: Sequence[str]) -> Comparison:
  """Compares runs with the first one.

  Args:
    workdirs: directories of two or more runs.

  Raises:
    UserError: fewer than two runs, one of them twice, or no run in a directory.
  """
  if isinstance(workdirs, str | os.PathLike):
    workdirs = [workdirs]
  if len(workdirs) < 2:
    raise UserError(
      f'compare: expected at least two runs, got {len(workdirs)}: name their'
      ' directories, such as runs/mod and runs/dense.'
    )
  return Comparison(
    [
      read(workdir, name)
      for workdir, name in zip(workdirs, names(workdirs), strict=True)
    ]
  )


def define_flags() -> None:
  flags.DEFINE_string('out', '.', 'Directory for compare.csv and compare.png.')


def main(argv: list[str]) -> None:
  """`python -m mod_jax.sweeps compare RUN…`."""
  comparison = compare(argv[1:])
  out = workdir_lib.expand(flags.FLAGS.out)
  workdir_lib.write_text(out / 'compare.csv', tables.csv_of(comparison.rows))
  viz.save(comparison.figure(), out / 'compare.png')
  print(comparison)
  print(f'written: compare.csv and compare.png in {out}')
