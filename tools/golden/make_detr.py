"""Writes the golden files of DETR: what Hugging Face's classes compute.

A tiny model of random weights as the library saves it, two pictures of which
one is padded, and the logits and boxes; and the names and shapes of DETR-R50
with each of the library's two backbones. The environment is that of
`make_vit.py`:

  golden/bin/python tools/golden/make_detr.py

`detr/model.safetensors` and `detr/config.json` are the folder of the model,
`detr_expected.npz` holds `image` [2, 64, 96, 3], `size` [2, 2], `logits`,
`boxes`, and `detr_names.json` the names and shapes.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden'
# No two sizes alike, so that no transposition goes unnoticed.
TINY = {
  'd_model': 16,
  'encoder_layers': 2,
  'decoder_layers': 3,
  'encoder_attention_heads': 2,
  'decoder_attention_heads': 2,
  'encoder_ffn_dim': 20,
  'decoder_ffn_dim': 20,
  'num_queries': 7,
  'num_labels': 5,
  'auxiliary_loss': False,
}


def tiny():
  backbone = transformers.ResNetConfig(
    embedding_size=4,
    hidden_sizes=[8, 12, 16, 20],
    depths=[1, 2, 1, 1],
    layer_type='bottleneck',
    out_features=['stage4'],
  )
  config = transformers.DetrConfig(
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone=None,
    backbone_config=backbone,
    **TINY,
  )
  torch.manual_seed(0)
  model = transformers.DetrForObjectDetection(config).eval()
  generator = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
      if not x.is_floating_point():
        continue
      draw = torch.randn(x.shape, generator=generator)
      if name.endswith('running_var'):
        x.copy_(draw.abs() + 0.5)
      elif x.ndim > 1:
        # Large enough that pictures and queries differ far above rounding.
        gain = 8.0 if 'query_position' in name else 1.3
        gain = 3.0 if '_attn.' in name else gain
        x.copy_(gain * draw / max(1, x[0].numel()) ** 0.5)
      else:
        scale = 'norm' in name and name.endswith('weight')
        x.copy_(0.2 * draw + (1.0 if scale else 0.0))
  return model


def names(use_timm: bool):
  config = transformers.DetrConfig(
    use_timm_backbone=use_timm,
    use_pretrained_backbone=False,
    num_labels=91,
    backbone='resnet50' if use_timm else None,
    **(
      {}
      if use_timm
      else {
        'backbone_config': transformers.ResNetConfig(out_features=['stage4'])
      }
    ),
  )
  model = transformers.DetrForObjectDetection(config)
  return {
    name: list(x.shape)
    for name, x in model.state_dict().items()
    if x.is_floating_point()
  }


def main():
  model = tiny()
  folder = HERE / 'detr'
  model.save_pretrained(folder)
  generator = np.random.default_rng(2)
  image = generator.normal(size=(2, 64, 96, 3)).astype(np.float32)
  size = np.int32([[64, 96], [48, 70]])
  mask = np.zeros((2, 64, 96), np.int64)
  for i, (height, width) in enumerate(size):
    mask[i, :height, :width] = 1
    image[i, height:] = 0
    image[i, :, width:] = 0
  with torch.no_grad():
    output = model(
      torch.tensor(image).permute(0, 3, 1, 2), pixel_mask=torch.tensor(mask)
    )
  np.savez_compressed(
    HERE / 'detr_expected.npz',
    image=image,
    size=size,
    logits=output.logits.numpy(),
    boxes=output.pred_boxes.numpy(),
  )
  shapes = {'huggingface': names(False), 'timm': names(True)}
  (HERE / 'detr_names.json').write_text(json.dumps(shapes) + '\n')


if __name__ == '__main__':
  main()
