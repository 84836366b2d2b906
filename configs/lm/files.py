"""A language model on your own text files.

    python train.py --config=configs/lm/files.py --workdir=runs/texts \\
      --config.data.files='texts/**/*.txt'

Whole files are held out, chosen by a hash of their names. A subword tokenizer
is trained on the rest, unless one is given by
`--config.data.tokenizer=huggingface --config.data.tokenizer_path=FILE` (or
`sentencepiece`). With `--config.init=RUN`, sizes, weights and tokenizer are
that run's. Variants:

* `mod`, the default: four blocks, every other one on 12.5% of the tokens;
* `dense`: the same without routing;
* `acm`: layers split into learners, of which each token runs as many as it
  needs, at `--config.objective.budget`; without `init` a dense model is trained
  first, by the same command, in WORKDIR/phase_dense;
* `tiny`: the default on the embedded text in seconds, for tests.

A run takes 600 steps, or fewer if it would read its texts more than five times.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data import text
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.pretrained import complete as complete_lib
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ACMObjective, ExperimentConfig, PhaseConfig

mod = config_lib.sibling(__file__, 'mod')
acm = config_lib.sibling(__file__, '../acm/lm')

STEPS, EPOCHS, BATCH = 600, 5, 16
OPTIMIZER = OptimizerConfig(learning_rate=4e-3, warmup_steps=0.1)


def files(name: str, routing) -> ExperimentConfig:
  """Returns a run; `complete` sets what depends on the texts."""
  return ExperimentConfig(
    name=f'files_{name}',
    model=LMConfig(
      vocab_size=2048, num_layers=4, width=192, num_heads=6, routing=routing
    ),
    data=TextDataConfig(
      source='files',
      files='texts/**/*.txt',
      tokenizer='bpe',
      length=256,
      max_epochs=EPOCHS,
    ),
    optimizer=OPTIMIZER,
    train=TrainConfig(num_steps=STEPS, batch_size=BATCH),
    evaluation=EvaluationConfig(every=0.25, batch_size=BATCH),
  )


def adaptive() -> ExperimentConfig:
  """Returns the phases of `configs/acm/lm.py`, after one of a dense model."""
  converted = acm.convert(files('dense', None), 'files_acm', AdaptiveConfig())
  return dataclasses.replace(
    converted,
    dense=PhaseConfig(
      num_steps=STEPS,
      batch_size=BATCH,
      learning_rate=OPTIMIZER.learning_rate,
      warmup_steps=OPTIMIZER.warmup_steps,
    ),
  )


def complete(config: ExperimentConfig) -> ExperimentConfig:
  """Sets vocabulary and sizes, and the steps by the number of tokens."""
  if config.data.source == 'stdlib' and config.init is None:
    return config
  config = complete_lib.language(config)
  num_tokens = text.num_train_tokens(config.data) * config.data.max_epochs
  batch = config.train.batch_size
  max_steps = int(num_tokens) // (batch * config.data.length)
  steps = max(1, min(STEPS, max_steps))
  changes = {'train.num_steps': steps}
  if config.init is not None:
    changes['optimizer.learning_rate'] = OPTIMIZER.learning_rate / 4
  if config.dense is not None:
    changes |= {'dense.batch_size': batch, 'dense.num_steps': steps}
  if config.model.adaptive is not None:
    # None stands for the defaults.
    changes['objective'] = objective = config.objective or ACMObjective()
    for name, phase in objective.phases.items():
      changes[f'objective.{name}.batch_size'] = batch
      changes[f'objective.{name}.num_steps'] = min(phase.num_steps, steps)
  return config_lib.replace(config, changes)


VARIANTS = {
  '': lambda: files('mod', mod.ROUTING),
  'mod': lambda: files('mod', mod.ROUTING),
  'dense': lambda: files('dense', None),
  'acm': adaptive,
  'tiny': lambda: mod.tiny(
    config_lib.replace(
      files('mod', mod.ROUTING), {'data.source': 'stdlib', 'data.files': ''}
    )
  ),
}

get_config = config_lib.config_getter(VARIANTS)
