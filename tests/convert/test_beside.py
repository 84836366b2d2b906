"""What the files beside weights say, and what they do not."""

import json
import pathlib

import numpy as np
from PIL import Image
import pytest

from mod_jax.convert import beside
from mod_jax.convert.beside import Beside
from mod_jax.data.images import Preprocess

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
# Made by transformers itself; see `make_pictures.py`.
with np.load(GOLDEN / 'pictures.npz') as file:
  EXPECTED = dict(file)
CASES = [n.split('/')[0] for n in EXPECTED if n.endswith('/config')]


def read(folder, config=None, pictures=None):
  for name, fields in (
    ('config.json', config),
    ('preprocessor_config.json', pictures),
  ):
    if fields is not None:
      (folder / name).write_text(json.dumps(fields))
  return beside.read(folder / 'model.safetensors')


def test_nothing_is_said(tmp_path):
  assert read(tmp_path) == Beside()
  assert read(tmp_path, config=[1]) == Beside()


def test_of_hugging_face(tmp_path):
  told = read(
    tmp_path,
    {
      'num_attention_heads': 5,
      'layer_norm_eps': 1e-9,
      'hidden_act': 'relu',
      'id2label': {'10': 'c', '2': 'b', '0': 'a'},
    },
    {'image_mean': [0.1, 0.2, 0.3], 'image_std': [0.4, 0.5, 0.6]},
  )
  assert told == Beside(
    num_heads=5,
    norm_epsilon=1e-9,
    activation='relu',
    classes=('a', 'b', 'c'),
    image_size=224,
    pictures={
      'mean': (0.1, 0.2, 0.3),
      'std': (0.4, 0.5, 0.6),
      'resample': Image.Resampling.BILINEAR,
      'resize': 'squash',
      'crop_fraction': 1.0,
    },
  )


def test_of_timm(tmp_path):
  told = read(
    tmp_path,
    {
      'architecture': 'deit_small_patch16_224',
      'label_names': ['a', 'b'],
      'pretrained_cfg': {
        'mean': [0.1, 0.2, 0.3],
        'std': [0.4, 0.5, 0.6],
        'input_size': [3, 224, 224],
        'crop_pct': 0.9,
        'crop_mode': 'squash',
        'interpolation': 'bilinear',
      },
    },
  )
  assert told == Beside(
    num_heads=6,
    classes=('a', 'b'),
    image_size=224,
    pictures={
      'mean': (0.1, 0.2, 0.3),
      'std': (0.4, 0.5, 0.6),
      'resample': Image.Resampling.BILINEAR,
      'resize': 'squash',
      'crop_fraction': 224 / 248,
      'rounding': 'even',
    },
  )


@pytest.mark.parametrize(
  'kind', [{}, {'feature_extractor_type': 'CLIPFeatureExtractor'}]
)
def test_a_single_number_is_the_shorter_side_of_clip(tmp_path, kind):
  # As openai/clip-vit-large-patch14 has it.
  fields = kind | {'size': 9, 'crop_size': 6, 'do_center_crop': True}
  told = read(tmp_path, {'model_type': 'clip'}, fields)
  assert (told.image_size, told.unfollowed) == (6, ())
  assert told.pictures['resize'] == 'shorter_side'
  assert told.pictures['crop_fraction'] == 6 / 9
  assert told.pictures['mean'][0] == 0.48145466


def test_pictures_of_llava_are_those_of_clip(tmp_path):
  fields = {'image_processor_type': 'LlavaImageProcessor', 'do_pad': False}
  told = read(tmp_path, {'model_type': 'llava'}, fields)
  fields['image_processor_type'] = 'CLIPImageProcessor'
  assert told == read(tmp_path, {'model_type': 'llava'}, fields)
  # Pictures that are made square by a border.
  fields = {'image_processor_type': 'LlavaImageProcessorFast', 'do_pad': True}
  assert read(tmp_path, {}, fields).unfollowed == ('do_pad=True',)


@pytest.mark.parametrize(
  ('fields', 'expected'),
  [
    ({'size': 600}, {'short_side': 600, 'image_size': (1333, 1333)}),
    ({'do_normalize': False}, {'mean': (0.0,) * 3, 'std': (1.0,) * 3}),
    ({'do_resize': False}, {}),
    ({'resample': 3}, {}),
    ({'image_processor_type': 'CLIPImageProcessor'}, {}),
    (
      {'size': 600, 'max_size': 900},
      {'short_side': 600, 'image_size': (900, 900)},
    ),
    ({'size': {'height': 64, 'width': 64}}, {}),
  ],
)
def test_pictures_of_a_detector(tmp_path, fields, expected, caplog):
  of_detr = {'image_processor_type': 'DetrImageProcessor', 'do_pad': True}
  fields = of_detr | fields
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(fields))
  assert expected.items() <= beside.of_detector(tmp_path).items()
  assert ('not followed' in caplog.text) == (not expected)


@pytest.mark.parametrize('case', CASES)
def test_pictures_are_read_as_by_the_library(tmp_path, case):
  told = read(tmp_path, {}, json.loads(str(EXPECTED[f'{case}/config'])))
  assert (told.image_size, told.unfollowed) == (8, ())
  preprocess = Preprocess(image_size=8, **told.pictures)
  for name in ('wide', 'tall'):
    np.testing.assert_allclose(
      preprocess([EXPECTED[name]])[0],
      EXPECTED[f'{case}/{name}'],
      rtol=1e-5,
      atol=1e-5,
    )


@pytest.mark.parametrize(
  ('fields', 'named'),
  [
    ({'size': {'shortest_edge': 8}}, "size={'shortest_edge': 8}"),
    ({'size': {'height': [8], 'width': [8]}}, "size={'height': [8]"),
    ({'do_resize': False}, 'do_resize=False'),
    ({'resample': 99}, 'resample=99'),
    ({'image_mean': [1, 1]}, 'image_mean=[1, 1]'),
    ({'image_processor_type': 'NewImageProcessor'}, 'NewImageProcessor'),
  ],
)
def test_what_cannot_be_followed_is_named(tmp_path, fields, named):
  told = read(tmp_path, {}, fields)
  assert any(named in what for what in told.unfollowed)
  assert Preprocess(image_size=8, **told.pictures)


def test_unfollowed_of_timm(tmp_path):
  fields = {'crop_mode': 'border', 'crop_pct': 0.9, 'input_size': [3, 8, 8]}
  assert read(tmp_path, fields).unfollowed == ('crop_mode=border',)


def test_pictures_of_timm_may_have_a_border(tmp_path):
  told = read(tmp_path, {'crop_pct': 1.25, 'input_size': [3, 16, 16]})
  assert told.pictures['crop_fraction'] == 16 / 12


@pytest.mark.parametrize('field', ['label_names', 'labels'])
@pytest.mark.parametrize('names', [['a', 'b'], {'1': 'b', '0': 'a'}])
def test_names_of_every_version_of_timm(tmp_path, field, names):
  assert read(tmp_path, {field: names}).classes == ('a', 'b')


def test_names_that_nobody_gave(tmp_path):
  labels = {str(i): f'LABEL_{i}' for i in range(3)}
  assert read(tmp_path, {'id2label': labels}).classes is None
  assert read(tmp_path, {'id2label': {'a': 'b'}}).classes is None
  assert read(tmp_path, {'label_names': [1, 2]}).classes is None
