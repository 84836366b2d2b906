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


class TestLargeArrays:
  """On GPU and TPU, attention that scores keeps no map of it."""

  MODEL = dataclasses.replace(
    tiny.VIT,
    image_size=56,
    patch_size=4,
    width=64,
    routing=VisionRoutingConfig(capacity=0.5),
  )

  def gradient(self, variables, image):
    def loss(variables):
      return self.MODEL.build().apply(variables, image).logits_BV.sum()

    return jax.grad(loss)(variables)

  def arguments(self):
    assert self.MODEL.num_tokens == 197
    return (
      tiny.shapes(self.MODEL),
      jax.ShapeDtypeStruct((2, 56, 56, 3), jnp.float32),
    )

  def lower(self, platform):
    traced = jax.jit(self.gradient).trace(*self.arguments())
    return traced.lower(lowering_platforms=(platform,)).as_text()

  def test_of_amod_on_a_tpu(self):
    assert _MAP.search(self.lower('cpu'))
    text = self.lower('tpu')
    assert 'tpu_custom_call' in text
    assert not _MAP.search(text)

  def test_of_amod_on_a_gpu(self, for_hopper):
    text = for_hopper(self.gradient, *self.arguments())
    assert 'triton_kernel_call' in text
    assert not _MAP.search(text)


class TestProducts:
  """Gated inference multiplies no token by all learners."""

  def products(self, lower, **kwargs):
    """Returns the numbers of elements that matrix products result in."""
    model = MODELS['acm']
    image = jax.ShapeDtypeStruct((2, 12, 12, 3), jnp.float32)

    def run(variables, image):
      rngs = {'gumbel': jax.random.key(0)}
      return model.build(**kwargs).apply(variables, image, rngs=rngs).logits_BV

    text = lower(run, variables('acm'), image)
    shapes = re.findall(r'dot_general.*-> tensor<([\dx]+)xf32>', text)
    assert shapes
    return [math.prod(map(int, shape.split('x'))) for shape in shapes]

  def for_platform(self, platform):
    return lambda function, *args: (
      jax.jit(function)
      .trace(*args)
      .lower(lowering_platforms=(platform,))
      .as_text()
    )

  @property
  def all_learners(self):
    module = acm.modules(MODELS['acm'])['block_0/mlp']
    tokens = 2 * DENSE.num_tokens
    return tokens * module.num_learners * module.hidden

  @pytest.mark.parametrize('platform', ['cpu', 'tpu'])
  def test_on_cpu_and_tpu(self, platform):
    lower = self.for_platform(platform)
    assert self.all_learners in self.products(lower, learners='train')
    assert self.all_learners not in self.products(lower)

  def test_on_a_gpu(self, for_hopper):
    assert self.all_learners in self.products(for_hopper, learners='train')
    assert self.all_learners not in self.products(for_hopper)


_MAP = re.compile(r'\b197x197x|x197x197')
