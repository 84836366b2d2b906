"""Stops and kills real runs at random moments, and compares how they end.

    python tools/chaos.py --kind=language --kills=30 --seed=0

Each kind is a command as the README gives it, of a shipped recipe that is cut
short and made small. It is first run undisturbed. Then it is started again and
again, and each process gets a signal at a random moment: while it starts, reads
its checkpoint, compiles, trains, evaluates, draws or saves. When one comes to
its end, everything that it leaves must equal, byte by byte, what the
undisturbed one left: metrics, evaluation, samples, pictures, every array of the
last checkpoint and the position in the data. Then a new round begins, until as
many signals were sent as were asked for; in a conversion, to each phase.

Also checked: a process that may save before it ends loses nothing; one that is
killed outright loses no more than lies between two saves, one of which may not
have been complete. In turns, rounds save by time and by steps. No process may
end in a traceback.
"""

import collections
import dataclasses
import json
import random
import re
import signal
import time

import harness
from harness import COMMON, LANGUAGE, Failure, Kind, Process

# Half of what is sent leaves no time to save.
SIGNALS = (*harness.CAUGHT, *(signal.SIGKILL,) * len(harness.CAUGHT))
SECONDS = 1.2  # Between saves, in the rounds that save by time.
WRITING = 5.0  # Seconds that a save of so little may take on a busy machine.
STEPS = 7  # Between saves, in the others.
_STOPPED = re.compile(r'stopped at step (\d+) of')

VISION = COMMON | {
  'model.num_layers': 2,
  'model.width': 32,
  'model.num_heads': 2,
  'optimizer.warmup_steps': 10,
}
ADAPTIVE = COMMON | {
  'objective.learners.num_steps': 60,
  'objective.gates.num_steps': 60,
  'objective.end_to_end.num_steps': 60,
  'objective.end_to_end.warmup_steps': 10,
}


def kinds(dense) -> dict[str, Kind]:
  """Returns the kinds by name; `dense` is where the conversion's model lies."""
  return {
    'language': Kind('configs/lm/mod.py', LANGUAGE | {'train.num_steps': 90}),
    'vision': Kind('configs/vit/digits.py', VISION | {'train.num_steps': 120}),
    'conversion': Kind(
      'configs/acm/vit.py:digits',
      ADAPTIVE
      | {
        name: value
        for name, value in VISION.items()
        if name.startswith('model.')
      }
      | {'init': dense},
      runs=('phase_learners', 'phase_gates', '.'),
      each=True,
    ),
    'sweep': Kind(
      'configs/lm/mod.py',
      LANGUAGE | {'train.num_steps': 40},
      more=('--sweep=seed=0,1,2',),
      runs=('seed=0', 'seed=1', 'seed=2'),
    ),
  }


def last_step(run) -> int:
  """Returns the newest step in the metrics of a run."""
  path = run / 'metrics.jsonl'
  lines = path.read_bytes().splitlines(True) if path.exists() else []
  whole = [line for line in lines if line.endswith(b'\n')]
  return json.loads(whole[-1])['step'] if whole else 0


def saved_steps(run) -> list[int]:
  """Returns the steps of a run's checkpoints, those in writing left out."""
  folder = run / 'checkpoints'
  names = [p.name for p in folder.iterdir()] if folder.exists() else []
  return sorted(int(name) for name in names if name.isdigit())


