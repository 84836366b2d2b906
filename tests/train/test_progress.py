"""Progress: a bar on a terminal, bounded plain lines elsewhere."""

import io
import os
import pty
import re

import numpy as np

from mod_jax.train.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


def last_bar(stream):
  return stream.getvalue().replace('\n', '\r').rstrip('\r').split('\r')[-1]


def test_plain_lines():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(
    1000,
    tokens_per_step=2048,
    # The mean of these 50 steps is 3e9.
    flops_of_step=lambda step: 5e9 if step <= 26 else 1e9,
    peak=4e10,
    stream=stream,
    interval=5,
    clock=clock,
  )
  clock.now += 1000  # Compiling, which does not count.
  progress.update(1, {'loss': np.float32(5.5)})
  clock.now += 10
  progress.update(51, {'loss': 2.34567, 'epoch': 3})
  progress.close()
  assert stream.getvalue().splitlines() == [
    'step 1/1000  loss 5.5',
    'step 51/1000  loss 2.346  epoch 3  10.2k tokens/s  15 GFLOP/s  '
    '37.5% MFU  left 0:03:10',
  ]


def test_plain_lines_are_bounded_and_have_first_and_last():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(400, stream=stream, interval=5, clock=clock)
  for step in range(1, 401):
    clock.now += 0.1
    progress.update(step, {'loss': 1.0})
  steps = [
    int(n) for n in re.findall(r'^step (\d+)/400', stream.getvalue(), re.M)
  ]
  assert steps[0] == 1
  assert steps[-1] == 400
  assert steps == sorted(set(steps))
  assert 8 <= len(steps) <= 40 / 5 + 2
  assert '\r' not in stream.getvalue()


def test_closing_early_shows_the_last_step_once():
  stream, clock = io.StringIO(), Clock()
  with Progress(100, stream=stream, clock=clock) as progress:
    progress.message('saved')
    for step in (1, 2, 3):
      progress.update(step, {})
    assert 'step 3' not in stream.getvalue()
  progress.close()
  progress.update(4, {})
  progress.message('late')
  assert stream.getvalue() == 'saved\nstep 1/100\nstep 3/100\n'


def test_bar_on_a_terminal(monkeypatch):
  monkeypatch.setenv('COLUMNS', '120')
  stream, clock = Terminal(), Clock()
  progress = Progress(
    100,
    20,
    tokens_per_step=1000,
    flops_of_step=lambda _: 2e12,
    stream=stream,
    clock=clock,
  )
  progress.update(21, {'loss': 3.25})
  written = len(stream.getvalue())
  clock.now += 0.1
  progress.update(22, {'loss': 9.0})  # Too soon to be drawn.
  assert len(stream.getvalue()) == written
  clock.now += 0.9
  progress.update(23, {'loss': 3.125})
  bar = last_bar(stream)
  said = '23/100', 'loss 3.125', '2k tokens/s', '4 TFLOP/s', 'left 0:00:38'
  assert all(text in bar for text in said)
  before = len(stream.getvalue())
  progress.message('saved a checkpoint')
  # A line of its own, begun after the bar was wiped, and the bar after it.
  wiped, after = stream.getvalue()[before:].split('saved a checkpoint\n')
  assert wiped.strip() == ''
  assert wiped.endswith('\r')
  assert '23/100' in after
  progress.close()


def test_terminal_of_no_size_gets_plain_lines():
  ours, theirs = pty.openpty()  # Opened without a size, as in a container.
  with os.fdopen(theirs, 'w') as stream:
    assert stream.isatty()
    with Progress(10, stream=stream, clock=Clock()) as progress:
      progress.update(1, {'loss': 2.0})
    assert os.read(ours, 1000) == b'step 1/10  loss 2\r\n'
  os.close(ours)
