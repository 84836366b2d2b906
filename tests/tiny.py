"""Small models, variables, batches and runs that tests share.

Each test varies these by `dataclasses.replace`, so that the one setting under
test is all that it says.
"""

import contextlib
import functools
import pathlib
import re
import string
import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import safetensors

from mod_jax import config as config_lib
from mod_jax import parallel, trees
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.pretrained import export
from mod_jax.pretrained.load import Run
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import Checkpointer
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

# Where `make test-slow` installs what compiles programs for GPUs.
GPU_COMPILER = pathlib.Path(sys.prefix) / 'cuda'

# The vocabulary is left at that of bytes, which every text has.
LM = LMConfig(num_layers=2, width=8, num_heads=2, mlp_dim=8, routing=None)
# What makes a config file's language model as small, and its data bytes.
SMALL = {
  'model.vocab_size': 256,
  'model.num_layers': 2,
  'model.width': 8,
  'model.num_heads': 2,
  'data.tokenizer': 'bytes',
  'data.length': 16,
  'data.source': 'stdlib',
  'data.files': '',
}
# The size of scikit-learn's digits; 17 tokens.
VIT = ViTConfig(
  image_size=8,
  patch_size=2,
  num_classes=10,
  num_layers=2,
  width=8,
  num_heads=2,
)


def shapes(config):
  """Returns the shapes of a model's variables, without compiling anything."""
  model = config.build()
  key = jax.random.key(0)
  rngs = dict.fromkeys(('params', 'routing', 'gumbel'), key)
  return nn.unbox(jax.eval_shape(model.init, rngs, config.example()))


def variables(config, seed=0, gain=1.0):
  """Returns variables drawn so that every part, and every mistake, shows.

  Kernels keep the size of what they are applied to, times `gain`; biases and
  scales differ from 0 and 1; moving thresholds lie between 0.2 and 0.4. A fresh
  model would have zeros there, and scores that are nearly equal.
  """
  return drawn(shapes(config), seed, gain)


def drawn(shapes, seed=0, gain=1.0):
  """Returns arrays of these shapes and names, drawn as said above."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    if name.endswith('.weight'):
      value = np.ones(leaf.shape)
    elif name.endswith('.total'):
      value = rng.uniform(0.2, 0.4, leaf.shape)
    elif name.endswith("['var']"):
      value = rng.uniform(0.5, 1.5, leaf.shape)
    else:
      value = rng.normal(size=leaf.shape)
      if 'scale' in name:
        value = 1 + 0.1 * value
      elif 'kernel' in name:
        value *= gain * _fan_in(name, leaf.shape) ** -0.5
      elif 'embedding' not in name:
        value *= 0.3
    return jnp.asarray(value, leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def _fan_in(name, shape):
  """Returns how many products each result of a kernel is the sum of."""
  if re.search("'(query|key|value)'", name):
    axes = shape[-3:-2]
  elif "'out'" in name:
    axes = shape[-3:-1]
  elif 'stem' in name:
    axes = shape[:-1]
  else:
    axes = shape[-2:-1]
  return np.prod(axes or shape)  # A router's for one number has only one axis.


def tokens(batch=2, length=8, vocab_size=LM.vocab_size, seed=0):
  """Returns random tokens [batch, length]."""
  key = jax.random.key(seed)
  return jax.random.randint(key, (batch, length), 0, vocab_size)


def prompts(vocab_size):
  """Returns prompts of 6, 3, 4 and 1 tokens [4, 6], and which are real.

  They are padded on either side, with garbage.
  """
  tokens_BP = np.random.default_rng(3).integers(0, vocab_size, (4, 6))
  valid_BP = np.ones((4, 6), bool)
  valid_BP[1, :3] = valid_BP[2, 4:] = valid_BP[3, :5] = False
  return tokens_BP, valid_BP


def images(batch=2, size=VIT.image_size, seed=0):
  """Returns random normal images [batch, size, size, 3]."""
  return jax.random.normal(jax.random.key(seed), (batch, size, size, 3))


@functools.partial(
  jax.jit,
  static_argnames=('model', 'mode', 'mutable', 'method', 'depth'),
)
def apply(model, variables, *inputs, **kwargs):
  """Returns what a model does, compiled once for each setting.

  Args:
    model: a module, or a config, which is built as it stands.
    variables: the model's variables.
    *inputs: tokens or images, and what else the model takes by position.
    **kwargs: what it takes by name; `mutable` as one string.
  """
  model = model if isinstance(model, nn.Module) else model.build()
  return model.apply(variables, *inputs, **kwargs)


def experiment(model=LM, data=None, **changes):
  """Returns a run's config: a few steps, small batches, nothing written twice.

  Args:
    model: a config of a model.
    data: where it learns from; as a default the embedded text, or the digits.
    **changes: fields by dotted name, such as `**{'train.num_steps': 8}`.
  """
  if data is None and isinstance(model, LMConfig):
    data = TextDataConfig(length=16)
  elif data is None:
    data = ImageDataConfig(image_size=model.image_size)
  small = {
    'train.num_steps': 4,
    'train.batch_size': 8,  # One row for each device.
    'optimizer.warmup_steps': 1,
    'evaluation.every': 0,
    'evaluation.batches': 1,
    'evaluation.final_batches': 1,
    'evaluation.batch_size': 8,
    'log.every': 1,
    'log.tensorboard': False,
  }
  config = ExperimentConfig(model=model, data=data)
  return config_lib.replace(config, small | changes)


def run(config):
  """Returns a `Run` of an experiment's model, with variables drawn as above."""
  return Run(
    config=config.model,
    variables=variables(config.model),
    experiment=config,
    task=make_task(config),
  )


