"""Writes figures to files."""

import io
import os

from etils import epath
from matplotlib.figure import Figure

from mod_jax import paths
from mod_jax.errors import UserError


def save(figure: Figure, path: str | os.PathLike) -> epath.Path:
  """Writes a figure as PNG, whole or not at all, and returns the path.

  Missing directories are made, and an existing file is replaced. Raises
  UserError if the path does not end in `.png`.
  """
  path = paths.expand(path)
  if path.suffix.lower() != '.png':
    raise UserError(
      f'{str(path)!r} is no name for a picture: pictures are PNG files, so end'
      ' it in .png.'
    )
  image = io.BytesIO()
  figure.savefig(image, format='png', dpi=150)
  paths.write_bytes(path, image.getvalue())
  return path
