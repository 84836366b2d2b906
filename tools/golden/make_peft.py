"""Writes the golden files of low-rank adapters: what PEFT computes with them.

  golden/bin/python tools/golden/make_peft.py

Adapters of random values, of the tiny language models of `make_lm.py` and of a
tiny vision transformer, each in a directory `peft/NAME` as PEFT saves it, and
in `peft/expected.npz` what the adapted models compute: logits `NAME` of the
inputs `tokens` [2, 24] and `image` [2, 32, 32, 3]. Run it again only to add a
case, in the environment of `make_vit.py` with peft.

  python tools/golden/make_peft.py write /tmp/written
  golden/bin/python tools/golden/make_peft.py check /tmp/written

The first has mod_jax read these adapters and write them again; the second has
PEFT read what was written, and stores its logits in `peft/reread.npz`.
"""

import json
import pathlib
import sys

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[2] / 'tests' / 'golden'
HERE = GOLDEN / 'peft'
# Directory of the base model, and fields of PEFT's config. Ranks and alphas
# differ, and no two sizes of a model are alike.
CASES = {
  'llama': (
    'lm/llama',
    {'r': 3, 'lora_alpha': 5, 'target_modules': 'all-linear'},
  ),
  'qwen2': (
    'lm/qwen2',
    {
      'r': 2,
      'lora_alpha': 3,
      'use_rslora': True,
      'target_modules': ['q_proj', 'v_proj', 'o_proj', 'down_proj'],
      'layers_to_transform': [1],
    },
  ),
  'vit': (
    'peft/vit_base',
    {
      'r': 3,
      'lora_alpha': 4,
      'target_modules': ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'fc1', 'fc2'],
      'modules_to_save': ['classifier'],
    },
  ),
}
VIT = {
  'hidden_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 3,
  'intermediate_size': 40,
  'image_size': 32,
  'patch_size': 8,
  'num_labels': 5,
}


def _randomise(model, std):
  import torch

  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, std)


def _base(name):
  import transformers

  path = GOLDEN / CASES[name][0]
  auto = transformers.AutoModelForCausalLM
  if name == 'vit':
    auto = transformers.AutoModelForImageClassification
  return auto.from_pretrained(path, dtype='float32').eval()


def _logits(name, model, expected) -> np.ndarray:
  import torch

  inputs = torch.tensor(expected['tokens'])
  if name == 'vit':
    inputs = torch.tensor(expected['image'].transpose(0, 3, 1, 2))
  with torch.no_grad():
    return model.eval()(inputs).logits.numpy()


def make():
  import peft
  import torch
  import transformers

  torch.manual_seed(0)
  vit = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
  _randomise(vit, 0.2)
  vit.save_pretrained(GOLDEN / CASES['vit'][0])
  rng = np.random.default_rng(0)
  expected = {
    'tokens': rng.integers(0, 37, (2, 24)),
    'image': rng.normal(size=(2, 32, 32, 3)).astype(np.float32),
  }
  for name, (_, fields) in CASES.items():
    model = peft.get_peft_model(_base(name), peft.LoraConfig(**fields))
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
      for parameter in trained:
        parameter.normal_(0.0, 0.3)
    expected[name] = _logits(name, model, expected)
    model.save_pretrained(HERE / name)
    (HERE / name / 'README.md').unlink()
    plain = _logits(name, _base(name), expected)
    print(name, 'adapters change logits by', abs(plain - expected[name]).max())
  for path in [
    *HERE.glob('*/config.json'),
    *HERE.glob('*/adapter_config.json'),
  ]:
    saved = json.loads(path.read_text())
    # What the version of the library is has no place in a test.
    for field in ('transformers_version', 'peft_version'):
      saved.pop(field, None)
    if 'base_model_name_or_path' in saved:
      # The tests say where the base is.
      saved['base_model_name_or_path'] = None
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + '\n')
  np.savez_compressed(HERE / 'expected.npz', **expected)


def write(folder):
  import mod_jax

  for name, (base, _) in CASES.items():
    run = mod_jax.load(HERE / name, base=str(GOLDEN / base))
    mod_jax.export(run, folder / name, 'peft')


def check(folder):
  import peft

  expected, reread = np.load(HERE / 'expected.npz'), {}
  for name in CASES:
    model = peft.PeftModel.from_pretrained(_base(name), folder / name)
    reread[name] = _logits(name, model, expected)
    largest = np.abs(reread[name] - expected[name]).max()
    print(f'{name}: {type(model).__name__}, differs by {largest:.1e}')
    assert largest < 1e-4
  np.savez_compressed(HERE / 'reread.npz', **reread)


if __name__ == '__main__':
  if sys.argv[1:]:
    {'write': write, 'check': check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
  else:
    make()
