"""What tasks and their runs refuse: in one sentence, with the way out."""

import dataclasses
import pathlib
import re

import pytest
import tiny
from tiny import experiment as run

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import (
  ACMObjective,
  ConversionObjective,
  PhaseConfig,
)
from mod_jax.train import evaluation, loop
from mod_jax.train import state as state_lib

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
ADAPTIVE = dataclasses.replace(
  tiny.VIT, adaptive=AdaptiveConfig(num_learners=2, replace=(FFNS,))
)
DYNAMIC = DynamicViTConfig(backbone=tiny.VIT, stages=(1,))
ROUTED_LM = dataclasses.replace(
  tiny.LM, routing=MoDConfig(capacity=0.5, router_loss=0.0)
)
SHORT = PhaseConfig(num_steps=1, batch_size=8, learning_rate=1e-3)
PHASES = {'learners': SHORT, 'gates': SHORT, 'end_to_end': SHORT}
RULES = {'init': '/no/run', 'optimizer.rules': (('.', 1.0, 0),)}


def acm(phase='all', changes=None, **objective):
  objective = ACMObjective(phase=phase, **PHASES | objective)
  return run(ADAPTIVE, objective=objective, **(changes or {}))


def check(model, data=None):
  make_task(run(model, data)).modality.check()


def train(config, workdir):
  loop.train(make_task(config), config, workdir)


def taught(config):
  make_task(config).teacher(None)


def sized(**sizes):
  return dataclasses.replace(tiny.VIT, **sizes)


def check_vocabulary(tmp_path, size):
  """Checks a model of so many tokens beside a tokenizer of 300."""
  data = TextDataConfig(
    source='files',
    files=f'{tiny.texts(tmp_path, a=9000)}/*.txt',
    cache_dir=str(tmp_path),
    tokenizer='bpe',
    tokenizer_vocab_size=300,
  )
  check(dataclasses.replace(tiny.LM, vocab_size=size), data)


def sample(model, prompt, **kwargs):
  make_task(run(model)).modality.sample(
    *(tiny.random_params(model), {}, [prompt]),
    max_new_tokens=5,
    temperature=0.0,
    **kwargs,
  )


# What is said, but for what stands at …: the offender, and the way out.
REFUSED = {
  # Parts of a config, when it is made.
  'data=TextDataConfig and model=ViTConfig … ImageDataConfig': (
    lambda _: run(tiny.VIT, data=TextDataConfig())
  ),
  'data=ImageDataConfig and model=LMConfig … TextDataConfig': (
    lambda _: run(tiny.LM, data=ImageDataConfig(image_size=8))
  ),
  'objective=ACMObjective and model=DynamicViTConfig … PruningObjective or': (
    lambda _: run(DYNAMIC, objective=ACMObjective())
  ),
  'objective=ConversionObjective and model=LMConfig … objective=None': (
    lambda _: run(tiny.LM, objective=ConversionObjective())
  ),
  'capacity_warmup_steps=2 and model=DynamicViTConfig … set the steps to 0': (
    lambda _: run(DYNAMIC, **{'train.capacity_warmup_steps': 2})
  ),
  'steps=2 and model=LMConfig without routing': (
    lambda _: run(tiny.LM, **{'train.capacity_warmup_steps': 2})
  ),
  'objective.static_learners=3 … model.adaptive.num_learners=2': (
    lambda _: acm('end_to_end', static_learners=3)
  ),
  "model.routing.kinds=('question',) and model=LMConfig … leave kinds out": (
    lambda _: run(ROUTED_LM, **{'model.routing.kinds': ('question',)})
  ),
  'train.frozen=float32 and optimizer.rules … a factor of 0': (
    lambda _: run(tiny.LM, **{'train.frozen': 'float32'})
  ),
  'model.image_size=12 and data.image_size=8 … set both': (
    lambda _: run(sized(image_size=12), data=ImageDataConfig(image_size=8))
  ),
  # Not when the phases before have trained.
  'warmup_steps=1 … shorten the warm-up': (
    lambda _: dataclasses.replace(SHORT, warmup_steps=1)
  ),
  # What the data say, when training starts.
  'model.num_classes=7 … have 10: set model.num_classes=10': (
    lambda _: check(sized(num_classes=7))
  ),
  'vocab_size=299 … 300: set it': lambda path: check_vocabulary(path, 299),
  # Somebody to learn from.
  'teacher … give its workdir or checkpoint as init': (
    lambda _: taught(run(DYNAMIC))
  ),
  'init is missing … that is converted; give': lambda _: taught(acm('gates')),
  'learns from a dense model … init': (
    lambda _: taught(run(ROUTED_LM, objective=ConversionObjective()))
  ),
  # Runs of several phases.
  'init is missing … --config.init': lambda path: phases.train(acm(), path),
  "objective.phase='all' and optimizer.rules … leave the rules out": (
    lambda path: phases.expand(acm(changes=RULES), path)
  ),
  "objective.phase='learners' and optimizer.rules … leave the rules out": (
    lambda path: phases.expand(acm('learners', RULES), path)
  ),
  'init=/no/run … no such file': (
    lambda path: phases.train(acm(changes={'init': '/no/run'}), path)
  ),
  "objective.phase='all' … phases.train": (lambda path: train(acm(), path)),
  # What judges checkpoints, before anything is trained.
  "checkpoint.best='loss' … choose one of top_k/loss": (
    lambda path: train(run(ROUTED_LM, **{'checkpoint.best': 'loss'}), path)
  ),
  "checkpoint.best='top5' … one of loss, accuracy, mean_recall.": (
    lambda _: make_task(run(sized(num_classes=3))).direction('top5')
  ),
  "checkpoint.best='accuracy' … bits_per_byte.": (
    lambda _: make_task(run(tiny.LM)).direction('accuracy')
  ),
  "checkpoint.best='mAP' … top5, mean_recall.": (
    lambda _: make_task(run(tiny.VIT)).direction('mAP')
  ),
  "checkpoint.best='k3/loss' … loss, accuracy": lambda path: phases.train(
    acm(changes={'init': '/no/run', 'checkpoint.best': 'k3/loss'}), path
  ),
  # Held-out numbers and samples.
  'evaluation.batch_size=4 … 8': lambda _: evaluation.held_out(
    make_task(run(tiny.LM, **{'evaluation.batch_size': 4})),
    *({}, {}, parallel.make_mesh(parallel.MeshConfig())),
  ),
  'prompt=10, max_new_tokens=5 … max_length=14': (
    lambda _: sample(tiny.LM, '0123456789', max_length=14)
  ),
  'no causal rule … router_loss': lambda _: sample(ROUTED_LM, 'a'),
}


