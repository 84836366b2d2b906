"""Continues batches of prompts greedily with one library, on request.

`decode_real.py` runs this script once for each library, to measure the memory
of each. Input lines are numbers of prompts; output lines are JSON with the
seconds that they took and the peak memory of the process in MiB. Arguments:
library (`mod_jax`, `torch` or `llama.cpp`), dtype of the weights, folder of the
model or of a run of mod_jax or GGUF file of llama.cpp (whose weights have the
dtypes of the file), threads, tokens of a prompt, new tokens.
"""

import functools
import json
import os
import resource
import sys
import time


def mod_jax_generate(folder, dtype, new):
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


def torch_generate(folder, dtype, new):
  """As `mod_jax_generate`; its own loop, as `model.generate` is slower."""
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype)
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


def llama_cpp_generate(file, _, new):
  """As `mod_jax_generate`, by the functions of `llama.h`, greedily."""
  import llama_cpp
  import numpy as np

  llama_cpp.llama_backend_init()
  model = llama_cpp.llama_model_load_from_file(
    str(file).encode(), llama_cpp.llama_model_default_params()
  )
  vocab_size = llama_cpp.llama_vocab_n_tokens(
    llama_cpp.llama_model_get_vocab(model)
  )

  @functools.cache
  def context(rows, prompt):
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = rows * -(-(prompt + new) // 256) * 256
    params.n_seq_max = rows
    params.n_batch = max(rows * prompt, params.n_ubatch)
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    made = llama_cpp.llama_init_from_model(model, params)
    return made, llama_cpp.llama_batch_init(params.n_batch, 0, 1)

  def generate(tokens_BP):
    rows, prompt = tokens_BP.shape
    ours, batch = context(rows, prompt)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ours), True)
    tokens_BL, start = tokens_BP, 0
    for _ in range(new):
      length = tokens_BL.shape[1]
      batch.n_tokens = tokens_BL.size
      for i, (row, j) in enumerate(np.ndindex(tokens_BL.shape)):
        batch.token[i], batch.pos[i] = int(tokens_BL[row, j]), start + j
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.logits[i] = j == length - 1
      if llama_cpp.llama_decode(ours, batch):
        raise SystemExit('llama.cpp could not compute a step.')
      start += length
      logits = (
        llama_cpp.llama_get_logits_ith(ours, i)
        for i in range(length - 1, tokens_BL.size, length)
      )
      tokens_BL = np.array(
        [[np.ctypeslib.as_array(x, (vocab_size,)).argmax()] for x in logits]
      )

  return generate, vocab_size, f'llama-cpp-python {llama_cpp.__version__}'


def main():
  library, dtype, model, threads, prompt, new = sys.argv[1:]
  cores = sorted(os.sched_getaffinity(0))[: int(threads)]
  os.sched_setaffinity(0, cores)  # Before the library counts its cores.
  makers = {
    'mod_jax': mod_jax_generate,
    'torch': torch_generate,
    'llama.cpp': llama_cpp_generate,
  }
  generate, vocab_size, about = makers[library](model, dtype, int(new))
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
