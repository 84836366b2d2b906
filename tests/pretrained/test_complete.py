"""Configs that are completed by the files that they name."""

import contextlib
import dataclasses
import json
import pathlib
import shutil

from flax import linen as nn
import jax
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import cli, trees
from mod_jax import config as config_lib
from mod_jax.convert import files
from mod_jax.data import prepare, text
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.sweeps import grid
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / 'tests' / 'golden'
FOLDER = config_lib.load(ROOT / 'configs' / 'vit' / 'folder.py')
FILES = config_lib.load(ROOT / 'configs' / 'lm' / 'files.py')
CONVERT = config_lib.load(ROOT / 'configs' / 'lm' / 'convert.py')


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
  root = tmp_path_factory.mktemp('photos')
  return tiny.pictures(root, ('cat', 'cow', 'dog'), {'.': 8}, (20, 30))


@pytest.fixture(scope='module')
def hugging_face(tmp_path_factory):
  """Returns a function: a folder as `transformers` leaves it, by its file."""

  def make(name):
    folder = tmp_path_factory.mktemp(name)
    shutil.copy(GOLDEN / f'{name}.safetensors', folder / 'model.safetensors')
    fields = {'num_attention_heads': 2, 'layer_norm_eps': 1e-5}
    (folder / 'config.json').write_text(json.dumps(fields))
    fields = {
      'size': {'height': 32, 'width': 32},
      'image_mean': [0.1, 0.2, 0.3],
      'image_std': [0.4, 0.5, 0.6],
    }
    (folder / 'preprocessor_config.json').write_text(json.dumps(fields))
    return folder

  return make


def build(variant, photos, **changes):
  """Returns a config as `train.py` makes it of the command line."""
  config = config_lib.replace(
    FOLDER.get_config(variant), {'data.path': str(photos), **changes}
  )
  return FOLDER.complete(config)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['vit_huggingface', 'vit_huggingface_distilled']
)
def test_a_folder_of_hugging_face_needs_no_sizes(name, hugging_face, photos):
  folder = hugging_face(name)
  config = build('amod', photos, init=str(folder))
  model, data = config.model, config.data
  # The config says other sizes; the file knows better.
  assert (model.width, model.num_layers, model.num_heads) == (18, 2, 2)
  assert (model.image_size, data.image_size) == (32, 32)
  assert model.norm_epsilon == 1e-5
  assert model.num_classes == 3
  assert model.routing.capacity == 0.5
  assert (data.mean, data.crop_fraction) == ((0.1, 0.2, 0.3), 1.0)
  assert (data.resize, data.resample) == ('squash', 'bilinear')
  assert data.preprocess == mod_jax.load(folder).preprocess
  assert config.dense is None
  task = make_task(config)
  fresh = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
  params, _ = task.start(fresh['params'], {}, config.init)
  read = trees.flatten(mod_jax.load(folder).variables['params'])
  for path, array in trees.flatten(params).items():
    if not path.startswith('head'):
      np.testing.assert_array_equal(array, read[path])
  assert params['head']['kernel'].shape == (18, 3)


def test_twenty_epochs_with_any_batch_size(photos):
  config = build('amod', photos, **{'train.batch_size': 1})
  assert config.train.batch_size == config.dense.batch_size == 1
  assert config.train.num_steps == 20 * 21  # Of 24 pictures, 3 are held out.
  assert config.dense.num_steps == 3 * config.train.num_steps


def test_fields_of_a_sweep_s_points_follow_from_their_values(photos):
  def of_file(changes):
    file = f'{ROOT}/configs/vit/folder.py:dense'
    changes = {'data.path': str(photos), **changes}
    return cli.load_config(file, ExperimentConfig, changes=changes)

  axes = {'train.batch_size': (1, 2)}
  points = dict(grid.points(of_file({}), axes, of_file))
  assert {k: x.train.num_steps for k, x in points.items()} == {
    'train.batch_size=1': 3 * 20 * 21,  # Thrice as many from scratch.
    'train.batch_size=2': 3 * 20 * 21 // 2,
  }


