"""Mixture-of-Depths at the sizes of Raposo et al. 2024, for accelerators.

Capacity 12.5% in every other block, length 2048, batch 128, cosine over
exactly the run's steps. The paper's Eq. 1 weighs updates by the router's output
itself, and its Figure 5 shows weights as only a sigmoid gives them; the gate
here is the sigmoid, which does better in `benchmarks/routing_recipe.py`. Causal
sampling is trained by the auxiliary loss alone; the paper offers the predictor
as an alternative to it. Variants: `60m`, `220m` (the default), `670m`, `3b`,
each also as `…_dense`; `tiny`. Text comes from TFDS (`lm1b`), so give a
tokenizer: `--config.data.tokenizer_path=FILE`.
"""

import functools

from mod_jax import config as config_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.routed import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.parallel import MeshConfig
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train.checkpoints import CheckpointConfig
from mod_jax.train.optimizer import OptimizerConfig
from mod_jax.train.run_config import EvaluationConfig
from mod_jax.train.run_config import LogConfig
from mod_jax.train.run_config import TrainConfig

# Blocks, width, heads, devices along fsdp.
SIZES = {
  '60m': (8, 512, 8, 1),
  '220m': (12, 1024, 8, 4),
  '670m': (20, 1536, 12, 8),
  '3b': (28, 2816, 22, 16),
}


def least_remat(size: str, tokens: float) -> str:
  """Returns what of `remat` costs least of what fits 16 chips of 16 GiB.

  The bounds are from compilations for v5e:4x4 (memory analysis): `none` takes
  10.5 GiB for the routed 220M model and 15.7 for the dense one, too near to the
  limit; `dots` 6.7 for that, and 10.7 for the routed 670M model; `attention`
  13.3 for the dense 3B model.

  Args:
    size: of the model.
    tokens: fraction of the tokens that a block processes, on average.
  """
  num_layers, width, *_ = SIZES[size]
  features = tokens * num_layers * width
  return 'none' if features < 1e4 else 'dots' if features < 2e4 else 'attention'


def experiment(size: str) -> ExperimentConfig:
  num_layers, width, num_heads, fsdp = SIZES[size]
  return ExperimentConfig(
    name=f'mod_{size}',
    model=LMConfig(
      vocab_size=32_768,
      num_layers=num_layers,
      width=width,
      num_heads=num_heads,
      tied_head=False,
      routing=MoDConfig(capacity=0.125, gate='sigmoid', router_loss=0.01),
      dtype='bfloat16',
      scan_layers=True,
      remat=least_remat(size, (1 + 0.125) / 2),
    ),
    data=TextDataConfig(
      source='tfds',
      tfds_name='lm1b',
      tokenizer='sentencepiece',
      tokenizer_path='tokenizer.model',
      length=2048,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=500),
    train=TrainConfig(num_steps=20_000, batch_size=128),
    evaluation=EvaluationConfig(every=2000, batch_size=128),
    mesh=MeshConfig(data=-1, fsdp=fsdp),
    checkpoint=CheckpointConfig(every=1000),
    log=LogConfig(every=20),
  )


def tiny() -> ExperimentConfig:
  """Everything as in the full size but small, on the embedded text."""
  return config_lib.replace(
    experiment('60m'),
    {
      'name': 'mod_paper_tiny',
      'model.vocab_size': 256,
      'model.num_layers': 4,
      'model.width': 32,
      'model.num_heads': 2,
      'data': TextDataConfig(length=64),
      'optimizer.warmup_steps': 2,
      'train.num_steps': 8,
      'train.batch_size': 8,
      'evaluation': EvaluationConfig(
        every=4, batches=1, final_batches=1, batch_size=8, sample_tokens=8
      ),
      'checkpoint.every': 4,
      'log.every': 2,
    },
  )


def dense(size: str) -> ExperimentConfig:
  return config_lib.replace(
    experiment(size),
    {
      'name': f'dense_{size}',
      'model.routing': None,
      'model.remat': least_remat(size, 1.0),
    },
  )


VARIANTS = {
  '': lambda: experiment('220m'),
  **{size: functools.partial(experiment, size) for size in SIZES},
  **{f'{size}_dense': functools.partial(dense, size) for size in SIZES},
  'tiny': tiny,
}

get_config = config_lib.config_getter(VARIANTS)
