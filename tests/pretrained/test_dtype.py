"""Weights of half and of a quarter of the size: `load(…, dtype=…)`."""

import pathlib
import re

import command_line
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax
from mod_jax import sampling, trees
from mod_jax.errors import UserError
from mod_jax.layers.quantized import Quantized
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
from mod_jax.scripts import serve

MODEL = pathlib.Path(__file__).parents[1] / 'golden' / 'lm_eval' / 'model'
TOKENS = jnp.arange(24).reshape(2, 12)


def nbytes(run):
  return sum(x.nbytes for x in jax.tree.leaves(run.variables))


@pytest.fixture(scope='module')
def routed(tmp_path_factory):
  folder = tmp_path_factory.mktemp('routed')
  run = mod_jax.route(MODEL, 'mod', capacity=0.5, predictor_width=8)
  mod_jax.export(run, folder)
  return folder


def error_of(*runs):
  """Returns by how much logits differ, over the largest."""
  mode = {'mode': 'never'} if runs[0].config.routing else {}
  expected, logits = (
    np.asarray(run.apply(TOKENS, **mode).logits_BLV) for run in runs
  )
  return np.abs(logits - expected).max() / np.abs(expected).max()


def test_half_the_bytes_and_nearly_the_same_logits(routed, tmp_path):
  for path in (MODEL, routed):
    whole, half = (mod_jax.load(path, dtype=x) for x in (None, 'bfloat16'))
    assert whole.config.dtype == 'float32'
    assert half.config.dtype == half.experiment.model.dtype == 'bfloat16'
    assert nbytes(half) < 0.52 * nbytes(whole)
    for name, x in trees.by_path(half.variables['params']).items():
      kept = re.search('norm|router|predict', name)
      assert x.dtype == ('float32' if kept else 'bfloat16'), name
    assert 0 < error_of(whole, half) < 0.03
  mod_jax.export(half, tmp_path)
  assert mod_jax.load(tmp_path).config.dtype == 'bfloat16'
  again = mod_jax.load(tmp_path, dtype='float32')
  assert again.config.dtype == 'float32'
  assert all(x.dtype == 'float32' for x in jax.tree.leaves(again.variables))


def test_the_server_takes_it(monkeypatch):
  asked = []

  def load(path, **kwargs):
    asked.append((path, kwargs))
    raise UserError('this is far enough')

  monkeypatch.setattr(serve.load_lib, 'load', load)
  argv = ['mod-jax-serve', '--model=here', '--dtype=bfloat16']
  monkeypatch.setattr('sys.argv', argv)
  command_line.assert_refused(command_line.call(serve.run), 'far enough')
  assert asked == [('here', {'dtype': 'bfloat16'})]


def test_a_quarter_of_the_bytes(routed):
  """In int8, also of routed blocks, in whole rows and token by token."""
  for path in (MODEL, routed):
    whole, small = mod_jax.load(path), mod_jax.load(path, dtype='int8')
    assert small.config == whole.config
    assert repr(small) == repr(whole)
    # And a scale for each output, of which so narrow a model has many.
    assert nbytes(small) < 0.35 * nbytes(whole)
    for name, x in trees.flatten(small.variables['params']).items():
      kept = re.search('norm|router|predict', name)
      assert isinstance(x, Quantized) != bool(kept), name
    assert 0 < error_of(whole, small) < 0.05
    loss, _ = small.apply(TOKENS, targets_BL=TOKENS).loss
    assert np.isfinite(loss)
  small = mod_jax.load(MODEL, dtype='int8')
  generated = sampling.generate(
    *(small.model, small.variables, TOKENS), max_new_tokens=4, temperature=0.0
  )
  row = jnp.concatenate([TOKENS, generated.tokens_BN], axis=1)
  best = small.apply(row).logits_BLV.argmax(-1)
  np.testing.assert_array_equal(best[:, -5:-1], generated.tokens_BN)


def test_scanned_layers_in_int8():
  """Each matrix has the scales that it would have alone."""
  config = lm.LMConfig(
    num_layers=4,
    width=16,
    num_heads=2,
    tied_head=False,
    routing=MoDConfig(capacity=0.5),
  )
  params = nn.unbox(config.build().init(jax.random.key(0), TOKENS))['params']
  scanned, stacked = lm.scanned(config, params)

  def rounded(config, params):
    flat, axes = trees.flatten(params), lm.matrices(config)
    assert set(axes) <= set(flat)
    return trees.unflatten(
      {n: Quantized.of(x, axes[n]) if n in axes else x for n, x in flat.items()}
    )

  def outputs(config, params):
    model = config.build()
    logits_BLV = model.apply({'params': params}, TOKENS).logits_BLV
    output = model.apply({'params': params}, TOKENS, targets_BL=TOKENS)
    return logits_BLV, output.loss[0] / output.loss[1]

  exact = outputs(config, params)
  alone = outputs(config, rounded(config, params))
  together = outputs(scanned, rounded(scanned, stacked))
  for x, y, z in zip(exact, alone, together, strict=True):
    # A feature between two integers may be rounded either way.
    np.testing.assert_allclose(y, z, atol=1e-3)
    np.testing.assert_allclose(x, y, atol=0.2)


def test_products_in_int8():
  keys = jax.random.split(jax.random.key(0), 2)
  x_BLI = (
    jax.random.normal(keys[0], (2, 3, 64))
    * jnp.array([1.0, 100])[:, None, None]
  )
  kernel_IO = jax.random.normal(keys[1], (64, 32)) * jnp.logspace(-3, 3, 32)
  rounded = Quantized.of(kernel_IO, (0,))
  np.testing.assert_allclose(
    rounded.astype(jnp.float32) / rounded.scale,
    kernel_IO.T / rounded.scale,
    atol=0.501,
  )
  y_BLO = rounded.product(x_BLI, jnp.float32)
  size_BLO = jnp.linalg.norm(x_BLI, axis=-1)[..., None] * jnp.linalg.norm(
    kernel_IO, axis=0
  )
  # Weights are rounded to a part in 254 of an output's largest one, features
  # to a part in 60,000 of a token's largest.
  for exact_IO, low, high in (
    (kernel_IO, 1e-4, 0.01),
    (rounded.T, 0, 2e-5),
  ):
    error_BLO = jnp.abs(y_BLO - x_BLI @ exact_IO)
    assert low < (error_BLO / size_BLO).max() < high
  # A token's features do not depend on those beside it.
  np.testing.assert_array_equal(
    rounded.product(x_BLI[1, 2], jnp.float32), y_BLO[1, 2]
  )
  # The matrix is neither widened nor copied.
  text = jax.jit(lambda q, x: q.product(x, 'float32')).lower(rounded, x_BLI)
  widened = re.findall(r's32\[(?:32,64|64,32)\]', text.compile().as_text())
  assert not widened


def test_int8_is_not_written_or_routed(tmp_path):
  small = mod_jax.load(MODEL, dtype='int8')
  for refused in (
    lambda: mod_jax.export(small, tmp_path / 'out'),
    lambda: mod_jax.route(small, 'mod'),
  ):
    with pytest.raises(UserError, match="dtype='int8'.*load the model again"):
      refused()
  assert not (tmp_path / 'out').exists()
