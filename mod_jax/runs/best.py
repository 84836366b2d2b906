"""Which checkpoint of a run is the best by a held-out metric: `best.json`.

The file has a step, the metric and its value. It is written once the checkpoint
is complete, so the checkpoint of that step can be read at any time.
"""

from typing import Literal

from mod_jax import paths
from mod_jax.errors import UserError, require
from mod_jax.runs import metrics, workdir

Step = int | Literal['best'] | None  # None is the newest.
_FILE = 'best.json'


def write(directory, step: int, metric: str, value: float) -> None:
  """Writes `best.json` into a run's directory."""
  record = {'step': step, 'metric': metric, 'value': value}
  metrics.write_json(workdir.expand(directory) / _FILE, record)


def forget(directory) -> None:
  """Removes `best.json`, if there is one."""
  (workdir.expand(directory) / _FILE).unlink(missing_ok=True)


def resolve(directory, step: Step) -> int | None:
  """Returns `step` or, if it is 'best', the step that `best.json` names."""
  if step != 'best':
    is_text = isinstance(step, str)
    require(not is_text, "a number of steps, or 'best'", step=step)
    return step
  best = paths.read_object(workdir.expand(directory) / _FILE).get('step')
  if not isinstance(best, int):
    raise UserError(
      f"step='best': {directory} names no best checkpoint in {_FILE}: train"
      ' with checkpoint.best=METRIC, or give a number.'
    )
  return best


def parse(text: str | None) -> Step:
  """Parses the flag --step: a number of steps, `best`, or None."""
  if text is None or text == 'best':
    return text
  if not text.isdecimal():
    raise UserError(f'--step={text}: expected a number of steps, or best.')
  return int(text)
