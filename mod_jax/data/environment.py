"""The source text of this environment: Python's own, and the pinned packages'.

About six times the standard library, on any machine that `make` has set up:
201 MB in 14,100 files without copies. Only the packages that the project pins
are taken, so what else a person installs changes nothing; a new pin does, which
the fingerprint of the data tells.

All of it is kept but copies. Looked at, one by one:

* No file is a giant. The largest are generated dialects of MLIR (1.0, .8 and
  .5 MB) and the help texts of `pydoc` (.8 MB); tables of numbers reach .3 MB.
  A bound on the size would first cut good modules of .4 MB.
* Four files, 510 bytes in all, are not UTF-8. They are read as any such text
  (`corpus.text_chunks`); finding them means reading everything at each start.
* Scripts outside of the packages' folder (`../../../bin/…`) are left out: pip
  writes the path of this machine's interpreter into them.
* Packages of equal or similar origin (`setuptools/_vendor`) hold equal files,
  of which one stays, and similar ones, which may be on both sides of the split.
"""

from collections.abc import Mapping
import functools
from importlib import metadata
import os
import pathlib
import platform
import re

from mod_jax import errors
from mod_jax.data import corpus

# Beside the package, in a checkout of the project.
_ROOT = pathlib.Path(__file__).parents[2]
_PINS = ('requirements.txt', 'requirements-no-deps.txt')
_PIN = re.compile(r'([\w.-]+)==')


@functools.cache
def list_files() -> tuple[corpus.TextFile, ...]:
  """Returns the source files without copies, sorted by name.

  A package's file is called as below its folder ('jax/_src/core.py'), one of
  the standard library 'python/…'. Of equal files the first is kept. The files
  of a process are listed once.

  Raises:
    errors.UserError: this is no checkout, or Python was installed without its
      sources.
  """
  files = [
    corpus.text_file(f.path, f'python/{f.name}') for f in corpus.list_stdlib()
  ]
  for distribution in _pinned().values():
    for file in distribution.files or ():
      if file.suffix == '.py' and '..' not in file.parts:
        path = os.fspath(distribution.locate_file(file))
        files.append(corpus.text_file(path, str(file)))
  return tuple(corpus.distinct(corpus.sorted_non_empty(files)))


def versions() -> dict[str, str]:
  """Returns the version of Python and of each package that is listed."""
  packages = {name: d.version for name, d in _pinned().items()}
  return {'python': platform.python_version()} | packages


def _pinned() -> Mapping[str, metadata.Distribution]:
  """Returns the pinned packages that are installed, by name.

  One that is not (there are systems without a wheel of it) is left out, and
  one of another version is taken: `versions` tells.
  """
  found = {}
  for name in _PINS:
    try:
      text = (_ROOT / name).read_text('utf-8')
    except OSError as error:
      raise errors.UserError(
        f"source='environment' is the text of the packages that {name} pins,"
        f' which is not in {str(_ROOT)!r}: run from a checkout of the project,'
        " or use source='stdlib' or 'files'"
      ) from error
    for pin in filter(None, map(_PIN.match, text.splitlines())):
      try:
        found[pin[1]] = metadata.distribution(pin[1])
      except metadata.PackageNotFoundError:
        continue
  return found
