"""Training step of MoD over its dense twin's, against their FLOP ratio.

    python benchmarks/train_step.py

Times, in one run and in turn: a MoD step (12.5% of the tokens in every other
block), the dense twin's step, and a plain large matrix product. The result
stands beside this file as JSON.
"""

import dataclasses

from absl import app
from absl import flags
from flax import linen as nn
import jax
import jax.numpy as jnp
import machine
import optax
import results as results_lib

from mod_jax import flops
from mod_jax import losses
from mod_jax import timing
from mod_jax.layers.routed import MoDConfig
from mod_jax.models.lm import LMConfig

_WIDTH = flags.DEFINE_integer('width', 256, 'D')
_LAYERS = flags.DEFINE_integer('layers', 8, 'Number of blocks.')
_LENGTH = flags.DEFINE_integer('length', 512, 'S')
_BATCH = flags.DEFINE_integer('batch', 8, 'B')
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed steps of each.')
_DTYPE = flags.DEFINE_string('dtype', 'float32', 'Of the computation.')
_MATMUL = 2048


def step_function(config: LMConfig, batch: int, length: int):
  """Returns a function that takes one training step and blocks."""
  model = config.build()
  tokens_BL = jax.random.randint(
    jax.random.key(0), (batch, length + 1), 0, config.vocab_size
  )
  params = nn.unbox(model.init(jax.random.key(1), tokens_BL[:, :2]))

  def loss(params, tokens_BL):
    output = model.apply(params, tokens_BL[:, :-1])
    targets_BL = tokens_BL[:, 1:]
    total, weight = losses.next_token_loss(
      output.logits_BLV, targets_BL, jnp.ones(targets_BL.shape)
    )
    total /= weight
    for routed in output.routing:
      bce, count = losses.choice_bce(routed.score_BL, routed.top_k_BL)
      total += 0.01 * bce / count
    return total

  return machine.train_step(loss, params, optax.adamw(1e-3), tokens_BL)


def main(_):
  batch, length = _BATCH.value, _LENGTH.value
  mod = LMConfig(
    vocab_size=256,
    num_layers=_LAYERS.value,
    width=_WIDTH.value,
    num_heads=_WIDTH.value // 64,
    mlp='gelu_tanh',
    routing=MoDConfig(capacity=0.125),
    dtype=_DTYPE.value,
  )
  dense = mod.dense_twin()
  a = jax.random.normal(jax.random.key(2), (_MATMUL, _MATMUL))
  product = jax.jit(lambda a: a @ a)
  seconds = timing.interleaved(
    {
      'mod': step_function(mod, batch, length),
      'dense': step_function(dense, batch, length),
      'matmul': lambda: product(a).block_until_ready(),
    },
    rounds=_ROUNDS.value,
    warmup=2,
  )
  median = timing.medians(seconds)
  step_flops = {
    'mod': batch * flops.train(mod, length),
    'dense': batch * flops.train(dense, length),
    'matmul': 2 * _MATMUL**3,
  }
  flop_ratio = step_flops['mod'] / step_flops['dense']
  time_ratio, low, high = timing.ratio_spread(seconds, 'mod', 'dense')
  rate = {name: step_flops[name] / median[name] / 1e9 for name in median}
  results = {
    'config': {
      'batch': batch,
      'length': length,
      **{k: v for k, v in dataclasses.asdict(mod).items() if k != 'routing'},
      'capacity': mod.routing.capacity,
    },
    'rounds': _ROUNDS.value,
    'median_seconds': median,
    'gflops_per_second': rate,
    'flop_ratio': flop_ratio,
    'time_ratio': time_ratio,
    'time_ratio_quartiles': [low, high],
    'time_ratio_over_flop_ratio': time_ratio / flop_ratio,
    'dense_rate_over_matmul_rate': rate['dense'] / rate['matmul'],
    'seconds': seconds,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