class Rounds:
  """Rounds of one kind, and what they came to."""

  def __init__(self, kind: Kind, kills, expected, startup, training, draw):
    self.kind = kind
    self.kills = kills
    self.expected = expected
    self.startup = startup  # Seconds to the first step, undisturbed.
    self.training = training  # And from there to the end.
    self.draw = draw
    self.rounds = 0
    self.signals = collections.Counter()  # By name of the signal.
    self.hit = collections.Counter()  # By run.
    self.before = 0  # Signals that came before the first step.
    self.saved = 0  # Signals after which the process said that it saved.
    self.lost_steps = 0  # The most.
    self.lost_seconds = 0.0  # Likewise.

  def enough(self) -> bool:
    """Whether as many signals were sent as were asked for."""
    if self.kind.each:
      return min(self.hit[run] for run in self.kind.runs) >= self.kills
    return self.signals.total() >= self.kills

  def run(self, workdir):
    """Kills one command until it comes to its end all the same."""
    by_time = self.rounds % 2 == 0
    saves = {'checkpoint.every': 1000, 'checkpoint.every_minutes': SECONDS / 60}
    if not by_time:
      saves = {'checkpoint.every': STEPS, 'checkpoint.every_minutes': 0}
    self.rounds += 1
    while not self._attempt(workdir, saves, by_time):
      pass
    found = harness.contents(workdir, self.kind.runs)
    harness.compare(self.expected, found)

  def _attempt(self, workdir, saves, by_time) -> bool:
    """Starts a process and signals it; returns whether it had ended before."""
    process = Process(self.kind.command(workdir, saves))
    if self.enough():
      self._check_end(process, process.wait(), None)
      return True
    try:
      early = self.draw.random() < 0.2
      if early:
        pause = self.draw.uniform(0, self.startup)
      else:
        process.opened.wait(300)
        # Most come soon, so that a round takes many; none is too late.
        pause = self.training * self.draw.random() ** 2
      number = self.draw.choice(SIGNALS)
      seen = self._watch(process, workdir, pause)
      ended = not process.running()
      if not ended:
        process.signal(number)
        if self.draw.random() < 0.3 and number != signal.SIGKILL:
          time.sleep(self.draw.uniform(0, 0.3))
          process.signal(number)  # Impatience must cost nothing.
      killed_at = time.monotonic()
      status = process.wait()
      # Then the signal came a moment after the process had ended by itself.
      ended |= number == signal.SIGKILL and status == 0
    finally:
      process.kill()
    self._check_end(process, status, None if ended else number)
    if ended:
      # What was undisturbed also compiled. And no end comes sooner than its
      # evaluation and its pictures take.
      began, opened = process.began, process.opened_at
      self.startup = min(self.startup, opened - began)
      self.training = min(self.training, killed_at - opened)
      return True
    self.signals[signal.Signals(number).name] += 1
    run = self._current(workdir)
    self.hit[run] += 1
    self.before += not process.opened.is_set() or early
    self._check_loss(process, workdir / run, seen, killed_at, by_time)
    return status == 0 and 'stopped' not in process.said

  def _watch(self, process, workdir, pause):
    """Waits; returns when each step of each run was first seen."""
    seen = {}
    until = time.monotonic() + pause
    while time.monotonic() < until and process.running():
      for run in self.kind.runs:
        # Else its metrics may be those that the process before left.
        if str(workdir / run) in process.directories:
          step = last_step(workdir / run)
          seen.setdefault((run, step), time.monotonic())
      time.sleep(0.02)
    return seen

  def _current(self, workdir):
    """Returns the run that comes, or goes on, next."""
    for run in self.kind.runs:
      if not (workdir / run / 'eval.json').exists():
        return run
    return self.kind.runs[-1]

  def _check_end(self, process, status, number):
    allowed = {None: {0}, signal.SIGKILL: {-signal.SIGKILL}}.get(number)
    if allowed is None:
      # Before it listens, a process dies of the signal as any does.
      allowed = {0, -number, 130 if number == signal.SIGINT else 0}
    interrupted = number == signal.SIGINT and not process.opened.is_set()
    if status not in allowed or (
      'Traceback' in process.said
      # Python's own, while it imports.
      and not (number == signal.SIGINT and 'starts:' not in process.said)
      and not interrupted
    ):
      raise Failure(f'status {status} after {number}:\n{process.said}')

  def _check_loss(self, process, run, seen, killed_at, by_time):
    """Compares what was reached with what is saved."""
    if not run.exists():
      return
    done, saved = last_step(run), [0, *saved_steps(run)][-1]
    stopped = _STOPPED.findall(process.said)
    if stopped:
      self.saved += 1
      if int(stopped[-1]) != saved:
        raise Failure(f'stopped at step {stopped[-1]}, saved {saved}')
      return
    lost = done - saved
    self.lost_steps = max(self.lost_steps, lost)
    if not by_time and lost > 2 * STEPS:
      raise Failure(f'{lost} steps lost: {done} were done, {saved} saved')
    name = str(run.name if run.name in self.kind.runs else '.')
    times = [t for (of, step), t in seen.items() if of == name and step > saved]
    if times and by_time:
      seconds = killed_at - min(times)
      self.lost_seconds = max(self.lost_seconds, seconds)
      if seconds > SECONDS + WRITING:
        raise Failure(f'{seconds:.1f} s lost: {done} steps, {saved} saved')

  def report(self) -> str:
    """Returns what happened, in a line."""
    sent = ', '.join(f'{v} {k}' for k, v in sorted(self.signals.items()))
    hit = ', '.join(f'{self.hit[run]} in {run}' for run in self.kind.runs)
    return (
      f'{self.signals.total()} signals ({sent}; {hit}; {self.before} while'
      f' starting) in {self.rounds} rounds, all of which ended as the'
      f' undisturbed run; {self.saved} stopped with a save; the others lost at'
      f' most {self.lost_steps} steps, and {self.lost_seconds:.1f} s where'
      f' saves come every {SECONDS} s'
    )


def chaos(folder, kind: str, kills: int, seed: int) -> Rounds:
  """Does what the module says, for one kind."""
  table = kinds(folder / 'dense')
  if kind == 'conversion':
    vision = table['vision']
    short = dataclasses.replace(
      vision, changes=vision.changes | {'train.num_steps': 20}
    )
    harness.undisturbed(short, folder / 'dense')
  name, kind = kind, table[kind]
  startup, training = harness.undisturbed(kind, folder / 'whole')
  expected = harness.contents(folder / 'whole', kind.runs)
  print(
    f'{name}: {startup:.1f} s to the first step, {training:.1f} s from there'
  )
  draw = random.Random(seed)
  rounds = Rounds(kind, kills, expected, startup, training, draw)
  while not rounds.enough():
    rounds.run(folder / f'round_{rounds.rounds}')
    print(f'{name}, round {rounds.rounds}: {rounds.report()}', flush=True)
  return rounds


def work(folder, **options) -> str:
  return chaos(folder, **options).report()


if __name__ == '__main__':
  harness.main(__doc__, work, kind='language', kills=30)
