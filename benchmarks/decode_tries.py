"""Two ideas to make decoding of several sequences cheaper still.

    python benchmarks/decode_tries.py

Grouping: if sequences waited until others are routed through the same block,
its weights would be read once for all of them. The upper bound of the gain is
measured: with scores of a stride, all sequences are routed together in one step
of eight and in one chunk, and the time is compared with that of independent
scores of the same capacity. 8-bit caches: attention over a cache of 8-bit
integers, with a scale for each token and head, is compared with a float32
cache. Steps and sizes are those of `decode.py`. The result is written beside
this file as JSON.
"""

import dataclasses

from absl import app, flags
import decode
import jax
import jax.numpy as jnp
import machine

from mod_jax import timing
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
import mod_jax_kernels
import results as results_lib

_CONTEXT = flags.DEFINE_integer('context', 512, 'Tokens before.')
_CAPACITY = 0.125


def grouping(batch: int) -> dict[str, float]:
  """Returns the mean seconds of a step with each kind of routing."""
  mode = RoutingMode(rule='fixed', overflow='drop')
  base = lm.LMConfig(
    num_layers=12,
    width=512,
    num_heads=8,
    routing=MoDConfig(capacity=_CAPACITY, score='gaussian'),
  )
  together = dataclasses.replace(
    base, routing=MoDConfig(capacity=_CAPACITY, score='stride')
  )
  steps = {
    'independent': decode.step_function(base, batch, _CONTEXT.value, mode),
    'together': decode.step_function(
      together, batch, _CONTEXT.value, dataclasses.replace(mode, chunk=batch)
    ),
  }
  # `rounds` and `warmup` are multiples of the stride, eight steps.
  seconds = timing.interleaved(steps, rounds=flags.FLAGS.rounds, warmup=8)
  return {name: sum(x) / len(x) for name, x in seconds.items()}


def int8_cache(batch: int) -> dict[str, float]:
  """Returns the median seconds of attention over a cache, by dtype."""
  key = jax.random.key(0)
  q_B1HC = jax.random.normal(key, (batch, 1, 8, 64))
  float_BHSC = jax.random.normal(key, (batch, 8, _CONTEXT.value, 64))
  seen_B1S = jnp.ones((batch, 1, _CONTEXT.value), bool)
  scale_BHS1 = jnp.abs(float_BHSC).max(axis=-1, keepdims=True) / 127
  int8_BHSC = jnp.round(float_BHSC / scale_BHS1).astype(jnp.int8)

  @jax.jit
  def over_float(x_BHSC):
    x_BSHC = jnp.moveaxis(x_BHSC, 1, 2)
    return mod_jax_kernels.attention(q_B1HC, x_BSHC, x_BSHC, seen_B1S)

  @jax.jit
  def over_int8(x_BHSC):
    return over_float(x_BHSC.astype(jnp.float32) * scale_BHS1)

  seconds = timing.interleaved(
    {
      'float32': lambda: over_float(float_BHSC).block_until_ready(),
      'int8': lambda: over_int8(int8_BHSC).block_until_ready(),
    },
    rounds=flags.FLAGS.rounds,
    warmup=3,
  )
  return timing.medians(seconds)


def main(_):
  machine.with_malloc(machine.KEPT)
  cells = []
  for batch in (8, 32):
    grouped, caches = grouping(batch), int8_cache(batch)
    cells.append(
      {
        'batch': batch,
        'step_mean_seconds': grouped,
        'together_over_independent': grouped['together']
        / grouped['independent'],
        'attention_median_seconds': caches,
        'int8_over_float32': caches['int8'] / caches['float32'],
      }
    )
    print(cells[-1], flush=True)
  settings = results_lib.settings('context', 'rounds')
  results_lib.save(__file__, {**settings, 'cells': cells})


if __name__ == '__main__':
  flags.FLAGS.set_default('rounds', 32)
  app.run(main)
