"""Traces some steps of a run with the JAX profiler."""

import contextlib
import re

import jax

from mod_jax import paths
from mod_jax.errors import UserError
from mod_jax.train.hooks import Hook, OpenRun


def parse(text: str) -> range:
  """Parses the flag --profile, `FROM:TO`; the range includes both steps."""
  match = re.fullmatch(r'(\d+):(\d+)', text.strip())
  first, last = map(int, match.groups()) if match else (0, 0)
  if not 1 <= first <= last:
    raise UserError(
      f'--profile={text}: expected the first and the last step to trace, as in'
      ' --profile=11:13.'
    )
  return range(first, last + 1)


def check(workdir, steps: range | None, num_steps: int) -> None:
  """Raises UserError if a run is too short or remote to trace these steps."""
  if steps and steps[-1] > num_steps:
    raise UserError(
      f'--profile={steps[0]}:{steps[-1]}: the run has {num_steps} steps; choose'
      ' some of these.'
    )
  if steps and paths.is_remote(workdir):
    raise UserError(
      f'--profile: traces are written to file systems only, and {workdir} is'
      ' none; profile a short run in a local --workdir.'
    )


class Profiler(Hook, contextlib.AbstractContextManager):
  """Traces a range of a run's steps, on each host, into `WORKDIR/profile`.

  TensorBoard's profile plugin opens the directory, and https://ui.perfetto.dev
  the file `perfetto_trace.json.gz` in it. The first step of a call includes
  compilation. When the context exits, an unfinished trace is written.
  """

  def __init__(self, run: OpenRun, steps: range | None):
    self._progress = run.progress
    self._folder = run.workdir / 'profile'
    self._steps = steps or range(0)
    self._tracing = False

  def __exit__(self, *exc_info):
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()

  def begin(self, step, state):
    if self._steps and step >= self._steps[-1]:
      self._progress.message(
        f'--profile={self._steps[0]}:{self._steps[-1]}: these steps were taken'
        f' before, and {step + 1} is the next: nothing is traced'
      )

  def before(self, step):
    if step in self._steps and not self._tracing:
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
      self._tracing = True

  def after(self, step, state, metric_sums):
    if self._tracing and step == self._steps[-1]:
      jax.block_until_ready(metric_sums)
      self.__exit__()
      self._progress.message(
        f'traced steps {self._steps[0]} to {step}: {self._folder}'
      )
