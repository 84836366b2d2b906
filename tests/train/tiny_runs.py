"""Runs of the smallest language model, on random bytes."""

from mod_jax import config as config_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.tasks.experiment import ExperimentConfig


def make_config(texts, routing=None, **changes):
  """Returns a config of four steps over the files that a glob names."""
  config = ExperimentConfig(
    model=LMConfig(
      num_layers=1, width=16, num_heads=2, mlp_dim=16, routing=routing
    ),
    data=TextDataConfig(source='files', files=texts, length=16),
    optimizer=OptimizerConfig(warmup_steps=1, learning_rate=0.01),
  )
  tiny = {
    'train.num_steps': 4,
    'train.batch_size': 8,
    'evaluation.every': 0,
    'evaluation.batches': 1,
    'evaluation.final_batches': 1,
    'evaluation.batch_size': 8,
    'evaluation.sample_tokens': 0,
    'log.tensorboard': False,
  }
  return config_lib.replace(config, tiny | changes)
