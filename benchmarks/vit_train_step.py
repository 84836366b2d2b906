"""Time of routed vision models' training steps over their dense twin's.

    python benchmarks/vit_train_step.py

DeiT-S at 224 pixels, batch 16, AdamW: dense, A-MoD and MoD on half and on an
eighth of the tokens in every other block, timed in turn; and, if `--torch`
names a Python that has torch and timm, timm's dense ViT. The time ratio is
reported with the FLOP ratio, and a profile says where the time goes. The result
is written beside this file as JSON.
"""

import contextlib
import functools

from absl import app, flags
import child
from flax import linen as nn
import jax
import machine
import optax
import parts

from mod_jax import flops, losses, timing
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import vit
import results as results_lib

_BACKBONE = flags.DEFINE_enum(
  'backbone', 'deit_small', list(vit.BACKBONES), 'Which sizes.'
)
_IMAGE = flags.DEFINE_integer('image_size', 224, 'Pixels a side.')
_BATCH = flags.DEFINE_integer('batch', 16, 'Images of a step.')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.'
)
_LAYERS = flags.DEFINE_integer('layers', None, "Not the backbone's blocks.")
_ROUNDS = flags.DEFINE_integer('rounds', 9, 'Timed steps of each.')
_TORCH = flags.DEFINE_string(
  'torch', None, 'A Python with torch and timm; None goes without.'
)


def models():
  """Returns configs by name."""
  make = vit.BACKBONES[_BACKBONE.value]
  sizes = {'image_size': _IMAGE.value, 'dtype': _DTYPE.value}
  if _LAYERS.value is not None:
    sizes['num_layers'] = _LAYERS.value

  def routed(**kwargs):
    return make(**sizes, routing=VisionRoutingConfig(**kwargs))

  return {
    'dense': make(**sizes),
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
  configs, about = models(), None
  steps = ours = machine.built(
    {n: functools.partial(step_function, c) for n, c in configs.items()}
  )
  with contextlib.ExitStack() as stack:
    if _TORCH.value:
      dense = configs['dense']
      sizes = (_BATCH.value, dense.image_size, dense.width, dense.num_layers)
      torch, about = stack.enter_context(
        child.torch_steps(_TORCH.value, 'vit_train', *sizes, dense.num_heads)
      )
      steps = ours | {'torch': torch}
    seconds = timing.interleaved(
      steps, rounds=_ROUNDS.value, warmup=2, queued=timing.queue_length()
    )
  median = timing.medians(seconds)
  count = {name: flops.train(config) for name, config in configs.items()}
  rate = _BATCH.value * count['dense'] / median['dense'] / 1e9
  results = {
    'settings': results_lib.settings(
      *('backbone', 'image_size', 'batch', 'dtype', 'rounds')
    ),
    'median_seconds': median,
    'dense_gflops_per_second': rate,
    'routed': results_lib.over_dense(seconds, count),
    'seconds_by_part': {
      name: parts.seconds(step.program, step) for name, step in ours.items()
    },
  }
  if about:
    ratio = timing.ratio_spread(seconds, 'dense', 'torch')[0]
    results['torch'] = {'about': about, 'dense_over_torch': ratio}
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
