"""The starts, restarts and ends of a run, and the time that restarts cost."""

from collections.abc import Callable
import json
import time

from mod_jax import paths
from mod_jax.errors import UserError

_FILE = 'history.jsonl'


class History:
  """Writes `WORKDIR/history.jsonl`: a line for each event of a run.

  A line is `{"event": "start", "time": …, "step": 120, "lost_steps": 7, …}`.
  Events are `start`, where training begins or continues, with details of the
  process; `first_step`, when the first step after it is done and all is
  compiled; `end`, which a killed process does not write; and `changed`, with
  the `fields`, where a run continues with another config. Times are seconds
  since 1970.
  """

  def __init__(
    self,
    workdir,
    *,
    enabled: bool = True,
    clock: Callable[[], float] = time.time,
  ):
    """Reads the events so far.

    Args:
      workdir: directory of the run.
      enabled: False neither reads nor writes, as on all hosts but the first.
      clock: returns seconds.
    """
    self._path = paths.expand(workdir) / _FILE
    self._clock = clock
    self._enabled = enabled
    self._events = read(workdir) if enabled else []

  def add(self, event: str, step: int, **more) -> None:
    """Adds an event.

    Args:
      event: its kind.
      step: steps taken.
      **more: further fields, as JSON; `time` overrides the current time.
    """
    if not self._enabled:
      return
    line = {'event': event, 'time': self._clock(), 'step': step, **more}
    self._events.append(line)
    text = ''.join(json.dumps(e) + '\n' for e in self._events)
    paths.write_bytes(self._path, text.encode())

  def report(self) -> str | None:
    """Returns a sentence on the cost of restarts so far; None without any.

    The cost of a restart is the time from its start to the end of its first
    step, and the time of the unsaved steps that were taken again.
    """
    lives = []
    for event in self._events:
      if event['event'] == 'start':
        lives.append({})
      if lives:
        lives[-1][event['event']] = event
    restarts = [life for life in lives[1:] if 'first_step' in life]
    if not restarts:
      return None
    starting = sum(
      life['first_step']['time'] - life['start']['time'] for life in restarts
    )
    again = sum(life['start']['lost_steps'] for life in restarts)
    timed = [life for life in lives if {'first_step', 'end'} <= life.keys()]
    steps = sum(x['end']['step'] - x['first_step']['step'] for x in timed)
    seconds = sum(x['end']['time'] - x['first_step']['time'] for x in timed)
    lost = starting + again * seconds / max(1, steps)
    times = 'once' if len(restarts) == 1 else f'{len(restarts)} times'
    return (
      f'continued {times}, which cost about {lost:.0f} s: {starting:.0f} s to'
      f' start, and {again} step(s) done again'
    )


def changed_at(workdir) -> int:
  """Returns the last step at which a run's config was changed, or -1."""
  changes = [e['step'] for e in read(workdir) if e['event'] == 'changed']
  return max(changes, default=-1)


def read(workdir) -> list[dict]:
  """Returns the events of a run, oldest first; empty if there are none.

  Raises:
    UserError: the file is not what `History` writes.
  """
  path = paths.expand(workdir) / _FILE
  if not path.exists():
    return []
  try:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    if not all({'event', 'time', 'step'} <= set(event) for event in events):
      raise ValueError
  except (ValueError, TypeError) as error:
    raise UserError(
      f'{path} is not what a run writes: move it away; only the record of'
      ' restarts and of changed settings is lost, and a run with such goes on'
      ' by --allow_changed_config.'
    ) from error
  return events
