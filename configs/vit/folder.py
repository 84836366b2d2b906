"""A vision transformer on your own folder of pictures.

    python train.py --config=configs/vit/folder.py:amod --workdir=runs/photos \\
      --config.data.path=photos --config.init=DIR

The folder has a subfolder of pictures for each class (`photos/cat/1.jpg`), of
which a tenth is held out, or such subfolders in `train` and `eval`. `init` is a
mod_jax run, a folder from Hugging Face or timm, or a file of weights, which
also determines sizes and preprocessing. Without `init` a small model is trained
from scratch, on pictures of 64 pixels a side. Variants:

* `dense`, the default: no conditional computation;
* `amod`: every other block on the half of the tokens that got most attention;
* `mod`: likewise, chosen by a learned router;
* `lora`: the dense model of `init`, of which only low-rank adapters (LoRA) and
  the head are trained; checkpoints leave out its other weights, which are read
  from `init`;
* `dynamic`: prediction heads drop 30% of the patches three times (DynamicViT);
* `acm`: layers split into learners, of which each token runs as many as it
  needs, at `--config.objective.budget`;
* `tiny`: the dense model on small digits in seconds, for tests.

All but `dense` start from a dense model. `dynamic` and `acm` need one with the
classes of the pictures. If `init` is not such a model (for `amod` and `mod`: if
there is no `init`), the same command trains one first, in WORKDIR/phase_dense.
Each run takes 20 epochs and at least 200 steps, unless
`--config.train.num_steps`, or `--config.dense.num_steps` for the dense model
that is trained first, says otherwise; the phases of `acm` have fixed numbers of
steps, in `--config.objective`. `--config.data.image_size` sets the size of
pictures and of the model, whose positions are interpolated if it has weights.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data import images as images_lib
from mod_jax.data.augment import AugmentConfig
from mod_jax.data.images import ImageDataConfig
from mod_jax.layers import lora
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.routing_config import LIKE_DENSE, VisionRoutingConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.pretrained import complete as complete_lib
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import (
  ACMObjective,
  ExperimentConfig,
  PhaseConfig,
  PruningObjective,
)

digits = config_lib.sibling(__file__, 'digits')
acm = config_lib.sibling(__file__, '../acm/vit')

SIZE = 64  # Pixels a side, without pretrained weights.
EPOCHS, LEAST_STEPS, BATCH = 20, 200, 32
# Factor on the steps of a model that is trained from scratch.
SCRATCH = 3
# Learning rates with pretrained weights, and from scratch.
RATE, SCRATCH_RATE = 1e-4, 1e-3
BACKBONE = ViTConfig(
  image_size=SIZE,
  patch_size=8,
  num_classes=2,
  num_layers=8,
  width=128,
  num_heads=4,
)
MOD = VisionRoutingConfig(capacity=0.5, score='learned', **LIKE_DENSE)
OPTIMIZER = OptimizerConfig(
  learning_rate=RATE, warmup_steps=0.1, beta2=0.999, weight_decay=0.05
)


def folder(name: str, model, **changes) -> ExperimentConfig:
  """Returns a run; `complete` sets what depends on the pictures."""
  dense = None
  if model != model.dense_twin():
    dense = PhaseConfig(
      num_steps=LEAST_STEPS,
      batch_size=BATCH,
      learning_rate=RATE,
      warmup_steps=0.1,
    )
  base = ExperimentConfig(
    name=f'folder_{name}',
    model=model,
    data=ImageDataConfig(
      source='folder',
      path='photos',
      image_size=SIZE,
      unreadable='skip',
      augment=AugmentConfig(crop='random_resized', min_scale=0.25, flip=0.5),
    ),
    optimizer=OPTIMIZER,
    train=TrainConfig(num_steps=LEAST_STEPS, batch_size=BATCH),
    evaluation=EvaluationConfig(
      every=0.25, batches=0, batch_size=BATCH, final_batches=0
    ),
    dense=dense,
  )
  return dataclasses.replace(base, **changes)


def routed(name: str, routing: VisionRoutingConfig) -> ExperimentConfig:
  return folder(name, dataclasses.replace(BACKBONE, routing=routing))


def dynamic() -> ExperimentConfig:
  """Returns a pruning run, with the backbone at a tenth of the heads' rate."""
  return folder(
    'dynamic',
    DynamicViTConfig(backbone=BACKBONE, stages=(2, 4, 6), keep=0.7),
    objective=PruningObjective(),
    optimizer=dataclasses.replace(
      OPTIMIZER,
      learning_rate=1e-3,
      rules=(('^prediction_', 1.0, 0), ('.*', 0.1, 0.1)),
    ),
  )


def adapted() -> ExperimentConfig:
  """Returns a run that trains adapters and the head, at ten times the rate."""
  return folder(
    'lora',
    dataclasses.replace(BACKBONE, lora=lora.LoRAConfig()),
    optimizer=dataclasses.replace(
      OPTIMIZER,
      learning_rate=10 * RATE,
      rules=((lora.PARAMETERS, 1.0, 0), ('^head', 1.0, 0), ('.*', 0.0, 0)),
    ),
    train=TrainConfig(
      num_steps=LEAST_STEPS, batch_size=BATCH, frozen='float32'
    ),
  )


def adaptive() -> ExperimentConfig:
  """Returns the three phases of the digits' conversion, in batches of 32."""
  objective = acm.digits().objective
  phases = {
    name: dataclasses.replace(phase, batch_size=BATCH)
    for name, phase in objective.phases.items()
  }
  return folder(
    'acm',
    dataclasses.replace(BACKBONE, adaptive=AdaptiveConfig()),
    objective=dataclasses.replace(objective, **phases),
    optimizer=acm.ADAM,
  )


def complete(config: ExperimentConfig) -> ExperimentConfig:
  """Sets classes and sizes, and the steps by the number of pictures."""
  if config.data.source != 'folder':
    return config
  size = config.data.image_size
  config = complete_lib.images(
    config, image_size=size if size != SIZE else None
  )
  count = len(images_lib.open_split(config.data, 'train'))
  batch = min(config.train.batch_size, 1 << (count.bit_length() - 1))
  steps = max(LEAST_STEPS, EPOCHS * count // batch)
  changes = {'train.batch_size': batch, 'train.num_steps': steps}
  if config.model.adaptive is not None:
    # None stands for the defaults.
    changes['objective'] = objective = config.objective or ACMObjective()
    for name in objective.phases:
      changes[f'objective.{name}.batch_size'] = batch
  scratch = config.init is None
  if config.dense is not None:
    changes |= {
      'dense.batch_size': batch,
      'dense.num_steps': SCRATCH * steps if scratch else steps,
      'dense.learning_rate': SCRATCH_RATE if scratch else RATE,
    }
  elif scratch:
    changes['train.num_steps'] = SCRATCH * steps
    changes['optimizer.learning_rate'] = SCRATCH_RATE
  return config_lib.replace(config, changes)


VARIANTS = {
  '': lambda: folder('dense', BACKBONE),
  'dense': lambda: folder('dense', BACKBONE),
  'amod': lambda: routed('amod', VisionRoutingConfig(capacity=0.5)),
  'mod': lambda: routed('mod', MOD),
  'lora': adapted,
  'dynamic': dynamic,
  'acm': adaptive,
  'tiny': lambda: digits.tiny(folder('dense', BACKBONE)),
}

get_config = config_lib.config_getter(VARIANTS)
