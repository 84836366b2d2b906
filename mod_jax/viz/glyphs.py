"""Text of any kind as something that a font can draw, legibly.

The fonts are those that come with matplotlib, so a picture looks the same on
every machine. Letters that these lack, such as Chinese ones, are drawn by a
font of the machine that has them.
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
MISSING = '□'  # In place of what cannot be seen or is not in the font.
_VISIBLE = {' ': '·', '\n': '⏎', '\t': '→'}


def write_pieces(labels) -> None:
  """Has ticks' labels drawn as pieces of text: in one width, never as math."""
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
  """Returns what the fonts of labels and of bold titles both have."""
  names = 'DejaVuSans.ttf', 'DejaVuSans-Bold.ttf'
  return frozenset.intersection(*(_characters(_FONTS / name) for name in names))


def display_piece(piece: str, limit: int = 10) -> str:
  """Returns a piece of text as it is shown under its column.

  Spaces, newlines and tabs become · ⏎ →. Characters that cannot be seen or that
  the font lacks become □, and so does an empty piece (a token that is no whole
  character). A piece of more than `limit` characters ends in ….
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
  # C: control, format, surrogate, private, unassigned. M: marks that would
  # land on the neighbouring cell. Zl, Zp: other kinds of line ends.
  if kind[0] in 'CMZ' or ord(character) not in _mono():
    return MISSING
  return character


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
def _beyond_own(path: str) -> frozenset[int]:
  # All characters of hundreds of fonts would fill much memory.
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
      # The last to be tried, so that no other text changes.
      matplotlib.rcParams['font.family'] = [*families, entry.name]
      # Titles are bold, and matplotlib warns where a family has no such font.
      bold = dataclasses.replace(entry, weight=700)
      font_manager.fontManager.ttflist.append(bold)
    return character
  # So that two names differ, which would both be boxes.
  return character.encode('unicode_escape').decode()


def plain(text: str) -> str:
  """Returns text for titles and labels; doing so twice changes nothing.

  What no font has is written as in Python, such as `\\u6f22`, and what cannot
  be seen becomes □. Dollars are escaped: matplotlib would read what is between
  two of them as mathematics.
  """
  shown = ''.join(map(_shown, text))
  return shown.replace(r'\$', '$').replace('$', r'\$')
