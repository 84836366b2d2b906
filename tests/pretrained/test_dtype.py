"""Weights of half the size: `load(…, dtype='bfloat16')`."""

import pathlib

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mod_jax
from mod_jax import trees
from mod_jax.errors import UserError
from mod_jax.scripts import serve

MODEL = pathlib.Path(__file__).parents[1] / 'golden' / 'lm_eval' / 'model'
TOKENS = jnp.arange(24).reshape(2, 12)


def nbytes(run):
  return sum(x.nbytes for x in jax.tree.leaves(run.variables))


def test_half_the_bytes_and_nearly_the_same_logits():
  whole = mod_jax.load(MODEL)
  half = mod_jax.load(MODEL, dtype='bfloat16')
  assert whole.config.dtype == 'float32'
  assert half.config.dtype == half.experiment.model.dtype == 'bfloat16'
  assert nbytes(half) < 0.51 * nbytes(whole)
  for name, x in trees.by_path(half.variables['params']).items():
    assert x.dtype == ('float32' if 'norm' in name else 'bfloat16'), name
  expected, logits = (
    np.asarray(run.apply(TOKENS).logits_BLV) for run in (whole, half)
  )
  error = np.abs(logits - expected).max() / np.abs(expected).max()
  assert 0 < error < 0.03


def test_float32_overrides_the_config(tmp_path):
  mod_jax.export(mod_jax.load(MODEL, dtype='bfloat16'), tmp_path / 'out')
  assert mod_jax.load(tmp_path / 'out').config.dtype == 'bfloat16'
  again = mod_jax.load(tmp_path / 'out', dtype='float32')
  assert again.config.dtype == 'float32'
  leaves = jax.tree.leaves(again.variables)
  assert all(x.dtype == 'float32' for x in leaves)


def test_routers_stay_float32(tmp_path):
  run = mod_jax.route(MODEL, 'mod', predictor_width=8)
  mod_jax.export(run, tmp_path / 'out')
  half = mod_jax.load(tmp_path / 'out', dtype='bfloat16')
  names = trees.by_path(half.variables['params'])
  routers = {n: x for n, x in names.items() if 'router' in n or 'predict' in n}
  assert routers
  assert all(x.dtype == 'float32' for x in routers.values())
  assert np.isfinite(half.apply(TOKENS).logits_BLV).all()


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


def test_other_types_are_refused():
  with pytest.raises(UserError, match="dtype='int8'.*bfloat16"):
    mod_jax.load(MODEL, dtype='int8')
