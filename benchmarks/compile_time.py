"""Compile time by depth; that of a scanned model should hardly grow.

    python benchmarks/compile_time.py

Compiles the gradient of a Mixture-of-Depths model of 8 and of 24 layers,
scanned and unrolled, in turn. The result is written beside this file as JSON.
"""

import dataclasses
import time

from absl import app, flags
import jax
import jax.numpy as jnp

from mod_jax import losses, timing
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
import results as results_lib

_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Compilations of each.')
_DEPTHS = (8, 24)


def compile_seconds(config: LMConfig) -> float:
  """Returns the seconds from tracing to a compiled gradient."""
  model = config.build()
  tokens_BL = jax.ShapeDtypeStruct((2, 256), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens_BL)

  def loss(params, tokens_BL):
    logits_BLV = model.apply(params, tokens_BL).logits_BLV
    weights_BL = jnp.ones(tokens_BL.shape)
    return losses.next_token_loss(logits_BLV, tokens_BL, weights_BL)[0]

  jax.clear_caches()
  start = time.perf_counter()
  jax.jit(jax.grad(loss)).lower(params, tokens_BL).compile()
  return time.perf_counter() - start


def main(_):
  base = LMConfig(num_layers=8, width=64, num_heads=4, routing=MoDConfig())
  configs = {
    f'{kind}_{depth}': dataclasses.replace(
      base, num_layers=depth, scan_layers=kind == 'scanned'
    )
    for kind in ('scanned', 'unrolled')
    for depth in _DEPTHS
  }
  seconds = {name: [] for name in configs}
  for _ in range(_ROUNDS.value):
    for name, config in configs.items():
      seconds[name].append(compile_seconds(config))
  median = timing.medians(seconds)
  results = {
    'median_seconds': median,
    'growth_8_to_24': {
      kind: median[f'{kind}_24'] / median[f'{kind}_8']
      for kind in ('scanned', 'unrolled')
    },
    'seconds': seconds,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
