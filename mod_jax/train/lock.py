"""One writer for a directory: a lock file that outlives no owner.

`lock.json` in the directory names process, host and time. It is made by a hard
link to a finished file: only one of any number of processes succeeds, and none
sees the file half written, on NFS too.

A lock whose owner is dead may be taken over. On the same machine that is
certain: no process has its number, or one that started at another time has. An
owner on another machine, or before this one was started anew, renews the file's
time every quarter of a minute: we watch for two minutes, by our own clock,
whether it does, and compare its times with no others, since clocks go wrong. A
file that lacks its end, as after a loss of power, is watched in the same way.
That is safe if the file system shows one client's changes to the others within
that time (NFS does after at most one minute, by default) and if the owner never
sleeps for longer. An owner that did, such as a suspended machine, finds its
lock gone before its next save, and stops. Object stores (`gs://…`) have no such
link: there two processes that start within the same second may both believe
that they came first. Nor can a file's time be renewed there: the owner rewrites
`lock.beat` instead.
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
from mod_jax.train import stop as stop_lib
from mod_jax.train import workdir as workdir_lib

FILE = 'lock.json'
_BEAT = 15.0  # Seconds between two renewals of the file's time.
_DEAD = 120.0  # Seconds without one, after which an owner elsewhere is dead.
# Of a lock whose end is missing.
_UNKNOWN = {'pid': '(unknown)', 'host': '(unknown)', 'time': '(unknown)'}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class InUse(UserError):
  """Another process, or another thread, holds the lock of a directory.

  Also where a signal to stop came before it was known whether it still does.
  """


class Lock:
  """What one process holds; see `held`."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.thread = threading.get_ident()
    self.depth = 0
    self.text = None  # Of the file; None where another host holds it.
    self._done = threading.Event()
    self._made = []  # Directories that were not there before.

  def acquire(self) -> None:
    """Makes the file; raises InUse where somebody else holds it."""
    directory = self.path.parent
    if not paths.is_remote(directory):  # There are no directories in stores.
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
    """Removes the file, and the directories that were made for it alone."""
    self._done.set()
    with contextlib.suppress(OSError):
      if self.text is not None and _read(self.path) == self.text:
        self.path.unlink()
        # Only ours: another's says that its owner is alive.
        if paths.is_remote(self.path):
          _beat_of(self.path).unlink(missing_ok=True)
      for made in self._made:
        os.rmdir(made)  # Fails where something was written.
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
      # Without hard links, others may see the file half written, and wait.
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
          # Without a time given, it is the file server's, which all share.
          os.utime(self.path)


_held: dict[str, Lock] = {}


@contextlib.contextmanager
def held(directory) -> Iterator[Lock]:
  """Keeps other processes from writing to a directory, which is made.

  A thread may hold a lock several times over: a sweep holds that of a run that
  lies in its own directory. With several hosts the first one holds it for all.

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
    # Another that took the lock over also clears away what this one writes.
    check(directory)
    raise
  finally:
    lock.depth -= 1
    if not lock.depth:
      del _held[str(path)]
      lock.release()


def check(directory) -> None:
  """Raises InUse if another process took over what this one held."""
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
    # All hosts must raise the same, since all shall go on in the same way.
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
  """Returns what tells this process from all others, and when it began."""
  return {
    'pid': os.getpid(),
    'host': socket.gethostname(),
    'time': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
    'machine': _machine(),
    'started': _started(os.getpid()),
    'id': uuid.uuid4().hex,
  }


def _machine() -> str:
  """Returns an id of the machine and namespace that number the processes."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    # Containers of one machine number their processes each for itself.
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:  # The system is not Linux.
    return f'{socket.gethostname()} {uuid.getnode():x}'


def _started(pid: int) -> str | None:
  """Returns when a process began, in whatever unit; None if it is not known.

  Raises:
    ProcessLookupError: there is no such process.
  """
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    with contextlib.suppress(PermissionError):  # It is another user's.
      os.kill(pid, 0)  # Raises if there is no process.
    return None
  # The name, in parentheses, may hold any character; the state follows it.
  fields = stat.rpartition(')')[2].split()
  if fields[0] in 'ZX':  # It is dead, but its parent has not noticed.
    raise ProcessLookupError(pid)
  return fields[19]


def _bury(path) -> None:
  """Takes a dead owner's lock away.

  Raises:
    InUse: the owner lives.
  """
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
      # Where a system hides other users' processes, they count as alive.
      if _started(pid) in (None, started):
        raise InUse(_refusal(path, owner))
  else:
    _watch(path, owner, text)
  with _alone(path.parent):
    # A quicker process may have removed it, and put its own here.
    if _read(path) == text:
      path.unlink()
      print(
        f'process {owner["pid"]} on {owner["host"]}, which held {path}, is'
        ' dead: taking over.',
        file=sys.stderr,
      )


@contextlib.contextmanager
def _alone(directory):
  """Lets one process at a time into its body, where the file system can.

  It takes the kernel's lock on the directory, which dies with its owner. Many
  network file systems have none on directories: there two processes that find
  the same dead owner in the same few milliseconds may both go on.
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
  """Waits until a lock was not renewed for `_DEAD` seconds, or is another one.

  Raises:
    InUse: it was renewed, so its owner lives; or a stop was asked for.
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
  """Waits for a second; raises InUse where a stop was asked for."""
  if stop_lib.requested():
    raise InUse(f'stopped while waiting for {path}: nothing was begun.')
  time.sleep(min(1.0, _DEAD))


def _beat_of(path):
  return path.with_name('lock.beat')


def _renewed(path) -> float | str | None:
  """Returns what the owner changes to show its life; None if it is gone."""
  if paths.is_remote(path):
    return _read(_beat_of(path))
  try:
    # Opening the file makes NFS forget an older time.
    with open(path, 'rb') as file:
      return os.fstat(file.fileno()).st_mtime
  except FileNotFoundError:
    return None


def _write(path, text):
  """Writes a new file, or none, so that it outlasts a loss of power."""
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
