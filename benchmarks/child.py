"""A script that another Python runs step by step, such as PyTorch's."""

import contextlib
import pathlib
import subprocess


@contextlib.contextmanager
def steps(python: str, script: str, *arguments: int | str):
  """Yields a function that has the script do one step, and what it is.

  The function takes what the step is asked for, and returns what it answers.

  Args:
    python: an interpreter that has what the script imports.
    script: name of the file, beside this one.
    *arguments: of the script.
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
