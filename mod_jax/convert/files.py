"""Files of named arrays: safetensors, NumPy's `.npz` and PyTorch's `.pth`."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
from typing import Any
import zipfile

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from mod_jax import paths
from mod_jax.convert import torch_files
from mod_jax.errors import UserError

SUFFIXES = ('.safetensors', '.npz', '.pth')
# Suffixes of files of `torch.save`; all are read, but only `.pth` is written.
_PYTORCH = ('.pth', '.pt', '.bin', '.ckpt', '.tar')
# Present and former file name in model directories of Hugging Face and timm.
_IN_DIRECTORY = ('model.safetensors', 'pytorch_model.bin')
# NumPy types by their names in safetensors, which supports bfloat16 because
# ml_dtypes is imported.
DTYPES = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': ml_dtypes.bfloat16,
  'I64': np.int64,
  'I32': np.int32,
  'I16': np.int16,
  'I8': np.int8,
  'U8': np.uint8,
  'BOOL': np.bool_,
}
# Methods by which NumPy compresses an `.npz`, and the largest ratio of contents
# to file size that is accepted.
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_PACKED = 16
INDEX = 'model.safetensors.index.json'  # Lists the files of a sharded model.
SHARDS = 'model-?????-of-?????.safetensors'  # Pattern of these files' names.
SHARD = 5 * 10**9  # Maximum bytes per file of weights, as in Hugging Face.


def find(path: str | os.PathLike) -> pathlib.Path:
  """Returns `path` if it is a file, or the file of weights in a directory.

  That is the index, where the weights are in several files. Raises UserError if
  there is no such file, or its suffix is not supported.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    for name in (_IN_DIRECTORY[0], INDEX, _IN_DIRECTORY[1]):
      if (path / name).is_file():
        return path / name
    raise UserError(
      f'{path} holds no {" or ".join(_IN_DIRECTORY)}, and no run: give the'
      ' directory that holds config.json, or the file of weights itself, one of'
      f' {" or ".join(SUFFIXES)}.'
    )
  if not path.is_file():
    raise paths.missing(path, on_hub=True)
  if path.suffix not in _PYTORCH and path.name != INDEX:
    check_suffix(path)
  return path


def config_json(folder: str | os.PathLike) -> dict[str, Any]:
  """Returns the fields of a directory's `config.json`; {} if there is none."""
  return paths.read_object(pathlib.Path(folder).expanduser() / 'config.json')


def copy(source: pathlib.Path, folder: pathlib.Path, names) -> None:
  """Copies the named files of a directory to `folder`; skips missing ones."""
  for name in names:
    if (source / name).is_file():
      paths.write_bytes(folder / name, (source / name).read_bytes())


def check_suffix(path: pathlib.Path) -> None:
  """Raises UserError if a path's suffix is not in `SUFFIXES`."""
  if path.suffix not in SUFFIXES:
    raise UserError(
      f'{path} ends in {path.suffix or "nothing"!r}: weights are read and'
      f' written as {" or ".join(SUFFIXES)}.'
    )


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Returns the arrays of a file, or of a model's directory, by name.

  Floating-point arrays are converted to float32.

  Raises:
    UserError: there is no such file, it cannot be read, or values are not
      finite.
  """
  path = find(path)
  if path.name == INDEX or path.suffix == '.safetensors':
    lazy = stored(path.parent) if path.name == INDEX else _headers(path)
    return {name: x.read() for name, x in lazy.items()}
  with _damage(path):
    read_all = _read_npz if path.suffix == '.npz' else torch_files.read
    arrays = read_all(path)
  return {name: _float32(x, path, name) for name, x in arrays.items()}


@contextlib.contextmanager
def _damage(path):
  """Context manager: turns exceptions, as of damaged files, into UserError."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    raise UserError(
      f'{path} cannot be read as {path.suffix[1:]} ({type(error).__name__}:'
      f' {error}): it may be damaged or cut short, so fetch or write it again.'
    ) from error


