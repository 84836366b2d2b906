"""Runs forward passes of PyTorch's `Wav2Vec2ForCTC`, on request.

`wav2vec2.py --torch` runs this script under an interpreter that has torch and
transformers. An input line requests a pass over as many recordings as it says;
an output line says that it is done. Arguments: blocks, width, hidden units,
samples.
"""

import sys

import torch
import transformers


def main():
  layers, width, hidden, samples = map(int, sys.argv[1:])
  torch.manual_seed(0)
  config = transformers.Wav2Vec2Config(
    num_hidden_layers=layers, hidden_size=width, intermediate_size=hidden
  )
  model = transformers.Wav2Vec2ForCTC(config).eval()
  about = [f'torch {torch.__version__}']
  about.append(f'transformers {transformers.__version__}')
  about.append(f'{torch.get_num_threads()} threads')
  print(', '.join([*about, model.config._attn_implementation]), flush=True)
  waves = {}
  for line in sys.stdin:
    batch = int(line)
    if batch not in waves:
      waves[batch] = torch.randn(batch, samples)
    with torch.inference_mode():
      logits = model(waves[batch]).logits
    print(tuple(logits.shape), flush=True)


if __name__ == '__main__':
  main()
