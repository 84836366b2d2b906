"""From a run or a file to predictions."""

import dataclasses
import json
import pathlib
import shutil

import chex
import jax
import numpy as np
from PIL import Image
import pytest
import sentencepiece
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax.data import prepare, tokenizers
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.tasks import make_task, phases

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
CLASSES = ('blue', 'red')
SIZE = 16


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Pictures of another shape than the model takes."""
  root = tmp_path_factory.mktemp('pictures')
  return tiny.pictures(root, CLASSES, {'train': 8, 'eval': 3}, (24, 30))


@pytest.fixture(scope='module')
def workdir(folder, tmp_path_factory, on_one_device, no_report):
  model = dataclasses.replace(
    tiny.VIT,
    **{'image_size': SIZE, 'patch_size': 4, 'num_classes': 2},
    routing=VisionRoutingConfig(capacity=0.5),
  )
  data = ImageDataConfig(
    source='folder',
    path=str(folder),
    image_size=SIZE,
    # Nothing is as where nobody says it.
    crop_fraction=0.6,
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
  )
  sizes = {'train.num_steps': 2, 'evaluation.batch_size': 6}
  workdir = tmp_path_factory.mktemp('run')
  with on_one_device():
    phases.train(tiny.experiment(model, data, **sizes), workdir)
  return workdir


@pytest.fixture(scope='module')
def run(workdir):
  return mod_jax.load(workdir)


@pytest.mark.slow
def test_a_picture_is_predicted_as_it_was_evaluated(run, folder):
  task = make_task(run.experiment)
  (batch,) = task.modality.eval_batches(batch_size=6, num_batches=1)
  output = jax.jit(run.model.apply)(run.variables, batch['image'])
  expected_BV = np.asarray(jax.nn.softmax(output.logits_BV))
  files = sorted((folder / 'eval').rglob('*.png'))
  found = run.predict(files)
  assert len(found) == len(expected_BV) == 6
  for classes, probability_V in zip(found, expected_BV, strict=True):
    assert set(classes) == set(CLASSES)
    assert list(classes.values()) == sorted(classes.values(), reverse=True)
    np.testing.assert_allclose(
      [classes[name] for name in CLASSES], probability_V, rtol=1e-5
    )
  # Whatever holds the picture.
  image = Image.open(files[0])
  for form in (str(files[0]), image, np.asarray(image)):
    # Alone, it is computed with other rounding than in a batch.
    assert run.predict(form) == [pytest.approx(found[0], rel=1e-5)]
  assert run.predict([]) == []
  assert [len(p) for p in run.predict(files[:2], top=1)] == [1, 1]


@pytest.mark.slow
def test_it_is_evaluated_as_it_predicts(run, folder, on_one_device, caplog):
  files = sorted((folder / 'eval').rglob('*.png'))
  right = [
    next(iter(classes)) == file.parent.name
    for file, classes in zip(files, run.predict(files), strict=True)
  ]
  with on_one_device():
    metrics = run.evaluate()
    assert metrics['accuracy'] == pytest.approx(np.mean(right))
    # Of pictures anywhere, as if the model came from anywhere.
    data = ImageDataConfig(source='folder', path=str(folder), image_size=8)
    elsewhere = dataclasses.replace(run, task=None, experiment=None)
    assert elsewhere.evaluate(data) == pytest.approx(metrics)
    turned = dataclasses.replace(elsewhere, classes=run.classes[::-1])
    with pytest.raises(UserError, match='class 0 is called .* another order'):
      turned.evaluate(data)
    others = dataclasses.replace(elsewhere, classes=('x', 'y'))
    assert others.evaluate(data) == pytest.approx(metrics)
    assert "in the data, and 'x' by the model" in caplog.text


def test_class_names_outlive_the_pictures(workdir, folder, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  folder.rename(folder.with_name('away'))
  try:
    moved = mod_jax.load(tmp_path / 'run')
    (found,) = moved.predict(np.zeros((9, 9, 3), np.uint8))
  finally:
    folder.with_name('away').rename(folder)
  assert set(found) == set(CLASSES)


class TestOfAFile:
  def directory(self, tmp_path, classes):
    """Makes a folder such as Hugging Face has."""
    shutil.copy(
      GOLDEN / 'vit_huggingface.safetensors', tmp_path / 'model.safetensors'
    )
    told = {'num_attention_heads': 3, 'layer_norm_eps': 1e-12}
    told |= {'hidden_act': 'gelu'}
    told['id2label'] = {str(i): f'kind {i}' for i in classes}
    (tmp_path / 'config.json').write_text(json.dumps(told))
    pictures = {'do_resize': True, 'size': {'height': 32, 'width': 32}}
    pictures |= {'image_mean': [0.4, 0.5, 0.6], 'image_std': [0.1, 0.2, 0.3]}
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(pictures))
    return tmp_path

  def test_sizes_classes_and_preprocessing_are_told(self, tmp_path, caplog):
    with caplog.at_level('WARNING', 'absl'):
      run = mod_jax.load(self.directory(tmp_path, (*range(1, 10), 0)))
    assert not caplog.records
    assert run.experiment is None
    assert run.classes == tuple(f'kind {i}' for i in range(10))
    with np.load(GOLDEN / 'vit_expected.npz') as expected:
      image_BHWC, logits_BV = expected['image'], expected['huggingface/logits']
    np.testing.assert_allclose(
      run.apply(image_BHWC).logits_BV, logits_BV, atol=2e-5
    )
    grey = np.full((50, 40, 3), 51, np.uint8)
    np.testing.assert_allclose(
      run.preprocess([grey])[0, 0, 0], [-2, -1.5, -4 / 3], rtol=1e-6
    )
    assert run.preprocess.resize == 'squash'
    assert run.preprocess.resample == Image.Resampling.BILINEAR
    (classes,) = run.predict(grey, top=3)
    assert len(classes) == 3
    assert set(classes) <= set(run.classes)

  def test_names_of_other_classes_are_not_taken(self, tmp_path):
    run = mod_jax.load(self.directory(tmp_path, range(9)))
    assert run.classes is None
    assert run.preprocess.crop_fraction == 1  # It resizes the whole picture.

  def test_a_single_logit_may_be_false(self, tmp_path):
    run = mod_jax.load(self.directory(tmp_path, [0]), num_classes=1)
    grey = np.full((50, 40, 3), 51, np.uint8)
    assert run.predict(grey) == [{'kind 0': 0.5}]  # Of a new head.


class TestExport:
  def test_in_our_own_format_nothing_is_lost(self, run, folder, tmp_path):
    mod_jax.export(run, tmp_path / 'out')
    again = mod_jax.load(tmp_path / 'out')
    assert (again.config, again.classes) == (run.config, run.classes)
    # Where its pictures were is nobody's business elsewhere.
    here = {'data.path': folder.name}
    assert again.experiment == config_lib.replace(run.experiment, here)
    assert str(folder.parent) not in (tmp_path / 'out/mod_jax.json').read_text()
    assert again.preprocess == run.preprocess
    chex.assert_trees_all_equal(again.variables, run.variables)
    files = sorted(folder.rglob('*.png'))
    assert again.predict(files) == run.predict(files)

  @pytest.mark.parametrize('format', ['huggingface', 'timm'])
  def test_the_dense_model_for_others(self, run, folder, tmp_path, format):
    rounding = 'down' if format == 'huggingface' else 'even'
    reads = dataclasses.replace(run.preprocess, rounding=rounding)
    run = dataclasses.replace(run, preprocess=reads)
    # What does not lie beside a model's weights belongs to somebody else.
    (tmp_path / 'apart').mkdir()
    (tmp_path / 'apart' / 'vocab.json').write_text('{}')
    mod_jax.export(run, tmp_path / 'apart', format, dense=True)
    assert (tmp_path / 'apart' / 'vocab.json').exists()
    shutil.rmtree(tmp_path / 'apart')
    # Nothing of an earlier model is left, whose pictures were read otherwise.
    reads = dataclasses.replace(run.preprocess, mean=(0.7, 0.7, 0.7))
    earlier = dataclasses.replace(run, preprocess=reads)
    for other in ('huggingface', 'safetensors'):
      mod_jax.export(earlier, tmp_path, other, dense=other == 'huggingface')
    whole = tmp_path / 'model.safetensors'
    for name in ('model-00001-of-00002.safetensors', 'routers.safetensors'):
      shutil.copy(whole, tmp_path / name)
    for name in ('model.safetensors.index.json', 'tokenizer.json', 'notes.md'):
      (tmp_path / name).write_text('{}')
    mod_jax.export(run, tmp_path, format, dense=True)
    left = {path.name for path in tmp_path.iterdir()}
    own = {'preprocessor_config.json'} if format == 'huggingface' else set()
    assert left == {'config.json', 'model.safetensors', 'notes.md'} | own
    again = mod_jax.load(tmp_path)
    assert again.config == run.config.dense_twin()
    assert again.classes == run.classes
    images_BHWC = run.preprocess(folder.rglob('*.png'))
    np.testing.assert_array_equal(
      again.preprocess(folder.rglob('*.png')), images_BHWC
    )
    params = dict(again.variables['params'])
    tiny.same(params, dict(run.variables['params']))
    dense = run.config.dense_twin().build()
    np.testing.assert_array_equal(
      again.apply(images_BHWC).logits_BV,
      jax.jit(dense.apply)({'params': params}, images_BHWC).logits_BV,
    )

  @pytest.mark.parametrize('format', ['safetensors', 'huggingface', 'timm'])
  @pytest.mark.parametrize('resize', ['shorter_side', 'squash', 'none'])
  def test_pictures_are_read_there_as_here(self, run, tmp_path, format, resize):
    dense = run.config.dense_twin()
    fraction = 1.0 if resize == 'none' else SIZE / 19
    preprocess = dataclasses.replace(
      run.preprocess,
      **{'resize': resize, 'crop_fraction': fraction},
      rounding='down' if format == 'huggingface' else 'even',
      resample=Image.Resampling.LANCZOS,
    )
    odd = dataclasses.replace(
      run, config=dense, experiment=None, task=None, preprocess=preprocess
    )
    odd = dataclasses.replace(odd, multi_label=True)
    if (format, resize) == ('timm', 'none'):
      with pytest.raises(UserError, match='leaves the size of pictures'):
        mod_jax.export(odd, tmp_path, format)
      return
    mod_jax.export(odd, tmp_path, format)
    again = mod_jax.load(tmp_path)
    assert again.preprocess == preprocess
    assert again.multi_label == odd.multi_label
    if format == 'huggingface':
      text = (tmp_path / 'preprocessor_config.json').read_text()
      # Of these, transformers 4 resizes the shorter side only by CLIP's.
      assert ('shortest_edge' in text) == ('CLIPImageProcessor' in text)

  @pytest.mark.parametrize(
    ('name', 'value', 'field'),
    [
      ('image_std', [0.0, 1.0, 1.0], 'std'),
      # 10 TB of pixels, of which 16 x 16 would be kept.
      ('size', {'shortest_edge': 2 * 10**6}, 'crop_fraction'),
    ],
  )
  def test_preprocessing_out_of_range(self, run, tmp_path, name, value, field):
    mod_jax.export(run, tmp_path, 'huggingface', dense=True)
    path = tmp_path / 'preprocessor_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UserError, match=f'beside .*{field}.*expected'):
      mod_jax.load(tmp_path)


def test_classes_of_one_name_are_told_apart(run, folder):
  count = run.config.dense_twin().num_classes
  named = dataclasses.replace(run, classes=('crane',) * count)
  (picture, *_) = sorted(folder.rglob('*.png'))
  (found,), (want,) = (r.predict([picture], top=count) for r in (named, run))
  assert len(found) == count
  assert list(found.values()) == list(want.values())
  assert {f'crane ({i})' for i in range(count)} == set(found)


@pytest.mark.slow
@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe', 'prepared'])
def test_a_language_model_goes_elsewhere(tmp_path, tokenizer):
  texts = tmp_path / 'texts'
  texts.mkdir()
  tiny.texts(texts, a=400, b=400, c=400, d=400)
  routing = MoDConfig(capacity=0.5, threshold_decay=0.9)
  model = dataclasses.replace(tiny.LM, vocab_size=270, routing=routing)
  data = TextDataConfig(
    source='files',
    files=f'{texts}/*.txt',
    length=16,
    tokenizer='bytes' if tokenizer == 'bytes' else 'bpe',
    tokenizer_vocab_size=262,
    cache_dir=str(tmp_path / 'cache'),
  )
  if tokenizer == 'prepared':
    corpus = str(tmp_path / 'texts' / 'corpus')
    prepare.prepare(data, corpus)
    data = TextDataConfig(source='prepared', path=corpus, length=16)
  run = tiny.run(tiny.experiment(model, data))
  mod_jax.export(run, tmp_path / 'out')
  expected = run.predict(['def main', 'x'], max_new_tokens=5)
  key = jax.random.key(0)
  drawn, _ = run.predict(
    ['def main', 'x'], max_new_tokens=5, temperature=9.0, min_p=1.0, key=key
  )
  assert drawn.text == expected[0].text
  shutil.rmtree(texts)
  shutil.rmtree(tmp_path / 'cache', ignore_errors=True)
  again = mod_jax.load(tmp_path / 'out')
  found = again.predict(['def main', 'x'], max_new_tokens=5)
  # And from there to the next place.
  mod_jax.export(again, tmp_path / 'next')
  shutil.rmtree(tmp_path / 'out')
  next_one = mod_jax.load(tmp_path / 'next')
  assert next_one.predict('x', max_new_tokens=5)[0].text == found[1].text
  assert next_one.tokenizer.eos_id == run.tokenizer.eos_id
  with pytest.raises(UserError, match='17 tokens is longer than the texts of'):
    run.predict('+' * 17)
  (longer,) = run.predict('+' * 17, max_new_tokens=1, max_length=18)
  assert len(longer.log_probs) == 1
  (short,) = run.predict('x', max_length=4)
  assert len(short.tokens) == 3
  assert run.tokenizer.decode(longer.tokens.tolist()) == longer.text
  assert len(repr(run)) < 80  # No weights.
  for a, b in zip(expected, found, strict=True):
    assert a.text == b.text
    assert len(b.log_probs) == 5
    assert (b.log_probs < 0).all()
    np.testing.assert_array_equal(a.log_probs, b.log_probs)


def test_a_model_of_sentence_pieces_reads_its_own_export(tmp_path):
  run = mod_jax.load(GOLDEN / 'lm_eval' / 'model')
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['a b c d e'] * 9),
    **{'model_prefix': str(tmp_path / 'tokenizer'), 'vocab_size': 9},
  )
  run.task.modality.use_tokenizer('sentencepiece', str(tmp_path))
  run = dataclasses.replace(run, origin=None, foreign=False)
  mod_jax.export(run, tmp_path / 'out', 'huggingface')
  again = mod_jax.load(tmp_path / 'out')
  assert again.encode('b c') == run.encode('b c')
  asked = {'inputs': 'b c', 'max_new_tokens': 2}
  assert again.predict(**asked)[0].text == run.predict(**asked)[0].text


def test_settings_of_generation_in_the_config_stay_in_force(tmp_path):
  source = shutil.copytree(GOLDEN / 'lm_eval' / 'model', tmp_path / 'source')
  file = source / 'config.json'
  told = json.loads(file.read_text()) | {'repetition_penalty': 1.2}
  file.write_text(json.dumps(told))
  mod_jax.export(mod_jax.load(source), tmp_path / 'out', 'huggingface')
  assert tokenizers.generation_settings(tmp_path / 'out') == told


def test_somebody_elses_language_model_stays_what_it_was(tmp_path):
  source = tmp_path / 'source'
  shutil.copytree(GOLDEN / 'lm_eval' / 'model', source)
  (source / 'generation_config.json').write_text('{"max_length": 9}')
  (source / 'tokenizer_config.json').write_text('{"pad_token": "<s>"}')
  run = mod_jax.load(source)
  mod_jax.export(run, tmp_path / 'ours')
  file = tmp_path / 'ours' / 'mod_jax.json'
  assert str(tmp_path) not in file.read_text()
  # Where a file says that a model is from, nothing is taken from.
  forged = json.loads(file.read_text()) | {'origin': str(source)}
  forged['experiment']['init'] = str(source)
  file.write_text(json.dumps(forged))
  again = mod_jax.load(tmp_path / 'ours')
  for model, kept in ((run, True), (again, False)):
    out = tmp_path / f'out_{kept}'
    mod_jax.export(model, out, 'huggingface')
    assert (out / 'generation_config.json').exists() == kept
    # Read by another class, the tokenizer would split texts otherwise.
    assert json.loads((out / 'tokenizer_config.json').read_text()) == {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      **{'bos_token': '<s>', 'eos_token': '</s>', 'pad_token': '<s>'},
    }
  # It begins texts as its own, and has no data of ours.
  assert again.encode('how') == run.encode('how')
  assert run.encode('how') != run.tokenizer.encode('how')
