"""Fine-tuning of a pretrained Wav2Vec2 on your own recordings.

    python train.py --config=configs/speech/folder.py --workdir=runs/speech \\
      --config.data.path=recordings --config.init=wav2vec2-xls-r-300m

`recordings` is laid out as LibriSpeech or Common Voice, or has a `train.jsonl`
of lines `{"audio": "a.wav", "text": "what is said"}`; `init` is a folder of
Hugging Face. The convolutions stay frozen, as is usual. Variants:

* '' is XLS-R with 300M parameters (Babu et al. 2022); `base` the base model;
* `acm`: adaptive FFNs by the recipe of Wójcik et al. 2023, from a fine-tuned
  run as `--config.init`; numbers of steps are for an hour of speech;
* `tiny`: on synthetic words, for tests.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.audio import AudioDataConfig
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.models import wav2vec2
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ACMObjective, ExperimentConfig, PhaseConfig

words = config_lib.sibling(__file__, 'words')


def xlsr(name: str = 'speech', model=None) -> ExperimentConfig:
  return ExperimentConfig(
    name=name,
    model=model or wav2vec2.xlsr_300m(vocab_size=64, dtype='bfloat16'),
    data=AudioDataConfig(source='folder', path='recordings'),
    optimizer=OptimizerConfig(
      learning_rate=3e-4,
      warmup_steps=0.1,
      beta2=0.98,
      weight_decay=0.0,
      rules=((wav2vec2.CONVOLUTIONS, 0.0, 0), ('.*', 1.0, 0)),
    ),
    train=TrainConfig(num_steps=2000, batch_size=16),
    evaluation=EvaluationConfig(every=500, batch_size=16),
  )


def acm() -> ExperimentConfig:
  """Returns the conversion: 5, 1 and 4 epochs of an hour of speech."""
  dense = xlsr('speech_acm')
  model = dataclasses.replace(
    dense.model, adaptive=AdaptiveConfig(replace=(FFNS,))
  )
  return dataclasses.replace(
    dense,
    model=model,
    optimizer=OptimizerConfig(
      warmup_steps=0, beta2=0.999, weight_decay=0.0, clip_norm=1.0
    ),
    objective=ACMObjective(
      budget=0.4,
      learners=PhaseConfig(num_steps=375, batch_size=12, learning_rate=3e-4),
      gates=PhaseConfig(num_steps=56, batch_size=16, learning_rate=3e-3),
      end_to_end=PhaseConfig(num_steps=225, batch_size=16, learning_rate=3e-4),
    ),
  )


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns the experiment with the model and the data of `words`."""
  small = words.VARIANTS['tiny']()
  return dataclasses.replace(
    small,
    name=f'{experiment.name}_tiny',
    model=dataclasses.replace(small.model, variant=experiment.model.variant),
    optimizer=dataclasses.replace(experiment.optimizer, warmup_steps=2),
  )


def base() -> ExperimentConfig:
  model = wav2vec2.base(vocab_size=64, dtype='bfloat16')
  return xlsr('speech_base', model)


VARIANTS = {
  '': xlsr,
  'base': base,
  'acm': acm,
  'tiny': lambda: tiny(xlsr()),
  'base_tiny': lambda: tiny(base()),
}

get_config = config_lib.config_getter(VARIANTS)
