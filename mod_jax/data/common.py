"""Checks and transforms for both text and image pipelines."""

from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from mod_jax import errors


def check_source(
  config: Any,
  *,
  needed: Mapping[str, Sequence[str]],
  own: Mapping[str, Sequence[str]],
) -> None:
  """Checks the fields of a data config that depend on its `source`.

  Args:
    config: of a data set.
    needed: for each source, the fields that it requires.
    own: for each field that only some sources read, these sources.

  Raises:
    errors.UserError: a field is missing, or would silently do nothing.
  """
  for name in needed.get(config.source, ()):
    if not getattr(config, name):
      raise errors.UserError(
        f'source={config.source!r} needs {name}, which is empty'
      )
  for name, sources in own.items():
    value = getattr(config, name)
    if value and config.source not in sources:
      raise errors.UserError(
        f'{name}={value!r} is read only with source='
        f'{" or ".join(map(repr, sources))}, but source={config.source!r}: set '
        f'source or drop {name}'
      )


class Rows(grain.transforms.Map):
  """Selects rows of a batch."""

  def __init__(self, start: int, stop: int | None = None):
    """Selects rows [start, stop); None is the end."""
    self._rows = slice(start, stop)

  def map(self, element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows, as views."""
    return {key: value[self._rows] for key, value in element.items()}
