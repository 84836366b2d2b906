"""Conversion in three phases: what trains when, stopping, skipping, alone."""

import re
import shutil
import signal
import weakref

import numpy as np
import pytest
import tiny

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.errors import UserError
from mod_jax.layers.acm import FFNS
from mod_jax.layers.mode import Mode
from mod_jax.models import acm
from mod_jax.pretrained.source import Source
from mod_jax.runs import lock
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import phases
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import loop

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('one_device_each'),
]

# Smaller still than `tiny`: nothing here depends on sizes.
SMALL = {'model.num_layers': 1, 'model.width': 8, 'model.num_heads': 1}
STEPS = {'learners': 2, 'gates': 2, 'end_to_end': 3}


@pytest.fixture(scope='module')
def one_device_each(on_one_device):
  with on_one_device(), pytest.MonkeyPatch.context() as patch:
    # Pictures are looked at elsewhere.
    patch.setattr(Adaptive, 'pictures', lambda *args: {})
    patch.setattr(Adaptive, 'eval_modes', _one_mode)
    patch.setattr(Adaptive, 'curves', lambda *args: {})
    yield


def _one_mode(task, *, more=False):
  """Each of them compiles; the others are looked at elsewhere."""
  if more:
    return {}
  if task.objective.phase == 'learners':
    return {'k2/': Mode(learners=2)}
  return {'': Mode()}


@pytest.fixture(scope='module')
def dense(load_config_file, tmp_path_factory):
  """Returns the workdir of a dense run, as far as a conversion looks at it."""
  config = config_lib.replace(
    load_config_file('configs/vit/digits.py', 'tiny'), SMALL
  )
  workdir = tmp_path_factory.mktemp('dense')
  tiny.save_run(workdir, config, tiny.random_params(config.model, std=0.1))
  return str(workdir)


@pytest.fixture(scope='module')
def config(load_config_file, dense):
  return config_lib.replace(
    load_config_file('configs/acm/vit.py', 'tiny'),
    SMALL
    | {f'objective.{name}.num_steps': steps for name, steps in STEPS.items()}
    | {
      'init': dense,
      'model.adaptive.num_learners': 2,
      'model.adaptive.replace': (FFNS,),
      'evaluation.every': 0,
      'evaluation.final_batches': 1,
      'log.tensorboard': False,
      'checkpoint.every': 100,
    },
  )


@pytest.fixture(scope='module')
def whole(config, tmp_path_factory):
  """Returns workdir and result of all phases, uninterrupted."""
  workdir = tmp_path_factory.mktemp('whole')
  return workdir, phases.train(config, workdir)


def weights(workdir):
  return trees.flatten(Source.open(workdir).read()['params'])


def kind(name):
  if not re.fullmatch(acm.PARAMETERS, name):
    return 'backbone'
  return 'gate' if re.fullmatch(acm.GATES, name) else 'learners'


def changed(before, after):
  """Returns which kinds of parameters differ, and which do not."""
  differ, same = set(), set()
  for name, value in after.items():
    equal = name in before and np.array_equal(before[name], value)
    (same if equal else differ).add(kind(name))
  return differ, same


class TestWhole:
  def test_runs_lie_where_they_are_said_to(self, whole, config):
    workdir, result = whole
    assert result.finished
    assert result.step == STEPS['end_to_end']
    runs = phases.expand(config, workdir)
    assert [d for d, _ in runs] == [
      workdir / 'phase_learners',
      workdir / 'phase_gates',
      workdir,
    ]
    for (directory, run), name in zip(runs, STEPS, strict=True):
      assert workdir_lib.read_config(directory, ExperimentConfig) == run
      assert run.objective.phase == name
      assert run.objective.teacher == config.init
      assert run.train.num_steps == STEPS[name]
      phase = getattr(config.objective, name)
      assert run.optimizer.learning_rate == phase.learning_rate
      last = run.optimizer.learning_rate * run.optimizer.final_fraction
      assert last == pytest.approx(1e-6)
    assert [run.init for _, run in runs] == [
      config.init,
      *(str(directory) for directory, _ in runs[:2]),
    ]

  def test_the_default_objective_has_all_phases(self, config, tmp_path):
    config = config_lib.replace(config, {'objective': None})
    runs = phases.expand(config, tmp_path)
    assert [run.objective.phase for _, run in runs] == list(STEPS)
    assert phases.last(config).objective.phase == 'end_to_end'

  def test_each_phase_trains_what_it_should(self, whole, config):
    workdir, _ = whole
    dense = weights(config.init)
    learners = weights(workdir / 'phase_learners')
    gates = weights(workdir / 'phase_gates')
    last = weights(workdir)
    kept = {n: v for n, v in learners.items() if kind(n) == 'backbone'}
    tiny.same(kept, {name: dense[name] for name in kept})
    assert changed(learners, gates) == ({'gate'}, {'learners', 'backbone'})
    assert changed(gates, last)[0] == {'gate', 'learners', 'backbone'}

  def test_the_first_phase_trains_no_gate(self, whole, config, tmp_path):
    (_, run), *_ = phases.expand(config, whole[0])
    fresh = phases.train(run, tmp_path, max_steps=0).state.params
    learners = weights(whole[0] / 'phase_learners')
    differ, same = changed(trees.flatten(fresh), learners)
    assert (differ, same - {'backbone'}) == ({'learners'}, {'gate'})

  def test_run_again_it_only_reads(self, whole, config, monkeypatch):
    workdir, result = whole
    done = []
    train = loop.train
    monkeypatch.setattr(
      loop,
      'train',
      lambda t, c, w, **kwargs: done.append(w) or train(t, c, w, **kwargs),
    )
    again = phases.train(config, workdir)
    assert done == [workdir]  # The phases before are not even begun.
    assert again.steps == 0
    assert again.metrics == pytest.approx(result.metrics)


