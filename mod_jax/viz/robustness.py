"""How accuracy and compute change as images get worse."""

from collections.abc import Mapping
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mod_jax.errors import UserError
from mod_jax.viz import images
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
  figure, body = style.new_figure(width, 4.2, title, subtitle)
  if not curves:
    style.say(body.subplots(), 'No corruption measured yet')
    return figure
  grid = body.subplots(2, columns, sharex=True, sharey='row', squeeze=False)
  for (above, below), (kind, found) in zip(grid.T, curves.items(), strict=True):
    severities = range(len(found['load']))
    style.clean(above)
    style.clean(below)
    style.heading(above, style.shortened(kind, 24))
    for key, label, color, marker, line in _LINES:
      look = {'color': color, 'marker': marker, 'ms': 4, 'ls': line}
      above.plot(severities, found[key], label=label, gid=key, **look)
    look = {'color': _LOAD, 'marker': 'D', 'ms': 4}
    below.plot(severities, found['load'], label='compute', gid='load', **look)
    below.axhline(
      budget, color=style.MUTED, ls=':', lw=1, label='budget', gid='budget'
    )
    below.set_xlabel('severity')
    below.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  above, below = grid[:, 0]
  above.set(ylabel='accuracy', ylim=(0, 1.04))
  below.set(ylabel='compute')
  # A single severity has an axis too, with whole numbers on it.
  most = max(len(found['load']) for found in curves.values())
  below.set_xlim(-0.3, max(most - 0.7, 1.3))
  below.margins(y=0.15)
  for axes in (above, below):
    axes.yaxis.set_major_formatter(style.percent)
  style.key(body, above.lines + below.lines)
  return figure


def _check(curves):
  if len(curves) > _MOST:
    raise UserError(
      f'{len(curves)} corruptions: at most {_MOST} stand side by side, so draw'
      ' fewer.'
    )
  for kind, found in curves.items():
    severities = len(found.get('load', ()))
    for name in ('adaptive', 'dense', 'load'):
      values = found.get(name, ())
      if not len(values) or len(values) != severities:
        raise UserError(
          f'{kind}: {len(values)} numbers of {name!r}; expected one for each'
          f' severity, as there are of load.'
        )
      images.shares(f'{kind}, {name!r}', values)
