"""Inference time of routed and pruned vision models over their dense twin's.

    python benchmarks/vit_throughput.py

DeiT-S at 224 pixels: dense; A-MoD on half of the tokens in every other block;
DynamicViT keeping 70% at each of three stages, by its prediction heads or by
one pattern for all pictures, which costs nothing. Models are timed in turn, in
batches of 1 and of 32; the time ratio is reported with the FLOP ratio, and with
that of dense blocks on as many tokens: a product with fewer rows takes longer
than its FLOPs say, whoever chose the rows. The result is written beside this
file as JSON. On a GPU give `--dtype=bfloat16 --batches=1,32,256`; weights are
then bfloat16, too. If `--torch` names a Python that has torch and timm, timm's
dense ViT is timed as well.
"""

import dataclasses
import functools

from absl import app, flags
from flax import linen as nn
import jax
import numpy as np
import vit_timing

from mod_jax import flops, timing
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import vit
from mod_jax.models.dynamic_vit import DynamicViTConfig, equal_stages
import results as results_lib

_CAPACITY = flags.DEFINE_float('capacity', 0.5, 'Of A-MoD.')
_KEEP = flags.DEFINE_float('keep', 0.7, 'Of DynamicViT.')
_BATCHES = flags.DEFINE_list('batches', ['1', '32'], 'Images at a time.')
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed passes of each.')


def models():
  """Returns configs by name."""
  dense = vit_timing.model()
  stages = equal_stages(dense.num_layers)
  pruned = DynamicViTConfig(backbone=dense, stages=stages, keep=_KEEP.value)
  routing = VisionRoutingConfig(capacity=_CAPACITY.value)
  return {
    'dense': dense,
    'amod': vit_timing.model(routing=routing),
    'dynamic_vit': pruned,
    'without_heads': dataclasses.replace(pruned, score='static'),
  }


def inference(config, batch: int):
  """Returns a function that runs the compiled model once."""
  key, dtype = jax.random.key(0), vit_timing.DTYPE.value
  module = config.build()
  variables = nn.unbox(jax.jit(module.init)(key, config.example()))
  variables = jax.tree.map(lambda x: x.astype(dtype), variables)
  size = config.image_size
  images_BHWC = jax.random.normal(key, (batch, size, size, 3), dtype)
  compiled = (
    jax.jit(lambda v, x: module.apply(v, x).logits_BV)
    .lower(variables, images_BHWC)
    .compile()
  )
  return lambda: compiled(variables, images_BHWC)


def smaller(dense: vit.ViTConfig) -> list[vit.ViTConfig]:
  """Returns the dense model on smaller pictures, and so on fewer tokens."""
  sizes = [dense.grid * n // 7 * dense.patch_size for n in (4, 5, 6)]
  return [dataclasses.replace(dense, image_size=size) for size in sizes]


def measure(configs, batch: int) -> dict:
  dense = [*smaller(configs['dense']), configs['dense']]
  # From few tokens to many.
  timed = {f'dense, {x.image_size} pixels': x for x in dense[:-1]} | configs
  makers = {n: functools.partial(inference, x, batch) for n, x in timed.items()}
  _, seconds, found = vit_timing.interleaved(
    makers, 'vit_infer', batch, _ROUNDS.value
  )
  median = timing.medians(seconds)
  count = {name: flops.forward(config) for name, config in configs.items()}
  routed = results_lib.over_dense(seconds, count)
  points = [median[name] for name, x in timed.items() if x in dense]
  for name, row in routed.items():
    # Blocks of a dense model take equally long, so a mean over blocks will do.
    tokens = configs[name].tokens_per_block()
    taken = np.interp(tokens, [x.num_tokens for x in dense], points).mean()
    row['dense_on_as_many_tokens'] = float(taken) / median['dense']
  return found | {
    'median_seconds': median,
    'routed': routed,
    'images_per_second': {n: batch / median[n] for n in configs},
    'dense_gflops_per_second': batch * count['dense'] / median['dense'] / 1e9,
  }


def main(_):
  configs = models()
  results = {
    'settings': results_lib.settings(
      *('backbone', 'image_size', 'capacity', 'keep', 'dtype', 'rounds')
    ),
    'gmacs': {
      name: flops.published_macs(c) / 1e9 for name, c in configs.items()
    },
    'batches': {b: measure(configs, int(b)) for b in _BATCHES.value},
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
