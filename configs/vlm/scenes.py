"""Questions about scenes: digits of several sizes among clutter, offline.

    python train.py --config=configs/vlm/scenes.py --workdir=runs/ask
    python train.py --config=configs/vlm/scenes.py:pmod \\
      --workdir=runs/ask_pmod --config.init=runs/ask

trains a small vision-language model from nothing to answer which digit is
leftmost, how many threes there are, what the sum is, or whether there is a
seven; all answers to a question are equally frequent. More than half of its
tokens are those of the picture, most of which show background. Variants:

* `pmod`: p-MoD, blocks that choose fewer image tokens the deeper they are;
* `gamma`: γ-MoD, the last blocks but one on half of the image and instruction
  tokens, by one router for all;
* `tiny`: the dense model in seconds, for tests; also `pmod_tiny`, `gamma_tiny`.

`--config.data.source=llava --config.data.path=FILE` reads a JSON file in
LLaVA's format instead, and `--config.init=FOLDER` starts from a LLaVA of
Hugging Face, whose sizes the model then needs.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.data.scenes import SceneConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import vlm
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

# 64 tokens of a picture, beside at most 64 bytes of text.
MODEL = VLMConfig(
  tower=ViTConfig(
    image_size=64,
    patch_size=8,
    num_classes=0,
    num_layers=3,
    width=96,
    num_heads=4,
  ),
  # No block of this small tower is left out.
  feature_layer=-1,
  language=LMConfig(
    vocab_size=257, num_layers=6, width=96, num_heads=4, routing=None
  ),
  image_token=256,  # Beyond the bytes.
)
PMOD = vlm.P_MOD
GAMMA = dataclasses.replace(
  vlm.GAMMA_MOD, layers=vlm.gamma_layers(MODEL.num_layers)
)


def dense() -> ExperimentConfig:
  return ExperimentConfig(
    name='ask',
    model=MODEL,
    data=ConversationDataConfig(),
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      warmup_steps=0.03,
      final_fraction=0.01,
      weight_decay=1e-2,
      beta2=0.999,
    ),
    train=TrainConfig(num_steps=8000, batch_size=32),
    evaluation=EvaluationConfig(
      every=0.1, batches=10, batch_size=50, final_batches=0
    ),
  )


def routed(name: str, routing: MoDConfig) -> ExperimentConfig:
  return dataclasses.replace(
    dense(), name=f'ask_{name}', model=MODEL.with_parts(routing=routing)
  )


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """A small version in seconds, for tests."""
  model = experiment.model
  routing = model.routing
  if routing is not None and routing.layers is not None:
    routing = dataclasses.replace(routing, layers=(1,))
  scenes = SceneConfig(scales=(1, 1.5), num_train=32, num_eval=8)
  return dataclasses.replace(
    experiment,
    name=f'{experiment.name}_tiny',
    model=dataclasses.replace(
      model,
      tower=dataclasses.replace(
        model.tower, image_size=32, width=16, num_layers=1, num_heads=2
      ),
      language=dataclasses.replace(
        model.language, width=16, num_layers=3, num_heads=2, routing=routing
      ),
    ),
    data=ConversationDataConfig(image_size=32, scenes=scenes),
    train=TrainConfig(num_steps=2, batch_size=4),
    evaluation=EvaluationConfig(
      every=1, batches=1, batch_size=4, final_batches=0
    ),
  )


VARIANTS = {
  '': dense,
  'pmod': lambda: routed('pmod', PMOD),
  'gamma': lambda: routed('gamma', GAMMA),
  'tiny': lambda: tiny(dense()),
  'pmod_tiny': lambda: tiny(routed('pmod', PMOD)),
  'gamma_tiny': lambda: tiny(routed('gamma', GAMMA)),
}

get_config = config_lib.config_getter(VARIANTS)
