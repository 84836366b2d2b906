"""DynamicViT on ImageNet: 30 epochs, distilling from the frozen dense model.

Rao et al. 2021: AdamW, batch 1024; heads at 1e-3 · batch / 1024, the backbone
at a hundredth of that and frozen for five epochs; cosine to 1e-6; weight decay
.05; the rest as DeiT, with five epochs of warm-up and averaged parameters.

The authors' code differs from this recipe in that it freezes class token and
position embeddings; trains ViT-B with stochastic depth of .2 and a weight of 5
on the ratio (`--config.model.backbone.stochastic_depth`,
`--config.objective.ratio`); and for LV-ViT distils the per-token predictions of
the second head instead of the features.

    python train.py --config=configs/vit/dynamic.py:deit_small \\
      --workdir=runs/dynamic --config.init=deit_small_patch16_224.safetensors

Variants: `deit_small` (the default), `vit_base`, `lvvit_small`,
`lvvit_medium`. The ablations of the paper's Table 4, on DeiT-S: `random`,
`class_attention`, `static`, `structural`; `one_stage`, `two_stages`. `tiny` is
for tests. `--config.model.keep` is the fraction of tokens that a stage keeps.
"""

import functools

from mod_jax import config as config_lib
from mod_jax.models import vit
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig, PruningObjective

imagenet = config_lib.sibling(__file__, 'imagenet')

EPOCHS, FROZEN, WARMUP, BATCH = 30, 5, 5, 1024
RATE, FINAL = 1e-3 * BATCH / 1024, 1e-6
STAGES = {
  'deit_small': (3, 6, 9),
  'vit_base': (3, 6, 9),
  'lvvit_small': (4, 8, 12),
  'lvvit_medium': (5, 10, 15),
}


def dynamic(backbone: str, **changes) -> ExperimentConfig:
  """Returns the recipe's run; `changes` are fields of the model."""
  steps = imagenet.num_steps(EPOCHS, BATCH)
  model = {'stages': STAGES[backbone], 'keep': 0.7, **changes}
  model = DynamicViTConfig(
    backbone=vit.BACKBONES[backbone](dtype='bfloat16'), **model
  )
  # Parameters of learnt scores, which get the full rate; None without any.
  score_params = {'predicted': '^prediction_', 'static': '^pattern_'}.get(
    model.score
  )
  rules = (('.*', 0.01, FROZEN / EPOCHS if score_params else 0),)
  if score_params:
    rules = ((score_params, 1.0, 0), *rules)
  return ExperimentConfig(
    name=f'dynamic_{backbone}',
    model=model,
    objective=PruningObjective(),
    data=imagenet.data(imagenet.AUGMENT),
    optimizer=OptimizerConfig(
      learning_rate=RATE,
      warmup_steps=WARMUP / EPOCHS,
      final_fraction=FINAL / RATE,
      beta2=0.999,
      weight_decay=0.05,
      clip_norm=0.0,
      rules=rules,
    ),
    # The decay is that of the authors' code; DeiT's is .99996, for ten times
    # the epochs.
    train=TrainConfig(num_steps=steps, batch_size=BATCH, ema_decay=0.9999),
    evaluation=imagenet.evaluation(imagenet.num_steps(1, BATCH)),
  )


def ablation(**changes):
  return lambda: dynamic('deit_small', **changes)


VARIANTS = {
  '': lambda: dynamic('deit_small'),
  **{name: functools.partial(dynamic, name) for name in STAGES},
  'random': ablation(score='random'),
  'class_attention': ablation(score='class_attention'),
  'static': ablation(score='static'),
  # One stage, which keeps a quarter of the patches.
  'structural': ablation(score='structural', stages=(6,)),
  # Both cost as much as three stages with keep=.7: 2.9 GMACs. Place and ratio
  # of the two stages are our choice: thirds of the depth, as the three stages
  # are at quarters.
  'one_stage': ablation(stages=(6,), keep=0.25),
  'two_stages': ablation(stages=(4, 8), keep=0.56),
  'tiny': lambda: imagenet.digits.tiny(dynamic('deit_small')),
}

get_config = config_lib.config_getter(VARIANTS)
