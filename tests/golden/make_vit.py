"""Writes the golden files of vision transformers: what other libraries compute.

Tiny models of random weights, made by the libraries' own classes, with their
weights as those libraries save them, two images, and the logits. Run it again
only to add a case; it needs PyTorch, so it has an environment of its own:

  python3.11 -m venv golden
  golden/bin/pip install torch==2.13.0 transformers safetensors pillow pyyaml
  golden/bin/pip install --no-deps timm torchvision
  golden/bin/python tests/golden/make_vit.py

The CPU builds of PyTorch have no torchvision beside them. Its models are plain
Python, so those of any build will do, without its compiled operators.

For each model `vit_<name>.safetensors` holds the weights, and
`vit_expected.npz` the images [2, 32, 32, 3], `<name>/logits` [2, classes] and
`positions/<case>/...`, one resampling of position embeddings each.
"""

import json
import pathlib
import sys
import tempfile
import types

import numpy as np
import safetensors.torch
import torch

# It registers shapes for compiled operators that are not there.
_META = 'torchvision._meta_registrations'
sys.modules[_META] = types.ModuleType(_META)

from timm.layers import resample_abs_pos_embed  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402

HERE = pathlib.Path(__file__).parent
# No two sizes alike, so that no transposition goes unnoticed.
IMAGE, PATCH, WIDTH, LAYERS, HEADS, MLP, CLASSES = 32, 8, 18, 2, 3, 28, 10

TIMM = {
  'img_size': IMAGE,
  'patch_size': PATCH,
  'embed_dim': WIDTH,
  'depth': LAYERS,
  'num_heads': HEADS,
  'mlp_ratio': MLP / WIDTH,
  'num_classes': CLASSES,
}
HUGGING_FACE = {
  'image_size': IMAGE,
  'patch_size': PATCH,
  'hidden_size': WIDTH,
  'num_hidden_layers': LAYERS,
  'num_attention_heads': HEADS,
  'intermediate_size': MLP,
  'num_labels': CLASSES,
}
TORCHVISION = {
  'image_size': IMAGE,
  'patch_size': PATCH,
  'hidden_dim': WIDTH,
  'num_layers': LAYERS,
  'num_heads': HEADS,
  'mlp_dim': MLP,
  'num_classes': CLASSES,
}


def models():
  """Yields name and model, in evaluation mode."""
  yield 'timm', VisionTransformer(**TIMM)
  yield 'timm_distilled', VisionTransformerDistilled(**TIMM)
  vit = transformers.ViTConfig(**HUGGING_FACE)
  yield 'huggingface', transformers.ViTForImageClassification(vit)
  deit = transformers.DeiTConfig(**HUGGING_FACE)
  yield (
    'huggingface_distilled',
    transformers.DeiTForImageClassificationWithTeacher(deit),
  )
  yield 'torchvision', torchvision.models.VisionTransformer(**TORCHVISION)


def randomize(model, generator):
  """Draws every parameter: fresh ones have zero biases and unit scales."""
  for name, parameter in model.named_parameters():
    noise = torch.randn(parameter.shape, generator=generator)
    is_scale = name.endswith('.weight') and parameter.ndim == 1
    with torch.no_grad():
      parameter.copy_(0.3 * noise + (1.0 if is_scale else 0.0))


def save(name, model):
  """Writes the weights under the names that the library gives them on disk."""
  path = HERE / f'vit_{name}.safetensors'
  if hasattr(model, 'save_pretrained'):
    # The names in memory are not those in the file.
    with tempfile.TemporaryDirectory() as folder:
      model.save_pretrained(folder)
      written = pathlib.Path(folder) / 'model.safetensors'
      path.write_bytes(written.read_bytes())
  else:
    safetensors.torch.save_file(model.state_dict(), path, {'format': 'pt'})


def main():
  generator = torch.Generator().manual_seed(0)
  image = torch.randn(2, 3, IMAGE, IMAGE, generator=generator)
  expected = {'image': image.permute(0, 2, 3, 1).numpy()}
  for name, model in models():
    model.eval()
    randomize(model, generator)
    save(name, model)
    with torch.no_grad():
      out = model(image)
    logits = getattr(out, 'logits', out)
    expected[f'{name}/logits'] = logits.numpy()
  for prefix, old, new in ((1, 4, 6), (2, 7, 4), (1, 3, 10)):
    position = torch.randn(1, prefix + old**2, 5, generator=generator)
    resized = resample_abs_pos_embed(
      position, [new, new], num_prefix_tokens=prefix
    )
    case = f'positions/{prefix}_{old}_{new}'
    expected[f'{case}/from'] = position[0].numpy()
    expected[f'{case}/to'] = resized[0].numpy()
  np.savez_compressed(HERE / 'vit_expected.npz', **expected)
  versions = {
    module.__name__: module.__version__
    for module in (torch, torchvision, transformers, sys.modules['timm'])
  }
  print(json.dumps(versions))


if __name__ == '__main__':
  main()
