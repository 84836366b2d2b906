"""Compares two or more runs: one table, one picture.

The picture shows their losses over steps, training FLOPs and time. Time is
computed from a run's mean seconds per step, including evaluations and saves but
not restarts, according to its `history.jsonl`.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any

from absl import flags
import numpy as np

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.errors import UserError
from mod_jax.runs import history
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import tables
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run, as read from its files.

  Attributes:
    name: name in the table and the picture.
    config: the run's config.
    records: the lines of its metrics file.
    step: the last step in `records`.
    flops_S: training FLOPs up to each step, beginning with 0 for step 0.
    seconds_per_step: mean time of a step; None if unknown.
  """

  name: str
  config: ExperimentConfig
  records: Sequence[dict[str, Any]]
  step: int
  flops_S: np.ndarray
  seconds_per_step: float | None

  def last(self, kind: str) -> float | None:
    """Returns the newest loss of a kind, 'train' or 'eval'; None if absent."""
    for line in reversed(self.records):
      if line['kind'] == kind:
        loss = line.get('top_k/loss', line.get('loss'))
        if loss is not None:
          return loss
    return None


def read(workdir, name: str | None = None) -> Run:
  """Reads the run in a directory.

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
  # Steps of a capacity warm-up cost more than those after it.
  per_step = functools.cache(task.flops_per_step)
  spent = [per_step(task.static_args(i)) for i in range(step)]
  return Run(
    name=name or workdir_lib.expand(workdir).name,
    config=config,
    records=records,
    step=step,
    flops_S=np.cumsum([0.0, *spent]),
    seconds_per_step=_seconds_per_step(history.read(workdir)),
  )


def _seconds_per_step(events) -> float | None:
  """Returns the mean over all sessions that ended orderly, or None.

  A session is timed from the end of its first step, so without compilation.
  """
  steps, seconds, first = 0, 0.0, None
  for event in events:
    if event['event'] == 'start':
      first = None  # The previous session was killed: its end is unknown.
    elif event['event'] == 'first_step':
      first = event
    elif event['event'] == 'end' and first is not None:
      steps += event['step'] - first['step']
      seconds += event['time'] - first['time']
      first = None
  return seconds / steps if steps > 0 else None


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
  """Returns a row of the table and of `compare.csv` for each run."""
  table_rows = []
  for run in runs:
    loss, rate = run.last('eval'), run.seconds_per_step
    first = runs[0].last('eval')
    comparable = loss is not None and first is not None
    table_rows.append(
      {
        'run': run.name,
        'params': flops.num_params(run.config.model),
        'steps': run.step,
        'train_flops': run.flops_S[run.step],
        'steps_per_second': rate and 1 / rate,
        'hours': rate and rate * run.step / 3600,
        'train_loss': run.last('train'),
        'held_out_loss': loss,
        'difference': loss - first if comparable else None,
      }
    )
  return table_rows


def table(runs: Sequence[Run]) -> str:
  """Returns the rows as text, and how configs differ from the first run's."""
  forms = {
    'params': ',d',
    'steps': ',d',
    'train_flops': '.3g',
    'steps_per_second': '.3g',
    'hours': '.3g',
    'train_loss': '.4f',
    'held_out_loss': '.4f',
    'difference': '+.4f',
  }
  names = ['run', *forms]
  lines = [[name.replace('_', ' ') for name in names]]
  for row in rows(runs):
    lines.append(
      [
        row['run'],
        *(
          '-' if row[name] is None else format(row[name], form)
          for name, form in forms.items()
        ),
      ]
    )
  text = tables.aligned(lines)
  for run in runs[1:]:
    differences = [
      line
      for line in config_lib.diff(runs[0].config, run.config)
      if not line.startswith('name:')
    ]
    text += ['', f'{run.name} differs from {runs[0].name} in']
    text += [f'  {line}' for line in differences] or ['  nothing']
  return '\n'.join(text)


def picture(runs: Sequence[Run], *, title: str = ''):
  """Returns the runs' losses over steps, training FLOPs and time."""
  return viz.compared_curves(
    [
      {
        'name': run.name,
        'records': run.records,
        'flops_S': run.flops_S,
        'seconds_per_step': run.seconds_per_step,
      }
      for run in runs
    ],
    title=title,
  )


def names(workdirs: Sequence[str]) -> list[str]:
  """Returns names for runs: the fewest last path parts that are unique."""
  paths = [pathlib.PurePath(str(workdir)).parts for workdir in workdirs]
  for count in range(1, max(map(len, paths)) + 1):
    short = ['/'.join(parts[-count:]) for parts in paths]
    if len(set(short)) == len(short):
      return short
  raise UserError(f'{", ".join(workdirs)}: a run is named twice.')


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison of runs; `str()` returns the table as text."""

  runs: Sequence[Run]

  @property
  def rows(self) -> list[dict[str, Any]]:
    """A row of the table for each run, by column."""
    return rows(self.runs)

  def __str__(self) -> str:
    return table(self.runs)

  def figure(self, title: str = ''):
    """Returns the runs' losses over steps, training FLOPs and time."""
    return picture(self.runs, title=title)


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
  workdir_lib.write_text(out / 'compare.csv', tables.csv_text(comparison.rows))
  viz.save(comparison.figure(), out / 'compare.png')
  print(comparison)
