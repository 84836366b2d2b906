"""DETR against the golden files of Hugging Face's classes."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny

from mod_jax import flops, trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import detr as convert
from mod_jax.convert import files
from mod_jax.errors import UserError
from mod_jax.layers.resnet import ResNetConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models.detr import DETRConfig

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
FOLDER = GOLDEN / 'detr'
CONFIG = DETRConfig(
  num_classes=5,
  num_queries=7,
  width=16,
  num_heads=2,
  mlp_dim=20,
  num_layers=2,
  num_decoder_layers=3,
  backbone=ResNetConfig(stem=4, depths=(1, 2, 1, 1), widths=(2, 3, 4, 5)),
)
DERIVED = dataclasses.replace(CONFIG, image_size=(1333, 1333))


def loaded(folder, config):
  return arrays_lib.complete(convert.read(folder, config), config)


@functools.cache
def variables():
  return loaded(FOLDER, CONFIG)


@functools.cache
def expected():
  with np.load(GOLDEN / 'detr_expected.npz') as archive:
    return dict(archive)


def test_logits_and_boxes_are_those_of_the_library():
  wanted = expected()
  run = jax.jit(CONFIG.build().apply)
  output = run(variables(), wanted['image'], wanted['size'])
  np.testing.assert_allclose(output.logits_BQV, wanted['logits'], atol=1e-4)
  np.testing.assert_allclose(output.boxes_BQ4, wanted['boxes'], atol=1e-4)
  # Far above the tolerance, over classes, queries and pictures.
  for axis in range(3):
    assert np.ptp(wanted['logits'], axis=axis).max() > 0.1
    assert np.ptp(wanted['boxes'], axis=axis).max() > 0.01


def test_the_config_that_a_folder_tells():
  assert convert.derive(FOLDER) == DERIVED


def test_there_and_back(tmp_path):
  path = tmp_path / 'model.safetensors'
  convert.save(path, variables(), CONFIG)
  tiny.same(files.read(path), files.read(FOLDER))
  told = convert.their_config(CONFIG, ['cat', '', 'dog'])
  wanted = json.loads((FOLDER / 'config.json').read_text())
  for name, value in told.items():
    if name == 'backbone_config':
      assert value.items() <= wanted[name].items()
    elif name not in ('id2label', 'label2id'):
      assert value == wanted[name], name
  assert list(told['id2label'].values()) == ['cat', 'N/A 1', 'dog'] + [
    *('N/A 3', 'N/A 4')
  ]
  (tmp_path / 'config.json').write_text(json.dumps(told))
  assert convert.derive(tmp_path) == DERIVED
  tiny.same(loaded(tmp_path, CONFIG), variables())


def test_a_backbone_in_the_names_of_timm(tmp_path):
  own, timm = (convert.names(CONFIG, x) for x in ('huggingface', 'timm'))
  renamed = {x.theirs: y.theirs for x, y in zip(own, timm, strict=True)}
  arrays = {renamed.get(n, n): x for n, x in files.read(FOLDER).items()}
  assert 'model.backbone.conv_encoder.model.layer2.1.bn3.running_var' in arrays
  files.write(tmp_path / 'model.safetensors', arrays)
  # As transformers 4 writes it of a backbone of its own.
  fields = json.loads((FOLDER / 'config.json').read_text()) | {'dilation': None}
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  assert convert.derive(tmp_path) == DERIVED
  tiny.same(loaded(tmp_path, CONFIG), variables())


@pytest.mark.parametrize('naming', ['huggingface', 'timm'])
def test_the_names_and_sizes_of_detr_r50(naming):
  """Names in memory, which differ from those on disk, of which none is here."""
  found = {
    entry.theirs: list(entry.their_shape)
    for entry in convert.names(DETRConfig(), naming)
  }
  wanted = json.loads((GOLDEN / 'detr_names.json').read_text())[naming]
  assert found == {convert.on_disk(name): x for name, x in wanted.items()}


def test_parameters_of_detr_r50():
  """41 million, as the paper's table has it, without the frozen norms."""
  assert flops.num_params(DETRConfig()) == 41_524_768


def test_routed_models_start_from_dense_weights(tmp_path):
  config = dataclasses.replace(
    CONFIG, routing=VisionRoutingConfig(score='learned')
  )
  routed = loaded(FOLDER, config)
  flat, dense = (trees.flatten(x['params']) for x in (routed, variables()))
  assert set(flat) - set(dense) == {
    'encoder/block_1/router/kernel',
    'decoder/block_1/router/kernel',
    'decoder/block_1/source/router/kernel',
  }
  for name in dense:
    np.testing.assert_array_equal(flat[name], dense[name])
  convert.save(tmp_path / 'w.npz', routed, config)
  assert set(files.read(tmp_path / 'w.npz')) == set(files.read(FOLDER))


def test_what_cannot_be_read_is_told(tmp_path):
  arrays = files.read(FOLDER)
  short = {n: x for n, x in arrays.items() if not n.startswith('class_')}
  files.write(tmp_path / 'model.safetensors', short)
  shutil.copy(FOLDER / 'config.json', tmp_path)
  with pytest.raises(UserError, match="lacks 'class_labels_classifier.bias'"):
    convert.derive(tmp_path)
  fewer = dataclasses.replace(CONFIG, num_queries=6)
  with pytest.raises(UserError, match=r'wrong shape: .*\(7, 16\)'):
    convert.read(FOLDER, fewer)
  stem = dataclasses.replace(CONFIG, patch_size=2)
  with pytest.raises(UserError, match='patch_size=2'):
    convert.names(stem, 'timm')
