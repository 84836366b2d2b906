"""Time of routed vision models' training steps over their dense twin's.

    python benchmarks/vit_train_step.py

DeiT-S at 224 pixels, batch 16, AdamW: dense, A-MoD and MoD on half and on an
eighth of the tokens in every other block, timed in turn; and, if `--torch`
names a Python that has torch and timm, timm's dense ViT. The time ratio is
reported with the FLOP ratio, and a profile says where the time goes. The result
is written beside this file as JSON.
"""

import functools

from absl import app, flags
from flax import linen as nn
import jax
import machine
import optax
import parts
import vit_timing

from mod_jax import flops, losses, timing
from mod_jax.layers.routing_config import VisionRoutingConfig
import results as results_lib

_BATCH = flags.DEFINE_integer('batch', 16, 'Images of a step.')
_ROUNDS = flags.DEFINE_integer('rounds', 9, 'Timed steps of each.')


def models():
  """Returns configs by name."""

  def routed(**kwargs):
    return vit_timing.model(routing=VisionRoutingConfig(**kwargs))

  return {
    'dense': vit_timing.model(),
    'amod_50': routed(capacity=0.5),
    'mod_50': routed(capacity=0.5, score='learned'),
    'amod_12.5': routed(capacity=0.125),
    'mod_12.5': routed(capacity=0.125, score='learned'),
  }


def step_function(config):
  """Returns a function that takes one training step and waits for it."""
  key = jax.random.key(0)
  model = config.build(train=True)
  params = nn.unbox(jax.jit(model.init)(key, config.example()))
  size, batch = config.image_size, _BATCH.value
  images_BHWC = jax.random.normal(key, (batch, size, size, 3))
  label_B = jax.random.randint(key, (batch,), 0, config.num_classes)
  target_BV = jax.nn.one_hot(label_B, config.num_classes)

  def loss(params, images_BHWC):
    logits_BV = model.apply(params, images_BHWC).logits_BV
    total, count = losses.classification_loss(logits_BV, target_BV)
    return total / count

  return machine.train_step(loss, params, optax.adamw(1e-4), images_BHWC)


def main(_):
  machine.with_malloc(machine.KEPT)
  configs = models()
  makers = {n: functools.partial(step_function, c) for n, c in configs.items()}
  steps, seconds, found = vit_timing.interleaved(
    makers, 'vit_train', _BATCH.value, _ROUNDS.value
  )
  median = timing.medians(seconds)
  count = {name: flops.train(config) for name, config in configs.items()}
  rate = _BATCH.value * count['dense'] / median['dense'] / 1e9
  results = found | {
    'settings': results_lib.settings(
      *('backbone', 'image_size', 'batch', 'dtype', 'rounds')
    ),
    'median_seconds': median,
    'dense_gflops_per_second': rate,
    'routed': results_lib.over_dense(seconds, count),
    'seconds_by_part': {
      name: parts.seconds(step.program, step) for name, step in steps.items()
    },
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
