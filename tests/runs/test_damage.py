"""Damage to a finished run's directory: told, or mended and told."""

import os
import pathlib
import re
import shutil

from etils.epath import backend as epath_backend
import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import tasks
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
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
def run(tmp_path_factory, patched):
  """Config, directory and end of a run with checkpoints at steps 2 and 4."""
  folder = tmp_path_factory.mktemp('run')
  rng = np.random.default_rng(0)
  for i in range(4):
    (folder / f'{i}.txt').write_bytes(rng.bytes(500))
  config = config_lib.replace(
    ExperimentConfig(
      model=LMConfig(
        num_layers=1, width=8, num_heads=2, mlp_dim=8, routing=None
      ),
      data=TextDataConfig(source='files', files=f'{folder}/*.txt', length=16),
      optimizer=OptimizerConfig(warmup_steps=1),
    ),
    {
      'train.num_steps': 4,
      'train.batch_size': 4,
      'evaluation.every': 0,
      'log.tensorboard': False,
      'checkpoint.every': 2,
    },
  )
  workdir = folder / 'whole'
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


def empty(data):
  return b''


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
  'arrays cut': (
    apply(newest_arrays, half),
    r'ocdbt.process_0/d/\w+ has \d+ bytes instead of \d+',
  ),
  'arrays flipped': (apply(newest_arrays, flip), 'checksum of .* is wrong'),
  'arrays emptied': (apply(newest_arrays, empty), 'has 0 bytes instead'),
  'arrays gone': (at(newest_arrays, gone), 'is missing'),
  'arrays a directory': (at(newest_arrays, directory), 'is missing'),
  'arrays a loop': (at(newest_arrays, loops), 'Too many levels'),
  'arrays of the one before': (
    lambda w: shutil.copy(
      arrays(w / 'checkpoints' / '2'), arrays(w / 'checkpoints' / '4')
    ),
    'checksum|bytes instead',
  ),
  'list of arrays flipped': (
    apply(newest('state', '_METADATA'), flip),
    'checksum of state/_METADATA is wrong',
  ),
  'state gone': (at(newest('state'), gone), 'is missing'),
  'metadata flipped': (apply(metadata, flip), 'metadata is wrong'),
  'metadata emptied': (apply(metadata, empty), '0 bytes instead'),
  'metadata gone': (at(metadata, gone), 'metadata/metadata is missing'),
  'metadata of the one before': (
    lambda w: shutil.copy(w / 'checkpoints/2/metadata/metadata', metadata(w)),
    'metadata is wrong|bytes instead',
  ),
  'manifest gone': (at(manifest, gone), 'nothing vouches for it'),
  'manifest emptied': (apply(manifest, empty), 'manifest.json is damaged'),
  'manifest cut': (apply(manifest, half), 'manifest.json is damaged'),
  'manifest a list': (apply(manifest, lambda d: b'[1]'), 'is damaged'),
  'manifest of nothing': (apply(manifest, lambda d: b'{}'), 'is not in mani'),
  'manifest no text': (apply(manifest, lambda d: b'\xff'), 'is damaged'),
  'manifest nested': (
    apply(manifest, lambda d: b'[' * 10**6),
    'manifest.json is damaged',
  ),
  'manifest a directory': (at(manifest, directory), 'Is a directory'),
  'the checkpoint a file': (at(newest(), file), 'its metadata cannot be read'),
  'the checkpoint a loop': (at(newest(), loops), 'Too many levels'),
  'a file too many': (
    lambda w: newest('state', 'more')(w).write_text('x'),
    'state/more is not in manifest.json',
  ),
  'a copy of the one before': (copy_older, 'it was saved at step 2'),
  'a copy without its manifest': (
    lambda w: (copy_older(w), gone(manifest(w))),
    'it was saved at step 2',
  ),
  'the checkpoint emptied': (at(newest(), directory), 'its metadata'),
}


# Each is refused.
REFUSED = {
  'manifests swapped': (
    lambda w: swap(manifest(w), w / 'checkpoints/2/manifest.json'),
    'no checkpoint in .* is usable',
  ),
  'checkpoints a file': (
    at(in_run('checkpoints'), file),
    'the checkpoints in .* cannot be used',
  ),
  'checkpoints a loop': (
    at(in_run('checkpoints'), loops),
    'the checkpoints in .* cannot be used',
  ),
  'config no text': (
    apply(config_json, lambda d: b'\xff' + d),
    'config.json cannot be read .*not UTF-8',
  ),
  'config nested': (
    apply(config_json, lambda d: b'{"name":' + b'[' * 10**6),
    'config.json: .*recursion depth',
  ),
  'config of huge numbers': (
    apply(
      config_json, lambda d: d.replace(b'"seed": 0', b'"seed": ' + b'9' * 6000)
    ),
    'config.json: .*digits',
  ),
  'config emptied': (apply(config_json, empty), 'config.json: '),
  'config cut': (apply(config_json, half), 'config.json: '),
  'config a list': (
    apply(config_json, lambda d: b'[1]'),
    'config.json: ',
  ),
  'config of another': (
    apply(config_json, lambda d: d.replace(b'"seed"', b'"sead"')),
    'config.json: .*sead',
  ),
  'config edited': (
    apply(config_json, lambda d: d.replace(b'"width": 8', b'"width": 16')),
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
    *(4, 'ended within a line'),
    *(4, ''),
  ),
  'metrics cut': (
    apply(metrics, lambda d: b''.join(d.splitlines(keepends=True)[:2])),
    *(4, 'metrics.jsonl ends at step 2, before the checkpoint at step 4'),
    *(4, ''),
  ),
  'metrics gone': (at(metrics, gone), 4, 'ends at step 0', 4, ''),
  'metrics emptied': (apply(metrics, empty), 4, 'ends at step 0', 4, ''),
  'metrics garbage': (
    apply(metrics, lambda d: b'{"step": 1\n' + d),
    *(None, 'line 1 of .* is not a metrics line'),
    *(4, ''),
  ),
  'metrics no text': (
    apply(metrics, lambda d: b'\xff\n' + d),
    *(None, 'line 1 of .* is not a metrics line'),
    *(4, ''),
  ),
  'metrics nested': (
    apply(metrics, lambda d: b'[' * 10**6 + b'\n' + d),
    *(None, 'line 1 of .* is not a metrics line'),
    *(4, ''),
  ),
  'metrics a directory': (
    at(metrics, directory),
    *(None, 'metrics.jsonl cannot be read'),
    *(4, ''),
  ),
  'metrics a loop': (
    at(metrics, loops),
    *(None, 'metrics.jsonl cannot be read'),
    *(4, ''),
  ),
}


def told_of(workdir, run, caplog):
  """Judges and continues a run; returns what both came to, and said."""
  results = []
  for call in (
    # This one changes nothing, so it is first.
    lambda: tasks.load(workdir),
    lambda: phases.train(run[0], workdir, max_steps=0),
  ):
    caplog.clear()
    try:
      step = call().step
      said = ' '.join(
        record.getMessage()
        for record in caplog.records
        if '/mod_jax/' in record.pathname
      )
    except UserError as error:
      step, said = None, str(error)
      assert len(said.splitlines()) == 1
      assert len(said) < 1000
    results.append((step, said))
  return results


def test_nothing_is_told_of_a_whole_run(copy, run, caplog):
  assert told_of(copy, run, caplog) == [(4, ''), (4, '')]


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
