"""Writes the golden files of CLIP's tower and LLaVA: what PyTorch computes.

Tiny models of random weights, made by transformers' own classes, with their
weights as it saves them, pictures of noise and what it computes of them. It
needs the environment that `make_vit.py` describes:

  golden/bin/python tools/golden/make_vlm.py

`vlm/clip/` and `vlm/llava/` are folders that transformers writes, the second
in several files. `vlm/expected.npz` has `images` [3, side, side, 3] and

* `clip/hidden` [3, tokens, width], the features before the last block, and
  `clip/pooled` [3, width], the class token at the end;
* `tokens` [2, length], of which the first row has one picture and padding, and
  the second two, and for `left` and `right` padding `valid/<side>` and
  `llava/<side>` [2, length, vocabulary].
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden' / 'vlm'
# No two sizes alike, so that no transposition goes unnoticed.
VISION = {
  'hidden_size': 12,
  'intermediate_size': 20,
  'num_hidden_layers': 3,
  'num_attention_heads': 3,
  'image_size': 6,
  'patch_size': 2,
  'projection_dim': 10,
}
TEXT = {
  'vocab_size': 30,
  'hidden_size': 16,
  'intermediate_size': 28,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
}
IMAGE = 29  # The placeholder's id.
PATCHES = 9


def random(model):
  with torch.no_grad():
    for parameter in model.parameters():
      # Norms that scale and shift, and weights that matter.
      parameter += 0.1 * torch.randn_like(parameter)
  return model.eval()


def main():
  torch.manual_seed(0)
  images = torch.randn(3, 3, VISION['image_size'], VISION['image_size'])
  expected = {'images': images.numpy().transpose(0, 2, 3, 1)}

  tower = random(
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
  )
  with torch.no_grad():
    output = tower(images, output_hidden_states=True)
  expected['clip/hidden'] = output.hidden_states[-2].numpy()
  expected['clip/pooled'] = output.pooler_output.numpy()
  tower.save_pretrained(HERE / 'clip')

  config = transformers.LlavaConfig(
    vision_config=transformers.CLIPVisionConfig(**VISION),
    text_config=transformers.LlamaConfig(**TEXT),
    image_token_index=IMAGE,
  )
  model = random(transformers.LlavaForConditionalGeneration(config))
  one, two = [IMAGE] * PATCHES, [IMAGE] * PATCHES
  rows = ([1, 5, *one, 7, 8, 3], [1, *one, 4, 11, *two, 12, 13, 14, 6])
  length = max(map(len, rows))
  for side in ('left', 'right'):
    tokens = torch.zeros(2, length, dtype=torch.long)
    valid = torch.zeros(2, length, dtype=torch.long)
    for i, row in enumerate(rows):
      start = length - len(row) if side == 'left' else 0
      tokens[i, start : start + len(row)] = torch.tensor(row)
      valid[i, start : start + len(row)] = 1
    with torch.no_grad():
      logits = model(
        input_ids=tokens, pixel_values=images, attention_mask=valid
      ).logits
    expected[f'tokens/{side}'] = tokens.numpy().astype(np.int32)
    expected[f'valid/{side}'] = valid.numpy().astype(bool)
    expected[f'llava/{side}'] = logits.numpy()
  model.save_pretrained(HERE / 'llava', max_shard_size='20KB')
  np.savez_compressed(HERE / 'expected.npz', **expected)


if __name__ == '__main__':
  main()