@pytest.mark.parametrize('said', REFUSED)
def test_is_one_sentence_with_the_way_out(tmp_path, said):
  with pytest.raises(UserError) as error:
    REFUSED[said](tmp_path)
  for part in said.split(' … '):
    assert part in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('kind', 'phase', 'said'),
  [
    ('dense', 'gates', "no run of phase 'learners'"),
    ('learners', 'end_to_end', "no run of phase 'gates'"),
    ('begun', 'gates', 'holds no checkpoint yet'),
  ],
)
def test_a_phase_after_another_than_its_own(tmp_path, kind, phase, said):
  before, after = tmp_path / kind, tmp_path / 'after'
  if kind == 'begun':
    workdir_lib.claim(before, acm('learners'))
  else:
    of = run(tiny.VIT) if kind == 'dense' else acm(kind)
    tiny.save_run(before, of, tiny.random_params(of.model))
  config = acm(phase, {'init': str(before)})
  with pytest.raises(UserError, match=f'{kind}.*{said}'):
    phases.train(config, after)
  assert not after.exists()
  if kind == 'learners':
    # An ablation says that it is meant.
    config = config_lib.replace(config, {'objective.gates.num_steps': 0})
    ((_, last),) = phases.expand(config, after)
    assert last.init == str(before)


def test_a_vocabulary_may_be_larger_than_the_tokenizers(tmp_path):
  check_vocabulary(tmp_path, 301)


@pytest.mark.parametrize(
  ('change', 'offender'),
  [
    ({'num_classes': 3}, 'has no head for 3 classes, which a teacher needs'),
    # The head is not what to mend.
    ({'width': 16}, 'head/kernel: (8, 10) instead of (16, 10)'),
    # Half of a model teaches nothing.
    ({'num_layers': 1}, 'unexpected: block_1/mlp/up/kernel'),
  ],
  ids=str,
)
def test_a_teacher_must_be_whole(tmp_path, change, offender):
  of = run(tiny.VIT)
  tiny.save_run(tmp_path / 'run', of, tiny.random_params(tiny.VIT))
  model = DynamicViTConfig(backbone=sized(**change), stages=(0,))
  config = run(model, init=str(tmp_path / 'run'))
  with pytest.raises(UserError, match=re.escape(offender)):
    taught(config)


@pytest.mark.parametrize('published', [True, False])
def test_weights_of_another_kind_of_model(tmp_path, monkeypatch, published):
  kind, init = 'detector', GOLDEN / 'detr'
  if not published:
    kind, init = 'language', tmp_path / 'language'
    tiny.save_run(init, run(tiny.LM), tiny.random_params(tiny.LM))
  # They are refused before anything is compiled, which may take a minute.
  monkeypatch.delattr(state_lib, 'of_run')
  with pytest.raises(
    UserError, match=f"the kind '{kind}', and one of the kind 'vision'"
  ):
    train(run(tiny.VIT, init=str(init)), tmp_path / 'run')
