"""Converts a dense language model to Mixture-of-Depths, and trains it further.

    python train.py --config=configs/lm/convert.py --workdir=runs/routed \\
      --config.init=FOLDER --config.data.files='texts/**/*.txt'

`init` is a mod_jax run, or a Hugging Face folder with a Llama, Mistral, Qwen2
or Qwen3 model, which also determines sizes and tokenizer. Every other block of
the deeper half becomes routed. The training starts from the function of the
dense model: gates are 1 at first, and the capacity falls from 1 over the first
fifth of the steps. Variants:

* `eighth`, the default: routed blocks process 12.5% of the tokens;
* `half`: 50%;
* `routers`: as the default, but only the routers are trained;
* `lora`: as the default, but only the routers are trained, and low-rank
  adapters (LoRA) of the deeper half, where the routed blocks are; checkpoints
  leave out the dense model's weights, which are read from `init`;
* `distilled`: as the default, with the divergence from the dense model's
  predictions added to the loss;
* `gaussian`: as the default, with random scores, a control;
* `every_other`: every other block of all depths;
* `tiny`: on the embedded text in seconds, for tests.

The learning rates did well for a model of 135M parameters (docs/recipes.md); a
larger model may need a lower `--config.optimizer.learning_rate`, which scales
all of them. The choice of the routed blocks mattered more than all else that
was tried: `mod_jax.load(FOLDER).study('influence', data)` measures which blocks
turn the features least, and `--config.model.routing.layers='(12, 13)'` routes
the blocks 12 and 13.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.errors import UserError
from mod_jax.layers import lora
from mod_jax.layers.routing_config import LIKE_DENSE, MoDConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.tasks.experiment import ConversionObjective, ExperimentConfig

files = config_lib.sibling(__file__, 'files')

ROUTERS = r'(^|/)(router|predictor)/'
# Learning rates of all weights, of routers, and of adapters.
RATE, ROUTERS_RATE, ADAPTERS_RATE = 3e-4, 1e-3, 1e-4
# `complete` replaces this pattern by one of the deeper half of the blocks.
DEEPER = (r'block_[1-9]\d*/.*',)
ROUTING = MoDConfig(
  capacity=0.125,
  **LIKE_DENSE,
  first=1,  # `complete` replaces 1 by half the number of the model's blocks.
  router_loss=0.01,
  threshold_decay=0.99,
)


def convert(name: str, *, objective=None, rest=1.0, **routing):
  """Returns the config of a conversion.

  Args:
    name: suffix of the run's name.
    objective: an additional objective; None for the next token alone.
    rest: factor on the learning rate of all weights but the routers; 0 freezes
      these weights.
    **routing: fields of `MoDConfig`.
  """
  learned = routing.get('score', 'learned') == 'learned'
  base = files.files(f'convert_{name}', dataclasses.replace(ROUTING, **routing))
  return dataclasses.replace(
    base,
    objective=objective,
    train=dataclasses.replace(base.train, capacity_warmup_steps=0.2),
    optimizer=OptimizerConfig(
      learning_rate=RATE,
      warmup_steps=0.03,
      final_fraction=0.1,
      weight_decay=0.0,
      rules=(
        ((ROUTERS, ROUTERS_RATE / RATE, 0), ('.*', rest, 0)) if learned else ()
      ),
    ),
  )


def adapted():
  """Returns the config of a conversion that trains adapters and routers."""
  config = convert('lora', rest=0.0)
  rules = (
    (lora.PARAMETERS, ADAPTERS_RATE / RATE, 0),
    *config.optimizer.rules,
  )
  return config_lib.replace(
    config,
    {
      'model.lora': lora.LoRAConfig(maps=DEEPER),
      'optimizer.rules': rules,
      'train.frozen': 'float32',
    },
  )


def complete(config: ExperimentConfig) -> ExperimentConfig:
  """Fills in what depends on the dense model and on the texts."""
  if config.init is None:
    if config.data.source == 'stdlib':
      return config
    raise UserError(
      'init is missing: a conversion starts from a dense model; give its run or'
      ' its directory by --config.init.'
    )
  rate = config.optimizer.learning_rate
  config = files.complete(config)
  changes = {'optimizer.learning_rate': rate}
  half, layers = config.model.num_layers // 2, config.model.num_layers
  if config.model.routing and config.model.routing.first:
    changes['model.routing.first'] = half
  if config.model.lora is not None and config.model.lora.maps == DEEPER:
    blocks = '|'.join(map(str, range(half, layers)))
    changes['model.lora.maps'] = (f'block_({blocks})/.*',)
  return config_lib.replace(config, changes)


VARIANTS = {
  '': lambda: convert('eighth'),
  'eighth': lambda: convert('eighth'),
  'half': lambda: convert('half', capacity=0.5),
  'routers': lambda: convert('routers', rest=0.0),
  'lora': adapted,
  'distilled': lambda: convert('distilled', objective=ConversionObjective()),
  'gaussian': lambda: convert(
    'gaussian', score='gaussian', router_loss=0.0, threshold_decay=0.0
  ),
  'every_other': lambda: convert('every_other', first=0),
  'tiny': lambda: files.mod.tiny(
    config_lib.replace(
      convert('eighth'), {'data.source': 'stdlib', 'data.files': ''}
    )
  ),
}

get_config = config_lib.config_getter(VARIANTS)
