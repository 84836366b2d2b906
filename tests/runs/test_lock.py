"""One writer for a directory, and the locks of the dead."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from mod_jax.errors import UserError
from mod_jax.runs import lock


def hold(directory, **changes):
  """Puts down a lock as another process would; returns its path."""
  owner = lock._identity() | changes
  path = directory / lock.FILE
  path.write_text(json.dumps(owner))
  return path


def age(path, seconds):
  then = time.time() - seconds
  os.utime(path, (then, then))


@pytest.fixture
def sleeper():
  """Another process that lives."""
  process = subprocess.Popen(
    [sys.executable, '-c', 'print(flush=True); input()'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  process.stdout.readline()
  yield process
  process.kill()
  process.communicate()


def test_leaves_nothing_behind(tmp_path):
  with lock.held(tmp_path / 'a' / 'b'):
    owner = json.loads((tmp_path / 'a' / 'b' / lock.FILE).read_text())
    assert owner['pid'] == os.getpid()
    with lock.held(tmp_path / 'a' / 'b'):  # A thread may hold it twice.
      pass
    lock.check(tmp_path / 'a' / 'b')
    assert (tmp_path / 'a' / 'b' / lock.FILE).exists()
  assert list(tmp_path.iterdir()) == []
  with lock.held(tmp_path / 'c'):
    (tmp_path / 'c' / 'mine').write_text('')
  assert [p.name for p in (tmp_path / 'c').iterdir()] == ['mine']


def test_another_thread_is_refused(tmp_path):
  refusals = []

  def elsewhere():
    try:
      with lock.held(tmp_path):
        pass
    except UserError as error:
      refusals.append(str(error))

  with lock.held(tmp_path):
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert (tmp_path / lock.FILE).exists()
  assert f'in use by process {os.getpid()}' in refusals[0]


def test_a_process_that_lives_is_refused_and_named(tmp_path, sleeper):
  path = hold(
    tmp_path,
    pid=sleeper.pid,
    started=lock._started(sleeper.pid),
    time='yesterday',
    host='here',
  )
  age(path, 10**6)  # No matter on the same machine.
  before = path.read_text()
  with pytest.raises(UserError) as info, lock.held(tmp_path):
    pass
  assert f'process {sleeper.pid} on here since yesterday' in str(info.value)
  assert '\n' not in str(info.value)
  assert path.read_text() == before
  assert [p.name for p in tmp_path.iterdir()] == [lock.FILE]


def test_a_process_that_is_hidden_may_live(tmp_path, sleeper, monkeypatch):
  hold(tmp_path, pid=sleeper.pid, started=lock._started(sleeper.pid))
  # As where /proc shows users their own processes only.
  monkeypatch.setattr(lock, '_started', lambda pid: None)
  with pytest.raises(UserError, match='in use by'), lock.held(tmp_path):
    pass


@pytest.mark.parametrize('how', ['dead', 'unburied', 'reused'])
def test_the_dead_are_taken_over(tmp_path, sleeper, capsys, how):
  started = lock._started(sleeper.pid)
  if how == 'reused':
    started = str(int(started) - 1)
  else:
    sleeper.kill()
    # Until its parent asks, its number is still there.
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
  if how == 'dead':
    sleeper.wait()
  path = hold(tmp_path, pid=sleeper.pid, started=started)
  with lock.held(tmp_path):
    assert json.loads(path.read_text())['pid'] == os.getpid()
  assert list(tmp_path.iterdir()) == []
  assert f'process {sleeper.pid} on' in capsys.readouterr().err


class TestAnotherMachine:
  @pytest.mark.parametrize('seconds', [5, 10**6, -(10**6)])
  def test_it_lives_if_its_file_changes(
    self, tmp_path, monkeypatch, capsys, seconds
  ):
    """Whatever time that is: its clock, or the file server's, may be wrong."""
    path = hold(tmp_path, machine='another', host='there')
    age(path, seconds)
    monkeypatch.setattr(lock, '_DEAD', 0.2)
    sleep = time.sleep
    with monkeypatch.context() as patch:
      patch.setattr(lock.time, 'sleep', lambda _: age(path, seconds - 15))
      with pytest.raises(UserError, match='in use by process .* on there'):
        lock.Lock(path).acquire()
    assert 'to see whether it lives' in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [lock.FILE]
    waits = []
    monkeypatch.setattr(
      lock.time, 'sleep', lambda _: (waits.append(1), sleep(0.05))
    )
    with lock.held(tmp_path):
      assert json.loads(path.read_text())['machine'] != 'another'
    assert len(waits) > 2

  def test_a_stop_while_it_is_waited_for(self, tmp_path, monkeypatch):
    """A sweep's worker then leaves the run to others, and ends in order."""
    path = hold(tmp_path, machine='another')
    age(path, 5)
    monkeypatch.setattr(lock.stop_lib, 'requested', lambda: True)
    with pytest.raises(lock.InUse, match='stopped while waiting'):
      lock.Lock(path).acquire()
    assert [p.name for p in tmp_path.iterdir()] == [lock.FILE]

  def test_its_heart_beats(self, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, '_BEAT', 0.01)
    with lock.held(tmp_path):
      age(tmp_path / lock.FILE, 1000)
      for _ in range(500):
        if time.time() - (tmp_path / lock.FILE).stat().st_mtime < 500:
          break
        time.sleep(0.01)
      else:
        pytest.fail('no heartbeat')


