"""The effect of experts in a language model at equal FLOPs, by seed.

    python benchmarks/experts_recipe.py --workdir=runs/experts_recipe

Trains the models of `configs/lm/experts.py` on the embedded text: dense, with
Mixture-of-Depths, with experts, with half of their slots, with both kinds of
Mixture-of-Depths-and-Experts, and with two smaller experts for each token. All
take the same training FLOPs, where all slots of experts count, filled or not.
Held-out losses are those of evaluation: top-k routing, and no choice of experts
is dropped.

Each run is one line of `experts_recipe.jsonl` beside this file, and the picture
is `experts_recipe.png`; see `study.py`.
"""

from absl import app, logging
import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/experts_recipe')

experts = machine.configs('lm/experts.py')
SEEDS = (0, 1)
DENSE = 'dense'
MODELS = {
  DENSE: lambda: experts.mod.experiment(None, 'dense'),
  'MoD': lambda: experts.mod.experiment(experts.mod.ROUTING, 'mod'),
  'experts': lambda: experts.experiment(''),
  'experts, half of the slots': lambda: experts.experiment('reduced'),
  'staged': lambda: experts.experiment('staged'),
  'integrated': lambda: experts.experiment('integrated'),
  'experts, two of half the size': lambda: experts.experiment('two'),
}


def runs() -> dict[str, ExperimentConfig]:
  """Returns all runs by name, `model/seed`, one seed after another."""
  configs = {}
  for seed in SEEDS:
    for name, make in MODELS.items():
      config = experts.mod.tiny(make()) if _STUDY.tiny else make()
      configs[f'{name}/{seed}'] = config_lib.replace(
        config,
        {
          'seed': seed,
          'evaluation.every': 0,
          'evaluation.final_batches': 1 if _STUDY.tiny else 32,
          'evaluation.sample_tokens': 0,
          'checkpoint.keep': 1,
          'log.tensorboard': False,
        },
      )
  return configs


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
  _STUDY.train(runs())
  results = _STUDY.results()
  print(study_tables.experts(results))
  losses = {
    name: [run['loss'] for run in of_seed.values()]
    for name, of_seed in study_tables.by_model(results).items()
  }
  figure = viz.seed_dots(
    {'': losses},
    xlabel='held-out loss, nats per token (dots: seeds; bar: mean)',
    title='Experts and Mixture-of-Depths at equal training FLOPs',
  )
  viz.save(figure, _STUDY.path('.png'))


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
