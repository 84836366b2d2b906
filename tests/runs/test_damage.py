"""Damage to a finished run's directory: told, or mended and told."""

import os
import pathlib
import re
import shutil

from etils.epath import backend as epath_backend
import pytest
import tiny_runs

from mod_jax import tasks
from mod_jax.errors import UserError
from mod_jax.tasks import phases
from mod_jax.tasks.plain import Plain
from mod_jax.train import evaluation
from mod_jax.train import state as state_lib


@pytest.fixture(scope='module')
def patched(on_one_device):
  """One device, nothing but restoring, and each shape worked out once."""
  with on_one_device(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluation, 'report', lambda *args: None)
    patch.setattr(Plain, 'finish', lambda *args: ())
    patch.setattr(
      evaluation, 'held_out', lambda *args, **kwargs: {'top_k/loss': 1.0}
    )
    yield patch


@pytest.fixture(scope='module')
def run(tmp_path_factory, texts, patched):
  """Config, directory and end of a run with checkpoints at steps 2 and 4."""
  config = tiny_runs.make_config(texts, **{'checkpoint.every': 2})
  workdir = tmp_path_factory.mktemp('run') / 'whole'
  phases.train(config, workdir)
  # From here on the model is always the same.
  abstract = state_lib.abstract_state
  cache = {}

  def once(task, optimizer, mesh, *, ema):
    key = task.config.model
    if key not in cache:
      cache[key] = abstract(task, optimizer, mesh, ema=ema)
    return cache[key]

  patched.setattr(state_lib, 'abstract_state', once)
  return config, workdir


@pytest.fixture
def copy(run, tmp_path):
  shutil.copytree(run[1], tmp_path / 'run')
  return tmp_path / 'run'


def edit(path, change):
  path.write_bytes(change(path.read_bytes()))


