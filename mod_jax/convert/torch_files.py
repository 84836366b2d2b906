"""Reads and writes PyTorch's files of weights, safely and without PyTorch.

`torch.save` writes a pickle, and unpickling can run arbitrary code. This module
executes only the pickle instructions that weights need, replaces the few
functions that weights name by its own, and refuses all others.
"""

from collections.abc import Mapping
import io
import math
import os
import pathlib
import pickle
import struct
from typing import Any, BinaryIO
import zipfile

import jax.numpy as jnp
import numpy as np

from mod_jax.errors import UserError

# Keys under which checkpoints of training scripts store the weights.
_WEIGHTS = ('model', 'state_dict')
# Limit for the pickle of names and shapes; the pickle of ViT-L has 60 kB.
_PICKLE_BYTES = 64 << 20
# Start of files in PyTorch's format before 1.6, which some releases still use.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def _tensor(storage, offset, shape, strides, *_) -> np.ndarray:
  """Returns a view of a 1-D array; offset and strides count its elements."""
  numbers = (offset, *shape, *strides)
  if not isinstance(storage, np.ndarray) or storage.ndim != 1:
    raise ValueError('a tensor without numbers')
  if not all(isinstance(n, int) and n >= 0 for n in numbers):
    raise ValueError('a tensor whose shape is none')
  last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
  if math.prod(shape) and last >= len(storage):
    raise ValueError('a tensor beyond its storage')
  return np.lib.stride_tricks.as_strided(
    storage[offset:],
    tuple(shape),
    [n * storage.itemsize for n in strides],
    writeable=False,
  )


class _Dictionary(dict):
  """A dictionary whose keys are strings and integers only.

  To hash a key of deeply nested tuples could take exponential time.
  """

  def __init__(self, pairs=()):
    super().__init__()
    for key, value in pairs:
      self[key] = value

  def __setitem__(self, key, value):
    if not isinstance(key, str | int):
      raise ValueError('a key that is neither a name nor a number')
    super().__setitem__(key, value)


# Replacements for the functions and classes that a pickle may name.
_GLOBALS = {
  'collections.OrderedDict': _Dictionary,
  'argparse.Namespace': _Dictionary,  # Settings of a training run, ignored.
  'torch.Size': tuple,
  'torch._utils._rebuild_tensor': _tensor,
  'torch._utils._rebuild_tensor_v2': _tensor,
  'torch._utils._rebuild_parameter': lambda tensor, *_: tensor,
  'torch.FloatStorage': np.dtype('f4'),
  'torch.DoubleStorage': np.dtype('f8'),
  'torch.HalfStorage': np.dtype('f2'),
  'torch.BFloat16Storage': np.dtype(jnp.bfloat16),
  'torch.LongStorage': np.dtype('i8'),
  'torch.IntStorage': np.dtype('i4'),
  'torch.ShortStorage': np.dtype('i2'),
  'torch.CharStorage': np.dtype('i1'),
  'torch.ByteStorage': np.dtype('u1'),
  'torch.BoolStorage': np.dtype('?'),
}
_INSTRUCTIONS = (
  *('PROTO', 'STOP', 'MARK', 'NONE', 'NEWTRUE', 'NEWFALSE', 'BINFLOAT'),
  *('BININT', 'BININT1', 'BININT2', 'LONG1', 'LONG4', 'BINSTRING'),
  *('SHORT_BINSTRING', 'BINUNICODE', 'SHORT_BINUNICODE', 'EMPTY_LIST'),
  *('EMPTY_TUPLE', 'TUPLE', 'TUPLE1', 'TUPLE2', 'TUPLE3', 'APPEND', 'APPENDS'),
  *('SETITEM', 'SETITEMS', 'BINPUT', 'LONG_BINPUT', 'BINGET', 'LONG_BINGET'),
  *('GLOBAL', 'BINPERSID', 'REDUCE', 'NEWOBJ'),
)


