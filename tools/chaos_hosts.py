"""Kills runs of several hosts, and goes on with another number of hosts.

    python tools/chaos_hosts.py --kills=20 --seed=0

The hosts are processes of this machine with a device each. A run is first left
alone, on 1, 2 and 4 hosts: the losses must agree, but for rounding. Then it is
disturbed again and again, at random moments, by a signal that kills one host or
that asks one, or all, to stop; and whoever is left must end too. In turns, it
goes on with as many hosts as before, and must end with what the undisturbed run
of so many hosts wrote, byte by byte; or each time with 1, 2 or 4 hosts, and
must end with the same losses, but for rounding.
"""

import collections
import random
import signal
import socket
import time

import harness
import numpy as np

COUNTS = (1, 2, 4)
TIMEOUT = 10  # Seconds without a sign of life until a host counts as dead.
START_TIMEOUT = 90
TOLERANCE = 2e-5  # Relative; of losses on other numbers of hosts.
CHANGES = harness.LANGUAGE | {
  'train.num_steps': 60,
  'train.batch_size': 8,
  'evaluation.batch_size': 8,
  'evaluation.sample_tokens': 0,
  # Sums that leave little to rounding, over so many steps.
  'optimizer.learning_rate': 1e-3,
}


class Hosts:
  """The processes of one start."""

  def __init__(self, workdir, count: int):
    with socket.socket() as sock:
      sock.bind(('127.0.0.1', 0))
      port = sock.getsockname()[1]
    several = (
      '--distributed',
      f'--host_timeout={TIMEOUT}',
      # A host may be killed before it has met the others.
      f'--start_timeout={START_TIMEOUT}',
    )
    more = several if count > 1 else ()
    kind = harness.Kind('configs/lm/mod.py', CHANGES, more)
    self.processes = [
      harness.Process(
        kind.command(workdir, {'checkpoint.every': 7}),
        JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}',
        JAX_NUM_PROCESSES=str(count),
        JAX_PROCESS_ID=str(i),
      )
      for i in range(count)
    ]

  def running(self) -> bool:
    return any(process.running() for process in self.processes)

  def wait(self) -> list[int]:
    """Returns the statuses; kills what does not end."""
    try:
      return [process.wait(600) for process in self.processes]
    finally:
      for process in self.processes:
        process.kill()

  def said(self) -> str:
    return '\n'.join(process.said for process in self.processes)


def losses(workdir) -> np.ndarray:
  """Returns all losses of a finished run: of training, then held out."""
  from mod_jax.runs import metrics

  records = metrics.read(workdir)
  found = [r['loss'] for r in records if r['kind'] == 'train']
  if len(found) != CHANGES['train.num_steps']:
    raise harness.Failure(f'{workdir} has {len(found)} training losses')
  # A host that is killed between the last evaluation and its report leaves that
  # to others, who measure the same but for rounding: the last line counts.
  held_out = {
    r['step']: r['top_k/loss'] for r in records if r['kind'] == 'eval'
  }
  return np.array(found + list(held_out.values()))


def disturb(hosts: Hosts, draw, seconds: float) -> str:
  """Sends a signal at a random moment; returns what it was, or ''."""
  time.sleep(draw.uniform(0, seconds))
  if not hosts.running():
    return ''
  one = draw.choice(hosts.processes)
  name, number, targets = draw.choice(
    [
      ('one host killed', signal.SIGKILL, [one]),
      ('one host asked to stop', signal.SIGTERM, [one]),
      ('all asked to stop', signal.SIGTERM, hosts.processes),
    ]
  )
  for process in targets:
    if process.running():
      process.signal(number)
  return name


def work(folder, kills: int, seed: int) -> str:
  """Does what the module says; returns what happened, in a line."""
  draw = random.Random(seed)
  whole, seconds = {}, {}
  for count in COUNTS:
    workdir = folder / f'whole_{count}'
    hosts = Hosts(workdir, count)
    began = time.monotonic()
    if any(hosts.wait()):
      raise harness.Failure(f'undisturbed, {count} hosts:\n{hosts.said()}')
    seconds[count] = time.monotonic() - began
    whole[count] = losses(workdir)
    np.testing.assert_allclose(whole[count], whole[1], rtol=TOLERANCE)
    print(f'{count} host(s): {seconds[count]:.0f} s', flush=True)
  sent, sizes = collections.Counter(), collections.Counter()
  rounds = 0
  while sent.total() < kills:
    fixed = (2, 4, None)[rounds % 3]
    workdir = folder / f'round_{rounds}'
    rounds += 1
    counts = []
    while True:
      count = fixed or draw.choice(COUNTS)
      counts.append(count)
      hosts = Hosts(workdir, count)
      name = ''
      if sent.total() < kills:
        name = disturb(hosts, draw, 0.9 * seconds[count])
      statuses = hosts.wait()
      if 'Traceback' in hosts.said():
        raise harness.Failure(f'{name}:\n{hosts.said()}')
      sent[name] += bool(name)
      sizes[count] += bool(name)
      if not any(statuses) and (workdir / 'eval.json').exists():
        break
      if not name:
        raise harness.Failure(f'statuses {statuses}:\n{hosts.said()}')
    if fixed:
      mine, other = (
        (harness.metrics(path), (path / 'eval.json').read_bytes())
        for path in (workdir, folder / f'whole_{fixed}')
      )
      if mine != other:
        raise harness.Failure(f'{workdir} differs, {fixed} hosts')
    np.testing.assert_allclose(losses(workdir), whole[1], rtol=TOLERANCE)
    print(f'round {rounds}: hosts {counts}: as undisturbed', flush=True)
  told = ', '.join(f'{n} {name}' for name, n in sorted(sent.items()) if n)
  on = ', '.join(f'{n} on {count}' for count, n in sorted(sizes.items()))
  return f'{told} ({on}), in {rounds} rounds, all of which ended alike'


if __name__ == '__main__':
  harness.main(__doc__, work, kills=20)
