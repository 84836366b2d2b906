"""A pretrained ViT adapted to A-MoD and fine-tuned on ImageNet.

AdamW, 100 epochs of batch 128 at 1e-5, cutmix .8 (Gadhikar et al. 2024); the
length of the warm-up and the last rate are our choice. Other ImageNet recipes
use the data and helpers of this file.

    python train.py --config=configs/vit/imagenet.py:deit_small \\
      --workdir=runs/amod --config.init=deit_small_patch16_224.safetensors

Variants: `deit_tiny`, `deit_small` (the default), `vit_base`, `vit_large`, each
with A-MoD on half of the tokens. Suffixes change the routing: `_mod` takes a
learnt router; `_late` keeps the first four blocks dense; `_multiplied`
multiplies the updates by the scores; `_dense` has no routing; `_isoflop` has as
many of the dense model's first blocks as cost what A-MoD does, and
`_isoflop_eighth` likewise for a capacity of 12.5%. `tiny` is for tests. The
capacity is `--config.model.routing.capacity`. ImageNet is read by TFDS
(`--config.data.*`).
"""

import dataclasses
import functools

from mod_jax import config as config_lib
from mod_jax.data.augment import AugmentConfig
from mod_jax.data.images import ImageDataConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import vit
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

digits = config_lib.sibling(__file__, 'digits')

NUM_TRAIN = 1_281_167
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The augmentation of DeiT (Touvron et al. 2021).
AUGMENT = AugmentConfig(
  crop='random_resized',
  flip=0.5,
  randaugment_ops=2,
  randaugment_magnitude=9,
  randaugment_noise=0.5,
  erase=0.25,
  mixup=0.8,
  cutmix=1.0,
  label_smoothing=0.1,
)

# The augmentation of A-MoD: that of DeiT with another cutmix.
AMOD_AUGMENT = dataclasses.replace(AUGMENT, cutmix=0.8)

AMOD = VisionRoutingConfig(capacity=0.5)
MOD = dataclasses.replace(AMOD, score='learned')
ROUTINGS = {
  '': AMOD,
  '_mod': MOD,
  '_late': dataclasses.replace(AMOD, first=4),
  '_multiplied': dataclasses.replace(AMOD, gate='raw'),
  '_dense': None,
}
BACKBONES = ('deit_tiny', 'deit_small', 'vit_base', 'vit_large')
# Numbers of blocks in the paper. For DeiT-S and ViT-B at 12.5% these are six,
# but seven would be nearer in FLOPs (`ViTConfig.isoflop_twin`).
ISOFLOP = {
  '_isoflop': dict(zip(BACKBONES, (9, 9, 9, 18), strict=True)),
  '_isoflop_eighth': dict(zip(BACKBONES, (7, 6, 6, 13), strict=True)),
}


def data(augment: AugmentConfig) -> ImageDataConfig:
  """Returns ImageNet at 224 pixels, decoded and augmented by processes."""
  return ImageDataConfig(
    source='tfds',
    name='imagenet2012',
    image_size=224,
    mean=MEAN,
    std=STD,
    augment=augment,
    workers=8,
  )


def num_steps(epochs: int, batch_size: int, num_train: int = NUM_TRAIN) -> int:
  """Returns the number of steps in `epochs`."""
  return epochs * num_train // batch_size


def evaluation(every: float, batch_size: int = 256) -> EvaluationConfig:
  """Returns evaluation on all held-out images; see `EvaluationConfig.every`."""
  return EvaluationConfig(
    every=every, batches=0, batch_size=batch_size, final_batches=0
  )


def finetune(backbone: str, suffix: str) -> ExperimentConfig:
  """Returns the fine-tuning run of a backbone with a routing suffix."""
  steps = num_steps(100, 128)
  model = vit.BACKBONES[backbone](dtype='bfloat16')
  if suffix in ISOFLOP:
    model = model.isoflop_twin(ISOFLOP[suffix][backbone])
  else:
    model = dataclasses.replace(model, routing=ROUTINGS[suffix])
  return ExperimentConfig(
    name=f'imagenet_{backbone}{suffix}',
    model=model,
    data=data(AMOD_AUGMENT),
    optimizer=OptimizerConfig(
      learning_rate=1e-5,
      warmup_steps=0.05,
      final_fraction=0.01,
      beta2=0.999,
      weight_decay=0.05,
    ),
    train=TrainConfig(num_steps=steps, batch_size=128),
    evaluation=evaluation(0.05),
  )


FULL = {
  backbone + suffix: functools.partial(finetune, backbone, suffix)
  for backbone in BACKBONES
  for suffix in (*ROUTINGS, *ISOFLOP)
}
FULL[''] = FULL['deit_small']
VARIANTS = {**FULL, 'tiny': lambda: digits.tiny(FULL['']())}

get_config = config_lib.config_getter(VARIANTS)
