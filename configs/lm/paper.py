"""Mixture-of-Depths at the sizes of Raposo et al. 2024, for accelerators.

Capacity 12.5% in every other block, length 2048, batch 128. The number of steps
follows from a budget of training FLOPs; the cosine schedule ends at the last
step, and the warm-up is a fraction of the steps. The peak learning rate falls
with the width, by the same rule for dense and routed models. The paper is not
clear about the gate: its Eq. 1 weighs updates by the router's output itself,
but the weights in its Figure 5 look like those of a sigmoid. The gate here is a
sigmoid, which does better in `benchmarks/routing_recipe.py`. Causal sampling is
trained by the auxiliary loss.

Variants: `60m`, `220m` (the default), `480m`, `670m`, `1b`, `3b`, each also as
`…_dense`; and of `220m`

* `predictor`: the paper's alternative to the auxiliary loss;
* `no_causal_rule`: neither the predictor nor the auxiliary loss;
* `raw`: the gate exactly as in Eq. 1;
* `gaussian`, `stride`: controls that route without looking at the tokens;
* `capacity_25` to `capacity_95`, `every_block`, `every_block_50`: Figure 3;
* `tiny`: seconds, for tests.

The text is a corpus in the directory `corpus`, made by `python -m
mod_jax.data.prepare` with a tokenizer of up to 32,768 ids. A run of 6e18 FLOPs
reads 2 to 28 billion tokens, more than `lm1b` has.

The mesh is for 16 or 64 chips. The 128 rows of a batch do not divide by 256
chips, so give `--config.mesh.tensor=2` there. `configs/sweeps/paper.py` has the
whole of Figure 4.
"""

import dataclasses
import functools

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.parallel import MeshConfig
from mod_jax.runs.checkpoints import CheckpointConfig
from mod_jax.runs.run_config import EvaluationConfig, LogConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

# Blocks, width, heads, devices along fsdp, and training FLOPs: the paper's
# budget whose best model is nearest to this size.
SIZES = {
  '60m': (8, 512, 8, 1, 6e18),
  '220m': (12, 1024, 8, 4, 6e18),
  '480m': (20, 1280, 10, 4, 6e18),
  '670m': (20, 1536, 12, 8, 2e19),
  '1b': (28, 1792, 14, 8, 1e20),
  '3b': (28, 2816, 22, 16, 1e20),
}
ROUTING = MoDConfig(capacity=0.125, gate='sigmoid', router_loss=0.01)
# The peak learning rate at a width, and the exponent by which the rate falls
# with the width. The rates are within the range of published rates for these
# sizes; they are to be tuned on dense models and then used for all models.
RATE, RATE_WIDTH, RATE_POWER = 1e-3, 1024, 0.75
WARMUP = 0.02  # As a fraction of the steps.


def least_remat(model: LMConfig) -> str:
  """Returns the cheapest `remat` with which a model fits 16 chips of 16 GiB.

  The bounds are from memory analyses of programs compiled for v5e:4x4. `none`
  takes 10.5 GiB for the routed 220M model, and 15.7 for the dense one, too near
  to the limit; `dots` takes 6.7 for the latter, and 10.7 for the routed 670M
  model; `attention` takes 13.3 for the dense 3B model.
  """
  full_blocks = sum(1.0 if c is None else c for c in model.capacities)
  features = full_blocks * model.width
  return 'none' if features < 1e4 else 'dots' if features < 2e4 else 'attention'


def base() -> ExperimentConfig:
  """Returns the config that all runs share; size and steps are set later."""
  return ExperimentConfig(
    name='mod',
    model=LMConfig(
      vocab_size=32_768,
      tied_head=False,
      routing=ROUTING,
      dtype='bfloat16',
      scan_layers=True,
      remat='attention',
    ),
    data=TextDataConfig(source='prepared', path='corpus', length=2048),
    train=TrainConfig(batch_size=128),
    evaluation=EvaluationConfig(every=2000, batch_size=128),
    mesh=MeshConfig(data=-1, fsdp=4),
    checkpoint=CheckpointConfig(every=1000),
    log=LogConfig(every=20),
  )


def experiment(
  size: str, name: str = 'mod', *, routing: MoDConfig | None = ROUTING
) -> ExperimentConfig:
  """Returns the run of a size, for as many steps as its budget allows."""
  num_layers, width, num_heads, fsdp, budget = SIZES[size]
  shared = base()
  model = dataclasses.replace(
    shared.model,
    num_layers=num_layers,
    width=width,
    num_heads=num_heads,
    routing=routing,
  )
  model = dataclasses.replace(model, remat=least_remat(model))
  steps = flops.steps_within(
    budget, model, shared.train.batch_size, shared.data.length
  )
  rate = RATE * (RATE_WIDTH / width) ** RATE_POWER
  return dataclasses.replace(
    shared,
    name=f'{name}_{size}',
    model=model,
    optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=WARMUP),
    train=dataclasses.replace(shared.train, num_steps=steps),
    mesh=MeshConfig(data=-1, fsdp=fsdp),
  )


def variant(name: str) -> ExperimentConfig:
  routing = dataclasses.replace(ROUTING, **VARIANTS_OF_ROUTING[name])
  return experiment('220m', f'mod_{name}', routing=routing)


def tiny() -> ExperimentConfig:
  """Returns a small version with all features, on the embedded text."""
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
      'mesh': MeshConfig(),
      'checkpoint.every': 4,
      'log.every': 2,
    },
  )


_EVERY = {'period': 1, 'offset': 0}
VARIANTS_OF_ROUTING = {
  'predictor': {'router_loss': 0.0, 'predictor_width': 256},
  'no_causal_rule': {'router_loss': 0.0},
  'raw': {'gate': 'raw'},
  'gaussian': {'score': 'gaussian', 'router_loss': 0.0},
  'stride': {'score': 'stride', 'router_loss': 0.0},
  **{
    f'capacity_{percent}': {'capacity': percent / 100}
    for percent in (25, 50, 75, 95)
  },
  'every_block': _EVERY,
  'every_block_50': _EVERY | {'capacity': 0.5},
}
VARIANTS = {
  '': lambda: experiment('220m'),
  **{size: functools.partial(experiment, size) for size in SIZES},
  **{
    f'{size}_dense': functools.partial(experiment, size, 'dense', routing=None)
    for size in SIZES
  },
  **{name: functools.partial(variant, name) for name in VARIANTS_OF_ROUTING},
  'tiny': tiny,
}

get_config = config_lib.config_getter(VARIANTS)
