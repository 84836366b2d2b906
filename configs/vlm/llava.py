"""LLaVA 1.5 with 7 billion parameters (Liu et al. 2023), for accelerators.

Stage 2: the language model and the projector learn from 665 thousand
conversations in one epoch, and the tower is frozen. The weights are read from
Hugging Face's folder `llava-1.5-7b-hf`, and the conversations from a JSON file
in LLaVA's format:

    python train.py --config=configs/vlm/llava.py:pmod --workdir=runs/pmod \\
      --config.data.path=llava_v1_5_mix665k.json

Variants: `pmod`, `gamma`, as in `scenes.py`; each also as

* `stage_1`: the projector alone, on 558 thousand pictures with captions;
* `tiny`: seconds, for tests.

Published runs are on 8 A100; the mesh here is for 16 chips or more.
"""

import dataclasses
import pathlib

from mod_jax import config as config_lib
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.models import vlm
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.parallel import MeshConfig
from mod_jax.runs.run_config import EvaluationConfig, TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig

SCENES = config_lib.load(pathlib.Path(__file__).with_name('scenes.py'))
WEIGHTS = 'llava-1.5-7b-hf'
MODEL = VLMConfig(
  # CLIP ViT-L/14 at 336 pixels.
  tower=ViTConfig(
    image_size=336,
    patch_size=14,
    num_classes=0,
    num_layers=24,
    width=1024,
    num_heads=16,
    activation='quick_gelu',
    patch_bias=False,
    input_norm=True,
    norm_epsilon=1e-5,
    dtype='bfloat16',
  ),
  # Vicuna, with 64 ids more than Llama 2: `<image>`, and padding.
  language=LMConfig(
    vocab_size=32064,
    num_layers=32,
    width=4096,
    num_heads=32,
    mlp_dim=11008,
    tied_head=False,
    norm_epsilon=1e-5,
    routing=None,
    dtype='bfloat16',
    remat='full',
  ),
  image_token=32000,
)
ROUTING = {
  '': None,
  'pmod': vlm.P_MOD,
  'gamma': dataclasses.replace(
    vlm.GAMMA_MOD, layers=vlm.gamma_layers(MODEL.num_layers)
  ),
}


def stage_2(name: str) -> ExperimentConfig:
  return ExperimentConfig(
    name=f'llava_{name}' if name else 'llava',
    model=MODEL.with_parts(routing=ROUTING[name]),
    init=WEIGHTS,
    data=ConversationDataConfig(
      source='llava',
      path='llava_v1_5_mix665k.json',
      image_size=336,
      mean=(0.48145466, 0.4578275, 0.40821073),
      std=(0.26862954, 0.26130258, 0.27577711),
      # 2,048 together with the 576 tokens of a picture.
      length=1472,
      tokenizer='huggingface',
      tokenizer_path=WEIGHTS,
      workers=8,
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-5,
      warmup_steps=0.03,
      final_fraction=0.0,
      weight_decay=0.0,
      beta2=0.999,
      rules=(('^tower/', 0.0, 0), ('', 1.0, 0)),
    ),
    train=TrainConfig(num_epochs=1, batch_size=128, frozen='bfloat16'),
    evaluation=EvaluationConfig(every=0.1, batches=8, batch_size=64),
    mesh=MeshConfig(fsdp=16),
  )


def stage_1(name: str) -> ExperimentConfig:
  """Returns the run of stage 1, in which only the projector learns."""
  return config_lib.replace(
    stage_2(name),
    {
      'name': f'llava_{name}_stage_1' if name else 'llava_stage_1',
      'data.path': 'blip_laion_cc_sbu_558k.json',
      'optimizer.learning_rate': 1e-3,
      'optimizer.rules': (('^projector/', 1.0, 0), ('', 0.0, 0)),
      'train.batch_size': 256,
    },
  )


def tiny(name: str) -> ExperimentConfig:
  """Returns a small model's run on questions about scenes, from scratch."""
  experiment = SCENES.get_config(f'{name}_tiny' if name else 'tiny')
  return dataclasses.replace(experiment, name=f'llava_{name}_tiny')


VARIANTS = {
  '_'.join(filter(None, (name, suffix))): (
    lambda make=make, name=name: make(name)
  )
  for name in ROUTING
  for suffix, make in (('', stage_2), ('stage_1', stage_1), ('tiny', tiny))
}

get_config = config_lib.config_getter(VARIANTS)
