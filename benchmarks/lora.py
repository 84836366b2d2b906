"""A training step of adapters and routers, over one of all weights.

    python benchmarks/lora.py --model=FOLDER

FOLDER is a language model of Hugging Face, such as SmolLM2-135M, which
`configs/lm/convert.py` makes Mixture-of-Depths (12.5% of the tokens in every
other block of the deeper half). The variant `lora` trains the routers, and
adapters of rank 16 in the deeper half; `eighth` trains everything. Each runs in
its own process on random tokens, and the two take turns. The first steps, in
which memory is first touched, do not count. The memory of training is that of
trained weights, their gradients and the optimiser's state; the peak is of the
whole process, which also holds activations, the frozen weights and, for a
while, the weights as they were read. The result is written beside this file as
JSON.
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
_BATCH = flags.DEFINE_integer('batch', 4, 'Rows of a batch.')
_LENGTH = flags.DEFINE_integer('length', 256, 'Tokens of a row.')
_ROUNDS = flags.DEFINE_integer('rounds', 10, 'Timed steps of each.')
_WARMUP = 2
_VARIANTS = {'full': 'eighth', 'lora': 'lora'}


def main(_):
  machine.with_malloc(machine.KEPT)
  about, steps = {}, {name: [] for name in _VARIANTS}
  with contextlib.ExitStack() as stack:

    def call(name, process):
      steps[name].append(json.loads(process()))

    calls = {}
    for name, variant in _VARIANTS.items():
      sizes = (_MODEL.value, _BATCH.value, _LENGTH.value)
      process, line = stack.enter_context(
        child.steps(sys.executable, 'lora_steps.py', variant, *sizes)
      )
      calls[name] = functools.partial(call, name, process)
      about[name] = json.loads(line)
    timing.interleaved(calls, rounds=_ROUNDS.value, warmup=_WARMUP)
  seconds = {k: [x['seconds'] for x in v[_WARMUP:]] for k, v in steps.items()}
  middle, low, high = timing.ratio_spread(seconds, 'lora', 'full')
  peaks = {name: lines[-1]['peak'] for name, lines in steps.items()}

  def ratio(field):
    return about['lora'][field] / about['full'][field]

  tokens = _BATCH.value * _LENGTH.value
  results_lib.save(
    __file__,
    {
      **results_lib.settings('batch', 'length', 'rounds'),
      'model': pathlib.Path(_MODEL.value).name,
      'about': about,
      'time_ratio': middle,
      'quartiles': [low, high],
      'flop_ratio': ratio('flops'),
      'training_memory_ratio': ratio('training_bytes'),
      'peak_mib': peaks,
      'peak_ratio': peaks['lora'] / peaks['full'],
      'tokens_per_second': {
        name: tokens / statistics.median(times)
        for name, times in seconds.items()
      },
      'losses': {k: [x['loss'] for x in v] for k, v in steps.items()},
      'seconds': seconds,
    },
  )


if __name__ == '__main__':
  app.run(main)
