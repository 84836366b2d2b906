"""Figures to files."""

import contextlib
import io
import os
import pathlib
import uuid

from matplotlib.figure import Figure

from mod_jax.errors import UserError

DPI = 150


def save(
  figure: Figure, path: str | os.PathLike, *, dpi: float = DPI
) -> pathlib.Path:
  """Writes a figure as PNG, whole or not at all; makes missing directories.

  Args:
    figure: what to write.
    path: of the file, ending in .png; what stood there is replaced.
    dpi: pixels per inch.

  Returns:
    The path.

  Raises:
    UserError: the path does not end in .png.
  """
  path = pathlib.Path(path)
  if path.suffix.lower() != '.png':
    raise UserError(
      f'{str(path)!r} is no name for a picture: pictures are PNG files, so end'
      ' it in .png.'
    )
  image = io.BytesIO()
  figure.savefig(image, format='png', dpi=dpi)
  path.parent.mkdir(parents=True, exist_ok=True)
  # In the same directory, so that the replacement is one rename; a plain open
  # leaves the permissions to the umask, as tempfile does not.
  partial = path.with_name(f'.{path.stem}.{uuid.uuid4().hex}.tmp')
  try:
    partial.write_bytes(image.getbuffer())
    os.replace(partial, path)
  except BaseException:
    with contextlib.suppress(OSError):
      partial.unlink()
    raise
  return path
