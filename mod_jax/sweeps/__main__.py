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

# Modules with functions `define_flags` and `main`. Only the chosen one is
# imported, since each has its own dependencies.
_COMMANDS = {
  name: f'mod_jax.sweeps.{name}' for name in ('plan', 'run', 'fit', 'compare')
} | {'prove': 'mod_jax.prove.prove'}


def main(argv: list[str]) -> None:
  """Runs a command, given as [program, command, flags…], and exits."""
  name = argv[1] if len(argv) > 1 else ''
  if name in ('-h', '--help'):
    cli.run(lambda _: print(__doc__), argv[:1])
  if name not in _COMMANDS:
    cli.run(lambda _: config_lib.choose(name, _COMMANDS, 'command'), argv[:1])
  command = importlib.import_module(_COMMANDS[name])
  command.define_flags()
  arguments = [argv[0], *argv[2:]]
  cli.run(command.main, arguments, positional=name == 'compare')


if __name__ == '__main__':
  main(sys.argv)
