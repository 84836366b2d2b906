"""Reads and writes PyTorch's files of weights, safely and without PyTorch.

`torch.save` writes a pickle, and unpickling can run arbitrary code. Here the
pickle's instructions are interpreted without importing or calling anything that
they name: names are only compared with a short list of those that tensors and
dictionaries need, and all others are refused.
"""

from collections.abc import Callable, Mapping
import dataclasses
import io
import math
import os
import pathlib
import pickletools
import struct
from typing import Any, BinaryIO
import zipfile

import jax.numpy as jnp
import numpy as np

from mod_jax.errors import UserError

# Keys under which checkpoints of training scripts store the weights.
_WEIGHTS = ('model', 'state_dict')
# Limit for the pickle of names and shapes; that of ViT-L has 60 kB.
_PICKLE_BYTES = 64 << 20
# Start of files in PyTorch's format before 1.6, which some releases still use.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

_TYPES = {
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


@dataclasses.dataclass(frozen=True)
class _Name:
  """A function or type that the pickle names."""

  name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
  """A flat array in the file, by its key."""

  key: str
  dtype: np.dtype
  count: int

  @property
  def num_bytes(self) -> int:
    return self.count * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A view of a storage; offset and strides count elements."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)


def _tensor(storage, offset, shape, strides, *_) -> _Tensor:
  """Returns a tensor, ignoring the arguments for gradients and hooks."""
  numbers = (offset, *shape, *strides)
  if not isinstance(storage, _Storage) or len(shape) != len(strides):
    raise ValueError('a tensor without numbers')
  if not all(isinstance(n, int) and n >= 0 for n in numbers):
    raise ValueError('a tensor whose shape is none')
  tensor = _Tensor(storage, offset, tuple(shape), tuple(strides))
  last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
  if tensor.size and last >= storage.count:
    raise ValueError('a tensor beyond its storage')
  return tensor


def _dictionary(pairs=()) -> dict:
  # Hashing deeply nested tuples could take exponential time.
  if not all(isinstance(key, str | int) for key, _ in pairs):
    raise ValueError('a key that is neither a name nor a number')
  return dict(pairs)


# Replacements for the functions that a pickle may call.
_CALLS = {
  'collections.OrderedDict': _dictionary,
  'torch.Size': tuple,
  'torch._utils._rebuild_tensor': _tensor,
  'torch._utils._rebuild_tensor_v2': _tensor,
  'torch._utils._rebuild_parameter': lambda tensor, *_: tensor,
  # Settings of a training run, which are not needed.
  'argparse.Namespace': lambda *_: {},
}


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the tensors of a file that `torch.save` wrote, by name.

  The file has a dictionary of tensors, at the top level or under the key
  `model` or `state_dict`. A prefix `module.` that all names have is removed.

  Args:
    path: of the file, a zip archive or in the format before PyTorch 1.6.

  Raises:
    UserError: the file has anything but tensors and plain values, is not in the
      format of `torch.save`, or cannot be opened.
  """
  try:
    with path.open('rb') as file:
      if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
          tensors, data, big = _read_zip(archive, path)
          return _arrays(tensors, data, big, path)
      file.seek(0)
      tensors, data, big = _read_legacy(file, path)
      return _arrays(tensors, data, big, path)
  except UserError:
    raise
  # Damaged pickles raise many types of exceptions.
  except Exception as error:
    raise UserError(
      f'{path} cannot be read as PyTorch writes weights'
      f' ({type(error).__name__}: {error}): it may be damaged or cut short, so'
      ' fetch or write it again.'
    ) from error


def _read_zip(archive: zipfile.ZipFile, path: pathlib.Path):
  """Returns tensors by name, a reader of storages, and if it is big-endian."""
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
  size = os.path.getsize(path)

  def entry(name):
    info = infos[name]
    # Protect against decompression bombs.
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
      raise UserError(
        f'{path} has the compressed entry {name!r}, which torch.save never'
        ' writes: fetch the file from where it was published.'
      )
    return archive.read(info)

  if infos[pickles[0]].file_size > _PICKLE_BYTES:
    raise ValueError('the list of tensors is longer than 64 MiB')
  order = f'{folder}/byteorder'
  big = order in infos and entry(order) == b'big'
  value, _ = _value(io.BytesIO(entry(pickles[0])), path)

  def data(storage):
    name = f'{folder}/data/{storage.key}'
    if infos[name].file_size != storage.num_bytes:
      raise ValueError('a storage of another length')
    return entry(name)

  return _weights(value, path), data, big


def _read_legacy(file: BinaryIO, path: pathlib.Path):
  """Returns tensors by name, a reader of storages, and if it is big-endian."""
  beginning = [_value(file, path)[0] for _ in range(2)]
  if beginning != [_MAGIC, _PROTOCOL]:
    raise ValueError('neither a zip archive nor the format before it')
  machine, _ = _value(file, path)
  value, storages = _value(file, path)
  keys, _ = _value(file, path)
  offsets = {}
  for key in keys:
    file.seek(8, os.SEEK_CUR)  # Skip the size, which the pickle also has.
    offsets[key] = file.tell()
    file.seek(storages[key].num_bytes, os.SEEK_CUR)

  def data(storage):
    file.seek(offsets[storage.key])
    return file.read(storage.num_bytes)

  return _weights(value, path), data, not machine['little_endian']


def _weights(value: Any, path: pathlib.Path) -> dict[str, _Tensor]:
  """Returns the tensors by name from the contents of a file."""
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
    if not isinstance(name, str) or not isinstance(tensor, _Tensor):
      raise UserError(
        f'{path} holds {name!r} among its weights, which is no tensor: in'
        ' PyTorch, save model.state_dict() alone.'
      )
  if all(name.startswith('module.') for name in value):
    value = {k.removeprefix('module.'): v for k, v in value.items()}
  return value


def _arrays(
  tensors: Mapping[str, _Tensor],
  data: Callable[[_Storage], bytes],
  big_endian: bool,
  path: pathlib.Path,
) -> dict[str, np.ndarray]:
  # Limit the memory: with strides of 0, a small storage can be a huge tensor,
  # and entries of an archive can overlap.
  size = os.path.getsize(path)
  storages = {tensor.storage for tensor in tensors.values()}
  if (
    sum(tensor.size for tensor in tensors.values()) > size
    or sum(storage.num_bytes for storage in storages) > size
  ):
    raise UserError(
      f'{path} has tensors of more numbers than it holds bytes: in PyTorch,'
      ' save them as they are, not expanded.'
    )
  flat = {}
  arrays = {}
  for name, tensor in tensors.items():
    storage = tensor.storage
    if storage.key not in flat:
      dtype = storage.dtype.newbyteorder('>' if big_endian else '<')
      numbers = np.frombuffer(data(storage), dtype, storage.count)
      flat[storage.key] = numbers.astype(storage.dtype, copy=False)
    strides = [n * storage.dtype.itemsize for n in tensor.strides]
    arrays[name] = np.lib.stride_tricks.as_strided(
      flat[storage.key][tensor.offset :], tensor.shape, strides, writeable=False
    )
  return arrays


# Instructions that push their argument.
_LITERALS = frozenset(
  (
    *('BININT', 'BININT1', 'BININT2', 'LONG1', 'LONG4', 'BINFLOAT'),
    *('BINUNICODE', 'SHORT_BINUNICODE', 'BINSTRING', 'SHORT_BINSTRING'),
  )
)
_EMPTY = {'EMPTY_DICT': dict, 'EMPTY_LIST': list, 'EMPTY_TUPLE': tuple}
_CONSTANTS = {'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}
_TUPLES = {'TUPLE1': 1, 'TUPLE2': 2, 'TUPLE3': 3}


def _value(
  file: BinaryIO, path: pathlib.Path
) -> tuple[Any, dict[str, _Storage]]:
  """Interprets a pickle; returns its value, and its storages by key.

  Args:
    file: positioned at the pickle's start, and afterwards at its end.
    path: for messages.
  """
  stack, marks, memo, storages = [], [], {}, {}

  def pop(count):
    items = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return items

  def pop_to_mark():
    return pop(len(stack) - marks.pop())

  for opcode, arg, _ in pickletools.genops(file):
    name = opcode.name
    if name == 'PROTO':
      pass
    elif name == 'STOP':
      return stack.pop(), storages
    elif name == 'MARK':
      marks.append(len(stack))
    elif name in _LITERALS:
      stack.append(arg)
    elif name in _CONSTANTS:
      stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
      stack.append(_EMPTY[name]())
    elif name == 'TUPLE':
      stack.append(tuple(pop_to_mark()))
    elif name in _TUPLES:
      stack.append(tuple(pop(_TUPLES[name])))
    elif name == 'APPEND':
      stack[-2].append(stack.pop())
    elif name == 'APPENDS':
      items = pop_to_mark()
      stack[-1].extend(items)
    elif name == 'SETITEM':
      stack[-3].update(_dictionary([pop(2)]))
    elif name == 'SETITEMS':
      items = pop_to_mark()
      pairs = zip(items[::2], items[1::2], strict=True)
      stack[-1].update(_dictionary(list(pairs)))
    elif name in ('BINPUT', 'LONG_BINPUT'):
      memo[arg] = stack[-1]
    elif name in ('BINGET', 'LONG_BINGET'):
      stack.append(memo[arg])
    elif name == 'GLOBAL':
      stack.append(_known(arg.replace(' ', '.'), path))
    elif name == 'BINPERSID':
      storage = _storage(*stack.pop())
      stack.append(storages.setdefault(storage.key, storage))
    elif name in ('REDUCE', 'NEWOBJ'):
      called, args = pop(2)
      stack.append(_CALLS[called.name](*args))
    elif name == 'BUILD':
      stack.pop()  # Ignore a dictionary's attributes: versions of modules.
    else:
      raise ValueError(f'the instruction {name}')
  raise EOFError('no end')


def _known(name: str, path: pathlib.Path) -> _Name:
  if name not in _CALLS and name not in _TYPES:
    raise UserError(
      f'{path} asks for {name}, and nothing is run here that a file asks for:'
      ' in PyTorch, save model.state_dict() alone, or take a file of tensors.'
    )
  return _Name(name)


def _storage(kind, of_type, key, device, count, view=None) -> _Storage:
  del device
  if kind != 'storage' or not isinstance(key, str) or view is not None:
    raise ValueError('something other than a storage')
  if not isinstance(count, int) or count < 0:
    raise ValueError('a storage without a size')
  return _Storage(key, _TYPES[of_type.name], count)


def write(
  file: BinaryIO, arrays: Mapping[str, np.ndarray], key: str | None = None
) -> None:
  """Writes float32 or int64 arrays for `torch.load`, as tensors by name.

  Args:
    file: an empty file.
    arrays: by name.
    key: of a dictionary under which the tensors are stored; None stores them at
      the top level.
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
