"""An isoFLOP sweep in hours on two CPU cores: dense against Mixture-of-Depths.

Figure 4 of Raposo et al. 2024 in miniature: three budgets of training FLOPs,
five sizes around the minimum of each curve, and the recipe of
`configs/lm/mod.py`. Dense models have four blocks, and routed ones four full
and four routed blocks; eight dense blocks are too many for these budgets. The
lowest budget also has dense models of two and of eight blocks, the raw gate,
the stride (which routes without looking at the tokens), and the full blocks of
the routed models alone, trained for as many steps.

Rows are short and batches large. With 16 rows of 256 tokens, chance decided
whether a model learnt to copy from its context, and that changed the loss more
than routing does: see results/isoflop_laptop/REPRODUCTION.md.

The learning rate falls with the width, and is the same for dense and routed
models. The variant `tune` is the search for it, on dense models of two sizes.
`rows_of_128` asks the same question where four routed tokens of a row become
sixteen: one budget, three sizes around each expected minimum, three seeds, and
routers without an auxiliary loss. Dense models are also trained at a quarter of
that budget, since the compute multiplier needs what they gain by more FLOPs.
`tiny` is for tests: seconds, on bytes.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.models.lm import LMConfig
from mod_jax.runs.checkpoints import CheckpointConfig
from mod_jax.runs.run_config import EvaluationConfig, LogConfig, TrainConfig
from mod_jax.sweeps import plan
from mod_jax.sweeps.plan import Group, SweepConfig
from mod_jax.tasks.experiment import ExperimentConfig

ROUTING = config_lib.sibling(__file__, '../lm/mod').ROUTING
# Models with many small heads learn sooner to copy from their context, as do
# routed models with more blocks: results/isoflop_laptop/REPRODUCTION.md.
_CHANNELS = 16


def shapes(num_layers: int, *widths: int):
  """Returns (blocks, width, heads) for each width."""
  return tuple((num_layers, w, w // _CHANNELS) for w in widths)


# Multiples of the channels of a head. At other widths the heads together are
# wider than the model, and its loss is above the curve of the other models.
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 192)
DENSE = Group(name='dense', optimum=2.9e5, shapes=shapes(4, *WIDTHS))
MOD = Group(name='mod', optimum=4.6e5, routing=ROUTING)


def depth(num_layers: int) -> Group:
  """Returns dense models of another depth, at the lowest budget only."""
  return Group(
    name=f'dense_{num_layers}',
    optimum=DENSE.optimum,
    shapes=shapes(num_layers, *WIDTHS),
    num_sizes=4,
    budgets=(0,),
  )


def variant(name: str, *, without_routed_blocks: bool = False, **routing):
  """Returns a group like MOD, at the lowest budget only."""
  return dataclasses.replace(
    MOD,
    name=name,
    num_sizes=4,
    budgets=(0,),
    routing=dataclasses.replace(ROUTING, **routing),
    without_routed_blocks=without_routed_blocks,
  )


def sweep() -> SweepConfig:
  return SweepConfig(
    name='laptop',
    base=ExperimentConfig(
      model=LMConfig(vocab_size=2048, head_dim=_CHANNELS),
      data=TextDataConfig(
        source='environment',
        tokenizer='bpe',
        tokenizer_vocab_size=2048,
        length=32,
      ),
      train=TrainConfig(batch_size=128),
      evaluation=EvaluationConfig(
        batches=16, final_batches=64, batch_size=128, sample_tokens=0
      ),
      checkpoint=CheckpointConfig(every=0, keep=1),
      log=LogConfig(every=20, tensorboard=False),
    ),
    budgets=(8e12, 2.5e13, 8e13),
    optimum_budget=8e12,
    num_seeds=(3, 3, 2),
    groups=(
      DENSE,
      MOD,
      depth(2),
      depth(8),
      variant('raw', gate='raw'),
      variant('stride', score='stride'),
      variant('removed', without_routed_blocks=True),
    ),
    shapes=shapes(8, *WIDTHS),
    num_sizes=(5,),
    # From `tune`: parabolas through the best three of five rates, each twice
    # the previous one, have their minima at 2.0e-2 for width 48 and at 1.04e-2
    # for width 96 (one seed; results/isoflop_laptop/tune.csv).
    learning_rate=1.5e-2,
    rate_width=64,
    rate_power=0.9,
    # Measured: the rate of products of large float32 matrices, and the fraction
    # of that rate which training reaches.
    peak_flops=2.5e11,
    utilization=0.48,
  )


def tune() -> SweepConfig:
  """Returns the search for a learning rate: dense, two sizes, one seed."""
  return plan.rate_search(
    dataclasses.replace(sweep(), rate_power=0.5),
    shapes(4, 48, 96),
    rate=1.4e-2,
  )


def rows_of_128() -> SweepConfig:
  """Returns a comparison at one higher budget, with four times the length."""
  routing = dataclasses.replace(ROUTING, router_loss=0.0)
  return config_lib.replace(
    sweep(),
    {
      'name': 'laptop_rows_of_128',
      'base.data.length': 128,
      'base.train.batch_size': 32,
      'base.evaluation.batch_size': 32,
      'budgets': (3e13, 1.2e14),
      'num_seeds': (3,),
      'num_sizes': (3,),
      'groups': (
        # The lower budget says what more FLOPs are worth to dense models.
        dataclasses.replace(DENSE, shapes=shapes(4, 80, 96, 112, 128, 160)),
        dataclasses.replace(
          MOD, routing=routing, shapes=shapes(8, 96, 112, 144), budgets=(1,)
        ),
        # Added after the others, whose largest size was the best one.
        dataclasses.replace(
          MOD,
          name='mod_larger',
          routing=routing,
          shapes=shapes(8, 176),
          num_sizes=1,
          budgets=(1,),
        ),
      ),
    },
  )


def tiny() -> SweepConfig:
  """Returns a small version of the sweep, on bytes."""
  return config_lib.replace(
    sweep(),
    {
      'name': 'laptop_tiny',
      'base.model.vocab_size': 256,
      'base.model.head_dim': None,
      'base.data.source': 'stdlib',
      'base.data.tokenizer': 'bytes',
      'base.data.length': 16,
      'base.train.batch_size': 8,
      'base.evaluation.batches': 1,
      'base.evaluation.final_batches': 2,
      'base.evaluation.batch_size': 8,
      'base.log.every': 5,
      'budgets': (1e9, 2e9),
      'optimum_budget': None,
      'num_seeds': (2, 1),
      'groups': tuple(
        dataclasses.replace(group, optimum=8e3, shapes=())
        for group in (DENSE, MOD)
      ),
      'shapes': tuple((2, width, 1) for width in (8, 12, 16, 24, 32)),
      'num_sizes': (4,),
    },
  )


VARIANTS = {
  '': sweep,
  'tune': tune,
  'rows_of_128': rows_of_128,
  'tiny': tiny,
}

get_config = config_lib.config_getter(VARIANTS)
