"""One writer for a directory, and the locks of the dead."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from mod_jax.errors import UserError
from mod_jax.train import lock


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
  def test_one_that_was_silent_for_long_is_dead(self, tmp_path):
    path = hold(tmp_path, machine='another', pid=os.getpid())
    age(path, lock._DEAD + 5)
    with lock.held(tmp_path):
      assert json.loads(path.read_text())['machine'] != 'another'

  def test_one_that_is_heard_of_is_alive(self, tmp_path, monkeypatch, capsys):
    path = hold(tmp_path, machine='another', host='there')
    age(path, 5)
    monkeypatch.setattr(lock.time, 'sleep', lambda _: os.utime(path))
    with pytest.raises(UserError, match='in use by process .* on there'):
      lock.Lock(path).acquire()
    assert 'waiting until' in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [lock.FILE]

  def test_one_that_falls_silent_is_waited_for(self, tmp_path, monkeypatch):
    path = hold(tmp_path, machine='another')
    age(path, lock._DEAD - 0.5)
    waits = []
    sleep = time.sleep
    monkeypatch.setattr(
      lock.time, 'sleep', lambda _: (waits.append(1), sleep(0.1))
    )
    with lock.held(tmp_path):
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
