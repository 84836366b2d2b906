"""Images per second of a training step, with and without reading pictures.

    python benchmarks/image_input.py

Makes a folder of PNGs of different sizes from a seed, and times the steps of
`configs/vit/folder.py:dense` in turn: on one batch again and again ('none'), on
batches whose pictures are decoded in every epoch ('decoded'), and on batches of
pictures that `data.cache` keeps in memory or on disk. Both caches are filled
before, and nothing reads ahead while another kind is timed. The result is
written beside this file as JSON.
"""

import dataclasses
import functools
import os
import pathlib
import tempfile

from absl import app, flags
from flax import linen as nn
import jax
import machine
import numpy as np
import optax
from PIL import Image

from mod_jax import losses, timing
from mod_jax.data import images
import results as results_lib

_PICTURES = flags.DEFINE_integer('pictures', 1780, 'PNGs in two classes.')
_PIXELS = flags.DEFINE_integer('pixels', 280_000, 'Mean pixels of a PNG.')
_BATCH = flags.DEFINE_integer('batch', 32, 'Images of a step.')
_STEPS = flags.DEFINE_integer('steps', 30, 'Steps of a round.')
_ROUNDS = flags.DEFINE_integer('rounds', 9, 'Timed rounds of each.')


def make_pictures(folder: pathlib.Path) -> None:
  """Writes smooth pictures with some noise, which compress as photos do."""
  rng = np.random.default_rng(0)
  for i in range(_PICTURES.value):
    area = _PIXELS.value * rng.uniform(0.5, 1.5)
    width = round((area * rng.uniform(0.75, 4 / 3)) ** 0.5)
    size = (width, round(area / width))
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), float)
    noisy = (smooth + rng.normal(0, 4, smooth.shape)).clip(0, 255)
    path = folder / 'ab'[i % 2] / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noisy.astype(np.uint8)).save(path, compress_level=1)


def step_function(config):
  """Returns a function that takes one training step on a batch and waits."""
  model = config.build(train=True)
  optimizer = optax.adamw(1e-3)
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), config.example()))
  carry = [params, optimizer.init(params)]

  def loss(params, batch):
    logits_BV = model.apply(params, batch['image']).logits_BV
    total, count = losses.classification_loss(logits_BV, batch['target'])
    return total / count

  @jax.jit
  def update(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  def step(batch):
    *carry[:], value = update(*carry, batch)
    value.block_until_ready()

  return step


def main(_):
  config = machine.configs('vit/folder.py').VARIANTS['dense']()
  step = step_function(config.model)
  with tempfile.TemporaryDirectory() as root:
    folder = pathlib.Path(root, 'photos')
    make_pictures(folder)
    data = dataclasses.replace(config.data, path=str(folder))
    inputs = {'decoded': dataclasses.replace(data, cache='none')}
    inputs['memory'] = dataclasses.replace(data, cache='memory')
    inputs['disk'] = dataclasses.replace(
      data, cache='disk', cache_dir=os.path.join(root, 'kept')
    )
    iterators = {
      name: images.train_iterator(data, batch_size=_BATCH.value, seed=0)
      for name, data in inputs.items()
    }
    for name in ('memory', 'disk'):
      for _ in range(-(-len(images.open_split(data, 'train')) // _BATCH.value)):
        batch = next(iterators[name])
      iterators[name].close()

    def run_none():
      for _ in range(_STEPS.value):
        step(batch)

    def run(iterator):
      for _ in range(_STEPS.value):
        step(next(iterator))
      iterator.close()  # Its threads end, and start again with the next batch.

    rounds = {'none': run_none}
    for name, iterator in iterators.items():
      rounds[name] = functools.partial(run, iterator)
    seconds = timing.interleaved(rounds, rounds=_ROUNDS.value)
  images_per_round = _STEPS.value * _BATCH.value
  results = {
    'settings': results_lib.settings(
      'pictures', 'pixels', 'batch', 'steps', 'rounds'
    ),
    'images_per_second': {
      name: images_per_round / median
      for name, median in timing.medians(seconds).items()
    },
    'time_over_none': {
      name: timing.ratio_spread(seconds, name, 'none') for name in inputs
    },
    'seconds': seconds,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