def flip(data):
  data = bytearray(data)
  data[len(data) // 2] ^= 1
  return bytes(data)


def half(data):
  return data[: len(data) // 2]


def loops(path):
  """Puts a link to itself in a path's place."""
  gone(path)
  path.symlink_to(path.name)


def gone(path):
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink()


def directory(path):
  gone(path)
  path.mkdir()


def file(path):
  gone(path)
  path.write_text('x')


def swap(a, b):
  a.rename(a.with_name('aside'))
  b.rename(a)
  a.with_name('aside').rename(b)


def arrays(step):
  files = (step / 'state' / 'ocdbt.process_0' / 'd').iterdir()
  return max(files, key=lambda path: path.stat().st_size)


def newest(*parts):
  return lambda w: pathlib.Path(w, 'checkpoints', '4', *parts)


def in_run(*parts):
  return lambda w: pathlib.Path(w, *parts)


def apply(where, change):
  return lambda w: edit(where(w), change)


def at(where, damage):
  return lambda w: damage(where(w))


def newest_arrays(w):
  return arrays(newest()(w))


def copy_older(w):
  gone(newest()(w))
  shutil.copytree(w / 'checkpoints' / '2', newest()(w))


manifest, metadata = newest('manifest.json'), newest('metadata', 'metadata')
config_json, metrics = in_run('config.json'), in_run('metrics.jsonl')

# Each falls back to the checkpoint before, and says why.
CHECKPOINT = {
  'arrays flipped': (apply(newest_arrays, flip), 'checksum of .* is wrong'),
  'arrays a directory': (at(newest_arrays, directory), 'is missing'),
  'arrays a loop': (at(newest_arrays, loops), 'Too many levels'),
  'arrays of the one before': (
    lambda w: shutil.copy(
      arrays(w / 'checkpoints' / '2'), arrays(w / 'checkpoints' / '4')
    ),
    'checksum of .* is wrong',
  ),
  'list of arrays flipped': (
    apply(newest('state', '_METADATA'), flip),
    'checksum of state/_METADATA is wrong',
  ),
  'state gone': (at(newest('state'), gone), 'is missing'),
  'metadata flipped': (apply(metadata, flip), 'metadata is wrong'),
  'manifest gone': (at(manifest, gone), 'nothing vouches for it'),
  'manifest cut': (apply(manifest, half), 'manifest.json is damaged'),
  'manifest of nothing': (apply(manifest, lambda d: b'{}'), 'is not in mani'),
  'manifest nested': (
    apply(manifest, lambda d: b'[' * 10**6),
    'manifest.json is damaged',
  ),
  'manifest a directory': (at(manifest, directory), 'Is a directory'),
  'the checkpoint a file': (at(newest(), file), 'nothing vouches for it'),
  'the checkpoint a loop': (at(newest(), loops), 'nothing vouches for it'),
  'a file too many': (
    lambda w: newest('state', 'more')(w).write_text('x'),
    'state/more is not in manifest.json',
  ),
  'a copy of the one before': (copy_older, 'it was saved at step 2'),
}


# Each is refused.
REFUSED = {
  'manifests swapped': (
    lambda w: swap(manifest(w), w / 'checkpoints/2/manifest.json'),
    'no checkpoint in .* is usable',
  ),
  'checkpoints a file': (at(in_run('checkpoints'), file), 'cannot be used'),
  'checkpoints a loop': (at(in_run('checkpoints'), loops), 'cannot be used'),
  'config no text': (
    apply(config_json, lambda d: b'\xff' + d),
    'config.json cannot be read .*not UTF-8',
  ),
  'config nested': (
    apply(config_json, lambda d: b'{"name":' + b'[' * 10**6),
    'config.json: .*recursion depth',
  ),
  'config of another': (
    apply(config_json, lambda d: d.replace(b'"seed"', b'"sead"')),
    'config.json: .*sead',
  ),
  'config edited': (
    apply(config_json, lambda d: d.replace(b'"width": 16', b'"width": 32')),
    'different config.*width',
  ),
}

# Each is told by the continuation, which goes on from this step (None: it is
# refused), and does not matter to, or is refused by, an evaluation.
OTHER = {
  'another step number': (
    lambda w: newest()(w).rename(w / 'checkpoints' / '40'),
    *(2, 'step 40 .*it was saved at step 4'),
    *(2, 'step 40 .*it was saved at step 4'),
  ),
  'checkpoints gone': (
    at(in_run('checkpoints'), gone),
    *(0, 'metrics.jsonl is of an earlier start'),
    *(None, 'holds no checkpoint yet'),
  ),
  'config gone': (
    at(config_json, gone),
    *(4, 'config.json was missing'),
    *(None, 'holds no run'),
  ),
  'metrics torn': (
    apply(metrics, lambda d: d[:-9]),
    *(4, 'ended within a line', 4, ''),
  ),
  'metrics cut': (
    apply(metrics, lambda d: b''.join(d.splitlines(keepends=True)[:2])),
    *(
      4,
      'metrics.jsonl ends at step 1, before the checkpoint at step 4',
      4,
      '',
    ),
  ),
  'metrics gone': (at(metrics, gone), 4, 'ends at step 0', 4, ''),
  'metrics no text': (
    apply(metrics, lambda d: b'\xff\n' + d),
    *(None, 'line 1 of .* is not a metrics line', 4, ''),
  ),
  'metrics a directory': (
    at(metrics, directory),
    *(None, 'metrics.jsonl cannot be read', 4, ''),
  ),
}


def told_of(workdir, run, caplog):
  """Judges and continues a run; returns what both came to, and said."""

  def told(call):
    caplog.clear()
    try:
      step = call().step
    except UserError as error:
      said = str(error)
      assert len(said.splitlines()) == 1
      assert len(said) < 1000
      return None, said
    ours = (r for r in caplog.records if '/mod_jax/' in r.pathname)
    return step, ' '.join(record.getMessage() for record in ours)

  before = sorted(workdir.rglob('*'))
  judged = told(lambda: tasks.load(workdir))
  assert sorted(workdir.rglob('*')) == before  # Who only reads changes nothing.
  return judged, told(lambda: phases.train(run[0], workdir, max_steps=0))


def test_nothing_is_told_of_a_whole_run(copy, run, caplog):
  assert told_of(copy, run, caplog) == ((4, ''), (4, ''))


@pytest.mark.parametrize('name', CHECKPOINT)
def test_the_checkpoint_before_is_used(name, copy, run, caplog):
  damage, words = CHECKPOINT[name]
  damage(copy)
  for step, said in told_of(copy, run, caplog):
    assert step == 2
    assert 'using the one at step 2 instead' in said
    assert re.search(words, said), said
  # Nothing is lost, and the step is free again.
  assert sorted(os.listdir(copy / 'checkpoints')) == ['2', '4.corrupt']


@pytest.mark.parametrize('name', REFUSED)
def test_refused_in_one_sentence(name, copy, run, caplog):
  damage, words = REFUSED[name]
  damage(copy)
  before = sorted(copy.rglob('*'))
  for step, said in told_of(copy, run, caplog):
    assert step is None
    assert re.search(words, said), said
  assert sorted(copy.rglob('*')) == before


@pytest.mark.parametrize('name', OTHER)
def test_told(name, copy, run, caplog):
  damage, step, words, judged, judged_words = OTHER[name]
  damage(copy)
  of_judge, of_training = told_of(copy, run, caplog)
  assert of_training[0] == step, of_training
  assert re.search(words, of_training[1]), of_training
  assert of_judge[0] == judged, of_judge
  assert re.search(judged_words, of_judge[1]), of_judge
  assert judged_words or not of_judge[1]


def test_what_may_not_be_read_is_told(copy, run, caplog, monkeypatch):
  listdir = epath_backend.os_backend.listdir

  def refuse(path):
    if 'checkpoints' in str(path):
      # As the administrator, who runs some tests, may read everything.
      raise PermissionError(13, 'Permission denied', str(path))
    return listdir(path)

  monkeypatch.setattr(epath_backend.os_backend, 'listdir', refuse)
  for step, said in told_of(copy, run, caplog):
    assert step is None
    assert 'cannot be used (Permission denied)' in said
