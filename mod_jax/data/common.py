"""Checks and transforms that several pipelines share."""

from collections.abc import Mapping, Sequence
import multiprocessing
import os
import threading
from typing import Any

from absl import logging
import numpy as np

from mod_jax import errors


def check_source(
  config: Any,
  *,
  needed: Mapping[str, Sequence[str]],
  own: Mapping[str, Sequence[str]],
) -> None:
  """Checks the fields of a data config that depend on its `source`.

  `needed` maps a source to the fields that must not be empty. `own` maps a
  field to the only sources with which it may be set. Raises UserError if not.
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


def end_with_parent() -> None:
  """Makes a worker process exit when the process that started it has ended."""

  def wait():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def select_rows(
  batch: Mapping[str, np.ndarray], start: int, stop: int | None = None
) -> dict[str, np.ndarray]:
  """Returns rows [start, stop) of a batch; a `stop` of None is the end."""
  return {key: value[start:stop] for key, value in batch.items()}


_warned, _lock = set(), threading.Lock()


def warn_once(message: str) -> None:
  """Logs a warning, unless a thread of this process has logged it before."""
  with _lock:
    if message not in _warned:
      _warned.add(message)
      logging.warning('%s', message)
