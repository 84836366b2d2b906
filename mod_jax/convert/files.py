"""Files of named arrays: safetensors, NumPy's `.npz` and PyTorch's `.pth`."""

from collections.abc import Container
from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
import zipfile

import numpy as np
import safetensors
import safetensors.flax
import safetensors.numpy

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.convert import torch_files
from mod_jax.errors import UserError

SUFFIXES = ('.safetensors', '.npz', '.pth')
# Other endings of what `torch.save` wrote: read, and not written.
_PYTORCH = ('.pth', '.pt', '.bin', '.ckpt', '.tar')
# As Hugging Face and timm name the file in a model's directory, now and before.
_IN_DIRECTORY = ('model.safetensors', 'pytorch_model.bin')
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
    siblings = []
    if path.parent.is_dir():
      siblings = [str(sibling) for sibling in path.parent.iterdir()]
    raise UserError(
      f'{path}: there is no such file; give the path of a checkpoint,'
      f' {" or ".join(SUFFIXES)}.{config_lib.nearest(path, siblings)}'
    )
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
    UserError: there is no such file, or it cannot be read.
  """
  path = find(path)
  try:
    if path.suffix == '.npz':
      with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    elif path.suffix in _PYTORCH:
      arrays = torch_files.read(path)
    else:
      # Its NumPy counterpart has no bfloat16.
      arrays = safetensors.flax.load_file(path)
  except UserError:
    raise
  except (
    *(OSError, EOFError, ValueError, zipfile.BadZipFile),
    safetensors.SafetensorError,
  ) as error:
    raise UserError(
      f'{path} cannot be read as {path.suffix[1:]} ({error}): it may be'
      ' damaged or cut short, so fetch or write it again.'
    ) from error
  return {name: _float32(array) for name, array in arrays.items()}


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
      UserError: the file is gone or damaged.
    """
    try:
      with safetensors.safe_open(self.path, 'numpy') as file:
        return _float32(file.get_tensor(self.name))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
      raise UserError(
        f'{self.path}: {self.name} cannot be read ({error}): the file may be'
        ' damaged or cut short, so fetch it again.'
      ) from error


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
  try:
    wanted = json.loads(index.read_text('utf-8'))['weight_map']
    names = sorted(set(wanted.values()))
    outside = [name for name in names if pathlib.PurePath(name).name != name]
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(
      f'{index} is no index of safetensors ({error!r}): fetch it again.'
    ) from error
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
      return {
        name: Stored(path, name, tuple(x.get_shape()), x.get_dtype())
        for name, x in slices.items()
      }
  except (OSError, ValueError, safetensors.SafetensorError) as error:
    raise UserError(
      f'{path} cannot be read as safetensors ({error}): it may be damaged or'
      ' cut short, so fetch it again.'
    ) from error


def _float32(array) -> np.ndarray:
  array = np.asarray(array)
  # bfloat16 is no floating type to NumPy.
  if array.dtype.kind == 'f' or array.dtype.name == 'bfloat16':
    return array.astype(np.float32, copy=False)
  return array


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
