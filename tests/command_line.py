"""Scripts and command lines as functions of the tests' own process."""

import contextlib
import dataclasses
import io
import pathlib
import re
import runpy
import sys
import unittest.mock

from absl import flags
import pytest

import mod_jax.cli  # noqa: F401 (Defines flags, which stay.)

ROOT = pathlib.Path(__file__).resolve().parent.parent
_OURS = ('mod_jax', 'test')


@dataclasses.dataclass(frozen=True)
class Ended:
  """What a command line came to."""

  status: int
  out: str
  err: str


def call(function, *args) -> Ended:
  """Calls what ends in SystemExit; takes away the flags that it defines."""
  known = set(flags.FLAGS)
  out, err = io.StringIO(), io.StringIO()
  try:
    with (
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
      pytest.raises(SystemExit) as ended,
    ):
      function(*args)
  finally:
    for name in set(flags.FLAGS) - known:
      # Those of other libraries were defined by being imported, once.
      if flags.FLAGS.find_module_defining_flag(name).startswith(_OURS):
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
  return Ended(ended.value.code or 0, out.getvalue(), err.getvalue())


def run(script, *args) -> Ended:
  """Runs a script of the repository as a command line would."""
  argv = [script, *map(str, args)]
  with unittest.mock.patch.object(sys, 'argv', argv):
    return call(lambda: runpy.run_path(f'{ROOT}/{script}', run_name='__main__'))


def overrides(changes) -> list[str]:
  return [f'--config.{name}={value}' for name, value in changes.items()]


def assert_refused(ended, pattern):
  """Asserts that the last line is an error that the pattern is found in."""
  assert ended.status not in (0, None)
  assert 'Traceback' not in ended.err
  lines = ended.err.splitlines()
  (line,) = [line for line in lines if line.startswith('error: ')]
  assert line == lines[-1]
  assert re.search(pattern, line), line
