"""A small Mixture-of-Depths language model on the standard library's source.

Every other block processes 12.5% of the tokens. A few minutes on two CPU
cores. Variants:

* `tiny`: seconds, for tests;
* `gaussian`, `stride`: the controls, which do not look at the tokens;
* `every_block`: all blocks routed;
* `decay`: capacity falls with depth, from 20% to 5%;
* `warmup`: capacity comes down from 1 over the first quarter of the run;
* `packed`: documents of a row do not see each other.
"""

from mod_jax import config as config_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.mod import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.train.experiment import EvaluationConfig
from mod_jax.train.experiment import ExperimentConfig
from mod_jax.train.experiment import TrainConfig
from mod_jax.train.optimizer import OptimizerConfig

ROUTING = MoDConfig(
  capacity=0.125, router_loss=0.01, predictor_width=64, threshold_decay=0.99
)


def experiment(routing: MoDConfig | None, name: str) -> ExperimentConfig:
  """The run, with or without routing."""
  return ExperimentConfig(
    name=name,
    model=LMConfig(num_layers=4, width=192, num_heads=6, routing=routing),
    data=TextDataConfig(length=256),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=100),
    train=TrainConfig(num_steps=700, batch_size=16),
    evaluation=EvaluationConfig(every=175, batch_size=16),
  )


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """The same in seconds: for tests, and to see that everything works."""
  return config_lib.replace(
    experiment,
    {
      'name': f'{experiment.name}_tiny',
      'model.num_layers': 2,
      'model.width': 32,
      'model.num_heads': 2,
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


def get_config(variant: str = ''):
  base = experiment(ROUTING, 'mod')
  changes = {
    '': {},
    'gaussian': {'model.routing.score': 'gaussian'},
    'stride': {'model.routing.score': 'stride'},
    'every_block': {'model.routing.period': 1, 'model.routing.offset': 0},
    'decay': {'model.routing.capacity_decay': 0.25},
    'warmup': {'train.capacity_warmup_steps': base.train.num_steps // 4},
    'packed': {'data.segments': True},
  }
  if variant == 'tiny':
    return config_lib.to_config_dict(tiny(base))
  changed = config_lib.choose(variant, {**changes, 'tiny': None})
  if variant:
    changed = {'name': f'mod_{variant}', **changed}
  return config_lib.to_config_dict(config_lib.replace(base, changed))
