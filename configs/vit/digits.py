"""Vision on scikit-learn's handwritten digits: offline, minutes on two cores.

    python train.py --config=configs/vit/digits.py --workdir=runs/digits
    python train.py --config=configs/vit/digits.py:amod --workdir=runs/amod \\
      --config.init=runs/digits

trains a small dense ViT, and adapts it. Variants:

* `amod`: every other block on the half of the tokens that got most attention;
* `amod_multiplied`: the score is multiplied onto the update, an ablation;
* `amod_late`: the first half of the blocks stays dense;
* `mod`, `mod_sigmoid`: a learnt router, raw or through a sigmoid;
* `dynamic`: prediction heads drop 30% of the patches three times; the frozen
  dense model is the teacher;
* `experts`: four experts in place of each feed-forward, of which a patch runs
  one; trained from scratch, as the dense model;
* `isoflop`: as many of the dense model's first blocks as cost what A-MoD does;
* `tiny`: the dense model in seconds, for tests; also `amod_tiny`, `mod_tiny`,
  `dynamic_tiny`, `experts_tiny`.

All but the dense model and `experts` start from `--config.init`, the dense run
or a checkpoint; without it they train from scratch (and `dynamic` needs its
distillation weights set to 0).
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.augment import AugmentConfig
from mod_jax.data.images import ImageDataConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig, PruningObjective

BACKBONE = ViTConfig(
  image_size=32,
  patch_size=4,
  num_classes=10,
  num_layers=8,
  width=64,
  num_heads=4,
)

AMOD = VisionRoutingConfig(capacity=0.5)
LATE = dataclasses.replace(AMOD, first=4)
MULTIPLIED = dataclasses.replace(AMOD, gate='raw')
MOD = VisionRoutingConfig(capacity=0.5, score='learned')
SIGMOID = dataclasses.replace(MOD, gate='sigmoid')


def experiment(name: str, model, **changes) -> ExperimentConfig:
  """Returns a fine-tuning run; `changes` are fields of the experiment."""
  base = ExperimentConfig(
    name=name,
    model=model,
    data=ImageDataConfig(augment=AugmentConfig(crop='pad', padding=2)),
    optimizer=OptimizerConfig(
      learning_rate=3e-4, warmup_steps=0.1, beta2=0.999, weight_decay=0.05
    ),
    train=TrainConfig(num_steps=200, batch_size=64),
    evaluation=EvaluationConfig(
      every=100, batches=0, batch_size=64, final_batches=0
    ),
  )
  return dataclasses.replace(base, **changes)


def routed(name: str, routing: VisionRoutingConfig) -> ExperimentConfig:
  """Returns the fine-tuning run of the routed backbone."""
  return experiment(name, dataclasses.replace(BACKBONE, routing=routing))


def dense() -> ExperimentConfig:
  """Returns the run of the dense model, longer and at a higher rate."""
  return experiment(
    'digits',
    BACKBONE,
    optimizer=OptimizerConfig(
      learning_rate=1e-3, warmup_steps=0.1, beta2=0.999, weight_decay=0.05
    ),
    train=TrainConfig(num_steps=600, batch_size=64),
  )


def experts() -> ExperimentConfig:
  """Returns the run of a model with experts, trained as the dense model."""
  model = dataclasses.replace(BACKBONE, experts=ExpertsConfig(num_experts=4))
  return dataclasses.replace(dense(), name='digits_experts', model=model)


def dynamic() -> ExperimentConfig:
  """Returns a pruning run, with the backbone at a tenth of the heads' rate."""
  return experiment(
    'digits_dynamic',
    DynamicViTConfig(backbone=BACKBONE, stages=(2, 4, 6), keep=0.7),
    objective=PruningObjective(),
    optimizer=OptimizerConfig(
      learning_rate=3e-3,
      warmup_steps=0.1,
      beta2=0.999,
      weight_decay=0.05,
      rules=(('^prediction_', 1.0, 0), ('.*', 0.1, 0.1)),
    ),
  )


def isoflop() -> ExperimentConfig:
  """Returns a run of as many of the dense blocks as cost what A-MoD does."""
  model = dataclasses.replace(BACKBONE, routing=AMOD).isoflop_twin()
  return experiment('digits_isoflop', model)


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a small version on small digits, in seconds, for tests."""
  model = experiment.model
  small = {
    'image_size': 16,
    'patch_size': 4,
    'num_classes': 10,
    'num_layers': 4,
    'width': 16,
    'num_heads': 2,
    'mlp_dim': None,
    'dtype': 'float32',
    'remat': 'none',
  }
  if isinstance(model, DynamicViTConfig):
    stages = tuple(range(1, 1 + len(model.stages)))
    model = dataclasses.replace(
      model,
      backbone=dataclasses.replace(model.backbone, **small),
      stages=stages,
    )
  else:
    routing = model.routing
    if routing is not None:
      routing = dataclasses.replace(routing, first=0, layers=None)
    model = dataclasses.replace(model, **small, routing=routing)
  # Replace all data but the augmentation by the digits.
  data = ImageDataConfig(image_size=16, augment=experiment.data.augment)
  if experiment.init is None and experiment.objective is not None:
    # Without a dense model there is no teacher, so no distillation.
    experiment = config_lib.replace(
      experiment,
      {
        'objective.token_distillation': 0.0,
        'objective.logit_distillation': 0.0,
      },
    )
  experiment = dataclasses.replace(
    experiment, name=f'{experiment.name}_tiny', model=model, data=data
  )
  return config_lib.replace(
    experiment,
    {
      'train.num_steps': 8,
      'train.batch_size': 16,
      'train.grad_accum_steps': 1,
      'optimizer.warmup_steps': 2,
      'evaluation.every': 4,
      'evaluation.batches': 1,
      'evaluation.final_batches': 2,
      'evaluation.batch_size': 16,
      'mesh.data': -1,
      'mesh.fsdp': 1,
      'log.every': 4,
      'checkpoint.every': 4,
    },
  )


VARIANTS = {
  '': dense,
  'amod': lambda: routed('digits_amod', AMOD),
  'amod_multiplied': lambda: routed('digits_amod_multiplied', MULTIPLIED),
  'amod_late': lambda: routed('digits_amod_late', LATE),
  'mod': lambda: routed('digits_mod', MOD),
  'mod_sigmoid': lambda: routed('digits_mod_sigmoid', SIGMOID),
  'dynamic': dynamic,
  'experts': experts,
  'isoflop': isoflop,
  'tiny': lambda: tiny(dense()),
  'amod_tiny': lambda: tiny(routed('digits_amod', AMOD)),
  'mod_tiny': lambda: tiny(routed('digits_mod', MOD)),
  'dynamic_tiny': lambda: tiny(dynamic()),
  'experts_tiny': lambda: tiny(experts()),
}

get_config = config_lib.config_getter(VARIANTS)
