"""The effect of routed blocks in a small language model, by recipe and seed.

    python benchmarks/routing_recipe.py --workdir=runs/routing_recipe

Trains many small models on the embedded text. At equal steps, models with two
routed blocks of four are compared with dense models of four and of two blocks;
further groups compare models at equal training FLOPs. Held-out losses are those
of top-k routing, on the same rows for all models.

Each run is one line of `routing_recipe.jsonl` beside this file. Runs that are
missing there are trained in the order of the groups, unless `--table`; one that
was stopped continues in its workdir, and several processes may share the work.
Then a table of all results is printed, and a picture drawn beside this file.
"""

from absl import app, logging
import machine
from machine import cell, spread
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.checkpoints import CheckpointConfig
from mod_jax.runs.run_config import EvaluationConfig, LogConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/routing_recipe')

# At equal steps: four blocks, every other one routed at 12.5%.
STEPS = ExperimentConfig(
  model=LMConfig(
    vocab_size=2048,
    num_layers=4,
    width=128,
    num_heads=4,
    routing=MoDConfig(capacity=0.125, gate='sigmoid', router_loss=0.01),
  ),
  data=TextDataConfig(tokenizer='bpe', tokenizer_vocab_size=2048, length=256),
  optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=100),
  train=TrainConfig(num_steps=400, batch_size=16),
  evaluation=EvaluationConfig(
    every=0, batch_size=16, final_batches=32, sample_tokens=0
  ),
  checkpoint=CheckpointConfig(every=100, keep=1),
  log=LogConfig(every=20, tensorboard=False),
)
# At equal FLOPs: a wider model, for as many steps as the budget allows.
BUDGET = 2.32e13
FLOPS = config_lib.replace(STEPS, {'model.width': 192, 'model.num_heads': 6})

_TWINS = {
  'dense, 4 blocks': {'model.routing': None},
  'dense, 2 blocks': {'model.routing': None, 'model.num_layers': 2},
}
_NO_AUX = {'model.routing.router_loss': 0.0}
_BYTES = {'data.tokenizer': 'bytes', 'model.vocab_size': 256}


def _subwords(size):
  return {'data.tokenizer_vocab_size': size, 'model.vocab_size': size}


