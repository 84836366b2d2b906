"""A run that was stopped, killed or damaged goes on as if nothing happened."""

import dataclasses
import os
import pathlib
import shutil
import unittest.mock

import chaos
import harness
import pytest
import tiny
import tiny_runs

from mod_jax import config as config_lib
from mod_jax import tasks
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.parallel import MeshConfig
from mod_jax.pretrained.source import Source
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import loop

pytestmark = pytest.mark.usefixtures('no_report')

# Every part of the state changes numbers here: Adam's moments, the moving
# thresholds, the key by the step, the position in the data.
LEARNED = MoDConfig(
  capacity=0.25, period=1, offset=0, router_loss=0.0, threshold_decay=0.9
)


def make_config(texts, routing=LEARNED, **changes):
  own = {
    'train.num_steps': 10,
    'optimizer.learning_rate': 0.01,
    'evaluation.every': 4,
    'checkpoint.every': 4,
  }
  return tiny_runs.make_config(texts, routing, **own | changes)


@dataclasses.dataclass
class Run:
  config: ExperimentConfig
  workdir: pathlib.Path
  result: loop.Result


@pytest.fixture(scope='module')
def whole(texts, tmp_path_factory, on_one_device, no_report):
  """A run of ten steps without a stop, with checkpoints at 4, 8 and 10."""
  config = make_config(
    texts,
    **{
      'train.grad_accum_steps': 2,
      'train.capacity_warmup_steps': 4,
      'train.capacity_warmup_stages': 2,
    },
  )
  workdir = tmp_path_factory.mktemp('whole')
  with on_one_device():
    result = phases.train(config, workdir)
  assert result.finished
  return Run(config, workdir, result)


@pytest.fixture
def at_step_4(whole, tmp_path):
  """A copy of that run's directory as it was then."""
  workdir = tmp_path / 'run'
  shutil.copytree(whole.workdir, workdir)
  for step in (8, 10):
    shutil.rmtree(workdir / 'checkpoints' / str(step))
  return workdir


def losses(workdir):
  lines = metrics_lib.read(workdir)
  return {x['step']: x['loss'] for x in lines if x['kind'] == 'train'}


def test_stopped_and_continued_is_bit_identical(whole, tmp_path, one_device):
  # In the middle of the first stage of the capacity's warm-up, and of its
  # second; what follows has a checkpoint on its way.
  for max_steps in (1, 2):
    part = phases.train(whole.config, tmp_path, max_steps=max_steps)
    assert not part.finished
  rest = phases.train(whole.config, tmp_path)
  assert rest.finished
  tiny.same_bits(rest.state, whole.result.state)
  assert rest.metrics == whole.result.metrics
  assert metrics_lib.read(tmp_path) == metrics_lib.read(whole.workdir)
  assert len(set(losses(tmp_path).values())) == 10


@pytest.mark.slow
def test_another_mesh_may_continue(whole, at_step_4, capsys):
  other = config_lib.replace(
    whole.config, {'mesh': MeshConfig(data=2, fsdp=2, tensor=2)}
  )
  result = phases.train(other, at_step_4, max_steps=3)
  assert 'continues at step 4' in capsys.readouterr().err
  kernel = result.state.params['block_0']['mlp']['up']['kernel']
  assert kernel.addressable_shards[0].data.shape == (4, 4)
  assert workdir_lib.read_config(at_step_4, ExperimentConfig).mesh == other.mesh
  expected = {k: v for k, v in losses(whole.workdir).items() if k <= 7}
  assert losses(at_step_4) == pytest.approx(expected, abs=1e-3)