# Extends pickle's reader in Python. The reader in C allocates as many places
# for objects as the largest index in the file, which a bad file can make huge.
class _Unpickler(pickle._Unpickler):
  """Reads a pickle. Then `storages` has arrays of zeros, by key, to fill."""

  dispatch = {
    code: pickle._Unpickler.dispatch[code]
    for code in (getattr(pickle, name)[0] for name in _INSTRUCTIONS)
  } | {
    pickle.EMPTY_DICT[0]: lambda self: self.append(_Dictionary()),
    # Ignores attributes of dictionaries, which are versions of modules.
    pickle.BUILD[0]: lambda self: self.stack.pop(),
  }

  def __init__(self, file: BinaryIO, path: pathlib.Path):
    super().__init__(file, encoding='latin1')
    self.path, self.room, self.storages = path, os.path.getsize(path), {}

  def find_class(self, module, name):
    name = f'{module}.{name}'
    if name not in _GLOBALS:
      raise UserError(
        f'{self.path} asks for {name}, and nothing is run here that a file asks'
        ' for: in PyTorch, save model.state_dict() alone, or take a file of'
        ' tensors.'
      )
    return _GLOBALS[name]

  def persistent_load(self, pid):
    kind, dtype, key, _, count, *view = pid
    if (
      (kind, view) not in (('storage', []), ('storage', [None]))
      or not isinstance(key, str)
      or not isinstance(dtype, np.dtype)
      or not isinstance(count, int)
    ):
      raise ValueError('something other than a storage')
    if key not in self.storages:
      self.room -= count * dtype.itemsize
      if self.room < 0:
        raise _too_large(self.path)
      self.storages[key] = np.zeros(count, dtype)
    return self.storages[key]


def _too_large(path) -> UserError:
  return UserError(
    f'{path} has tensors of more numbers than it holds bytes: in PyTorch, save'
    ' them as they are, not expanded.'
  )


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the tensors of a file that `torch.save` wrote, by name.

  The file has a dictionary of tensors, at the top level or under the key
  `model` or `state_dict`. A prefix `module.` that all names have is removed.
  Damaged files raise exceptions of many types. The file is a zip archive, or in
  the format before PyTorch 1.6.
  """
  with path.open('rb') as file:
    if zipfile.is_zipfile(file):
      with zipfile.ZipFile(file) as archive:
        return _weights(_read_zip(archive, path), path)
    file.seek(0)
    return _weights(_read_legacy(file, path), path)


def _read_zip(archive: zipfile.ZipFile, path: pathlib.Path) -> Any:
  infos = {info.filename: info for info in archive.infolist()}
  pickles = [name for name in infos if name.split('/')[1:] == ['data.pkl']]
  if len(pickles) != 1:
    raise ValueError(f'{len(pickles)} entries data.pkl')
  folder = pickles[0].split('/')[0]
  if f'{folder}/constants.pkl' in infos:
    raise UserError(
      f'{path} is a program of TorchScript: in PyTorch, save the state_dict()'
      ' of torch.jit.load(path), and give that file.'
    )

  def entry(name, most):
    info = infos[f'{folder}/{name}']
    # Protect against decompression bombs.
    if info.compress_type != zipfile.ZIP_STORED:
      raise UserError(
        f'{path} has the compressed entry {info.filename!r}, which torch.save'
        ' never writes: fetch the file from where it was published.'
      )
    if info.file_size > most:
      raise ValueError(f'{info.filename} is longer than expected')
    return archive.read(info)

  order = '<'
  if f'{folder}/byteorder' in infos and entry('byteorder', 9) == b'big':
    order = '>'
  unpickler = _Unpickler(io.BytesIO(entry('data.pkl', _PICKLE_BYTES)), path)
  value = unpickler.load()
  for key, storage in unpickler.storages.items():
    _fill(storage, entry(f'data/{key}', storage.nbytes), order)
  return value


def _read_legacy(file: BinaryIO, path: pathlib.Path) -> Any:
  if [_Unpickler(file, path).load() for _ in range(2)] != [_MAGIC, _PROTOCOL]:
    raise ValueError('neither a zip archive nor the format before it')
  machine = _Unpickler(file, path).load()
  order = '<' if machine['little_endian'] else '>'
  unpickler = _Unpickler(file, path)
  value = unpickler.load()
  for key in map(str, _Unpickler(file, path).load()):
    storage = unpickler.storages[key]
    file.seek(8, os.SEEK_CUR)  # Skip the size, which the pickle also has.
    _fill(storage, file.read(storage.nbytes), order)
  return value


def _fill(storage: np.ndarray, data: bytes, order: str) -> None:
  if len(data) != storage.nbytes:
    raise ValueError('a storage of another length')
  storage[:] = np.frombuffer(data, storage.dtype.newbyteorder(order))


def _weights(value: Any, path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the tensors by name in `value`, a file's unpickled contents."""
  for key in _WEIGHTS:
    if isinstance(value, dict) and isinstance(value.get(key), dict):
      value = value[key]
      break
  if not isinstance(value, dict) or not value:
    raise UserError(
      f'{path} holds no dictionary of weights, neither by itself nor as'
      f' {" or ".join(_WEIGHTS)}: in PyTorch, save model.state_dict().'
    )
  for name, tensor in value.items():
    if not isinstance(name, str) or not isinstance(tensor, np.ndarray):
      raise UserError(
        f'{path} holds {name!r} among its weights, which is no tensor: in'
        ' PyTorch, save model.state_dict() alone.'
      )
  # With strides of 0, a small storage can be a huge tensor.
  if sum(tensor.size for tensor in value.values()) > os.path.getsize(path):
    raise _too_large(path)
  if all(name.startswith('module.') for name in value):
    value = {k.removeprefix('module.'): v for k, v in value.items()}
  return value


