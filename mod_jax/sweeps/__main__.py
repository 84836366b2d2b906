"""Sweeps on the command line: plan, prove, run, fit and compare.

    python -m mod_jax.sweeps plan --config=FILE.py[:variant] --workdir=W
    python -m mod_jax.sweeps prove --workdir=W --topology=v5e:4x4,v5p
    python -m mod_jax.sweeps run --workdir=W [--index=I | --range=A:B]
    python -m mod_jax.sweeps fit --workdir=W
    python -m mod_jax.sweeps compare RUN RUN… [--out=DIRECTORY]

`--config.FIELD=VALUE` changes a field of the plan.
"""

import importlib
import sys

from mod_jax import cli
from mod_jax import config as config_lib

# Each is a module of this package with functions `define_flags` and `main`. It
# is only imported when used, since each has its own dependencies.
_COMMANDS = ('plan', 'prove', 'run', 'fit', 'compare')


def main(argv: list[str]) -> None:
  """Runs a command of `python -m mod_jax.sweeps`, and exits.

  Args:
    argv: the program's name, the command, and its flags.
  """
  name = argv[1] if len(argv) > 1 else ''

  def choose(_):
    config_lib.choose(name, dict.fromkeys(_COMMANDS), 'command')

  if name not in _COMMANDS:
    cli.run(choose, argv[:1])
  command = importlib.import_module(f'mod_jax.sweeps.{name}')
  command.define_flags()
  arguments = [argv[0], *argv[2:]]
  cli.run(command.main, arguments, positional=name == 'compare')


if __name__ == '__main__':
  main(sys.argv)