def test_what_was_taken_over_is_noticed(tmp_path):
  with lock.held(tmp_path):
    lock.check(tmp_path)
    path = hold(tmp_path)
    with pytest.raises(UserError, match='saves nothing more'):
      lock.check(tmp_path)
  assert path.exists()  # It is the other one's.


@pytest.mark.parametrize('text', ['', '{\n  "pid": 1', '\0' * 99])
def test_a_lock_without_its_end(tmp_path, monkeypatch, sleeper, text):
  """Of a process that is writing it, or that did when the power was lost."""
  path = tmp_path / lock.FILE
  path.write_text(text)
  with monkeypatch.context() as patch:
    patch.setattr(
      lock.time,
      'sleep',
      lambda _: hold(
        tmp_path, pid=sleeper.pid, started=lock._started(sleeper.pid)
      ),
    )
    with pytest.raises(lock.InUse, match=f'in use by process {sleeper.pid}'):
      lock.Lock(path).acquire()
  path.write_text(text)
  monkeypatch.setattr(lock, '_DEAD', 0.1)
  with lock.held(tmp_path):
    assert json.loads(path.read_text())['pid'] == os.getpid()
  assert list(tmp_path.iterdir()) == []


def test_a_lock_is_synced_or_not_there(tmp_path, monkeypatch):
  synced = []
  monkeypatch.setattr(lock.os, 'fsync', synced.append)
  for refused in (False, True):  # Whether there are no hard links.
    with monkeypatch.context() as patch:
      if refused:
        patch.setattr(lock.os, 'link', _no_links)
      with lock.held(tmp_path):
        pass
  assert len(synced) == 3

  def full(_):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(lock.os, 'link', _no_links)
  monkeypatch.setattr(lock.os, 'fsync', full)
  with pytest.raises(UserError, match='No space'), lock.held(tmp_path):
    pass
  assert list(tmp_path.iterdir()) == []


def _no_links(*_):
  raise OSError(errno.EPERM, 'Operation not permitted')


def test_whoever_lost_its_lock_says_so_whatever_fails(tmp_path):
  @lock.held(tmp_path)
  def lose_it():
    hold(tmp_path)
    raise FileNotFoundError('what the other cleared away')

  with pytest.raises(lock.InUse, match='saves nothing more'):
    lose_it()


def test_a_stranger_s_file_is_left_alone(tmp_path):
  (tmp_path / lock.FILE).write_text('mine')
  with pytest.raises(UserError, match='not one of ours.*delete it'):
    lock.Lock(tmp_path / lock.FILE).acquire()
  assert (tmp_path / lock.FILE).read_text() == 'mine'


@pytest.mark.parametrize('dead', [False, True])
def test_of_many_one_comes_first(tmp_path, dead):
  for _ in range(5):
    if dead:
      hold(tmp_path, started='never')
    locks = [lock.Lock(tmp_path / lock.FILE) for _ in range(8)]
    start = threading.Barrier(len(locks))
    refused = []

    def acquire(own, start=start, refused=refused):
      start.wait()
      try:
        own.acquire()
      except UserError:
        refused.append(own)

    threads = [threading.Thread(target=acquire, args=[own]) for own in locks]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert len(refused) == len(locks) - 1
    for own in locks:
      own.release()
    assert list(tmp_path.iterdir()) == []