def _read_npz(path) -> dict[str, np.ndarray]:
  with zipfile.ZipFile(path) as archive:
    infos = archive.infolist()
    # Protect against decompression bombs.
    size = os.path.getsize(path)
    if sum(info.file_size for info in infos) > _MOST_PACKED * size:
      raise UserError(
        f'{path} says that it holds more than {_MOST_PACKED} times its own'
        ' size, which weights never do: fetch it from where it was published.'
      )
    if {info.compress_type for info in infos} - set(_PACKINGS):
      raise ValueError('packed otherwise than NumPy does')
    arrays = {}
    for info in infos:
      buffer = io.BytesIO(archive.read(info))  # Reading all verifies the CRC.
      name = info.filename.removesuffix('.npy')
      arrays[name] = np.lib.format.read_array(buffer, allow_pickle=False)
    return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
  """An array that is read from its file when it is converted to NumPy.

  Thus a model can be moved to devices array by array, without ever being in the
  host's memory as a whole.

  Attributes:
    shape: shape of the array.
    read: reads and returns the array.
    stored: type in the file, as a key of `DTYPES`.
  """

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]
  stored: str = 'F32'
  dtype = np.dtype(np.float32)

  def __array__(self, dtype=None, copy=None):
    return np.array(self.read(), dtype, copy=copy)


def has_stored(folder: pathlib.Path) -> bool:
  """Returns whether a directory has weights as safetensors."""
  return any((folder / name).is_file() for name in (_IN_DIRECTORY[0], INDEX))


def stored(folder: str | os.PathLike) -> dict[str, Lazy]:
  """Returns the arrays in a directory's safetensors by name, read lazily.

  The directory has one file, `model.safetensors`, or an index of several files.
  With both, the index is ignored, as in transformers: it may be left from an
  earlier model. Raises UserError if files are missing or damaged.
  """
  folder = pathlib.Path(folder).expanduser()
  single, index = folder / _IN_DIRECTORY[0], folder / INDEX
  if single.is_file():
    return _headers(single)
  if not index.is_file():
    raise UserError(
      f'{folder} holds neither {_IN_DIRECTORY[0]} nor {INDEX}: give the'
      ' directory of a model in safetensors.'
    )
  weight_map = paths.read_object(index).get('weight_map')
  if not isinstance(weight_map, dict) or not all(
    isinstance(name, str) for name in weight_map.values()
  ):
    raise UserError(f'{index} is no index of safetensors: fetch it again.')
  names = sorted(set(weight_map.values()))
  outside = [name for name in names if pathlib.PurePath(name).name != name]
  if outside:
    raise UserError(
      f'{index} names {outside[0]!r}, which is not a file of that directory: it'
      ' may be meant to read what it should not, so it is refused.'
    )
  arrays = {}
  for name in names:
    if not (folder / name).is_file():
      raise UserError(
        f'{folder} lacks {name}, which {INDEX} names: fetch it, too.'
      )
    arrays |= _headers(folder / name)
  missing = sorted(set(weight_map) - set(arrays))
  if missing:
    raise UserError(
      f'{folder}: {missing[0]} is in none of its files, although {INDEX} says'
      f' so ({len(missing)} in all): fetch them again.'
    )
  return {name: array for name, array in arrays.items() if name in weight_map}


def _headers(path) -> dict[str, Lazy]:
  """Returns a `Lazy` for each array in a safetensors file, by name.

  Only the file's header is read. Raises UserError for quantised weights.
  """

  def read(name):
    with _damage(path), safetensors.safe_open(path, 'numpy') as file:
      return _float32(file.get_tensor(name), path, name)

  arrays = {}
  with _damage(path), safetensors.safe_open(path, 'numpy') as file:
    names = file.keys()  # The file object itself is not iterable.
    for name in names:
      part = file.get_slice(name)
      arrays[name] = Lazy(
        tuple(part.get_shape()),
        functools.partial(read, name),
        part.get_dtype(),
      )
  for name, array in arrays.items():
    if array.stored not in DTYPES:
      raise UserError(
        f'{path}: {name} is of type {array.stored}, and quantised weights are'
        f' not read; expected {", ".join(DTYPES)}: fetch the model in one of'
        ' these.'
      )
  return arrays


