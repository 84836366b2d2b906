"""Text of any kind as something that the font can draw, legibly.

The fonts are the ones that matplotlib itself brings, so a picture looks the
same on every machine.
"""

import functools
import pathlib
import unicodedata

import matplotlib
from matplotlib import font_manager

_FONTS = pathlib.Path(matplotlib.get_data_path()) / 'fonts' / 'ttf'
_MONO = str(_FONTS / 'DejaVuSansMono.ttf')
SANS = str(_FONTS / 'DejaVuSans.ttf')
_SANS_BOLD = str(_FONTS / 'DejaVuSans-Bold.ttf')

SPACE, NEWLINE, TAB = '·', '⏎', '→'
MISSING = '□'  # In place of what cannot be seen or is not in the font.
_VISIBLE = {' ': SPACE, '\n': NEWLINE, '\t': TAB}


def mono(size: float) -> font_manager.FontProperties:
  return font_manager.FontProperties(fname=_MONO, size=size)


@functools.cache
def _drawable(path: str) -> frozenset[int]:
  return frozenset(font_manager.get_font(path).get_charmap())


def _display(character: str) -> str:
  if character in _VISIBLE:
    return _VISIBLE[character]
  kind = unicodedata.category(character)
  if kind == 'Zs':
    return SPACE
  # C: control, format, surrogate, private, unassigned. M: marks that would
  # land on the neighbouring cell. Zl, Zp: other kinds of line ends.
  if kind[0] in 'CMZ' or ord(character) not in _drawable(_MONO):
    return MISSING
  return character


def display_piece(piece: str, limit: int = 10) -> str:
  """Returns a piece of text as it is shown under its column.

  Spaces, newlines and tabs become · ⏎ →, characters that cannot be seen or
  that the font lacks become □, and so does an empty piece (a token that is no
  whole character).

  Args:
    piece: any string.
    limit: most characters; a longer piece ends in ….
  """
  if len(piece) > limit:
    return ''.join(map(_display, piece[: limit - 1])) + '…'
  return ''.join(map(_display, piece)) or MISSING


def plain(text: str) -> str:
  """Returns text for titles and labels: what cannot be drawn becomes □.

  Dollars are escaped: matplotlib would read what is between two of them as
  mathematics. Text that has been through here does not change again.
  """
  fonts = _drawable(SANS) & _drawable(_SANS_BOLD)
  shown = ''.join(
    c if c == '\n' or (c.isprintable() and ord(c) in fonts) else MISSING
    for c in text
  )
  return shown.replace(r'\$', '$').replace('$', r'\$')
