"""The optimiser: the run's schedule, what decays, and clipping."""

import dataclasses
import math

from flax import linen as nn
import flax.traverse_util
import jax
import numpy as np
import pytest

from mod_jax.errors import UserError
from mod_jax.layers.mod import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.train import optimizer as optimizer_lib
from mod_jax.train.optimizer import OptimizerConfig


def test_warmup_and_cosine_fill_the_run():
  config = OptimizerConfig(
    learning_rate=2.0, warmup_steps=10, final_fraction=0.25
  )
  rate = optimizer_lib.schedule(config, 50)
  assert float(rate(0)) == 0
  np.testing.assert_allclose(rate(5), 1.0, rtol=1e-6)
  np.testing.assert_allclose(rate(10), 2.0, rtol=1e-6)
  np.testing.assert_allclose(rate(30), (2.0 + 0.5) / 2, rtol=1e-6)
  # Steps are counted from 0: the last of 50 is 49, one short of the end.
  last = 0.5 + 1.5 * (1 + math.cos(math.pi * 39 / 40)) / 2
  np.testing.assert_allclose(rate(49), last, rtol=1e-5)
  np.testing.assert_allclose(rate(50), 0.5, rtol=1e-6)
  rates = [float(rate(step)) for step in range(51)]
  assert rates[:11] == sorted(rates[:11])
  assert rates[10:] == sorted(rates[10:], reverse=True)


def test_no_warmup_begins_at_the_peak():
  rate = optimizer_lib.schedule(
    OptimizerConfig(learning_rate=2.0, warmup_steps=0), 10
  )
  assert float(rate(0)) == 2.0
  np.testing.assert_allclose(rate(10), 0.2, rtol=1e-6)


@pytest.mark.parametrize('num_steps', [20, 19, 1])
def test_a_warmup_as_long_as_the_run_is_refused(num_steps):
  config = OptimizerConfig(warmup_steps=20)
  with pytest.raises(UserError, match=rf'warmup_steps=20 .* {num_steps} steps'):
    optimizer_lib.make_optimizer(config, num_steps)
  optimizer_lib.make_optimizer(config, 21)


@pytest.mark.parametrize(
  'field',
  [
    {'learning_rate': 0.0},
    {'learning_rate': -1.0},
    {'epsilon': 0.0},
    {'beta1': 1.5},
    {'beta2': -0.1},
    {'final_fraction': 2.0},
    {'warmup_steps': -1},
    {'weight_decay': -0.1},
    {'clip_norm': -1.0},
    {'clip_norm': math.nan},
  ],
)
def test_bad_settings_are_named(field):
  (name,) = field
  with pytest.raises(UserError, match=name):
    OptimizerConfig(**field)


def test_updates_follow_the_schedule():
  config = OptimizerConfig(
    learning_rate=0.5, warmup_steps=3, weight_decay=0.0, clip_norm=0.0
  )
  optimizer = optimizer_lib.make_optimizer(config, 8)
  rate = optimizer_lib.schedule(config, 8)
  params = {'layer': {'kernel': np.ones(2, np.float32)}}
  state = optimizer.init(params)
  for step in range(8):
    # Adam divides a constant gradient by itself.
    updates, state = optimizer.update(params, state, params)
    np.testing.assert_allclose(
      updates['layer']['kernel'], -rate(step), rtol=1e-4, atol=1e-7
    )


def model_params(**changes):
  """Parameters of ones, shaped as a model's that has everything."""
  routing = MoDConfig(predictor_width=8)
  config = LMConfig(
    num_layers=4,
    width=16,
    num_heads=2,
    mlp_dim=8,
    tied_head=False,
    routing=routing,
  )
  config = dataclasses.replace(config, **changes)
  shapes = jax.eval_shape(
    config.build().init, jax.random.key(0), np.zeros((1, 2), np.int32)
  )
  return jax.tree.map(
    lambda x: np.ones(x.shape, x.dtype), nn.unbox(shapes['params'])
  )


@pytest.mark.parametrize('scan_layers', [False, True])
def test_weight_decay_spares_norms_routers_and_biases(scan_layers):
  config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.25)
  optimizer = optimizer_lib.make_optimizer(config, 10)
  params = model_params(scan_layers=scan_layers)
  zeros = jax.tree.map(np.zeros_like, params)
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  decayed, spared = set(), set()
  for path, update in flax.traverse_util.flatten_dict(updates).items():
    name = '/'.join(path)
    if np.all(np.asarray(update) == 0):
      spared.add(name)
    else:
      np.testing.assert_allclose(update, -0.5 * 0.25)
      decayed.add(name)
  routed = 'layers/block_1' if scan_layers else 'block_3'
  dense = 'layers/block_0' if scan_layers else 'block_2'
  kernels = ('attention/query', 'attention/out', 'mlp/gate', 'mlp/down')
  assert decayed >= {
    'embedding',
    'head/kernel',
    f'{routed}/predictor/hidden/kernel',
    *(f'{block}/{k}/kernel' for block in (routed, dense) for k in kernels),
  }
  assert spared >= {
    'norm/scale',
    f'{dense}/attention_norm/scale',
    f'{routed}/mlp_norm/scale',
    f'{routed}/router/kernel',
    f'{routed}/predictor/hidden/bias',
  }
  for name in decayed:
    assert name.split('/')[-1] in ('kernel', 'embedding')
    assert 'router' not in name
  for name in spared:
    assert name.endswith(('/scale', '/bias', 'router/kernel'))


class TestClipping:
  # Adam would divide the clipped norm away, unless its epsilon is large: the
  # update is then nearly proportional to the gradient.
  CONFIG = OptimizerConfig(
    learning_rate=1.0,
    warmup_steps=0,
    weight_decay=0.0,
    epsilon=1e6,
    clip_norm=1.0,
  )
  GRADS = {
    'a': {'kernel': np.array([3.0], np.float32)},
    'b': {'scale': np.array([4.0], np.float32)},
    'predictor': {'kernel': np.array([120.0], np.float32)},
  }

  def clipped(self, grads=None, **changes):
    """Returns the gradients as Adam sees them."""
    config = dataclasses.replace(self.CONFIG, **changes)
    optimizer = optimizer_lib.make_optimizer(config, 10)
    grads = self.GRADS if grads is None else grads
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    return {
      path[0]: float(-update[0] * config.epsilon)
      for path, update in flax.traverse_util.flatten_dict(updates).items()
    }

  def test_by_the_global_norm_and_the_predictor_apart(self):
    assert self.clipped() == pytest.approx(
      {'a': 0.6, 'b': 0.8, 'predictor': 1.0}, rel=1e-3
    )

  def test_below_the_limit_nothing_changes(self):
    assert self.clipped(clip_norm=50.0) == pytest.approx(
      {'a': 3.0, 'b': 4.0, 'predictor': 50.0}, rel=1e-3
    )

  def test_zero_is_off(self):
    assert self.clipped(clip_norm=0.0) == pytest.approx(
      {'a': 3.0, 'b': 4.0, 'predictor': 120.0}, rel=1e-3
    )

  def test_without_a_predictor(self):
    grads = {k: v for k, v in self.GRADS.items() if k != 'predictor'}
    assert self.clipped(grads) == pytest.approx({'a': 0.6, 'b': 0.8}, rel=1e-3)
