"""LV-ViT's stem against convolutions in numpy; the frozen norms of a ResNet."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax.layers.resnet import FrozenNorm
from mod_jax.layers.stem import ConvStem, ConvStemConfig

CONFIG = ConvStemConfig(width=4, depth=3)
SIZE = 10


X_BHWC = jax.random.normal(jax.random.key(1), (2, SIZE, SIZE, 3))
VARIABLES = tiny.drawn(
  nn.unbox(jax.eval_shape(ConvStem(CONFIG).init, jax.random.key(0), X_BHWC))
)


def convolve(x_BHWC, kernel, stride):
  """Pads alike on all sides, so that windows are centred."""
  size = kernel.shape[0]
  pad = size // 2
  x_BHWC = np.pad(x_BHWC, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  side = (x_BHWC.shape[1] - size) // stride + 1
  out = np.zeros((x_BHWC.shape[0], side, side, kernel.shape[-1]))
  for i, j in np.ndindex(side, side):
    i0, j0 = i * stride, j * stride
    window = x_BHWC[:, i0 : i0 + size, j0 : j0 + size]
    out[:, i, j] = np.tensordot(window, kernel, 3)
  return out


def oracle(variables, x_BHWC, moments=None, halvings=1):
  """Returns the output, and the moments of each layer before the norm."""
  variables = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
  params, told = variables['params'], []
  x = np.asarray(x_BHWC, np.float64)
  for i in range(CONFIG.depth):
    x = convolve(x, params[f'conv_{i}']['kernel'], 1 + (i < halvings))
    told.append((x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))))
    stats = variables['batch_stats'][f'norm_{i}']
    mean, var = (
      told[-1] if moments == 'batch' else (stats['mean'], stats['var'])
    )
    norm = params[f'norm_{i}']
    x = (x - mean) / np.sqrt(var + 1e-5) * norm['scale'] + norm['bias']
    x = np.maximum(x, 0)
  return x, told


@pytest.mark.parametrize(('halvings', 'side'), [(1, 5), (2, 3)])
def test_is_the_oracle_with_running_moments(halvings, side):
  config = dataclasses.replace(CONFIG, halvings=halvings)
  out = tiny.apply(ConvStem(config), VARIABLES, X_BHWC)
  want, _ = oracle(VARIABLES, X_BHWC, halvings=halvings)
  assert out.shape == (2, side, side, 4)
  assert 0 < (want == 0).mean() < 1
  np.testing.assert_allclose(out, want, atol=1e-4)


def test_training_uses_and_notes_the_batch_s_moments():
  out, after = tiny.apply(
    ConvStem(CONFIG, train=True), VARIABLES, X_BHWC, mutable='batch_stats'
  )
  want, moments = oracle(VARIABLES, X_BHWC, 'batch')
  np.testing.assert_allclose(out, want, atol=1e-3)
  for i, (mean, var) in enumerate(moments):
    before = VARIABLES['batch_stats'][f'norm_{i}']
    noted = after['batch_stats'][f'norm_{i}']
    for name, value in (('mean', mean), ('var', var)):
      np.testing.assert_allclose(
        noted[name], 0.9 * before[name] + 0.1 * value, atol=1e-4, rtol=1e-4
      )


def test_flops_of_an_oblong_picture():
  twice = dataclasses.replace(CONFIG, halvings=2)
  assert twice.stride == 4
  products = 6 * 10 * 7 * 7 * 3 * 4 + 2 * 3 * 5 * 3 * 3 * 4 * 4
  assert twice.flops(12, 20) == 2 * products


def test_a_frozen_norm_in_bfloat16_rounds_only_its_result():
  """Channels with means far from 0 leave little of two large terms."""
  x_BHWC = 10 + X_BHWC.astype('bfloat16')
  norm = FrozenNorm(dtype='bfloat16')
  moments = {'scale': 1.1, 'bias': 0.3, 'mean': 10.0, 'var': 0.7}
  of_channels = {name: jnp.float32([x] * 3) for name, x in moments.items()}
  y_BHWC = norm.apply({'batch_stats': of_channels}, x_BHWC)
  assert y_BHWC.dtype == jnp.bfloat16
  expected = (np.float64(x_BHWC) - 10) / np.sqrt(0.7 + 1e-5) * 1.1 + 0.3
  np.testing.assert_allclose(
    np.float64(y_BHWC), expected, rtol=2.0**-8, atol=1e-5
  )
