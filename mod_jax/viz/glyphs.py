"""Text of any kind as something that the font can draw, legibly.

The fonts are the ones that matplotlib itself brings, so a picture looks the
same on every machine. Letters that these lack, such as Chinese ones, are drawn
by a font of the machine that has them.
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


@functools.cache
def installed(letter: str) -> font_manager.FontEntry | None:
  """Returns a font of this machine that has a letter."""
  for entry in font_manager.fontManager.ttflist:
    if entry.name.replace(' ', '').startswith('LastResort'):
      continue  # It has a box for everything.
    # Some fonts that are listed cannot be opened.
    with contextlib.suppress(OSError, RuntimeError):
      if ord(letter) in _beyond_own(entry.fname):
        return entry
  return None


@functools.cache
def _own() -> frozenset[int]:
  return _drawable(SANS) & _drawable(_SANS_BOLD)


@functools.cache
def _beyond_own(path: str) -> frozenset[int]:
  # All characters of hundreds of fonts would fill much memory.
  return frozenset(font_manager.get_font(path).get_charmap()) - _own()


def _is_foreign(character: str) -> bool:
  """Whether it is a letter that matplotlib's own fonts lack."""
  return character.isalpha() and ord(character) not in _own()


def _shown(character: str) -> str:
  if character == '\n':
    return character
  if not character.isprintable():
    return MISSING
  if _is_foreign(character) and (entry := installed(character)):
    families = matplotlib.rcParams['font.family']
    if entry.name not in families:
      # Asked last, so that no other text changes.
      matplotlib.rcParams['font.family'] = [*families, entry.name]
      # Titles are bold, and matplotlib warns where a family has no such font.
      bold = dataclasses.replace(entry, weight=700)
      font_manager.fontManager.ttflist.append(bold)
    return character
  if ord(character) in _own():
    return character
  # So that two names differ, which would both be boxes.
  return character.encode('unicode_escape').decode()


def plain(text: str) -> str:
  """Returns text for titles and labels.

  What no font has is written as in Python, such as `\\u6f22`, and what cannot
  be seen becomes □. Dollars are escaped: matplotlib would read what is between
  two of them as mathematics. Text that has been through here does not change
  again.
  """
  shown = ''.join(map(_shown, text))
  return shown.replace(r'\$', '$').replace('$', r'\$')
