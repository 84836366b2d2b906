"""An isoFLOP sweep in about a day on one GPU such as an H100.

Three budgets below the paper's, from 1e17 to 1e18 training FLOPs: dense models
and Mixture-of-Depths at 12.5% in every other block. The lowest budget has two
seeds, and includes the raw gate and the controls that route without looking at
the tokens. `tune` is the search for the learning rate. `tiny` is for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax import peaks
from mod_jax.parallel import MeshConfig
from mod_jax.sweeps import plan
from mod_jax.sweeps.plan import SweepConfig

paper = config_lib.sibling(__file__, 'paper')
# Blocks, width, heads. From one size to the next, depth grows before width.
SHAPES = (
  (4, 256, 4),
  (6, 256, 4),
  (6, 320, 5),
  (6, 384, 6),
  (8, 384, 6),
  (8, 448, 7),
  (8, 512, 8),
  (10, 512, 8),
  (12, 512, 8),
  (12, 640, 10),
  (12, 768, 12),
  (16, 768, 12),
  (16, 896, 14),
  (16, 1024, 8),
  (20, 1024, 8),
  (20, 1152, 18),
)
# Parameters of the best models at 1e17 FLOPs, extrapolated from the paper's.
OPTIMA = {'dense': 37e6, 'mod': 70e6}


def sweep() -> SweepConfig:
  full = paper.sweep()
  names = ('dense', 'mod', 'gaussian', 'stride', 'raw')
  groups = tuple(
    dataclasses.replace(group, optimum=OPTIMA.get(group.name, OPTIMA['mod']))
    for group in full.groups
    if group.name in names
  )
  return config_lib.replace(
    full,
    {
      'name': 'gpu',
      'base.data.length': 1024,
      'base.train.batch_size': 64,
      'base.evaluation.batch_size': 64,
      'base.mesh': MeshConfig(),
      'base.model.remat': 'none',
      'budgets': (1e17, 3e17, 1e18),
      'optimum_budget': 1e17,
      'num_seeds': (2, 1, 1),
      'groups': groups,
      'shapes': SHAPES,
      'peak_flops': peaks.BFLOAT16['NVIDIA (H100 80GB HBM3|H200)( .*)?'],
      'utilization': 0.3,
    },
  )


def tune() -> SweepConfig:
  """Returns the search for a learning rate: dense, three sizes, one seed."""
  shapes = ((6, 320, 5), (8, 448, 7), (12, 640, 10))
  return plan.rate_search(sweep(), shapes, rate=paper.lm.RATE)


VARIANTS = {'': sweep, 'tune': tune, 'tiny': lambda: paper.tiny(sweep())}

get_config = config_lib.config_getter(VARIANTS)
