"""A pretrained ViT adapted to a smaller data set: SGD, 200 epochs of batch 64.

The transfer recipe of A-MoD (Gadhikar et al. 2024): learning rate 0.01, cosine.

    python train.py --config=configs/vit/transfer.py:flowers \\
      --workdir=runs/flowers --config.init=deit_small_patch16_224.safetensors

Variants: `cars` (196 classes), `pets` (37), `flowers` (102, the default), each
of DeiT-S, or with `_deit_tiny`, `_vit_base` or `_vit_large` of that backbone;
each with A-MoD on half of the tokens, with `_mod` for a learnt router and
`_dense` for none, such as `cars_vit_base_mod`; `tiny` for tests. The head is
initialised anew, since the classes differ. On Cars, DeiT-S and ViT-B keep their
first four blocks dense, as in the paper. The augmentation, crops and flips
only, is our choice.
"""

import dataclasses
import functools

from mod_jax import config as config_lib
from mod_jax.data.augment import AugmentConfig
from mod_jax.models import vit
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

imagenet = config_lib.sibling(__file__, 'imagenet')

# TFDS name, classes, training images, and their splits; all hold out `test`.
DATA = {
  'cars': ('cars196', 196, 8_144, 'train'),
  'pets': ('oxford_iiit_pet', 37, 3_680, 'train'),
  'flowers': ('oxford_flowers102', 102, 2_040, 'train+validation'),
}
LATE = {('cars', 'deit_small'), ('cars', 'vit_base')}
SUFFIXES = ('', '_mod', '_dense')


def transfer(which: str, backbone: str, suffix: str) -> ExperimentConfig:
  name, classes, num_train, train_split = DATA[which]
  steps = imagenet.num_steps(200, 64, num_train)
  routing = imagenet.ROUTINGS[suffix]
  if routing is not None and (which, backbone) in LATE:
    routing = dataclasses.replace(routing, first=4)
  return ExperimentConfig(
    name=f'{which}_{backbone}{suffix}',
    model=vit.BACKBONES[backbone](num_classes=classes, routing=routing),
    data=dataclasses.replace(
      imagenet.data(AugmentConfig(crop='random_resized', flip=0.5)),
      name=name,
      train_split=train_split,
      eval_split='test',
    ),
    optimizer=OptimizerConfig(
      kind='sgd',
      learning_rate=0.01,
      warmup_steps=0,
      final_fraction=0.0,
      weight_decay=0.0,
    ),
    train=TrainConfig(num_steps=steps, batch_size=64),
    evaluation=imagenet.evaluation(0.05),
  )


VARIANTS = {
  f'{which}_{backbone}{suffix}': functools.partial(
    transfer, which, backbone, suffix
  )
  for which in DATA
  for backbone in imagenet.BACKBONES
  for suffix in SUFFIXES
}
VARIANTS |= {
  which + suffix: VARIANTS[f'{which}_deit_small{suffix}']
  for which in DATA
  for suffix in SUFFIXES
}
VARIANTS[''] = VARIANTS['flowers']
VARIANTS['tiny'] = lambda: imagenet.digits.tiny(VARIANTS['']())

get_config = config_lib.config_getter(VARIANTS)
