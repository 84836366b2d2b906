"""Vision on scenes: digits of several sizes among clutter, offline.

    python train.py --config=configs/vit/scenes.py --workdir=runs/scenes
    python train.py --config=configs/vit/scenes.py:amod --workdir=runs/amod \\
      --config.init=runs/scenes

trains a small dense ViT to name the largest digit of a scene, and adapts it.
Most of the 256 patches show background, so it matters which of them a model
processes. Variants:

* `sum`: the dense model, trained to give the sum of all digits;
* `amod`: every other block on the half of the tokens that got most attention;
* `mod`: likewise, by a learnt router;
* `dynamic`: prediction heads drop 30% of the patches three times; the frozen
  dense model is the teacher;
* `tome`: each block merges 24 pairs of similar tokens;
* `evit`: three blocks fuse the 30% of the patches that the class token attends
  to least;
* `isoflop`: as many of the dense model's first blocks as cost what A-MoD does;
* `quick`, `quick_amod` and so on: 64 patches, embedded by convolutions, and
  scenes of fewer digits, learnt in minutes on a CPU;
* `tiny`: the dense model in seconds, for tests; also `amod_tiny`.

`--config.data.scenes.most=6` and the other fields of `SceneConfig` make other
scenes, as many as wanted.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.scenes import SceneConfig
from mod_jax.layers.reduction import EViT, ToMe
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

digits = config_lib.sibling(__file__, 'digits')

BACKBONE = ViTConfig(
  image_size=64,
  patch_size=4,
  num_classes=10,
  num_layers=6,
  width=64,
  num_heads=4,
)
DATA = ImageDataConfig(source='scenes', image_size=64)


def on_scenes(experiment: ExperimentConfig, model, **changes):
  """Returns an experiment of `digits.py` with scenes as its data."""
  name = experiment.name.replace('digits', 'scenes')
  return dataclasses.replace(
    experiment,
    name=name,
    model=model,
    data=DATA,
    evaluation=EvaluationConfig(
      every=0.25, batches=0, batch_size=50, final_batches=0
    ),
    **changes,
  )


def dense(label: str = 'largest') -> ExperimentConfig:
  """Returns the dense model's run from scratch; `label` is what it predicts."""
  scenes = SceneConfig(label=label)
  model = dataclasses.replace(BACKBONE, num_classes=len(scenes.classes))
  train = TrainConfig(num_steps=3000, batch_size=32)
  base = on_scenes(digits.dense(), model, train=train)
  return dataclasses.replace(
    base, data=dataclasses.replace(DATA, scenes=scenes)
  )


def adapted(experiment: ExperimentConfig, model) -> ExperimentConfig:
  """Returns an experiment of `digits.py` that adapts the dense model."""
  train = TrainConfig(num_steps=1000, batch_size=32)
  return on_scenes(experiment, model, train=train)


def routed(name: str, routing) -> ExperimentConfig:
  model = dataclasses.replace(BACKBONE, routing=routing)
  return adapted(digits.routed(name, routing), model)


def dynamic() -> ExperimentConfig:
  model = DynamicViTConfig(backbone=BACKBONE, stages=(1, 2, 4), keep=0.7)
  return adapted(digits.dynamic(), model)


def reduced(name: str, reduction) -> ExperimentConfig:
  model = dataclasses.replace(BACKBONE, reduction=reduction)
  return dataclasses.replace(adapted(digits.isoflop(), model), name=name)


def isoflop() -> ExperimentConfig:
  model = dataclasses.replace(BACKBONE, routing=digits.AMOD).isoflop_twin()
  return adapted(digits.isoflop(), model)


def quick(experiment: ExperimentConfig, num_steps: int) -> ExperimentConfig:
  """Returns a version that is learnt in minutes on a CPU."""
  model = experiment.model
  small = {
    'patch_size': 8,
    'stem': ConvStemConfig(width=32, depth=4, halvings=3),
  }
  if isinstance(model, DynamicViTConfig):
    backbone = dataclasses.replace(model.backbone, **small)
    model = dataclasses.replace(model, backbone=backbone)
  else:
    if isinstance(model.reduction, ToMe):
      small['reduction'] = ToMe(r=6)
    model = dataclasses.replace(model, **small)
  scenes = SceneConfig(least=1, most=3, scales=(1.75, 3.0), clutter=4)
  return dataclasses.replace(
    experiment,
    name=f'{experiment.name}_quick',
    model=model,
    data=dataclasses.replace(experiment.data, scenes=scenes),
    train=TrainConfig(num_steps=num_steps, batch_size=32),
  )


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a small version that takes seconds, for tests."""
  if isinstance(getattr(experiment.model, 'reduction', None), EViT):
    changes = {'model.reduction.stages': (1, 2)}  # For four blocks, not six.
    experiment = config_lib.replace(experiment, changes)
  small = digits.tiny(experiment)
  scenes = SceneConfig(scales=(1, 1.5), num_train=64, num_eval=32)
  data = dataclasses.replace(DATA, image_size=32, scenes=scenes)
  pruned = isinstance(small.model, DynamicViTConfig)
  side = 'model.backbone.image_size' if pruned else 'model.image_size'
  return config_lib.replace(small, {'data': data, side: 32})


_OF_LARGEST = {
  '': dense,
  'amod': lambda: routed('digits_amod', digits.AMOD),
  'mod': lambda: routed('digits_mod', digits.MOD),
  'dynamic': dynamic,
  'tome': lambda: reduced('scenes_tome', ToMe(r=24)),
  'evit': lambda: reduced('scenes_evit', EViT(stages=(1, 2, 4))),
  'isoflop': isoflop,
}
VARIANTS = _OF_LARGEST | {
  'sum': lambda: dense('sum'),
  'quick': lambda: quick(dense(), 1500),
  **{
    f'quick_{name}': lambda make=make: quick(make(), 150)
    for name, make in _OF_LARGEST.items()
    if name
  },
  'tiny': lambda: tiny(dense()),
  'amod_tiny': lambda: tiny(routed('digits_amod', digits.AMOD)),
}

get_config = config_lib.config_getter(VARIANTS)
