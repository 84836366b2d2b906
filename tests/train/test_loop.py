"""The loop: what a run leaves behind, and how it stops."""

import contextlib
import json
import math
import os
import signal
import threading
import types
from unittest import mock

import chex
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import pytest
import tiny
from tiny_runs import make_config
import tiny_task
from tiny_task import Tiny, steps_on_disk, train

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.data.audio import AudioDataConfig
from mod_jax.errors import UserError
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs import lock, stop
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation, hooks, loop
from mod_jax.train.loop import TrainingDiverged

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture
def quiet(monkeypatch):
  """Leaves out the table and the pictures of a run's end."""
  monkeypatch.setattr(evaluation, 'report', lambda *args: None)


def tiny_config(**changes):
  own = {
    'train.num_steps': 8,
    'evaluation.every': 3,
    'evaluation.final_batches': 2,
    'log.every': 100,
    'checkpoint.every': 2,
  }
  return tiny_task.make_config(**own | changes)


def test_another_teacher_is_refused(tmp_path, quiet, monkeypatch):
  monkeypatch.setattr(Tiny, 'held', {'kernel': np.ones(8, np.float32)})
  train(tiny_config(), tmp_path, max_steps=2)
  assert train(tiny_config(), tmp_path, max_steps=2).step == 4
  monkeypatch.setattr(Tiny, 'held', {'kernel': np.zeros(8, np.float32)})
  with pytest.raises(UserError, match='objective.teacher .* step 4'):
    train(tiny_config(), tmp_path)


def test_what_a_run_leaves_behind(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(Tiny, 'pictures', lambda *args: {'view': Figure()})
  monkeypatch.setattr(Tiny, 'finish', lambda *args: ['a text'])
  monkeypatch.setattr(Tiny, 'data_summary', lambda self: 'two series')
  config = tiny_config(**{'log.tensorboard': True})
  workdir = tmp_path / 'new' / 'run'
  result = train(config, workdir)
  assert result.finished
  assert result.step == int(result.state.step) == 8

  lines = metrics_lib.read(workdir)
  steps = [line for line in lines if line['kind'] == 'train']
  assert [line['step'] for line in steps] == list(range(1, 9))
  assert all(line['loss'] > 0 and line['grad_norm'] > 0 for line in steps)
  held_out = [line for line in lines if line['kind'] == 'eval']
  assert [line['step'] for line in held_out] == [3, 6, 8]
  # In the order of the steps, evaluations behind the steps they judge.
  order = [(line['step'], line['kind'] == 'eval') for line in lines]
  assert order == sorted(order)
  last = {k: v for k, v in held_out[-1].items() if k not in ('step', 'kind')}
  assert last == result.metrics

  assert steps_on_disk(workdir) == [4, 6, 8]  # The newest three.
  assert workdir_lib.read_config(workdir, ExperimentConfig) == config
  assert json.loads((workdir / 'eval.json').read_text()) == {
    'step': 8,
    **result.metrics,
  }
  pictures = {p.name for p in (workdir / 'pictures').iterdir()}
  assert pictures == {'curves.png', 'view.png'}
  assert (workdir / 'sample_0.txt').read_text() == 'a text'
  assert any((workdir / 'tensorboard').iterdir())
  out, err = capsys.readouterr()
  assert 'held-out, at step 8' in out
  assert 'starts' in err
  assert 'two series' in err
  assert 'step 8/8' in err


def test_batches_of_several_lengths_have_no_rate(tmp_path, capsys, monkeypatch):
  speech = make_task(tiny.experiment(Wav2Vec2Config(), AudioDataConfig()))
  assert speech.modality.tokens_per_step is None
  for tokens, shown in ((8, True), (None, False)):
    monkeypatch.setattr(Tiny, 'tokens_per_step', tokens)
    train(tiny_config(), tmp_path / str(tokens))
    said = capsys.readouterr().err
    assert (' images/s' in said) == ('FLOP/s' in said) == shown


def test_an_evaluation_is_a_few_programs_ahead(monkeypatch):
  # Eight simulated devices deadlock where more than 32 wait.
  waiting, most = [], []
  on_host = metrics_lib.on_host

  def read(metric_sums):
    del waiting[:1]
    return on_host(metric_sums)

  def run(*args, mode):
    waiting.append(args)
    most.append(len(waiting))
    return {'loss': (jnp.float32(3), jnp.float32(2))}

  monkeypatch.setattr(evaluation, '_eval_step', lambda task: run)
  batches = [{'x': np.zeros((8, 8), np.float32)}] * 20
  monkeypatch.setattr(Tiny, 'eval_batches', lambda *_, **__: batches)
  task = Tiny(tiny_config())
  mesh = parallel.make_mesh(task.config.mesh)
  with monkeypatch.context() as patch:
    patch.setattr(metrics_lib, 'on_host', read)
    found = evaluation.held_out(task, {}, {}, mesh)
  assert found == {'loss': 1.5}
  assert len(most) == 20
  assert 1 < max(most) < 10


def test_a_finished_run_stays_as_it_is(tmp_path, quiet):
  config = tiny_config()
  first = train(config, tmp_path)
  before = metrics_lib.read(tmp_path)
  again = train(config, tmp_path)
  assert again.finished
  assert again.step == 8
  assert again.metrics == first.metrics
  assert metrics_lib.read(tmp_path) == before
  # A larger evaluation is new, and is told.
  more = config_lib.replace(config, {'evaluation.final_batches': 3})
  train(more, tmp_path)
  *after, _ = metrics_lib.read(tmp_path)
  assert after == before


def test_the_state_is_donated(tmp_path):
  config = tiny_config()
  with loop.build(Tiny(config), config, tmp_path) as run:
    state = run.state
    batch = parallel.put_batch(next(run.iterator), run.mesh)
    after, _ = run.compiled_step(static_args=0)(state, batch, None)
  for leaf in jax.tree.leaves(
    (state.params, state.opt_state, state.model_state)
  ):
    assert leaf.is_deleted()
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))


