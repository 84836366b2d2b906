"""train.py and eval.py with vision models: what they print and refuse."""

import csv
import dataclasses
import json
import re
import shutil

from command_line import ROOT, assert_refused, overrides, run
from PIL import Image
import pytest
import tiny

import mod_jax
from mod_jax.data.images import ImageDataConfig
from mod_jax.pretrained.load import Run
from mod_jax.studies import images as image_studies

DIGITS = f'--config={ROOT}/configs/vit/digits.py'
# On top of `tiny`: what a test can afford.
SIZES = {'num_layers': 2, 'width': 8}
SMALL = {
  'train.num_steps': 3,
  'checkpoint.every': 0,
  'optimizer.warmup_steps': 0,
  'evaluation.every': 0,
  'evaluation.final_batches': 1,
  'log.tensorboard': False,
}


def small(prefix='model'):
  return SMALL | {f'{prefix}.{name}': value for name, value in SIZES.items()}


@pytest.fixture(scope='module')
def train(on_one_device, tmp_path_factory):
  """A function (variant, changes) that runs train.py, and where it did."""

  def train(variant, changes):
    workdir = tmp_path_factory.mktemp('runs') / 'run'
    arguments = f'--workdir={workdir}', *overrides(changes)
    with on_one_device():
      ended = run('train.py', f'{DIGITS}:{variant}', *arguments)
    assert ended.status == 0, ended.err
    return workdir

  return train


@pytest.fixture(scope='module')
def dense(train):
  return train('tiny', small())


@pytest.fixture(scope='module')
def pruned(train, dense):
  """A DynamicViT beside that run."""
  changes = small('model.backbone') | {
    'init': dense,
    'model.stages': '(1,)',
    'objective.token_distillation': 0.5,
    'objective.logit_distillation': 0.5,
  }
  return train('dynamic_tiny', changes)


@pytest.mark.slow
def test_eval_and_study(pruned, monkeypatch):
  monkeypatch.setattr(image_studies, '_BATCHES', (1,))
  monkeypatch.setattr(image_studies, '_ROUNDS', 2)
  ended = run(
    # On all eight devices, over which its few images do not divide.
    *('eval.py', f'--workdir={pruned}', '--batches=1', '--study=throughput'),
  )
  assert ended.status == 0, ended.err
  assert 'keep_probability.png' in ended.out
  assert 'throughput, at step 3' in ended.out
  told = json.loads((pruned / 'study_throughput.json').read_text())
  assert told['batches']['1']['ratio'] > 0
  ended = run('eval.py', f'--workdir={pruned}', '--study=list')
  assert ended.out == '--study=confusion\n--study=throughput\n'
  ended = run('eval.py', f'--workdir={pruned}', '--sample=def')
  assert_refused(ended, 'this run is no language model')


