"""Writes the golden files of language models: what `transformers` computes.

Tiny models of random weights, each in a directory `lm/NAME` as `transformers`
saves it, and the logits of some tokens in `lm/expected.npz`: `tokens` [2, 24],
`NAME` [2, 24, vocabulary]. Run it again only to add a case, in the environment
of `make_vit.py`:

  golden/bin/python tools/golden/make_lm.py
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden' / 'lm'
# No two sizes alike, so that no transposition goes unnoticed.
SIZES = {
  'vocab_size': 37,
  'hidden_size': 12,
  'intermediate_size': 20,
  'num_hidden_layers': 2,
  'num_attention_heads': 6,
  'num_key_value_heads': 2,
  'head_dim': 4,
  'max_position_embeddings': 64,
  'tie_word_embeddings': False,
}
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 5e5,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  # Short, so that the scaling tells within these few tokens.
  'original_max_position_embeddings': 16,
}
LINEAR = {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 4.0}
# Class, other fields, type of the weights, and bytes of a file.
CASES = {
  'llama': ('Llama', {}, 'float32', None),
  'llama3': (
    'Llama',
    {'rope_parameters': LLAMA3, 'tie_word_embeddings': True},
    'float32',
    None,
  ),
  'llama_linear': ('Llama', {'rope_parameters': LINEAR}, 'float32', None),
  'llama_sharded': ('Llama', {}, 'bfloat16', '3KB'),
  'mistral': ('Mistral', {'sliding_window': 5}, 'float32', None),
  'qwen2': (
    'Qwen2',
    {'hidden_size': 24, 'tie_word_embeddings': True},
    'float32',
    None,
  ),
  'qwen2_window': (
    'Qwen2',
    {
      'hidden_size': 24,
      'use_sliding_window': True,
      'sliding_window': 5,
      'max_window_layers': 0,
    },
    'float32',
    None,
  ),
  'qwen3': ('Qwen3', {'head_dim': 6}, 'float32', None),
}


def main():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, SIZES['vocab_size'], (2, 24))
  expected = {'tokens': tokens}
  for name, (family, changes, dtype, shard) in CASES.items():
    torch.manual_seed(len(expected))
    fields = SIZES | changes
    if family == 'Qwen2':
      fields.pop('head_dim')
    config = getattr(transformers, f'{family}Config')(**fields)
    model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
    with torch.no_grad():
      for parameter in model.parameters():
        # Large enough that a wrong bias, norm or angle is seen in the logits.
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model = model.to(getattr(torch, dtype))
    kwargs = {} if shard is None else {'max_shard_size': shard}
    model.save_pretrained(HERE / name, **kwargs)
    # Read again, since a cast would also round the rotary frequencies.
    model = type(model).from_pretrained(HERE / name, dtype=torch.float32)
    with torch.no_grad():
      logits = model.eval()(torch.tensor(tokens)).logits
    expected[name] = logits.numpy()
    # What the version of the library is has no place in a test.
    path = HERE / name / 'config.json'
    saved = json.loads(path.read_text())
    saved.pop('transformers_version', None)
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + '\n')
    (HERE / name / 'generation_config.json').unlink(missing_ok=True)
  np.savez_compressed(HERE / 'expected.npz', **expected)


if __name__ == '__main__':
  main()
