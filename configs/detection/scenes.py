"""Detection on scenes: digits of several sizes among clutter, offline.

    python train.py --config=configs/detection/scenes.py --workdir=runs/boxes
    python train.py --config=configs/detection/scenes.py:amod \\
      --workdir=runs/boxes_amod

trains a small DETR from scratch, with a convolutional stem, to find all digits
of a scene of 64 pixels: one to three digits of 14 to 24 pixels. Variants:

* `amod`: every other block of encoder and decoder processes the half of the
  tokens, or queries, and of the memory that got most attention;
* `mod`: likewise, chosen by learnt routers;
* `tiny`: the dense model in seconds, for tests; also `amod_tiny`, `mod_tiny`.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.detection import DetectionDataConfig
from mod_jax.data.scenes import SceneConfig
from mod_jax.layers.routing_config import LIKE_DENSE, VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models.detr import DETRConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

SCENES = SceneConfig(least=1, most=3, scales=(1.75, 3.0), clutter=4)
MODEL = DETRConfig(
  image_size=(64, 64),
  num_classes=10,
  num_queries=8,
  backbone=ConvStemConfig(width=48, depth=5, halvings=3),
  num_layers=2,
  num_decoder_layers=4,
  width=64,
  num_heads=4,
  mlp_dim=128,
  dropout=0.0,
  place_tokens=True,
  place_temperature=20.0,
  # With a weight of 1, boxes are learnt long before classes are.
  class_weight=4.0,
)
AMOD = VisionRoutingConfig(capacity=0.5)
MOD = VisionRoutingConfig(capacity=0.5, score='learned', **LIKE_DENSE)


def dense() -> ExperimentConfig:
  return ExperimentConfig(
    name='boxes',
    model=MODEL,
    data=DetectionDataConfig(most=3, scenes=SCENES),
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      warmup_steps=0.03,
      final_fraction=0.01,
      beta2=0.999,
      weight_decay=1e-2,
      clip_norm=1.0,
    ),
    train=TrainConfig(num_steps=6000, batch_size=16),
    evaluation=EvaluationConfig(
      every=0.25, batches=4, batch_size=50, final_batches=0
    ),
  )


def routed(name: str, routing: VisionRoutingConfig) -> ExperimentConfig:
  model = dataclasses.replace(MODEL, routing=routing)
  return dataclasses.replace(dense(), name=name, model=model)


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a small version that takes seconds, for tests."""
  scenes = SceneConfig(scales=(1, 1.5), num_train=32, num_eval=8)
  data = DetectionDataConfig(image_size=(32, 32), most=4, scenes=scenes)
  model = dataclasses.replace(
    experiment.model,
    image_size=(32, 32),
    backbone=ConvStemConfig(width=4, halvings=2),
    patch_size=2,
    num_queries=6,
    num_layers=2,
    num_decoder_layers=2,
    width=16,
    num_heads=2,
    mlp_dim=16,
  )
  return dataclasses.replace(
    experiment,
    name=f'{experiment.name}_tiny',
    data=data,
    model=model,
    train=TrainConfig(num_steps=2, batch_size=4),
    evaluation=EvaluationConfig(
      every=1, batches=1, batch_size=4, final_batches=0
    ),
  )


VARIANTS = {
  '': dense,
  'amod': lambda: routed('boxes_amod', AMOD),
  'mod': lambda: routed('boxes_mod', MOD),
  'tiny': lambda: tiny(dense()),
  'amod_tiny': lambda: tiny(routed('boxes_amod', AMOD)),
  'mod_tiny': lambda: tiny(routed('boxes_mod', MOD)),
}

get_config = config_lib.config_getter(VARIANTS)
