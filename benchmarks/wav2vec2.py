"""Time of Wav2Vec2's forward pass, dense and adaptive, and of PyTorch's.

    python benchmarks/wav2vec2.py --torch=python3.11

The base model on ten seconds of audio, one recording and eight: dense; with
adaptive FFNs that spend a budget of .4; and, if `--torch` names a Python that
has torch and transformers, PyTorch's `Wav2Vec2ForCTC`. All are timed in turn.
Weights are random. The gates run, but their choices are replaced by random ones
with the mean of the budget, since those of untrained gates are arbitrary. The
result is written beside this file as JSON.
"""

import contextlib

from absl import app, flags
import child
from flax import linen as nn
import jax
import machine
import numpy as np

from mod_jax import flops, timing
from mod_jax.layers import acm
from mod_jax.models import wav2vec2
import results as results_lib

_BATCHES = flags.DEFINE_list('batches', [1, 8], 'Recordings.')
_SECONDS = flags.DEFINE_float('seconds', 10, 'Length of a recording.')
_LAYERS = flags.DEFINE_integer('layers', 12, 'Number of blocks.')
_WIDTH = flags.DEFINE_integer('width', 768, 'D')
_BUDGET = flags.DEFINE_float('budget', 0.4, 'Share of the learners that runs.')
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed passes of each.')
_TORCH = flags.DEFINE_string(
  'torch', None, 'A Python with torch and transformers; None goes without.'
)


def models() -> dict[str, wav2vec2.Wav2Vec2Config]:
  """Returns configs by name."""
  sizes = {
    'num_layers': _LAYERS.value,
    'width': _WIDTH.value,
    'mlp_dim': 4 * _WIDTH.value,
  }
  adaptive = acm.AdaptiveConfig(replace=(acm.FFNS,))
  return {
    'dense': wav2vec2.base(**sizes),
    'adaptive': wav2vec2.base(**sizes, adaptive=adaptive),
  }


def forward(config, wave_BT):
  """Returns a function that runs the compiled model and waits for it."""
  model, key = config.build(), jax.random.key(0)
  variables = nn.unbox(jax.jit(model.init)(key, wave_BT[:1]))
  size = (config.num_layers, len(wave_BT), config.frames(wave_BT.shape[1]))
  count_NBL = np.random.default_rng(0).binomial(4, _BUDGET.value, size)

  def logits(variables, wave_BT, count_NBL):
    counts = iter(count_NBL)

    def choose(gate, args, kwargs, context):
      logits_BLM = gate(*args, **kwargs)
      if not isinstance(context.module, acm.Gate):
        return logits_BLM
      chosen_BLM = jax.nn.one_hot(next(counts), logits_BLM.shape[-1])
      return logits_BLM + 1e6 * chosen_BLM

    with nn.intercept_methods(choose):
      return model.apply(variables, wave_BT).logits_BLV

  arguments = jax.device_put((variables, wave_BT, count_NBL))
  compiled = jax.jit(logits).lower(*arguments).compile()
  return lambda: compiled(*arguments).block_until_ready()


def macs(config, frames: int) -> float:
  """Returns multiply-accumulates of a recording at the budget."""
  total = flops.forward(config, frames)
  table = config.flops_table(frames)
  learners = sum(parts.get('learners', 0) for _, parts in table)
  return (total - (1 - _BUDGET.value) * learners) / 2


def main(_):
  configs, samples = models(), round(16_000 * _SECONDS.value)
  frames = configs['dense'].frames(samples)
  costs = {name: macs(config, frames) for name, config in configs.items()}
  results = {
    'settings': results_lib.settings(
      *('batches', 'seconds', 'layers', 'width', 'budget', 'rounds')
    ),
    'gmacs': {name: cost / 1e9 for name, cost in costs.items()},
    'by_batch': {},
  }
  with contextlib.ExitStack() as stack:
    if _TORCH.value:
      sizes = (_LAYERS.value, _WIDTH.value, 4 * _WIDTH.value, samples)
      torch, results['torch'] = stack.enter_context(
        child.torch_steps(_TORCH.value, 'wav2vec2', *sizes)
      )
    for batch in map(int, _BATCHES.value):
      wave_BT = np.random.default_rng(1).normal(size=(batch, samples))
      functions = {
        name: forward(config, np.float32(wave_BT))
        for name, config in configs.items()
      }
      if _TORCH.value:
        functions['torch'] = lambda batch=batch: torch(batch)
      seconds = timing.interleaved(functions, rounds=_ROUNDS.value)
      found = results['by_batch'][batch] = {
        'median_seconds': timing.medians(seconds),
        **results_lib.over_dense(seconds, costs),
      }
      if _TORCH.value:
        middle, *quartiles = timing.ratio_spread(seconds, 'dense', 'torch')
        found['dense_over_torch'] = {'ratio': middle, 'quartiles': quartiles}
  results_lib.save(__file__, results)


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
