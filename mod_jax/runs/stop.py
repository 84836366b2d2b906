"""Signals to stop: noted at once, and obeyed where nothing is lost.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 (which Slurm can send as an early
warning) only set a flag. The loop checks it after each step, evaluations check
it after each batch; then `train.hooks.Save.now` writes a checkpoint, and
training returns. A signal that was ignored when the process began stays
ignored, as `nohup` and background jobs of a shell require.

Python runs signal handlers between bytecode instructions: a signal during a
long compilation is only handled when that is over.
"""

from collections.abc import Iterable, Iterator
import contextlib
import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The Ctrl-C with this number ends the process at once, without the save.
_LAST_INTERRUPT = 3
_STOPPING = b'\nstopping, with a save; a third Ctrl-C ends at once, without.\n'


class Stopped(Exception):
  """Aborts work that is repeated when the run continues."""


class _Asked:
  """The stop requests of signals to this process, for all of its runs."""

  listening = False  # Whether a `listening` context is open.
  requested = False  # Whether the run is to stop after the current step.
  interrupts = 0  # Number of Ctrl-C since that context was opened.
  hosts = 1
  steps = 0  # Calls of `after_step`, over all runs of the process.


_asked = _Asked()


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Context manager: signals request a stop instead of ending the process.

  Contexts may be nested: a request holds until the outermost context ends, so
  that a signal between two runs of a sweep is not lost. When that context ends,
  and everything is saved, a Ctrl-C becomes the usual `KeyboardInterrupt`; a
  third Ctrl-C raises it at once. With several hosts, a signal on any host stops
  all hosts after the same step, by JAX's preemption service. Outside the main
  thread, where Python allows no signal handlers, this does nothing.
  """
  if (
    _asked.listening
    or threading.current_thread() is not threading.main_thread()
  ):
    yield
    return
  _asked.hosts = jax.process_count()
  _asked.listening = True
  before = {}
  try:
    for number in SIGNALS:
      # With several hosts, JAX itself listens for SIGTERM.
      handled_by_jax = number == signal.SIGTERM and _asked.hosts > 1
      if not handled_by_jax and signal.getsignal(number) != signal.SIG_IGN:
        before[number] = signal.signal(number, _note)
    yield
  finally:
    for number, handler in before.items():
      # A handler is None if Python did not install it.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    interrupted = _asked.interrupts > 0
    _asked.interrupts = 0
    _asked.listening = _asked.requested = False
  if interrupted:
    raise KeyboardInterrupt


def requested() -> bool:
  """Returns whether a stop is requested.

  The result is the same on all hosts: with several hosts it is False until
  `after_step` reaches the step after which all stop.
  """
  return _asked.requested


def after_step() -> bool:
  """Returns whether to stop after the step that was just taken.

  With several hosts, all must call this after each step, and get one result.
  """
  if _asked.hosts > 1:
    # Count over all runs: JAX's service may choose a step of the next run.
    _asked.steps += 1
    if multihost_utils.reached_preemption_sync_point(_asked.steps):
      _asked.requested = True
  return _asked.requested


def check() -> None:
  """Raises Stopped if a stop is requested and there is only one host.

  Several hosts share work, which they cannot abort at different moments.
  """
  if _asked.requested and _asked.hosts == 1:
    raise Stopped


def each[T](items: Iterable[T]) -> Iterator[T]:
  """Yields items, such as batches, and calls `check` before each item.

  A signal may also kill the processes that make the items: then `check` raises
  Stopped in place of the errors that follow.
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
    if _asked.interrupts >= _LAST_INTERRUPT:
      raise KeyboardInterrupt
    if _asked.interrupts == 1:
      # Do not `print`: the signal may have interrupted a `print`, and streams
      # are not reentrant.
      with contextlib.suppress(OSError):
        os.write(2, _STOPPING)
  if _asked.hosts == 1:
    _asked.requested = True
  else:
    signal.raise_signal(signal.SIGTERM)  # JAX informs the other hosts.
