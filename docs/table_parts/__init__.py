"""The functions behind `docs/tables.py`, by subject."""

import pathlib
import sys

# The benchmarks are no package, and their helpers make tables as well.
sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks'))
