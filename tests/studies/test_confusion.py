"""What a model confuses, against scikit-learn and by hand."""

import csv
import dataclasses
import functools
import io

import jax
import numpy as np
from PIL import Image
import pytest
from sklearn import metrics
import tiny

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.data import images as images_lib
from mod_jax.data.images import ImageDataConfig
from mod_jax.studies import confusion
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation

pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(tiny.VIT, patch_size=4, num_classes=3, num_layers=1)
COUNTS = {'cat': 5, 'dog': 3, 'emu': 9}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp('pictures')
  rng = np.random.default_rng(0)
  rows = ['file,cat,dog,emu,split']
  for name, count in COUNTS.items():
    for split in ('train', 'eval'):
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
        path = f'{split}/{name}/{i}.png'
        Image.fromarray(pixels).save(root / path)
        flags = rng.integers(0, 2, 3)
        rows.append(f'{path},{flags[0]},{flags[1]},{flags[2]},{split}')
  (root / 'labels.csv').write_text('\n'.join(rows))
  return root


@functools.cache
def params_of():
  return tiny.random_params(MODEL, seed=1, std=0.5)


def make(folder, **changes):
  config = ExperimentConfig(
    model=MODEL,
    data=ImageDataConfig(source='folder', path=str(folder), image_size=8),
  )
  # The last of several batches is padded.
  changes = {'evaluation.batch_size': 4, **changes}
  return make_task(config_lib.replace(config, changes))


def held_out(task):
  """Returns labels, logits and files of all held-out pictures, one by one."""
  labels, logits = [], []
  for batch in images_lib.eval_batches(task.config.data, batch_size=1):
    output = MODEL.build().apply({'params': params_of()}, batch['image'])
    labels.append(batch['label'][0])
    logits.append(np.asarray(output.logits_BV[0]))
  return np.array(labels), np.array(logits)


def study(task):
  mesh, params = parallel.make_mesh(parallel.MeshConfig()), params_of()
  with jax.set_mesh(mesh):
    return task.studies()['confusion'](params, {}, mesh)


def table(text):
  return [*csv.reader(io.StringIO(text))]


def test_one_class_is_true(folder):
  task = make(folder)
  result = study(task)
  label_N, logits_NV = held_out(task)
  guess_N = logits_NV.argmax(-1)
  assert result.metrics['accuracy'] == np.mean(guess_N == label_N)
  assert result.metrics['mean_recall'] == pytest.approx(
    metrics.balanced_accuracy_score(label_N, guess_N)
  )
  matrix_VV = metrics.confusion_matrix(label_N, guess_N, labels=range(3))
  assert table(result.files['matrix.csv']) == [
    ['true', *COUNTS],
    *(
      [name, *map(str, row)]
      for name, row in zip(COUNTS, matrix_VV.tolist(), strict=True)
    ),
  ]
  recall_V = matrix_VV.diagonal() / matrix_VV.sum(axis=1)
  header, *rows = table(result.files['classes.csv'])
  for v, (name, row) in enumerate(zip(COUNTS, rows, strict=True)):
    row = dict(zip(header, row, strict=True))
    assert (row['class'], row['images']) == (name, str(COUNTS[name]))
    assert int(row['predicted']) == matrix_VV[:, v].sum()
    assert float(row['recall']) == pytest.approx(recall_V[v])
    assert result.metrics['classes'][name]['recall'] == float(row['recall'])
  assert result.figures.keys() == {'matrix', 'worst'}


def test_the_worst_pictures_have_their_names(folder):
  task = make(folder)
  label_N, logits_NV = held_out(task)
  split = images_lib.open_split(task.config.data, 'eval')
  names, classes = [split.name(i) for i in range(len(split))], [*COUNTS]
  shifted_NV = logits_NV - logits_NV.max(-1, keepdims=True)
  nats_NV = np.log(np.exp(shifted_NV).sum(-1, keepdims=True)) - shifted_NV
  wrong = [
    (
      names[i],
      f'true {classes[t]} → predicted {classes[p]}',
      float(nats_NV[i, t]),
    )
    for i, (t, p) in enumerate(zip(label_N, logits_NV.argmax(-1), strict=True))
    if t != p
  ]
  assert 3 < len(wrong) < len(names)
  wrong.sort(key=lambda row: -row[2])
  header, *rows = table(study(task).files['worst.csv'])
  assert header == ['file', 'said', 'loss']
  for row, (name, said, loss) in zip(rows, wrong, strict=True):
    assert row[:2] == [name, said]
    assert float(row[2]) == pytest.approx(loss, abs=1e-3)


def test_any_number_of_labels_is_true(folder):
  task = make(folder, **{'data.label_table': 'labels.csv'})
  result = study(task)
  label_NV, logits_NV = held_out(task)
  expected = metrics.average_precision_score(
    label_NV, logits_NV, average='macro'
  )
  assert result.metrics['mAP'] == pytest.approx(expected)
  header, *rows = table(result.files['classes.csv'])
  for v, row in enumerate(rows):
    row = dict(zip(header, row, strict=True))
    true_N, guess_N = label_NV[:, v], logits_NV[:, v] > 0
    assert int(row['images']) == true_N.sum()
    assert float(row['recall']) == pytest.approx(
      metrics.recall_score(true_N, guess_N)
    )
    if guess_N.any():
      assert float(row['precision']) == pytest.approx(
        metrics.precision_score(true_N, guess_N)
      )
  assert result.figures.keys() == {'worst'}
  assert result.files.keys() == {'classes.csv', 'worst.csv'}
  assert task.studies().keys() == {'confusion', 'throughput'}


def test_many_classes_are_told_by_the_worst(monkeypatch, folder):
  monkeypatch.setattr(confusion, '_CLASSES', 2)
  text = study(make(folder)).text
  assert 'The 2 worst of 3 classes, by recall.' in text
  shown = [name for name in COUNTS if f'\n{name} ' in text]
  recalls = study(make(folder)).metrics['classes']
  best = max(recalls, key=lambda name: recalls[name]['recall'])
  assert shown == [name for name in COUNTS if name != best]


def test_files_lie_beside_the_record(folder, tmp_path, capsys):
  trained = evaluation.Trained(
    3, make(folder), params_of(), {}, parallel.make_mesh(parallel.MeshConfig())
  )
  evaluation.study(trained, ['confusion'], tmp_path)
  written = {path.name for path in tmp_path.iterdir()}
  assert written == {
    'pictures',
    'study_confusion.json',
    *(f'study_confusion_{x}.csv' for x in ('matrix', 'classes', 'worst')),
  }
  pictures = {path.name for path in (tmp_path / 'pictures').iterdir()}
  assert pictures == {
    'study_confusion_matrix.png',
    'study_confusion_worst.png',
  }
  assert 'mean recall' in capsys.readouterr().out
