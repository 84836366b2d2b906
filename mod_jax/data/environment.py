"""Source code of this environment: the standard library and pinned packages.

This is about six times as much text as the standard library alone, on any
machine that `make` has set up: 201 MB in 14,100 files. Copies are left out.
Generated files and tables are kept, as are four short files that are not UTF-8.
Scripts outside of the packages' folder (`../../../bin/…`) are left out: pip
writes the path of this machine's interpreter into them.
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

# Directory of the requirements files in a checkout of the project.
_ROOT = pathlib.Path(__file__).parents[2]
_PINS = ('requirements.txt', 'requirements-no-deps.txt')
_PIN = re.compile(r'([\w.-]+)==')


@functools.cache
def list_files() -> tuple[corpus.TextFile, ...]:
  """Returns the source files without copies, sorted by name.

  Names are relative to site-packages ('jax/_src/core.py') or, with the prefix
  'python/', to the standard library. The first of several equal files is kept.
  """
  files = [
    corpus.text_file(f.path, f'python/{f.name}') for f in corpus.list_stdlib()
  ]
  for distribution in _pinned().values():
    for file in distribution.files or ():
      if file.suffix == '.py' and '..' not in file.parts:
        path = os.fspath(distribution.locate_file(file))
        files.append(corpus.text_file(path, str(file)))
  return tuple(corpus.without_copies(corpus.sorted_non_empty(files)))


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages of `list_files`."""
  packages = {name: d.version for name, d in _pinned().items()}
  return {'python': platform.python_version()} | packages


def _pinned() -> Mapping[str, metadata.Distribution]:
  """Returns the pinned packages that are installed, by name.

  Packages that are missing (some systems have no wheel of them) are left out.
  Packages of another version than the pinned one are included; `versions`
  returns the installed version.
  """
  distributions = {}
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
        distributions[pin[1]] = metadata.distribution(pin[1])
      except metadata.PackageNotFoundError:
        continue
  return distributions
