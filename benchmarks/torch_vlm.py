"""Answers about pictures by `transformers`' LLaVA on PyTorch, on request.

`vlm.py --torch` runs this script under an interpreter that has torch and
transformers. Argument: a folder with the model and `inputs.npz`, the prompts.
Each input line is `prefill`, which reads the prompts, or `step`, which adds a
token to every row; an output line has the new tokens of all rows as JSON.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers


def main():
  folder = pathlib.Path(sys.argv[1])
  inputs = np.load(folder / 'inputs.npz')
  model = transformers.LlavaForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  tokens_BL = torch.from_numpy(inputs['tokens']).long()
  # A picture for each row; channels first.
  images_BCHW = torch.from_numpy(inputs['images'][:, 0]).permute(0, 3, 1, 2)
  about = f'torch {torch.__version__}, transformers {transformers.__version__}'
  print(f'{about}, {torch.get_num_threads()} threads', flush=True)
  tokens_B1 = cache = None
  with torch.inference_mode():
    for line in sys.stdin:
      if line.strip() == 'prefill':
        output = model(
          input_ids=tokens_BL,
          pixel_values=images_BCHW,
          use_cache=True,
          logits_to_keep=1,
        )
      else:
        output = model(
          input_ids=tokens_B1, past_key_values=cache, use_cache=True
        )
      cache = output.past_key_values
      tokens_B1 = output.logits[:, -1:].argmax(dim=-1)
      print(json.dumps(tokens_B1[:, 0].tolist()), flush=True)


if __name__ == '__main__':
  main()
