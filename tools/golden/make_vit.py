"""Writes the golden files of vision transformers: what other libraries compute.

Tiny models of random weights, made by the libraries' own classes, with their
weights as those libraries save them, two images, and the logits. Run it again
only to add a case; it needs PyTorch, so it has an environment of its own:

  python3.11 -m venv golden
  golden/bin/pip install torch==2.13.0 transformers safetensors pillow pyyaml
  golden/bin/pip install --no-deps timm torchvision
  golden/bin/python tools/golden/make_vit.py

The CPU builds of PyTorch have no torchvision beside them. Its models are plain
Python, so those of any build will do, without its compiled operators.

For each model `vit_<name>.safetensors` holds the weights, and
`vit_expected.npz` the images [2, 32, 32, 3], `<name>/logits` [2, classes] and
`positions/<case>/...`, one resampling of position embeddings each.

LV-ViT and DynamicViT are in no library. The models below have the modules that
their authors' code names, written anew, and their weights lie as `torch.save`
writes them: `vit_lvvit.pth.tar` in the format before PyTorch 1.6, as the
released files, and `vit_dynamicvit.pth` as that code's training leaves it.
`tensors.pth` and `tensors_legacy.pth` hold tensors of each type and some views,
and `tensors.npz` the same numbers.
"""

import argparse
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
from timm.models.vision_transformer import (  # noqa: E402
  Attention,
  Mlp,
  VisionTransformer,
)
import torchvision  # noqa: E402
import transformers  # noqa: E402

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden'
# No two sizes alike, so that no transposition goes unnoticed.
IMAGE, PATCH, WIDTH, LAYERS, HEADS, MLP, CLASSES = 32, 8, 18, 2, 3, 28, 10
STEM = 5  # Channels of LV-ViT's stem.
KEPT = {0: 11, 1: 7}  # Patches of 16 that DynamicViT keeps before a block.

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


class Stem(torch.nn.Module):
  """Three convolutions, and patches of half the size."""

  def __init__(self):
    super().__init__()
    for i, (inputs, size) in enumerate(((3, 7), (STEM, 3), (STEM, 3)), 1):
      stride = 2 if i == 1 else 1
      convolution = torch.nn.Conv2d(
        inputs, STEM, size, stride, size // 2, bias=False
      )
      setattr(self, f'conv{i}', convolution)
      setattr(self, f'bn{i}', torch.nn.BatchNorm2d(STEM))
    self.proj = torch.nn.Conv2d(STEM, WIDTH, PATCH // 2, PATCH // 2)

  def forward(self, x):
    for i in (1, 2, 3):
      x = torch.relu(getattr(self, f'bn{i}')(getattr(self, f'conv{i}')(x)))
    return self.proj(x).flatten(2).transpose(1, 2)


class HalvedBlock(torch.nn.Module):
  """A block that adds half of what attention and MLP return."""

  def __init__(self):
    super().__init__()
    self.norm1 = torch.nn.LayerNorm(WIDTH)
    self.attn = Attention(WIDTH, HEADS)
    self.norm2 = torch.nn.LayerNorm(WIDTH)
    self.mlp = Mlp(WIDTH, MLP)

  def forward(self, x):
    x = x + self.attn(self.norm1(x)) / 2
    return x + self.mlp(self.norm2(x)) / 2


class LVViT(torch.nn.Module):
  """LV-ViT (Jiang et al. 2021): all norms at PyTorch's epsilon of 1e-5."""

  def __init__(self):
    super().__init__()
    tokens = 1 + (IMAGE // PATCH) ** 2
    self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, WIDTH))
    self.pos_embed = torch.nn.Parameter(torch.zeros(1, tokens, WIDTH))
    self.patch_embed = Stem()
    self.blocks = torch.nn.ModuleList(HalvedBlock() for _ in range(LAYERS))
    self.norm = torch.nn.LayerNorm(WIDTH)
    self.head = torch.nn.Linear(WIDTH, CLASSES)
    self.aux_head = torch.nn.Linear(WIDTH, CLASSES)

  def forward(self, image):
    patches = self.patch_embed(image)
    x = torch.cat([self.cls_token.expand(len(image), -1, -1), patches], 1)
    x = x + self.pos_embed
    for block in self.blocks:
      x = block(x)
    x = self.norm(x)
    return self.head(x[:, 0]) + self.aux_head(x[:, 1:]).max(1).values / 2