def random_params(config, seed=0, *, mean=0.0, std=0.4):
  """Returns normal parameters of one scale, biases and scales included.

  They are numpy's, so that a test may change some in place.
  """
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(mean, std, x.shape).astype(np.float32),
    shapes(config)['params'],
  )


def one_device():
  """Returns a mesh of the first device alone."""
  return parallel.make_mesh(parallel.MeshConfig(), jax.devices()[:1])


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


@contextlib.contextmanager
def compilations():
  """Yields a list of what JAX compiles meanwhile."""
  names = []

  def listen(name, seconds, **_):
    del seconds
    if 'backend_compile' in name:
      names.append(name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield names
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def arrays(lazy):
  """Returns a nested dictionary of arrays that are read lazily, by name."""
  return jax.tree.map(jnp.asarray, trees.unflatten(lazy))


def same(found, expected):
  """Asserts that two trees of arrays, nested or flat, are equal."""
  found, expected = trees.flatten(found), trees.flatten(expected)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def export_dense(config, folder, seed=0):
  """Exports a dense model of random weights, as somebody's base model.

  `config` is that of a run on it.
  """
  changes = {
    'train.frozen': None,
    'train.capacity_warmup_steps': 0,
    'init': None,
    'dense': None,
    'optimizer': OptimizerConfig(),
    'model': config.model.dense_twin(),
  }
  plain = config_lib.replace(config, changes)
  task = make_task(plain)
  run = Run(
    config=plain.model,
    variables=nn.unbox(jax.jit(task.init)(jax.random.key(seed))),
    experiment=plain,
    preprocess=getattr(plain.data, 'preprocess', None),
    task=task,
  )
  export.export(run, folder)


def bits(tree):
  """Returns the type, the shape and the bytes of each leaf; also of keys."""

  def read(x):
    kind = x.dtype
    if jnp.issubdtype(kind, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    x = np.asarray(x)
    return str(kind), x.shape, x.tobytes()

  return [read(x) for x in jax.tree.leaves(tree)]


def same_bits(found, expected):
  """Asserts that two trees have one structure, and the same bits in it."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert bits(found) == bits(expected)


def flip(path):
  """Changes one bit in the middle of a file."""
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def snapshot(folder):
  """Returns the contents and the times of all files of a folder."""
  return {
    str(p): (p.read_bytes(), p.stat().st_mtime_ns)
    for p in folder.rglob('*')
    if p.is_file()
  }


def stored(folder):
  """Returns type, shape and bytes of each array of safetensors, by name."""
  found = {}
  for path in folder.glob('*.safetensors'):
    with safetensors.safe_open(path, 'numpy') as file:
      names = file.keys()  # The file itself cannot be iterated over.
      for name in names:
        array = file.get_tensor(name)
        found[name] = (array.dtype.name, array.shape, array.tobytes())
  return found
