"""A run that was stopped, killed or damaged goes on as if nothing happened."""

import importlib.util
import os
import pathlib
import shutil
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import tasks
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.routed import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.parallel import MeshConfig
from mod_jax.tasks import phases
from mod_jax.tasks import warm_start
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.tasks.plain import Plain
from mod_jax.train import evaluation
from mod_jax.train import metrics as metrics_lib
from mod_jax.train import workdir as workdir_lib
from mod_jax.train.optimizer import OptimizerConfig

pytestmark = pytest.mark.usefixtures('compilation_cache')

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Every part of the state changes numbers here: Adam's moments, the moving
# thresholds, the key by the step, the position in the data.
LEARNED = MoDConfig(
  capacity=0.25, period=1, offset=0, router_loss=0.0, threshold_decay=0.9
)
GAUSSIAN = MoDConfig(capacity=0.25, period=1, offset=0, score='gaussian')


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  folder = tmp_path_factory.mktemp('texts')
  rng = np.random.default_rng(0)
  for i in range(4):
    (folder / f'{i}.txt').write_bytes(rng.bytes(2000))
  return f'{folder}/*.txt'


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
  monkeypatch.setattr(evaluation, 'report', lambda *args: None)
  monkeypatch.setattr(Plain, 'finish', lambda *args: ())


def make_config(texts, routing=LEARNED, **changes):
  config = ExperimentConfig(
    model=LMConfig(
      num_layers=1, width=16, num_heads=2, mlp_dim=16, routing=routing
    ),
    data=TextDataConfig(source='files', files=texts, length=16),
    optimizer=OptimizerConfig(warmup_steps=2, learning_rate=0.01),
  )
  tiny = {
    'train.num_steps': 10,
    'train.batch_size': 8,
    'evaluation.every': 4,
    'evaluation.batches': 1,
    'evaluation.final_batches': 1,
    'evaluation.batch_size': 8,
    'log.every': 4,
    'log.tensorboard': False,
    'checkpoint.every': 4,
  }
  return config_lib.replace(config, tiny | changes)


