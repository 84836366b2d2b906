"""Training step of MoD over its dense twin's, against their FLOP ratio.

    python benchmarks/train_step.py --torch=python3.11

Times, in turn, a MoD step (12.5% of the tokens in every other block), the dense
twin's step, a plain large matrix product and, if `--torch` names a Python that
has torch and transformers, a step of PyTorch's eager Llama of the dense twin's
shape. Then it profiles where mod_jax's steps spend their time. The result is
written beside this file as JSON.
"""

import contextlib
import dataclasses
import functools

from absl import app, flags
import child
from flax import linen as nn
import jax
import machine
import optax
import parts

from mod_jax import flops, losses, peaks, timing
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
import results as results_lib

_WIDTH = flags.DEFINE_integer('width', 256, 'D')
_LAYERS = flags.DEFINE_integer('layers', 8, 'Number of blocks.')
_HEAD_DIM = flags.DEFINE_integer('head_dim', 64, 'Channels of a head.')
_LENGTH = flags.DEFINE_integer('length', 512, 'S')
_BATCH = flags.DEFINE_integer('batch', 8, 'B')
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed steps of each.')
_DTYPE = flags.DEFINE_string('dtype', 'float32', 'Of the computation.')
_VOCAB = flags.DEFINE_integer('vocab', 256, 'V')
_MLP = flags.DEFINE_string('mlp', 'swiglu', 'Kind of feed-forward.')
_TORCH = flags.DEFINE_string(
  'torch', None, 'A Python with torch and transformers; None goes without.'
)


def step_function(config: LMConfig, batch: int, length: int):
  """Returns a function that takes one training step and blocks."""
  model = config.build()
  tokens_BL = jax.random.randint(
    jax.random.key(0), (batch, length + 1), 0, config.vocab_size
  )
  init = jax.jit(model.init)
  params = nn.unbox(init(jax.random.key(1), tokens_BL[:, :2]))

  def loss(params, tokens_BL):
    output = model.apply(params, tokens_BL[:, :-1], targets_BL=tokens_BL[:, 1:])
    total, weight = output.loss
    total /= weight
    for routed in output.routing:
      bce, count = losses.choice_bce(routed.score_BL, routed.top_k_BL)
      total += 0.01 * bce / count
    return total

  return machine.train_step(loss, params, optax.adamw(1e-3), tokens_BL)


def main(_):
  machine.with_malloc(machine.KEPT)
  batch, length = _BATCH.value, _LENGTH.value
  mod = LMConfig(
    vocab_size=_VOCAB.value,
    num_layers=_LAYERS.value,
    width=_WIDTH.value,
    num_heads=_WIDTH.value // _HEAD_DIM.value,
    mlp=_MLP.value,
    routing=MoDConfig(capacity=0.125),
    dtype=_DTYPE.value,
  )
  dense = mod.dense_twin()
  # Large enough to fill the device.
  side = 2048 if jax.default_backend() == 'cpu' else 8192
  a = jax.random.normal(jax.random.key(2), (side, side), dense.dtype)
  product = jax.jit(lambda a: a @ a)
  steps = machine.built(
    {
      name: functools.partial(step_function, config, batch, length)
      for name, config in (('mod', mod), ('dense', dense))
    }
  )
  others = {'matmul': lambda: product(a)}
  with contextlib.ExitStack() as stack:
    about = None
    if _TORCH.value:
      sizes = (batch, length, dense.vocab_size, dense.width, dense.num_layers)
      sizes += (dense.num_heads, dense.block.mlp.hidden)
      others['torch'], about = stack.enter_context(
        child.torch_steps(_TORCH.value, 'train', *sizes)
      )
    seconds = timing.interleaved(
      steps | others,
      rounds=_ROUNDS.value,
      warmup=2,
      queued=timing.queue_length(),
    )
  median = timing.medians(seconds)
  step_flops = {
    'mod': batch * flops.train(mod, length),
    'dense': batch * flops.train(dense, length),
    'matmul': 2 * side**3,
    'torch': batch * flops.train(dense, length),
  }
  flop_ratio = step_flops['mod'] / step_flops['dense']
  time_ratio, low, high = timing.ratio_spread(seconds, 'mod', 'dense')
  rate = {name: step_flops[name] / median[name] / 1e9 for name in median}
  peak = peaks.of(jax.devices()[0], _DTYPE.value)
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
    # Of the device's peak, if that is known (MFU, Chowdhery et al. 2022).
    'utilization': {
      name: peak and 1e9 * rate[name] / peak for name in ('mod', 'dense')
    },
    'flop_ratio': flop_ratio,
    'time_ratio': time_ratio,
    'time_ratio_quartiles': [low, high],
    'time_ratio_over_flop_ratio': time_ratio / flop_ratio,
    'dense_rate_over_matmul_rate': rate['dense'] / rate['matmul'],
    'seconds_by_part': {
      name: parts.seconds(step.program, step) for name, step in steps.items()
    },
    'seconds': seconds,
  }
  if about:
    middle, low, high = timing.ratio_spread(seconds, 'dense', 'torch')
    results['torch'] = {
      'about': about,
      'dense_over_torch': middle,
      'dense_over_torch_quartiles': [low, high],
    }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