def test_stopped_and_resumed_anywhere(whole, config, tmp_path):
  # What is finished is not done again.
  shutil.copytree(whole[0] / 'phase_learners', tmp_path / 'phase_learners')
  ends = []
  for steps in (1, 3, 9):
    result = phases.train(config, tmp_path, max_steps=steps)
    ends.append((result.finished, result.step))
  # Within the second phase, and after its end within the third.
  assert ends == [(False, 1), (False, 2), (True, 3)]
  for name in ('phase_learners', 'phase_gates', '.'):
    tiny.same(weights(tmp_path / name), weights(whole[0] / name))
  assert result.metrics == pytest.approx(whole[1].metrics)


def test_a_run_may_be_named_otherwise_and_moved(
  whole, config, tmp_path, monkeypatch
):
  workdir = whole[0]
  monkeypatch.chdir(workdir.parent)
  runs = phases.expand(config, workdir.name)
  assert runs == phases.expand(config, workdir)
  moved = workdir.rename(tmp_path / 'moved')
  try:
    runs = phases.expand(config, moved)
    assert [workdir_lib.check(*run) for run in runs] == [[], [], []]
  finally:
    moved.rename(workdir)
  # There are weights at both places now, and they may be others.
  shutil.copytree(workdir / 'phase_gates', moved / 'phase_gates')
  other = config_lib.replace(runs[-1][1], {'init': str(moved / 'phase_gates')})
  with pytest.raises(UserError, match='init: '):
    workdir_lib.check(workdir, other)


@pytest.mark.parametrize('text', ['{"step": 1}', '{', None])
def test_unfinished_without_numbers_of_the_last_step(
  whole, config, tmp_path, text
):
  _, (_, run), _ = phases.expand(config, whole[0])
  directory = workdir_lib.expand(tmp_path / 'run')
  shutil.copytree(whole[0] / 'phase_gates', directory)
  assert phases.finished(directory, run)
  (directory / 'eval.json').unlink()
  if text is not None:
    (directory / 'eval.json').write_text(text)
  assert phases.finished(directory, run) is None


def test_a_stop_between_two_phases_is_not_forgotten(
  config, tmp_path, monkeypatch, capsys, deaths
):
  begun = []

  def train(task, run, workdir, **_):
    assert task.config == run
    begun.append(run.objective.phase)
    assert lock._held  # The whole conversion's, in the last one's directory.
    signal.raise_signal(signal.SIGTERM)
    return loop.Result(2, 2, True, {'loss': 1.0}, None)

  monkeypatch.setattr(loop, 'train', train)
  result = phases.train(config, tmp_path)
  assert not deaths
  assert begun == ['learners']
  assert (result.finished, result.metrics) == (False, {})
  assert 'stopped after phase learners' in capsys.readouterr().err


def test_a_state_does_not_outlive_its_phase(config, tmp_path, monkeypatch):
  states = []

  class State:
    pass

  def train(*_, **__):
    assert [alive for state in states if (alive := state())] == []
    state = State()
    states.append(weakref.ref(state))
    return loop.Result(2, 2, True, {'loss': 1.0}, state)

  monkeypatch.setattr(loop, 'train', train)
  phases.train(config, tmp_path)
  assert len(states) == 3


def test_a_phase_alone_is_that_of_all(whole, config, tmp_path):
  before = str(whole[0] / 'phase_learners')
  alone = {'objective.phase': 'gates', 'init': before}
  one = config_lib.replace(config, alone)
  ((directory, run),) = phases.expand(one, tmp_path)
  assert directory == tmp_path
  # The teacher is passed on.
  assert run.objective.teacher == config.init
  assert phases.train(one, directory).finished
  tiny.same(weights(directory), weights(whole[0] / 'phase_gates'))
  first = config_lib.replace(config, {'objective.phase': 'learners'})
  ((_, run),) = phases.expand(first, tmp_path)
  assert (run.init, run.train.num_steps) == (config.init, STEPS['learners'])


def test_a_skipped_phase_is_skipped(config, tmp_path):
  without = config_lib.replace(config, {'objective.gates.num_steps': 0})
  (first, _), (last, run) = phases.expand(without, tmp_path)
  assert (first, last) == (tmp_path / 'phase_learners', tmp_path)
  assert run.init == str(first)
  without = config_lib.replace(without, {'objective.learners.num_steps': 0})
  ((last, run),) = phases.expand(without, tmp_path)
  assert (last, run.init) == (tmp_path, config.init)
  without = config_lib.replace(config, {'objective.end_to_end.num_steps': 0})
  *_, (last, run) = phases.expand(without, tmp_path)
  assert (last, run.objective.phase) == (tmp_path, 'gates')


def test_the_gates_may_have_a_rate_of_their_own(config, tmp_path):
  config = config_lib.replace(config, {'objective.gate_rate': 7.0})
  *_, (_, run) = phases.expand(config, tmp_path)
  gates, others = run.optimizer.rules
  assert gates[1:] == (7.0, 0)
  assert others[1:] == (1.0, 0)
  assert re.search(gates[0], 'block_0/mlp_acm/gate/hidden/kernel')
  assert not re.search(gates[0], 'block_0/mlp_acm/up')
