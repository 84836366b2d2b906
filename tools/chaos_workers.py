"""Stops and kills two workers of a sweep, and compares how it ends.

    python tools/chaos_workers.py --kills=20 --seed=0

A small sweep is first run by one worker, undisturbed. Then two workers share
another directory with the same manifest. Again and again, one of them gets
SIGTERM or SIGKILL at a random moment, and is started anew. When all runs have
results, everything that lies there must equal, byte by byte, what the
undisturbed worker left, and no result may have been written a second time. A
new round begins until as many signals were sent as were asked for.
"""

import argparse
import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl import logging
import chaos

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
      f'--config={chaos.ROOT}/configs/sweeps/laptop.py:tiny',
      *(f'--config.{name}={value}' for name, value in CHANGES.items()),
    ),
    check=True,
    stdout=subprocess.DEVNULL,
  )
  return tuple(f'runs/{entry.id}' for entry in manifest.read(workdir))


class Worker:
  """A process that works on the sweep, and what it says into a file."""

  def __init__(self, workdir, log):
    self.log = log
    with log.open('w') as file:
      self.process = subprocess.Popen(
        sweeps('run', f'--workdir={workdir}'),
        stdout=file,
        stderr=subprocess.STDOUT,
      )

  def running(self) -> bool:
    return self.process.poll() is None

  def check_end(self, number=None):
    """Raises Failure unless it ended as the signal allows."""
    status = self.process.wait(300)
    allowed = {0} if number is None else {0, -number}
    text = self.log.read_text()
    if status not in allowed or 'Traceback' in text:
      raise chaos.Failure(f'status {status} after {number}:\n{text}')


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
        raise chaos.Failure(f'{path} was written twice')
    return len(self._seen)


def round_of(workdir, kind, draw, signals, kills, seconds):
  """Has two workers train all runs, with signals in between."""
  plan(workdir)
  results = Results(workdir)
  workers = {}
  count = 0

  def start(name):
    nonlocal count
    count += 1
    workers[name] = Worker(workdir, workdir.parent / f'{workdir.name}_{count}')

  try:
    while results.look() < len(kind.runs):
      for name in ('a', 'b'):
        if name not in workers or not workers[name].running():
          if name in workers:
            workers[name].check_end()
          start(name)
      until = time.monotonic() + draw.uniform(0, seconds)
      while time.monotonic() < until and any(
        worker.running() for worker in workers.values()
      ):
        results.look()
        time.sleep(0.02)
      name = draw.choice('ab')
      if signals.total() < kills and workers[name].running():
        number = draw.choice((signal.SIGTERM, signal.SIGKILL))
        workers[name].process.send_signal(number)
        signals[signal.Signals(number).name] += 1
        workers.pop(name).check_end(number)
    for worker in workers.values():
      worker.check_end()
    results.look()
  finally:
    for worker in workers.values():
      worker.process.kill()
  return count


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--kills', type=int, default=20, help='At least.')
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  paths = [str(chaos.ROOT), str(chaos.ROOT / 'kernels')]
  sys.path[:0] = paths
  os.environ['PYTHONPATH'] = os.pathsep.join(paths)
  logging.set_verbosity(logging.WARNING)
  for number in chaos.CAUGHT:
    signal.signal(number, signal.SIG_DFL)  # As in chaos.py.
  draw, signals = random.Random(args.seed), collections.Counter()
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    chaos.environment(folder / 'compiled')
    kind = chaos.Kind('', {}, runs=plan(folder / 'whole'))
    began = time.monotonic()
    Worker(folder / 'whole', folder / 'whole_log').check_end()
    seconds = time.monotonic() - began
    expected = chaos.contents(folder / 'whole', kind)
    print(f'{len(kind.runs)} runs, {seconds:.1f} s undisturbed', flush=True)
    rounds = processes = 0
    try:
      while signals.total() < args.kills:
        workdir = folder / f'round_{rounds}'
        processes += round_of(
          workdir, kind, draw, signals, args.kills, seconds / 6
        )
        chaos.compare(expected, chaos.contents(workdir, kind))
        rounds += 1
        print(f'round {rounds}: {dict(signals)}', flush=True)
    except chaos.Failure as failure:
      sys.exit(f'seed {args.seed}: {failure}')
  print(
    f'seed {args.seed}: {signals.total()} signals ({dict(signals)}) to two'
    f' workers, {processes} processes in {rounds} rounds: all files and arrays'
    ' equal those of the undisturbed sweep, and no result was written twice.'
  )


if __name__ == '__main__':
  main()
