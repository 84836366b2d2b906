"""The best checkpoint stays, and a run that gets no better ends early."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_task
from tiny_task import Tiny, steps_on_disk, train

from mod_jax.errors import UserError
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import stop
from mod_jax.tasks import phases
from mod_jax.train import evaluation, hooks

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('no_report', 'one_device'),
]

PEAK = 4  # The step after which the accuracy falls.


@pytest.fixture(autouse=True)
def _peaked(monkeypatch):
  def eval_step(self, params, model_state, batch, key, mode):
    away = jnp.abs(model_state['statistics']['sum'] - PEAK)
    return {
      'loss': (0.5 + away, 1.0),
      'accuracy': (1 / (1 + away), 1.0),
      'other': (away, 1.0),
    }

  monkeypatch.setattr(Tiny, 'eval_step', eval_step)


def make_config(**changes):
  own = {
    'train.num_steps': 12,
    'evaluation.every': 2,
    'log.every': 100,
    'checkpoint.every': 3,
    'checkpoint.keep': 2,
    'checkpoint.best': 'accuracy',
  }
  return tiny_task.make_config(**own | changes)


def left(workdir):
  """Returns what a run leaves behind, without the times."""
  return (
    steps_on_disk(workdir),
    (workdir / 'best.json').read_text(),
    metrics_lib.read(workdir),
  )


def value_of(trained):
  return np.asarray(trained.model_state['statistics']['sum'])


@pytest.mark.parametrize('metric', ['accuracy', 'loss'])
def test_the_best_stays_beside_the_newest(tmp_path, metric, capsys):
  train(make_config(**{'checkpoint.best': metric}), tmp_path)
  # By steps alone, 9 and 12 would be all.
  assert steps_on_disk(tmp_path) == [PEAK, 9, 12]
  value = {'accuracy': 1.0, 'loss': 0.5}[metric]
  best = json.loads((tmp_path / 'best.json').read_text())
  assert best == {'step': PEAK, 'metric': metric, 'value': value}
  said = f'best held-out {metric} {value:.4f}, at step {PEAK}'
  assert said in capsys.readouterr().err
  trained = tiny_task.load(tmp_path, step='best')
  assert trained.step == value_of(trained) == PEAK
  assert tiny_task.load(tmp_path).step == 12


def test_without_a_metric_there_is_no_best(tmp_path):
  train(make_config(**{'checkpoint.best': None}), tmp_path)
  assert steps_on_disk(tmp_path) == [9, 12]
  with pytest.raises(UserError, match='names no best checkpoint'):
    tiny_task.load(tmp_path, step='best')
  with pytest.raises(UserError, match="step='9': expected a number"):
    tiny_task.load(tmp_path, step='9')


def test_the_last_evaluation_may_be_the_best(tmp_path):
  config = make_config(**{'train.num_steps': PEAK, 'evaluation.every': 3})
  train(config, tmp_path)
  assert json.loads((tmp_path / 'best.json').read_text())['step'] == PEAK


def test_a_run_that_gets_no_better_ends_early(tmp_path, monkeypatch, capsys):
  config = make_config(**{'train.early_stop': 2})
  result = train(config, tmp_path)
  assert result.finished
  assert result.step == 8  # Evaluated at 2, 4, 6 and 8.
  assert 'ends early, at step 8: no better accuracy in 2' in (
    capsys.readouterr().err
  )
  assert steps_on_disk(tmp_path) == [PEAK, 6, 8]
  before = left(tmp_path)

  # The same command again takes no step, and phases know that it is finished.
  again = train(config, tmp_path)
  assert (again.finished, again.steps) == (True, 0)
  assert left(tmp_path) == before
  monkeypatch.setattr(phases, 'make_task', lambda config, workdir: Tiny(config))
  monkeypatch.setattr(evaluation, 'last_step', lambda workdir: 8)
  assert phases.finished(tmp_path, config) == result.metrics

  # More patience takes it further.
  patient = make_config(**{'train.early_stop': 3})
  assert phases.finished(tmp_path, patient) is None
  further = train(patient, tmp_path, allow_changed_config=True)
  assert (further.finished, further.step) == (True, 10)


@pytest.mark.parametrize(
  ('before', 'after', 'there'),
  [(None, 'accuracy', 6), ('other', 'accuracy', 2), ('accuracy', None, None)],
)
def test_a_continuation_by_another_metric_names_what_is_there(
  tmp_path, monkeypatch, before, after, there
):
  monkeypatch.setattr(Tiny, 'rising', ('accuracy', 'other'))
  train(make_config(**{'checkpoint.best': before}), tmp_path, max_steps=8)
  train(make_config(**{'checkpoint.best': after}), tmp_path)
  if after is None:
    assert steps_on_disk(tmp_path) == [9, 12]
    assert not (tmp_path / 'best.json').exists()
  else:
    # The checkpoint at the peak was never saved, or is gone.
    assert steps_on_disk(tmp_path) == [there, 9, 12]
    best = json.loads((tmp_path / 'best.json').read_text())
    assert (best['step'], best['metric']) == (there, after)
    assert tiny_task.load(tmp_path, step='best').step == there


@pytest.mark.parametrize(
  ('early_stop', 'parts'), [(0, (1, 3, 2)), (2, (4, 3)), (2, (6, 1)), (0, (8,))]
)
def test_a_run_in_parts_ends_as_one_without_a_stop(tmp_path, early_stop, parts):
  config = make_config(**{'train.early_stop': early_stop})
  whole = train(config, tmp_path / 'whole')
  for steps in parts:
    train(config, tmp_path / 'parts', max_steps=steps)
  rest = train(config, tmp_path / 'parts')
  assert rest.finished
  assert rest.step == whole.step == (8 if early_stop else 12)
  assert rest.metrics == whole.metrics
  disk, best, lines = left(tmp_path / 'parts')
  assert (best, lines) == left(tmp_path / 'whole')[1:]
  assert PEAK in disk
  for name in ('params', 'opt_state'):
    a, b = (jax.tree.leaves(getattr(x.state, name)) for x in (rest, whole))
    assert all(map(np.array_equal, a, b))


def test_a_stop_within_an_evaluation_is_made_up_for(tmp_path, monkeypatch):
  config = make_config(**{'train.early_stop': 2})
  whole = train(config, tmp_path / 'whole')
  held_out = evaluation.held_out

  def interrupted(task, params, model_state, mesh, **kwargs):
    if model_state['statistics']['sum'] == 8:
      raise stop.Stopped
    return held_out(task, params, model_state, mesh, **kwargs)

  # The one after which the run would end, and whose step it saves.
  monkeypatch.setattr(hooks.evaluation, 'held_out', interrupted)
  train(config, tmp_path / 'parts', max_steps=8)
  monkeypatch.setattr(hooks.evaluation, 'held_out', held_out)
  rest = train(config, tmp_path / 'parts')
  assert (rest.finished, rest.step) == (True, whole.step)
  assert left(tmp_path / 'parts')[1:] == left(tmp_path / 'whole')[1:]


def test_a_kill_before_the_best_is_saved_changes_nothing(tmp_path, monkeypatch):
  config = make_config()
  train(config, tmp_path / 'whole')

  class Killed(Exception):
    pass

  def killed(self, step, *args):
    if step == PEAK:
      raise Killed
    return save(self, step, *args)

  save = hooks.Save.now
  monkeypatch.setattr(hooks.Save, 'now', killed)
  with pytest.raises(Killed):
    train(config, tmp_path / 'parts')
  # The line of the evaluation is there, the checkpoint is not.
  assert metrics_lib.read(tmp_path / 'parts')[-1]['step'] == PEAK
  assert steps_on_disk(tmp_path / 'parts') == [2, 3]
  monkeypatch.setattr(hooks.Save, 'now', save)
  train(config, tmp_path / 'parts')
  assert left(tmp_path / 'parts') == left(tmp_path / 'whole')


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'checkpoint.best': 'other'}, "best='other': nothing says whether more"),
    ({'checkpoint.best': 'acuracy'}, "Did you mean 'accuracy'"),
    ({'checkpoint.best': 'top5'}, "best='top5': this run measures accuracy, l"),
    (
      {'checkpoint.best': None, 'train.early_stop': 2},
      'name the held-out metric',
    ),
    ({'evaluation.every': 0, 'train.early_stop': 2}, 'no evaluation before'),
  ],
)
def test_metrics_that_cannot_judge(tmp_path, changes, said):
  with pytest.raises(UserError, match=said):
    train(make_config(**changes), tmp_path)


def test_a_metric_that_cannot_judge_is_told_before_the_first_step(tmp_path):
  first = make_config(**{'train.num_steps': 2})
  train(first, tmp_path / 'first')
  init = {'init': str(tmp_path / 'first'), 'checkpoint.best': 'top5'}
  with pytest.raises(UserError, match='this run measures'):
    train(make_config(**init), tmp_path / 'second')
  assert [x['step'] for x in metrics_lib.read(tmp_path / 'second')] == [0]


def test_a_fraction_of_less_than_a_step_ends_early_too(tmp_path):
  config = make_config(**{'train.early_stop': 2, 'evaluation.every': 0.01})
  assert train(config, tmp_path).step == PEAK + 2  # Evaluated at each step.


def test_the_last_step_is_judged_on_as_many_batches_as_others(
  tmp_path, monkeypatch
):
  held_out = evaluation.held_out

  def more_on_more(*args, batches=None, **kwargs):
    metrics = held_out(*args, batches=batches, **kwargs)
    return metrics | {'accuracy': metrics['accuracy'] + (batches or 1)}

  monkeypatch.setattr(hooks.evaluation, 'held_out', more_on_more)
  changes = {'evaluation.batches': 1, 'evaluation.final_batches': 2}
  train(make_config(**changes), tmp_path)
  assert json.loads((tmp_path / 'best.json').read_text())['step'] == PEAK
