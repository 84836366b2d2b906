"""Stops and kills two workers of a sweep, and compares how it ends.

    python tools/chaos_workers.py --kills=20 --seed=0

A small sweep is first run by one worker, undisturbed. Then two workers share
another directory with the same manifest. Again and again, one of them gets
SIGTERM or SIGKILL at a random moment, and is started anew. When all runs have
results, everything that lies there must equal, byte by byte, what the
undisturbed worker left, and no result may have been written a second time. A
new round begins until as many signals were sent as were asked for.
"""

import collections
import random
import signal
import subprocess
import sys
import time

import harness

CHANGES = {
  'budgets': '(1e9,)',
  'num_seeds': '(2,)',
  'num_sizes': '(1,)',
  'evaluations': 2,
  'corpus_tokens': 1e7,
  'base.checkpoint.every': 20,
  'base.checkpoint.every_minutes': 0,
}


def sweeps(*arguments) -> list[str]:
  return [sys.executable, '-m', 'mod_jax.sweeps', *arguments]


def plan(workdir):
  """Plans the sweep; returns the directories of its runs."""
  from mod_jax.sweeps import manifest

  subprocess.run(
    sweeps(
      *('plan', f'--workdir={workdir}'),
      f'--config={harness.ROOT}/configs/sweeps/laptop.py:tiny',
      *(f'--config.{name}={value}' for name, value in CHANGES.items()),
    ),
    check=True,
    stdout=subprocess.DEVNULL,
  )
  return tuple(f'runs/{entry.id}' for entry in manifest.read(workdir)[0])


def start(workdir) -> harness.Process:
  """Starts a worker."""
  return harness.Process(sweeps('run', f'--workdir={workdir}'))


def check_end(worker, number=None):
  """Raises Failure unless it ended as the signal allows."""
  status = worker.wait()
  allowed = {0} if number is None else {0, -number}
  if status not in allowed or 'Traceback' in worker.said:
    raise harness.Failure(f'status {status} after {number}:\n{worker.said}')


class Results:
  """Sees that no result changes once it is there."""

  def __init__(self, workdir):
    self._folder = workdir / 'results'
    self._seen = {}

  def look(self) -> int:
    """Returns how many there are; raises Failure for one that is new again."""
    for path in self._folder.glob('*.json'):
      stat = path.stat()
      identity = (stat.st_ino, stat.st_mtime_ns)
      if self._seen.setdefault(path.name, identity) != identity:
        raise harness.Failure(f'{path} was written twice')
    return len(self._seen)


def round_of(workdir, runs, draw, signals, kills, seconds) -> int:
  """Has two workers train all runs, with signals; returns the processes."""
  plan(workdir)
  results = Results(workdir)
  workers = {}
  count = 0
  try:
    while results.look() < len(runs):
      for name in ('a', 'b'):
        if name not in workers or not workers[name].running():
          if name in workers:
            check_end(workers[name])
          workers[name] = start(workdir)
          count += 1
      until = time.monotonic() + draw.uniform(0, seconds)
      while time.monotonic() < until and any(
        worker.running() for worker in workers.values()
      ):
        results.look()
        time.sleep(0.02)
      name = draw.choice('ab')
      if signals.total() < kills and workers[name].running():
        number = draw.choice((signal.SIGTERM, signal.SIGKILL))
        workers[name].signal(number)
        signals[signal.Signals(number).name] += 1
        check_end(workers.pop(name), number)
    for worker in workers.values():
      check_end(worker)
    results.look()
  finally:
    for worker in workers.values():
      worker.kill()
  return count


def work(folder, kills: int, seed: int) -> str:
  """Does what the module says; returns what happened, in a line."""
  draw, signals = random.Random(seed), collections.Counter()
  runs = plan(folder / 'whole')
  began = time.monotonic()
  check_end(start(folder / 'whole'))
  seconds = time.monotonic() - began
  expected = harness.contents(folder / 'whole', runs)
  print(f'{len(runs)} runs, {seconds:.1f} s undisturbed', flush=True)
  rounds = processes = 0
  while signals.total() < kills:
    workdir = folder / f'round_{rounds}'
    processes += round_of(workdir, runs, draw, signals, kills, seconds / 6)
    harness.compare(expected, harness.contents(workdir, runs))
    rounds += 1
    print(f'round {rounds}: {dict(signals)}', flush=True)
  return (
    f'{signals.total()} signals ({dict(signals)}) to two workers, {processes}'
    f' processes in {rounds} rounds: all files and arrays equal those of the'
    ' undisturbed sweep, and no result was written twice'
  )


if __name__ == '__main__':
  harness.main(__doc__, work, kills=20)
