"""Dense models in, routed models with their weights out."""

import dataclasses
import pathlib
import re

from flax import linen as nn
import jax
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import trees
from mod_jax.data.images import ImageDataConfig
from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS
from mod_jax.models import lm
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


@pytest.fixture(scope='module')
def dense():
  return mod_jax.load(GOLDEN / 'vit_timm.safetensors', num_heads=2)


@pytest.fixture(scope='module')
def images(dense):
  size = dense.config.image_size
  return tiny.images(size=size)


@pytest.fixture(scope='module')
def language():
  return tiny.run(tiny.experiment())


WHOLE = {
  'amod': {'capacity': 1.0},
  'mod': {
    'capacity': 1.0,
    'router_std': 0.0,
    'shared_router': True,
    'router_width': 3,
  },
  'dynamic': {'capacity': 1.0},
  'tome': {'r': 0},
  'evit': {'capacity': 1.0},
}


@pytest.mark.parametrize('method', WHOLE)
def test_with_nothing_left_out_it_is_the_dense_model(dense, images, method):
  run = mod_jax.route(dense, method, **WHOLE[method])
  np.testing.assert_allclose(
    run.apply(images).logits_BV, dense.apply(images).logits_BV, atol=1e-5
  )
  assert run.preprocess == dense.preprocess


def test_a_routed_language_model_can_be_sampled(language):
  """Since the auxiliary loss trains a causal rule."""
  half = mod_jax.route(language, 'mod', capacity=0.5)
  (found,) = half.predict('de', max_new_tokens=3)
  assert len(found.log_probs) == 3


@pytest.mark.parametrize('kind', ['vit', 'lm'])
def test_features_of_a_large_norm(dense, images, language, kind):
  run, x = (dense, images) if kind == 'vit' else (language, tiny.tokens())
  large = re.compile('embedding|patch|position|class_token|out/|down/')
  params = {
    name: 300 * w if large.search(name) else w
    for name, w in trees.flatten(run.variables['params']).items()
  }
  variables = {**run.variables, 'params': trees.unflatten(params)}
  run = dataclasses.replace(run, variables=variables)
  want, got = (
    # Both outputs' logits come first.
    jax.tree.leaves(model.apply(x))[0]
    for model in (run, mod_jax.route(run, 'mod', capacity=1.0))
  )
  np.testing.assert_allclose(got, want, atol=0.002 * np.abs(want).max())


def test_layers_are_scanned_in_other_groups(language, tmp_path):
  """Also those of a dense model whose routers begin at full capacity."""
  tokens = tiny.tokens()
  config, params = lm.scanned(language.config, language.variables['params'])
  experiment = dataclasses.replace(language.experiment, model=config)
  scanned = dataclasses.replace(
    language,
    config=config,
    variables={'params': params},
    experiment=experiment,
    task=make_task(experiment),
  )
  want = scanned.apply(tokens).logits_BLV
  routed = mod_jax.route(scanned, 'mod', **WHOLE['mod'], threshold_decay=0.9)
  assert routed.config.scan_layers
  np.testing.assert_allclose(routed.apply(tokens).logits_BLV, want, atol=1e-5)
  # As what a run starts from, there and back.
  mod_jax.export(scanned, tmp_path / 'dense')
  mod_jax.export(routed, tmp_path / 'routed')

  def started(run, name, **changes):
    model = dataclasses.replace(run.config, **changes)
    task = make_task(dataclasses.replace(run.experiment, model=model))
    fresh = dict(nn.unbox(jax.jit(task.init)(jax.random.key(5))))
    params, state = task.start(fresh.pop('params'), fresh, str(tmp_path / name))
    apply = jax.jit(model.build().apply)
    return apply({'params': params, **state}, tokens).logits_BLV, state

  for run, name in ((routed, 'dense'), (scanned, 'routed')):
    np.testing.assert_allclose(started(run, name)[0], want, atol=1e-5)
  # Averages come along, too.
  moved = jax.tree.map(lambda x: x + 1, dict(routed.variables))
  moved = dataclasses.replace(routed, variables=moved)
  mod_jax.export(moved, tmp_path / 'moved')
  _, state = started(routed, 'moved', scan_layers=False)
  assert jax.tree.leaves(state)
  assert all((x == 1).all() for x in jax.tree.leaves(state))


def test_a_routed_model_goes_elsewhere_and_is_trained_there(
  dense, images, tmp_path
):
  run = mod_jax.route(dense, 'amod', capacity=0.5, first=1)
  chosen_BL = run.apply(images).routing[0].chosen_BL
  assert chosen_BL.sum(1).tolist() == [chosen_BL.shape[1] // 2] * 2
  mod_jax.export(run, tmp_path)
  np.testing.assert_array_equal(
    mod_jax.load(tmp_path).apply(images).logits_BV,
    run.apply(images).logits_BV,
  )
  # As what a run starts from.
  data = ImageDataConfig(image_size=run.config.image_size)
  task = make_task(ExperimentConfig(model=run.config, data=data))
  fresh = dict(nn.unbox(jax.jit(task.init)(jax.random.key(5))))
  params, _ = task.start(fresh.pop('params'), fresh, str(tmp_path))
  tiny.same(params, dict(run.variables['params']))


def test_learners(dense, images):
  run = mod_jax.route(dense, 'acm', num_learners=2, replace=(FFNS,))
  choices = stack.collect(run.apply(images).aux, 'adaptive')
  assert choices['block_0/mlp'].learners_BL.max() <= 2
  kept = trees.flatten(run.variables['params'])['head/kernel']
  np.testing.assert_array_equal(
    kept, dense.variables['params']['head']['kernel']
  )
