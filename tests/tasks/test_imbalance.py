"""Runs on classes of unequal size, and on tables of labels."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
from sklearn import metrics as sklearn_metrics
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax.data import images as images_lib
from mod_jax.data.augment import AugmentConfig
from mod_jax.data.images import ImageDataConfig
from mod_jax.errors import UserError
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.pretrained import export
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks import make_task, phases

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('no_report', 'one_device'),
]

MODEL = dataclasses.replace(tiny.VIT, patch_size=4, num_classes=3, num_layers=1)
COUNTS = {'cat': 20, 'dog': 3, 'emu': 6}
TABLE = {'data.label_table': 'labels.csv'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Pictures whose brightness tells the class; and a table of labels."""
  root = tmp_path_factory.mktemp('pictures')
  rng = np.random.default_rng(0)
  rows = ['file,labels,split']
  for v, (name, count) in enumerate(COUNTS.items()):
    for split in ('train', 'eval'):
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(70 * v, 70 * v + 110, (8, 8, 3)).astype(np.uint8)
        path = f'{split}/{name}/{i}.png'
        Image.fromarray(pixels).save(root / path)
        rows.append(f'{path},{name}{";odd" if i % 2 else ""},{split}')
  (root / 'labels.csv').write_text('\n'.join(rows))
  return root


def make_config(folder, **changes):
  data = ImageDataConfig(source='folder', path=str(folder), image_size=8)
  small = {
    'optimizer.learning_rate': 1e-2,
    'optimizer.warmup_steps': 0,
    'train.num_steps': 12,
    'train.batch_size': 4,
    'evaluation.every': 2,
    'evaluation.batches': 0,
    'evaluation.final_batches': 0,
    'log.every': 10,
  }
  if 'data.label_table' in changes:
    small['model.num_classes'] = 4
  return tiny.experiment(MODEL, data, **small | changes)


def random_output(task, batch):
  rng = np.random.default_rng(0)
  shape = len(batch['image']), task.config.model.num_classes
  logits_BV = jnp.asarray(rng.normal(size=shape), jnp.float32)
  return type('Output', (), {'logits_BV': logits_BV})


def test_the_loss_of_a_batch_is_weighted(folder):
  table = (('dog', 7.0), ('cat', 0.5))
  plain = make_task(make_config(folder)).modality
  weighted = make_task(
    make_config(folder, **{'data.class_weights': table})
  ).modality
  batch = next(plain.train_iterator())
  output = random_output(plain, batch)
  logits_BV = np.asarray(output.logits_BV, np.float64)
  nats_BV = np.log(np.exp(logits_BV).sum(-1, keepdims=True)) - logits_BV
  weight_B = batch['target'] @ [0.5, 7, 1]
  expected = (weight_B * (batch['target'] * nats_BV).sum(-1)).sum()
  total, count = weighted.loss(output, batch)
  np.testing.assert_allclose([total, count], [expected, weight_B.sum()], 1e-5)
  assert plain.loss(output, batch)[1] == 4
  told = weighted.data_summary()
  assert 'they weigh 0.5 (cat) to 7 (dog)' in told
  assert 'drawn equally' not in told


def test_labels_of_a_table(folder):
  task = make_task(make_config(folder, **TABLE))
  modality = task.modality
  assert modality.classes == ('cat', 'dog', 'emu', 'odd')
  batch = next(modality.train_iterator())
  assert batch['target'].sum(axis=-1).max() == 2
  output = random_output(modality, batch)
  probability_BV = 1 / (1 + np.exp(-np.asarray(output.logits_BV, np.float64)))
  nats_BV = -np.log(
    np.where(batch['target'] > 0, probability_BV, 1 - probability_BV)
  )
  total, count = modality.loss(output, batch)
  np.testing.assert_allclose(total, nats_BV.mean(axis=-1).sum(), rtol=1e-5)
  assert count == 4
  label, logits_V = np.array([1, 0, 0, 1]), np.array([1.0, -1, 2, 3])
  said = 'true cat, odd → predicted cat, emu, odd'
  assert modality.caption(label, logits_V) == said


def held_out(run):
  """Returns labels and logits of all held-out pictures."""
  labels, logits = [], []
  for batch in images_lib.eval_batches(run.experiment.data, batch_size=8):
    real_B = batch['weight'] > 0
    labels.append(batch['label'][real_B])
    logits.append(np.asarray(run.apply(batch['image']).logits_BV)[real_B])
  return np.concatenate(labels), np.concatenate(logits)


