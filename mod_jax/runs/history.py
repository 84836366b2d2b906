"""The starts, restarts and ends of a run, and the time that restarts cost.

They are events: lines of `metrics.jsonl` such as `{"step": 120, "kind":
"event", "event": "start", "time": …}`. A `start` is where training begins or
continues, with details of the process; `first_step` is when the first step
after it is compiled and done; `end` is missing if the process was killed;
`changed`, with the `fields`, is where a run continues with another config; and
`early_stop`, with the `patience`, where a run ends because it got no better.
Times are seconds since 1970.
"""

from mod_jax.runs.metrics import read_events


def changed_at(workdir) -> int:
  """Returns the last step at which a run's config was changed, or -1."""
  changes = [e['step'] for e in read_events(workdir) if e['event'] == 'changed']
  return max(changes, default=-1)


def ended_early(workdir, patience: int) -> int | None:
  """Returns the step at which a run ended early by this patience, or None."""
  ended = None
  for event in read_events(workdir):
    if event['event'] == 'early_stop':
      ended = event
    # A run that takes these steps again need not end early again.
    elif event['event'] == 'start' and ended and event['step'] < ended['step']:
      ended = None
  return ended['step'] if ended and ended['patience'] == patience else None


def cost_of_restarts(events: list[dict]) -> str | None:
  """Returns a sentence on what restarts have cost; None without any.

  The cost of a restart is the time from its start to the end of its first step,
  and the time of the unsaved steps that were taken again.
  """
  restarts = [life for life in _lives(events)[1:] if 'first_step' in life]
  if not restarts:
    return None
  starting = sum(
    life['first_step']['time'] - life['start']['time'] for life in restarts
  )
  again = sum(life['start']['lost_steps'] for life in restarts)
  lost = starting + again * (seconds_per_step(events) or 0.0)
  times = 'once' if len(restarts) == 1 else f'{len(restarts)} times'
  return (
    f'continued {times}, which cost about {lost:.0f} s: {starting:.0f} s to'
    f' start, and {again} step(s) done again'
  )


def seconds_per_step(events: list[dict]) -> float | None:
  """Returns the mean seconds of a step, without compilation.

  A life of a run is the time from one start to the next. Lives with an `end`
  event count, from the end of their first step on; None if there is none.
  """
  timed = [
    life for life in _lives(events) if {'first_step', 'end'} <= life.keys()
  ]
  steps = sum(x['end']['step'] - x['first_step']['step'] for x in timed)
  seconds = sum(x['end']['time'] - x['first_step']['time'] for x in timed)
  return seconds / steps if steps > 0 else None


def _lives(events: list[dict]) -> list[dict[str, dict]]:
  """Returns, for each start of a run, the last event of each name after it."""
  lives = []
  for event in events:
    if event['event'] == 'start':
      lives.append({})
    if lives:
      lives[-1][event['event']] = event
  return lives