def assert_same_state(a, b):
  def raw(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x = np.asarray(jax.random.key_data(x) if is_key else x)
    return x.dtype, x.shape, x.tobytes()

  assert jax.tree.structure(a) == jax.tree.structure(b)
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  assert all(raw(x) == raw(y) for x, y in leaves)


@pytest.mark.parametrize(
  ('routing', 'changes', 'stops'),
  [
    # At a checkpoint and between; in the middle of the warm-up's first and
    # second stage, and at the border of two.
    (
      LEARNED,
      {
        'train.grad_accum_steps': 2,
        'train.capacity_warmup_steps': 6,
        'train.capacity_warmup_stages': 2,
      },
      (1, 4),
    ),
    (GAUSSIAN, {}, (5,)),
  ],
  ids=['warmup', 'gaussian'],
)
def test_stopped_and_continued_is_bit_identical(
  texts, tmp_path, one_device, routing, changes, stops
):
  config = make_config(texts, routing, **changes)
  whole = phases.train(config, tmp_path / 'whole')
  assert whole.finished
  for max_steps in stops:
    part = phases.train(config, tmp_path / 'parts', max_steps=max_steps)
    assert not part.finished
  rest = phases.train(config, tmp_path / 'parts')
  assert rest.finished
  assert_same_state(rest.state, whole.state)
  assert rest.metrics == whole.metrics
  lines = [
    (tmp_path / name / 'metrics.jsonl').read_bytes()
    for name in ('parts', 'whole')
  ]
  assert lines[0] == lines[1]
  losses = [
    line['loss']
    for line in metrics_lib.read(tmp_path / 'parts')
    if line['kind'] == 'train'
  ]
  assert len(set(losses)) == 10


def test_another_mesh_may_continue(texts, tmp_path, capsys):
  config = make_config(texts, **{'evaluation.every': 0})
  phases.train(config, tmp_path / 'whole', max_steps=8)
  phases.train(config, tmp_path / 'run', max_steps=5)
  other = config_lib.replace(
    config, {'mesh': MeshConfig(data=2, fsdp=2, tensor=2)}
  )
  result = phases.train(other, tmp_path / 'run', max_steps=3)
  assert 'continues at step 5' in capsys.readouterr().err
  kernel = result.state.params['block_0']['mlp']['up']['kernel']
  assert kernel.addressable_shards[0].data.shape == (8, 8)
  assert (
    workdir_lib.read_config(tmp_path / 'run', ExperimentConfig).mesh
    == other.mesh
  )
  whole, parts = (
    [line['loss'] for line in metrics_lib.read(tmp_path / name)]
    for name in ('whole', 'run')
  )
  assert len(whole) == 8
  assert whole[:5] == parts[:5]
  np.testing.assert_allclose(whole, parts, atol=1e-3)


def snapshot(folder):
  return {
    str(p): (p.read_bytes(), p.stat().st_mtime_ns)
    for p in folder.rglob('*')
    if p.is_file()
  }


def test_a_workdir_of_another_run_is_refused(texts, tmp_path, one_device):
  config = make_config(texts)
  phases.train(config, tmp_path, max_steps=1)
  before = snapshot(tmp_path)
  changed = config_lib.replace(
    config, {'model.width': 32, 'optimizer.learning_rate': 0.5, 'seed': 3}
  )
  with pytest.raises(UserError) as info:
    phases.train(changed, tmp_path)
  message = str(info.value)
  assert 'different config' in message
  for field in (
    'model.width: 16 -> 32',
    'optimizer.learning_rate: 0.01 -> 0.5',
    'seed: 0 -> 3',
  ):
    assert field in message
  assert snapshot(tmp_path) == before
  # A bad field beside an allowed one changes nothing either.
  for changes in (
    {'evaluation.every': 3, 'seed': 1},
    {'mesh.data': 5},
    {'evaluation.every': 3, 'data.length': 17},
  ):
    with pytest.raises(UserError):
      phases.train(config_lib.replace(config, changes), tmp_path)
    assert snapshot(tmp_path) == before
  # What changes no number may differ.
  allowed = config_lib.replace(config, {'name': 'renamed', 'log.every': 1})
  assert phases.train(allowed, tmp_path, max_steps=1).step == 2


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (
      lambda folder: (folder / '1.txt').write_bytes(bytes(2000)),
      'file 1.txt is changed',
    ),
    (lambda folder: (folder / '3.txt').unlink(), 'file 3.txt is gone'),
    (lambda folder: (folder / '7.txt').write_bytes(b'x'), '7.txt is new'),
  ],
  ids=['changed', 'gone', 'new'],
)
def test_changed_data_are_refused_unless_allowed(
  texts, tmp_path, one_device, change, said, caplog
):
  folder = tmp_path / 'texts'
  shutil.copytree(pathlib.Path(texts).parent, folder)
  config = make_config(f'{folder}/*.txt', **{'evaluation.every': 0})
  workdir = tmp_path / 'run'
  phases.train(config, workdir, max_steps=2)
  change(folder)
  before = snapshot(workdir / 'checkpoints')
  with pytest.raises(UserError, match='the data changed since step 2') as info:
    phases.train(config, workdir, max_steps=1)
  assert said in str(info.value)
  assert '--allow_changed_data' in str(info.value)
  assert snapshot(workdir / 'checkpoints') == before
  tasks.load(workdir)
  assert said in caplog.text

  caplog.clear()
  allowed = phases.train(config, workdir, max_steps=1, allow_changed_data=True)
  assert allowed.step == 3
  assert said in caplog.text
  # From now on, these are the data of the run.
  assert phases.train(config, workdir, max_steps=1).step == 4
  # To look at the model, none are needed.
  shutil.rmtree(folder)
  assert tasks.load(workdir).step == 4


def test_an_edited_config_is_refused(texts, tmp_path, one_device):
  config = make_config(texts)
  phases.train(config, tmp_path, max_steps=1)
  path = tmp_path / 'config.json'
  path.write_text(
    path.read_text().replace('"router_loss": 0.0', '"router_loss": 0.5')
  )
  edited = workdir_lib.read_config(tmp_path, ExperimentConfig)
  assert edited != config
  said = r'step 1 .*different config.*router_loss: 0.0 -> 0.5'
  for call in (
    lambda: tasks.load(tmp_path),
    lambda: warm_start.read_workdir(tmp_path),
    lambda: phases.train(edited, tmp_path),
  ):
    with pytest.raises(UserError, match=said):
      call()
  # What a continuation may change may be edited, too.
  workdir_lib.write_text(
    path,
    config_lib.to_json(config_lib.replace(config, {'evaluation.batches': 2})),
  )
  assert tasks.load(tmp_path).step == 1


# The script itself, in processes that are killed for good.


@pytest.mark.slow
def test_signals_at_any_moment(tmp_path):
  # The first of those that the command sends by the hundred.
  spec = importlib.util.spec_from_file_location(
    'chaos', ROOT / 'tests' / 'chaos.py'
  )
  chaos = importlib.util.module_from_spec(spec)
  sys.modules['chaos'] = chaos  # For its dataclasses.
  spec.loader.exec_module(chaos)
  with unittest.mock.patch.dict(os.environ, {'XLA_FLAGS': ''}):
    rounds = chaos.chaos('language', 1, 0, tmp_path)
  assert rounds.signals.total() >= 1
  # It can tell a difference.
  expected = dict(rounds.expected)
  name = 'metrics.jsonl'
  with pytest.raises(chaos.Failure, match='metrics.jsonl differs'):
    chaos.compare(expected, expected | {name: expected[name] + b'x'})
