"""A vision transformer from scratch on ImageNet, dense or routed.

DeiT's recipe (Touvron et al. 2021): AdamW, 300 epochs of batch 1024 at 1e-3,
RandAugment, random erasing, mixup, cutmix, label smoothing, stochastic depth,
averaged parameters. As in A-MoD (Gadhikar et al. 2024), ViT-B trains for 160
epochs, and cutmix is .8. DeiT's repeated augmentation, with three versions of a
picture in each batch and a third of the pictures in each epoch, is left out.

    python train.py --config=configs/vit/scratch.py:deit_small --workdir=runs/s

Variants: `deit_tiny`, `deit_small` (the default), `vit_base`, each dense; with
`_amod` or `_mod` routed on half of the tokens; `tiny` for tests.
"""

import functools

from mod_jax import config as config_lib
from mod_jax.models import vit
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

imagenet = config_lib.sibling(__file__, 'imagenet')

EPOCHS = {'deit_tiny': 300, 'deit_small': 300, 'vit_base': 160}
ROUTINGS = {'': None, '_amod': imagenet.AMOD, '_mod': imagenet.MOD}


def scratch(backbone: str, suffix: str) -> ExperimentConfig:
  steps = imagenet.num_steps(EPOCHS[backbone], 1024)
  return ExperimentConfig(
    name=f'scratch_{backbone}{suffix}',
    model=vit.BACKBONES[backbone](
      routing=ROUTINGS[suffix], stochastic_depth=0.1, dtype='bfloat16'
    ),
    data=imagenet.data(imagenet.AMOD_AUGMENT),
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      warmup_steps=5 / EPOCHS[backbone],
      final_fraction=0.01,
      beta2=0.999,
      weight_decay=0.05,
      clip_norm=0.0,
    ),
    train=TrainConfig(num_steps=steps, batch_size=1024, ema_decay=0.99996),
    evaluation=imagenet.evaluation(1 / 30),
  )


VARIANTS = {
  backbone + suffix: functools.partial(scratch, backbone, suffix)
  for backbone in EPOCHS
  for suffix in ROUTINGS
}
VARIANTS[''] = VARIANTS['deit_small']
VARIANTS['tiny'] = lambda: imagenet.digits.tiny(VARIANTS['']())

get_config = config_lib.config_getter(VARIANTS)
