"""How accuracy and compute change as images get worse."""

from collections.abc import Mapping
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.ticker import PercentFormatter

from mod_jax.errors import UserError
from mod_jax.viz import glyphs
from mod_jax.viz import style

_MOST = 12  # Corruptions side by side.
_LINES = (
  ('adaptive', 'adaptive model', style.CHOSEN, 'o', '-'),
  ('dense', 'dense model', '#000000', 's', '--'),
)
_LOAD = '#E69F00'


def corruption_curves(
  curves: Mapping[str, Mapping[str, Sequence[float]]],
  *,
  budget: float,
  title: str = '',
) -> Figure:
  """Draws, for each corruption, accuracy above and mean compute below.

  Args:
    curves: by the corruption's name `adaptive` and `dense`, accuracies, and
      `load`, the mean share of all learners' cost; one number for each
      severity, the first of them of clean images; all from 0 to 1.
    budget: the share that the model was trained for.
    title: says what is seen; a general one if empty.

  Raises:
    UserError: a curve is missing or of another length, a number is out of
      range, or there are more than 12 corruptions.
  """
  _check(curves)
  title = title or 'How corrupted images are classified'
  subtitle = (
    'Severity 0 is the clean image. Compute is the share of all learners; the'
    ' dotted line is the budget.'
  )
  columns = max(1, len(curves))
  width = max(6.0, 0.9 + 2.1 * columns)
  top = style.header_height(width, title, subtitle) + 0.6
  high = 1.55
  height = top + 2 * high + 0.85
  figure = style.new_figure(width, height)
  style.draw_header(figure, title, subtitle)
  if not curves:
    axes = figure.add_axes((0, 0, 1, 1 - top / height), label='plot')
    style.say(axes, 'No corruption measured yet')
    return figure

  loads = [value for found in curves.values() for value in found['load']]
  low, upper = min([budget, *loads]), max([budget, *loads])
  room = max(0.02, 0.15 * (upper - low))
  pitch = (width - 0.75) / columns
  for i, (kind, found) in enumerate(curves.items()):
    severities = range(len(found['load']))
    for row in range(2):
      axes = figure.add_axes(
        (
          (0.65 + i * pitch) / width,
          (0.5 + (1 - row) * (high + 0.25)) / height,
          (pitch - 0.25) / width,
          high / height,
        ),
        label=f'{kind} {row}',
      )
      style.clean(axes)
      axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
      axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
      if row:
        axes.plot(
          severities, found['load'], color=_LOAD, marker='D', ms=4, gid='load'
        )
        axes.axhline(budget, color=style.MUTED, ls=':', lw=1, gid='budget')
        axes.set_ylim(low - room, upper + room)
        axes.set_xlabel('severity')
      else:
        for key, label, color, marker, line in _LINES:
          axes.plot(
            *(severities, found[key]),
            **{'color': color, 'marker': marker, 'ms': 4, 'ls': line},
            label=label,
            gid=key,
          )
        axes.set_ylim(0, 1.04)
        axes.set_xticklabels([])
        axes.set_title(
          glyphs.plain(kind),
          loc='left',
          fontproperties=glyphs.sans(9, bold=True),
          color=style.INK,
          parse_math=False,
        )
      if i:
        axes.set_yticklabels([])
      else:
        axes.set_ylabel('compute' if row else 'accuracy')
  figure.legend(
    *figure.axes[0].get_legend_handles_labels(),
    loc='upper left',
    bbox_to_anchor=(0.06 / width, 1 - (top - 0.58) / height),
    ncols=2,
    frameon=False,
    fontsize=8.5,
    labelcolor=style.INK,
    borderpad=0.2,
  )
  return figure


def _check(curves):
  if len(curves) > _MOST:
    raise UserError(
      f'{len(curves)} corruptions: at most {_MOST} stand side by side, so draw'
      ' fewer.'
    )
  for kind, found in curves.items():
    for name in ('adaptive', 'dense', 'load'):
      values = found.get(name, ())
      if not len(values) or len(values) != len(found['load']):
        raise UserError(
          f'{kind}: {len(values)} numbers of {name!r}; expected one for each'
          f' severity, as there are of load.'
        )
      if not all(0 <= value <= 1 + 1e-5 for value in values):
        raise UserError(
          f'{kind}: {name!r} is {list(values)}; expected numbers from 0 to 1.'
        )
