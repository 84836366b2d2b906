"""DETR-R50 on COCO, dense and routed; a recipe that was not run here.

    python train.py --config=configs/detection/coco.py --workdir=runs/coco \\
      --config.data.path=coco --config.init=detr-resnet-50

fine-tunes the model of a Hugging Face folder on a folder with `train2017`,
`val2017` and `annotations`. Carion et al. 2020: AdamW at 1e-4, the backbone at
1e-5, stem and first stage frozen, weight decay 1e-4, gradients clipped at 0.1,
batches of 16, 300 epochs; but the rates fall to a tenth along a cosine, and in
the paper at once, after 200 epochs. Pictures are mirrored, half of them
cropped, resized, and padded to 1333 × 1333 pixels. Variants:

* `amod`: blocks 1, 3, 5 of encoder and decoder process the half of the tokens,
  or queries, and of the memory that got most attention;
* `mod`: likewise, chosen by learnt routers;
* `tiny`: the architecture at the smallest sizes, on scenes, for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.detection import DetectionDataConfig
from mod_jax.layers.resnet import ResNetConfig
from mod_jax.models.detr import DETRConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

scenes = config_lib.sibling(__file__, 'scenes')

STEPS_PER_EPOCH = 118_287 // 16


def dense(epochs: int = 300) -> ExperimentConfig:
  return ExperimentConfig(
    name='coco',
    model=DETRConfig(image_size=(1333, 1333)),
    data=DetectionDataConfig(
      source='coco',
      path='coco',
      image_size=(1333, 1333),
      short_side=800,
      train_short_sides=(480, 800),
      flip=0.5,
      crop=0.5,
      most=100,
      mean=(0.485, 0.456, 0.406),
      std=(0.229, 0.224, 0.225),
      workers=8,
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-4,
      warmup_steps=0,
      beta2=0.999,
      weight_decay=1e-4,
      clip_norm=0.1,
      rules=(
        (r'^backbone/(stem|stage_0)', 0.0, 0),
        ('^backbone/', 0.1, 0),
        ('.*', 1.0, 0),
      ),
    ),
    train=TrainConfig(num_steps=epochs * STEPS_PER_EPOCH, batch_size=16),
    evaluation=EvaluationConfig(
      every=STEPS_PER_EPOCH, batches=50, batch_size=16, final_batches=0
    ),
  )


def routed(name: str, routing) -> ExperimentConfig:
  base = dense()
  model = dataclasses.replace(base.model, routing=routing)
  return dataclasses.replace(base, name=name, model=model)


def tiny() -> ExperimentConfig:
  """Returns a small version with a ResNet that takes seconds, for tests."""
  small = scenes.tiny(scenes.dense())
  backbone = ResNetConfig(stem=4, depths=(1, 1), widths=(2, 4))
  model = dataclasses.replace(small.model, backbone=backbone, patch_size=1)
  return dataclasses.replace(
    small, name='coco_tiny', model=model, optimizer=dense().optimizer
  )


VARIANTS = {
  '': dense,
  'amod': lambda: routed('coco_amod', scenes.AMOD),
  'mod': lambda: routed('coco_mod', scenes.MOD),
  'tiny': tiny,
}

get_config = config_lib.config_getter(VARIANTS)
