"""A detector of Hugging Face: loaded, routed, exported."""

import dataclasses
import pathlib

import jax
import numpy as np
from PIL import Image
import pytest
import tiny

import mod_jax
from mod_jax.errors import UserError

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'detr'
IMAGE = jax.random.normal(jax.random.key(1), (1, 64, 64, 3))


@pytest.fixture(scope='module')
def dense():
  return mod_jax.load(FOLDER)


@pytest.fixture(scope='module')
def boxes(dense):
  return dense.apply(IMAGE).boxes_BQ4


@pytest.mark.parametrize('method', ['amod', 'mod'])
def test_routed_it_computes_something_else_unless_nothing_is_left_out(
  dense, boxes, method
):
  half, whole = (
    mod_jax.route(dense, method, capacity=capacity) for capacity in (0.5, 1.0)
  )
  assert half.config.num_routed == 2
  if method == 'amod':  # A router's weight scales the updates.
    found = whole.apply(IMAGE).boxes_BQ4
    np.testing.assert_allclose(found, boxes, atol=1e-5)
  found = half.apply(IMAGE).boxes_BQ4
  assert np.abs(found - boxes).max() > 1e-4


def test_there_and_back(dense, boxes, tmp_path):
  routed = mod_jax.route(dense)
  with pytest.raises(UserError, match='transformers cannot run routed blocks'):
    mod_jax.export(routed, tmp_path, 'huggingface')
  routed = dataclasses.replace(routed, classes=('cat', '', 'dog', 'x', 'y'))
  mod_jax.export(routed, tmp_path, 'huggingface', dense=True)
  back = mod_jax.load(tmp_path)
  assert back.config == dense.config
  assert back.classes == ('cat', 'N/A 1', 'dog', 'x', 'y')
  np.testing.assert_array_equal(back.apply(IMAGE).boxes_BQ4, boxes)


def test_numbers_without_a_class_may_have_any_name(dense, caplog):
  """Published detectors call them N/A, and COCO's annotations lack them."""
  run = dataclasses.replace(dense, classes=('N/A', 'cat', 'N/A', 'dog', 'cup'))
  run._check_classes(('', 'cat', '', 'dog'))
  assert not caplog.records
  with pytest.raises(UserError, match="class 1 is called 'dog' in the data"):
    run._check_classes(('', 'dog', '', 'cat'))
  run._check_classes(('', 'cat', '', 'cow'))
  assert "class 3 is called 'cow' in the data" in caplog.text


def test_what_is_for_other_models_is_refused(dense, tmp_path):
  with pytest.raises(
    UserError, match="'tome' is not for a detector: take one of amod, mod"
  ):
    mod_jax.route(dense, 'tome', r=2)
  with pytest.raises(UserError, match='or a detector'):
    mod_jax.export(dense, tmp_path, 'timm')


@pytest.mark.parametrize('format', ['safetensors', 'huggingface'])
def test_pictures_are_read_there_as_here(dense, tmp_path, format):
  model = dataclasses.replace(dense.config, image_size=(64, 32))
  reads = dataclasses.replace(
    dense.preprocess,
    **{'image_size': (64, 32), 'short_side': None, 'mean': (0.1, 0.2, 0.3)},
  )
  run = dataclasses.replace(dense, config=model, preprocess=reads)
  mod_jax.export(run, tmp_path, format)
  again = mod_jax.load(tmp_path)
  assert (again.config, again.preprocess) == (model, reads)
  tiny.same(again.variables, run.variables)


def test_pictures_that_are_not_square_are_resized_there_as_here(
  dense, tmp_path
):
  def export(short_side):
    reads = dataclasses.replace(
      dense.preprocess, image_size=(64, 96), short_side=short_side
    )
    model = dataclasses.replace(dense.config, image_size=(64, 96))
    run = dataclasses.replace(dense, config=model, preprocess=reads)
    mod_jax.export(run, tmp_path, 'huggingface')
    return reads

  with pytest.raises(UserError, match='one limit for the longer side'):
    export(48)
  reads = export(64)
  again = mod_jax.load(tmp_path).preprocess
  for size in ((50, 100), (100, 50), (70, 70), (30, 47)):
    picture = Image.new('RGB', size)
    assert again.fit(picture).size == reads.fit(picture).size
  # Where either side limits, and neither product is whole.
  reads = dataclasses.replace(reads, image_size=(70, 70), short_side=50)
  for size, expected in (
    ((30, 37), (50, 61)),
    ((30, 47), (45, 70)),
    ((37, 21), (69, 40)),  # By rounding of floats in transformers.
    ((69, 20), (69, 20)),  # As the shorter side has its size by rounding.
  ):
    assert reads.fit(Image.new('RGB', size)).size == expected
