"""Files of named arrays: safetensors, NumPy's `.npz` and PyTorch's `.pth`."""

from collections.abc import Container, Mapping
import dataclasses
import io
import os
import pathlib
import shutil
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
# By name in safetensors, which supports bfloat16 if ml_dtypes is imported.
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
# Compression of an `.npz`, and the largest ratio of contents to file size.
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_PACKED = 16
INDEX = 'model.safetensors.index.json'  # Lists the files of a sharded model.


def find(path: str | os.PathLike) -> pathlib.Path:
  """Returns the file of weights at a path: itself, or one in a directory.

  Raises:
    UserError: there is no file, or none of a kind that `read` supports.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    for name in _IN_DIRECTORY:
      if (path / name).is_file():
        return path / name
    raise UserError(
      f'{path} holds no {" or ".join(_IN_DIRECTORY)}: give the file of weights'
      f' itself, one of {" or ".join(SUFFIXES)}.'
    )
  if not path.is_file():
    raise paths.missing(path)
  if path.suffix not in _PYTORCH:
    check_suffix(path)
  return path


def remove_others(folder: pathlib.Path, written: Container[str]) -> None:
  """Removes the files of an earlier model from a directory.

  Args:
    folder: directory.
    written: names of the present model's files, which are kept.
  """
  shards = folder.glob('model-?????-of-?????.safetensors')
  for file in (folder / _IN_DIRECTORY[0], folder / INDEX, *shards):
    if file.name not in written:
      file.unlink(missing_ok=True)


def check_suffix(path: pathlib.Path) -> None:
  """Raises UserError if a path's suffix is not in `SUFFIXES`."""
  if path.suffix not in SUFFIXES:
    raise UserError(
      f'{path} ends in {path.suffix or "nothing"!r}: weights are read and'
      f' written as {" or ".join(SUFFIXES)}.'
    )


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Returns arrays by name, with floating-point ones as float32.

  Args:
    path: of a file of weights, or of a model's directory.

  Raises:
    UserError: there is no such file, it cannot be read, or values are not
      finite.
  """
  path = find(path)
  if path.suffix == '.npz':
    arrays = _read_npz(path)
  elif path.suffix in _PYTORCH:
    arrays = torch_files.read(path)
  else:
    return {name: array.read() for name, array in _headers(path).items()}
  return {name: _float32(x, path, name) for name, x in arrays.items()}


def _read_npz(path) -> dict[str, np.ndarray]:
  try:
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
        buffer = io.BytesIO()
        with archive.open(info) as file:
          shutil.copyfileobj(file, buffer)  # Reading all verifies the CRC.
        buffer.seek(0)
        name = info.filename.removesuffix('.npy')
        arrays[name] = np.lib.format.read_array(buffer, allow_pickle=False)
      return arrays
  except UserError:
    raise
  # Damaged archives and array headers raise many types of exceptions.
  except Exception as error:
    raise _damaged(path, error) from error


def _damaged(path, error) -> UserError:
  return UserError(
    f'{path} cannot be read as {path.suffix[1:]} ({error}): it may be damaged'
    ' or cut short, so fetch or write it again.'
  )


@dataclasses.dataclass(frozen=True)
class Stored:
  """An array in a file that `read` reads.

  Attributes:
    path: of the `.safetensors` file.
    name: of the array in the file.
    shape: shape of the array.
    dtype: name of its type in safetensors, such as BF16.
  """

  path: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: str

  def read(self) -> np.ndarray:
    """Returns the array, as float32 if it is floating-point.

    Raises:
      UserError: the file is missing or damaged, or values are not finite.
    """
    try:
      with safetensors.safe_open(self.path, 'numpy') as file:
        array = file.get_tensor(self.name)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
      raise _damaged(self.path, error) from error
    return _float32(array, self.path, self.name)


def stored(folder: str | os.PathLike) -> dict[str, Stored]:
  """Returns the arrays in a directory's safetensors by name, without reading.

  The directory has either one file, `model.safetensors`, or an index that names
  several.

  Raises:
    UserError: there are no such files, one that the index names is missing or
      outside of the directory, or one cannot be read.
  """
  folder = pathlib.Path(folder).expanduser()
  index = folder / INDEX
  if not index.is_file():
    single = folder / _IN_DIRECTORY[0]
    if not single.is_file():
      raise UserError(
        f'{folder} holds neither {_IN_DIRECTORY[0]} nor {INDEX}: give the'
        ' directory of a model in safetensors.'
      )
    return _headers(single)
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


def _headers(path) -> dict[str, Stored]:
  try:
    with safetensors.safe_open(path, 'numpy') as file:
      names = file.keys()  # The file object itself is not iterable.
      slices = {name: file.get_slice(name) for name in names}
      arrays = {
        name: Stored(path, name, tuple(x.get_shape()), x.get_dtype())
        for name, x in slices.items()
      }
  except (OSError, ValueError, safetensors.SafetensorError) as error:
    raise _damaged(path, error) from error
  for array in arrays.values():
    if array.dtype not in DTYPES:
      raise UserError(
        f'{path}: {array.name} is of type {array.dtype}, and quantised weights'
        f' are not read; expected {", ".join(DTYPES)}: fetch the model in one'
        ' of these.'
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
  """Writes a file of arrays atomically; creates missing directories.

  Args:
    path: of the file, with one of `SUFFIXES`.
    arrays: by name; float32 or int64 for `.pth`.
    torch_key: for `.pth`, key of a dictionary under which the arrays are
      stored, as some libraries expect; None stores them at the top level.

  Raises:
    UserError: the suffix is not supported, or the file cannot be written.
  """
  path = pathlib.Path(path).expanduser()
  check_suffix(path)
  # Safetensors ignores strides when it writes an array's memory.
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
