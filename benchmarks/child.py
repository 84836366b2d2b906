"""Runs a script step by step under another Python, such as one with PyTorch."""

from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
import subprocess


@dataclasses.dataclass(frozen=True)
class Started:
  """A step that a script may have begun and not finished, as JAX's results."""

  step: Callable[[str], str]

  def block_until_ready(self) -> None:
    self.step('wait')


@contextlib.contextmanager
def steps(python: str, script: str, *arguments: int | str):
  """Starts a script; yields a function that runs a step, and a description.

  The function writes its argument to the script as a line, and returns the line
  with which the script answers.

  Args:
    python: an interpreter that has the script's dependencies.
    script: name of the file, beside this one.
    *arguments: arguments of the script.
  """
  path = pathlib.Path(__file__).with_name(script)
  with subprocess.Popen(
    [python, path, *map(str, arguments)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as child:
    about = child.stdout.readline().strip()
    if not about:
      raise SystemExit(f'{script} by {python} did not start; see above.')

    def step(request=''):
      print(request, file=child.stdin, flush=True)
      return child.stdout.readline()

    yield step, about


@contextlib.contextmanager
def torch_steps(python: str, kind: str, *sizes: int):
  """As `steps`, of PyTorch: its function returns when the step has begun."""
  with steps(python, 'torch_steps.py', kind, *sizes) as (step, about):

    def start(request=''):
      step(request)
      return Started(step)

    yield start, about
