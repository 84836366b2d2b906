"""Damage to a finished run's directory: told, or mended and told."""

import os
import pathlib
import re
import shutil

import pytest
import tiny
import tiny_runs

from mod_jax import tasks
from mod_jax.errors import UserError
from mod_jax.tasks import phases
from mod_jax.train import evaluation
from mod_jax.train import state as state_lib

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def patched(on_one_device, no_report):
  """One device, nothing but restoring, and each shape worked out once."""
  with on_one_device(), pytest.MonkeyPatch.context() as patch:
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

  def once(task, optimizer, mesh, **kwargs):
    key = task.config.model
    if key not in cache:
      cache[key] = abstract(task, optimizer, mesh, **kwargs)
    return cache[key]

  patched.setattr(state_lib, 'abstract_state', once)
  return config, workdir


@pytest.fixture
def copy(run, tmp_path):
  shutil.copytree(run[1], tmp_path / 'run')
  return tmp_path / 'run'


# What may happen to a file or a folder.


def halve(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def gone(path):
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink()


def directory(path):
  gone(path)
  path.mkdir()


def loop(path):
  gone(path)
  path.symlink_to(path.name)


def becomes(data):
  def damage(path):
    if path.is_dir():
      gone(path)
    path.write_bytes(data)

  return damage


def edited(old, new):
  return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def before(path):
  return pathlib.Path(str(path).replace('checkpoints/4', 'checkpoints/2'))


def like_the_one_before(path):
  gone(path)
  shutil.copytree(before(path), path)


def swapped(path):
  data, other = path.read_bytes(), before(path).read_bytes()
  path.write_bytes(other)
  before(path).write_bytes(data)


NEWEST = 'checkpoints/4'
STATE, MANIFEST = f'{NEWEST}/state', f'{NEWEST}/manifest.json'
ARRAYS = f'{STATE}/ocdbt.process_0/d/*'  # The largest of them.
NESTED = b'[' * 10**6

# Each falls back to the checkpoint before, and says why.
CHECKPOINT = [
  (ARRAYS, tiny.flip, 'checksum of .* is wrong'),
  (ARRAYS, directory, 'is missing'),
  (ARRAYS, loop, 'Too many levels'),
  (f'{STATE}/_METADATA', tiny.flip, 'checksum of state/_METADATA is wrong'),
  (f'{STATE}/more', becomes(b'x'), 'state/more is not in manifest.json'),
  (f'{NEWEST}/metadata/metadata', tiny.flip, 'metadata is wrong'),
  (MANIFEST, gone, 'nothing vouches for it'),
  (MANIFEST, halve, 'manifest.json is damaged'),
  (MANIFEST, becomes(NESTED), 'manifest.json is damaged'),
  (MANIFEST, directory, 'Is a directory'),
  (NEWEST, becomes(b'x'), 'nothing vouches for it'),
  (NEWEST, loop, 'Too many levels'),
  (NEWEST, like_the_one_before, 'it was saved at step 2'),
]

# Each is refused.
REFUSED = [
  (MANIFEST, swapped, 'no checkpoint in .* is usable'),
  ('checkpoints', becomes(b'x'), 'cannot be used'),
  ('checkpoints', loop, 'cannot be used'),
  ('config.json', becomes(b'\xff'), 'config.json cannot be read .*utf-8'),
  (
    'config.json',
    becomes(b'{"name":' + NESTED),
    'no JSON .*recursion',
  ),
  ('config.json', edited(b'"width": 8', b'"width": 16'), 'different.*width'),
]

# Each is told by the continuation, which goes on from this step (None: it is
# refused), and does not matter to, or is refused by, an evaluation.
OTHER = [
  (
    *(NEWEST, lambda path: path.rename(path.with_name('40'))),
    *(2, 'step 40 .*it was saved at step 4'),
    *(2, 'step 40 .*it was saved at step 4'),
  ),
  (
    *('checkpoints', gone, 0, 'metrics.jsonl is of an earlier start'),
    *(None, 'holds no checkpoint yet'),
  ),
  ('config.json', gone, 4, 'config.json was missing', None, 'holds no run'),
  ('metrics.jsonl', gone, 4, 'ends at step 0', 4, ''),
  (
    *('metrics.jsonl', lambda path: os.truncate(path, path.stat().st_size - 9)),
    *(4, 'ended within a line', 4, ''),
  ),
  (
    *('metrics.jsonl', becomes(b'\xff\n')),
    *(None, 'line 1 of .* is not a metrics line', 4, ''),
  ),
  ('metrics.jsonl', directory, None, 'metrics.jsonl cannot be read', 4, ''),
]


def do(damage, workdir, name):
  found = workdir.glob(name)
  damage(max(found, key=os.path.getsize, default=workdir / name))


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


@pytest.mark.parametrize(('name', 'damage', 'words'), CHECKPOINT)
def test_the_checkpoint_before_is_used(name, damage, words, copy, run, caplog):
  do(damage, copy, name)
  for step, said in told_of(copy, run, caplog):
    assert step == 2
    assert 'using the one at step 2 instead' in said
    assert re.search(words, said), said
  # Nothing is lost, and the step is free again.
  assert sorted(os.listdir(copy / 'checkpoints')) == ['2', '4.corrupt']


@pytest.mark.parametrize(('name', 'damage', 'words'), REFUSED)
def test_refused_in_one_sentence(name, damage, words, copy, run, caplog):
  do(damage, copy, name)
  before = sorted(copy.rglob('*'))
  for step, said in told_of(copy, run, caplog):
    assert step is None
    assert re.search(words, said), said
  assert sorted(copy.rglob('*')) == before


@pytest.mark.parametrize(
  ('name', 'damage', 'step', 'words', 'judged', 'judged_words'), OTHER
)
def test_told(
  name, damage, step, words, judged, judged_words, copy, run, caplog
):
  do(damage, copy, name)
  of_judge, of_training = told_of(copy, run, caplog)
  assert of_training[0] == step, of_training
  assert re.search(words, of_training[1]), of_training
  assert of_judge[0] == judged, of_judge
  assert re.search(judged_words, of_judge[1]), of_judge
  assert judged_words or not of_judge[1]