def test_a_workdir_of_another_run_is_refused(whole, at_step_4, one_device):
  config, before = whole.config, tiny.snapshot(at_step_4)
  # What cannot be, beside what may differ, changes nothing either.
  for wrong, said in (
    ({'model.width': 16, 'seed': 3}, 'seed: 0 -> 3.*width: 8 -> 16'),
    ({'evaluation.every': 3, 'seed': 1}, 'different config.*seed: 0 -> 1'),
    ({'evaluation.every': 3, 'mesh.data': 5}, 'mesh'),
  ):
    with pytest.raises(UserError, match=said):
      phases.train(config_lib.replace(config, wrong), at_step_4)
    assert tiny.snapshot(at_step_4) == before
  # What changes no number may differ.
  allowed = config_lib.replace(
    config, {'name': 'renamed', 'log.every': 3, 'data.read_threads': 2}
  )
  assert phases.train(allowed, at_step_4, max_steps=1).step == 5


@pytest.mark.slow
def test_changed_data_are_refused_unless_allowed(
  texts, tmp_path, one_device, caplog
):
  folder, aside = tmp_path / 'texts', tmp_path / 'aside'
  shutil.copytree(pathlib.Path(texts).parent, folder)
  shutil.copytree(folder, aside)
  config = make_config(f'{folder}/*.txt', **{'evaluation.every': 0})
  workdir = tmp_path / 'run'
  phases.train(config, workdir, max_steps=2)
  before = tiny.snapshot(workdir / 'checkpoints')
  for change, said in (
    (lambda: (folder / '3.txt').unlink(), 'file 3.txt is gone'),
    (lambda: (folder / '7.txt').write_bytes(b'x'), '7.txt is new'),
    (lambda: (folder / '1.txt').write_bytes(bytes(2000)), '1.txt is changed'),
  ):
    shutil.rmtree(folder)
    shutil.copytree(aside, folder)
    change()
    with pytest.raises(UserError, match='the data changed since step 2') as e:
      phases.train(config, workdir, max_steps=1)
    assert said in str(e.value)
    assert '--allow_changed_data' in str(e.value)
    assert tiny.snapshot(workdir / 'checkpoints') == before
    caplog.clear()
    tasks.load(workdir)
    assert said in caplog.text

  caplog.clear()
  allowed = phases.train(config, workdir, max_steps=1, allow_changed_data=True)
  assert allowed.step == 3
  assert 'file 1.txt is changed' in caplog.text
  # From now on, these are the data of the run.
  assert phases.train(config, workdir, max_steps=1).step == 4
  # To look at the model, none are needed.
  shutil.rmtree(folder)
  assert tasks.load(workdir).step == 4


def test_an_edited_config_is_refused(at_step_4, one_device):
  path = at_step_4 / 'config.json'
  written = path.read_text()
  path.write_text(written.replace('"router_loss": 0.0', '"router_loss": 0.5'))
  edited = workdir_lib.read_config(at_step_4, ExperimentConfig)
  assert edited.model.routing.router_loss == 0.5
  said = r'step 4 .*different config.*router_loss: 0.0 -> 0.5'
  for call in (
    lambda: tasks.load(at_step_4),
    lambda: Source.open(at_step_4).read(),
    lambda: phases.train(edited, at_step_4),
  ):
    with pytest.raises(UserError, match=said):
      call()
  # What a continuation may change may be edited, too.
  path.write_text(written.replace('"batches": 1', '"batches": 2'))
  assert tasks.load(at_step_4).step == 4


# The script itself, in processes that are killed for good.


@pytest.mark.slow
def test_signals_at_any_moment(tmp_path, monkeypatch):
  # The first of those that the command sends by the hundred, to a model of one
  # routed block, which compiles soonest.
  block = {f'model.routing.{k}': v for k, v in (('period', 1), ('offset', 0))}
  small = chaos.LANGUAGE | block | {'model.num_layers': 1}
  monkeypatch.setattr(chaos, 'LANGUAGE', small)
  with unittest.mock.patch.dict(os.environ, {'JAX_NUM_CPU_DEVICES': '1'}):
    rounds = chaos.chaos(tmp_path, 'language', 1, 0)
  assert rounds.signals.total() >= 1
  # It can tell a difference.
  expected = dict(rounds.expected)
  for name in ('metrics.jsonl', '.: data position'):
    with pytest.raises(harness.Failure, match=f'{name} differs'):
      harness.compare(expected, expected | {name: expected[name] + b'x'})
