"""Time of `import mod_jax` beyond that of `import jax`, and what it loads.

    python benchmarks/import_time.py

Each statement runs in fresh processes after `import jax`, which is timed
separately. The statements import `mod_jax`, the models, and `mod_jax.load`,
which imports all that a run may need. The result is written beside this file as
JSON.
"""

import json
import os
import subprocess
import sys

from absl import app, flags

from mod_jax import timing
import results as results_lib

_ROUNDS = flags.DEFINE_integer('rounds', 9, 'Processes of each.')
# Libraries that are slow to import and that most programs do not need.
_HEAVY = (
  *('grain', 'matplotlib', 'orbax', 'pyarrow', 'scipy.stats', 'sklearn'),
  *('tensorboardX', 'tensorflow', 'tensorflow_datasets', 'torch'),
)
_STATEMENTS = {
  'mod_jax': 'import mod_jax',
  'models': 'from mod_jax.models import dynamic_vit, lm, vit',
  'load': 'import mod_jax; mod_jax.load',
}
_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
{statement}
end = time.perf_counter()
heavy = [name for name in {heavy} if name in sys.modules]
print(json.dumps([middle - start, end - middle, heavy]))
"""


def measure(statement: str) -> tuple[float, float, list[str]]:
  """Times imports in a fresh process.

  Args:
    statement: what is imported after JAX.

  Returns:
    The seconds of JAX's import, those of the statement, and the heavy libraries
    that are loaded then.
  """
  program = _PROGRAM.format(statement=statement, heavy=_HEAVY)
  command = [sys.executable, '-c', program]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return json.loads(done.stdout)


def main(_):
  seconds = {name: [] for name in ('jax', *_STATEMENTS)}
  loaded = {}
  for _ in range(_ROUNDS.value):
    for name, statement in _STATEMENTS.items():
      jax_seconds, more_seconds, loaded[name] = measure(statement)
      seconds['jax'].append(jax_seconds)
      seconds[name].append(more_seconds)
  results = {
    # Mean number of running processes in the last minute, including these.
    'load_average': os.getloadavg()[0],
    # Of `import jax`, and what each statement adds to it.
    'median_seconds': timing.medians(seconds),
    'heavy_loaded': loaded,
    'seconds': seconds,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
