"""A lock that gives a directory one writer, and that no dead owner keeps.

`lock.json` names its owner; only one of any number of processes can create it.
On one machine the owner also holds a `flock` on the directory, which the system
releases when the process ends: a process that gets the `flock` takes over the
lock of a dead owner at once.

For machines that share a disk, an owner writes `lock.beat` every 15 seconds. A
contender polls this file for two minutes by its own clock. If the file does not
change, the owner is dead (or `lock.json` was truncated by a loss of power): the
contender writes its own `lock.json`, waits, and reads it again. If several
contenders do so, the last one wins. An owner that paused for longer, such as a
suspended machine, sees before its next save that it lost the lock, and stops.

Object stores (`gs://…`) have no exclusive creation: if two processes start
within the same second, both go on, and the first one stops before it saves.
"""

from collections.abc import Iterator
import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid

import jax
from jax.experimental import multihost_utils
import numpy as np

from mod_jax import paths
from mod_jax.errors import UserError
from mod_jax.runs import stop as stop_lib

FILE = 'lock.json'
_BEAT = 15.0  # Seconds between two heartbeats.
_POLL = 1.0  # Seconds between two readings of the heartbeat's file.
_DEAD = 120.0  # Seconds without heartbeat until a remote owner counts as dead.
_UNKNOWN = dict.fromkeys(('pid', 'host', 'time'), '(unknown)')


class InUse(UserError):
  """Another process, or another thread, holds the lock of a directory.

  Also raised if a stop is requested while watching whether the owner is alive.
  """