class Predictor(torch.nn.Module):
  """Log-probabilities of keeping and dropping each patch."""

  def __init__(self):
    super().__init__()
    linear, gelu = torch.nn.Linear, torch.nn.GELU
    self.in_conv = torch.nn.Sequential(
      torch.nn.LayerNorm(WIDTH), linear(WIDTH, WIDTH), gelu()
    )
    self.out_conv = torch.nn.Sequential(
      *(linear(WIDTH, WIDTH // 2), gelu()),
      *(linear(WIDTH // 2, WIDTH // 4), gelu()),
      *(linear(WIDTH // 4, 2), torch.nn.LogSoftmax(-1)),
    )

  def forward(self, patches):
    own, shared = self.in_conv(patches).split(WIDTH // 2, -1)
    mean = shared.mean(1, keepdim=True).expand_as(shared)
    return self.out_conv(torch.cat([own, mean], -1))


class DynamicViT(VisionTransformer):
  """DynamicViT (Rao et al. 2021) at inference, on timm's ViT."""

  def __init__(self):
    super().__init__(**TIMM)
    self.score_predictor = torch.nn.ModuleList(Predictor() for _ in KEPT)

  def forward(self, image):
    x = self._pos_embed(self.patch_embed(image))
    for i, block in enumerate(self.blocks):
      if i in KEPT:
        score = self.score_predictor[list(KEPT).index(i)](x[:, 1:])[..., 0]
        kept = score.argsort(1, descending=True)[:, : KEPT[i], None]
        patches = x[:, 1:].gather(1, kept.expand(-1, -1, WIDTH))
        x = torch.cat([x[:, :1], patches], 1)
      x = block(x)
    return self.head(self.norm(x)[:, 0])


def later_models():
  """Yields name and model; they came later, and draw after all the rest."""
  deit = transformers.DeiTConfig(**HUGGING_FACE)
  yield 'huggingface_one_head', transformers.DeiTForImageClassification(deit)
  yield 'lvvit', LVViT()
  yield 'dynamicvit', DynamicViT()


def randomize(model, generator):
  """Draws every parameter: fresh ones have zero biases and unit scales."""
  for name, buffer in model.named_buffers():
    if name.endswith(('running_mean', 'running_var')):
      buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
  for name, parameter in model.named_parameters():
    noise = torch.randn(parameter.shape, generator=generator)
    is_scale = name.endswith('.weight') and parameter.ndim == 1
    with torch.no_grad():
      parameter.copy_(0.3 * noise + (1.0 if is_scale else 0.0))


def save(name, model):
  """Writes the weights under the names that the library gives them on disk."""
  path = HERE / f'vit_{name}.safetensors'
  if name == 'lvvit':
    torch.save(
      model.state_dict(),
      HERE / 'vit_lvvit.pth.tar',
      _use_new_zipfile_serialization=False,
    )
  elif name == 'dynamicvit':
    settings = argparse.Namespace(lr=1e-3, resume='', layer_decay=None)
    state = {'model': model.state_dict(), 'epoch': 29, 'args': settings}
    torch.save(state, HERE / 'vit_dynamicvit.pth')
  elif hasattr(model, 'save_pretrained'):
    # The names in memory are not those in the file.
    with tempfile.TemporaryDirectory() as folder:
      model.save_pretrained(folder)
      written = pathlib.Path(folder) / 'model.safetensors'
      path.write_bytes(written.read_bytes())
  else:
    safetensors.torch.save_file(model.state_dict(), path, {'format': 'pt'})


def save_tensors(generator):
  """Writes tensors of each type, and views of other tensors."""
  square = 9 * torch.randn(4, 3, generator=generator)
  types = ('float64', 'float16', 'bfloat16', 'int64', 'int32', 'int16')
  tensors = {
    name: square.to(getattr(torch, name))
    for name in (*types, 'int8', 'uint8', 'bool')
  }
  tensors |= {
    'parameter': torch.nn.Parameter(square),
    'transposed': square.T,
    'part': square[1:3, 1:],
    'number': torch.tensor(7),
    'nothing': torch.zeros(0, 3),
  }
  torch.save(tensors, HERE / 'tensors.pth')
  torch.save(
    tensors, HERE / 'tensors_legacy.pth', _use_new_zipfile_serialization=False
  )
  # NumPy has no bfloat16.
  tensors['bfloat16'] = tensors['bfloat16'].float()
  np.savez_compressed(
    HERE / 'tensors.npz', **{k: v.detach().numpy() for k, v in tensors.items()}
  )


def main():
  generator = torch.Generator().manual_seed(0)
  image = torch.randn(2, 3, IMAGE, IMAGE, generator=generator)
  expected = {'image': image.permute(0, 2, 3, 1).numpy()}

  def add(name, model):
    model.eval()
    randomize(model, generator)
    save(name, model)
    with torch.no_grad():
      out = model(image)
    logits = getattr(out, 'logits', out)
    expected[f'{name}/logits'] = logits.numpy()

  for name, model in models():
    add(name, model)
  for prefix, old, new in ((1, 4, 6), (2, 7, 4), (1, 3, 10)):
    position = torch.randn(1, prefix + old**2, 5, generator=generator)
    resized = resample_abs_pos_embed(
      position, [new, new], num_prefix_tokens=prefix
    )
    case = f'positions/{prefix}_{old}_{new}'
    expected[f'{case}/from'] = position[0].numpy()
    expected[f'{case}/to'] = resized[0].numpy()
  for name, model in later_models():
    add(name, model)
  save_tensors(generator)
  np.savez_compressed(HERE / 'vit_expected.npz', **expected)
  versions = {
    module.__name__: module.__version__
    for module in (torch, torchvision, transformers, sys.modules['timm'])
  }
  print(json.dumps(versions))


if __name__ == '__main__':
  main()
