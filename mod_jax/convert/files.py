"""Files of named arrays: safetensors, NumPy's `.npz` and PyTorch's `.pth`."""

from collections.abc import Mapping
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
    arrays: float32 or int64 arrays by name.
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