class Lock:
  """The lock of one process on a directory; acquired by `held`."""

  def __init__(self, path):
    self.path = path
    self.depth = 0
    self.text = None  # Content of `lock.json`; None on all hosts but the first.
    self._beat_path = path.with_name('lock.beat')
    self._directory = None  # File descriptor of the directory.
    self._alone = False  # Whether this process holds the `flock`.
    self._machine = None  # Equal for processes that see the same `flock`.
    self._done = threading.Event()
    self._beating = threading.Thread(target=self._beat, daemon=True)
    self._made = []  # Directories that `acquire` creates.

  def acquire(self) -> None:
    """Creates or takes over the lock; raises InUse if its owner is alive."""
    directory = self.path.parent
    remote = paths.is_remote(directory)  # Stores have no directories.
    if not remote:
      parents = (directory, *directory.parents)
      self._made = [p for p in parents if not p.exists()]
    try:
      directory.mkdir(parents=True, exist_ok=True)
      if not remote:
        self._directory = os.open(directory, os.O_RDONLY)
        self._machine = f'{_kernel()} {os.fstat(self._directory).st_dev}'
        # If the file system has no `flock`, only the heartbeat protects.
        with contextlib.suppress(OSError):
          fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
          self._alone = True
      self.text = json.dumps(self._identity(), indent=2) + '\n'
      while not (self._create() or self._take_over()):
        pass
    except OSError as error:
      self.release()
      raise UserError(
        f'--workdir={directory} cannot be written'
        f' ({error.strerror or error}): name a directory that can.'
      ) from error
    except BaseException:
      self.release()
      raise
    self._beating.start()

  def release(self) -> None:
    """Removes the lock's files if still ours, and directories made for them."""
    self._done.set()
    if self._beating.is_alive():
      self._beating.join()
    with contextlib.suppress(OSError):
      if self.text is not None and _read(self.path) == self.text:
        self.path.unlink()
        self._beat_path.unlink(missing_ok=True)
    if self._directory is not None:
      os.close(self._directory)
      self._directory = None
    with contextlib.suppress(OSError):
      for created in self._made:
        os.rmdir(created)  # Fails if it is not empty.
    self.text = None

  def _identity(self):
    now = datetime.datetime.now().astimezone()
    return {
      'pid': os.getpid(),
      'host': socket.gethostname(),
      'time': now.isoformat(timespec='seconds'),
      # Write None without the `flock`: on the same machine, a contender that
      # got the `flock` would take this owner for dead.
      'machine': self._machine if self._alone else None,
      'id': uuid.uuid4().hex,
    }

  def _create(self) -> bool:
    """Creates the lock's file; returns False if it exists already."""
    if paths.is_remote(self.path):
      if not self.path.exists():
        self.path.write_text(self.text)
      return _read(self.path) == self.text
    try:
      descriptor = os.open(
        self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666
      )
    except FileExistsError:
      return False
    try:
      with open(descriptor, 'w') as file:
        file.write(self.text)
    except OSError:  # The disk is full.
      os.unlink(self.path)
      raise
    return True

  def _take_over(self) -> bool:
    """Replaces the lock of a dead owner; raises InUse if the owner is alive.

    Returns False if the lock was released or replaced meanwhile.
    """
    text = _read(self.path)
    if text is None:
      return False
    owner = _parse(self.path, text)
    here = self._machine is not None and owner.get('machine') == self._machine
    if here and not self._alone:
      raise InUse(_refusal(self.path, owner))
    if not here and not self._is_dead(owner, text):
      return False
    print(
      f'process {owner["pid"]} on {owner["host"]}, which held {self.path}, is'
      ' dead: taking over.',
      file=sys.stderr,
    )
    paths.write_bytes(self.path, self.text.encode())
    if not here:
      self._pause(_BEAT)
    text = _read(self.path)
    if text != self.text:
      raise InUse(_refusal(self.path, _parse(self.path, text or '')))
    return True

  def _is_dead(self, owner, text) -> bool:
    """Watches the owner for `_DEAD` seconds; returns True if it is dead.

    Returns False if the lock was released or replaced meanwhile. Raises InUse
    if the owner is alive.
    """
    print(
      f'{self.path} is held by process {owner["pid"]} on {owner["host"]}:'
      f' waiting {_DEAD:.0f} s to see whether it lives.',
      file=sys.stderr,
    )
    beat, start = _read(self._beat_path), time.monotonic()
    while time.monotonic() - start < _DEAD:
      self._pause(_POLL)
      if _read(self.path) != text:
        return False
      if _read(self._beat_path) != beat:
        raise InUse(_refusal(self.path, owner))
    return True

  def _pause(self, seconds):
    """Waits; raises InUse if a stop is requested."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
      if stop_lib.requested():
        raise InUse(f'stopped while waiting for {self.path}: nothing was begun')
      time.sleep(min(left, _POLL))

  def _beat(self):
    while not self._done.wait(_BEAT):
      with contextlib.suppress(OSError):
        if _read(self.path) == self.text:
          self._beat_path.write_text(uuid.uuid4().hex)


_held: dict[tuple[str, int], Lock] = {}  # Locks by directory and thread.


@contextlib.contextmanager
def held(directory) -> Iterator[Lock]:
  """Context manager: keeps other processes from writing to a directory.

  Creates the directory if it is missing. The lock is reentrant within a thread,
  as for a sweep that holds the lock of its directory and trains a run there.
  With several hosts, the first host holds the lock for all. Raises InUse if
  another process or thread holds the lock.
  """
  key = _key(directory)
  lock = _held.get(key)
  if lock is None:
    lock = Lock(paths.absolute(directory) / FILE)
    _acquire_on_first_host(lock)
    _held[key] = lock
  lock.depth += 1
  try:
    yield lock
  except Exception:
    # If another process took over the lock, that may be the cause of this
    # error: `check` then raises InUse, which explains it.
    check(directory)
    raise
  finally:
    lock.depth -= 1
    if not lock.depth:
      del _held[key]
      lock.release()


def check(directory) -> None:
  """Raises InUse if another process took over the lock that this one held."""
  lock = _held.get(_key(directory))
  if lock is None or lock.text is None or _read(lock.path) == lock.text:
    return
  raise InUse(
    f'the lock {lock.path} was taken over by another process while this one'
    ' seemed dead, so this one saves nothing more: leave the run to the other,'
    ' or end that and start again.'
  )


def _key(directory):
  return str(paths.absolute(directory)), threading.get_ident()


def _acquire_on_first_host(lock):
  error = None
  if jax.process_index() == 0:
    try:
      lock.acquire()
    except UserError as refusal:
      error = refusal
  if jax.process_count() > 1:
    # All hosts must raise the same type of error, since callers may catch it.
    kinds = (type(None), UserError, InUse)
    kind = multihost_utils.broadcast_one_to_all(
      np.array(kinds.index(type(error)))
    )
    if kind and error is None:
      error = kinds[int(kind)](
        f'the first host could not lock {lock.path}: it says why.'
      )
  if error is not None:
    raise error


def _kernel() -> str:
  """Returns an id of the running kernel; off Linux, of the machine."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  except OSError:  # The system is not Linux.
    return f'{socket.gethostname()} {uuid.getnode():x}'


def _parse(path, text) -> dict:
  """Returns the owner in a lock's text; raises UserError if it is no lock."""
  try:
    return _UNKNOWN | json.loads(text)
  except (ValueError, TypeError) as error:
    if text.strip('\0') and not text.startswith('{'):
      raise UserError(
        f'the lock {path} is not one of ours: delete it if no process writes to'
        ' that directory.'
      ) from error
    return _UNKNOWN


def _read(path) -> str | None:
  try:
    return path.read_bytes().decode('utf-8', 'replace')
  except FileNotFoundError:
    return None


def _refusal(path, owner) -> str:
  return (
    f'{path.parent} is in use by process {owner["pid"]} on {owner["host"]}'
    f' since {owner["time"]}: wait for it or end it, or name another workdir;'
    f' if it is certainly dead, delete {path}.'
  )
