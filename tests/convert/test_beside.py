"""What the files beside weights say, and what they do not."""

import json

from PIL import Image
import pytest

from mod_jax.convert import beside
from mod_jax.convert.beside import Beside
from mod_jax.errors import UserError


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
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
    crop_fraction=1.0,
  )


@pytest.mark.parametrize(
  'wrong',
  [{'num_attention_heads': 0}, {'layer_norm_eps': '1e-6'}, {'hidden_act': []}],
)
def test_what_is_of_another_type(tmp_path, wrong):
  (name,) = wrong
  with pytest.raises(UserError, match=f'config.json: {name}=.*expected'):
    read(tmp_path, wrong)


def test_of_timm(tmp_path):
  told = read(
    tmp_path,
    {
      'architecture': 'deit_small_patch16_224',
      'label_names': ['a', 'b'],
      'pretrained_cfg': {
        'mean': [0.1, 0.2, 0.3],
        'std': [0.4, 0.5, 0.6],
        'crop_pct': 0.9,
        'interpolation': 'bilinear',
      },
    },
  )
  assert told == Beside(
    num_heads=6,
    classes=('a', 'b'),
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
    crop_fraction=0.9,
    resample=Image.Resampling.BILINEAR,
  )


@pytest.mark.parametrize(('code', 'filter'), [(2, 'BILINEAR'), (99, None)])
def test_how_pictures_are_resized(tmp_path, code, filter):
  found = read(tmp_path, {}, {'resample': code}).resample
  assert found == (filter and Image.Resampling[filter])


@pytest.mark.parametrize(
  ('pictures', 'fraction'),
  [
    ({'do_center_crop': True, 'size': 256, 'crop_size': 224}, 0.875),
    (
      {
        'do_center_crop': True,
        'size': {'shortest_edge': 100},
        'crop_size': {'height': 80, 'width': 80},
      },
      0.8,
    ),
    ({'do_center_crop': True, 'size': 64, 'crop_size': 80}, 1.0),
    ({'do_center_crop': True}, None),
    ({'do_center_crop': False, 'size': 256, 'crop_size': 224}, 1.0),
  ],
)
def test_how_much_of_a_picture_is_seen(tmp_path, pictures, fraction):
  assert read(tmp_path, {'crop_pct': 0.3}, pictures).crop_fraction == fraction


def test_names_that_nobody_gave(tmp_path):
  labels = {str(i): f'LABEL_{i}' for i in range(3)}
  assert read(tmp_path, {'id2label': labels}).classes is None
  assert read(tmp_path, {'id2label': {'a': 'b'}}).classes is None
  assert read(tmp_path, {'label_names': [1, 2]}).classes is None


def test_pictures_that_are_not_normalised(tmp_path):
  told = read(tmp_path, None, {'do_normalize': False, 'image_mean': [1, 1, 1]})
  assert (told.mean, told.std) == ((0.0,) * 3, (1.0,) * 3)
  assert read(tmp_path, None, {'image_mean': [1, 1]}).mean is None
