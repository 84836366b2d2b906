"""LLaVA computes what PyTorch's does, and goes out as it came in.

`tools/golden/make_vlm.py` wrote what is compared with.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax.convert import files, llava
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.reduction import EViT
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import vlm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.serving.engine import Engine
from mod_jax.tasks.experiment import ExperimentConfig

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'vlm'
FOLDER = GOLDEN / 'llava'
EXPECTED = dict(np.load(GOLDEN / 'expected.npz'))
# The first row has one picture; what follows it is not looked at.
IMAGES = np.stack([EXPECTED['images'][[0, 0]], EXPECTED['images'][[1, 2]]])


@functools.cache
def model():
  config = llava.derive(FOLDER)
  return config, tiny.arrays(llava.read(FOLDER, config))


def run(tokens_BL, images_BIHWC, valid_BL):
  config, params = model()
  variables = {'params': params}
  return tiny.apply(
    config, variables, tokens_BL, images_BIHWC, valid_BL=valid_BL
  ).logits_BLV


@pytest.mark.parametrize('side', ['left', 'right'])
def test_logits_are_those_of_pytorch(side):
  tokens_BL, valid_BL = EXPECTED[f'tokens/{side}'], EXPECTED[f'valid/{side}']
  logits_BLV = run(tokens_BL, IMAGES, valid_BL)
  expected_BLV = EXPECTED[f'llava/{side}']
  np.testing.assert_allclose(
    logits_BLV[valid_BL], expected_BLV[valid_BL], atol=1e-4
  )
  # Otherwise the pictures would not be tested.
  others_BLV = run(tokens_BL, IMAGES[::-1], valid_BL)
  assert np.abs(others_BLV - logits_BLV)[valid_BL].max() > 1e-2


def test_rows_of_pictures_and_text_are_those_that_pytorch_was_given():
  config, _ = model()
  image = config.image_token
  rows = [[1, 5, image, 7, 8, 3], [1, image, 4, 11, image, 12, 13, 14, 6]]
  pictures = [[IMAGES[0, 0]], IMAGES[1]]
  for side in ('left', 'right'):
    placed = vlm.place_images(config, rows, pictures, text=7, side=side)
    for name in ('tokens', 'valid'):
      np.testing.assert_array_equal(
        getattr(placed, f'{name}_BL'), EXPECTED[f'{name}/{side}']
      )
    np.testing.assert_array_equal(placed.images_BIHWC[1], IMAGES[1])
    assert not placed.images_BIHWC[0, 1].any()


def test_back_again_every_byte_is_the_same(tmp_path, monkeypatch):
  config, params = model()
  run = mod_jax.load(FOLDER)
  tiny.same(run.variables['params'], params)
  assert run.preprocess.image_size == config.tower.image_size
  monkeypatch.setattr(files, 'SHARD', 20_000)
  mod_jax.export(run, tmp_path / 'a', 'huggingface')
  assert tiny.stored(tmp_path / 'a') == tiny.stored(FOLDER)
  assert len(list((tmp_path / 'a').glob('*.safetensors'))) > 1
  fields = [
    json.loads((folder / 'config.json').read_text())
    for folder in (FOLDER, tmp_path / 'a')
  ]
  assert fields[0] == fields[1]
  # A run of ours says how long its texts were.
  data = run.preprocess.apply_to(ConversationDataConfig(length=48))
  trained = ExperimentConfig(model=config, data=data)
  trained = dataclasses.replace(run, experiment=trained, origin=None)
  mod_jax.export(trained, tmp_path / 'c', 'huggingface')
  assert llava.max_length(tmp_path / 'c') == 48
  # Without the folder that it comes from: in the names of published files.
  llava.save(tmp_path / 'b', params, config, length=64)
  assert llava.derive(tmp_path / 'b') == config
  assert llava.max_length(tmp_path / 'b') == llava.max_length(FOLDER) == 64
  tiny.same(tiny.arrays(llava.read(tmp_path / 'b', config)), params)
  assert 'vision_tower.vision_model.pre_layrnorm.bias' in tiny.stored(
    tmp_path / 'b'
  )


@pytest.mark.parametrize(
  ('tower', 'words'),
  [
    ({'routing': VisionRoutingConfig()}, 'routed blocks'),
    ({'reduction': EViT(stages=(1,))}, 'blocks that leave fewer tokens'),
    (None, 'the dropping of patches'),
  ],
)
def test_of_a_tower_with_parts_only_the_dense_one_goes_out(
  tmp_path, tower, words
):
  run = mod_jax.load(FOLDER)
  changed = DynamicViTConfig(backbone=run.config.tower, stages=(1,))
  if tower is not None:
    changed = dataclasses.replace(run.config.tower, **tower)
  config = dataclasses.replace(run.config, tower=changed)
  routed = dataclasses.replace(run, config=config)
  with pytest.raises(UserError, match=f'cannot run {words}'):
    mod_jax.export(routed, tmp_path, 'huggingface')
  mod_jax.export(routed, tmp_path, 'huggingface', dense=True)
  assert mod_jax.load(tmp_path).config == run.config


def test_what_a_tower_does_not_tell_is_as_in_transformers(tmp_path):
  """By the defaults of CLIPVisionConfig, which are those of ViT-B/32."""
  fields = json.loads((FOLDER / 'config.json').read_text())
  for name in ('num_attention_heads', 'num_hidden_layers', 'patch_size'):
    del fields['vision_config'][name]
  fields['vision_config'] |= {'hidden_size': 48, 'image_size': 224}
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  tower = llava.derive(tmp_path).tower
  assert (tower.num_heads, tower.num_layers, tower.patch_size) == (12, 12, 32)


def test_names_in_memory_are_read_too(tmp_path):
  config, params = model()
  renamed = {}
  for name, array in files.stored(FOLDER).items():
    name = name.replace('language_model.lm_head.', 'lm_head.')
    name = name.replace('language_model.model.', 'model.language_model.')
    for part in ('vision_tower', 'multi_modal_projector'):
      name = name.replace(f'{part}.', f'model.{part}.')
    renamed[name] = np.asarray(array)
  files.write(tmp_path / 'model.safetensors', renamed)
  shutil.copy(FOLDER / 'config.json', tmp_path)
  tiny.same(tiny.arrays(llava.read(tmp_path, config)), params)


def test_our_own_format_holds_one(tmp_path):
  run = mod_jax.load(FOLDER, dtype='bfloat16')
  assert run.config.tower.dtype == run.config.language.dtype == 'bfloat16'
  mod_jax.export(run, tmp_path)
  again = mod_jax.load(tmp_path)
  assert again.config == run.config
  tiny.same(again.variables, jax.tree.map(jnp.float32, run.variables))


def test_without_a_tokenizer_it_says_so():
  run = mod_jax.load(FOLDER)
  for asks in (Engine, lambda run: run.encode('x'), lambda run: run.max_length):
    with pytest.raises(UserError, match=r'no tokenizer\.json beside'):
      asks(run)
