"""Turns any text into text that a font can draw, legibly.

The fonts are those that come with matplotlib, so a picture looks the same on
every machine. Letters that these fonts lack, such as Chinese ones, are drawn by
a font that is installed on the machine.
"""

import contextlib
import dataclasses
import functools
import pathlib
import unicodedata

import matplotlib
from matplotlib import font_manager

_FONTS = pathlib.Path(matplotlib.get_data_path()) / 'fonts' / 'ttf'
_MONO = str(_FONTS / 'DejaVuSansMono.ttf')
MISSING = '□'  # Replaces characters that are invisible or not in the font.
_VISIBLE = {' ': '·', '\n': '⏎', '\t': '→'}


def write_pieces(labels) -> None:
  """Sets tick labels to a monospaced font, and turns off parsing of math."""
  font = font_manager.FontProperties(fname=_MONO, size=8)
  for label in labels:
    label.set(fontproperties=font, parse_math=False, gid='piece')


def _characters(path: str) -> frozenset[int]:
  return frozenset(font_manager.get_font(path).get_charmap())


@functools.cache
def _mono() -> frozenset[int]:
  return _characters(_MONO)


@functools.cache
def _sans() -> frozenset[int]:
  """Returns the characters that the fonts of labels and of titles both have."""
  names = 'DejaVuSans.ttf', 'DejaVuSans-Bold.ttf'
  return frozenset.intersection(*(_characters(_FONTS / name) for name in names))


def display_piece(piece: str, limit: int = 10) -> str:
  """Returns a token's piece of text in a form that can be drawn.

  Spaces, newlines and tabs become · ⏎ →. Characters that are invisible or not
  in the font become □, and so does an empty piece (a token that is no whole
  character). A piece of more than `limit` characters is cut and ends in ….
  """
  if len(piece) > limit:
    return ''.join(map(_display, piece[: limit - 1])) + '…'
  return ''.join(map(_display, piece)) or MISSING


def _display(character: str) -> str:
  if character in _VISIBLE:
    return _VISIBLE[character]
  kind = unicodedata.category(character)
  if kind == 'Zs':
    return _VISIBLE[' ']
  # C: control, format, surrogate, private, unassigned. M: combining marks,
  # which would be drawn on the neighbouring cell. Zl, Zp: other line ends.
  if kind[0] in 'CMZ' or ord(character) not in _mono():
    return MISSING
  return character


@functools.cache
def installed(letter: str) -> font_manager.FontEntry | None:
  """Returns an installed font that has a letter; None if there is none."""
  for entry in font_manager.fontManager.ttflist:
    if entry.name.replace(' ', '').startswith('LastResort'):
      continue  # This font draws a box for every character.
    # Some of the listed fonts cannot be opened.
    with contextlib.suppress(OSError, RuntimeError):
      if ord(letter) in _beyond_own(entry.fname):
        return entry
  return None


@functools.cache
def _beyond_own(path: str) -> frozenset[int]:
  # Leave out the characters of `_sans`: with them, the cached sets of hundreds
  # of fonts would take much memory.
  return _characters(path) - _sans()


def _shown(character: str) -> str:
  if character == '\n':
    return character
  if not character.isprintable():
    return MISSING
  if ord(character) in _sans():
    return character
  if character.isalpha() and (entry := installed(character)):
    families = matplotlib.rcParams['font.family']
    if entry.name not in families:
      # Append the font, so that it is tried last and other texts do not change.
      matplotlib.rcParams['font.family'] = [*families, entry.name]
      # Titles are bold, and matplotlib warns if a family has no bold font.
      bold = dataclasses.replace(entry, weight=700)
      font_manager.fontManager.ttflist.append(bold)
    return character
  # Return an escape rather than a box, so that different names look different.
  return character.encode('unicode_escape').decode()


def plain(text: str) -> str:
  """Returns text for titles and labels; a second call changes nothing.

  Characters that no font has are written as in Python, such as `\\u6f22`, and
  invisible ones become □. Dollars are escaped, as matplotlib would read the
  text between two of them as mathematics.
  """
  shown = ''.join(map(_shown, text))
  return shown.replace(r'\$', '$').replace('$', r'\$')