def test_a_run_learns(tmp_path, quiet):
  (tmp_path / 'train.txt').write_text('abcdefgh' * 1000)
  (tmp_path / 'held.txt').write_text('abcdefgh' * 20)
  config = make_config(
    f'{tmp_path}/train.txt',
    **{
      'data.eval_files': f'{tmp_path}/held.txt',
      'train.num_steps': 40,
      'optimizer.learning_rate': 0.02,
      'model.width': 16,
      'model.mlp_dim': 16,
      'checkpoint.every': 0,
    },
  )
  result = phases.train(config, tmp_path / 'run')
  losses = [line['loss'] for line in metrics_lib.read(tmp_path / 'run')[:-1]]
  assert losses[0] == pytest.approx(np.log(256), abs=0.7)
  assert losses[-1] < 0.5
  assert result.metrics['loss'] < 0.5
  # Asked for none on the way, there is one at the end.
  assert steps_on_disk(tmp_path / 'run') == [40]


def test_stages_are_compiled_once_each(tmp_path, monkeypatch, quiet):
  def static_args(self, step):
    return max(1 - step // 2 / 2, 0.0)

  jit_step, stages = loop.jit_step, []

  def spy(*args, static_args, **kwargs):
    stages.append(static_args)
    return jit_step(*args, static_args=static_args, **kwargs)

  monkeypatch.setattr(Tiny, 'static_args', static_args)
  monkeypatch.setattr(Tiny, 'flops_per_step', lambda self, args: 1 + args)
  monkeypatch.setattr(loop, 'jit_step', spy)
  with mock.patch.object(loop, 'Progress', wraps=loop.Progress) as progress:
    train(tiny_config(), tmp_path)
  assert stages == [1.0, 0.5, 0.0]
  flops = progress.call_args.kwargs['flops_of_step']
  assert [flops(step) for step in range(1, 6)] == [2, 2, 1.5, 1.5, 1]


def spoil(monkeypatch, at, name):
  """Makes a metric NaN from a step on, or there a part of the state.

  Of the latter, the step's own metrics know nothing.
  """
  jit_step = loop.jit_step

  def spoiled(state, metric_sums):
    step = int(state.step)
    if name in metric_sums and step >= at:
      total, weight = metric_sums[name]
      metric_sums[name] = (total * jnp.nan, weight)
    elif name not in metric_sums and step == at:
      leaves, structure = jax.tree.flatten(getattr(state, name))
      leaves[-1] = leaves[-1] * jnp.nan
      state = state.replace(**{name: jax.tree.unflatten(structure, leaves)})
    return state, metric_sums

  def jit_spoiled(*args, **kwargs):
    step = jit_step(*args, **kwargs)
    return lambda *args: spoiled(*step(*args))

  monkeypatch.setattr(loop, 'jit_step', jit_spoiled)


def strict_lines(path):
  """Returns the metrics of a file, which must be JSON to the letter."""

  def refuse(constant):
    raise ValueError(constant)

  lines = path.read_text().splitlines()
  records = [json.loads(line, parse_constant=refuse) for line in lines]
  return [record for record in records if record['kind'] != 'event']


class TestDivergence:
  @pytest.mark.parametrize(
    ('at', 'name', 'good'),
    [
      (6, 'loss', 4),
      (7, 'grad_norm', 6),
      (6, 'opt_state', 4),
      (8, 'params', 6),  # The last step: no later loss could tell.
    ],
  )
  def test_stops_with_the_step_and_the_last_good_checkpoint(
    self, tmp_path, monkeypatch, at, name, good
  ):
    spoil(monkeypatch, at, name)
    said = (
      rf'{name}\S* is (nan|not finite) at step {at}.*last good checkpoint is'
      f' step {good} in {tmp_path}.*lower optimizer.learning_rate'
    )
    with pytest.raises(TrainingDiverged, match=said):
      train(tiny_config(**{'evaluation.every': 0}), tmp_path)
    assert steps_on_disk(tmp_path)[-1] == good
    *_, line = strict_lines(tmp_path / 'metrics.jsonl')
    if name in line:
      assert (line['step'], line[name]) == (at, None)
    assert not (tmp_path / 'eval.json').exists()

  def test_the_last_evaluation(self, tmp_path, monkeypatch):
    monkeypatch.setattr(
      evaluation, 'held_out', lambda *args, **_: {'top_k/loss': math.nan}
    )
    config = tiny_config(**{'evaluation.every': 0})
    said = 'held-out top_k/loss is nan at step 8; .* good checkpoint is step 6'
    for _ in range(2):
      with pytest.raises(TrainingDiverged, match=said):
        train(config, tmp_path)
      *_, line = lines = strict_lines(tmp_path / 'metrics.jsonl')
      assert line == {'step': 8, 'kind': 'eval', 'top_k/loss': None}
      assert len(lines) == 9
    assert not (tmp_path / 'eval.json').exists()

  def test_is_seen_before_an_evaluation_and_a_stop(self, tmp_path, monkeypatch):
    spoil(monkeypatch, 3, 'loss')
    config = tiny_config(**{'checkpoint.every': 100})
    with pytest.raises(TrainingDiverged, match='step 3; there is no check'):
      train(config, tmp_path / 'evaluation')
    kinds = {line['kind'] for line in metrics_lib.read(tmp_path / 'evaluation')}
    assert kinds == {'train'}
    config = config_lib.replace(config, {'evaluation.every': 0})
    with pytest.raises(TrainingDiverged, match='at step 3'):
      train(config, tmp_path / 'stop', max_steps=4)
    assert steps_on_disk(tmp_path / 'stop') == []


def signal_at(monkeypatch, step, *numbers):
  """Sends this process signals before it takes a step."""
  put_batch = parallel.put_batch
  calls = []

  def put(batch, mesh):
    calls.append(1)
    if len(calls) == step:
      for number in numbers:
        signal.raise_signal(number)
    return put_batch(batch, mesh)

  monkeypatch.setattr(parallel, 'put_batch', put)


class TestStop:
  @pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1'])
  def test_each_signal_asks_for_a_stop(self, deaths, name):
    with contextlib.suppress(KeyboardInterrupt), stop.listening():
      assert not stop.requested()
      signal.raise_signal(getattr(signal, name))
      assert stop.requested()
    assert not stop.requested()
    assert not deaths

  @pytest.mark.parametrize(
    ('signals', 'saved'),
    [
      ([signal.SIGTERM], [5]),
      ([signal.SIGINT], [5]),
      ([signal.SIGINT] * 2, [5]),
      ([signal.SIGINT] * 3, []),  # Who presses so often does not wait.
    ],
  )
  def test_a_signal_saves_and_ends(
    self, tmp_path, monkeypatch, capsys, deaths, signals, saved
  ):
    config = tiny_config(**{'checkpoint.every': 100, 'evaluation.every': 0})
    signal_at(monkeypatch, 5, *signals)
    before = signal.getsignal(signal.SIGTERM)
    if signal.SIGINT in signals:
      with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path)
    else:
      result = train(config, tmp_path)
      assert (result.step, result.finished) == (5, False)
      assert 'stopped at step 5 of 8, saved' in capsys.readouterr().err
      assert [x['step'] for x in metrics_lib.read(tmp_path)] == [1, 2, 3, 4, 5]
    assert signal.getsignal(signal.SIGTERM) == before
    assert not deaths
    assert steps_on_disk(tmp_path) == saved
    # It is over: the next run does not stop.
    assert not stop.requested()

  @pytest.mark.slow
  def test_at_any_other_moment(self, tmp_path, monkeypatch, deaths, capsys):
    def files(workdir):
      names = 'eval.json', 'sample_0.txt'
      texts = [(workdir / name).read_bytes() for name in names]
      return metrics_lib.read(workdir), texts

    config = tiny_config(**{'checkpoint.every': 100})
    monkeypatch.setattr(Tiny, 'finish', lambda *args: ['a text'])
    train(config, tmp_path / 'whole')
    workdir = tmp_path / 'run'

    def stopped_in(owner, name):
      """Trains until a signal, which comes as a function is called."""
      function = getattr(owner, name)

      def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)

      with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        result = train(config, workdir)
      assert not result.finished
      assert result.metrics == {}
      told = f'stopped at step {result.step} of 8'
      assert told in capsys.readouterr().err
      assert not (workdir / 'eval.json').exists()
      return result.step, result.steps

    assert stopped_in(workdir_lib, 'claim') == (0, 0)
    assert not steps_on_disk(workdir)
    assert stopped_in(loop, 'jit_step') == (1, 1)
    assert stopped_in(loop.Checkpointer, 'restore') == (1, 0)
    for steps in (2, 0):  # What was cut short comes first.
      assert stopped_in(evaluation, 'held_out') == (3, steps)
      assert metrics_lib.read(workdir)[-1]['kind'] == 'train'
    assert stopped_in(Tiny, 'main_metrics') == (3, 0)
    assert stopped_in(loop.Checkpointer, 'save') == (8, 5)
    assert stopped_in(evaluation, 'held_out') == (8, 0)
    assert stopped_in(Tiny, 'finish') == (8, 0)
    assert stopped_in(Tiny, 'pictures') == (8, 0)
    assert steps_on_disk(workdir) == [1, 3, 8]
    assert train(config, workdir).finished
    assert files(workdir) == files(tmp_path / 'whole')
    assert not deaths

  def test_workers_that_die_of_the_same_signal(
    self, tmp_path, monkeypatch, deaths
  ):
    config = tiny_config(**{'evaluation.every': 0})
    iterator = Tiny(config).train_iterator(shard_index=0, shard_count=1)
    following = type(iterator).__next__
    calls = []

    def dying(self):
      calls.append(1)
      if len(calls) == 4:
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError('a worker process died')
      return following(self)

    monkeypatch.setattr(type(iterator), '__next__', dying)
    assert train(config, tmp_path).step == 3
    assert steps_on_disk(tmp_path) == [2, 3]
    assert not deaths

  def test_the_numbers_of_several_hosts_grow_over_all_runs(
    self, tmp_path, monkeypatch
  ):
    asked = []
    monkeypatch.setattr(
      multihost_utils,
      'reached_preemption_sync_point',
      lambda number: asked.append(number),
    )
    config = tiny_config(**{'evaluation.every': 0})
    # As with several hosts, in the part that this is about.
    monkeypatch.setattr(stop._asked, 'steps', 0)
    with stop.listening():
      monkeypatch.setattr(stop._asked, 'hosts', 2)
      for run in ('a', 'b'):
        train(config, tmp_path / run, max_steps=4)
    # By nobody else, as Orbax would at each save.
    assert asked == list(range(1, 9))

  def test_what_is_ignored_stays_so_and_threads_install_nothing(self):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    usual = signal.getsignal(signal.SIGUSR1)
    try:
      with stop.listening():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) != usual
      seen = []

      def elsewhere():
        with stop.listening():
          seen.append(signal.getsignal(signal.SIGUSR1))

      thread = threading.Thread(target=elsewhere)
      thread.start()
      thread.join()
      assert seen == [usual]
    finally:
      signal.signal(signal.SIGHUP, before)

  def test_saves_by_time(self, tmp_path, monkeypatch, quiet):
    clock = [0.0]
    put_batch = parallel.put_batch

    def put(batch, mesh):
      clock[0] += 60
      return put_batch(batch, mesh)

    monkeypatch.setattr(parallel, 'put_batch', put)
    monkeypatch.setattr(
      hooks, 'time', types.SimpleNamespace(monotonic=lambda: clock[0])
    )
    for minutes, saved in ((3, [3, 6, 8]), (0, [8])):
      config = tiny_config(
        **{
          'evaluation.every': 0,
          'checkpoint.every': 0,
          'checkpoint.every_minutes': minutes,
        },
      )
      train(config, tmp_path / str(minutes))
      assert steps_on_disk(tmp_path / str(minutes)) == saved