def test_a_run_on_a_table_of_labels(folder, tmp_path):
  changes = {'checkpoint.best': 'mAP', 'data.class_weights': 'balanced'}
  config = make_config(folder, **TABLE, **changes)
  result = phases.train(config, tmp_path / 'run')
  run = mod_jax.load(tmp_path / 'run')
  label_NV, logits_NV = held_out(run)
  by_name = dict(zip(('cat', 'dog', 'emu', 'odd'), label_NV.T, strict=True))
  for v, (name, label_N) in enumerate(by_name.items()):
    expected = sklearn_metrics.average_precision_score(label_N, logits_NV[:, v])
    assert result.metrics[f'ap/{name}'] == pytest.approx(expected, rel=1e-5)
  assert result.metrics['mAP'] == pytest.approx(
    np.mean([result.metrics[f'ap/{name}'] for name in by_name])
  )
  assert result.metrics['mAP'] > label_NV.mean() + 0.1
  table = make_task(config).summary(result.metrics)
  assert f'{result.metrics["mAP"]:.4f}' in table
  assert json.loads((tmp_path / 'run' / 'best.json').read_text())['value'] == (
    max(
      line['mAP']
      for line in metrics_lib.read(tmp_path / 'run')
      if line['kind'] == 'eval'
    )
  )

  # Each label has a probability of its own.
  picture = folder / 'eval' / 'emu' / '1.png'
  (predicted,) = run.predict(picture, top=4)
  assert predicted.keys() == by_name.keys()
  (logits_V,) = np.asarray(run.apply(run.preprocess([picture])).logits_BV)
  for name, logit in zip(by_name, logits_V, strict=True):
    assert predicted[name] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5)
  for kind in ('safetensors', 'huggingface', 'timm'):
    export.export(run, tmp_path / kind, kind)
    exported = mod_jax.load(tmp_path / kind)
    (found,) = exported.predict(picture, top=4)
    assert found == pytest.approx(predicted, rel=1e-3)


def test_held_out_pictures_without_a_label_are_no_divergence(folder, tmp_path):
  rows = (folder / 'labels.csv').read_text().splitlines()
  rows = [f'{x.split(",")[0]},,eval' if x.endswith('eval') else x for x in rows]
  table = tmp_path / 'labels.csv'
  table.write_text('\n'.join(rows))
  config = make_config(folder, **{'data.label_table': str(table)})
  result = phases.train(config, tmp_path / 'run')
  assert result.finished
  assert np.isnan(result.metrics['mAP'])


def test_a_run_in_parts_is_bit_for_bit_that_without_a_stop(folder, tmp_path):
  """With all that treats classes of unequal size, and an early end."""
  config = make_config(
    folder,
    **{
      'data.class_weights': 'balanced',
      'data.sampling': 'balanced',
      'data.augment': AugmentConfig(crop='pad', flip=0.5, mixup=0.4),
      'train.num_steps': 200,
      'train.grad_accum_steps': 2,
      'train.early_stop': 2,
      'train.ema_decay': 0.9,
      'checkpoint.best': 'mAP',
      'checkpoint.every': 3,
      'checkpoint.keep': 1,
    },
    **TABLE,
  )
  whole = phases.train(config, tmp_path / 'whole')
  assert whole.finished
  assert 4 < whole.step < 200
  for steps in (1, 4):
    phases.train(config, tmp_path / 'parts', max_steps=steps)
  rest = phases.train(config, tmp_path / 'parts')
  assert (rest.finished, rest.step) == (True, whole.step)
  states = [
    tiny.bits((x.state.params, x.state.opt_state, x.state.ema))
    for x in (rest, whole)
  ]
  assert states[0] == states[1]
  assert rest.metrics == whole.metrics
  read = [metrics_lib.read(tmp_path / name) for name in ('parts', 'whole')]
  assert read[0] == read[1]
  best = [(tmp_path / x / 'best.json').read_bytes() for x in ('parts', 'whole')]
  assert best[0] == best[1]
  loaded = [
    mod_jax.load(tmp_path / name, step='best') for name in ('parts', 'whole')
  ]
  assert len({str(tiny.bits(run.variables)) for run in loaded}) == 1
  newest = mod_jax.load(tmp_path / 'whole')
  assert tiny.bits(newest.variables) != tiny.bits(loaded[0].variables)
  numbered = mod_jax.load(tmp_path / 'whole', step=json.loads(best[0])['step'])
  assert tiny.bits(numbered.variables) == tiny.bits(loaded[0].variables)


def test_a_pretrained_model_has_no_steps(tmp_path, folder):
  phases.train(make_config(folder, **{'train.num_steps': 1}), tmp_path / 'run')
  export.export(mod_jax.load(tmp_path / 'run'), tmp_path / 'exported')
  with pytest.raises(UserError, match="step='best'.* no run with checkpoints"):
    mod_jax.load(tmp_path / 'exported', step='best')


def test_a_teacher_of_one_class_is_refused_for_labels(folder):
  pruned = DynamicViTConfig(backbone=MODEL, stages=(0,))
  with pytest.raises(UserError, match=r'logit_distillation=0\.5 and data\.lab'):
    config_lib.replace(make_config(folder), {'model': pruned, **TABLE})


def test_phases_before_the_last_are_not_judged(folder, tmp_path):
  config = make_config(folder, **{'checkpoint.best': 'accuracy'})
  routed = config_lib.replace(
    config,
    {
      'train.early_stop': 3,
      'model': DynamicViTConfig(backbone=MODEL, stages=(0,)),
      'dense': phases.PhaseConfig(num_steps=5, batch_size=4, learning_rate=0.1),
    },
  )
  (_, dense), (_, last) = phases.expand(routed, tmp_path)
  assert (dense.checkpoint.best, dense.train.early_stop) == (None, 0)
  assert (last.checkpoint.best, last.train.early_stop) == ('accuracy', 3)
