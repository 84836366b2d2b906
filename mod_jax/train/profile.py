"""Traces some steps of a run with the JAX profiler."""

import re

import jax

from mod_jax import paths
from mod_jax.errors import UserError


def parse(text: str) -> range:
  """Returns the steps of `FROM:TO`, both inclusive.

  Raises:
    UserError: the text is not of that form, or the range is empty.
  """
  match = re.fullmatch(r'(\d+):(\d+)', text.strip())
  first, last = map(int, match.groups()) if match else (0, 0)
  if not 1 <= first <= last:
    raise UserError(
      f'--profile={text}: expected the first and the last step to trace, as in'
      ' --profile=11:13.'
    )
  return range(first, last + 1)


class Profiler:
  """Traces a range of a run's steps, on each host, into `WORKDIR/profile`.

  TensorBoard's profile plugin opens the directory, and https://ui.perfetto.dev
  the file `perfetto_trace.json.gz` in it. The first step of a call includes
  compilation.
  """

  def __init__(self, workdir, steps: range | None, num_steps: int):
    """Checks the range; tracing begins with its first step.

    Args:
      workdir: directory of the run.
      steps: which to trace; None for none.
      num_steps: of the run.

    Raises:
      UserError: the run has no such steps, or its directory is not on a file
        system.
    """
    self._steps = steps or range(0)
    self._folder = paths.expand(workdir) / 'profile'
    self._tracing = False
    if not steps:
      return
    if steps[-1] > num_steps:
      raise UserError(
        f'--profile={steps[0]}:{steps[-1]}: the run has {num_steps} steps;'
        ' choose some of these.'
      )
    if paths.is_remote(workdir):
      raise UserError(
        f'--profile: traces are written to file systems only, and {workdir} is'
        ' none; profile a short run in a local --workdir.'
      )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self._stop()

  def begin(self, start: int) -> str | None:
    """To be called before training, with the number of steps taken so far.

    Returns:
      A message if all steps to trace are among those, else None.
    """
    if not self._steps or start < self._steps[-1]:
      return None
    return (
      f'--profile={self._steps[0]}:{self._steps[-1]}: these steps were taken'
      f' before, and {start + 1} is the next: nothing is traced'
    )

  def before(self, step: int) -> None:
    """To be called before each step."""
    if step in self._steps and not self._tracing:
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
      self._tracing = True

  def after(self, step: int, result) -> str | None:
    """To be called after each step; waits for the last traced step's `result`.

    Returns:
      A message with the path of the trace once it is written, else None.
    """
    if not self._tracing or step != self._steps[-1]:
      return None
    jax.block_until_ready(result)
    self._stop()
    return f'traced steps {self._steps[0]} to {step}: {self._folder}'

  def _stop(self):
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
