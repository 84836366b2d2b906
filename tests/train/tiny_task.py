"""A task without a model, for what the loop does with any task.

It compiles at once, where a language model takes seconds.
"""

from flax import linen as nn
import grain
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np

from mod_jax import config as config_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import warm_start
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation, loop
from mod_jax.train import task as task_lib


class Tiny(task_lib.Task):
  """Moves one vector towards the rows; the batch is eight numbers."""

  unit = 'images'
  held = None  # Variables of the teacher.
  asked = 0

  def __init__(self, config):
    self.config = config

  def init(self, key):
    kernel = jax.random.normal(key, (8,))
    boxed = nn.LogicallyPartitioned(kernel, ('embed',))
    return {
      'params': {'block_0': {'kernel': boxed}, 'head': {'bias': jnp.zeros(2)}},
      'statistics': {'sum': jnp.zeros(())},
    }

  def teacher(self, mesh):
    type(self).asked += 1
    return self.held

  def train_iterator(self, *, shard_index, shard_count):
    rows = grain.MapDataset.range(64).map(
      lambda i: {'x': np.full(8, i / 64, np.float32)}
    )
    return iter(rows.seed(0).repeat().batch(8).to_iter_dataset())

  def data_fingerprint(self):
    return {}

  def static_args(self, step):
    return 0

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    kernel = params['block_0']['kernel']
    total = jnp.sum((kernel - batch['x']) ** 2) + jnp.sum(
      (params['head']['bias'] - 1) ** 2
    )
    if teacher is not None:
      total += jnp.sum((kernel - teacher['kernel']) ** 2)
    weight = jnp.float32(len(batch['x']))
    model_state = {'statistics': {'sum': model_state['statistics']['sum'] + 1}}
    return [(total, weight)], ({'loss': (total, weight)}, model_state)

  def start(self, params, model_state, init):
    return warm_start.load_weights(init, None, params, model_state)

  def eval_batches(self, *, batch_size, num_batches, **_):
    assert num_batches != 0
    # One batch, which tells how many were asked for.
    return [{'x': np.full((batch_size, 8), num_batches or 0, np.float32)}]

  def eval_step(self, params, model_state, batch, key, mode):
    assert mode is None
    return {
      'loss': (jnp.sum(params['block_0']['kernel'] ** 2), 1.0),
      'accuracy': (params['head']['bias'][0], 1.0),
      'other': (jnp.sum(batch['x']), jnp.float32(batch['x'].size)),
    }

  def pictures(self, params, model_state):
    return {}

  def summary(self, metrics):
    return f'accuracy {metrics["accuracy"]:.4f}'

  def studies(self):
    def norm(params, model_state, mesh):
      value = float(jnp.linalg.norm(params['block_0']['kernel']))
      return task_lib.Study(
        text=f'norm {value:.3f}',
        metrics={'norm': value},
        figures={'curve': Figure()},
      )

    return {'norm': norm}

  def flops_per_step(self, static_args):
    return 1e3

  @property
  def tokens_per_step(self):
    return 8


def make_config(**changes):
  tiny = {
    'train.num_steps': 6,
    'optimizer.warmup_steps': 0,
    'optimizer.learning_rate': 0.1,
    'evaluation.every': 4,
    'log.every': 1,
    'log.tensorboard': False,
    'checkpoint.every': 3,
  }
  return config_lib.replace(ExperimentConfig(), tiny | changes)


def train(config, workdir, **kwargs):
  return loop.train(Tiny(config), config, workdir, **kwargs)


def steps_on_disk(workdir):
  folder = workdir_lib.checkpoints(workdir)
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def load(workdir, **kwargs):
  config = workdir_lib.read_config(workdir, ExperimentConfig)
  return evaluation.load(Tiny(config), workdir, **kwargs)
