"""IsoFLOP sweeps in about a day, or half an hour, on one GPU such as an H100.

Three budgets below the paper's, from 1e17 to 1e18 training FLOPs: dense models
and Mixture-of-Depths at 12.5% in every other block. The lowest budget has two
seeds, and includes the raw gate and the controls that route without looking at
the tokens. `tune` is the search for the learning rate.

`hour` tests at 1e16 FLOPs and with two seeds whether Mixture-of-Depths pays at
equal FLOPs, in a setting where depth pays. It trains dense models, routed
models of at least twice their depth, dense models that are shallower or deeper,
and routed models with Gaussian scores. The routed models have a predictor and
no auxiliary loss, which costs loss. `fit` compares the means of three sizes. A
gain is claimed if the 90% interval of the compute multiplier excludes 1.0, and
denied if it excludes 1.15. For the multiplier, which needs what dense models
gain by more FLOPs, both kinds are also trained at 2.5e15. Before it,
`hour_tune` searches the learning rates of dense and of routed models at 1e15
FLOPs, which take about ten seconds on an H100 at 10% of its peak.

`tiny` and `hour_tiny` are for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax import peaks
from mod_jax.data.text import TextDataConfig
from mod_jax.parallel import MeshConfig
from mod_jax.sweeps import plan
from mod_jax.sweeps.plan import Group, SweepConfig

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


def hour() -> SweepConfig:
  """Returns the comparison at 1e16 FLOPs."""
  routing = dataclasses.replace(
    paper.lm.ROUTING, router_loss=0.0, predictor_width=64
  )
  gaussian = dataclasses.replace(routing, score='gaussian', predictor_width=0)
  dense, deep = 12e6, 19e6  # Parameters in the middle of the shapes.
  shapes = (8, 192, 3), (8, 256, 4), (12, 256, 4), (12, 320, 5), (16, 320, 5)
  return config_lib.replace(
    sweep(),
    {
      'name': 'hour',
      'base.data': TextDataConfig(
        source='environment',
        tokenizer='bpe',
        tokenizer_vocab_size=8192,
        length=1024,
        # The packages of some machines have 56 million tokens.
        max_epochs=4,
      ),
      'base.model.vocab_size': 8192,
      'base.train.batch_size': 32,
      'base.evaluation.batch_size': 32,
      'budgets': (2.5e15, 1e16),
      'optimum_budget': 1e16,
      'num_seeds': (2,),
      'num_sizes': (3,),
      'groups': (
        Group(
          name='dense',
          optimum=dense,
          shapes=((4, 192, 3), (4, 256, 4), *SHAPES[1:3], (8, 320, 5)),
        ),
        Group(name='mod', optimum=deep, routing=routing, shapes=shapes),
        Group(
          name='other_depths',
          optimum=dense,
          shapes=((4, 384, 6), (10, 256, 4)),
          num_sizes=2,
          budgets=(1,),
        ),
        Group(
          name='gaussian',
          optimum=deep,
          routing=gaussian,
          shapes=shapes[3:4],
          num_sizes=1,
          budgets=(1,),
        ),
      ),
      'utilization': 0.1,
    },
  )


def hour_tune() -> SweepConfig:
  """Returns the search for the rates of dense and routed models of `hour`."""
  full = hour()
  return dataclasses.replace(
    full,
    name='hour_tune',
    budgets=(1e15,),
    optimum_budget=None,
    num_seeds=(1,),
    num_sizes=(1,),
    groups=tuple(
      dataclasses.replace(
        group,
        name=f'{group.name}_x{factor:g}',
        shapes=group.shapes[-2:-1],
        rate_factor=factor,
      )
      for group in full.groups[:2]
      for factor in (0.5, 1.0, 2.0)
    ),
  )


def hour_tiny() -> SweepConfig:
  """Returns a small version of `hour`."""
  return dataclasses.replace(
    paper.tiny(hour()), budgets=(1e9, 1.2e9), num_sizes=(3,)
  )


VARIANTS = {
  '': sweep,
  'tune': tune,
  'tiny': lambda: paper.tiny(sweep()),
  'hour': hour,
  'hour_tune': hour_tune,
  'hour_tiny': hour_tiny,
}

get_config = config_lib.config_getter(VARIANTS)
