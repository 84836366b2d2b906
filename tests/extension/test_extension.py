"""The promise: a new member of the family is one file, one config, one test."""

import dataclasses
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import cli, flops, tasks
from mod_jax import config as config_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers import stack
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.runs import metrics as metrics_lib
from mod_jax.sampling import generate
from mod_jax.serving.engine import Engine
from mod_jax.sweeps import manifest
from mod_jax.sweeps.manifest import Entry
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation, loop
import mod_jax_kernels
from mod_jax_kernels import dispatch

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(scope='module')
def family():
  """The module of the new members, as a package of somebody else's."""
  path = pathlib.Path(__file__).with_name('family.py')
  spec = importlib.util.spec_from_file_location('their_family', path)
  module = importlib.util.module_from_spec(spec)
  sys.modules['their_family'] = module  # Saved configs name it.
  spec.loader.exec_module(module)
  yield module
  del sys.modules['their_family']


TINY = {
  'train.num_steps': 4,
  'train.batch_size': 8,
  'evaluation.every': 0,
  'evaluation.batches': 1,
  'evaluation.final_batches': 2,
  'evaluation.batch_size': 8,
  'evaluation.sample_tokens': 0,
  'optimizer.learning_rate': 0.01,
  'optimizer.warmup_steps': 1,
  'log.tensorboard': False,
}


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  folder = tiny.texts(tmp_path_factory.mktemp('texts'), a=3000, b=3000, c=3000)
  return TextDataConfig(source='files', files=f'{folder}/*.txt', length=16)


def language(text, **model):
  sizes = {'num_layers': 2, 'width': 16, 'num_heads': 2, 'mlp_dim': 32}
  return tiny.experiment(LMConfig(**sizes | model), text, **TINY)


def check_run(config, workdir, train, load):
  """Trains, resumes, evaluates and draws; returns what was trained."""
  assert not train(config, workdir / 'run', max_steps=2).finished
  resumed = train(config, workdir / 'run')
  lines = metrics_lib.read(workdir / 'run')
  losses = [line['loss'] for line in lines if line['kind'] == 'train']
  assert len(losses) == 4
  assert losses[-1] < losses[0]
  trained = load(workdir / 'run')
  assert trained.step == 4
  with jax.set_mesh(trained.mesh):
    metrics = evaluation.held_out(
      *(trained.task, trained.params, trained.model_state, trained.mesh),
      batches=2,
    )
  assert metrics == pytest.approx(resumed.metrics, rel=1e-5)
  assert (workdir / 'run' / 'pictures' / 'curves.png').exists()
  return trained


_NORM = """
import dataclasses
import jax.numpy as jnp
from mod_jax.layers.scores import Score

@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncounted(Score):
  def run(self, module, x_BLD, info, capacity, attention_BL):
    return jnp.linalg.norm(x_BLD, axis=-1)

class Norm(Uncounted):
  def flops(self, length, width):
    return 2 * length * width
"""
_CONFIG = """
from mod_jax import config
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.tasks.experiment import ExperimentConfig
import norm_beside

def get_config():
  routing = MoDConfig(score=norm_beside.Norm(), router_loss=0.0)
  return ExperimentConfig(model=LMConfig(routing=routing))
"""


def test_a_score_beside_a_config_file(tmp_path):
  (tmp_path / 'norm_beside.py').write_text(_NORM)
  (tmp_path / 'mine.py').write_text(_CONFIG)
  config = cli.load_config(f'{tmp_path}/mine.py', ExperimentConfig)
  norm = sys.modules.pop('norm_beside')
  assert isinstance(config.model.routing.score, norm.Norm)
  assert flops.forward(config.model, 16) > 0
  # A cost of 0 must be said.
  with pytest.raises(TypeError, match='flops'):
    norm.Uncounted()
  # The manifest of a sweep says what is missing, and blames no version.
  told = {'id': 'a', 'group': 'mod', 'budget': 1e9, 'seed': 0, 'facts': {}}
  manifest.write(tmp_path, [Entry(config=config, **told)])
  with pytest.raises(
    UserError, match='--trust=norm_beside. If another version'
  ):
    manifest.read(tmp_path)


