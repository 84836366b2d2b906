"""Workers: what they train, leave alone, note and refuse."""

import contextlib
import dataclasses
import json
import signal

import pytest
import tiny

from mod_jax import config as config_lib
from mod_jax.data import fingerprint
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.runs import lock
from mod_jax.sweeps import manifest, run
from mod_jax.sweeps.manifest import Entry
from mod_jax.tasks import make_task, phases

pytestmark = pytest.mark.slow

BASE = tiny.experiment(
  dataclasses.replace(
    tiny.LM, num_layers=1, routing=MoDConfig(period=1, offset=0)
  )
)


def entries(*seeds, base=BASE):
  def entry(seed):
    name = f'run_{seed}'
    config = config_lib.replace(base, {'name': name, 'seed': seed})
    told = {'group': 'mod', 'budget': 1e9, 'facts': {}}
    return Entry(id=name, seed=seed, config=config, **told)

  return [entry(seed) for seed in seeds]


def files(workdir):
  return {
    path.name: json.loads(path.read_text())
    for path in (workdir / 'results').glob('*')
  }


def test_trains_what_has_no_result(trained, tmp_path, capsys):
  runs = entries(1, 13, 2)
  digest = manifest.write(tmp_path, runs)
  assert run.run(tmp_path, slice(1, 2)) == []
  assert run.run(tmp_path, slice(2)) == []
  assert trained == [13, 1]
  assert run.run(tmp_path) == []
  assert run.run(tmp_path) == []
  assert trained == [13, 1, 2]
  found = run.results(tmp_path)
  assert [entry for entry, _ in found] == runs
  assert [result['loss'] for _, result in found] == [0.1, None, 0.2]
  data = make_task(runs[0].config).modality.data_fingerprint()
  told = found[0][1]
  assert (told['manifest'], told['diverged']) == (digest, '')
  assert told['data'] == fingerprint.digest(data)
  assert told['metrics'] == {'top_k/loss': 0.1, 'top_k/routed': 0.5}
  assert found[1][1]['diverged'] == 'loss is nan at step 3'
  assert 'run_13: diverged: loss is nan' in capsys.readouterr().out


def test_runs_on_other_data_are_told(trained, tmp_path, caplog):
  runs = entries(1, 2)
  manifest.write(tmp_path, runs)
  run.run(tmp_path)
  run.results(tmp_path)
  assert 'sets of data' not in caplog.text
  path = run.result_path(tmp_path, runs[0])
  path.write_text(json.dumps(json.loads(path.read_text()) | {'data': 'other'}))
  assert len(run.results(tmp_path)) == 2
  assert 'saw 2 different sets of data' in caplog.text


def test_a_damaged_or_lost_result_is_none(trained, tmp_path, caplog):
  runs = entries(1, 2)
  manifest.write(tmp_path, runs)
  run.run(tmp_path)
  before = files(tmp_path)
  path = run.result_path(tmp_path, runs[0])
  for text in ('', '{"id": 1}', '[]', None):
    path.unlink() if text is None else path.write_text(text)
    assert [entry.id for entry, _ in run.results(tmp_path)] == ['run_2']
    assert 'run_1.json is damaged' in caplog.text
    assert run.run(tmp_path) == []
    assert files(tmp_path) == before
  assert trained == [1, 2]


def test_who_lost_a_run_goes_on_with_the_next(
  trained, tmp_path, monkeypatch, capsys
):
  manifest.write(tmp_path, entries(1, 2))
  complete = phases.complete

  def lose(config, folder, **kwargs):
    if folder.name == 'run_1':  # Another takes it over.
      (folder / lock.FILE).write_text('another')
      raise FileNotFoundError('what the other cleared away')
    return complete(config, folder, **kwargs)

  monkeypatch.setattr(phases, 'complete', lose)
  assert run.run(tmp_path) == ['run_1']
  assert trained == [2]
  assert 'run_1: the lock' in capsys.readouterr().err


