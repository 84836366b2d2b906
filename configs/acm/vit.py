"""A dense ViT converted to adaptive computation modules, in three phases.

    python train.py --config=configs/acm/vit.py:digits --workdir=runs/acm \\
      --config.init=runs/digits --config.objective.budget=0.4

In the first phase learners imitate the modules that they replace, in the second
gates learn from labels, and in the third the whole model is trained for the
task at the budget (Wójcik et al. 2023). The first two phases are runs in
`phase_learners` and `phase_gates` below the workdir; the same command resumes
all of them. To run a phase alone, give
`--config.objective.phase=gates --config.init=RUN_OF_THE_PHASE_BEFORE`; to skip
one, `--config.objective.gates.num_steps=0`.

Variants: '' is ViT-B on ImageNet, the paper's recipe; `digits` is the model of
`configs/vit/digits.py`, in minutes; `ffn` and `digits_ffn` convert only their
FFNs; `tiny` is for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.augment import AugmentConfig
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.models import vit
from mod_jax.optimizer import OptimizerConfig
from mod_jax.tasks.experiment import ACMObjective, ExperimentConfig, PhaseConfig

recipe = config_lib.sibling(__file__, '../vit/imagenet')
digits_recipe = recipe.digits

# Plain Adam, without weight decay. The phases set the learning rates.
ADAM = OptimizerConfig(
  warmup_steps=0, beta2=0.999, weight_decay=0.0, clip_norm=1.0
)


# The augmentation of DeiT III (Touvron et al. 2022), as in the paper; cutmix
# and label smoothing are those of the authors' code.
AUGMENT = AugmentConfig(
  crop='random_resized',
  flip=0.5,
  three_augment=True,
  color_jitter=0.3,
  mixup=0.8,
  cutmix=1.0,
  label_smoothing=0.1,
)


def imagenet() -> ExperimentConfig:
  """Returns the conversion on ImageNet: phases of 2, 1 and 97 epochs."""
  return ExperimentConfig(
    name='acm_vit_base',
    model=vit.vit_base(dtype='bfloat16', adaptive=AdaptiveConfig()),
    objective=ACMObjective(
      budget=0.6,
      learners=PhaseConfig(
        num_steps=recipe.num_steps(2, 64), batch_size=64, learning_rate=1e-3
      ),
      gates=PhaseConfig(
        num_steps=recipe.num_steps(1, 64), batch_size=64, learning_rate=1e-2
      ),
      end_to_end=PhaseConfig(
        num_steps=recipe.num_steps(97, 512), batch_size=512, learning_rate=1e-4
      ),
    ),
    data=recipe.data(AUGMENT),
    optimizer=ADAM,
    evaluation=recipe.evaluation(20_000),
  )


def digits() -> ExperimentConfig:
  """Returns the conversion of the digits' dense model, in minutes."""
  return digits_recipe.experiment(
    'acm_digits',
    dataclasses.replace(digits_recipe.BACKBONE, adaptive=AdaptiveConfig()),
    optimizer=ADAM,
    objective=ACMObjective(
      budget=0.4,
      # For so few steps, the gates get a higher rate, a larger weight on the
      # budget, and train without noise in the second half.
      budget_weight=2.0,
      gate_rate=10.0,
      noise_until=0.5,
      # At 3e-3, the remaining error after so few steps is twice as large.
      learners=PhaseConfig(num_steps=200, batch_size=64, learning_rate=1e-2),
      gates=PhaseConfig(num_steps=60, batch_size=64, learning_rate=1e-2),
      end_to_end=PhaseConfig(
        num_steps=300, batch_size=64, learning_rate=1e-3, warmup_steps=1 / 15
      ),
    ),
  )


def ffn(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns the experiment with only its FFNs adaptive."""
  adaptive = AdaptiveConfig(replace=(FFNS,))
  model = dataclasses.replace(experiment.model, adaptive=adaptive)
  return dataclasses.replace(
    experiment, name=f'{experiment.name}_ffn', model=model
  )


def tiny() -> ExperimentConfig:
  """Returns a version that takes seconds: eight steps in each phase."""
  small = digits_recipe.tiny(dataclasses.replace(digits(), objective=None))
  phase = PhaseConfig(num_steps=8, batch_size=16, learning_rate=1e-3)
  return dataclasses.replace(
    small,
    name='acm_tiny',
    optimizer=ADAM,
    objective=ACMObjective(
      budget=0.4, learners=phase, gates=phase, end_to_end=phase
    ),
  )


VARIANTS = {
  '': imagenet,
  'ffn': lambda: ffn(imagenet()),
  'digits': digits,
  'digits_ffn': lambda: ffn(digits()),
  'tiny': tiny,
}

get_config = config_lib.config_getter(VARIANTS)
