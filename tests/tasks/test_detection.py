"""Detection as a task: training on scenes, evaluation, use."""

import dataclasses
import pathlib

from command_line import run
import numpy as np
from PIL import Image
import pytest
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.data import scenes
from mod_jax.data.coco import of_crowd
from mod_jax.data.detection import DetectionDataConfig
from mod_jax.errors import UserError
from mod_jax.losses import sums
from mod_jax.models.detr import DETROutput
from mod_jax.runs import metrics
from mod_jax.tasks import make_task, phases

ROOT = pathlib.Path(__file__).parents[2]
SCENES = config_lib.load(ROOT / 'configs/detection/scenes.py')


@pytest.fixture(scope='module')
def trained(tmp_path_factory, on_one_device):
  workdir = tmp_path_factory.mktemp('detection') / 'run'
  with on_one_device():
    return workdir, phases.train(SCENES.get_config('amod_tiny'), workdir)


@pytest.fixture(scope='module')
def picture():
  config = scenes.SceneConfig(scales=(1, 1.5))
  return scenes.Scenes(config, 32, 'eval').scene(0).image_SSC


@pytest.mark.slow
def test_a_run_measures_precision_and_draws(trained):
  workdir, result = trained
  assert {'loss', 'mAP', 'mAP50'} <= result.metrics.keys()
  assert 0 <= result.metrics['mAP'] <= result.metrics['mAP50'] <= 1
  assert np.isfinite(result.metrics['loss'])
  assert (workdir / 'pictures' / 'boxes.png').is_file()


def test_padding_of_the_last_batch_is_not_drawn(monkeypatch):
  config = SCENES.get_config('amod_tiny')
  task = make_task(config_lib.replace(config, {'data.scenes.num_eval': 3}))
  drawn = []
  monkeypatch.setattr(viz, 'boxes', lambda shown, *_, **__: drawn.append(shown))
  variables = tiny.variables(config.model)
  task.pictures(variables.pop('params'), variables)
  assert len(drawn[0]) == 3


@pytest.mark.slow
def test_what_is_found_lies_in_the_picture(trained, picture):
  run = mod_jax.load(trained[0])
  # Twice as large: boxes are in pixels of the picture that was given.
  large = np.asarray(Image.fromarray(picture).resize((64, 64)))
  found, same = run.predict([large, picture], least=0.0)
  assert len(found) == run.config.num_queries
  scores = [x.score for x in found]
  assert scores == sorted(scores, reverse=True)
  assert {x.name for x in found} <= set(run.classes)
  boxes = np.array([x.box for x in found])
  assert (boxes >= 0).all()
  assert (boxes <= 64).all()
  assert boxes.max() > 32 > np.array([x.box for x in same]).max() / 2
  assert run.predict(picture, least=0.999) == [[]]
  assert run.draw(picture, least=0.0).axes
  with pytest.raises(UserError, match='top: this model takes least'):
    run.predict(picture, top=3)


@pytest.mark.slow
def test_the_command_line_tells_what_is_found(trained, picture, tmp_path):
  for name, side in (('a', 32), ('b', 64)):
    image = Image.fromarray(picture).resize((side, side))
    image.save(tmp_path / f'{name}.png')
  command = ('eval.py', f'--workdir={trained[0]}', '--noevaluate')
  ended = run(*command, f'--predict={tmp_path}/*.png')
  assert (ended.status, ended.err) == (0, '')
  (tmp_path / '0.png').write_text('no picture')
  again = run(*command, f'--predict={tmp_path}/*.png')
  assert again.status
  assert again.out.endswith(ended.out)
  assert f'{tmp_path}/0.png' in again.err
  for line, name in zip(ended.out.splitlines(), 'ab', strict=True):
    (found,) = mod_jax.load(trained[0]).predict(tmp_path / f'{name}.png')
    told = [f'{x.name} {x.score:.1%}' for x in found]
    assert line == f'{tmp_path}/{name}.png  {", ".join(told)}'


