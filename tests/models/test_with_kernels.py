"""Models give the same with and without kernels, and keep no large array."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import acm
from mod_jax_kernels import dispatch

pytestmark = pytest.mark.slow

DENSE = dataclasses.replace(tiny.VIT, image_size=12, patch_size=4, width=32)
MODELS = {
  'amod': dataclasses.replace(DENSE, routing=VisionRoutingConfig(capacity=0.5)),
  'acm': dataclasses.replace(DENSE, adaptive=AdaptiveConfig(replace=(FFNS,))),
}


@functools.cache
def variables(name):
  return tiny.variables(MODELS[name], gain=2.0)


def forward(name):
  # A function of its own, since a trace depends on what is interpreted.
  run = jax.jit(lambda *args: MODELS[name].build().apply(*args))
  output = run(variables(name), tiny.images(size=12))
  if name == 'acm':
    choices = stack.collect(output.aux, 'adaptive').values()
    chosen = [choice.learners_BL for choice in choices]
    assert len(np.unique(np.concatenate(chosen))) > 2
  return np.asarray(output.logits_BV)


expected = functools.cache(forward)


@pytest.mark.parametrize('backend', ['pallas', 'triton'])
@pytest.mark.parametrize('name', MODELS)
def test_logits_are_the_same(name, backend):
  if dispatch.missing(backend):
    pytest.skip(f'{dispatch.missing(backend)} is not installed')
  want = expected(name)
  with dispatch.interpret(backend):
    got = forward(name)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


_MAP = re.compile(r'\b197x197x|x197x197')


class TestLargeArrays:
  """On GPU and TPU, attention that scores keeps no map of it."""

  MODEL = dataclasses.replace(
    tiny.VIT,
    image_size=56,
    patch_size=4,
    width=64,
    routing=VisionRoutingConfig(capacity=0.5),
  )

  ARGS = (tiny.shapes(MODEL), jax.ShapeDtypeStruct((2, 56, 56, 3), jnp.float32))

  def gradient(self, variables, image):
    def loss(variables):
      return self.MODEL.build().apply(variables, image).logits_BV.sum()

    return jax.grad(loss)(variables)

  def test_of_amod_on_a_tpu(self):
    assert self.MODEL.num_tokens == 197
    assert _MAP.search(lowered('cpu', self.gradient, *self.ARGS))
    text = lowered('tpu', self.gradient, *self.ARGS)
    assert 'tpu_custom_call' in text
    assert not _MAP.search(text)

  def test_of_amod_on_a_gpu(self, for_hopper):
    text = for_hopper(self.gradient, *self.ARGS)
    assert 'triton_kernel_call' in text
    assert not _MAP.search(text)


def lowered(platform, function, *args):
  traced = jax.jit(function).trace(*args)
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize('platform', ['cpu', 'tpu', 'gpu'])
def test_gated_inference_multiplies_no_token_by_all_learners(platform, request):
  model = MODELS['acm']
  lower = functools.partial(lowered, platform)
  if platform == 'gpu':
    lower = request.getfixturevalue('for_hopper')

  def products(**kwargs):
    """Returns the numbers of elements that matrix products result in."""

    def run(variables, image):
      rngs = {'gumbel': jax.random.key(0)}
      return model.build(**kwargs).apply(variables, image, rngs=rngs).logits_BV

    text = lower(run, variables('acm'), tiny.images(size=12))
    shapes = re.findall(r'dot_general.*-> tensor<([\dx]+)xf32>', text)
    return [math.prod(map(int, shape.split('x'))) for shape in shapes]

  module = acm.modules(model)['block_0/mlp']
  all_learners = 2 * DENSE.num_tokens * module.num_learners * module.hidden
  assert all_learners in products(learners='train')
  assert all_learners not in products()
