"""Language models of Hugging Face in, and out again."""

import contextlib
import dataclasses
import json
import pathlib
import shutil

from flax import linen as nn
import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tiny

from mod_jax import trees
from mod_jax.convert import files
from mod_jax.convert import lm as convert_lm
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'lm'
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
EXPECTED = np.load(GOLDEN / 'expected.npz')


def logits(config, params):
  variables = {'params': params}
  return tiny.apply(config, variables, EXPECTED['tokens']).logits_BLV


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_pytorch(name):
  config = convert_lm.derive(GOLDEN / name)
  params = tiny.arrays(convert_lm.read(GOLDEN / name, config))
  np.testing.assert_allclose(logits(config, params), EXPECTED[name], atol=1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_back_again_every_byte_is_the_same(name, tmp_path, monkeypatch):
  source = GOLDEN / name
  config = convert_lm.derive(source)
  params = tiny.arrays(convert_lm.read(source, config))
  monkeypatch.setattr(files, 'SHARD', 3000)
  convert_lm.save(tmp_path, params, config, like=source)
  assert tiny.stored(tmp_path) == tiny.stored(source)
  again, there = (
    json.loads((folder / 'config.json').read_text())
    for folder in (tmp_path, source)
  )
  assert again == there
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  assert set(index['weight_map']) == set(tiny.stored(source))
  assert len(set(index['weight_map'].values())) > 1
  # In one file, over those.
  monkeypatch.undo()
  zeros = jax.tree.map(np.zeros_like, params)
  convert_lm.save(tmp_path, zeros, config, like=source)
  for array in jax.tree.leaves(tiny.arrays(convert_lm.read(tmp_path, config))):
    assert not np.asarray(array).any()
  # Without the model that it comes from, as an architecture of our choice.
  own = tmp_path / 'own'
  convert_lm.save(own, params, config, length=64)
  assert convert_lm.derive(own) == config
  assert {n: shape for n, (_, shape, _) in tiny.stored(own).items()} == {
    n: shape for n, (_, shape, _) in tiny.stored(source).items()
  }
  assert convert_lm.max_length(own) == convert_lm.max_length(source) == 64
  # transformers would take other tokens for the first and last than we have.
  fields = json.loads((own / 'config.json').read_text())
  assert fields['bos_token_id'] is fields['eos_token_id'] is None


def test_scanned_layers_are_stacked():
  source = GOLDEN / 'qwen2'
  config = convert_lm.derive(source)
  scanned = dataclasses.replace(config, scan_layers=True)
  params = tiny.arrays(convert_lm.read(source, config))
  found = tiny.arrays(convert_lm.read(source, scanned))
  _, expected = lm.scanned(config, params)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_routed_models_dense_part_goes_out(tmp_path):
  source = GOLDEN / 'mistral'
  config = convert_lm.derive(source)
  routed = dataclasses.replace(
    config,
    scan_layers=True,
    routing=MoDConfig(
      capacity=1.0, gate='one_plus_tanh', router_std=0.0, shared_router=True
    ),
  )
  fresh = nn.unbox(
    jax.jit(routed.build().init)(jax.random.key(0), routed.example())
  )
  merged = trees.merge(
    fresh['params'],
    trees.unflatten(convert_lm.read(source, routed)),
    new=('.*router/.*',),
  )
  merged = jax.tree.map(np.asarray, merged)
  # At capacity 1 the window is what it was.
  np.testing.assert_allclose(
    logits(routed, merged), EXPECTED['mistral'], atol=1e-4
  )
  convert_lm.save(tmp_path, merged, routed, like=source)
  assert tiny.stored(tmp_path) == tiny.stored(source)


def copy(name, tmp_path):
  return pathlib.Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def edit(folder, **changes):
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_arrays_that_say_nothing_new_are_passed_over(tmp_path):
  folder = copy('llama3', tmp_path)
  config = convert_lm.derive(folder)
  path = folder / 'model.safetensors'
  arrays = safetensors.numpy.load_file(path)
  arrays |= {
    'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(2, np.float32),
    # The head of a model whose head is its embedding.
    'lm_head.weight': arrays['model.embed_tokens.weight'].copy(),
  }
  safetensors.numpy.save_file(arrays, path)
  expected = tiny.arrays(convert_lm.read(folder, config))
  # As `safetensors.torch.save_model` stores arrays that share their memory.
  del arrays['model.embed_tokens.weight']
  safetensors.numpy.save_file(arrays, path)
  tiny.same(tiny.arrays(convert_lm.read(folder, config)), expected)
  arrays['model.embed_tokens.weight'] = arrays['lm_head.weight'] + 1
  safetensors.numpy.save_file(arrays, path)
  with pytest.raises(UserError, match='lm_head.weight'):
    convert_lm.read(folder, config)


def test_one_file_is_the_model_whatever_index_is_left(tmp_path):
  folder = copy('llama', tmp_path)
  shutil.copy(GOLDEN / 'llama_sharded' / files.INDEX, folder)
  assert files.stored(folder).keys() == files.stored(GOLDEN / 'llama').keys()


@pytest.mark.parametrize('value', [None, 'x', [2], {}, 0, -1, 1e300, True])
def test_every_field_has_its_type(value, tmp_path):
  """A wrong value is a sentence; those that are right there are taken."""
  folder = copy('llama', tmp_path)
  fields = json.loads((folder / 'config.json').read_text())
  fields |= dict.fromkeys(('rope_scaling', 'layer_types', 'sliding_window'))
  for key in fields:
    for family in convert_lm.FAMILIES:
      edit(folder, **fields | {'model_type': family, key: value})
      with contextlib.suppress(UserError):
        convert_lm.derive(folder)
      with contextlib.suppress(UserError):
        convert_lm.max_length(folder)
  for key in ('vocab_size', 'num_hidden_layers', 'hidden_size', 'model_type'):
    edit(folder, **fields | {key: value})
    with pytest.raises(UserError, match=f'config.json: {key}='):
      convert_lm.derive(folder)


def test_a_qwen2_says_how_wide_its_heads_are():
  config = convert_lm.derive(GOLDEN / 'qwen2')
  config = dataclasses.replace(config, head_dim=6)
  fields = convert_lm.fields_of(config, 64, None)
  assert convert_lm.from_fields(fields, '') == config


def test_what_is_not_told_is_as_in_transformers(tmp_path):
  """By the defaults of Qwen2Config, Qwen3Config and MistralConfig."""
  folder = copy('llama', tmp_path)
  path = folder / 'config.json'
  sizes = {'vocab_size', 'hidden_size', 'intermediate_size'}
  sizes |= {'num_hidden_layers', 'num_attention_heads'}
  sized = {k: v for k, v in json.loads(path.read_text()).items() if k in sizes}

  def derived(family, **fields):
    path.write_text(json.dumps(sized | {'model_type': family} | fields))
    return convert_lm.derive(folder)

  heads = {'num_attention_heads': 32, 'hidden_size': 64}
  qwen = derived('qwen2', **heads, use_sliding_window=True)
  assert (qwen.num_kv_heads, qwen.head_dim, qwen.window) == (32, 2, None)
  with pytest.raises(UserError, match='some layers'):  # From the 28th on.
    derived('qwen2', **heads, use_sliding_window=True, num_hidden_layers=29)
  assert derived('qwen3', **heads).head_dim == 128
  assert convert_lm.max_length(folder) == 32768
  mistral = derived('mistral', **heads)
  assert (mistral.num_kv_heads, mistral.window) == (8, 4096)
  assert derived('llama').num_kv_heads == sized['num_attention_heads']
