"""The same logits as PyTorch, from its weights, and back again.

`tools/golden/make_wav2vec2.py` wrote what is compared with.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import flops
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import files
from mod_jax.convert import wav2vec2 as convert
from mod_jax.models import wav2vec2

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'wav2vec2'
NAMES = ('group', 'layer', 'xlsr')
EXPECTED = dict(np.load(GOLDEN / 'expected.npz'))
WAVE, SAMPLES = EXPECTED['wave'], EXPECTED['samples']


def loaded(path, config):
  return arrays_lib.complete(convert.read(path, config), config)['params']


@functools.cache
def model(name):
  config = convert.derive(GOLDEN / name)
  return config, loaded(GOLDEN / name, config)


def valid(config):
  frames_B = config.frames(SAMPLES)
  return np.arange(config.frames(WAVE.shape[1])) < frames_B[:, None]


@functools.cache
def runner(name):
  config, params = model(name)

  @jax.jit
  def run(wave_BT, valid_BL):
    return config.build().apply({'params': params}, wave_BT, valid_BL)

  return run


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_pytorch(name):
  config, _ = model(name)
  real_BL = valid(config)
  masked = runner(name)(WAVE, real_BL).logits_BLV
  unmasked = runner(name)(WAVE, None).logits_BLV
  np.testing.assert_allclose(
    masked[real_BL], EXPECTED[f'{name}/masked'][real_BL], atol=1e-4
  )
  np.testing.assert_allclose(unmasked, EXPECTED[f'{name}/unmasked'], atol=1e-4)
  # Otherwise the mask would not be tested.
  assert np.abs(masked - unmasked)[real_BL].max() > 1e-2


def test_a_folded_position_convolution_is_read(tmp_path):
  config, params = model('group')
  arrays = files.read(GOLDEN / 'group')
  for name in [n for n in arrays if 'pos_conv_embed.conv.param' in n]:
    del arrays[name]
  kernel_KIO = np.asarray(params['position_conv']['kernel'])
  kernel = 'wav2vec2.encoder.pos_conv_embed.conv.weight'
  arrays[kernel] = kernel_KIO.transpose(2, 1, 0)
  files.write(tmp_path / 'folded.safetensors', arrays)
  again = loaded(tmp_path / 'folded.safetensors', config)
  jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_head_for_another_vocabulary_is_new():
  config = dataclasses.replace(convert.derive(GOLDEN / 'layer'), vocab_size=5)
  params = loaded(GOLDEN / 'layer', config)
  assert params['head']['kernel'].shape == (24, 5)
  np.testing.assert_array_equal(
    params['project']['kernel'], model('layer')[1]['project']['kernel']
  )


def test_moments_of_the_waveform_are_products_in_full_precision(equations):
  """Accelerators would round the factors of terms that nearly cancel."""
  norm = wav2vec2._ChannelNorm(1e-5)
  arrays = jnp.ones((1, 5, 2)), jnp.ones((1, 30)), jnp.ones((10, 2))
  jaxpr = jax.make_jaxpr(
    lambda *args: norm.init_with_output(jax.random.key(0), *args, 5)
  )(*arrays)
  products = {
    e.params['precision']
    for e in equations(jaxpr.jaxpr)
    if e.primitive.name == 'dot_general'
  }
  assert products == {(jax.lax.Precision.HIGHEST,) * 2}


def test_frames_are_those_of_the_published_formula():
  config = wav2vec2.base()
  samples = np.arange(400, 4000)
  np.testing.assert_array_equal(
    config.frames(samples), (samples - 400) // 320 + 1
  )
  assert config.samples(499) == 400 + 498 * 320


def test_flops_of_xlsr_are_the_published_ones():
  config = wav2vec2.xlsr_300m()
  frames = config.frames(10 * 16_000)
  table = config.flops_table(frames)
  total = flops.forward(config, frames)
  assert total / 2e9 == pytest.approx(191.9, rel=0.01)
  ffns = sum(parts.get('mlp', 0) for _, parts in table)
  assert ffns / total == pytest.approx(0.52, abs=0.01)
  assert flops.num_params(config) / 1e6 == pytest.approx(315.4, rel=0.001)


@pytest.mark.slow
def test_hidden_frames_become_one_vector():
  config, params = model('layer')
  masked_BL = (
    jnp.zeros((2, config.frames(WAVE.shape[1])), bool).at[:, 3].set(True)
  )
  run = config.build().apply
  hidden = run({'params': params}, WAVE, None, masked_BL).logits_BLV
  # The vector matters where frames are hidden, and only there.
  params = {**params, 'mask_embedding': params['mask_embedding'] + 1}
  other = run({'params': params}, WAVE, None, masked_BL).logits_BLV
  plain = run({'params': params}, WAVE).logits_BLV
  np.testing.assert_allclose(plain, EXPECTED['layer/unmasked'], atol=1e-4)
  assert np.abs(hidden - plain).max() > 1e-2
  assert np.abs(hidden - other).max() > 1e-2
