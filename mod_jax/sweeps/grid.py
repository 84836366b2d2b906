"""Grid sweeps: runs for all combinations of some fields' values."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import sys
import typing
from typing import Any

import jax

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.runs import lock as lock_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import tables
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig

if typing.TYPE_CHECKING:  # It takes long to import.
  from matplotlib.figure import Figure

Axes = Mapping[str, Sequence[Any]]  # Values by dotted field.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """A finished run of a sweep.

  Attributes:
    name: its directory's name below the sweep's.
    values: values of the fields that are swept over, by dotted name.
    metrics: all held-out metrics at its end; empty if it diverged.
    main: the main metrics, which a table shows.
    diverged: the message with which it diverged, or ''.
  """

  name: str
  values: dict[str, Any]
  metrics: dict[str, float]
  main: dict[str, float]
  diverged: str = ''


def parse(
  config: ExperimentConfig, texts: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
  """Parses axes such as `seed=0,1,2`.

  Values are written as on the command line. Commas within brackets or quotes
  do not separate them.

  Args:
    config: the config to sweep over, for the types of its fields.
    texts: one for each field.

  Raises:
    UserError: there is no such field, or there are no values.
  """
  axes = {}
  for text in texts:
    path, equals, values = text.partition('=')
    path = path.strip()
    if not equals or not values.strip():
      raise UserError(
        f'--sweep={text}: expected a field and its values, as in seed=0,1,2.'
      )
    if path in axes:
      raise UserError(
        f'--sweep={text}: {path} is given twice; list all its values once.'
      )
    hint = config_lib.field(config, path, '--sweep=')
    axes[path] = tuple(config_lib.parse(v, hint) for v in _split(values))
  return axes


def points(
  config: ExperimentConfig, axes: Axes
) -> list[tuple[str, ExperimentConfig]]:
  """Returns name and config of each point, the last axis varying fastest.

  Raises:
    UserError: a field is unknown, a value is not allowed, or two points have
      the same name.
  """
  return [(name, changed) for name, _, changed in _points(config, axes)]


def _points(config, axes):
  """Returns (name, values by field, config) of each point."""
  for path, values in axes.items():
    config_lib.field(config, path, '--sweep=')
    if not values:
      raise UserError(f'{path} has no values: give at least one.')
  all_points, names = [], set()
  for combination in itertools.product(*axes.values()):
    values = dict(zip(axes, combination, strict=True))
    name = ','.join(f'{path}={_text(v)}' for path, v in values.items())
    # The name becomes a directory, so it must not contain separators.
    name = name.replace('/', '_').replace('\\', '_')
    if name in names:
      raise UserError(
        f'two points of the sweep would lie in {name}: list each value once,'
        ' and none that differs from another by slashes alone.'
      )
    names.add(name)
    run_name = {} if 'name' in values else {'name': f'{config.name} {name}'}
    try:
      changed = config_lib.replace(config, run_name | values)
    except UserError as error:
      raise UserError(f'the point {name} of the sweep: {error}') from error
    all_points.append((name, values, changed))
  return all_points


def run(
  config: ExperimentConfig,
  axes: Axes,
  workdir,
  *,
  allow_changed_data: bool = False,
) -> list[Point]:
  """Trains all points, one after another, and records their metrics.

  Each point has the directory `WORKDIR/<field>=<value>,…` and is resumed like
  any run; finished points are only read. A point that diverges does not stop
  the others. `WORKDIR/sweep.json` is rewritten after each point, and
  `WORKDIR/pareto.png` shows accuracy against compute if both are measured.

  Args:
    config: the config of which the points are variants.
    axes: values by dotted field.
    workdir: directory of the sweep.
    allow_changed_data: as for `loop.train`.

  Returns:
    The points in order; fewer if a signal stopped the sweep.

  Raises:
    UserError: as `points` and `train.loop.train`; problems of the configs are
      found before anything runs.
  """
  workdir = workdir_lib.expand(workdir)
  if workdir_lib.holds_run(workdir):
    raise UserError(
      f'--workdir={workdir} holds a single run: give a sweep a directory of its'
      ' own.'
    )
  todo = _points(config, axes)
  for name, _, changed in todo:
    for directory, part in phases.expand(changed, workdir / name):
      workdir_lib.check(directory, part)
  with stop_lib.listening(), lock_lib.held(workdir):
    return _run(axes, todo, workdir, allow_changed_data)


def _run(axes, todo, workdir, allow_changed_data):
  done = []
  for name, values, changed in todo:
    if stop_lib.requested():
      if jax.process_index() == 0:
        print(
          f'stopped after {len(done)} of {len(todo)} points; the same command'
          ' continues.',
          file=sys.stderr,
        )
      return done
    outcome = phases.complete(
      changed, workdir / name, allow_changed_data=allow_changed_data
    )
    if outcome is None:
      return done
    if outcome.diverged and jax.process_index() == 0:
      print(f'{name} diverged: {outcome.diverged}')
    _, last_phase = phases.expand(changed, workdir / name)[-1]
    done.append(
      Point(
        name=name,
        values=values,
        metrics=outcome.metrics,
        main=make_task(last_phase).main_metrics(outcome.metrics),
        diverged=outcome.diverged,
      )
    )
    if jax.process_index() == 0:
      _write(workdir, axes, done)
  figure = picture(done) if jax.process_index() == 0 else None
  if figure is not None:
    viz.save(figure, workdir / 'pareto.png')
  return done


def table(points: Sequence[Point]) -> str:
  """Returns the points as a table: their fields, then the main metrics."""
  if not points:
    return 'no point of the sweep is finished'
  fields = list(points[0].values)
  names = list(dict.fromkeys(name for p in points for name in p.main))
  rows = [[*fields, *names]]
  for point in points:
    cells = [_text(value) for value in point.values.values()]
    for name in names:
      value = point.main.get(name)
      missing = 'diverged' if point.diverged else '-'
      cells.append(missing if value is None else f'{value:.4f}')
    if point.diverged and not names:
      cells.append('diverged')
    rows.append(cells)
  return '\n'.join(tables.aligned(rows, left=len(fields)))


def picture(points: Sequence[Point]) -> 'Figure | None':
  """Draws accuracy against compute; None if no point has both metrics.

  A line joins the points that differ in the last field only.
  """
  drawn_points = []
  for point in points:
    if not {'accuracy', 'gmacs'} <= set(point.main):
      continue
    *others, last = (
      f'{path.rpartition(".")[2]}={_text(value)}'
      for path, value in point.values.items()
    )
    drawn_points.append(
      {
        'name': last,
        'group': ' '.join(others),
        'flops': point.main['gmacs'],
        'accuracy': point.main['accuracy'],
      }
    )
  if not drawn_points:
    return None
  return viz.accuracy_flops(
    drawn_points, title='What the sweep found', pareto=True
  )


def _write(workdir, axes, done):
  record = {
    'axes': {path: list(values) for path, values in axes.items()},
    'points': [dataclasses.asdict(point) for point in done],
  }
  text = metrics_lib.to_json(record, indent=2) + '\n'
  workdir_lib.write_text(workdir / 'sweep.json', text)


def _split(text):
  """Splits at commas outside of brackets and quotes."""
  parts, depth, quote = [''], 0, None
  for character in text:
    if quote:
      quote = None if character == quote else quote
    elif character in '"\'':
      quote = character
    elif character in '([{':
      depth += 1
    elif character in ')]}':
      depth -= 1
    if character == ',' and not depth and not quote:
      parts.append('')
    else:
      parts[-1] += character
  return [part for part in parts if part.strip()]


def _text(value) -> str:
  if isinstance(value, tuple):
    return '(' + ','.join(map(_text, value)) + ')'
  return f'{value!r}' if isinstance(value, float) else str(value)
