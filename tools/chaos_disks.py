"""Runs on disks that are too small, or that fill up, and continues them.

    python tools/chaos_disks.py --runs=100 --seed=0

Each run lies on a small disk of its own, in memory (so this needs Linux and the
right to mount). In turns, the disk has less room than the run takes, or another
fills it at a random moment: while the run starts, reads its checkpoint, trains,
evaluates, draws or saves. A third of the runs are asked to stop, too. Each must
end by itself, or by its first SIGTERM, with one sentence and no traceback. Then
there is room again, the same command is given once more, and it must leave,
byte by byte, what an undisturbed run leaves.
"""

import collections
import contextlib
import pathlib
import random
import shutil
import signal
import subprocess
import time

import harness

ROOM = 64 * 2**20  # Bytes of a disk with room.
PAGE = 4096  # What such a disk is handed out by.
ENDS = 90  # Seconds in which a run ends by itself, on a busy machine.
STOPS = 60  # Seconds in which it ends after SIGTERM.
KIND = harness.Kind(
  'configs/lm/mod.py',
  harness.LANGUAGE
  | {
    'train.num_steps': 60,
    'log.every': 1,
    'log.tensorboard': True,
    'checkpoint.every_minutes': 0,
  },
)
SAVES = {'checkpoint.every': 7}


@contextlib.contextmanager
def disk(folder: pathlib.Path, size: int):
  """Mounts a disk of so many bytes in memory."""
  folder.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', folder]
  subprocess.run(mount, check=True)
  try:
    yield
  finally:
    subprocess.run(['umount', '--lazy', folder], check=True)
    folder.rmdir()


def fill(folder: pathlib.Path, left: int):
  """Takes all room of a disk, but for so many bytes."""
  free = shutil.disk_usage(folder).free
  with (
    contextlib.suppress(OSError),
    open(folder / 'filler', 'wb', buffering=0) as file,
  ):
    for _ in range(max(0, free - left) // PAGE):
      file.write(bytes(PAGE))


def contents(workdir) -> dict[str, bytes]:
  """As of `harness`, without curves that may lack what came to a full disk."""
  return {
    name: data
    for name, data in harness.contents(workdir, KIND.runs).items()
    if not name.startswith('tensorboard')
  }


def attempt(folder, draw, seconds: float, size: int) -> str:
  """Runs on a disk without room; returns how it ended.

  Args:
    folder: where the disk is mounted.
    draw: of the moments.
    seconds: that an undisturbed run takes.
    size: of the disk, in bytes.
  """
  filling = size == ROOM
  events = []  # Moments, in seconds since the start, and what comes then.
  if filling:
    events.append((draw.uniform(0, seconds), 'fill'))
  if draw.random() < 1 / 3:
    events.append((draw.uniform(0, seconds), 'stop'))
  process = harness.Process(KIND.command(folder / 'run', SAVES))
  asked = False
  try:
    for moment, event in [*sorted(events), (ENDS, 'end')]:
      while process.running() and time.monotonic() - process.began < moment:
        time.sleep(0.02)
      if not process.running():
        break
      if event == 'fill':
        fill(folder, draw.choice([0, 0, PAGE, 16 * PAGE, 64 * PAGE]))
      elif event == 'stop' or not asked:
        asked = True
        process.signal(signal.SIGTERM)
        until = time.monotonic() + STOPS
        while process.running() and time.monotonic() < until:
          time.sleep(0.02)
      if event == 'end':
        raise harness.Failure(f'does not end:\n{process.said}')
    status = process.wait()
  finally:
    process.kill()
  refused = process.said.count('error: ')
  # Before it listens, a process dies of the signal as any does.
  early = status == -signal.SIGTERM and not process.directories
  if 'Traceback' in process.said or not (
    (status == 0 and not refused) or (status == 2 and refused == 1) or early
  ):
    raise harness.Failure(f'status {status}:\n{process.said}')
  if refused:
    return 'ended by itself, with a sentence'
  return 'stopped when asked' if asked else 'came to its end'


def work(folder, runs: int, first: int, seed: int) -> str:
  """Does what the module says, for so many runs from the first on."""
  harness.undisturbed(KIND, folder / 'warm', SAVES)  # It also compiles.
  began = time.monotonic()
  harness.undisturbed(KIND, folder / 'whole', SAVES)
  seconds = time.monotonic() - began
  expected = contents(folder / 'whole')
  files = [p for p in (folder / 'whole').rglob('*') if p.is_file()]
  needed = sum(-(-p.stat().st_size // PAGE) * PAGE for p in files)
  print(f'undisturbed: {seconds:.0f} s, {needed:,} bytes', flush=True)
  ends, failures = collections.Counter(), 0
  for i in range(first, first + runs):
    draw = random.Random(f'{seed} {i}')
    size = ROOM if i % 2 else int(draw.uniform(0.01, 1.1) * needed)
    place = folder / f'disk_{i}'
    what = f'disk {i}, ' + ('filling' if i % 2 else f'{size:,} bytes')
    try:
      with disk(place, size):
        end = attempt(place, draw, seconds, size)
        (place / 'filler').unlink(missing_ok=True)
        room = ['mount', '-o', f'remount,size={ROOM}', place]
        subprocess.run(room, check=True)
        harness.undisturbed(KIND, place / 'run', SAVES)
        harness.compare(expected, contents(place / 'run'))
    except harness.Failure as failure:
      failures += 1
      end = f'FAILED: {failure}'
    ends[end.partition(':')[0]] += 1
    print(f'{what}: {end}', flush=True)
  told = ', '.join(f'{n} {end}' for end, n in sorted(ends.items()))
  if failures:
    raise harness.Failure(f'{runs} disks: {told}')
  return f'{runs} disks: {told}'


if __name__ == '__main__':
  harness.main(__doc__, work, runs=100, first=0)
