"""What a model confuses, against scikit-learn and by hand."""

import csv
import dataclasses
import functools
import io

import jax
import numpy as np
import pytest
from sklearn import metrics
import tiny

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.data import images as images_lib
from mod_jax.data.images import ImageDataConfig
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation

pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(tiny.VIT, patch_size=4, num_classes=3, num_layers=1)
COUNTS = {'cat': 5, 'dog': 3, 'emu': 9}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp('pictures')
  tiny.pictures(root, COUNTS, {'train': 9, 'eval': 9})
  rng = np.random.default_rng(0)
  rows = ['file,cat,dog,emu,split']
  for path in sorted(root.rglob('*.png')):
    split, name, file = path.relative_to(root).parts
    if int(path.stem) >= COUNTS[name]:
      path.unlink()
      continue
    a, b, c = rng.integers(0, 2, 3)
    rows.append(f'{split}/{name}/{file},{a},{b},{c},{split}')
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
  header, *rows = table(result.files['matrix.csv'])
  assert header == ['true', *COUNTS]
  assert [[int(x) for x in row[1:]] for row in rows] == matrix_VV.tolist()
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
  pairs = enumerate(zip(label_N, logits_NV.argmax(-1), strict=True))
  wrong = [
    (names[i], f'true {classes[t]} → predicted {classes[p]}', nats_NV[i, t])
    for i, (t, p) in pairs
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


def test_files_lie_beside_the_record(folder, tmp_path, capsys):
  mesh = parallel.make_mesh(parallel.MeshConfig())
  trained = evaluation.Trained(3, make(folder), params_of(), {}, mesh)
  evaluation.study(trained, ['confusion'], tmp_path)
  names = ('.json', '_matrix.csv', '_classes.csv', '_worst.csv')
  for name in (*names, '_matrix.png', '_worst.png'):
    folder = tmp_path / 'pictures' if name.endswith('png') else tmp_path
    assert (folder / f'study_confusion{name}').is_file()
  assert 'mean recall' in capsys.readouterr().out
