"""Writes the golden files of Wav2Vec2: what PyTorch computes.

Tiny models of random weights, made by transformers' own classes, with their
weights as it saves them, two recordings of noise and the logits. It needs the
environment that `make_vit.py` describes:

  golden/bin/python tools/golden/make_wav2vec2.py

For each model `wav2vec2/<name>/` is the folder that transformers writes, and
`wav2vec2/expected.npz` holds `wave` [2, samples], the lengths `samples` [2],
and `<name>/masked`, `<name>/unmasked` [2, frames, vocabulary]. `group/` and
`layer/` are the two variants; `xlsr/` has the variant of XLS-R with a head of
another size, and the older names of weight normalisation in PyTorch.
"""

import pathlib

import numpy as np
import safetensors.torch
import torch
import transformers

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden' / 'wav2vec2'
# No two sizes alike, so that no transposition goes unnoticed.
SIZES = {
  'hidden_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 3,
  'intermediate_size': 40,
  'conv_dim': (6, 10, 14),
  'conv_kernel': (10, 3, 2),
  'conv_stride': (5, 2, 2),
  'num_conv_pos_embeddings': 8,
  'num_conv_pos_embedding_groups': 4,
  'num_feat_extract_layers': 3,
  'vocab_size': 11,
}
LAYER = {
  'feat_extract_norm': 'layer',
  'do_stable_layer_norm': True,
  'conv_bias': True,
}
MODELS = {'group': {}, 'layer': LAYER, 'xlsr': LAYER | {'vocab_size': 9}}
OLD = {
  'parametrizations.weight.original0': 'weight_g',
  'parametrizations.weight.original1': 'weight_v',
}


def main():
  torch.manual_seed(0)
  wave = torch.randn(2, 700)
  samples = torch.tensor([700, 430])
  mask = torch.arange(700)[None] < samples[:, None]
  wave *= mask
  expected = {'wave': wave.numpy(), 'samples': samples.numpy()}
  for name, changes in MODELS.items():
    config = transformers.Wav2Vec2Config(**SIZES | changes)
    model = transformers.Wav2Vec2ForCTC(config).eval()
    with torch.no_grad():
      for parameter in model.parameters():
        # Norms that scale and shift, and weights that matter.
        parameter += 0.1 * torch.randn_like(parameter)
      expected[f'{name}/masked'] = model(wave, mask.long()).logits.numpy()
      expected[f'{name}/unmasked'] = model(wave).logits.numpy()
    folder = HERE / name
    model.save_pretrained(folder)
    file = folder / 'model.safetensors'
    arrays = safetensors.torch.load_file(file)
    print(name, [key for key in arrays if 'pos_conv' in key])
    if name == 'xlsr':
      renamed = {}
      for key, array in arrays.items():
        for new, old in OLD.items():
          key = key.replace(new, old)
        renamed[key] = array
      safetensors.torch.save_file(renamed, file, {'format': 'pt'})
  np.savez_compressed(HERE / 'expected.npz', **expected)


if __name__ == '__main__':
  main()
