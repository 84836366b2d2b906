"""Conversion of a dense language model, beside its predictions."""

import dataclasses
import logging
import pathlib
import re

from absl import logging as absl_logging
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import config as config_lib
from mod_jax import flops, trees
from mod_jax.data import text
from mod_jax.layers.mode import Mode
from mod_jax.studies import conversion
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ConversionObjective
from mod_jax.train import evaluation

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
CONVERT = config_lib.load(ROOT / 'configs' / 'lm' / 'convert.py')
SMALL = tiny.SMALL | {'train.batch_size': 4}


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  """Returns the directory of a dense model."""
  folder = tmp_path_factory.mktemp('dense')
  config = config_lib.replace(CONVERT.get_config('half'), SMALL)
  tiny.export_dense(config, folder)
  return folder


def build(variant, dense, **changes):
  """Returns a config as `train.py` makes it of the command line."""
  config = config_lib.replace(
    CONVERT.get_config(variant), SMALL | {'init': str(dense), **changes}
  )
  return CONVERT.complete(config)


def start(config):
  task = make_task(config)
  fresh = dict(nn.unbox(jax.jit(task.init)(jax.random.key(1))))
  params, state = task.start(fresh.pop('params'), fresh, config.init)
  return task, jax.tree.map(jnp.asarray, params), state


def test_a_model_that_is_still_the_dense_one_learns_nothing_from_it(dense):
  routing = {'model.routing.capacity': 1.0, 'model.routing.router_std': 0.0}
  config = build('distilled', dense, **routing)
  config = config_lib.replace(config, {'train.capacity_warmup_steps': 0})
  task, params, state = start(config)
  # The router starts at zero, so that the gate is 1.
  params = trees.unflatten(
    {
      name: jnp.zeros_like(x) if 'router' in name else x
      for name, x in trees.flatten(params).items()
    }
  )
  batch = next(task.modality.train_iterator())
  # Read now: the loop would place array by array.
  teacher = jax.tree.map(np.asarray, task.teacher(None))
  key = jax.random.key(0)
  _, (sums, _) = loss_of(task)(params, state, batch, key, 1.0, teacher)
  total, count = sums['distillation']
  assert abs(total / count) < 1e-5
  # The loss is that of the plain task, whose logits never all exist.
  plain = make_task(dataclasses.replace(config, objective=None))
  _, (plain_sums, _) = loss_of(plain)(params, state, batch, key, 1.0)
  np.testing.assert_allclose(sums['loss'][0], plain_sums['loss'][0], rtol=1e-5)

  # With fewer tokens it is another model, and the divergence is added.
  changed = config_lib.replace(
    dataclasses.replace(
      config, objective=ConversionObjective(distillation=3.0)
    ),
    {'model.routing.capacity': 0.25},
  )
  task = make_task(changed)
  value, (sums, _) = loss_of(task)(params, state, batch, key, 0.25, teacher)
  plain = make_task(dataclasses.replace(changed, objective=None))
  alone, _ = loss_of(plain)(params, state, batch, key, 0.25)
  total, count = sums['distillation']
  assert total / count > 1e-6
  np.testing.assert_allclose(value, alone + 3 * total / count, rtol=1e-5)
  assert task.flops_per_step(0.25) > plain.flops_per_step(0.25)


def loss_of(task):
  return jax.jit(task.loss, static_argnums=4)


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({}, ''),
    (
      {'model.routing.router_norm': False, 'model.routing.router_std': 0.02},
      'router_norm=True',
    ),
    ({'train.capacity_warmup_steps': 0}, 'capacity_warmup_steps=0.2'),
  ],
)
def test_whether_it_begins_as_the_dense_model(dense, caplog, changes, reason):
  config = build('', dense, **changes, **{'evaluation.batch_size': 4})
  task, params, state = start(config)
  params = trees.unflatten(
    {
      # Features are of a large norm, as in pretrained models.
      name: 300 * x if re.search('embedding|out/|down/', name) else x
      for name, x in trees.flatten(params).items()
    }
  )
  mesh = tiny.one_device()
  absl_logging.use_python_logging(quiet=True)
  with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger='absl'):
    said = task.beginning(params, state, mesh)
  now, before = map(float, re.findall(r'\d+\.\d+', said))
  of_dense = conversion._held_out(
    task, config.model.dense_twin(), {'params': params}, Mode()
  )
  assert before == pytest.approx(of_dense['loss'], abs=1e-3)
  assert (abs(now - before) > 0.05) == bool(reason)
  assert ('does not begin as the dense one' in caplog.text) == bool(reason)
  assert reason in caplog.text


def test_nothing_is_compared_where_no_loss_is_measured(dense, monkeypatch):
  task = make_task(build('', dense))
  monkeypatch.setattr(evaluation, 'held_out', lambda *args, **_: {})
  assert task.beginning({}, {}, None) == ''


def test_epochs_of_a_text(dense, tmp_path):
  epochs = {'train.num_epochs': 1.5, 'data.max_epochs': 1.0}
  config = build('', dense, **epochs)
  ((_, run),) = phases.expand(config, tmp_path)
  tokens = text.num_train_tokens(config.data)
  assert run.train.num_steps == int(1.5 * tokens / (4 * 16))
  assert run.data.max_epochs == 1.5


def test_a_run_says_what_it_begins_with(dense, tmp_path, capsys):
  sizes = {'train.batch_size': 8, 'evaluation.batch_size': 8}
  phases.train(build('', dense, **sizes), tmp_path, max_steps=0)
  assert 'begins with a held-out loss of' in capsys.readouterr().err


def test_the_study_sets_the_routed_model_beside_the_dense_one(
  dense, monkeypatch
):
  monkeypatch.setattr(conversion, '_BATCHES', 2)
  monkeypatch.setattr(conversion, '_ROUNDS', 2)
  routing = {
    'model.routing.router_std': 0.0,
    'model.routing.router_loss': 0.01,
    'model.routing.threshold_decay': 0.0,
    'evaluation.batch_size': 4,
  }
  task, params, state = start(build('half', dense, **routing))
  study = task.studies()['conversion'](params, state, None)
  found = study.metrics
  rules = {'top_k', 'router', 'never'}
  assert found.keys() == {'dense', 'all tokens'} | rules
  # The gate is 1 at first, and nobody is left out.
  every = found['all tokens']
  for name in ('loss', 'bits_per_byte'):
    assert every[name] == pytest.approx(found['dense'][name], rel=1e-6)
  mesh = tiny.one_device()
  with jax.set_mesh(mesh):
    held_out = evaluation.held_out(task, params, state, mesh, batches=2)
  for rule in rules:
    expected = held_out[f'{rule}/loss']
    assert found[rule]['loss'] == pytest.approx(expected, rel=1e-5)
  assert found['dense']['loss'] != pytest.approx(found['top_k']['loss'])
  of_dense = flops.forward(task.config.model, 16) / flops.forward(
    task.config.model.dense_twin(), 16
  )
  assert found['router']['flops'] == found['top_k']['flops'] == of_dense < 1
  assert found['dense']['flops'] == 1 < every['flops'] < 1.01
  decoding = {n for n, row in found.items() if 'tokens_per_second' in row}
  assert decoding == {'dense', 'router'}
  assert len(study.text.splitlines()) == 1 + len(found) + 1
