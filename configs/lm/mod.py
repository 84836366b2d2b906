"""A small Mixture-of-Depths language model on the standard library's source.

Every other block processes 12.5% of the tokens. The tokens are subwords, which
the run learns from its own training files. At this budget of training FLOPs,
some minutes on two CPU cores, the shape and the sigmoid gate were the best that
`benchmarks/routing_recipe.py` tried. Variants:

* `tiny`: seconds, for tests, on bytes;
* `raw`: the router's output itself is the weight, exactly Eq. 1 of the paper;
* `predictor`: sampling by a predictor instead of the auxiliary loss;
* `gaussian`, `stride`: controls that route without looking at the tokens;
* `token_choice`: each token with a score above 0 is routed, in order while
  there are slots; a loss pulls their share towards the capacity;
* `every_block`: all blocks routed;
* `decay`: four blocks, whose capacity falls with depth, from 20% to 5%;
* `warmup`: the capacity falls from 1 over the first quarter of the run;
* `packed`: attention does not cross the documents of a row;
* `bytes`: bytes instead of subwords.
"""

import dataclasses
import functools

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

BUDGET = 2.32e13  # Training FLOPs of a run, the same for its dense baselines.
# Warm-up of a full run. Runs have it as a fraction of their steps, so that it
# scales with `num_steps`.
WARMUP_STEPS = 100
ROUTING = MoDConfig(
  capacity=0.125, gate='sigmoid', router_loss=0.01, threshold_decay=0.99
)


def experiment(
  routing: MoDConfig | None,
  name: str,
  *,
  num_layers: int = 2,
  experts: ExpertsConfig | None = None,
) -> ExperimentConfig:
  """Returns a run for as many steps as the budget allows."""
  model = LMConfig(
    vocab_size=2048,
    num_layers=num_layers,
    width=192,
    num_heads=6,
    routing=routing,
    experts=experts,
  )
  batch_size, length = 16, 256
  num_steps = flops.steps_within(BUDGET, model, batch_size, length)
  return ExperimentConfig(
    name=name,
    model=model,
    data=TextDataConfig(
      tokenizer='bpe', tokenizer_vocab_size=2048, length=length
    ),
    optimizer=OptimizerConfig(
      learning_rate=4e-3, warmup_steps=WARMUP_STEPS / num_steps
    ),
    train=TrainConfig(num_steps=num_steps, batch_size=batch_size),
    evaluation=EvaluationConfig(every=0.25, batch_size=16),
  )


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a small version that takes seconds, for tests."""
  return config_lib.replace(
    experiment,
    {
      'name': f'{experiment.name}_tiny',
      'model.vocab_size': 256,
      'model.num_layers': 2,
      'model.width': 32,
      'model.num_heads': 2,
      'data.tokenizer': 'bytes',
      'data.length': 32,
      'train.num_steps': 20,
      'train.batch_size': 8,
      'optimizer.warmup_steps': 2,
      'evaluation.every': 10,
      'evaluation.batches': 1,
      'evaluation.final_batches': 2,
      'evaluation.batch_size': 8,
      'evaluation.sample_tokens': 16,
      'log.every': 5,
      'checkpoint.every': 10,
    },
  )


def variant(name: str, changes, **model) -> ExperimentConfig:
  """Returns the recipe under another name, with some fields changed."""
  base = experiment(ROUTING, f'mod_{name}', **model)
  return config_lib.replace(base, changes)


CHANGES = {
  'raw': {'model.routing.gate': 'raw'},
  'predictor': {
    'model.routing.router_loss': 0.0,
    'model.routing.threshold_decay': 0.0,
    'model.routing.predictor_width': 64,
  },
  'token_choice': {
    'model.routing.train_rule': 'router',
    'model.routing.balance_loss': 0.01,
    'model.routing.router_bias': True,
    'model.routing.router_loss': 0.0,
    'model.routing.threshold_decay': 0.0,
  },
  'gaussian': {'model.routing.score': 'gaussian'},
  'stride': {'model.routing.score': 'stride'},
  'every_block': {'model.routing.period': 1, 'model.routing.offset': 0},
  'warmup': {'train.capacity_warmup_steps': 0.25},
  'packed': {'data.segments': True},
  'bytes': {'data.tokenizer': 'bytes', 'model.vocab_size': 256},
}
VARIANTS = {
  '': lambda: experiment(ROUTING, 'mod'),
  **{
    name: functools.partial(variant, name, changes)
    for name, changes in CHANGES.items()
  },
  # Four blocks: of two, only one is routed, so no capacity could fall.
  'decay': lambda: experiment(
    dataclasses.replace(ROUTING, capacity_decay=0.25), 'mod_decay', num_layers=4
  ),
  'tiny': lambda: tiny(experiment(ROUTING, 'mod')),
}

get_config = config_lib.config_getter(VARIANTS)