def test_what_another_worker_has_just_finished_is_not_trained(
  trained, tmp_path, monkeypatch
):
  """It looked for a result, and then waited for the lock."""
  runs = entries(1)
  manifest.write(tmp_path, runs)
  run.run(tmp_path)
  path = run.result_path(tmp_path, runs[0])
  result = path.read_text()
  path.unlink()
  completed = []
  monkeypatch.setattr(
    phases, 'complete', lambda *args, **_: completed.append(1)
  )

  @contextlib.contextmanager
  def held(folder):
    path.write_text(result)  # By the other worker.
    yield

  monkeypatch.setattr(lock, 'held', held)
  assert run.run(tmp_path) == []
  assert not completed
  assert path.read_text() == result


def test_what_another_worker_holds_is_left_to_it(
  trained, tmp_path, monkeypatch, capsys
):
  runs = entries(1, 2)
  manifest.write(tmp_path, runs)
  folder = run.directory(tmp_path, runs[0])
  owner = lock.Lock(folder / lock.FILE)
  owner.acquire()
  assert run.run(tmp_path) == ['run_1']
  assert trained == [2]
  assert '1 of 2 runs have no result yet' in capsys.readouterr().err
  owner.release()
  assert run.run(tmp_path) == []
  assert trained == [2, 1]


def test_a_signal_stops_between_runs(trained, tmp_path, monkeypatch):
  runs = entries(1, 99, 2)  # A signal stops that of seed 99.
  manifest.write(tmp_path, runs)
  assert run.run(tmp_path) == ['run_99']
  write = run._write

  def write_and_signal(*args):
    write(*args)
    signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(run, '_write', write_and_signal)
  manifest.write(tmp_path / 'b', entries(1, 2, 3))
  assert run.run(tmp_path / 'b') == ['run_2', 'run_3']
  assert list(files(tmp_path / 'b')) == ['run_1.json']


def test_refused(trained, tmp_path, command):
  manifest.write(tmp_path, entries(1, 2))
  with pytest.raises(UserError, match='no run is chosen: .* has 2 of them'):
    run.run(tmp_path, slice(2, 4))
  run.run(tmp_path, slice(1))
  with pytest.raises(UserError, match='runs of another manifest'):
    manifest.write(tmp_path, entries(1))
  # As if the file had been brought from elsewhere.
  manifest.write(tmp_path / 'b', entries(1))
  (tmp_path / 'b' / manifest.FILE).rename(tmp_path / manifest.FILE)
  for read in (run.run, run.results):
    with pytest.raises(UserError, match='run_1.json is of another manifest'):
      read(tmp_path)
  for arguments, message in (
    (['--workdir=x', '--range=1-2'], 'expected A:B'),
    (['--workdir=x', '--range=1:2', '--index=1'], 'give one of them'),
    ([f'--workdir={tmp_path}/c'], 'holds no sweep'),
  ):
    status, _, err = command('run', *arguments)
    assert (status, err.count('\n')) == (2, 1)
    assert message in err


@pytest.mark.usefixtures('one_device')
def test_stopped_and_continued(tmp_path, monkeypatch, command):
  """A sweep of two runs, one of which diverges, as if nothing had happened."""
  small = config_lib.replace(
    BASE,
    {'train.num_steps': 6, 'checkpoint.every': 2, 'checkpoint.keep': 1},
  )
  hot = config_lib.replace(small, {'optimizer.learning_rate': 1e30})
  runs = [*entries(1, base=small), *entries(2, base=hot)]
  for name in ('a', 'b'):
    manifest.write(tmp_path / name, runs)
  assert run.run(tmp_path / 'a') == []
  train = phases.train
  monkeypatch.setattr(
    phases, 'train', lambda *args, **kw: train(*args, **kw, max_steps=1)
  )
  assert run.run(tmp_path / 'b') == ['run_1', 'run_2']
  monkeypatch.setattr(phases, 'train', train)
  status, out, _ = command('run', f'--workdir={tmp_path}/b', '--range=0:2')
  assert status == 0
  assert 'run_1: loss' in out
  assert files(tmp_path / 'a') == files(tmp_path / 'b')
  diverged = {
    name: bool(r['diverged']) for name, r in files(tmp_path / 'b').items()
  }
  assert diverged == {'run_1.json': False, 'run_2.json': True}
  # There is no more than what the analyses need.
  saved = run.directory(tmp_path / 'b', runs[0]) / 'checkpoints'
  assert [p.name for p in saved.iterdir()] == ['6']
