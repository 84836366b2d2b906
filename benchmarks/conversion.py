"""Converting a dense language model to a routed one, by recipe and seed.

    python benchmarks/conversion.py --workdir=runs/conversion

For each seed a dense model of four blocks is trained on the embedded text. From
its weights, several models are trained for half as many steps again: the dense
model itself; models converted by `configs/lm/convert.py`, at capacities of
12.5% and 50%; one that trains the routers alone; one that also distils from the
dense model; one with random scores; and one without the block that would be
routed. For comparison, a routed and a dense model are trained from scratch with
as many training FLOPs. Held-out losses are those of top-k routing on the same
rows, or of the model without the block if that was removed.

Each run is one line of `conversion.jsonl` beside this file; see `study.py`.
"""

import dataclasses

from absl import app, logging
import machine
from study import Study
import study_tables
from study_tables import PARENT, PRUNED

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.layers import rules
from mod_jax.tasks.experiment import ConversionObjective, ExperimentConfig

_STUDY = Study(__file__, 'runs/conversion')

convert = machine.configs('lm/convert.py')
SEEDS = (0, 1, 2)
STEPS, MORE = 600, 300
# A quarter of the dense model's learning rate; routers have ten times this.
RATE = 1e-3
_RULES = ((convert.ROUTERS, 10.0, 0), ('.*', 1.0, 0))
ON = 'dense, trained on'
SCRATCH, DENSE_SCRATCH = 'routed from nothing, 12.5%', 'dense from nothing'
# Conversions: changes to the recipe's config.
CONVERTED = {
  'converted, 12.5%': {},
  'converted, 50%': {'model.routing.capacity': 0.5},
  'converted, routers alone': {
    'optimizer.rules': ((convert.ROUTERS, 10.0, 0), ('.*', 0.0, 0)),
  },
  'converted, beside the dense model': {'objective': ConversionObjective()},
  'converted, random scores': {
    'model.routing.score': 'gaussian',
    'model.routing.router_loss': 0.0,
    'model.routing.threshold_decay': 0.0,
    'optimizer.rules': (),
  },
  PRUNED: {
    'model.routing.train_rule': rules.Never(),
    'model.routing.router_loss': 0.0,
    'model.routing.threshold_decay': 0.0,
    'train.capacity_warmup_steps': 0,
  },
}


def parent() -> ExperimentConfig:
  """Returns the run of the dense model that is converted."""
  return config_lib.replace(
    convert.files.files('dense', None),
    {
      'model.width': 128,
      'model.num_heads': 4,
      'data.source': 'stdlib',
      'data.files': '',
      'data.max_epochs': 1.0,
      'train.num_steps': STEPS,
      'evaluation.every': 0,
      'evaluation.final_batches': 32,
      'evaluation.sample_tokens': 0,
      'checkpoint.keep': 1,
      'log.every': 20,
      'log.tensorboard': False,
    },
  )


def runs() -> dict[str, ExperimentConfig]:
  """Returns all runs by name, `run/seed`, in order."""
  configs = {}
  for seed in SEEDS:
    first = config_lib.replace(_small(parent()), {'seed': seed})
    configs[f'{PARENT}/{seed}'] = first
    init = str(_STUDY.workdir(f'{PARENT}/{seed}'))
    dense_again = config_lib.replace(
      first,
      {
        'init': init,
        'train.num_steps': first.train.num_steps // 2,
        'optimizer.learning_rate': RATE,
        'optimizer.warmup_steps': 0.05,
      },
    )
    configs[f'{ON}/{seed}'] = dense_again
    # The initial values of routers with which the recorded results were made.
    routing = dataclasses.replace(
      convert.ROUTING, router_norm=False, router_std=0.02
    )
    routed = dataclasses.replace(
      dense_again, model=dataclasses.replace(dense_again.model, routing=routing)
    )
    routed = config_lib.replace(
      routed,
      {
        'model.routing.first': dense_again.model.num_layers // 2,
        'optimizer.rules': _RULES,
        'train.capacity_warmup_steps': 0.2,
      },
    )
    for name, changes in CONVERTED.items():
      objective = changes.get('objective')
      fields = {k: v for k, v in changes.items() if k != 'objective'}
      config = config_lib.replace(routed, fields)
      configs[f'{name}/{seed}'] = dataclasses.replace(
        config, objective=objective
      )
    configs[f'{SCRATCH}/{seed}'] = _from_nothing(first, routed, routed.model)
    configs[f'{DENSE_SCRATCH}/{seed}'] = _from_nothing(
      first, routed, first.model
    )
  return configs


def _from_nothing(first, routed, model) -> ExperimentConfig:
  """Returns a run from scratch with the FLOPs of both phases together."""
  rows, length = first.train.batch_size, first.data.length
  budget = rows * first.train.num_steps * flops.train(first.model, length)
  budget += rows * routed.train.num_steps * flops.train(routed.model, length)
  steps = flops.steps_within(budget, model, rows, length)
  return dataclasses.replace(
    first,
    model=model,
    train=dataclasses.replace(first.train, num_steps=steps),
  )


def _small(config: ExperimentConfig) -> ExperimentConfig:
  if not _STUDY.tiny:
    return config
  return config_lib.replace(
    config,
    {
      'model.width': 16,
      'model.num_heads': 2,
      'model.vocab_size': 256,
      'data.tokenizer': 'bytes',
      'data.length': 32,
      'train.num_steps': 10,
      'train.batch_size': 8,
      'optimizer.warmup_steps': 1,
      'evaluation.batch_size': 8,
      'evaluation.final_batches': 1,
    },
  )


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
  _STUDY.train(runs())
  print(study_tables.conversion(_STUDY.results()))


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