def test_dense_first_where_it_is_needed(hugging_face, photos):
  init = str(hugging_face('vit_huggingface'))
  needed = {
    variant: [
      build(variant, photos, init=start).dense is not None
      for start in (None, init)
    ]
    for variant in ('dense', 'amod', 'mod', 'dynamic', 'acm')
  }
  assert needed == {
    'dense': [False, False],
    'amod': [True, False],
    'mod': [True, False],
    # Their teacher knows these classes.
    'dynamic': [True, True],
    'acm': [True, True],
  }


@pytest.mark.parametrize(
  ('name', 'what'),
  [
    ('lm/llama', 'a language model'),
    ('detr', 'a detector'),
    ('vlm/llava', 'a model that sees and reads'),
    ('wav2vec2/layer', 'a model of speech'),
  ],
)
def test_weights_of_another_kind_are_refused_by_it(name, what, photos):
  with pytest.raises(UserError, match=f'is {what}: give a vision transformer'):
    build('amod', photos, init=str(GOLDEN / name))
  config = dataclasses.replace(FILES.get_config(), init=str(GOLDEN / name))
  if what != 'a language model':
    with pytest.raises(UserError, match=f'is {what}: give a language model'):
      FILES.complete(config)


@pytest.mark.slow
def test_the_dense_run_comes_first_and_is_learnt_from(
  hugging_face, photos, tmp_path, on_one_device, no_report
):
  config = build('dynamic', photos, init=str(hugging_face('vit_huggingface')))
  assert config.model.stages == (1,)
  small = dict.fromkeys(('train.num_steps', 'dense.num_steps'), 2)
  small |= dict.fromkeys(('train.batch_size', 'dense.batch_size'), 8)
  small |= {'dense.warmup_steps': 0, 'optimizer.warmup_steps': 0}
  small |= {'optimizer.rules': (), 'evaluation.every': 0}
  small |= {'log.tensorboard': False}
  with on_one_device():
    config = config_lib.replace(config, small)
    result = phases.train(config, tmp_path)
    assert (result.finished, result.step) == (True, 2)
    # It is finished, and the same command ends at once.
    assert phases.complete(config, tmp_path).metrics == result.metrics
  dense = mod_jax.load(tmp_path / 'phase_dense')
  assert dense.config == config.model.dense_twin()
  assert dense.classes == ('cat', 'cow', 'dog')
  task = mod_jax.load(tmp_path).task
  teacher = task.teacher(None)['params']
  tiny.same(dict(teacher), dict(dense.variables['params']))
  # From there, no dense model is trained again.
  again = build('amod', photos, init=str(tmp_path / 'phase_dense'))
  assert again.dense is None
  assert build('acm', photos, init=str(tmp_path / 'phase_dense')).dense is None


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  root = tmp_path_factory.mktemp('texts')
  return tiny.texts(root, **{f't{i}': 1500 for i in range(30)})


def complete_files(variant, texts, **changes):
  changes = {
    'data.files': f'{texts}/*.txt',
    'data.cache_dir': str(texts / 'cache'),
    'data.tokenizer_vocab_size': 262,
    **changes,
  }
  return FILES.complete(config_lib.replace(FILES.get_config(variant), changes))


def test_a_tokenizers_vocabulary_is_read(texts):
  learned = complete_files('', texts)
  assert learned.model.vocab_size == 262
  # As often as is allowed, and no more.
  tokens = learned.train.num_steps * 16 * 256
  assert 1 <= learned.train.num_steps < FILES.STEPS
  assert tokens <= 30 * 1500 * 5
  data = dataclasses.replace(learned.data, tokenizer_vocab_size=270)
  path = text.learn_tokenizer(data)
  given = complete_files(
    '',
    texts,
    **{'data.tokenizer': 'huggingface', 'data.tokenizer_path': str(path)},
  )
  assert given.model.vocab_size == 270
  assert complete_files('', texts, **{'data.tokenizer': 'bytes'}).model == (
    dataclasses.replace(given.model, vocab_size=256)
  )