def _length(length):
  # Batches keep their number of tokens, so that steps stay comparable.
  return {'data.length': length, 'train.batch_size': 16 * 256 // length}


# Group -> (base, seeds, {run: changes}), in the order in which they are run.
GROUPS = {
  'gate': (
    STEPS,
    (0, 1, 2),
    {
      **_TWINS,
      'sigmoid': {},
      'raw': {'model.routing.gate': 'raw'},
    },
  ),
  'auxiliary loss': (
    STEPS,
    (0, 1, 2),
    {
      'sigmoid, no aux': _NO_AUX,
      'raw, no aux': {**_NO_AUX, 'model.routing.gate': 'raw'},
      'one_plus_tanh': {'model.routing.gate': 'one_plus_tanh'},
      'alpha_sigmoid': {'model.routing.gate': 'alpha_sigmoid'},
      'stride': {'model.routing.score': 'stride'},
      'gaussian': {'model.routing.score': 'gaussian'},
    },
  ),
  'equal FLOPs': (
    FLOPS,
    (0, 1, 2),
    {
      'MoD, 2 blocks': {'model.num_layers': 2},
      'dense, 1 block': {'model.routing': None, 'model.num_layers': 1},
      'dense, 2 blocks': {'model.routing': None, 'model.num_layers': 2},
      'MoD, 4 blocks': {},
      'MoD raw, 2 blocks': {
        'model.num_layers': 2,
        'model.routing.gate': 'raw',
      },
    },
  ),
  'one seed': (
    STEPS,
    (0,),
    {
      'sigmoid, aux .001': {'model.routing.router_loss': 0.001},
      'sigmoid, aux .1': {'model.routing.router_loss': 0.1},
      'alpha_sigmoid, no aux': {
        **_NO_AUX,
        'model.routing.gate': 'alpha_sigmoid',
      },
      'sigmoid, predictor alone': {
        **_NO_AUX,
        'model.routing.predictor_width': 64,
      },
      'sigmoid, capacity .1875': {'model.routing.capacity': 0.1875},
      'sigmoid, capacity .25': {'model.routing.capacity': 0.25},
      'sigmoid, capacity .5': {'model.routing.capacity': 0.5},
      'sigmoid, capacity 1': {'model.routing.capacity': 1.0},
      'sigmoid, first and last dense': {'model.routing.layers': (1, 2)},
      'sigmoid, normalised router': {'model.routing.router_norm': True},
      'sigmoid, router rate x 10': {
        'optimizer.rules': (('router', 10.0, 0), ('.', 1.0, 0)),
      },
      **{
        f'{name}, {what}': {**tokens, **changes}
        for what, tokens in (
          ('length 512', _length(512)),
          ('length 1024', _length(1024)),
          ('bytes', _BYTES),
          ('BPE 512', _subwords(512)),
          ('BPE 4096', _subwords(4096)),
        )
        for name, changes in {'sigmoid': {}, **_TWINS}.items()
      },
    },
  ),
}


def runs() -> dict[str, ExperimentConfig]:
  """Returns all runs by name, `group/run/seed`, in order."""
  configs = {}
  for group, (base, seeds, table) in GROUPS.items():
    for seed in seeds:
      for name, changes in table.items():
        config = config_lib.replace(base, {**changes, 'seed': seed})
        if group == 'equal FLOPs':
          config = _within_budget(config)
        configs[f'{group}/{name}/{seed}'] = _small(config)
  return configs


def _within_budget(config: ExperimentConfig) -> ExperimentConfig:
  steps = flops.steps_within(
    BUDGET, config.model, config.train.batch_size, config.data.length
  )
  return config_lib.replace(config, {'train.num_steps': steps})


def _small(config: ExperimentConfig) -> ExperimentConfig:
  if not _STUDY.tiny:
    return config
  return config_lib.replace(
    config,
    {
      'model.width': 32,
      'model.num_heads': 2,
      'data.length': 32,
      'train.num_steps': 4,
      'train.batch_size': 8,
      'optimizer.warmup_steps': 1,
      'evaluation.batch_size': 8,
      'evaluation.final_batches': 1,
    },
  )


def grouped(found: dict[str, dict]) -> dict[str, dict[str, list[dict]]]:
  """Returns the finished runs by group and by name, in order of their seeds."""
  return {
    group: {
      name: [
        found[run]
        for run in (f'{group}/{name}/{seed}' for seed in seeds)
        if run in found
      ]
      for name in names
    }
    for group, (_, seeds, names) in GROUPS.items()
  }


def table(groups: dict[str, dict[str, list[dict]]]) -> str:
  """Returns the losses of all groups, over seeds, as Markdown."""
  lines = []
  for group, rows in groups.items():
    lines += [
      f'\n| {group} | seeds | nats per token | bits per byte |'
      ' TFLOPs of training |',
      '|---|---|---|---|---|',
    ]
    for name, same in rows.items():
      if not same:
        continue
      losses, bits = (
        cell(spread([run[key] for run in same]))
        for key in ('loss', 'bits_per_byte')
      )
      lines.append(
        f'| {name} | {len(same)} | {losses} | {bits} |'
        f' {same[0]["train_flops"] / 1e12:.2f} |'
      )
  return '\n'.join(lines)


def draw(groups: dict[str, dict[str, list[dict]]]) -> None:
  """Draws the recipes that have several seeds."""
  figure = viz.seed_dots(
    {
      group: {
        name: [run['loss'] for run in same] for name, same in rows.items()
      }
      for group, rows in study_tables.recipes(groups).items()
    },
    xlabel='held-out loss, nats per token (dots: seeds; bar: mean)',
    title='What routed blocks are worth, by recipe',
  )
  viz.save(figure, _STUDY.path('.png'))


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
  _STUDY.train(runs())
  groups = grouped(_STUDY.results())
  print(table(groups))
  draw(groups)


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
