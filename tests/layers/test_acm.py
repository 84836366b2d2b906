"""Adaptive modules: learners against numpy, gates against fixed choices."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mod_jax.layers import acm
from mod_jax.layers.acm import ACM, ACMConfig

B, L, N = 2, 7, 3
FFN = ACMConfig(inputs=6, outputs=5, hidden=4, num_learners=N, min_learners=0)
PROJECTION = dataclasses.replace(FFN, min_learners=1, activation='linear')
CONFIGS = {'ffn': FFN, 'projection': PROJECTION}
CASES = [
  (name, k)
  for name, config in CONFIGS.items()
  for k in range(config.min_learners, N + 1)
]


def inputs():
  rng = np.random.default_rng(1)
  return rng.normal(size=(B, L, 6)).astype(np.float32)


@functools.cache
def parameters(config):
  """Returns parameters large enough to tell everything apart."""
  shapes = nn.unbox(
    jax.eval_shape(
      lambda: ACM(config).init(jax.random.key(0), jnp.zeros((1, 1, 6)))
    )
  )['params']
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )


@functools.partial(jax.jit, static_argnames=('config', 'mode', 'dtype'))
def run(config, mode, params, z_BLD, key=None, dtype='float32'):
  rngs = {} if key is None else {'gumbel': key}
  return ACM(config, mode, dtype=dtype).apply(
    {'params': params}, z_BLD, rngs=rngs
  )


def always(config, params, k):
  """Returns parameters whose gate says k, whatever it sees."""
  bias = np.full(config.num_choices, -100.0, np.float32)
  bias[k - config.min_learners] = 100
  logits = {
    'kernel': np.zeros_like(params['gate']['logits']['kernel']),
    'bias': bias,
  }
  return params | {'gate': params['gate'] | {'logits': logits}}


def oracle(config, params, z_BLD, k_BL):
  y_BLD = np.zeros((*z_BLD.shape[:2], config.outputs))
  for b, t in np.ndindex(*z_BLD.shape[:2]):
    for n in range(k_BL[b, t]):
      hidden = z_BLD[b, t] @ params['up'][n] + params['bias'][n]
      if config.activation == 'gelu':
        hidden = hidden * (1 + scipy.special.erf(hidden / np.sqrt(2))) / 2
      y_BLD[b, t] += hidden @ params['down'][n]
  return y_BLD


@pytest.mark.parametrize('name', CONFIGS)
@pytest.mark.parametrize('mode', ['gated', 'train'])
def test_is_the_sum_of_the_first_learners(name, mode):
  config, z_BLD = CONFIGS[name], inputs()
  params = parameters(config)
  y_BLD, choice = run(config, mode, params, z_BLD, jax.random.key(3))
  k_BL = np.asarray(choice.learners_BL)
  assert len(np.unique(k_BL)) > 1
  want_BLD = oracle(config, params, z_BLD, k_BL)
  np.testing.assert_allclose(y_BLD, want_BLD, atol=1e-4)
  best_BL = config.min_learners + choice.logits_BLM.argmax(axis=-1)
  if mode == 'gated':
    np.testing.assert_array_equal(k_BL, best_BL)
    return
  drawn_BL = config.min_learners + choice.one_hot_BLM.argmax(axis=-1)
  np.testing.assert_array_equal(k_BL, drawn_BL)
  assert set(np.unique(choice.one_hot_BLM)) == {0, 1}
  assert (k_BL != best_BL).any()  # Noise, and not the gate alone.


@pytest.mark.parametrize('name', CONFIGS)
def test_all_are_the_sums_of_the_first_learners(name):
  config, z_BLD = CONFIGS[name], inputs()
  params = parameters(config)
  sums_KBLD, _ = run(config, 'all', params, z_BLD)
  for k, y_BLD in enumerate(sums_KBLD):
    want_BLD = oracle(config, params, z_BLD, np.full((B, L), k))
    np.testing.assert_allclose(y_BLD, want_BLD, atol=1e-4)
  assert np.abs(np.diff(sums_KBLD, axis=0)).max(axis=(1, 2, 3)).min() > 0.1


@pytest.mark.parametrize(('name', 'k'), CASES)
def test_a_constant_gate_is_a_fixed_number(name, k):
  config, z_BLD = CONFIGS[name], inputs()
  params = always(config, parameters(config), k)
  want_BLD = run(config, 'all', params, z_BLD)[0][k]
  for mode in ('gated', k, 'train'):
    y_BLD, choice = run(config, mode, params, z_BLD, jax.random.key(0))
    assert (choice.learners_BL == k).all()
    np.testing.assert_allclose(y_BLD, want_BLD, atol=1e-5)


class TestGradients:
  @pytest.mark.parametrize('name', CONFIGS)
  def test_those_that_run_are_trained_and_the_gate_is(self, name):
    config = CONFIGS[name]

    def loss(params, k):
      constant = nn.one_hot(k - config.min_learners, config.num_choices)
      logits = params['gate']['logits']
      # Sure enough that the noise does not matter, soft enough for a slope.
      logits = {
        'kernel': logits['kernel'] * 0.01,
        'bias': 20.0 * constant + 0.01 * logits['bias'],
      }
      params = params | {'gate': params['gate'] | {'logits': logits}}
      y_BLD, choice = ACM(config, mode='train').apply(
        {'params': params}, inputs(), rngs={'gumbel': jax.random.key(0)}
      )
      return (y_BLD**2).mean(), choice

    grad = jax.jit(jax.grad(loss, has_aux=True))
    for k in (config.min_learners, 2, N):
      grads, choice = grad(parameters(config), k)
      assert (choice.learners_BL == k).all()
      size_N = np.abs(grads['down']).max(axis=(1, 2))
      assert (size_N[:k] > 0).all()
      assert not size_N[k:].any()

  @pytest.mark.parametrize('name', CONFIGS)
  def test_the_task_loss_reaches_the_gate(self, name):
    config = CONFIGS[name]

    def loss(params):
      y_BLD, _ = ACM(config, mode='train').apply(
        {'params': params}, inputs(), rngs={'gumbel': jax.random.key(0)}
      )
      return (y_BLD**2).mean()

    grads = jax.jit(jax.grad(loss))(parameters(config))
    for layer in ('hidden', 'logits'):
      for part in ('kernel', 'bias'):
        grad = grads['gate'][layer][part]
        assert jnp.isfinite(grad).all()
        assert 1e-3 < jnp.abs(grad).max() < 1e3
    # Of a softmax: what one choice gains the others lose.
    assert jnp.abs(grads['gate']['logits']['bias'].sum()) < 1e-4


def test_a_gate_multiplies_in_full_precision(equations):
  gate = acm.Gate(FFN)
  jaxpr = jax.make_jaxpr(gate.init)(jax.random.key(0), jnp.zeros((1, 1, 6)))
  products = [
    e.params['precision']
    for e in equations(jaxpr.jaxpr)
    if e.primitive.name == 'dot_general'
  ]
  assert products == [(jax.lax.Precision.HIGHEST,) * 2] * 2


def test_choices_are_drawn_from_the_softmax_of_the_logits():
  params = always(PROJECTION, parameters(PROJECTION), 1)
  logits = np.array([0.5, -0.5, 1.0], np.float32)
  params['gate']['logits']['bias'] = logits
  z_BLD = jnp.zeros((40, 100, 6))
  _, choice = run(PROJECTION, 'train', params, z_BLD, jax.random.key(0))
  share_M = np.asarray(choice.one_hot_BLM).mean(axis=(0, 1))
  want_M = np.exp(logits) / np.exp(logits).sum()
  np.testing.assert_allclose(share_M, want_M, atol=0.03)


def test_training_without_noise_is_inference_that_the_gate_learns_from():
  params, z_BLD = parameters(FFN), inputs()
  module = ACM(FFN, mode='train', noise=False)

  def apply(params):
    y_BLD, choice = module.apply({'params': params}, z_BLD)
    return jnp.sum(y_BLD**2), (y_BLD, choice)

  grads, (y_BLD, choice) = jax.jit(jax.grad(apply, has_aux=True))(params)
  gated_BLD, gated = run(FFN, 'gated', params, z_BLD)
  np.testing.assert_array_equal(choice.learners_BL, gated.learners_BL)
  np.testing.assert_allclose(y_BLD, gated_BLD, atol=1e-4)
  assert jnp.abs(grads['gate']['logits']['bias']).max() > 1e-3


@pytest.mark.parametrize(
  ('choice', 'least', 'weights'),
  [
    ([0, 1, 0, 0], 0, [1, 0, 0]),
    ([0.1, 0.2, 0.3, 0.4], 0, [0.9, 0.7, 0.4]),
    ([0.2, 0.3, 0.5], 1, [1.0, 0.8, 0.5]),
  ],
)
def test_runs_by_hand(choice, least, weights):
  config = dataclasses.replace(FFN, min_learners=least)
  found_BLN = acm.runs(jnp.array([[choice]]), config)
  np.testing.assert_allclose(found_BLN, [[weights]], atol=1e-6)


@pytest.mark.parametrize('mode', ['gated', 'train'])
def test_computes_in_the_type_that_is_asked_for(mode):
  params = always(FFN, parameters(FFN), 2)
  key = jax.random.key(0)
  y, choice = run(FFN, mode, params, inputs(), key, dtype='bfloat16')
  want, _ = run(FFN, mode, params, inputs(), key)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(y.astype(np.float32), want, atol=0.3, rtol=0.03)
  assert choice.logits_BLM.dtype == jnp.float32