@pytest.mark.slow
def test_predict(pruned, tmp_path):
  """On all eight devices, over which one picture does not divide."""
  for name in 'ab':
    Image.new('RGB', (9, 12), 'grey').save(tmp_path / f'{name}.png')
  predict = ('eval.py', f'--workdir={pruned}', '--noevaluate')
  ended = run(*predict, f'--predict={tmp_path}/*.png')
  assert (ended.status, ended.err) == (0, '')
  lines = ended.out.splitlines()
  assert [line.split()[0] for line in lines] == [
    f'{tmp_path}/{name}.png' for name in 'ab'
  ]
  classes = re.findall(r'(\d) \d+\.\d%', lines[0])
  assert len(classes) == 5
  assert set(classes) < set('0123456789')
  ended = run(*predict, f'--predict={tmp_path}/c.png')
  assert_refused(ended, 'c.png: no such file')
  ended = run(*predict, f'--predict={tmp_path}')
  assert_refused(ended, "such as 'photos/")
  named = tmp_path / 'sub' / 'a[1].png'
  named.parent.mkdir()
  shutil.copy(tmp_path / 'a.png', named)
  both = f'--predict={tmp_path}/{{a,b}}.png,{named}'
  *again, line = run(*predict, both, '--step=3').out.splitlines()
  assert [x.split() for x in again] == [x.split() for x in lines]
  assert line.split()[1:] == lines[0].split()[1:]
  # One that cannot be read keeps nobody from the answers to the others.
  whole = (tmp_path / 'b.png').read_bytes()
  (tmp_path / 'b.png').write_bytes(whole[: len(whole) // 2])
  predict += (f'--predict={tmp_path}/*.png',)
  for name in ('out.csv', 'out.json'):
    ended = run(*predict, f'--predictions={tmp_path}/{name}')
    assert ended.status == 2
    assert re.search(r'1 of the files cannot be read \(.*b\.png', ended.err)
    good, bad = ended.out.splitlines()
    assert good == lines[0]
    assert re.search(r'b\.png  image .* cannot be decoded \(', bad)
  good, bad = json.loads((tmp_path / 'out.json').read_text())
  assert good['file'] == f'{tmp_path}/a.png'
  assert bad == {'file': f'{tmp_path}/b.png', 'error': bad['error']}
  with open(tmp_path / 'out.csv', newline='') as file:
    table = list(csv.DictReader(file))
  assert [row['file'] for row in table] == [good['file'], bad['file']]
  assert table[1]['error'] == bad['error']
  first = table[0]['class_1'], float(table[0]['probability_1'])
  assert first == next(iter(good['probabilities'].items()))
  ended = run(*predict, '--predictions=out.txt')
  assert_refused(ended, 'expected a .csv or .json file')


@pytest.mark.slow
def test_predict_tells_every_label(tmp_path):
  """Where any number may be true, and not only the five likeliest."""
  model = dataclasses.replace(tiny.VIT, num_classes=7)
  labelled = Run(
    config=model,
    variables=tiny.variables(model),
    preprocess=ImageDataConfig(image_size=8).preprocess,
    classes=tuple('abcdefg'),
    multi_label=True,
  )
  mod_jax.export(labelled, tmp_path / 'out')
  Image.new('RGB', (9, 12), 'grey').save(tmp_path / 'a.png')
  predict = ('eval.py', f'--workdir={tmp_path}/out', '--noevaluate')
  ended = run(*predict, f'--predict={tmp_path}/a.png')
  assert ended.status == 0, ended.err
  assert sorted(re.findall(r'(\w) \d+\.\d%', ended.out)) == [*'abcdefg']


@pytest.mark.slow
def test_export(dense, pruned, tmp_path):
  Image.new('RGB', (9, 12), 'grey').save(tmp_path / 'a.png')
  export = ('eval.py', f'--workdir={dense}', '--noevaluate')
  out = tmp_path / 'out'
  ended = run(
    *(*export, '--step=3', f'--predict={tmp_path}/a.png', f'--export={out}'),
    '--export_format=huggingface',
  )
  assert (ended.status, ended.err) == (0, '')
  *predicted, told = ended.out.splitlines()
  assert told == f'exported: {out}'
  assert json.loads((out / 'config.json').read_text())['model_type'] == 'vit'
  (classes,) = mod_jax.load(out).predict([tmp_path / 'a.png'])
  shown = ', '.join(f'{name} {p:.1%}' for name, p in classes.items())
  assert predicted == [f'{tmp_path}/a.png  {shown}']
  # Of what the format cannot say, the dense model is left if that is asked for.
  export = ('eval.py', f'--workdir={pruned}', '--noevaluate')
  export += (f'--export={tmp_path}/pruned', '--export_format=timm')
  ended = run(*export)
  assert_refused(
    ended, 'timm cannot run the dropping of patches. .*--export_dense'
  )
  assert not (tmp_path / 'pruned').exists()
  assert run(*export, '--export_dense').status == 0
  assert (tmp_path / 'pruned' / 'model.safetensors').is_file()
