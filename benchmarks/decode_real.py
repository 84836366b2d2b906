"""Generation by a real model: mod_jax, PyTorch's transformers and llama.cpp.

    python benchmarks/decode_real.py --model=FOLDER --torch=python3.11 \\
      --gguf=F32.gguf,Q8_0.gguf

FOLDER is a language model of Hugging Face, such as SmolLM2-135M. Runs that made
it routed, such as those of `convert_smollm2.py`, are measured beside it with
`--converted`; they choose tokens by the causal rule that they were trained for.
llama.cpp has the same model in files, made by its `llama_model_quantize`, that
are named after the types of their weights. Each runs in its own process, loads
the model in float32 or as `--dtypes` says, and continues batches of random
prompts greedily. They take turns. The first call of each shape, in which
mod_jax compiles, is reported separately. Steps per second are new tokens of a
row over the time of the whole call, including the prompt. Memory is the peak of
the process after the batch sizes so far. The result is written beside this file
as JSON.
"""

import contextlib
import functools
import json
import pathlib
import statistics
import sys

from absl import app, flags
import child
import machine

from mod_jax import timing
import results as results_lib

_MODEL = flags.DEFINE_string('model', None, 'The folder.', required=True)
_BATCHES = flags.DEFINE_list('batches', [1, 8, 32], 'Prompts at a time.')
_THREADS = flags.DEFINE_integer('threads', 2, 'Cores of each process.')
_PROMPT = flags.DEFINE_integer('prompt', 32, 'Tokens of a prompt.')
_NEW = flags.DEFINE_integer('new', 64, 'Tokens that are added.')
_ROUNDS = flags.DEFINE_integer('rounds', 10, 'Timed calls of each.')
_DTYPES = flags.DEFINE_list(
  'dtypes', ['bfloat16', 'int8'], 'Also measured, as mod_jax.load takes them.'
)
_GGUF = flags.DEFINE_list('gguf', [], 'Files of llama.cpp, also measured.')
_CONVERTED = flags.DEFINE_list(
  'converted', [], 'Workdirs of routed models, also measured.'
)
_TORCH = flags.DEFINE_string(
  'torch',
  None,
  'A Python with torch and transformers, for --gguf with llama-cpp-python.',
  required=True,
)


def measure(processes, batch: int) -> dict:
  """Returns each library's figures for a batch size, and their ratios.

  `speedup` is that of mod_jax over PyTorch in float32, and that of all others
  over mod_jax in float32.
  """
  measurements = {name: [] for name in processes}

  def call(name):
    measurements[name].append(json.loads(processes[name](batch)))

  calls = {name: functools.partial(call, name) for name in processes}
  timing.interleaved(calls, rounds=_ROUNDS.value)
  cell = {'batch': batch}
  for name, (first, *later) in measurements.items():
    seconds = statistics.median(x['seconds'] for x in later)
    cell[name] = {
      'first_call_seconds': first['seconds'],
      'median_seconds': seconds,
      'steps_per_second': _NEW.value / seconds,
      'peak_mib': later[-1]['peak'],
    }
  seconds = {k: [x['seconds'] for x in v[1:]] for k, v in measurements.items()}
  for name in seconds.keys() - {'mod_jax', 'torch'}:
    cell[name] |= _faster(seconds, 'mod_jax', name)
  return cell | _faster(seconds, 'torch', 'mod_jax')


def _faster(seconds, than: str, name: str) -> dict:
  middle, low, high = timing.ratio_spread(seconds, than, name)
  return {'speedup': middle, 'quartiles': [low, high]}


def main(_):
  machine.with_malloc(machine.KEPT)
  dense, ours, torch = _MODEL.value, sys.executable, _TORCH.value
  # Python, library, dtype and model by name.
  measured = {
    'mod_jax': (ours, 'mod_jax', 'float32', dense),
    'torch': (torch, 'torch', 'float32', dense),
    'torch_bfloat16': (torch, 'torch', 'bfloat16', dense),
  }
  measured |= {x: (ours, 'mod_jax', x, dense) for x in _DTYPES.value}
  measured |= {x: (ours, 'mod_jax', 'float32', x) for x in _CONVERTED.value}
  measured |= {
    f'llama.cpp_{pathlib.Path(x).stem}': (torch, 'llama.cpp', 'file', x)
    for x in _GGUF.value
  }
  about, cells = {}, []
  with contextlib.ExitStack() as stack:
    processes = {}
    for name, (python, *what) in measured.items():
      sizes = (_THREADS.value, _PROMPT.value, _NEW.value)
      processes[name], about[name] = stack.enter_context(
        child.steps(python, 'real_steps.py', *what, *sizes)
      )
    for batch in map(int, _BATCHES.value):
      cells.append(measure(processes, batch))
      print(cells[-1], flush=True)
  results = {
    **results_lib.settings('threads', 'prompt', 'new', 'rounds'),
    'model': pathlib.Path(_MODEL.value).name,
    'about': about,
    'cells': cells,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
