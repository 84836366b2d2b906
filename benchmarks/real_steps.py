"""Continues batches of prompts greedily with one library, on request.

`decode_real.py` runs this script once for each library, to measure the memory
of each. Input lines are numbers of prompts; output lines are JSON with the
seconds that they took and the peak memory of the process in MiB. Arguments:
library (`mod_jax`, `torch`, or a dtype in which mod_jax loads the model),
folder of the model or of a run of mod_jax, threads, tokens of a prompt, new
tokens.
"""

import functools
import json
import os
import resource
import sys
import time


def mod_jax_generate(folder, new, dtype=None):
  """Returns a function that continues prompts, vocab size and versions."""
  import jax

  import mod_jax
  from mod_jax import sampling

  run = mod_jax.load(folder, dtype=dtype)

  def generate(tokens_BP):
    generated = sampling.generate(
      *(run.model, run.variables, tokens_BP),
      max_new_tokens=new,
      temperature=0.0,
      mode=run.config.decoding_mode,
    )
    generated.tokens_BN.block_until_ready()

  return generate, run.config.vocab_size, f'jax {jax.__version__}'


def torch_generate(folder, new):
  """As `mod_jax_generate`; its own loop, as `model.generate` is slower."""
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  ).eval()

  @torch.inference_mode()
  def generate(tokens_BP):
    tokens, cache = torch.from_numpy(tokens_BP), None
    for _ in range(new):
      output = model(
        tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
      )
      tokens = output.logits[:, -1:].argmax(dim=-1)
      cache = output.past_key_values

  about = f'torch {torch.__version__}, transformers {transformers.__version__}'
  return generate, model.config.vocab_size, about


def main():
  library, folder, threads, prompt, new = sys.argv[1:]
  cores = sorted(os.sched_getaffinity(0))[: int(threads)]
  os.sched_setaffinity(0, cores)  # Before the library counts its cores.
  in_dtype = functools.partial(mod_jax_generate, dtype=library)
  makers = {'mod_jax': mod_jax_generate, 'torch': torch_generate}
  make = makers.get(library, in_dtype)
  generate, vocab_size, about = make(folder, int(new))
  print(f'{about}, {len(cores)} threads', flush=True)
  import numpy as np

  rng = np.random.default_rng(0)
  for line in sys.stdin:
    tokens_BP = rng.integers(0, vocab_size, (int(line), int(prompt)))
    start = time.perf_counter()
    generate(tokens_BP)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({'seconds': seconds, 'peak': peak}), flush=True)


if __name__ == '__main__':
  main()
