"""A lock file that gives a directory one writer, and is not left stale.

`lock.json` in the directory names process, host and time. It is created by a
hard link to a complete file: only one of any number of processes succeeds, and
none sees the file half written, also on NFS.

A lock whose owner is dead may be taken over. On the same machine that can be
decided at once: no process has its pid, or a process with that pid started at
another time. Owners touch the file every 15 seconds. If the owner is on another
machine, or the machine was rebooted, we wait two minutes by our own clock and
see whether the modification time changes; it is never compared with our clock,
since clocks differ. A truncated file, as after a loss of power, is treated in
the same way. This is safe if the file system shows one client's changes to the
others within that time (NFS does after at most one minute, by default) and if
the owner never sleeps for longer. An owner that did, such as a suspended
machine, finds its lock gone before its next save, and stops.

Object stores (`gs://…`) have no hard links: two processes that start within the
same second may both acquire the lock. Nor can a file be touched there: the
owner rewrites `lock.beat` instead.
"""

from collections.abc import Iterator
import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any
import uuid

import jax
from jax.experimental import multihost_utils
import numpy as np

from mod_jax import paths
from mod_jax.errors import UserError
from mod_jax.runs import stop as stop_lib
from mod_jax.runs import workdir as workdir_lib

FILE = 'lock.json'
_BEAT = 15.0  # Seconds between two heartbeats.
_DEAD = 120.0  # Seconds without one after which a remote owner counts as dead.
# The owner of a truncated lock file.
_UNKNOWN = {'pid': '(unknown)', 'host': '(unknown)', 'time': '(unknown)'}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class InUse(UserError):
  """Another process, or another thread, holds the lock of a directory.

  Also raised if a stop is requested while waiting to see whether it does.
  """


class Lock:
  """The lock of one process on a directory; acquired by `held`."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.thread = threading.get_ident()
    self.depth = 0
    self.text = None  # Content of the file; None if another host holds it.
    self._done = threading.Event()
    self._made = []  # Directories that `acquire` creates.

  def acquire(self) -> None:
    """Creates the file; raises InUse if another process holds the lock."""
    directory = self.path.parent
    if not paths.is_remote(directory):  # Stores have no directories.
      parents = (directory, *directory.parents)
      self._made = [p for p in parents if not p.exists()]
    try:
      directory.mkdir(parents=True, exist_ok=True)
      text = json.dumps(_identity(), indent=2) + '\n'
      while not self._create(text):
        _bury(self.path)
    except OSError as error:
      self.release()
      raise UserError(
        f'--workdir={directory} cannot be written'
        f' ({error.strerror or error}): name a directory that can.'
      ) from error
    except BaseException:
      self.release()
      raise
    self.text = text
    threading.Thread(target=self._beat, daemon=True).start()

  def release(self) -> None:
    """Removes the file, and directories created for it that are still empty."""
    self._done.set()
    with contextlib.suppress(OSError):
      if self.text is not None and _read(self.path) == self.text:
        self.path.unlink()
        # Not that of another owner, which shows that it is alive.
        if paths.is_remote(self.path):
          _beat_of(self.path).unlink(missing_ok=True)
      for created in self._made:
        os.rmdir(created)  # Fails if it is not empty.
    self.text = None

  def _create(self, text) -> bool:
    if paths.is_remote(self.path):
      if not self.path.exists():
        self.path.write_text(text)
      return _read(self.path) == text
    ready = self.path.with_name(f'.{FILE}.{uuid.uuid4().hex}')
    try:
      _write(ready, text)
      os.link(ready, self.path)
    except FileExistsError:
      return False
    except OSError as error:
      if error.errno not in _NO_LINKS:
        raise
      # Without hard links, others may see a half written file; then they wait.
      try:
        _write(self.path, text)
      except FileExistsError:
        return False
    finally:
      ready.unlink(missing_ok=True)
    return True

  def _beat(self):
    while not self._done.wait(_BEAT):
      with contextlib.suppress(OSError):
        if _read(self.path) != self.text:
          continue
        if paths.is_remote(self.path):
          _beat_of(self.path).write_text(uuid.uuid4().hex)
        else:
          # Without an explicit time, this uses the file server's clock.
          os.utime(self.path)


_held: dict[str, Lock] = {}


@contextlib.contextmanager
def held(directory) -> Iterator[Lock]:
  """Keeps other processes from writing to a directory; creates it if missing.

  The lock is reentrant within a thread: a sweep may hold that of a run in its
  own directory. With several hosts the first one holds it for all.

  Raises:
    InUse: another process, or another thread, holds it.
    UserError: the directory cannot be written.
  """
  path = _path(directory)
  lock = _held.get(str(path))
  if lock is None:
    lock = Lock(path)
    _acquire_on_first_host(lock)
    _held[str(path)] = lock
  elif lock.thread != threading.get_ident():
    owner = json.loads(lock.text) if lock.text else _identity()
    raise InUse(_refusal(path, owner))
  lock.depth += 1
  try:
    yield lock
  except Exception:
    # A process that took over the lock may also have caused the error.
    check(directory)
    raise
  finally:
    lock.depth -= 1
    if not lock.depth:
      del _held[str(path)]
      lock.release()


def check(directory) -> None:
  """Raises InUse if another process took over a lock that this one held."""
  lock = _held.get(str(_path(directory)))
  if lock is None or lock.text is None or _read(lock.path) == lock.text:
    return
  raise InUse(
    f'the lock {lock.path} was taken over by another process while this one'
    ' seemed dead, so this one saves nothing more: leave the run to the other,'
    ' or end that and start again.'
  )


def _path(directory):
  return paths.absolute(workdir_lib.expand(directory) / FILE)


def _acquire_on_first_host(lock):
  error = None
  if jax.process_index() == 0:
    try:
      lock.acquire()
    except UserError as refusal:
      error = refusal
  if jax.process_count() > 1:
    # All hosts must raise the same type, so that all go on in the same way.
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


def _identity() -> dict[str, Any]:
  """Returns what identifies this process, and the time."""
  return {
    'pid': os.getpid(),
    'host': socket.gethostname(),
    'time': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
    'machine': _machine(),
    'started': _started(os.getpid()),
    'id': uuid.uuid4().hex,
  }


def _machine() -> str:
  """Returns an id of the machine and the namespace of its pids."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    # Each container on a machine has its own pids.
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:  # The system is not Linux.
    return f'{socket.gethostname()} {uuid.getnode():x}'


