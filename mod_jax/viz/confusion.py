"""The errors of a classifier: a confusion matrix, and the worst pictures."""

from collections.abc import Sequence
import itertools
import textwrap

from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
import numpy as np

from mod_jax.viz import glyphs, images, style

_SHARES = colormaps['Blues']
_MOST = 30  # Most rows of the matrix.
_COUNTED = 20  # With more rows, counts do not fit into cells and are left out.
_COLUMNS = 6  # Pictures in a row.
_LETTERS = 15  # Characters in a line of text above or below a picture.


def confusion_matrix(
  count_VV,
  classes: Sequence[str],
  *,
  title: str = 'What each class is taken for',
) -> Figure:
  """Draws the matrix of the numbers of images [true class, predicted class].

  A cell's colour is its share of the row, so the diagonal shows the recall. Of
  more than 30 classes, the 29 with the most errors are shown; all others
  together are the last row and column.
  """
  count_VV = np.asarray(count_VV)
  errors_V = _errors(count_VV).sum(axis=0) + _errors(count_VV).sum(axis=1)
  names = [style.shortened(name, 20) for name in classes]
  if len(names) > _MOST:
    worst = np.argsort(-errors_V, kind='stable')[: _MOST - 1]
    group_V = np.full(len(names), _MOST - 1)
    group_V[worst] = np.arange(_MOST - 1)
    merged_VV = np.zeros((_MOST, _MOST), count_VV.dtype)
    np.add.at(merged_VV, (group_V[:, None], group_V[None]), count_VV)
    rest = len(names) - len(worst)
    names = [*(names[v] for v in worst), f'{rest} other classes']
    count_VV = merged_VV
  total = int(count_VV.sum())
  of_row_V = count_VV.sum(axis=1)
  share_VV = count_VV / np.maximum(of_row_V, 1)[:, None]
  longest = max(map(len, names))
  side = max(3.0, 0.34 * len(names))
  body = style.new_figure(
    side + 0.1 * longest + 1.8,
    side + 0.13 * longest + 0.9,
    title,
    f'Images: {total:,}. A row is a class, with its number of images; a column'
    ' is what they were taken for. Colours are shares of the row.',
  )
  axes = body.subplots()
  axes.set_label('matrix')
  norm = Normalize(0, 1)
  axes.imshow(share_VV, cmap=_SHARES, norm=norm)
  ticks = range(len(names))
  axes.set_xticks(ticks, names, rotation=90, fontsize=8, color=style.INK)
  rows = [
    f'{name} ({n:,})' for name, n in zip(names, of_row_V.tolist(), strict=True)
  ]
  axes.set_yticks(ticks, rows, fontsize=8, color=style.INK)
  axes.tick_params(length=0)
  axes.spines[:].set_color(style.FAINT)
  # Write the axis's label above the matrix: constrained layout misjudges the
  # room of a label below long names.
  axes.set_title('predicted', fontsize=9, color=style.INK)
  axes.set_ylabel('true', fontsize=9, color=style.INK)
  if len(names) <= _COUNTED:
    for true, predicted in zip(*np.nonzero(count_VV), strict=True):
      axes.text(
        predicted,
        true,
        style.quantity(count_VV[true, predicted]),
        color='white' if share_VV[true, predicted] > 0.5 else style.INK,
        **{'ha': 'center', 'va': 'center', 'fontsize': 7, 'gid': 'count'},
      )
  style.scale(body, [axes], norm, _SHARES, 'share of the row', shrink=0.5)
  return body.get_figure(root=True)


def worst_pictures(
  images_BHWC,
  above: Sequence[str],
  below: Sequence[str],
  *,
  title: str,
  subtitle: str = '',
) -> Figure:
  """Draws pictures in rows of six, each with a text above and one below."""
  above, below = (
    [_lines(text, count) for text in texts]
    for texts, count in ((above, 5), (below, 3))
  )
  tiles = [[(image_HWC, {})] for image_HWC in np.asarray(images_BHWC)]
  tiles, above, below = (
    [list(row) for row in itertools.batched(values, _COLUMNS)]
    for values in (tiles, above, below)
  )
  body, _, _ = images.image_grid(
    *(tiles, (1, 1)),
    title=title,
    subtitle=subtitle,
    above=above,
    below=below,
  )
  return body.get_figure(root=True)


def _errors(count_VV):
  return count_VV - np.diag(np.diagonal(count_VV))


def _lines(text: str, most: int) -> str:
  """Returns a text wrapped to at most `most` lines; arrows begin new lines."""
  parts = text.replace(' → ', '\n→ ').split('\n')
  lines = [y for x in parts for y in textwrap.wrap(glyphs.plain(x), _LETTERS)]
  if len(lines) > most:
    lines[most - 1 :] = [f'{lines[most - 1][: _LETTERS - 1]}…']
  return '\n'.join(lines)
