"""Fingerprints of data, to notice that a run would resume with other data.

A fingerprint is a small JSON object that does not depend on where the data are
stored: names, sizes and hashes of the content. Of large data a fixed sample is
read; a change outside of the sample that keeps all sizes is not detected.
`runs.origin.check_data` compares a run's fingerprints when it continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
import hashlib
import json
import os
from typing import Any

import numpy as np

from mod_jax import errors

_FILES = 2000  # Most files that are read and listed individually.
_BYTES = 2**26  # Most bytes read in all, in blocks spread over each file.
_BLOCK = 2**16
_RECORDS = 16  # Records that are read from a data set.
_THREADS = 16  # Hides the latency of network file systems.
_MAX_NAMED = 3  # Files that a message names; it only counts the rest.
_OF_FILES = ('count', 'names', 'files')  # What `of_files` returns.
_GROUPS = {'train': 'training', 'held_out': 'held-out'}


def of_files(files: Sequence[tuple[str, str]]) -> dict[str, Any]:
  """Returns the fingerprint of files, each (name, path); their order counts."""
  names = [os.fsencode(name) for name, _ in files]
  # Choose the files whose names have the smallest hashes, at most `_FILES`.
  chosen = sorted(range(len(files)), key=lambda i: _digest(names[i]))[:_FILES]
  limit = _BYTES // max(1, len(chosen))
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    samples = pool.map(lambda i: _sample(files[i][1], limit), chosen)
    samples = dict(zip(chosen, samples, strict=True))
  listed = {}
  for i in sorted(chosen):
    # Escape names that are not UTF-8, for JSON, and make equal names from two
    # directories distinct.
    name = names[i].decode('utf-8', 'backslashreplace')
    while name in listed:
      name += ', another'
    listed[name] = samples[i]
  return {
    'count': len(files),
    'names': _digest(b'\0'.join(names)),
    'files': listed,
  }


def of_arrays(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
  """Returns the fingerprint of named arrays, all of which are read."""
  hashed = hashlib.sha256()
  for name, array in arrays:
    hashed.update(f'{name} {array.dtype}{array.shape} '.encode())
    hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
  return hashed.hexdigest()


def of_records(records: Sequence[Any]) -> dict[str, Any]:
  """Returns the fingerprint of records, of which `_RECORDS` are read."""
  count = len(records)
  indices = sorted(
    {i * (count - 1) // _RECORDS for i in range(1, _RECORDS + 1)}
  )
  hashed = hashlib.sha256()
  for i in indices if count else ():
    _add(hashed, records[i])
  return {'count': count, 'sampled_records': hashed.hexdigest()[:16]}


def of_value(value: Any) -> str:
  """Returns a hash of an array, a text, or nested lists and dicts of these."""
  hashed = hashlib.sha256()
  _add(hashed, value)
  return hashed.hexdigest()[:16]


def digest(fingerprint: Mapping[str, Any]) -> str:
  """Returns a hash of a fingerprint, to compare between hosts."""
  return _digest(json.dumps(fingerprint, sort_keys=True).encode())


def differences(
  before: Mapping[str, Any], now: Mapping[str, Any], where: str = ''
) -> list[str]:
  """Returns short descriptions of the differences of two fingerprints."""
  messages, keys = [], [*before, *(key for key in now if key not in before)]
  if 'files' in before and 'files' in now:
    messages = _changed_files(before, now, where.rstrip())
    keys = [key for key in keys if key not in _OF_FILES]
  for key in keys:
    old, new = before.get(key), now.get(key)
    if old == new:
      continue
    if isinstance(old, Mapping) and isinstance(new, Mapping):
      messages += differences(old, new, f'{_GROUPS.get(key, key)} ')
    else:
      messages.append(f'{where}{key}: {old} -> {new}')
  return messages


def _changed_files(old, new, group) -> list[str]:
  if all(old[key] == new[key] for key in _OF_FILES):
    return []
  before, now = old['files'], new['files']
  messages = []
  if old['count'] == len(before) and new['count'] == len(now):
    removed = [name for name in before if name not in now]
    added = [name for name in now if name not in before]
    messages += _named(removed, group, 'gone') + _named(added, group, 'new')
  elif old['count'] != new['count']:
    messages.append(f'{old["count"]} {group} files are {new["count"]} now')
  elif old['names'] != new['names']:
    messages.append(f'{group} files have other names or another order')
  changed = [n for n in before if n in now and before[n] != now[n]]
  messages += _named(changed, group, 'changed')
  return messages or [f'{group} files stand in another order']


def _named(names, group, what) -> list[str]:
  if len(names) < 2:
    return [f'the {group} file {name} is {what}' for name in names]
  more = ', …' if len(names) > _MAX_NAMED else ''
  shown = ', '.join(names[:_MAX_NAMED]) + more
  return [f'{len(names)} {group} files are {what} ({shown})']


def _sample(path: str, limit: int) -> list[Any]:
  """Returns a file's size, and a hash of about `limit` bytes spread over it.

  A file of at most `limit` bytes is hashed whole.
  """
  hashed = hashlib.sha256()
  try:
    with open(path, 'rb', buffering=0) as file:
      size = os.fstat(file.fileno()).st_size
      blocks, length = 1, size
      if size > limit:
        length = min(_BLOCK, limit // 2)
        blocks = limit // length
      for i in range(blocks):
        file.seek((size - length) * i // max(1, blocks - 1))
        hashed.update(file.read(length))
  except OSError as e:
    raise errors.UserError(
      f'{path!r} cannot be read: {e.strerror}; check its permissions or leave '
      'it out of the data'
    ) from e
  return [size, hashed.hexdigest()[:16]]


def _add(hashed, value):
  """Updates a hash with the values, types and shapes of a record."""
  if isinstance(value, Mapping):
    for key in sorted(value):
      hashed.update(f'{key}:'.encode())
      _add(hashed, value[key])
  elif isinstance(value, list | tuple):
    hashed.update(f'[{len(value)}]'.encode())
    for item in value:
      _add(hashed, item)
  elif isinstance(value, str):
    _add(hashed, value.encode('utf-8', 'replace'))
  elif isinstance(value, bytes):
    hashed.update(f'{len(value)}:'.encode() + value)
  else:
    array = np.asarray(value)
    if array.dtype.hasobject:
      _add(hashed, array.tolist())
    else:
      hashed.update(f'{array.dtype}{array.shape}'.encode() + array.tobytes())


def _digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:16]
