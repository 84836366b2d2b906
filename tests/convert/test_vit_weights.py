"""The same logits as other libraries, from their weights, and back again.

`tools/golden/make_vit.py` wrote what is compared with.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny

from mod_jax import trees
from mod_jax.convert import files
from mod_jax.convert import vit as convert
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models import vit
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.vit import ViTConfig

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
NAMES = (
  'timm',
  'timm_distilled',
  'huggingface',
  'huggingface_distilled',
  'torchvision',
  'huggingface_one_head',
  'lvvit',
  'dynamicvit',
)
FILES = {
  'lvvit': GOLDEN / 'vit_lvvit.pth.tar',
  'dynamicvit': GOLDEN / 'vit_dynamicvit.pth',
}
CONFIG = ViTConfig(
  image_size=32,
  patch_size=8,
  width=18,
  num_heads=3,
  mlp_dim=28,
  num_layers=2,
  num_classes=10,
)
TIMM = GOLDEN / 'vit_timm.safetensors'


def weights(name):
  return FILES.get(name, GOLDEN / f'vit_{name}.safetensors')


def naming_of(name):
  return name.split('_')[0]


def config_of(name):
  epsilon = {'huggingface': 1e-12, 'lvvit': 1e-5}.get(naming_of(name), 1e-6)
  config = dataclasses.replace(
    CONFIG,
    distilled=name.endswith(('_distilled', '_one_head')),
    distillation_head=not name.endswith('_one_head'),
    norm_epsilon=epsilon,
  )
  if name == 'lvvit':
    stem = ConvStemConfig(width=5)
    config = dataclasses.replace(
      config, stem=stem, residual_scale=0.5, token_head=True, qkv_bias=False
    )
  if name == 'dynamicvit':
    config = DynamicViTConfig(
      backbone=config, stages=(0, 1), keep=(11 / 16, 7 / 16)
    )
  return config


@functools.cache
def variables(name):
  return convert.load_variables(weights(name), config_of(name))


def loaded(name):
  return variables(name)['params']


@functools.cache
def expected():
  with np.load(GOLDEN / 'vit_expected.npz') as archive:
    return dict(archive)


def logits(config, variables):
  run = jax.jit(config.build().apply)
  return run(variables, expected()['image']).logits_BV


def edited(tmp_path, name, edit):
  """Returns a copy of golden weights, which `edit` has changed in place."""
  arrays = files.read(weights(name))
  edit(arrays)
  path = tmp_path / f'{name}.npz'
  files.write(path, arrays)
  return path


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_the_library(name):
  wanted = expected()[f'{name}/logits']
  found = logits(config_of(name), variables(name))
  np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
  assert np.ptp(wanted) > 1  # Far above the tolerance.


@pytest.mark.parametrize('name', NAMES)
def test_saving_gives_the_librarys_own_file_bit_by_bit(tmp_path, name):
  path = tmp_path / ('w.pth' if name in FILES else 'w.safetensors')
  convert.save(
    *(path, loaded(name), config_of(name)),
    naming=naming_of(name),
    batch_stats=variables(name).get('batch_stats'),
  )
  found, wanted = files.read(path), files.read(weights(name))
  tiny.same(found, wanted)
  assert all(found[n].shape == a.shape for n, a in wanted.items())
  if path.suffix == '.safetensors':
    assert path.read_bytes() == weights(name).read_bytes()


def test_projections_without_bias(tmp_path):
  config = dataclasses.replace(CONFIG, qkv_bias=False)

  def edit(arrays):
    for i in range(2):
      del arrays[f'blocks.{i}.attn.qkv.bias']

  params = convert.load(edited(tmp_path, 'timm', edit), config)
  assert set(params['block_0']['attention']['query']) == {'kernel'}
  convert.save(tmp_path / 'w.npz', params, config, naming='huggingface')
  back = convert.load(tmp_path / 'w.npz', config)
  tiny.same(back, params)


def test_positions_are_resampled_as_timm_does():
  cases = [
    name.removesuffix('/from') for name in expected() if name.endswith('/from')
  ]
  assert len(cases) == 3
  for case in cases:
    prefix, _, grid = map(int, case.split('/')[1].split('_'))
    found = vit.resize_positions(expected()[f'{case}/from'], prefix, grid)
    np.testing.assert_allclose(found, expected()[f'{case}/to'], atol=1e-5)


def test_another_resolution():
  name = 'huggingface_distilled'
  config = dataclasses.replace(config_of(name), image_size=48)
  params = convert.load(weights(name), config)
  before = loaded(name)['position']
  wanted = vit.resize_positions(before, config.num_prefix, 6)
  np.testing.assert_array_equal(params['position'], wanted)
  tiny.same({**params, 'position': 0}, {**loaded(name), 'position': 0})


def test_another_number_of_classes_makes_new_heads(caplog):
  config = dataclasses.replace(config_of('timm_distilled'), num_classes=4)
  with caplog.at_level('WARNING', 'absl'):
    params = convert.load(weights('timm_distilled'), config)
  for head in ('head', 'head_distilled'):
    told = f'{head} is made new, for num_classes=4; 10 in these weights.'
    assert told in caplog.text
    assert params[head]['kernel'].shape == (18, 4)
    assert not np.any(params[head]['kernel'])
  drawn, other = (
    convert.load(weights('timm_distilled'), config, key=jax.random.key(seed))
    for seed in (1, 2)
  )
  assert np.any(drawn['head']['kernel'])
  assert not np.array_equal(drawn['head']['kernel'], other['head']['kernel'])
  np.testing.assert_array_equal(
    drawn['patch']['kernel'], params['patch']['kernel']
  )


def test_weights_without_a_head(tmp_path, caplog):
  def edit(arrays):
    del arrays['head.weight'], arrays['head.bias']

  with caplog.at_level('WARNING', 'absl'):
    params = convert.load(edited(tmp_path, 'timm', edit), CONFIG)
  assert 'num_classes=10; there is none in these weights' in caplog.text
  assert not np.any(params['head']['kernel'])


def test_names_of_hugging_faces_other_classes(tmp_path):
  def bare(arrays):
    """As ViTModel: no prefix, a pooler, and no head."""
    for name in list(arrays):
      array = arrays.pop(name)
      if not name.startswith('classifier'):
        arrays[name.removeprefix('vit.')] = array
    arrays['pooler.dense.weight'] = np.zeros((18, 18), np.float32)

  params = convert.load(
    edited(tmp_path, 'huggingface', bare), config_of('huggingface')
  )
  tiny.same({**params, 'head': 0}, {**loaded('huggingface'), 'head': 0})

  def in_memory(arrays):
    for name in list(arrays):
      new = name.replace('.encoder.layer.', '.layers.')
      for long, short in (('query', 'q'), ('key', 'k'), ('value', 'v')):
        new = new.replace(
          f'.attention.attention.{long}.', f'.attention.{short}_proj.'
        )
      new = new.replace('.attention.output.dense.', '.attention.o_proj.')
      new = new.replace('.intermediate.dense.', '.mlp.fc1.')
      new = new.replace('.output.dense.', '.mlp.fc2.')
      arrays[new] = arrays.pop(name)

  params = convert.load(
    edited(tmp_path, 'huggingface', in_memory), config_of('huggingface')
  )
  tiny.same(params, loaded('huggingface'))


def test_of_two_heads_one_is_not_made_up():
  name = 'huggingface_one_head'
  config = config_of(name)
  assert 'head_distilled' not in loaded(name)
  # The other way round, both heads are told.
  with pytest.raises(UserError, match='unexpected: distillation_classifier'):
    convert.load(weights('huggingface_distilled'), config)
  # A new head for other classes is one head.
  other = convert.read(
    weights(name), dataclasses.replace(config, num_classes=4)
  )
  assert not any(name.startswith('head') for name in other)


def test_a_dense_model_takes_the_backbone_of_a_dynamic_vit_alone():
  name = 'dynamicvit'
  config = config_of(name)
  by_class = {'score': 'class_attention', 'stages': (1,), 'keep': 0.5}
  flat = trees.flatten({**variables(name), **loaded(name), 'params': {}})
  dense = {n: x for n, x in flat.items() if not n.startswith('prediction_')}
  for other in (config.backbone, dataclasses.replace(config, **by_class)):
    tiny.same(convert.load(weights(name), other), dense)


def test_a_dynamic_vit_on_an_lv_vit(tmp_path):
  config = dataclasses.replace(
    config_of('dynamicvit'), backbone=config_of('lvvit')
  )
  own = convert.load_variables(weights('lvvit'), config)
  path = tmp_path / 'w.pth'
  convert.save(
    *(path, own['params'], config),
    naming='dynamicvit',
    batch_stats=own['batch_stats'],
  )
  arrays = files.read(path)
  assert 'score_predictor.1.out_conv.4.bias' in arrays
  assert 'patch_embed.bn3.running_var' in arrays
  tiny.same(convert.load_variables(path, config), own)


@pytest.mark.parametrize(
  ('config', 'extra'),
  [
    (
      dataclasses.replace(CONFIG, routing=VisionRoutingConfig(score='learned')),
      {'block_1/router/kernel'},
    ),
    (dataclasses.replace(CONFIG, routing=VisionRoutingConfig()), set()),
    (
      DynamicViTConfig(backbone=CONFIG, stages=(1,), score='static'),
      {'pattern_0'},
    ),
    (DynamicViTConfig(backbone=CONFIG, stages=(1,)), None),
  ],
  ids=['mod', 'a-mod', 'static', 'dynamic'],
)
def test_routed_models_start_from_dense_weights(tmp_path, config, extra):
  params = convert.load(TIMM, config, key=jax.random.key(3))
  flat, dense = trees.flatten(params), trees.flatten(loaded('timm'))
  tiny.same({name: flat[name] for name in dense}, dense)
  new = set(flat) - set(dense)
  if extra is None:
    assert new
    assert all(name.startswith('prediction_0/') for name in new)
  else:
    assert new == extra
  # Zeros would tie, and tokens be chosen by their place.
  assert all(np.std(flat[n]) > 0 for n in new if n.endswith('kernel'))
  convert.save(tmp_path / 'w.npz', params, config)
  tiny.same(files.read(tmp_path / 'w.npz'), files.read(TIMM))


def test_fewer_layers_of_the_same_weights():
  config = CONFIG.isoflop_twin(1)
  dense = trees.flatten(loaded('timm'))
  tiny.same(
    convert.read(TIMM, config, truncate=True),
    {n: a for n, a in dense.items() if not n.startswith('block_1/')},
  )
  # The rest of a deeper model is not made up.
  deeper = dataclasses.replace(CONFIG, num_layers=3)
  with pytest.raises(UserError, match='missing: blocks.2.attn.proj.bias'):
    convert.read(TIMM, deeper, truncate=True)


def test_every_difference_is_told_at_once(tmp_path):
  def edit(arrays):
    arrays['fc_norm.weight'] = np.zeros(18, np.float32)
    arrays['head.weight'] = np.zeros((3, 18), np.float32)
    arrays['head.bias'] = np.zeros(3, np.float32)

  path = edited(tmp_path, 'timm', edit)
  config = ViTConfig(
    image_size=32,
    patch_size=4,
    width=12,
    num_heads=3,
    mlp_dim=28,
    num_layers=4,
    num_classes=5,
    distilled=True,
  )
  with pytest.raises(UserError) as caught:
    convert.load(path, config)
  first, *lines = str(caught.value).splitlines()
  assert 'timm with width=18, patch_size=8, num_layers=2, mlp_dim=28' in first
  for line in (
    'missing: blocks.{2..3}.mlp.fc1.weight',
    'missing: head_dist.bias',
    'unexpected: fc_norm.weight',
    'wrong shape: blocks.{0..1}.attn.qkv.weight: (54, 18) instead of (36, 12)',
    'wrong shape: head.weight: (3, 18) instead of (5, 12)',
    'wrong shape: pos_embed: (1, 17, 18) instead of (1, 66, 12)',
  ):
    assert f'  {line}' in lines
  # Six modules of weight and bias of blocks that are not there, and the rest.
  counts = [sum(x in line for line in lines) for x in ('missing: ', 'shape: ')]
  assert counts == [6 * 2 + 3, 7 + 4 + 8]
  assert len(lines) == 15 + 1 + 19


def test_what_hugging_face_says_beside_the_weights(tmp_path, caplog):
  shutil.copy(weights('huggingface'), tmp_path / 'model.safetensors')
  config = config_of('huggingface')
  beside = tmp_path / 'config.json'
  told = {'num_attention_heads': 3, 'layer_norm_eps': 1e-12}
  beside.write_text(json.dumps(told))
  with caplog.at_level('WARNING', 'absl'):
    convert.load(tmp_path, config)
    assert not caplog.records
    convert.load(tmp_path, dataclasses.replace(config, norm_epsilon=1e-6))
  assert 'norm_epsilon=1e-12, and the config has 1e-06' in caplog.text
  with pytest.raises(UserError, match='set num_heads=3'):
    convert.load(tmp_path, dataclasses.replace(config, num_heads=2))
  beside.write_text(json.dumps({**told, 'hidden_act': 'relu'}))
  with pytest.raises(UserError, match="hidden_act='relu'"):
    convert.load(tmp_path, config)


@pytest.mark.parametrize('name', NAMES)
def test_the_config_that_a_file_tells(name):
  config = config_of(name)
  if name == 'dynamicvit':  # It does not tell how much is kept.
    config = dataclasses.replace(config, keep=0.7)
  assert convert.derive(weights(name), num_heads=3) == config


@pytest.mark.parametrize(
  'told',
  [
    {'architecture': 'deit_tiny_patch16_224'},
    {'pretrained_cfg': {'architecture': 'vit_tiny_patch16_224'}},
    {'architecture': 'vit_x', 'model_args': {'num_heads': 3}},
  ],
)
def test_what_timm_says_beside_the_weights(tmp_path, caplog, told):
  shutil.copy(TIMM, tmp_path / 'model.safetensors')
  (tmp_path / 'config.json').write_text(json.dumps(told))
  with caplog.at_level('WARNING', 'absl'):
    convert.read(tmp_path, CONFIG)
  assert not caplog.records
  with pytest.raises(
    UserError, match='num_heads=2: .* has 3, .*set num_heads=3'
  ):
    convert.read(tmp_path, dataclasses.replace(CONFIG, num_heads=2))


def test_what_nothing_tells_is_said(caplog):
  with caplog.at_level('WARNING', 'absl'):
    convert.read(weights('lvvit'), config_of('lvvit'))
  assert str(weights('lvvit')) in caplog.text
  assert 'num_heads=3, residual_scale=0.5' in caplog.text
