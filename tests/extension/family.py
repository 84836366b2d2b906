"""Members of the family as somebody else would add them: public names only.

A score that keeps state and a rule that goes with it, a feed-forward, a task
with data and a model of its own.
"""

import dataclasses
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np

from mod_jax import config as config_lib
from mod_jax.layers.rules import Rule
from mod_jax.layers.scores import Router, Score
from mod_jax.layers.slots import Slot
from mod_jax.runs.run_config import RunConfig
from mod_jax.train.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertThreshold(Score):
  """A router's score above a moving threshold, in training as well.

  The threshold is the mean over past batches of the score that a fraction
  `capacity` of all tokens of a batch exceeds.
  """

  gate: ClassVar[str] = 'sigmoid'

  decay: config_lib.Decay = 0.9

  def run(self, module, x_BLD, info, capacity, attention_BL):
    score_BL = Router(0.02, name='router')(x_BLD)
    threshold = module.variable('moving', 'expert', lambda: jnp.zeros(()))
    before = threshold.value
    trains = module.is_mutable_collection('moving')
    if trains and not module.is_initializing():
      now = jnp.quantile(jax.lax.stop_gradient(score_BL), 1 - capacity)
      threshold.value = self.decay * before + (1 - self.decay) * now
    return score_BL - before

  def flops(self, length, width):
    return 2 * length * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Above(Rule):
  """What the score `ExpertThreshold` leaves above 0."""

  def wants(self, routed, score, capacity):
    assert isinstance(score, ExpertThreshold)
    return routed.score_BL > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squared(Slot):
  """A feed-forward with squared ReLU; tells how many hidden units are on."""

  width: config_lib.Size
  hidden: config_lib.Size

  def run(self, x, info, *, name, dtype, mode):
    return SquaredReLU(self, dtype, name=name)(x)

  def flops(self, tokens):
    return {'squared': 4 * tokens * self.width * self.hidden}

  @property
  def num_params(self):
    return 2 * self.width * self.hidden


class SquaredReLU(nn.Module):
  config: Squared
  dtype: str

  @nn.compact
  def __call__(self, x_BLD):
    def linear(features, axes, name, x):
      init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
      return nn.Dense(features, False, self.dtype, kernel_init=init, name=name)(
        x
      )

    hidden_BLF = linear(self.config.hidden, ('embed', 'mlp'), 'up', x_BLD)
    hidden_BLF = nn.relu(hidden_BLF) ** 2
    on_BL = (hidden_BLF > 0).sum(axis=-1)
    y_BLD = linear(self.config.width, ('mlp', 'embed'), 'down', hidden_BLF)
    return y_BLD, {'units_on': on_BL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeriesConfig(RunConfig):
  """Predicting the next value of noisy sines: a modality that is new here."""

  length: config_lib.Size = 8
  hidden: config_lib.Size = 16


class Batches:
  """Endless batches of noisy sines, drawn by their number alone."""

  def __init__(self, config, rows, shard_index=0, shard_count=1, first=0):
    self.config, self.rows = config, rows
    self.shard = shard_index, shard_count
    self.number = first

  def __iter__(self):
    return self

  def __next__(self):
    index, count = self.shard
    rng = np.random.default_rng([self.config.seed, self.number])
    self.number += 1
    shape = (self.rows * count, 1)
    phase, speed = rng.uniform(0, 6, shape), rng.uniform(0.2, 1, shape)
    steps = np.arange(self.config.length + 1)
    series = np.sin(phase + speed * steps) + rng.normal(0, 0.01, steps.shape)
    own = series[index * self.rows : (index + 1) * self.rows]
    return {'series': own.astype(np.float32)}

  def get_state(self):
    return {'number': self.number}

  def set_state(self, state):
    self.number = state['number']


class Forecaster(nn.Module):
  hidden: int

  @nn.compact
  def __call__(self, series_BL):
    hidden_BF = nn.tanh(nn.Dense(self.hidden)(series_BL))
    return nn.Dense(1)(hidden_BF)[:, 0]


class SeriesTask(Task):
  unit = 'series'

  def __init__(self, config: SeriesConfig):
    self.config = config
    self.model = Forecaster(config.hidden)

  def init(self, key):
    return self.model.init(key, jnp.zeros((1, self.config.length)))

  def train_iterator(self, *, shard_index, shard_count):
    rows = self.config.train.batch_size // shard_count
    return Batches(self.config, rows, shard_index, shard_count)

  def eval_batches(
    self, *, batch_size, num_batches, shard_index=0, shard_count=1
  ):
    first = 10**6  # Far behind what training sees.
    batches = Batches(self.config, batch_size, shard_index, shard_count, first)
    return [next(batches) for _ in range(num_batches or 8)]

  def data_fingerprint(self):
    return {}

  def static_args(self, step):
    return None

  def _error(self, params, batch):
    series_BL = batch['series']
    guess_B = self.model.apply({'params': params}, series_BL[:, :-1])
    error_B = (guess_B - series_BL[:, -1]) ** 2
    return error_B.sum(), jnp.float32(len(error_B))

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    total, count = self._error(params, batch)
    return [(total, count)], ({'loss': (total, count)}, model_state)

  def eval_step(self, params, model_state, batch, key, mode):
    return {'loss': self._error(params, batch)}

  def finish_metrics(self, metrics):
    return metrics | {'rmse': metrics['loss'] ** 0.5}

  def summary(self, metrics):
    return f'root of the mean squared error: {metrics["rmse"]:.4f}'

  def pictures(self, params, model_state):
    figure = matplotlib.figure.Figure()
    axes = figure.subplots()
    (batch,) = self.eval_batches(batch_size=1, num_batches=1)
    axes.plot(batch['series'][0])
    return {'series': figure}

  def flops_per_step(self, static_args):
    return 6.0 * self.config.train.batch_size * self.config.hidden

  @property
  def tokens_per_step(self):
    return self.config.train.batch_size
