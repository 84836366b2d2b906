"""Adapters of PEFT in, and out again."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
import tiny
import tokenizers

import mod_jax
from mod_jax.errors import UserError

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
HERE = GOLDEN / 'peft'
EXPECTED, REREAD = np.load(HERE / 'expected.npz'), np.load(HERE / 'reread.npz')
BASES = {
  'llama': GOLDEN / 'lm' / 'llama',
  'qwen2': GOLDEN / 'lm' / 'qwen2',
  'vit': HERE / 'vit_base',
}


def load(name, folder=None):
  return mod_jax.load(folder or HERE / name, base=str(BASES[name]))


def logits(run):
  if run.preprocess is None:
    return np.asarray(run.apply(EXPECTED['tokens']).logits_BLV)
  return np.asarray(run.apply(EXPECTED['image']).logits_BV)


@pytest.mark.parametrize('name', BASES)
def test_logits_are_those_of_peft(name):
  run = load(name)
  np.testing.assert_allclose(logits(run), EXPECTED[name], atol=1e-4)
  assert np.abs(logits(mod_jax.load(BASES[name])) - EXPECTED[name]).max() > 1


@pytest.mark.parametrize('name', BASES)
def test_what_is_written_is_read_by_peft(name, tmp_path):
  """As its arrays are those that PEFT read when `reread.npz` was made."""
  mod_jax.export(load(name), tmp_path / 'out', 'peft')
  files = [
    safetensors.numpy.load_file(folder / 'adapter_model.safetensors')
    for folder in (HERE / name, tmp_path / 'out')
  ]
  tiny.same(*files)
  fields = json.loads((tmp_path / 'out' / 'adapter_config.json').read_text())
  assert fields['base_model_name_or_path'] == str(BASES[name])
  np.testing.assert_allclose(REREAD[name], EXPECTED[name], atol=1e-4)
  # What was written names its base.
  again = mod_jax.load(tmp_path / 'out')
  np.testing.assert_allclose(logits(again), EXPECTED[name], atol=1e-4)


@pytest.mark.parametrize('name', BASES)
@pytest.mark.parametrize('format', ['safetensors', 'huggingface'])
def test_a_merged_export_equals_the_adapted_model(name, format, tmp_path):
  base = tmp_path / 'base'
  shutil.copytree(BASES[name], base)
  # Language models are exported with their tokenizers.
  words = {f'word{i}': i for i in range(37)}
  model = tokenizers.models.WordLevel(words, unk_token='word0')
  tokenizers.Tokenizer(model).save(str(base / 'tokenizer.json'))
  run = mod_jax.load(HERE / name, base=str(base))
  with pytest.raises(UserError, match='would replace: name another folder'):
    mod_jax.export(run, base, format)
  mod_jax.export(run, tmp_path / 'out', format)
  merged = mod_jax.load(tmp_path / 'out')
  assert merged.config.lora is None
  np.testing.assert_allclose(logits(merged), EXPECTED[name], atol=1e-4)


def changed(tmp_path, **fields):
  folder = tmp_path / 'changed'
  shutil.copytree(HERE / 'llama', folder)
  path = folder / 'adapter_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  return folder


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('use_dora', True, 'use_dora=True changes'),
    ('peft_type', 'IA3', "peft_type='IA3'.*expected 'LORA'"),
    ('init_lora_weights', 'pissa', "'pissa' changes what the adapters"),
    ('r', 4, r'wrong shape'),
  ],
)
def test_what_is_not_supported_is_refused(field, value, message, tmp_path):
  with pytest.raises(UserError, match=message):
    load('llama', changed(tmp_path, **{field: value}))


def test_adapters_of_the_head_are_refused_by_their_names(tmp_path):
  file = changed(tmp_path) / 'adapter_model.safetensors'
  arrays = safetensors.numpy.load_file(file)
  for name in 'AB':
    arrays[f'base_model.model.lm_head.lora_{name}.weight'] = np.zeros((2, 2))
  safetensors.numpy.save_file(arrays, file)
  with pytest.raises(UserError, match=r'unexpected: lm_head\.lora_'):
    load('llama', file.parent)


def test_the_base_must_be_there_and_fit(tmp_path):
  with pytest.raises(UserError, match='None is no folder here.*base='):
    mod_jax.load(HERE / 'llama')
  with pytest.raises(UserError, match='no adapter of this model'):
    mod_jax.load(HERE / 'llama', base=str(HERE / 'vit_base'))
  with pytest.raises(UserError, match='wrong shape'):
    mod_jax.load(HERE / 'qwen2', base=str(BASES['llama']))
  with pytest.raises(UserError, match='holds all of its weights itself'):
    mod_jax.load(BASES['llama'], base=str(BASES['llama']))
  with pytest.raises(UserError, match='this model has none'):
    mod_jax.export(mod_jax.load(BASES['llama']), tmp_path, 'peft')
