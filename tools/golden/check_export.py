"""Checks that other libraries load what `mod_jax.export` writes.

  python tools/golden/check_export.py write /tmp/exported
  golden/bin/python tools/golden/check_export.py check /tmp/exported

The first writes folders of tiny models with random weights, and their logits of
a random input, and of a random picture what preprocessing makes. The second, in
the environment of `make_vit.py`, has transformers and timm load the folders,
and compares.
"""

import pathlib
import sys
import types

import numpy as np

MODELS = {
  'vit': {},
  'deit': {'distilled': True},
  'deit_one_head': {'distilled': True, 'distillation_head': False},
}


LANGUAGE = {
  'llama': {'tied_head': False},
  'mistral': {'window': 5},
  'qwen2': {'qkv_bias': True},
  'qwen3': {'qk_norm': True, 'head_dim': 8},
}


def write(folder):
  _write_vision(folder)
  _write_language(folder)


def _write_language(folder):
  from flax import linen as nn
  import jax

  import mod_jax
  from mod_jax.layers.routing_config import MoDConfig
  from mod_jax.models.lm import LMConfig
  from mod_jax.tasks import make_task
  from mod_jax.tasks.experiment import ExperimentConfig

  rng = np.random.default_rng(0)
  for name, changes in LANGUAGE.items():
    # Routed blocks that process all: the dense part computes the same.
    routing = MoDConfig(capacity=1.0, gate='one_plus_tanh', router_std=0.0)
    config = LMConfig(
      **{'num_layers': 2, 'width': 24, 'num_heads': 4, 'num_kv_heads': 2},
      routing=routing,
      **changes,
    )
    task = make_task(ExperimentConfig(model=config))
    variables = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    run = mod_jax.Run(
      config=config, variables=variables, experiment=task.config, task=task
    )
    tokens_BL = rng.integers(0, config.vocab_size, (2, 20))
    mod_jax.export(run, folder / f'lm_{name}', 'huggingface', dense=True)
    np.savez(
      folder / f'lm_{name}' / 'expected.npz',
      tokens=tokens_BL,
      logits=run.apply(tokens_BL).logits_BLV,
    )


def _write_vision(folder):
  from flax import linen as nn
  import jax

  import mod_jax
  from mod_jax.data.images import Preprocess
  from mod_jax.models.vit import ViTConfig
  from mod_jax.pretrained.load import Run

  rng = np.random.default_rng(0)
  picture_HWC = rng.integers(0, 256, (37, 50, 3), np.uint8)
  resizes = ('shorter_side', 'squash', 'none')
  for (name, changes), resize in zip(MODELS.items(), resizes, strict=True):
    config = ViTConfig(
      image_size=32,
      patch_size=8,
      num_layers=2,
      width=24,
      num_heads=3,
      mlp_dim=40,
      num_classes=5,
      **changes,
    )
    shapes = jax.eval_shape(
      lambda c=config: c.build().init(jax.random.key(0), c.example())
    )
    run = Run(
      config=config,
      variables=jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32),
        nn.unbox(shapes),
      ),
      preprocess=Preprocess(
        image_size=32,
        crop_fraction=0.875,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.4),
        resize=resize,
      ),
    )
    image_BHWC = rng.normal(size=(2, 32, 32, 3)).astype(np.float32)
    for format in ('huggingface', 'timm'):
      if format == 'timm' and name == 'deit_one_head':
        continue  # timm's distilled models have two heads.
      mod_jax.export(run, folder / f'{name}_{format}', format)
      np.savez(
        folder / f'{name}_{format}' / 'expected.npz',
        image=image_BHWC,
        logits=run.apply(image_BHWC).logits_BV,
        picture=picture_HWC,
        pixels=run.preprocess([picture_HWC])[0],
      )


def check(folder):
  # It registers shapes for compiled operators that are not there.
  meta = 'torchvision._meta_registrations'
  sys.modules[meta] = types.ModuleType(meta)
  import timm
  import torch
  import transformers

  for path in sorted(folder.glob('lm_*')):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    expected = np.load(path / 'expected.npz')
    with torch.no_grad():
      logits = model.eval()(torch.tensor(expected['tokens'])).logits.numpy()
    _compare(path, model, logits, expected['logits'])
  for path in sorted(set(folder.iterdir()) - set(folder.glob('lm_*'))):
    if path.name.endswith('_timm'):
      model = timm.create_model(f'local-dir:{path}', pretrained=True)
    else:
      auto = transformers.AutoModelForImageClassification
      model = auto.from_pretrained(path)
    expected = np.load(path / 'expected.npz')
    if path.name.endswith('_huggingface'):
      auto = transformers.AutoImageProcessor
      processor = auto.from_pretrained(path, backend='pil')
      (pixels,) = processor(expected['picture'])['pixel_values']
      _compare(path, processor, pixels.transpose(1, 2, 0), expected['pixels'])
    image = torch.tensor(expected['image'].transpose(0, 3, 1, 2))
    with torch.no_grad():
      logits = model.eval()(image)
    logits = getattr(logits, 'logits', logits).numpy()
    _compare(path, model, logits, expected['logits'])


def _compare(path, model, logits, expected):
  largest = np.abs(logits - expected).max()
  print(f'{path.name}: {type(model).__name__}, differs by {largest:.1e}')
  assert largest < 1e-5


if __name__ == '__main__':
  {'write': write, 'check': check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
