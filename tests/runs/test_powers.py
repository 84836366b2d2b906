"""What the loop gives any task: averages, teachers, starts, rules, studies."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_task import Tiny, load, make_config, train

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.errors import UserError
from mod_jax.runs import metrics as metrics_lib
from mod_jax.train import evaluation, loop
from mod_jax.train import task as task_lib


@pytest.fixture(autouse=True, scope='module')
def _one_device(on_one_device, no_report):
  with on_one_device():
    yield


def held_out(workdir):
  return [x for x in metrics_lib.read(workdir) if x['kind'] == 'eval']


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  """The directory of a run, which nobody changes, and its last state."""
  workdir = tmp_path_factory.mktemp('runs') / 'plain'
  return workdir, train(make_config(), workdir).state


def test_averages_are_evaluated_saved_and_loaded(tmp_path):
  result = train(make_config(**{'train.ema_decay': 0.9}), tmp_path)
  state = result.state
  bias = state.ema['head']['bias'][0]
  assert 0 < bias < state.params['head']['bias'][0]
  assert result.metrics['accuracy'] == float(bias)
  chex.assert_trees_all_equal(load(tmp_path).params, state.ema)


class TestTeacher:
  def test_reach_the_loss_and_no_checkpoint(self, plain, tmp_path, monkeypatch):
    _, plain = plain
    teacher = {'kernel': np.full(8, 5.0, np.float32)}
    monkeypatch.setattr(Tiny, 'held', teacher)
    monkeypatch.setattr(Tiny, 'asked', 0)
    taught = train(make_config(), tmp_path / 'taught').state
    assert Tiny.asked == 1
    kernels = [s.params['block_0']['kernel'] for s in (taught, plain)]
    assert np.sum(kernels[0]) > np.sum(kernels[1])
    assert jax.tree.structure(taught) == jax.tree.structure(plain)

  def test_placed_on_the_mesh_and_no_constants(self, tmp_path, monkeypatch):
    teacher = {'kernel': np.full(8, 5.125, np.float32)}
    monkeypatch.setattr(Tiny, 'held', teacher)
    config = make_config()
    with loop.build(Tiny(config), config, tmp_path) as run:
      kernel = run.teacher['kernel']
      assert kernel.sharding.is_fully_replicated
      assert kernel.sharding.mesh == run.mesh
      batch = parallel.put_batch(next(run.iterator), run.mesh)
      run.compiled_step(static_args=0)(run.state, batch, run.teacher)
    assert not kernel.is_deleted()


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """The directory of a run that keeps averages, and its last state."""
  workdir = tmp_path_factory.mktemp('runs') / 'source'
  config = make_config(
    **{'train.ema_decay': 0.5, 'evaluation.every': 0, 'checkpoint.every': 0}
  )
  return workdir, train(config, workdir).state


class TestStart:
  def test_a_fresh_run_starts_from_it_and_says_how_good_it_is(
    self, source, tmp_path
  ):
    workdir, state = source
    workdir = shutil.copytree(workdir, tmp_path / 'source')
    config = make_config(init=str(workdir), seed=1, **{'train.ema_decay': 0.9})
    with loop.build(Tiny(config), config, tmp_path / 'look') as run:
      chex.assert_trees_all_equal(run.state.params, state.ema)
      chex.assert_trees_all_equal(run.state.ema, state.ema)
      assert float(run.state.model_state['statistics']['sum']) == 6

    result = train(config, tmp_path / 'run', max_steps=2)
    assert float(result.state.model_state['statistics']['sum']) == 8
    first = held_out(tmp_path / 'run')[0]
    assert first['step'] == 0
    assert first['accuracy'] == float(state.ema['head']['bias'][0])
    # Then the run has weights of its own.
    (workdir / 'config.json').unlink()
    result = train(config, tmp_path / 'run')
    assert result.finished
    assert [x['step'] for x in held_out(tmp_path / 'run')] == [0, 4, 6]
    other = config_lib.replace(config, {'init': None})
    with pytest.raises(UserError, match='init: .* -> None'):
      train(other, tmp_path / 'run')

  def test_weights_that_do_not_fit(self, source, tmp_path, monkeypatch):
    init = Tiny.init

    def other(self, key):
      variables = init(self, key)
      variables['params']['router'] = {'kernel': jnp.ones(3)}
      del variables['params']['head']['bias']
      variables['params']['head']['kernel'] = jnp.ones(2)
      return variables

    monkeypatch.setattr(Tiny, 'init', other)
    config = make_config(init=str(source[0]))
    with pytest.raises(UserError) as info:
      train(config, tmp_path / 'run')
    for name in ('router/kernel', 'head/kernel', 'head/bias'):
      assert name in str(info.value)
    assert not (tmp_path / 'run').exists()


def test_a_task_need_not_start_from_anything(source, tmp_path, monkeypatch):
  monkeypatch.setattr(Tiny, 'start', task_lib.Task.start)
  with pytest.raises(UserError, match='nothing but fresh.* set init to None'):
    train(make_config(init=str(source[0])), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_rules_are_checked_before_anything_is_written(tmp_path):
  config = make_config(**{'optimizer.rules': (('block_', 1.0, 0),)})
  with pytest.raises(UserError, match='rules cover no head/bias'):
    train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  rules = (('block_', 0.0, 0), ('.', 1.0, 2))
  config = make_config(**{'optimizer.rules': rules})
  with loop.build(Tiny(config), config, tmp_path / 'run') as run:
    fresh = run.state
  state = train(config, tmp_path / 'run', max_steps=2).state
  chex.assert_trees_all_equal(state.params, fresh.params)
  state = train(config, tmp_path / 'run').state
  chex.assert_trees_all_equal(state.params['block_0'], fresh.params['block_0'])
  assert np.all(state.params['head']['bias'] != fresh.params['head']['bias'])


class TestStudies:
  def test_what_they_leave_behind(self, plain, tmp_path, capsys):
    trained = load(plain[0])
    evaluation.study(trained, ['norm'], tmp_path)
    norm = np.linalg.norm(trained.params['block_0']['kernel'])
    assert f'norm {norm:.3f}' in capsys.readouterr().out
    told = json.loads((tmp_path / 'study_norm.json').read_text())
    assert told == {'step': 6, 'norm': pytest.approx(float(norm))}
    assert (tmp_path / 'pictures' / 'study_norm_curve.png').is_file()