def _started(pid: int) -> str | None:
  """Returns an opaque start time of a process, or None if it is unknown.

  Raises ProcessLookupError if there is no such process.
  """
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    with contextlib.suppress(PermissionError):  # Another user's process.
      os.kill(pid, 0)  # Raises if there is no process.
    return None
  # The name, in parentheses, may hold any characters; the state follows it.
  fields = stat.rpartition(')')[2].split()
  if fields[0] in 'ZX':  # A zombie, or dead.
    raise ProcessLookupError(pid)
  return fields[19]


def _bury(path) -> None:
  """Removes the lock of a dead owner; raises InUse if the owner is alive."""
  text = _read(path)
  if text is None:
    return  # It was released meanwhile.
  try:
    owner = json.loads(text)
    pid, *_ = [owner[key] for key in _UNKNOWN]
    same_machine, started = owner['machine'] == _machine(), owner['started']
  except (ValueError, KeyError, TypeError) as error:
    if text.strip('\0') and not text.startswith('{'):
      raise UserError(
        f'the lock {path} is not one of ours: delete it if no process writes to'
        ' that directory.'
      ) from error
    owner, same_machine = _UNKNOWN, False
  if same_machine:
    with contextlib.suppress(ProcessLookupError):
      # Processes of other users may be hidden, and count as alive.
      if _started(pid) in (None, started):
        raise InUse(_refusal(path, owner))
  else:
    _watch(path, owner, text)
  with _alone(path.parent):
    # Another process may have removed it, and created its own.
    if _read(path) == text:
      path.unlink()
      print(
        f'process {owner["pid"]} on {owner["host"]}, which held {path}, is'
        ' dead: taking over.',
        file=sys.stderr,
      )


@contextlib.contextmanager
def _alone(directory):
  """Admits one process at a time, where the file system supports it.

  It holds a `flock` on the directory, which the kernel releases when the
  process ends. Many network file systems do not support it on directories:
  there two processes that find the same dead owner within a few milliseconds
  may both take over the lock.
  """
  if paths.is_remote(directory):
    yield
    return
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):
      fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def _watch(path, owner, text):
  """Waits until a lock was not renewed for `_DEAD` seconds, or has changed.

  Raises InUse if it was renewed, so that its owner is alive, or if a stop is
  requested.
  """
  print(
    f'{path} is held by process {owner["pid"]} on {owner["host"]}: waiting'
    f' {_DEAD:.0f} s to see whether it lives.',
    file=sys.stderr,
  )
  first, start = _renewed(path), time.monotonic()
  while time.monotonic() - start < _DEAD:
    _pause(path)
    if _read(path) != text:
      return
    if _renewed(path) != first:
      raise InUse(_refusal(path, owner))


def _pause(path):
  """Waits for a second; raises InUse if a stop is requested."""
  if stop_lib.requested():
    raise InUse(f'stopped while waiting for {path}: nothing was begun.')
  time.sleep(min(1.0, _DEAD))


def _beat_of(path):
  return path.with_name('lock.beat')


def _renewed(path) -> float | str | None:
  """Returns the last heartbeat: changes while the owner lives; None if gone."""
  if paths.is_remote(path):
    return _read(_beat_of(path))
  try:
    # Opening the file makes NFS refresh its cached attributes.
    with open(path, 'rb') as file:
      return os.fstat(file.fileno()).st_mtime
  except FileNotFoundError:
    return None


def _write(path, text):
  """Writes a new file and syncs it to disk; removes it if that fails."""
  with open(path, 'x') as file:
    try:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    except OSError:
      os.unlink(path)
      raise


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
