"""Grid sweeps: runs for all combinations of some fields' values."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import itertools
import typing
from typing import Any

import jax

from mod_jax import config as config_lib
from mod_jax import tables, viz
from mod_jax.errors import UserError
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import run as run_lib
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig

if typing.TYPE_CHECKING:  # Matplotlib takes long to import.
  from matplotlib.figure import Figure

Axes = Mapping[str, Sequence[Any]]  # Values by dotted field.
Build = Callable[[Mapping[str, Any]], ExperimentConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """A run of a sweep that has finished or diverged."""

  name: str  # Name of the run's directory, inside the sweep's.
  values: dict[str, Any]  # Values of the sweep's fields, by dotted name.
  metrics: dict[str, float]  # All held-out metrics; empty if it diverged.
  main: dict[str, float]  # The main metrics, which a table shows.
  diverged: str = ''  # What diverged and when; '' if nothing did.


def parse(
  config: ExperimentConfig, texts: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
  """Returns the values of each field of a config in texts like `seed=0,1,2`.

  Values are written as on the command line. Commas within brackets or quotes
  do not separate values; a string may be in quotes, which are no part of it.

  Raises:
    UserError: a field is unknown or named twice, or its values do not fit.
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
    axes[path] = tuple(
      _value(v.strip(), hint) for v in config_lib.split(values, '([{)]}', '"\'')
    )
  return axes


def _value(text: str, hint) -> Any:
  value = config_lib.parse(text, hint)
  within = config_lib.read_literal(text)
  return within if isinstance(value, str) and isinstance(within, str) else value


def points(
  config: ExperimentConfig, axes: Axes, build: Build | None = None
) -> list[tuple[str, ExperimentConfig]]:
  """Returns name and config of each combination, the last axis varying fastest.

  `build` returns the config with a point's values, for config files that derive
  other fields from these; None sets the values in `config` alone.

  Raises:
    UserError: a field is unknown, a value is not allowed, or two points have
      the same name.
  """
  hints = {path: config_lib.field(config, path, '--sweep=') for path in axes}
  for path, values in axes.items():
    if not values:
      raise UserError(f'{path} has no values: give at least one.')
  configs = {}
  for values in _combinations(axes):
    # The name becomes a directory, so it must not contain separators.
    name = ','.join(f'{path}={_text(v)}' for path, v in values.items())
    name = name.replace('/', '_').replace('\\', '_')
    if name in configs:
      raise UserError(
        f'two points of the sweep would lie in {name}: list each value once,'
        ' and none that differs from another by slashes alone.'
      )
    try:
      changes = {
        path: config_lib.fit(value, hints[path], path)
        for path, value in values.items()
      }
      point = build(changes) if build else config
      configs[name] = config_lib.replace(
        point, {'name': f'{config.name} {name}'} | changes
      )
    except UserError as error:
      raise UserError(f'the point {name} of the sweep: {error}') from error
  return list(configs.items())


def _combinations(axes):
  for combination in itertools.product(*axes.values()):
    yield dict(zip(axes, combination, strict=True))


def run(
  config: ExperimentConfig,
  axes: Axes,
  workdir,
  *,
  build: Build | None = None,
  allow_changed_data: bool = False,
) -> list[Point]:
  """Trains all points that no other worker trains, and records their metrics.

  Each point has the directory `WORKDIR/<field>=<value>,…` and is resumed like
  any run. Its result is a file in `WORKDIR/results`; a point with a result for
  the same config is not trained again. A point that diverges does not stop the
  others. `WORKDIR/sweep.json` is rewritten after each point, and
  `WORKDIR/pareto.png` shows accuracy against compute if both are measured.
  `build` is as in `points`.

  Returns:
    The finished points in order: fewer than all if a signal stopped the sweep
    or other workers still train some points.

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
  jobs = [
    run_lib.Job(
      id=name,
      config=changed,
      folder=workdir / name,
      path=workdir / 'results' / f'{name}.json',
      origin=hashlib.sha256(config_lib.to_json(changed).encode()).hexdigest(),
    )
    for name, changed in points(config, axes, build)
  ]
  for job in jobs:
    phase_runs = phases.expand(job.config, job.folder)
    for phase_run in phase_runs:
      workdir_lib.check(*phase_run)
    # Raises if the point was finished with other data.
    phases.finished(*phase_runs[-1], allow_changed_data=allow_changed_data)

  def finish() -> list[Point]:
    results = None
    # Repeat, in case that another worker adds a result while this one writes.
    while (latest := [job.result() for job in jobs]) != results:
      results = latest
      finished = _finished(jobs, results, axes)
      if jax.process_index() == 0:
        _write(workdir, axes, finished)
    return finished

  run_lib.train(jobs, allow_changed_data=allow_changed_data, after=finish)
  finished = finish()
  figure = picture(finished) if jax.process_index() == 0 else None
  if figure is not None:
    viz.save(figure, workdir / 'pareto.png')
  return finished


def _finished(jobs, results, axes) -> list[Point]:
  return [
    Point(
      name=job.id,
      values=values,
      metrics=result['metrics'],
      main=_main(job, result['metrics']),
      diverged=result['diverged'],
    )
    for job, result, values in zip(
      jobs, results, _combinations(axes), strict=True
    )
    if result is not None
  ]


def _main(job, metrics) -> dict[str, float]:
  """Returns a job's main metrics, in the order of the task's `eval_modes`."""
  _, last_phase = phases.expand(job.config, job.folder)[-1]
  task = make_task(last_phase)
  order = {prefix: i for i, prefix in enumerate(task.eval_modes())}

  def position(name):
    return order.get(name[: name.rfind('/') + 1], len(order))

  main = task.main_metrics(metrics)
  return {name: main[name] for name in sorted(main, key=position)}


def table(points: Sequence[Point]) -> str:
  """Returns the points as a table: their fields, then the main metrics."""
  if not points:
    return 'no point of the sweep is finished'
  fields = list(points[0].values)
  names = list(dict.fromkeys(name for p in points for name in p.main))
  rows = [[*fields, *names]]
  for point in points:
    missing = 'diverged' if point.diverged else '-'
    values = map(point.main.get, names)
    cells = [missing if value is None else f'{value:.4f}' for value in values]
    if point.diverged and not names:
      cells = ['diverged']
    rows.append([*map(_text, point.values.values()), *cells])
  return '\n'.join(tables.aligned(rows, left=len(fields)))


def picture(points: Sequence[Point]) -> 'Figure | None':
  """Draws accuracy against compute; None if no point has both as main metrics.

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


def _write(workdir, axes, finished):
  record = {
    'axes': {path: list(values) for path, values in axes.items()},
    'points': [vars(point) for point in finished],
  }
  metrics_lib.write_json(workdir / 'sweep.json', record)


def _text(value) -> str:
  if isinstance(value, tuple):
    return '(' + ','.join(map(_text, value)) + ')'
  return f'{value!r}' if isinstance(value, float) else str(value)
