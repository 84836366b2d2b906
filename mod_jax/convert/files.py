"""Files of named arrays: safetensors and NumPy's `.npz`."""

from collections.abc import Mapping
import contextlib
import os
import pathlib
import uuid
import zipfile

import numpy as np
import safetensors
import safetensors.flax
import safetensors.numpy

from mod_jax import config as config_lib
from mod_jax.errors import UserError

SUFFIXES = ('.safetensors', '.npz')
# What PyTorch pickles: reading it would run whatever code is in it.
_PICKLES = ('.bin', '.pth', '.pt', '.pkl', '.ckpt')
# As Hugging Face and timm name the file in a model's directory.
_IN_DIRECTORY = 'model.safetensors'


def find(path: str | os.PathLike) -> pathlib.Path:
  """Returns the file that a path means: itself, or the one in a directory.

  Raises:
    UserError: there is none, or none of a kind that `read` reads.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    if (path / _IN_DIRECTORY).is_file():
      return path / _IN_DIRECTORY
    held = sorted(child.name for child in path.iterdir())
    if any(name.endswith(_PICKLES) for name in held):
      raise _pickled(path)
    raise UserError(
      f'{path} holds no {_IN_DIRECTORY}: give the file of weights itself, one'
      f' of {" or ".join(SUFFIXES)}.'
    )
  if path.suffix in _PICKLES:
    raise _pickled(path)
  if not path.is_file():
    siblings = []
    if path.parent.is_dir():
      siblings = [str(sibling) for sibling in path.parent.iterdir()]
    raise UserError(
      f'{path}: there is no such file; give the path of a checkpoint,'
      f' {" or ".join(SUFFIXES)}.{config_lib.nearest(path, siblings)}'
    )
  check_suffix(path)
  return path


def check_suffix(path: pathlib.Path) -> None:
  """Raises UserError where a path's ending is not among `SUFFIXES`."""
  if path.suffix not in SUFFIXES:
    raise UserError(
      f'{path} ends in {path.suffix or "nothing"!r}: weights are read and'
      f' written as {" or ".join(SUFFIXES)}.'
    )


def _pickled(path):
  return UserError(
    f'{path} holds weights as PyTorch pickles them, which only PyTorch reads:'
    ' there, convert them with safetensors.torch.save_file(torch.load(path,'
    " weights_only=True), 'model.safetensors'), taking the dictionary of"
    ' weights out of any other that it is in.'
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
    else:
      # Its NumPy counterpart has no bfloat16.
      arrays = safetensors.flax.load_file(path)
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


def write(path: str | os.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes arrays by name, whole or not at all; makes missing directories.

  Args:
    path: of the file, ending in one of `SUFFIXES`.
    arrays: float arrays by name.

  Raises:
    UserError: the ending is another one, or the file cannot be written.
  """
  path = pathlib.Path(path).expanduser()
  check_suffix(path)
  # Safetensors writes memory as it lies, and does not look at strides.
  arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
  # In the same directory, so that the replacement is one rename.
  partial = path.with_name(f'.{path.stem}.{uuid.uuid4().hex}.tmp')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open('wb') as file:
      if path.suffix == '.npz':
        np.savez(file, **arrays)
      else:
        # Without this note, Hugging Face does not load it.
        file.write(safetensors.numpy.save(arrays, {'format': 'pt'}))
    os.replace(partial, path)
  except OSError as error:
    raise UserError(
      f'{path} cannot be written ({error.strerror}): name a file in a directory'
      ' that can.'
    ) from error
  finally:
    with contextlib.suppress(OSError):
      partial.unlink()
