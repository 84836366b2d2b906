"""Tiny models, weights, data and runs that tests of several folders share."""

import string

from flax import linen as nn
import jax
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import parallel, trees
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import Checkpointer
from mod_jax.tasks.experiment import ExperimentConfig

VIT = ViTConfig(
  image_size=8,
  patch_size=2,
  num_classes=10,
  num_layers=2,
  width=8,
  num_heads=2,
)
LM = LMConfig(num_layers=2, width=8, num_heads=2, mlp_dim=8, routing=None)


def shapes(model):
  """Returns the abstract variables of a model's config, by collection."""
  rngs = {'params': jax.random.key(0), 'routing': jax.random.key(0)}
  return nn.unbox(
    jax.eval_shape(lambda: model.build().init(rngs, model.example()))
  )


def random_params(model, seed=0, *, mean=0.0, std=0.4):
  """Returns parameters large enough to tell tokens, rules and heads apart."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(mean, std, x.shape).astype(np.float32),
    shapes(model)['params'],
  )


def one_device():
  """Returns the mesh of the first device alone."""
  return parallel.make_mesh(parallel.MeshConfig(), jax.devices()[:1])


def experiment(model, data=None, changes=None, **fields):
  """Returns a small run's config; `changes` are by dotted path."""
  if data is None:
    data = (
      TextDataConfig(length=16)
      if isinstance(model, LMConfig)
      else ImageDataConfig(image_size=model.image_size)
    )
  small = {
    'evaluation.every': 0,
    'evaluation.batches': 0,
    'evaluation.final_batches': 1,
    'optimizer.warmup_steps': 0,
    'log.tensorboard': False,
  }
  config = ExperimentConfig(model=model, data=data, **fields)
  return config_lib.replace(config, small | (changes or {}))


def save_run(path, config, params):
  """Makes a run's directory, as far as others look; returns flat parameters."""
  workdir_lib.claim(path, config)
  directory = workdir_lib.checkpoints(path)
  with Checkpointer(directory, config.checkpoint) as saver:
    saver.save(1, {'params': params, 'model_state': {}})
  return trees.flatten(params)


def texts(folder, **sizes):
  """Writes NAME.txt of so many random letters, spaces and line ends each."""
  rng = np.random.default_rng(0)
  for name, size in sizes.items():
    letters = rng.choice(list(string.ascii_lowercase + ' \n'), size)
    (folder / f'{name}.txt').write_text(''.join(letters))
  return folder


def pictures(root, classes, counts, size=(8, 8)):
  """Writes noise to SPLIT/CLASS/NUMBER.png, `counts` images by split."""
  rng = np.random.default_rng(0)
  for split, count in counts.items():
    for name in classes:
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(root / split / name / f'{i}.png')
  return root


def same(found, expected):
  """Asserts that two trees of arrays, nested or flat, are equal."""
  found, expected = trees.flatten(found), trees.flatten(expected)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
