"""Steps of decoding as compiled for an H200: what a GPU launches and moves.

    PYTHONPATH=.venv/cuda JAX_PLATFORMS=cpu python benchmarks/compiled_decode.py

Takes JAX's plugin for GPUs and cuDNN, which `make test-slow` installs there,
and no GPU. The models of `configs/lm/paper.py` with 60 and 220 million
parameters decode a token of each sequence, whose caches have room for 2,048:
the dense twin, also with XLA's own options; Mixture-of-Depths that runs routed
blocks for a few rows at a time, as on CPUs; and with a mask, for all rows.
Given are launches in a step, loops and branches that the host waits to decide,
and bytes; and those that any program has to move: weights and caches once. The
result is written beside this file as JSON.
"""

import dataclasses
import functools
import json
import sys

from absl import app, flags
import compiled
from flax import linen as nn
import jax
import jax.numpy as jnp
import machine

from mod_jax.layers.mode import RoutingMode
from mod_jax.models import lm
from mod_jax.prove import hlo
from mod_jax.sampling import generation
import results as results_lib

_SIZES = flags.DEFINE_list('sizes', ['60m', '220m'], 'Variants of the config.')
_BATCHES = flags.DEFINE_list('batches', [1, 8, 64], 'Sequences.')
_ROOM = flags.DEFINE_integer('room', 2048, 'Slots of the caches.')


def step(config: lm.LMConfig, mode: RoutingMode, variables, cache, tokens_B1):
  """Returns the caches and the most likely token after one more."""
  output = config.build().apply(variables, tokens_B1, mode=mode, cache=cache)
  return output.cache, output.logits_BLV.argmax(axis=-1)


def measure(config, mode: RoutingMode, batch: int, options) -> dict:
  """Returns what a step launches and moves; options are the compiler's."""
  tokens_B1 = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
  variables = jax.eval_shape(
    lambda: nn.unbox(
      config.build().init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    )
  )
  # Served weights are in the model's dtype.
  variables = {
    'params': jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, config.dtype), variables['params']
    )
  }
  cache = jax.eval_shape(
    lambda: lm.LMCache.empty(config, batch, _ROOM.value, mode)
  )
  function = functools.partial(step, config, mode)
  program = compiled.for_gpu(
    function,
    (variables, cache, tokens_B1),
    donate_argnums=1,
    compiler_options=options,
  )
  kinds = [x.opcode for x in hlo.launches(program.as_text())]
  table = variables['params']['embedding']
  leaves = jax.tree.leaves((variables, cache))
  least = sum(x.size * x.dtype.itemsize for x in leaves)
  return {
    **compiled.launched(program),
    'waits': kinds.count('while') + kinds.count('conditional'),
    # Of the embedding, rows are read and no more.
    'floor_bytes': least - table.size * table.dtype.itemsize,
  }


def main(_):
  paper = machine.configs('lm/paper.py')
  fixed = RoutingMode(rule='router', overflow='drop')
  cells = []
  for size in _SIZES.value:
    model = dataclasses.replace(paper.get_config(size).model, scan_layers=False)
    masked = dataclasses.replace(fixed, chunk=0)
    kinds = {
      "dense, XLA's options": (model.dense_twin(), fixed, None),
      'dense': (model.dense_twin(), fixed, generation.GPU_OPTIONS),
      'MoD, rows': (model, fixed, generation.GPU_OPTIONS),
      'MoD, masked': (model, masked, generation.GPU_OPTIONS),
    }
    for batch in map(int, _BATCHES.value):
      for name, (config, mode, options) in kinds.items():
        cell = {'size': size, 'batch': batch, 'model': name}
        cells.append(cell | measure(config, mode, batch, options))
        print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
  results_lib.save(__file__, {'room': _ROOM.value, 'cells': cells})


if __name__ == '__main__':
  app.run(main)
