"""Figures 3 and 4 of Raposo et al. 2024: isoFLOP sweeps for TPU slices.

Dense models and Mixture-of-Depths at 12.5% in every other block, at 6e18, 2e19
and 1e20 training FLOPs. The lowest budget also has the variants of Figure 3:
capacities from 12.5% to 95%, every block routed, and stochastic routing; and
further the raw gate, the stride, the predictor in place of the auxiliary loss,
and neither of the two, which shows what the auxiliary loss costs. Everything
else is as in `configs/lm/paper.py`.

`tune` is the search for the learning rate. It has not been run; its result
belongs in `configs/lm/paper.py`. `tiny` is for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax import peaks
from mod_jax.data.text import TextDataConfig
from mod_jax.parallel import MeshConfig
from mod_jax.runs.run_config import EvaluationConfig
from mod_jax.sweeps import plan
from mod_jax.sweeps.plan import Group, SweepConfig

lm = config_lib.sibling(__file__, '../lm/paper')

# Blocks, width, heads. From one size to the next, depth grows before width.
SHAPES = (
  (8, 512, 8),
  (12, 512, 8),
  (12, 640, 10),
  (12, 768, 12),
  (16, 768, 12),
  (16, 896, 14),
  (16, 1024, 8),
  (20, 1024, 8),
  (20, 1152, 18),
  (20, 1280, 10),
  (24, 1280, 10),
  (24, 1408, 22),
  (24, 1536, 12),
  (28, 1536, 12),
  (28, 1792, 14),
  (32, 1792, 14),
  (32, 2048, 16),
  (36, 2048, 16),
  (36, 2304, 18),
  (36, 2560, 20),
  (40, 2816, 22),
)
# Parameters of the best models at 6e18 FLOPs, as read from Figure 4.
DENSE = Group(name='dense', optimum=231e6)
MOD = Group(name='mod', optimum=483e6, routing=lm.ROUTING)
# Expected parameters of the best models of other variants, at 6e18 FLOPs.
OPTIMA = {
  'capacity_25': 420e6,
  'capacity_50': 330e6,
  'capacity_75': 270e6,
  'capacity_95': 240e6,
  'every_block': 900e6,
  'every_block_50': 400e6,
}


def variant(name: str) -> Group:
  """Returns a variant of `configs/lm/paper.py`, at the lowest budget."""
  routing = dataclasses.replace(lm.ROUTING, **lm.VARIANTS_OF_ROUTING[name])
  return Group(
    name=name,
    optimum=OPTIMA.get(name, MOD.optimum),
    routing=routing,
    num_sizes=5,
    budgets=(0,),
  )


def sweep() -> SweepConfig:
  return SweepConfig(
    name='paper',
    base=dataclasses.replace(
      lm.base(), evaluation=EvaluationConfig(batch_size=128, sample_tokens=0)
    ),
    budgets=(6e18, 2e19, 1e20),
    optimum_budget=6e18,
    groups=(
      DENSE,
      MOD,
      *(
        variant(name)
        for name in (
          *OPTIMA,
          *('gaussian', 'stride', 'raw', 'predictor', 'no_causal_rule'),
        )
      ),
    ),
    shapes=SHAPES,
    num_sizes=(7,),
    # Between the exponents of the two curves of Figure 4, .41 and .49.
    growth=0.45,
    learning_rate=lm.RATE,
    rate_width=lm.RATE_WIDTH,
    rate_power=lm.RATE_POWER,
    warmup=lm.WARMUP,
    peak_flops=peaks.BFLOAT16['TPU v5p?'],
    utilization=0.4,
  )


def tune() -> SweepConfig:
  """Returns the search for a learning rate: dense, three sizes, one seed."""
  shapes = ((12, 640, 10), (12, 768, 12), (16, 1024, 8))
  return plan.rate_search(sweep(), shapes, rate=lm.RATE)


def tiny(sweep: SweepConfig) -> SweepConfig:
  """Returns a small version of a sweep, on the embedded text."""
  shapes = ((2, 8, 1), (2, 16, 1), (2, 24, 1), (2, 32, 1))
  groups = [
    dataclasses.replace(
      group,
      optimum=12e3,
      # One size of each variant is enough to see that it works.
      num_sizes=1 if group.budgets else 0,
      shapes=shapes[:1] if group.budgets else (),
    )
    for group in sweep.groups
  ]
  return config_lib.replace(
    sweep,
    {
      'name': f'{sweep.name}_tiny',
      'base.model.vocab_size': 256,
      'base.data': TextDataConfig(length=16),
      'base.train.batch_size': 8,
      'base.evaluation': EvaluationConfig(
        batches=1, final_batches=1, batch_size=8, sample_tokens=0
      ),
      'base.mesh': MeshConfig(),
      'base.checkpoint.every': 20,
      'base.log.every': 5,
      'budgets': (2e9, 4e9),
      'optimum_budget': None,
      'groups': tuple(groups),
      'shapes': shapes,
      'num_seeds': (1,),
      'num_sizes': (4,),
      'rate_width': 16,
    },
  )


VARIANTS = {'': sweep, 'tune': tune, 'tiny': lambda: tiny(sweep())}

get_config = config_lib.config_getter(VARIANTS)