@pytest.mark.slow
def test_a_score_with_state_and_its_rule(family, text, tmp_path):
  routing = MoDConfig(
    capacity=0.25,
    score=family.ExpertThreshold(),
    train_rule=family.Above(),
    router_loss=0.0,
    train_slack=3.0,
  )
  config = language(text, routing=routing)
  again = config_lib.from_json(ExperimentConfig, config_lib.to_json(config))
  assert again == config
  trained = check_run(config, tmp_path, phases.train, tasks.load)
  # A training pass chooses by the rule, by a threshold that moves.
  tokens_BL = jnp.arange(64).reshape(4, 16) % 13 + 97
  batch = {'tokens': tokens_BL, 'targets': tokens_BL}
  batch['weights'] = jnp.ones((4, 16))
  forward = jax.jit(trained.task.forward, static_argnums=0)
  output, _ = forward(
    *(config.model, trained.params, trained.model_state, batch),
    jax.random.key(0),
  )
  (routed,) = output.routing
  np.testing.assert_array_equal(routed.chosen_BL, routed.score_BL > 0)
  assert routed.chosen_BL.any()
  assert not (routed.chosen_BL == routed.top_k_BL).all()
  assert float(trained.model_state['moving']['block_1']['expert']) != 0
  assert trained.task.modality.rules == ('top_k', 'above')
  # It decides token by token, so it can generate.
  assert trained.task.modality.sample(
    *(trained.params, trained.model_state, ['abc']),
    max_new_tokens=3,
    temperature=0.0,
  )


def test_a_rule_by_its_name(family):
  routing = MoDConfig(score=family.ExpertThreshold(), train_rule=family.Above())
  config = dataclasses.replace(tiny.LM, routing=routing)
  run = tiny.run(tiny.experiment(config))
  assert Engine(run, slots=1, mode='above').mode == config.decoding_mode
  by_name, by_rule = (
    generate(
      *(config.build(), run.variables, tiny.tokens(1)),
      max_new_tokens=2,
      mode=mode,
      temperature=0.0,
    )
    for mode in ('above', config.decoding_mode)
  )
  tiny.same(vars(by_name), vars(by_rule))


@pytest.mark.slow
def test_a_feed_forward(family, text, tmp_path):
  slot = family.Squared(width=16, hidden=24)
  config = language(text, feed_forward=slot, routing=MoDConfig(capacity=0.5))
  trained = check_run(config, tmp_path, phases.train, tasks.load)
  assert trained.params['block_0']['mlp']['up']['kernel'].shape == (16, 24)
  table = dict(config.model.flops_table(16))
  assert table['block_0']['squared'] == slot.flops(16)['squared']
  assert table['block_1 (routed)']['squared'] == slot.flops(8)['squared']
  tokens_BL = jnp.arange(32).reshape(2, 16)
  apply = jax.jit(config.model.build().apply)
  output = apply({'params': trained.params}, tokens_BL)
  told = stack.collect(output.aux, 'units_on')
  assert told['block_0/mlp'].shape == (2, 16)
  assert told['block_1/mlp'].shape == (2, 8)
  # Under a scan and rematerialisation it is the same model.
  scanned = config_lib.replace(
    config.model, {'scan_layers': True, 'remat': 'full'}
  )
  params = stack.scanned(scanned.stack, trained.params)
  same = jax.jit(scanned.build().apply)({'params': params}, tokens_BL)
  np.testing.assert_allclose(output.logits_BLV, same.logits_BLV, atol=1e-5)


def test_a_task(family, tmp_path):
  config = config_lib.replace(family.SeriesConfig(), TINY)

  def train(config, workdir, **kwargs):
    task = family.SeriesTask(config)
    return loop.train(task, config, workdir, **kwargs)

  def load(workdir):
    return evaluation.load(family.SeriesTask(config), workdir)

  trained = check_run(config, tmp_path, train, load)
  assert trained.task.summary({'rmse': 0.5}).endswith('0.5000')
  assert (tmp_path / 'run' / 'pictures' / 'series.png').exists()
  # What the loop promises to any task: another config is refused.
  other = config_lib.replace(config, {'length': 9})
  with pytest.raises(UserError, match='length: 8 -> 9'):
    train(other, tmp_path / 'run')


@pytest.mark.slow
def test_a_kernel_backend(text, tmp_path, monkeypatch):
  calls = []

  class Fast:
    """A second way to select on CPUs, where there is one already."""

    @staticmethod
    def token_select(key_BL, k):
      calls.append(key_BL.shape)
      best_BK = jnp.argsort(key_BL, axis=-1, stable=True, descending=True)
      return jnp.sort(best_BK[:, :k].astype(jnp.int32), axis=-1)

  op = mod_jax_kernels.OPS['token_select']
  monkeypatch.setattr(op, 'backends', list(op.backends))
  op.register(dispatch.Backend(name='fast', module=Fast, platform='cpu'))
  config = language(text, routing=MoDConfig(capacity=0.25))
  phases.train(config, tmp_path / 'fast', max_steps=2)
  assert calls
  op.backends.pop(0)
  count = len(calls)
  phases.train(config, tmp_path / 'usual', max_steps=2)
  assert len(calls) == count
  # The same tokens are chosen, so nothing else differs.
  fast, usual = (
    [line['loss'] for line in metrics_lib.read(tmp_path / name)[:2]]
    for name in ('fast', 'usual')
  )
  np.testing.assert_allclose(fast, usual, rtol=1e-6)