class TestRefused:
  """Bad input is refused before anything is written."""

  def test_a_workdir_that_cannot_be_one(self, tmp_path):
    (tmp_path / 'file').write_text('mine')
    for workdir in (tmp_path / 'file', tmp_path / 'file' / 'run'):
      with pytest.raises(UserError, match='cannot be written'):
        train(tiny_config(), workdir)
    assert (tmp_path / 'file').read_text() == 'mine'

  def test_a_workdir_that_another_process_writes_to(self, tmp_path):
    owner = lock.Lock(tmp_path / 'lock.json')
    owner.acquire()
    with pytest.raises(lock.InUse, match='name another workdir'):
      train(tiny_config(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['lock.json']
    owner.release()

  def test_what_only_the_step_shows(self, tmp_path, monkeypatch):
    shapes = {'x': jax.ShapeDtypeStruct((8, 8), 'float32')}
    monkeypatch.setattr(Tiny, 'batch_shapes', lambda self: shapes)

    def losses(*args, **kwargs):
      raise UserError('not with these rows')

    monkeypatch.setattr(Tiny, 'losses', losses)
    with pytest.raises(UserError, match='not with these rows'):
      train(tiny_config(), tmp_path)
    assert not workdir_lib.holds_run(tmp_path)


def test_a_home_directory_is_one_place(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  monkeypatch.chdir(tmp_path)
  config = tiny_config(**{'evaluation.every': 0})
  train(config, '~/run', max_steps=1)
  assert [p.name for p in tmp_path.iterdir()] == ['home']
  assert evaluation.load(Tiny(config), '~/run').step == 1


def test_evaluating_a_run(tmp_path, capsys):
  config = tiny_config(**{'evaluation.every': 0})
  with pytest.raises(UserError, match='holds no run'):
    tiny_task.load(tmp_path)
  train(config, tmp_path, max_steps=2)
  state = train(config, tmp_path, max_steps=1).state
  trained = tiny_task.load(tmp_path)
  assert trained.step == 3
  chex.assert_trees_all_equal(
    (trained.params, trained.model_state), (state.params, state.model_state)
  )
  before = tiny.snapshot(tmp_path / 'checkpoints')
  # Who only reads needs no lock.
  (tmp_path / 'lock.json').write_text('somebody is training')
  metrics = evaluation.evaluate(trained, tmp_path, batches=1)
  assert 'held-out, at step 3' in capsys.readouterr().out
  told = json.loads((tmp_path / 'eval.json').read_text())
  assert told == {'step': 3, **metrics}
  assert tiny.snapshot(tmp_path / 'checkpoints') == before
  older = tiny_task.load(tmp_path, step=2)
  assert older.step == 2
  assert not np.array_equal(
    older.params['block_0']['kernel'], trained.params['block_0']['kernel']
  )
  with pytest.raises(UserError, match=r'no checkpoint at step 1 .*\[2, 3\]'):
    tiny_task.load(tmp_path, step=1)
