"""What is kept of a run's restarts, and traces of its steps."""

import itertools
import shutil

import chex
import jax
import pytest
from tiny_task import load, make_config, train

from mod_jax import config as config_lib
from mod_jax.data.audio import AudioDataConfig
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.errors import UserError
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.runs import history, metrics
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import profile

pytestmark = pytest.mark.usefixtures('no_report', 'one_device')

# A rate that does not depend on how long the run is.
FIXED_RATE = make_config(**{'optimizer.final_fraction': 1.0})


def test_the_cost_of_restarts():
  def event(name, time, step, **more):
    return {'event': name, 'time': time, 'step': step, **more}

  events = [
    event('start', 100, 0, lost_steps=0),
    event('first_step', 130, 1),  # The process is killed after step 14.
  ]
  assert history.cost_of_restarts(events) is None
  events += [
    event('start', 150, 10, lost_steps=4),
    event('first_step', 180, 11),  # 30 s to start.
    event('end', 230, 36),  # 25 steps of 2 s.
  ]
  assert history.cost_of_restarts(events) == (
    'continued once, which cost about 38 s: 30 s to start, and 4 step(s) done'
    ' again'
  )


def test_an_event_after_a_cut_line(tmp_path):
  (tmp_path / 'metrics.jsonl').write_bytes(
    b'{"step": 6, "kind": "train"}\n{"step":'
  )
  metrics.add_event(tmp_path, 'changed', 9, fields=['a: 2 -> 3'])
  assert [e['step'] for e in metrics.read_events(tmp_path)] == [9]
  assert [x['step'] for x in metrics.read(tmp_path)] == [6]
  assert history.changed_at(tmp_path) == 9


def test_a_run_tells_how_it_was_continued(tmp_path, capsys):
  config = make_config()
  train(config, tmp_path, max_steps=3)
  # What a kill after step 5, before it was saved, leaves behind.
  path = tmp_path / 'metrics.jsonl'
  with path.open('a') as file:
    file.writelines(f'{{"step": {i}, "kind": "train"}}\n' for i in (4, 5))
  train(config, tmp_path)
  events = metrics.read_events(tmp_path)
  assert [(e['event'], e['step']) for e in events] == [
    *(('start', 0), ('first_step', 1), ('end', 3)),
    *(('start', 3), ('first_step', 4), ('end', 6)),
  ]
  assert [e.get('lost_steps') for e in events[::3]] == [0, 2]
  assert all(a['time'] <= b['time'] for a, b in itertools.pairwise(events))
  assert '2 step(s) done again' in capsys.readouterr().err


@pytest.fixture(scope='module')
def finished(tmp_path_factory, on_one_device, no_report):
  workdir = tmp_path_factory.mktemp('finished')
  with on_one_device():
    train(FIXED_RATE, workdir)
  return workdir


@pytest.fixture
def run(finished, tmp_path):
  return shutil.copytree(finished, tmp_path / 'run')


class TestLengthening:
  @pytest.mark.slow
  def test_is_as_if_the_run_had_been_so_long(self, run, tmp_path):
    longer = config_lib.replace(FIXED_RATE, {'train.num_steps': 9})
    with pytest.raises(UserError, match='init=.*run') as refused:
      train(longer, run)
    assert '(train.num_steps: 6 -> 9)' in str(refused.value)
    assert '--allow_changed_config' in str(refused.value)
    train(longer, run, allow_changed_config=True, max_steps=1)
    # From here on it is the run's own config.
    result = train(longer, run)
    assert result.step == 9
    whole = train(longer, tmp_path / 'whole')
    chex.assert_trees_all_equal(result.state, whole.state)
    assert result.metrics == whole.metrics
    (change,) = (e for e in metrics.read_events(run) if e['event'] == 'changed')
    assert change['step'] == 6
    assert change['fields'] == ['train.num_steps: 6 -> 9']
    # What was saved before the change can be read as before.
    assert load(run, step=6).step == 6

  @pytest.mark.parametrize(
    ('changes', 'why'),
    [
      ({'seed': 1}, 'seed: 0 -> 1'),
      ({'optimizer.kind': 'sgd', 'train.num_steps': 9}, 'optimizer.kind'),
      ({'train.num_steps': 5}, 'has taken 6 steps already'),
      (
        {'optimizer.clip_norm': 0.0, 'train.num_steps': 9},
        'clip_norm: 1.0 -> 0.0',
      ),
    ],
  )
  def test_what_cannot_change(self, changes, why, run):
    before = (run / 'config.json').read_text()
    other = config_lib.replace(FIXED_RATE, changes)
    with pytest.raises(UserError, match=why):
      train(other, run, allow_changed_config=True)
    assert (run / 'config.json').read_text() == before
    assert history.changed_at(run) == -1

  @pytest.mark.parametrize(
    ('name', 'variant', 'field'),
    [
      ('vit/digits', 'amod', 'model.routing.capacity'),
      ('vit/compose', 'pruned', 'model.backbone.routing.capacity'),
      ('vlm/scenes', 'gamma', 'model.language.routing.capacity'),
      ('vlm/scenes', 'tower_amod', 'model.tower.routing.capacity'),
    ],
  )
  def test_capacities_of_any_part_can_change(
    self, name, variant, field, load_config_file
  ):
    held = load_config_file(f'configs/{name}.py', variant)
    other = config_lib.replace(held, {field: 0.25})
    assert workdir_lib.refuse_differences(
      held, other, '', '', allow_changes=True
    ) == [f'{field}: 0.5 -> 0.25']


@pytest.mark.parametrize(
  ('model', 'data', 'moved'),
  [
    (
      Wav2Vec2Config(),
      AudioDataConfig(source='folder', path='a', vocabulary='a.json'),
      {'data.vocabulary': 'b.json'},
    ),
    (
      VLMConfig(),
      ConversationDataConfig(
        source='llava', path='a.json', folder='a', image_size=224
      ),
      {'data.path': 'b.json', 'data.folder': 'b'},
    ),
  ],
)
def test_data_may_be_moved(model, data, moved):
  held = ExperimentConfig(model=model, data=data)
  moved = config_lib.replace(held, moved)
  assert workdir_lib.refuse_differences(held, moved, '', '') == []


@pytest.mark.slow
def test_a_trace_of_some_steps(tmp_path, capsys):
  train(make_config(), tmp_path, profile=profile.parse('2:3'))
  (folder,) = (tmp_path / 'profile/plugins/profile').iterdir()
  names = {path.name for path in folder.iterdir()}
  assert 'perfetto_trace.json.gz' in names
  assert any(name.endswith('.xplane.pb') for name in names)
  assert 'traced steps 2 to 3' in capsys.readouterr().err
  train(make_config(), tmp_path, profile=profile.parse('2:3'))
  assert 'were taken before' in capsys.readouterr().err


def test_a_stop_within_the_trace_ends_it(tmp_path, monkeypatch):
  calls = []  # Real traces take seconds to write.
  for name in ('start_trace', 'stop_trace'):
    monkeypatch.setattr(
      jax.profiler, name, lambda *args, name=name, **kwargs: calls.append(name)
    )
  train(make_config(), tmp_path, profile=range(1, 5), max_steps=2)
  assert calls == ['start_trace', 'stop_trace']


@pytest.mark.parametrize('text', ['3', '0:2', '4:3', 'a:b', ''])
def test_steps_that_are_none(text, tmp_path):
  with pytest.raises(UserError, match='first and the last step'):
    profile.parse(text)
  with pytest.raises(UserError, match='6 steps'):
    train(make_config(), tmp_path, profile=range(5, 9))
  assert not workdir_lib.holds_run(tmp_path)
