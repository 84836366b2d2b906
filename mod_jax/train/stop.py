"""A stop that was asked for: noted at once, obeyed where nothing is lost.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 (which Slurm can send as an early
warning) only set a mark. The loop looks at it after each step, evaluations
look at it after each batch; then the state is saved and training returns. A
signal that was ignored when the process began stays ignored, as `nohup` and
the background jobs of a shell want it.

Python runs a signal's handler between two of its own instructions: a signal
that comes during a long compilation is noted when that is over.
"""

from collections.abc import Iterable, Iterator
import contextlib
import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PATIENCE = 3  # This many Ctrl-C end the process without waiting for the save.


class Stopped(Exception):
  """Ends work that is begun anew when the run continues."""


class _Asked:
  """What this process was asked for; one for all runs, see `listening`."""

  depth = 0  # How many `listening` are open.
  requested = False
  interrupts = 0  # How often Ctrl-C was pressed.
  hosts = 1
  steps = 0  # Calls of `after_step`, over all runs of the process.


_asked = _Asked()


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Notes the signals that ask for a stop, instead of dying of them.

  Listenings may enclose each other: a stop holds until the outermost one ends,
  so that one that comes between two runs of a sweep is not forgotten. When the
  outermost ends, Ctrl-C becomes the `KeyboardInterrupt` that it always is; by
  then everything is saved. A third Ctrl-C does not wait for that. Other signals
  end in a normal return.

  With several hosts a signal on any of them stops all after the same step, by
  JAX's preemption service.

  Outside the main thread, where Python allows no signal handlers, nothing is
  noted.
  """
  in_main_thread = threading.current_thread() is threading.main_thread()
  if _asked.depth or not in_main_thread:
    _asked.depth += in_main_thread
    try:
      yield
    finally:
      _asked.depth -= in_main_thread
    return
  _asked.hosts = jax.process_count()
  _asked.depth = 1
  before = {}
  try:
    for number in SIGNALS:
      # With several hosts, JAX itself listens for SIGTERM.
      theirs = number == signal.SIGTERM and _asked.hosts > 1
      if not theirs and signal.getsignal(number) != signal.SIG_IGN:
        before[number] = signal.signal(number, _note)
    yield
  finally:
    for number, handler in before.items():
      # None stands for a handler that Python did not install.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    interrupted = _asked.interrupts > 0
    _asked.depth = _asked.interrupts = 0
    _asked.requested = False
  if interrupted:
    raise KeyboardInterrupt


def requested() -> bool:
  """Whether a stop was asked for.

  With several hosts it is the same on all of them: False until `after_step` has
  found a step after which all can stop.
  """
  return _asked.requested


def after_step() -> bool:
  """Whether to stop after the step that was just taken.

  With several hosts, all must call this after each step; all get the same.
  """
  if _asked.hosts > 1:
    # The service wants a number that grows over all runs of the process: the
    # step at which it stops may belong to the next run.
    _asked.steps += 1
    if multihost_utils.reached_preemption_sync_point(_asked.steps):
      _asked.requested = True
  return _asked.requested


def check() -> None:
  """Raises Stopped where a stop was asked for and one host is all there is.

  Several hosts cannot leave work that they share at different moments.
  """
  if _asked.requested and _asked.hosts == 1:
    raise Stopped


def each[T](items: Iterable[T]) -> Iterator[T]:
  """Yields items, such as batches, and calls `check` before each.

  A signal to all processes of a run may end those that read data before this
  one sees it. Where a stop was asked for, what they fail with does not matter.
  """
  iterator = iter(items)
  while True:
    try:
      item = next(iterator)
    except StopIteration:
      return
    except Exception:
      check()
      raise
    check()
    yield item


def _note(number, _):
  if number == signal.SIGINT:
    _asked.interrupts += 1
    if _asked.interrupts >= _PATIENCE:
      raise KeyboardInterrupt
    if _asked.interrupts == 1:
      _say('stopping, with a save; a third Ctrl-C ends at once, without.')
  if _asked.hosts == 1:
    _asked.requested = True
  else:
    signal.raise_signal(signal.SIGTERM)  # JAX tells the other hosts.


def _say(text):
  # The signal may have interrupted a print, and its stream refuses another.
  with contextlib.suppress(OSError):
    os.write(2, f'\n{text}\n'.encode())