def write(
  file: BinaryIO, arrays: Mapping[str, np.ndarray], key: str | None = None
) -> None:
  """Writes float32 or int64 arrays for `torch.load`, as tensors by name.

  With a `key`, the tensors are stored in a dictionary under this key.
  """
  # Opcodes of pickle protocol 2, which `pickletools` documents.
  ordered = b'ccollections\nOrderedDict\n)R'
  contents = [b'\x80\x02', *([b'}', _text(key)] if key else ()), ordered, b'(']
  entries = {}
  for number, (name, array) in enumerate(arrays.items()):
    kind = {'f': b'FloatStorage', 'i': b'LongStorage'}[array.dtype.kind]
    strides = [n // array.itemsize for n in array.strides]
    contents += [
      *(_text(name), b'ctorch._utils\n_rebuild_tensor_v2\n(('),
      *(_text('storage'), b'ctorch\n', kind, b'\n', _text(str(number))),
      *(_text('cpu'), _integer(array.size), b'tQ', _integer(0)),
      *(b'(', *map(_integer, array.shape), b't'),
      *(b'(', *map(_integer, strides), b't'),
      *(b'\x89', ordered, b'tR'),
    ]
    entries[f'data/{number}'] = array.tobytes()
  contents += [b'u', *([b's'] if key else ()), b'.']
  entries = {
    **{'data.pkl': b''.join(contents), 'byteorder': b'little'},
    **{**entries, 'version': b'3\n'},
  }
  with zipfile.ZipFile(file, 'w') as archive:
    for name, data in entries.items():
      # ZipInfo has a fixed time stamp, so that equal weights give equal files.
      archive.writestr(zipfile.ZipInfo(f'archive/{name}'), data)


def _text(value: str) -> bytes:
  encoded = value.encode()
  return b'X' + struct.pack('<I', len(encoded)) + encoded


def _integer(value: int) -> bytes:
  encoded = value.to_bytes(value.bit_length() // 8 + 1, 'little', signed=True)
  return b'\x8a' + bytes([len(encoded)]) + encoded
