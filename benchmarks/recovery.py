"""How much of the worth of more blocks routed blocks recover, by row length.

    python benchmarks/recovery.py --workdir=runs/recovery

At equal steps, a Mixture-of-Depths of four full and four routed blocks (12.5%
of the tokens) stands between dense models of four and of eight blocks. With G
for what four more dense blocks lower the held-out loss by, and d for what the
routed ones do, the recovery is d / G, and its cost the part of the further
FLOPs that the routed blocks take. Routed blocks can only pay where G itself is
worth its FLOPs, and where the recovery is far above that part.

Rows differ in length, batches have as many tokens. Routers have a sigmoid gate
and no auxiliary loss; moving thresholds are the causal rule. The learning rate
is that of the laptop's sweep (`configs/sweeps/laptop.py`), for all models; runs
at half and at twice that rate tell whether one kind of model is favoured by it.

There are two plans of 42 runs each, of which `--runs='width 64'` chooses the
cheaper one; `width 96` has three times the steps and twice the tokens. Each run
is one line of `recovery.jsonl` beside this file; see `study.py`.
"""

import dataclasses

from absl import app, logging
import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/recovery')

_LAPTOP = machine.configs('sweeps/laptop.py')
ROUTING = dataclasses.replace(_LAPTOP.ROUTING, router_loss=0.0)
# Blocks and routing of each kind of model.
MODELS = {
  study_tables.FEW: (4, None),
  study_tables.ROUTED: (8, ROUTING),
  study_tables.MANY: (8, None),
}
# The longer the rows, the more the seeds differ.
SEEDS = {32: 3, 128: 4, 512: 5}
_RATE_LENGTH = 128  # Rows with which other learning rates are tried.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  width: int
  rate: float
  steps: int
  tokens: int  # Of a batch.


# Rates follow the sweep's rule, from .015 at width 64.
PLANS = (
  Plan(width=64, rate=1.5e-2, steps=1000, tokens=4096),
  Plan(width=96, rate=1.04e-2, steps=3000, tokens=8192),
)


def run(plan: Plan, length: int, kind: str, seed: int, factor: float):
  """Returns the config of a run."""
  base = _LAPTOP.get_config('tiny' if _STUDY.tiny else '').base
  num_layers, routing = MODELS[kind]
  rows = plan.tokens // length
  width = 16 if _STUDY.tiny else plan.width
  return config_lib.replace(
    base,
    {
      'seed': seed,
      'model.num_layers': num_layers,
      'model.width': width,
      'model.num_heads': width // 16,
      'model.routing': routing,
      'data.length': length,
      'optimizer.learning_rate': plan.rate * factor,
      'optimizer.warmup_steps': 0.1,
      'train.batch_size': rows,
      'train.num_steps': 5 if _STUDY.tiny else plan.steps,
      'evaluation.every': 0,
      'evaluation.batch_size': rows,
      # As many held-out tokens for all plans and lengths.
      'evaluation.final_batches': 1 if _STUDY.tiny else 2**18 // plan.tokens,
    },
  )


def planned() -> dict[str, ExperimentConfig]:
  """Returns all runs by name; all models of a seed before the next seed."""
  runs = {}
  for plan in PLANS:
    for seed in range(max(SEEDS.values())):
      for length, seeds in SEEDS.items():
        for kind in MODELS if seed < seeds else ():
          name = study_tables.recovery_name(plan.width, length, kind)
          runs[f'{name}/{seed}'] = run(plan, length, kind, seed, 1.0)
    for factor in (0.5, 2.0):
      for kind in MODELS:
        name = study_tables.recovery_name(
          plan.width, _RATE_LENGTH, kind, factor
        )
        runs[f'{name}/0'] = run(plan, _RATE_LENGTH, kind, 0, factor)
  return runs


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
  _STUDY.train(planned())
  lines = _STUDY.results()
  print(study_tables.recovery(lines))
  print(study_tables.recovery_rates(lines))
  figure = viz.seed_dots(
    {
      f'width {width}, rows of {length}': {
        kind: [run['loss'] for run in runs] for kind, runs in arms.items()
      }
      for (width, length), arms in study_tables.recovery_arms(lines).items()
    },
    xlabel='held-out loss, nats per token (dots: seeds; bar: mean)',
    title='What four more blocks are worth, routed and dense',
  )
  viz.save(figure, _STUDY.path('.png'))


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