def _float32(array, path, name) -> np.ndarray:
  array = np.asarray(array)
  # NumPy does not count bfloat16 among the floating types.
  if array.dtype.kind == 'f' or array.dtype.name == 'bfloat16':
    array = array.astype(np.float32, copy=False)
    check_finite(array, path, name)
  return array


def check_finite(array, path: str | os.PathLike, name: str) -> None:
  """Raises UserError if an array of weights has a NaN or infinity."""
  if not np.isfinite(array).all():
    raise UserError(
      f'{path}: {name} holds numbers that are not finite, of which a model'
      ' makes nonsense: it is damaged, or its training has failed.'
    )


def write(
  path: str | os.PathLike,
  arrays: Mapping[str, np.ndarray],
  *,
  torch_key: str | None = None,
) -> None:
  """Writes a file of arrays atomically, or raises UserError.

  Creates missing directories.

  Args:
    path: path of the file, with one of `SUFFIXES`.
    arrays: arrays by name; for `.pth`, float32 or int64.
    torch_key: for `.pth`, key of a dictionary under which the arrays are
      stored, as some libraries expect; None stores them at the top level.
  """
  path = pathlib.Path(path).expanduser()
  check_suffix(path)
  # Make arrays contiguous: safetensors writes their memory without regard to
  # strides.
  arrays = {name: np.asarray(a, order='C') for name, a in arrays.items()}
  try:
    with paths.replacing(path) as file:
      if path.suffix == '.npz':
        np.savez(file, **arrays)
      elif path.suffix == '.pth':
        torch_files.write(file, arrays, torch_key)
      else:
        # Hugging Face does not load files without this metadata.
        file.write(safetensors.numpy.save(arrays, {'format': 'pt'}))
  except OSError as error:
    raise UserError(
      f'{path} cannot be written ({error.strerror}): name a file in a directory'
      ' that can.'
    ) from error


def write_sharded(
  folder: pathlib.Path,
  arrays: Sequence[tuple[str, int, Callable[[], np.ndarray]]],
) -> None:
  """Writes a directory's safetensors: one file, or several with an index.

  `arrays` has (name, size in bytes, function that returns the array). Files of
  an earlier model's weights in the directory are removed.
  """
  shards, room = [], 0
  for name, size, read_one in arrays:
    if not shards or size > room:
      shards.append({})
      room = SHARD
    shards[-1][name] = read_one
    room -= size
  weight_map = {}
  for i, shard in enumerate(shards, 1):
    file = 'model.safetensors'
    if len(shards) > 1:
      file = f'model-{i:05d}-of-{len(shards):05d}.safetensors'
    write(folder / file, {name: read() for name, read in shard.items()})
    weight_map |= dict.fromkeys(shard, file)
  written = set(weight_map.values())
  if len(shards) > 1:
    total = {'total_size': sum(size for _, size, _ in arrays)}
    index = {'metadata': total, 'weight_map': weight_map}
    write_json(folder / INDEX, index, sort_keys=True)
    written.add(INDEX)
  for pattern in (_IN_DIRECTORY[0], INDEX, SHARDS):
    for file in folder.glob(pattern):
      if file.name not in written:
        file.unlink()


def write_json(path: str | os.PathLike, fields: Mapping, **kwargs) -> None:
  """Writes a JSON file atomically."""
  text = json.dumps(fields, indent=2, ensure_ascii=False, **kwargs) + '\n'
  paths.write_bytes(path, text.encode())
