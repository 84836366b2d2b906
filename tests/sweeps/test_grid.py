"""Sweeps: which points there are, what is refused, what is run again."""

import json

import pytest

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import grid
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig

pytestmark = pytest.mark.slow

CONFIG = ExperimentConfig(
  name='lm', model=LMConfig(routing=MoDConfig(period=1, offset=0))
)


class TestPoints:
  def test_product_with_the_last_axis_fastest(self):
    axes = grid.parse(CONFIG, ['optimizer.learning_rate=1e-5,3e-4', 'seed=0,1'])
    assert axes == {'optimizer.learning_rate': (1e-5, 3e-4), 'seed': (0, 1)}
    points = grid.points(CONFIG, axes)
    assert [name for name, _ in points] == [
      f'optimizer.learning_rate={rate},seed={seed}'
      for rate in ('1e-05', '0.0003')
      for seed in (0, 1)
    ]
    name, config = points[3]
    changes = {'optimizer.learning_rate': 3e-4, 'seed': 1, 'name': f'lm {name}'}
    assert config == config_lib.replace(CONFIG, changes)
    # Names are directories of one level.
    ((name, config),) = grid.points(CONFIG, {'init': ['../runs/a']})
    assert '/' not in name
    assert config.init == '../runs/a'
    # A group of fields, as on the command line.
    group = "model.routing={'layers': (0,), 'capacity': 0.5}"
    points = grid.points(CONFIG, grid.parse(CONFIG, [f'{group},none']))
    changed, dense = [config.model.routing for _, config in points]
    assert (changed, dense) == (MoDConfig(layers=(0,), capacity=0.5), None)
    assert points[0][0] == group

  @pytest.mark.parametrize(
    ('text', 'values'),
    [
      ('init=none,runs/a', (None, 'runs/a')),
      ('seed= 3 , 4', (3, 4)),
      ("init='a,b', ' c', d's", ('a,b', ' c', "d's")),
      ('model.routing.capacity=0.5,(0.25,0.5)', (0.5, (0.25, 0.5))),
      ("optimizer.rules=((',', 1.0, 0),)", (((',', 1.0, 0),),)),
    ],
  )
  def test_values_as_on_the_command_line(self, text, values):
    (found,) = grid.parse(CONFIG, [text]).values()
    assert found == values
    assert list(map(type, found)) == list(map(type, values))

  @pytest.mark.parametrize(
    ('texts', 'message'),
    [
      (['optimizer.learning_rat=1'], "'optimizer.learning_rate'"),
      (['seed'], 'expected a field and its values'),
      (['seed=,'], 'seed has no values'),
      (['train.num_steps=10,0'], 'the point train.num_steps=0 .* from 1'),
      (['seed=1,1'], 'two points of the sweep would lie in seed=1:'),
      (['seed=0', 'seed=1'], 'seed is given twice'),
    ],
  )
  def test_refused(self, texts, message):
    with pytest.raises(UserError, match=message):
      grid.points(CONFIG, grid.parse(CONFIG, texts))


def test_a_line_joins_the_points_that_differ_in_the_last_field(monkeypatch):
  drawn = []
  monkeypatch.setattr(
    viz, 'accuracy_flops', lambda points, **_: drawn.extend(points)
  )
  assert grid.picture([]) is None

  def point(learners, **main):
    values = {'model.num_learners': learners, 'objective.budget': 0.5}
    return grid.Point(name='', values=values, metrics={}, main=main)

  grid.picture(
    [
      point(2, accuracy=0.9, gmacs=3.0),
      point(2, accuracy=0.95),
      point(4, accuracy=0.8, gmacs=2.0),
    ]
  )
  assert [tuple(x.values()) for x in drawn] == [
    ('budget=0.5', 'num_learners=2', 3.0, 0.9),
    ('budget=0.5', 'num_learners=4', 2.0, 0.8),
  ]


class TestRun:
  def test_runs_all_and_then_only_what_is_new(self, trained, tmp_path):
    points = grid.run(CONFIG, {'seed': (1, 2)}, tmp_path)
    assert trained == [1, 2]
    assert [p.main['top_k/loss'] for p in points] == [0.1, 0.2]
    assert (tmp_path / 'seed=1' / 'config.json').is_file()
    again = grid.run(CONFIG, {'seed': (1, 2, 3)}, tmp_path)
    assert trained == [1, 2, 3]
    assert again[:2] == points
    told = json.loads((tmp_path / 'sweep.json').read_text())
    assert told['axes'] == {'seed': [1, 2, 3]}
    assert [p['values']['seed'] for p in told['points']] == [1, 2, 3]
    assert told['points'][2]['metrics']['top_k/routed'] == 0.5

  def test_another_evaluation_is_not_skipped(self, trained, tmp_path):
    grid.run(CONFIG, {'seed': (1,)}, tmp_path)
    other = config_lib.replace(CONFIG, {'evaluation.final_batches': 7})
    for config, whether in ((CONFIG, True), (other, False)):
      ((name, point),) = grid.points(config, {'seed': (1,)})
      found = phases.finished(tmp_path / name, point)
      assert (found is not None) == whether

  def test_a_point_that_was_finished_over_other_data_is_refused(
    self, trained, tmp_path
  ):
    grid.run(CONFIG, {'seed': (1,)}, tmp_path)
    (path,) = tmp_path.glob('*/checkpoints/*/metadata/metadata')
    told = json.loads(path.read_text())
    told['metadata'] = {'data': {'source': 'files'}}
    path.write_text(json.dumps(told))
    with pytest.raises(UserError, match='the data changed since step 1000'):
      grid.run(CONFIG, {'seed': (1,)}, tmp_path)
    assert grid.run(CONFIG, {'seed': (1,)}, tmp_path, allow_changed_data=True)
    assert trained == [1]

  def test_divergence_is_noted_and_what_was_stopped_is_left(
    self, trained, tmp_path, capsys
  ):
    # A signal stops the run of seed 99.
    points = grid.run(CONFIG, {'seed': (13, 5, 99, 6)}, tmp_path)
    assert trained == [13, 5, 99, 6]
    assert [p.name for p in points] == ['seed=13', 'seed=5', 'seed=6']
    assert points[0].diverged == 'loss is nan at step 3'
    captured = capsys.readouterr()
    assert 'seed=13: diverged: loss is nan' in captured.out
    assert '1 of 4 runs have no result yet' in captured.err
    assert grid.table(points).splitlines() == [
      'seed  top_k/loss',
      '13      diverged',
      '5         0.5000',
      '6         0.6000',
    ]
    assert 'no point' in grid.table([])
    # What has a result is not trained again, a divergence least of all.
    assert grid.run(CONFIG, {'seed': (13, 5)}, tmp_path) == points[:2]
    assert trained == [13, 5, 99, 6]

  def test_nothing_runs_where_something_is_wrong(self, trained, tmp_path):
    with pytest.raises(UserError, match='seed=x'):
      grid.run(CONFIG, {'seed': (1, 'x')}, tmp_path)
    # The last point's directory is somebody else's.
    other = config_lib.replace(CONFIG, {'seed': 8})
    workdir_lib.claim(tmp_path / 'seed=2', other)
    with pytest.raises(UserError, match='different config'):
      grid.run(CONFIG, {'seed': (1, 2)}, tmp_path)
    with pytest.raises(UserError, match='holds a single run'):
      grid.run(CONFIG, {'seed': (1, 2)}, tmp_path / 'seed=2')
    assert trained == []