def test_perfect_predictions_have_a_precision_of_1():
  task = make_task(SCENES.get_config('tiny')).modality
  in_crowd = of_crowd(3)
  label = np.array([[3, 5, -1], [5, -1, in_crowd], [1, 1, 1]])
  box = np.random.default_rng(0).uniform(0.2, 0.4, (3, 3, 4))
  rows = {
    **{'label': label, 'box': box, 'weight': np.array([1, 1, 0])},
    'guess': np.where(label == in_crowd, 3, label.clip(0)),
    'found': box.copy(),
    'score': np.select([label == in_crowd, label >= 0], [0.95, 0.9], 0.1),
  }
  finished = task.finish_metrics({'loss': 2.0, 'rows': rows})
  # The third row only fills the batch, so its class is not there.
  assert finished == {'loss': 2, 'mAP': 1, 'mAP50': 1, 'ap/3': 1, 'ap/5': 1}
  rows['found'][1, 0] += 0.5
  worse = task.finish_metrics({'never/rows': rows})
  assert worse['never/ap/3'] == 1
  assert worse['never/mAP'] < 1


@pytest.mark.parametrize(
  'resized',
  [{}, {'short_side': 24}, {'train_short_sides': (16, 32)}, {'crop': 1.0}],
)
def test_the_model_is_told_what_is_padding(resized):
  config = SCENES.get_config('tiny')
  data = dataclasses.replace(config.data, **resized)
  modality = make_task(dataclasses.replace(config, data=data)).modality
  batch = next(iter(modality.train_iterator()))
  is_padded = (batch['size'] < data.image_size).any()
  assert is_padded == bool(resized)
  args, _ = modality.inputs(batch, train=True)
  assert len(args) == 1 + is_padded


def test_an_earlier_layer_weighs_as_much_as_the_last():
  task = make_task(SCENES.get_config('tiny')).modality
  rng = np.random.default_rng(1)
  logits_BQV = np.float32(rng.normal(size=(2, 4, 11)))
  boxes_BQ4, target_BT4 = np.float32(rng.uniform(0.2, 0.4, (2, 2, 4, 4)))
  batch = {'label': np.array([[3, 5, -1, -1]] * 2), 'box': target_BT4}
  output = DETROutput(logits_BQV, boxes_BQ4)
  total, rows = task.loss(output, batch)
  earlier = logits_BQV[:, None], boxes_BQ4[:, None]
  of_two, _ = task.loss(output.replace(earlier=earlier), batch)
  assert rows == 2
  np.testing.assert_allclose(of_two, 2 * total, rtol=1e-5)


def test_parts_of_a_batch_count_by_their_objects():
  """As gradient accumulation and evaluation add them, also without any."""
  task = make_task(SCENES.get_config('tiny')).modality
  rng = np.random.default_rng(2)
  logits_BQV = np.float32(rng.normal(size=(4, 4, 11)))
  boxes_BQ4, target_BT4 = np.float32(rng.uniform(0.2, 0.4, (2, 4, 4, 4)))
  label_BT = np.full((4, 4), -1)
  label_BT[0], label_BT[1, :2] = 3, 5

  def losses(rows):
    output = DETROutput(logits_BQV[rows], boxes_BQ4[rows])
    batch = {'label': label_BT[rows], 'box': target_BT4[rows]}
    pairs, metric_sums = task.losses(output, batch)
    batch['weight'] = np.ones(len(batch['label']))
    held_out = task.eval_sums(output, batch, None)['loss']
    return np.array(pairs), metric_sums['loss'], held_out

  whole, (total, rows), _ = losses(slice(None))
  parts = [losses(slice(2)), losses(slice(2, None))]
  np.testing.assert_allclose(sum(p[0] for p in parts), whole, rtol=1e-5)
  np.testing.assert_allclose(total / rows, (whole[:, 0] / whole[:, 1]).sum())
  held_out = metrics.finalize(sums.add(*({'loss': p[2]} for p in parts)))
  np.testing.assert_allclose(held_out['loss'], total / rows, rtol=1e-5)


def test_what_does_not_fit_is_refused():
  with pytest.raises(UserError, match='the least side first'):
    DetectionDataConfig(train_short_sides=(64, 32))
  for changes, words in (
    ({'model.num_classes': 9}, 'model.num_classes=9.*set model.num_classes=10'),
    ({'model.num_queries': 3}, 'data.most=4 objects and model.num_queries=3'),
  ):
    config = config_lib.replace(SCENES.get_config('tiny'), changes)
    with pytest.raises(UserError, match=words):
      make_task(config).modality.check()
