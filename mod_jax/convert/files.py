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
# Other endings of what `torch.save` wrote: read, and not written.
_PYTORCH = ('.pth', '.pt', '.bin', '.ckpt', '.tar')
# As Hugging Face and timm name the file in a model's directory, now and before.
_IN_DIRECTORY = ('model.safetensors', 'pytorch_model.bin')
# By what safetensors calls them; it finds bfloat16 once ml_dtypes is imported.
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
# How an `.npz` is packed, and how many times larger its contents are at most.
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_PACKED = 16
INDEX = 'model.safetensors.index.json'  # Of a model in several files.


def find(path: str | os.PathLike) -> pathlib.Path:
  """Returns the file that a path means: itself, or the one in a directory.

  Raises:
    UserError: there is none, or none of a kind that `read` reads.
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
  """Removes the weights of a model that was in a directory before.

  Args:
    folder: directory.
    written: names of the files that the model has that is there now.
  """
  shards = folder.glob('model-?????-of-?????.safetensors')
  for file in (folder / _IN_DIRECTORY[0], folder / INDEX, *shards):
    if file.name not in written:
      file.unlink(missing_ok=True)


def check_suffix(path: pathlib.Path) -> None:
  """Raises UserError where a path's ending is not among `SUFFIXES`."""
  if path.suffix not in SUFFIXES:
    raise UserError(
      f'{path} ends in {path.suffix or "nothing"!r}: weights are read and'
      f' written as {" or ".join(SUFFIXES)}.'
    )


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Returns arrays by name, those of any floating type as float32.

  Args:
    path: as `find` takes it.

  Raises:
    UserError: there is no such file, it cannot be read, or holds what is not
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
      # A small file must not become large in memory.
      packed = os.path.getsize(path)
      if sum(info.file_size for info in infos) > _MOST_PACKED * packed:
        raise UserError(
          f'{path} says that it holds more than {_MOST_PACKED} times its own'
          ' size, which weights never do: fetch it from where it was published.'
        )
      if {info.compress_type for info in infos} - set(_PACKINGS):
        raise ValueError('packed otherwise than NumPy does')
      arrays = {}
      for info in infos:
        whole = io.BytesIO()
        with archive.open(info) as file:
          shutil.copyfileobj(file, whole)  # To its end, where its hash is.
        whole.seek(0)
        name = info.filename.removesuffix('.npy')
        arrays[name] = np.lib.format.read_array(whole, allow_pickle=False)
      return arrays
  except UserError:
    raise
  # What a damaged archive, or the header of an array, runs into is of any kind.
  except Exception as error:
    raise _damaged(path, error) from error


def _damaged(path, error) -> UserError:
  return UserError(
    f'{path} cannot be read as {path.suffix[1:]} ({error}): it may be damaged'
    ' or cut short, so fetch or write it again.'
  )


@dataclasses.dataclass(frozen=True)
class Stored:
  """An array in a file, which is read when it is needed.

  Attributes:
    path: of the `.safetensors`.
    name: of the array in it.
    shape: its shape.
    dtype: its type as safetensors calls it, such as BF16.
  """

  path: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: str

  def read(self) -> np.ndarray:
    """Returns the array, as float32 if it is of any floating type.

    Raises:
      UserError: the file is gone or damaged, or its numbers are not finite.
    """
    try:
      with safetensors.safe_open(self.path, 'numpy') as file:
        array = file.get_tensor(self.name)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
      raise _damaged(self.path, error) from error
    return _float32(array, self.path, self.name)


def stored(folder: str | os.PathLike) -> dict[str, Stored]:
  """Returns what the safetensors of a directory hold, by name, and reads none.

  One file `model.safetensors`, or several that an index names.

  Raises:
    UserError: there are none, a file of the index is missing or lies elsewhere,
      or one cannot be read.
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
  wanted = paths.read_object(index).get('weight_map')
  if not isinstance(wanted, dict) or not all(
    isinstance(name, str) for name in wanted.values()
  ):
    raise UserError(f'{index} is no index of safetensors: fetch it again.')
  names = sorted(set(wanted.values()))
  outside = [name for name in names if pathlib.PurePath(name).name != name]
  if outside:
    raise UserError(
      f'{index} names {outside[0]!r}, which is not a file of that directory: it'
      ' may be meant to read what it should not, so it is refused.'
    )
  found = {}
  for name in names:
    if not (folder / name).is_file():
      raise UserError(
        f'{folder} lacks {name}, which {INDEX} names: fetch it, too.'
      )
    found |= _headers(folder / name)
  lacking = sorted(set(wanted) - set(found))
  if lacking:
    raise UserError(
      f'{folder}: {lacking[0]} is in none of its files, although {INDEX} says'
      f' so ({len(lacking)} in all): fetch them again.'
    )
  return {name: array for name, array in found.items() if name in wanted}


def _headers(path) -> dict[str, Stored]:
  try:
    with safetensors.safe_open(path, 'numpy') as file:
      names = file.keys()  # The file itself cannot be iterated over.
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
  # bfloat16 is no floating type to NumPy.
  if array.dtype.kind == 'f' or array.dtype.name == 'bfloat16':
    array = array.astype(np.float32, copy=False)
    check_finite(array, path, name)
  return array


def check_finite(array, path: str | os.PathLike, name: str) -> None:
  """Raises UserError where an array of weights holds a NaN or infinity."""
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
  """Writes arrays by name, whole or not at all; makes missing directories.

  Args:
    path: of the file, ending in one of `SUFFIXES`.
    arrays: by name; in a `.pth` float32 or int64.
    torch_key: under which they are one entry of a dictionary in a `.pth`, for
      code that looks for them there.

  Raises:
    UserError: the ending is another one, or the file cannot be written.
  """
  path = pathlib.Path(path).expanduser()
  check_suffix(path)
  # Safetensors writes memory as it lies, and does not look at strides.
  arrays = {name: np.asarray(a, order='C') for name, a in arrays.items()}
  try:
    with paths.replacing(path) as file:
      if path.suffix == '.npz':
        np.savez(file, **arrays)
      elif path.suffix == '.pth':
        torch_files.write(file, arrays, torch_key)
      else:
        # Without this note, Hugging Face does not load it.
        file.write(safetensors.numpy.save(arrays, {'format': 'pt'}))
  except OSError as error:
    raise UserError(
      f'{path} cannot be written ({error.strerror}): name a file in a directory'
      ' that can.'
    ) from error
