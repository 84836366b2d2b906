"""One writer for a directory, and the locks of the dead."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from mod_jax.errors import UserError
from mod_jax.runs import lock

OWNER = """
import sys
from mod_jax.runs import lock
with lock.held(sys.argv[1]):
  print(flush=True)
  input()
"""
FOREIGN = {'pid': 7, 'host': 'there', 'time': 'yesterday', 'machine': 'another'}


def leave(directory, text=None, **changes):
  """Puts down a lock, by default as another machine does; returns its path."""
  path = directory / lock.FILE
  path.write_text(json.dumps(FOREIGN | changes) if text is None else text)
  return path


def names(directory):
  return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def quick(monkeypatch):
  monkeypatch.setattr(lock, '_BEAT', 0.05)
  monkeypatch.setattr(lock, '_POLL', 0.02)
  monkeypatch.setattr(lock, '_DEAD', 0.3)


@pytest.fixture
def owner(tmp_path):
  """Another process, which holds the lock of `tmp_path`."""
  process = subprocess.Popen(
    [sys.executable, '-c', OWNER, tmp_path],
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
  assert names(tmp_path) == []
  with lock.held(tmp_path / 'c'):
    (tmp_path / 'c' / 'mine').write_text('')
  assert names(tmp_path / 'c') == ['mine']


def test_a_full_disk_leaves_no_half_of_a_lock(tmp_path, monkeypatch):
  def full(*_):
    return os.fdopen(os.open('/dev/full', os.O_WRONLY), 'w')

  monkeypatch.setattr(lock, 'open', full, raising=False)
  with pytest.raises(UserError, match='No space'), lock.held(tmp_path / 'run'):
    pass
  assert names(tmp_path) == []


class TestThisMachine:
  def test_a_process_that_lives_is_refused_and_named(self, tmp_path, owner):
    path = tmp_path / lock.FILE
    before = path.read_text()
    with pytest.raises(lock.InUse) as info, lock.held(tmp_path):
      pass
    assert f'in use by process {owner.pid} on' in str(info.value)
    assert json.loads(before)['time'] in str(info.value)
    assert '\n' not in str(info.value)
    assert path.read_text() == before

  def test_another_thread_is_refused(self, tmp_path):
    refusals = []

    def elsewhere():
      with pytest.raises(lock.InUse) as info, lock.held(tmp_path):
        pass
      refusals.append(str(info.value))

    with lock.held(tmp_path):
      thread = threading.Thread(target=elsewhere)
      thread.start()
      thread.join()
      assert (tmp_path / lock.FILE).exists()
    assert f'in use by process {os.getpid()}' in refusals[0]

  def test_the_dead_are_taken_over_at_once(self, tmp_path, owner, capsys):
    owner.kill()
    owner.wait()
    assert names(tmp_path) == [lock.FILE]
    with lock.held(tmp_path):
      owner_now = json.loads((tmp_path / lock.FILE).read_text())
      assert owner_now['pid'] == os.getpid()
    assert names(tmp_path) == []
    assert f'process {owner.pid} on' in capsys.readouterr().err

  @pytest.mark.usefixtures('quick')
  @pytest.mark.parametrize('dead', ['here', 'there', None])
  def test_of_many_one_comes_first(self, tmp_path, dead):
    for _ in range(5):
      if dead:
        owner = lock.Lock(tmp_path / lock.FILE)
        owner.acquire()
        machine = owner._machine if dead == 'here' else 'another'
        owner.release()
        leave(tmp_path, machine=machine)
      locks = [lock.Lock(tmp_path / lock.FILE) for _ in range(8)]
      start = threading.Barrier(len(locks))
      refused = []

      def acquire(own, start=start, refused=refused):
        start.wait()
        try:
          own.acquire()
        except lock.InUse:
          refused.append(own)

      threads = [threading.Thread(target=acquire, args=[own]) for own in locks]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      assert len(refused) == len(locks) - 1
      for own in locks:
        own.release()
      assert names(tmp_path) == []


@pytest.mark.usefixtures('quick')
class TestAnotherMachine:
  def test_it_lives_if_its_heart_beats(self, tmp_path, monkeypatch, capsys):
    path = leave(tmp_path)
    before = path.read_text()

    def beat(_):
      (tmp_path / 'lock.beat').write_text(str(time.monotonic()))

    with monkeypatch.context() as patch:
      patch.setattr(lock.time, 'sleep', beat)
      with pytest.raises(lock.InUse, match='in use by process 7 on there'):
        lock.Lock(path).acquire()
    assert 'to see whether it lives' in capsys.readouterr().err
    assert path.read_text() == before
    assert names(tmp_path) == ['lock.beat', lock.FILE]  # They are its own.
    with lock.held(tmp_path):  # Now it does not beat any more.
      assert json.loads(path.read_text())['pid'] == os.getpid()
    assert names(tmp_path) == []

  def test_of_two_contenders_the_last_one_wins(self, tmp_path, monkeypatch):
    path = leave(tmp_path)
    write = lock.paths.write_bytes

    def write_first(path, data):
      write(path, data)
      leave(tmp_path, pid=8)

    monkeypatch.setattr(lock.paths, 'write_bytes', write_first)
    with pytest.raises(lock.InUse, match='in use by process 8'):
      lock.Lock(path).acquire()
    assert json.loads(path.read_text())['pid'] == 8

  def test_without_flock_the_heartbeat_has_to_do(self, tmp_path, monkeypatch):
    def unsupported(*_):
      raise OSError(38, 'Function not implemented')

    monkeypatch.setattr(lock.fcntl, 'flock', unsupported)
    refused = pytest.raises(lock.InUse, match=f'by process {os.getpid()}')
    with lock.held(tmp_path), refused:
      lock.Lock(tmp_path / lock.FILE).acquire()
    leave(tmp_path)
    with lock.held(tmp_path):
      pass
    assert names(tmp_path) == []

  def test_a_stop_while_it_is_waited_for(self, tmp_path, monkeypatch):
    """A sweep's worker then leaves the run to others, and ends in order."""
    path = leave(tmp_path)
    monkeypatch.setattr(lock.stop_lib, 'requested', lambda: True)
    with pytest.raises(lock.InUse, match='stopped while waiting'):
      lock.Lock(path).acquire()
    assert names(tmp_path) == [lock.FILE]

  @pytest.mark.parametrize(
    'text', ['', '{\n  "pid": 1', '\0' * 99], ids=['empty', 'cut', 'zeros']
  )
  def test_a_lock_without_its_end(self, tmp_path, text):
    """Of a process that is writing it, or that did when the power was lost."""
    path = leave(tmp_path, text)
    with lock.held(tmp_path):
      assert json.loads(path.read_text())['pid'] == os.getpid()
    assert names(tmp_path) == []


def test_what_was_taken_over_is_noticed_whatever_fails(tmp_path):
  with lock.held(tmp_path):
    lock.check(tmp_path)
    path = leave(tmp_path)
    with pytest.raises(lock.InUse, match='saves nothing more'):
      lock.check(tmp_path)
  assert path.exists()  # It is the other one's.
  path.unlink()

  @lock.held(tmp_path)
  def lose_it():
    leave(tmp_path)
    raise FileNotFoundError('what the other cleared away')

  with pytest.raises(lock.InUse, match='saves nothing more'):
    lose_it()


def test_a_stranger_s_file_is_left_alone(tmp_path):
  path = leave(tmp_path, 'mine')
  with pytest.raises(UserError, match='not one of ours.*delete it'):
    lock.Lock(path).acquire()
  assert path.read_text() == 'mine'
