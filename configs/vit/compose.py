"""Pruning, routing and adaptive width together, on the handwritten digits.

    python train.py --config=configs/vit/digits.py --workdir=runs/digits
    python train.py --config=configs/vit/digits.py:amod --workdir=runs/amod \\
      --config.init=runs/digits
    python train.py --config=configs/vit/compose.py:pruned \\
      --workdir=runs/pruned --config.init=runs/amod
    python train.py --config=configs/vit/compose.py --workdir=runs/composed \\
      --config.init=runs/pruned

Each run adds one part to the model of the previous run: a dense ViT is routed
(A-MoD); then patches are dropped before some of its blocks (DynamicViT, which
distils from the routed model); then all modules of the pruned routed model
become adaptive (ACM, in three phases).

Variants: '' adds the adaptive modules; `pruned` the pruning; `routed_acm` is
the routed model with adaptive modules, without pruning, from `runs/amod`;
`tiny` and `tiny_acm` are for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.tasks.experiment import ExperimentConfig, PruningObjective

acm = config_lib.sibling(__file__, '../acm/vit')
digits = acm.digits_recipe

ROUTED = dataclasses.replace(digits.BACKBONE, routing=digits.AMOD)
# Patches are dropped only before dense blocks: a routed block chooses tokens by
# the attention of the previous block, which must be among the same tokens.
PRUNED = DynamicViTConfig(backbone=ROUTED, stages=(2, 4, 6), keep=0.7)


def pruned() -> ExperimentConfig:
  """Returns `configs/vit/digits.py:dynamic` with the routed model."""
  return dataclasses.replace(
    digits.dynamic(), name='digits_pruned', model=PRUNED
  )


def adaptive(name: str, model) -> ExperimentConfig:
  """Returns `configs/acm/vit.py:digits` with a routed or pruned model."""
  model = model.with_parts(adaptive=AdaptiveConfig())
  return dataclasses.replace(acm.digits(), name=name, model=model)


def tiny(experiment: ExperimentConfig, objective) -> ExperimentConfig:
  """Returns a small version that takes seconds, for tests."""
  model = experiment.model
  small = digits.tiny(
    dataclasses.replace(experiment, model=model.backbone, objective=None)
  )
  model = dataclasses.replace(model, backbone=small.model, stages=(2,))
  return dataclasses.replace(small, model=model, objective=objective)


# Without distillation, since tests have no teacher.
ALONE = PruningObjective(token_distillation=0.0, logit_distillation=0.0)

VARIANTS = {
  '': lambda: adaptive('digits_composed', PRUNED),
  'pruned': pruned,
  'routed_acm': lambda: adaptive('digits_routed_acm', ROUTED),
  'tiny': lambda: tiny(pruned(), ALONE),
  'tiny_acm': lambda: tiny(
    adaptive('digits_composed', PRUNED), acm.tiny().objective
  ),
}

get_config = config_lib.config_getter(VARIANTS)
