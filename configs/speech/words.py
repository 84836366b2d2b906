"""Speech recognition of synthetic words: offline, minutes on two cores.

    python train.py --config=configs/speech/words.py --workdir=runs/words
    python train.py --config=configs/speech/words.py:acm --workdir=runs/acm \\
      --config.init=runs/words --config.objective.budget=0.4

trains a small Wav2Vec2 by CTC on utterances of made-up words, and converts its
FFNs to adaptive modules (Wójcik et al. 2023). Held-out utterances are word
sequences that are not trained on. Variants:

* `acm`: the conversion; needs `--config.init`;
* `amod`: every other block on the half of the frames with most attention;
* `group`: the other variant of the model, post-norm;
* `tiny`, `acm_tiny`: for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data import formants
from mod_jax.data.audio import AudioDataConfig
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ACMObjective, ExperimentConfig, PhaseConfig

# 160 samples a frame: 50 frames a second.
MODEL = Wav2Vec2Config(
  variant='layer',
  vocab_size=2 + len(formants.LETTERS),
  num_layers=4,
  width=64,
  num_heads=4,
  mlp_dim=256,
  conv_dims=(32, 32, 64, 64),
  conv_kernels=(10, 8, 4, 4),
  conv_strides=(5, 4, 4, 2),
  position_kernel=16,
  position_groups=8,
)
DATA = AudioDataConfig(
  rate=formants.RATE,
  buckets=(1.5, 3.0),
  num_eval=256,
  # Mask few frames: letters are short, and in made-up words the others do not
  # tell which letter is masked.
  mask_span=3,
  min_masks=0,
)
ADAPTIVE = AdaptiveConfig(replace=(FFNS,))


def dense() -> ExperimentConfig:
  return ExperimentConfig(
    name='words',
    model=MODEL,
    data=DATA,
    optimizer=OptimizerConfig(
      learning_rate=2e-3, warmup_steps=0.1, beta2=0.98, weight_decay=0.01
    ),
    train=TrainConfig(num_steps=600, batch_size=16),
    evaluation=EvaluationConfig(
      every=150, batches=0, batch_size=16, final_batches=0
    ),
  )


def variant(name: str, **changes) -> ExperimentConfig:
  model = dataclasses.replace(MODEL, **changes)
  return dataclasses.replace(dense(), name=f'words_{name}', model=model)


def acm() -> ExperimentConfig:
  """Returns the conversion of FFNs to learners, in the paper's three phases."""
  return dataclasses.replace(
    variant('acm', adaptive=ADAPTIVE),
    optimizer=OptimizerConfig(
      warmup_steps=0, beta2=0.999, weight_decay=0.0, clip_norm=1.0
    ),
    objective=ACMObjective(
      budget=0.4,
      # For so few steps, the gates get a higher rate, a larger weight on the
      # budget, and train without noise in the second half.
      budget_weight=2.0,
      gate_rate=10.0,
      noise_until=0.5,
      learners=PhaseConfig(num_steps=300, batch_size=16, learning_rate=3e-3),
      gates=PhaseConfig(num_steps=100, batch_size=16, learning_rate=1e-2),
      end_to_end=PhaseConfig(
        num_steps=300, batch_size=16, learning_rate=1e-3, warmup_steps=1 / 15
      ),
    ),
  )


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a version that takes seconds."""
  phase = PhaseConfig(num_steps=4, batch_size=8, learning_rate=1e-3)
  changes = {
    'name': f'{experiment.name}_tiny',
    'model.num_layers': 2,
    'model.width': 16,
    'model.num_heads': 2,
    'model.mlp_dim': 32,
    'model.conv_dims': (8, 8, 8, 16),
    'model.position_groups': 4,
    'data.num_train': 16,
    'data.num_eval': 6,
    'train.num_steps': 8,
    'train.batch_size': 8,
    'evaluation.every': 4,
    'evaluation.batch_size': 8,
    'log.every': 4,
    'checkpoint.every': 4,
  }
  if experiment.objective is not None:
    names = ('learners', 'gates', 'end_to_end')
    changes |= {f'objective.{name}': phase for name in names}
  return config_lib.replace(experiment, changes)


VARIANTS = {
  '': dense,
  'acm': acm,
  'amod': lambda: variant('amod', routing=VisionRoutingConfig()),
  'group': lambda: variant('group', variant='group'),
  'tiny': lambda: tiny(dense()),
  'acm_tiny': lambda: tiny(acm()),
}

get_config = config_lib.config_getter(VARIANTS)
