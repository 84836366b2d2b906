"""Every config file builds, in every variant, and its `tiny` one trains."""

import functools
import importlib.util
import pathlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax import parallel
from mod_jax.errors import UserError
from mod_jax.train import evaluation
from mod_jax.train import loop
from mod_jax.train import metrics as metrics_lib
from mod_jax.train import optimizer as optimizer_lib
from mod_jax.train.experiment import ExperimentConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = sorted(
  str(p.relative_to(ROOT)) for p in (ROOT / 'configs').rglob('*.py')
)


@functools.cache
def load(file):
  spec = importlib.util.spec_from_file_location('a_config', ROOT / file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@functools.cache
def variants(file):
  """Returns the names that the file's table of variants has."""
  with pytest.MonkeyPatch.context() as patch:
    tables = []

    def choose(name, table, *args):
      tables.append(table)
      raise UserError('seen')

    patch.setattr(config_lib, 'choose', choose)
    with pytest.raises(UserError, match='seen'):
      load(file).get_config('no such variant')
  return tuple(tables[0])


CASES = [(file, variant) for file in FILES for variant in ('', *variants(file))]


def build(file, variant):
  config_dict = load(file).get_config(variant)
  return config_lib.from_config_dict(ExperimentConfig, config_dict)


def test_there_are_configs():
  assert 'configs/lm/mod.py' in FILES
  assert 'tiny' in variants('configs/lm/mod.py')


@pytest.mark.parametrize('file', FILES)
def test_variants(file):
  assert load(file).__doc__.strip()
  assert 'tiny' in variants(file)
  load(file).get_config()  # A file without a variant is the plain command.
  with pytest.raises(UserError, match="unknown variant 'tiney'.*'tiny'"):
    load(file).get_config('tiney')


@pytest.mark.parametrize(('file', 'variant'), CASES)
def test_builds(file, variant):
  config = build(file, variant)
  again = config_lib.from_json(ExperimentConfig, config_lib.to_json(config))
  assert again == config
  assert hash(again) == hash(config)
  optimizer_lib.make_optimizer(config.optimizer, config.train.num_steps)
  assert flops.forward(config.model, config.data.length) > 0
  assert config.train.batch_size % config.train.accumulation == 0


@pytest.mark.parametrize(('file', 'variant'), CASES)
def test_fits_its_mesh(file, variant):
  config = build(file, variant)
  sizes = [config.mesh.data, config.mesh.fsdp, config.mesh.tensor]
  # The rest of the devices: enough that the batch is really divided.
  sizes = tuple(2 if size == -1 else size for size in sizes)
  mesh = jax.sharding.AbstractMesh(sizes, parallel.MESH_AXES)
  rows = config.train.batch_size // config.train.accumulation
  parallel.check_batch(rows, mesh, 'batch_size')
  parallel.check_batch(config.evaluation.batch_size, mesh, 'batch_size')
  shapes = jax.eval_shape(
    lambda: config.model.build().init(
      {'params': jax.random.key(0), 'routing': jax.random.key(0)},
      jnp.zeros((1, 2), jnp.int32),
    )
  )
  placed = parallel.shardings(shapes, mesh)
  assert jax.tree.structure(placed) == jax.tree.structure(nn.unbox(shapes))


@pytest.mark.slow
@pytest.mark.parametrize('file', FILES)
def test_tiny_trains_and_evaluates(file, tmp_path, monkeypatch, capsys):
  make_mesh = parallel.make_mesh
  monkeypatch.setattr(
    parallel, 'make_mesh', lambda config: make_mesh(config, jax.devices()[:1])
  )
  config = build(file, 'tiny')
  result = loop.train(config, tmp_path, max_steps=2)
  assert result.step == 2
  lines = metrics_lib.read(tmp_path)
  assert [line['step'] for line in lines if line['kind'] == 'train'] == [1, 2]
  assert all(np.isfinite(line['loss']) for line in lines)
  trained = evaluation.load(tmp_path)
  metrics = evaluation.evaluate(trained, tmp_path, batches=1)
  assert all(np.isfinite(value) for value in metrics.values())
  assert 'held-out, at step 2' in capsys.readouterr().out
