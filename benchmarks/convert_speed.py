"""Speed of a converted language model over the dense one's, against FLOPs.

    python benchmarks/convert_speed.py --model=SmolLM2-135M-Instruct.Q4_1.gguf

Every other block of the deeper half processes a share of the tokens, as in
`convert_smollm2.py`. Timed in turn with the dense model are the loss of four
rows, a training step on one, and steps that decode one token of every sequence
after a context. Weights are random, since no time depends on them: the training
chooses the k best tokens, and decoding draws scores, so that each sequence is
routed with probability `capacity`, independently of the others. FLOPs are those
that `mod_jax.flops` counts. The result is written beside this file as JSON.
"""

import dataclasses
import functools
import pathlib

from absl import app, flags
import decode
from flax import linen as nn
import jax
import machine
import optax

import mod_jax
from mod_jax import flops, timing
from mod_jax.layers.mode import RoutingMode
import results as results_lib

_MODEL = flags.DEFINE_string(
  'model', None, 'File or folder of the model.', required=True
)
_CAPACITY = flags.DEFINE_float('capacity', 0.5, 'Share of the tokens.')
_LENGTH = 512  # Tokens of a row, and before a decoding step.
_BATCHES = 1, 8, 32
convert = machine.configs('lm/convert.py')


def function(config, rows: int, train: bool):
  """Returns a function that computes the loss of rows, or trains on them."""
  model = config.build()
  tokens_BL = jax.random.randint(
    jax.random.key(0), (rows, _LENGTH + 1), 0, config.vocab_size
  )
  params = nn.unbox(jax.jit(model.init)(jax.random.key(1), tokens_BL[:, :2]))

  def loss(params, tokens_BL):
    output = model.apply(params, tokens_BL[:, :-1], targets_BL=tokens_BL[:, 1:])
    total, weight = output.loss
    return total / weight

  if train:
    return machine.train_step(loss, params, optax.adamw(1e-3), tokens_BL)
  return functools.partial(jax.jit(loss), params, tokens_BL)


def decoding_flops(config) -> float:
  """Returns the FLOPs of a token that is decoded after the context."""
  more = 64
  longer = flops.forward(config, _LENGTH + more)
  return (longer - flops.forward(config, _LENGTH)) / more


def measure(steps: dict, step_flops: dict) -> dict:
  """Returns seconds of the dense and of the routed model, and their ratios."""
  seconds = timing.interleaved(
    steps, rounds=decode.ROUNDS.value, warmup=3, queued=timing.queue_length()
  )
  cell = {
    'median_seconds': timing.medians(seconds),
    **results_lib.over(seconds, step_flops, 'mod', 'dense'),
  }
  print(cell, flush=True)
  return cell


def main(_):
  machine.with_malloc(machine.KEPT)
  dense = dataclasses.replace(
    mod_jax.load(_MODEL.value).config, dtype=decode.DTYPE.value
  )
  routing = dataclasses.replace(
    convert.ROUTING, capacity=_CAPACITY.value, first=dense.num_layers // 2
  )
  models = {'dense': dense, 'mod': dataclasses.replace(dense, routing=routing)}
  forward_flops = {k: flops.forward(x, _LENGTH) for k, x in models.items()}
  train_flops = {k: flops.train(x, _LENGTH) for k, x in models.items()}
  cells = {
    'loss of held-out rows': measure(
      {k: function(x, 4, train=False) for k, x in models.items()}, forward_flops
    ),
    'training step': measure(
      {k: function(x, 1, train=True) for k, x in models.items()}, train_flops
    ),
  }
  # Scores that are drawn, since those of an untrained router would choose all
  # tokens, or none.
  drawn = dataclasses.replace(
    routing, score='gaussian', router_loss=0.0, threshold_decay=0.0
  )
  models['mod'] = dataclasses.replace(dense, routing=drawn)
  mode = RoutingMode(rule='fixed', overflow='drop')
  for batch in _BATCHES:
    steps = {
      k: decode.step_function(x, batch, _LENGTH, mode)
      for k, x in models.items()
    }
    cells[f'decoding, batch {batch}'] = {
      **measure(steps, {k: decoding_flops(x) for k, x in models.items()}),
      'cache_bytes': {k: step.cache_bytes for k, step in steps.items()},
    }
  results = {
    **results_lib.settings('capacity', 'dtype', 'rounds'),
    'model': pathlib.Path(_MODEL.value).name,
    'length': _LENGTH,
    'cells': cells,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
