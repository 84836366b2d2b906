"""CLIP's tower computes what PyTorch's does, and goes out as it came in.

`tools/golden/make_vlm.py` wrote what is compared with.
"""

import dataclasses
import functools
import json
import pathlib

from flax import linen as nn
import jax
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import flops
from mod_jax.convert import clip, files
from mod_jax.errors import UserError
from mod_jax.models import vit
from mod_jax.pretrained.source import Source
from mod_jax.tasks import warm_start

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'vlm'
EXPECTED = dict(np.load(GOLDEN / 'expected.npz'))


@functools.cache
def tower():
  config = clip.derive(GOLDEN / 'clip')
  return config, tiny.arrays(clip.read(GOLDEN / 'clip', config))


def test_features_are_those_of_pytorch():
  config, params = tower()

  @functools.partial(jax.jit, static_argnames='config')
  def run(config, images_BHWC):
    model, variables = config.build(), {'params': params}
    hidden_BLD = model.apply(
      variables, images_BHWC, config.num_layers - 1, method='features'
    )
    return hidden_BLD, model.apply(variables, images_BHWC)

  hidden_BLD, output = run(config, EXPECTED['images'])
  np.testing.assert_allclose(hidden_BLD, EXPECTED['clip/hidden'], atol=1e-4)
  np.testing.assert_allclose(
    output.features_BLD[:, 0], EXPECTED['clip/pooled'], atol=1e-4
  )
  assert output.logits_BV is None
  plain = dataclasses.replace(config, activation='gelu')
  other_BLD, _ = run(plain, EXPECTED['images'])
  assert np.abs(other_BLD - hidden_BLD).max() > 1e-3


def test_an_export_has_the_bytes_of_the_file(tmp_path):
  config, params = tower()
  clip.save(tmp_path, params, config)
  theirs = files.read(GOLDEN / 'clip')
  written = {
    name.removeprefix(clip.PREFIX): x
    for name, x in files.read(tmp_path).items()
  }
  assert written.keys() == theirs.keys()
  for name, array in written.items():
    assert array.tobytes() == theirs[name].tobytes()
  assert Source.open(tmp_path).config == config
  tiny.same(tiny.arrays(clip.read(tmp_path, config)), params)


def test_the_whole_clip_holds_its_tower(tmp_path):
  config, params = tower()
  theirs = files.read(GOLDEN / 'clip')
  whole = {clip.PREFIX + name: x for name, x in theirs.items()}
  whole |= {'logit_scale': np.float32([1]), 'text_model.x': np.float32([1])}
  files.write(tmp_path / 'model.safetensors', whole)
  fields = json.loads((GOLDEN / 'clip' / 'config.json').read_text())
  files.write_json(
    tmp_path / 'config.json', {'model_type': 'clip', 'vision_config': fields}
  )
  assert clip.derive(tmp_path) == config
  tiny.same(tiny.arrays(clip.read(tmp_path, config)), params)


def test_a_folder_is_a_model_of_features(tmp_path):
  run = mod_jax.load(GOLDEN / 'clip')
  with pytest.raises(UserError, match='num_classes=0: this model has features'):
    run.predict(np.zeros((6, 6, 3), np.uint8))
  mod_jax.export(run, tmp_path, 'huggingface')
  again = mod_jax.load(tmp_path)
  assert (again.config, again.preprocess) == (run.config, run.preprocess)
  tiny.same(again.variables, run.variables)


def test_a_classifier_begins_with_it():
  config, expected = tower()
  model = dataclasses.replace(config, num_classes=3)
  params = model.build().init(jax.random.key(0), model.example())['params']
  params = nn.unbox(params)
  weights, _ = warm_start.load_weights(str(GOLDEN / 'clip'), model, params, {})
  tiny.same(tiny.arrays(weights['block_0']), expected['block_0'])
  tiny.same(weights['head'], params['head'])


def test_the_published_tower_has_its_size():
  config = vit.vit_large(
    image_size=336,
    patch_size=14,
    num_classes=0,
    activation='quick_gelu',
    patch_bias=False,
    input_norm=True,
  )
  assert config.num_patches == 576
  assert flops.num_params(config) == 303_507_456