def test_all_phases_take_the_batch_size_that_is_given(texts):
  config = complete_files('acm', texts, **{'train.batch_size': 8})
  phases_of = (config.dense, *config.objective.phases.values())
  assert [phase.batch_size for phase in phases_of] == [8] * 4


def test_an_adaptive_model_may_have_the_default_objective(texts, photos):
  adaptive = {'model.adaptive': AdaptiveConfig()}
  for config in (
    complete_files('dense', texts, **adaptive),
    build('dense', photos, **adaptive),
  ):
    sizes = {phase.batch_size for phase in config.objective.phases.values()}
    assert sizes == {config.train.batch_size}


def test_sizes_and_tokenizer_are_those_of_the_run(texts, tmp_path):
  config = complete_files(
    'dense', texts, **{'model.width': 12, 'model.num_heads': 2}
  )
  run = tiny.run(config)
  mod_jax.export(run, tmp_path)
  routed = complete_files('mod', texts, init=str(tmp_path))
  assert routed.model == dataclasses.replace(
    config.model, routing=FILES.mod.ROUTING
  )
  for own in ({'early_exit': 1, 'early_loss': 0.1}, {'scan_layers': True}):
    asked = {f'model.{name}': value for name, value in own.items()}
    assert complete_files('mod', texts, init=str(tmp_path), **asked).model == (
      dataclasses.replace(routed.model, **own)
    )
  control = config_lib.replace(
    CONVERT.get_config('gaussian'),
    {
      'init': str(tmp_path),
      'data': routed.data,
      'model.routing': None,
      'train.capacity_warmup_steps': 0,
    },
  )
  assert CONVERT.complete(control).model == config.model
  kept = make_task(routed).modality.tokenizer.fingerprint
  assert kept == run.tokenizer.fingerprint
  assert complete_files('acm', texts, init=str(tmp_path)).dense is None
  assert complete_files('acm', texts).dense is not None

  # A corpus of bytes has ids that the model has, too, but of other texts.
  own = {'tokenizer': 'huggingface', 'tokenizer_path': str(tmp_path)}
  for tokenizer, fits in ((own, True), ({}, False)):
    corpus = str(tmp_path / f'corpus_{fits}')
    data = TextDataConfig(source='files', files=f'{texts}/t1*.txt', **tokenizer)
    prepare.prepare(data, corpus)
    changes = {'data.source': 'prepared', 'data.path': corpus, 'data.files': ''}
    expected = pytest.raises(UserError, match='with another tokenizer than')
    with contextlib.nullcontext() if fits else expected:
      complete_files('mod', texts, init=str(tmp_path), **changes)


@pytest.mark.slow
def test_a_language_model_of_hugging_face_needs_no_sizes(texts, tmp_path):
  small = {'model.width': 12, 'model.num_heads': 2, 'model.num_layers': 2}
  config = complete_files('dense', texts, **small)
  run = tiny.run(config)
  first, second = tmp_path / 'first', tmp_path / 'second'
  mod_jax.export(run, first, 'huggingface')
  loaded = mod_jax.load(first)
  assert loaded.tokenizer.fingerprint == run.tokenizer.fingerprint
  before = dict(run.variables['params'])
  tiny.same(dict(loaded.variables['params']), before)
  # Made routed, and out again: the dense part, the tokenizer, the routers.
  routed = mod_jax.route(loaded, 'mod', capacity=0.5, shared_router=True)
  mod_jax.export(routed, second, 'huggingface', dense=True)
  for name in ('model.safetensors', 'tokenizer.json', 'config.json'):
    assert (second / name).read_bytes() == (first / name).read_bytes()
  (router,) = files.read(second / 'routers.safetensors').values()
  assert router.shape == (12,)
  # Trained on from there.
  config = complete_files('mod', texts, init=str(first))
  assert config.model.width == 12
  fresh = tiny.random_params(config.model)
  params, _ = make_task(config).start(fresh, {}, config.init)
  np.testing.assert_array_equal(params['embedding'], before['embedding'])
