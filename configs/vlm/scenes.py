"""Questions about scenes: digits of several sizes among clutter, offline.

    python train.py --config=configs/vlm/scenes.py:captions --workdir=runs/read
    python train.py --config=configs/vlm/scenes.py --workdir=runs/ask \\
      --config.init=runs/read

trains a small vision-language model from scratch, first to name all digits of a
scene, then to answer which digit is leftmost, how many threes there are, what
the sum is, or whether there is a seven; all answers to a question are equally
frequent. More than half of its tokens are those of the picture, most of which
show background. Variants:

* `captions`: the first of these runs, in which also each image token that shows
  a digit is trained to name it;
* `pmod`: p-MoD, blocks that choose fewer image tokens the deeper they are;
* `gamma`: γ-MoD, the inner blocks on half of the image and instruction tokens,
  by one router for all;
* `random`, `stride`: p-MoD's schedule with tokens chosen at random, or evenly;
* `fastv`: FastV, half of the image tokens after block 2, by attention;
* `pooled`: a quarter of the image tokens, means of 2 × 2 patches;
* `tower_amod`: the tower's last block on half of the patches, by attention;
* `tower_dynamic`: half of the patches before the tower's last block, by a
  DynamicViT's prediction head; only these reach the language model;
* `tower_evit`: the tower keeps the half of the patches that its class token
  attends to most, and one token for all others; only these reach the language
  model;
* `tiny`: the dense model in seconds, for tests; also `pmod_tiny` and so on.

`--config.data.source=llava --config.data.path=FILE` reads a JSON file in
LLaVA's format instead, and `--config.init=FOLDER` starts from a LLaVA of
Hugging Face, whose sizes the model then needs.
"""

import dataclasses

from mod_jax import config as config_lib
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.data.scenes import SceneConfig
from mod_jax.layers.reduction import EViT
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models import vlm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

# Digits are of 8 to 12 pixels, scenes of 32.
SCENES = SceneConfig(
  least=1,
  most=3,
  scales=(1.0, 1.5),
  clutter=4,
  num_train=100_000,
  num_eval=2_000,
)
# A picture has 64 tokens, and a text at most 48 bytes.
MODEL = VLMConfig(
  tower=ViTConfig(
    image_size=32,
    patch_size=4,
    num_classes=0,
    num_layers=2,
    width=64,
    num_heads=4,
    stem=ConvStemConfig(width=32, depth=3, halvings=2),
  ),
  # All blocks of this small tower run.
  feature_layer=-1,
  language=LMConfig(
    vocab_size=257, num_layers=4, width=64, num_heads=4, routing=None
  ),
  image_token=256,  # Ids up to 255 are bytes.
)
PMOD = vlm.P_MOD
# The inner blocks: the choice of γ-MoD, all blocks but the first three and the
# last, would be empty here.
GAMMA = dataclasses.replace(vlm.GAMMA_MOD, layers=(1, 2))
# FastV (Chen et al. 2024) drops half of the image tokens after block 2, by the
# attention of the prompt's last token. So it needs no router.
FASTV = MoDConfig(
  capacity=0.5,
  period=1,
  offset=0,
  first=2,
  kinds=('image',),
  score='last_attention',
  router_loss=0.0,
)


def control(score: str) -> MoDConfig:
  """Returns p-MoD's schedule with a score that ignores the tokens."""
  return dataclasses.replace(PMOD, score=score, gate=None, router_bias=False)


def dense() -> ExperimentConfig:
  return ExperimentConfig(
    name='ask',
    model=MODEL,
    data=ConversationDataConfig(image_size=32, scenes=SCENES, length=48),
    optimizer=OptimizerConfig(
      learning_rate=2e-3,
      warmup_steps=0.03,
      final_fraction=0.01,
      weight_decay=1e-2,
      beta2=0.999,
      clip_norm=1.0,
    ),
    train=TrainConfig(num_steps=4000, batch_size=16),
    evaluation=EvaluationConfig(
      every=0.25, batches=10, batch_size=50, final_batches=0
    ),
  )


def captions() -> ExperimentConfig:
  """Returns the first run, which learns to name digits from left to right."""
  return config_lib.replace(
    dense(),
    {'name': 'captions', 'data.topics': ('digits',), 'data.marks': True},
  )


def routed(name: str, routing: MoDConfig) -> ExperimentConfig:
  return dataclasses.replace(
    dense(), name=f'ask_{name}', model=MODEL.with_parts(routing=routing)
  )


def pooled() -> ExperimentConfig:
  return config_lib.replace(dense(), {'name': 'ask_pooled', 'model.pooling': 2})


def in_tower(name: str, **parts) -> ExperimentConfig:
  """Returns a run whose tower has conditional parts, and whose LM has none."""
  return with_tower(name, dataclasses.replace(MODEL.tower, **parts))


def dynamic() -> ExperimentConfig:
  tower = DynamicViTConfig(backbone=MODEL.tower, stages=(1,), keep=0.5)
  return with_tower('dynamic', tower)


def with_tower(name: str, tower) -> ExperimentConfig:
  model = dataclasses.replace(MODEL, tower=tower)
  return dataclasses.replace(dense(), name=f'ask_tower_{name}', model=model)


def tiny(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a small version that takes seconds, for tests."""
  model = experiment.model
  routing = model.routing
  if routing is not None and routing.layers is not None:
    routing = dataclasses.replace(routing, layers=(1,))
  scenes = SceneConfig(scales=(1, 1.5), num_train=32, num_eval=8)
  tower = dataclasses.replace(
    model.vit,
    patch_size=8,
    width=16,
    num_heads=2,
    stem=ConvStemConfig(width=4, depth=2, halvings=2),
  )
  if isinstance(model.tower, DynamicViTConfig):
    tower = dataclasses.replace(model.tower, backbone=tower)
  return dataclasses.replace(
    experiment,
    name=f'{experiment.name}_tiny',
    model=dataclasses.replace(
      model,
      tower=tower,
      language=dataclasses.replace(
        model.language, width=16, num_layers=3, num_heads=2, routing=routing
      ),
    ),
    data=dataclasses.replace(experiment.data, length=64, scenes=scenes),
    train=TrainConfig(num_steps=2, batch_size=4),
    evaluation=EvaluationConfig(
      every=1, batches=1, batch_size=4, final_batches=0
    ),
  )


LARGE = {
  '': dense,
  'pmod': lambda: routed('pmod', PMOD),
  'gamma': lambda: routed('gamma', GAMMA),
  'fastv': lambda: routed('fastv', FASTV),
  'random': lambda: routed('random', control('gaussian')),
  'stride': lambda: routed('stride', control('stride')),
  'pooled': pooled,
  'tower_amod': lambda: in_tower('amod', routing=VisionRoutingConfig()),
  'tower_dynamic': dynamic,
  'tower_evit': lambda: in_tower('evit', reduction=EViT(stages=(1,), keep=0.5)),
  'captions': captions,
}
VARIANTS = LARGE | {
  f'{name}_tiny'.lstrip('_'): lambda make=make: tiny(make())
  for name, make in LARGE.items()
}

get_config = config_lib.config_getter(VARIANTS)
