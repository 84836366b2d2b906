"""Configs that all runs share, whatever they train."""

import dataclasses
from typing import Any, Literal

from mod_jax import config as config_lib
from mod_jax import errors, parallel
from mod_jax import optimizer as optimizer_lib
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.checkpoints import CheckpointConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """How long and on what batches to train, and what is averaged or frozen."""

  num_steps: config_lib.PositiveCount = 1000  # Updates of the parameters.
  # Passes over the training data, which set the number of steps; None uses
  # num_steps.
  num_epochs: config_lib.Positive | None = None
  # Rows of a step, on all devices together.
  batch_size: config_lib.Size = 16
  # Number of microbatches of a step, whose gradients are added. Losses of a
  # batch as a whole (ACM's budget and diversity, the balance of experts) and
  # statistics of batch norms are computed for each microbatch.
  grad_accum_steps: config_lib.Size = 1
  # At the beginning, the capacity of routed layers falls from 1 over this many
  # steps, or over this fraction of all steps.
  capacity_warmup_steps: config_lib.Steps = 0
  # Number of capacities during the warm-up; each compiles its own program.
  capacity_warmup_stages: config_lib.Unrolled = 4
  # EMA decay of the parameters; the averages are evaluated in their place. It
  # is less at first, (1 + step) / (10 + step). 0 keeps none.
  ema_decay: config_lib.Decay = 0.0
  # The run ends early after this many evaluations in a row that are no better,
  # by the metric checkpoint.best, than the best one. 0 = it never ends early.
  early_stop: config_lib.Count = 0
  # Type of the matrices that optimizer.rules freeze permanently. If it is set,
  # frozen parameters have no gradients and are in no checkpoint: they are read
  # from init, also when the run is continued or loaded. None = they are stored
  # and differentiated like trained parameters.
  frozen: Literal['float32', 'bfloat16'] | None = None

  def __post_init__(self):
    config_lib.validate(self)
    if self.batch_size % self.grad_accum_steps:
      raise errors.UserError(
        f'batch_size={self.batch_size} does not divide by'
        f' grad_accum_steps={self.grad_accum_steps}: change one of them.'
      )
    # `num_steps` is not known yet if `num_epochs` is given.
    of_steps = self.num_epochs is None
    if of_steps and self.capacity_warmup_steps >= self.num_steps:
      raise errors.UserError(
        f'capacity_warmup_steps={self.capacity_warmup_steps} leaves nothing of'
        f' a run of {self.num_steps} steps: shorten the warm-up or lengthen the'
        ' run.'
      )

  @property
  def rows(self) -> int:
    """Number of rows of a microbatch, on all devices together."""
    return self.batch_size // self.grad_accum_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(config_lib.Validated):
  """How often a run is evaluated, and on how much held-out data."""

  # Steps between evaluations, or this fraction of all steps; 0 evaluates only
  # at the end.
  every: config_lib.Steps = 500
  # Batches per evaluation, spread over the held-out data; 0 uses all of it.
  batches: config_lib.Count = 16
  batch_size: config_lib.Size = 16  # Rows of a batch, on all devices together.
  final_batches: config_lib.Count = 64  # Batches at the run's end; 0 = all.
  # Start of a language model's final sample; '' = held-out text.
  prompt: str = ''
  # Number of tokens of that sample, at most the sequence length, and of answers
  # about pictures, at most 16; 0 = no sample and no answers.
  sample_tokens: config_lib.Count = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig(config_lib.Validated):
  """How often progress is shown, and where metrics are logged."""

  every: config_lib.PositiveCount = 10  # Steps between lines of progress.
  tensorboard: bool = True  # Whether to log to TensorBoard, too.
  wandb: bool = False  # Whether to log to Weights & Biases.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Settings of a run; subclasses add the model and the data."""

  name: str = 'run'  # Name of the run in logs.
  # Seeds the initial parameters, the order of the data, and all other draws.
  seed: config_lib.Seed = 0
  # Weights to start from: the workdir of a run, a checkpoint file, or a folder
  # as written by this library, Hugging Face or timm.
  init: str | None = None
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  mesh: parallel.MeshConfig = parallel.MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log: LogConfig = LogConfig()

  def __post_init__(self):
    config_lib.validate(self)
    errors.require(
      self.train.frozen is None or self.optimizer.layer_decay == 1,
      '1, since the distance from the head is counted in trained blocks, or'
      ' train.frozen=None',
      **{'optimizer.layer_decay': self.optimizer.layer_decay},
    )
    patience, metric = self.train.early_stop, self.checkpoint.best
    if patience and metric is None:
      raise errors.UserError(
        f'train.early_stop={patience} and checkpoint.best=None: name the'
        ' held-out metric that is to get better, such as'
        ' checkpoint.best=accuracy.'
      )
    if patience and not self.evaluation.every:
      raise errors.UserError(
        f'train.early_stop={patience} and evaluation.every=0: there is no'
        ' evaluation before the end; set evaluation.every.'
      )

  def split(self, params) -> tuple[Any, Any]:
    """Returns trained and frozen parameters (None unless `train.frozen`)."""
    if self.train.frozen is None:
      return params, None
    return optimizer_lib.split(self.optimizer, params)

  def frozen_dtype(self, name: str) -> str:
    """Returns a frozen parameter's dtype: `train.frozen` for matrices."""
    if optimizer_lib.is_matrix(name.split('/')):
      return self.train.frozen
    return 'float32'


def fitted(config: RunConfig, num_devices: int) -> RunConfig:
  """Returns the config with its mesh fitted to the number of devices."""
  mesh = parallel.fit_mesh(config.mesh, num_devices, config.train.rows)
  return dataclasses.replace(config, mesh=mesh)


# Fields in which a run and its continuation may differ, because they affect
# training by no more than rounding, or not at all.
RESUMABLE = (
  'name',
  'evaluation',
  'mesh',
  'checkpoint',
  'log',
  *('data.max_epochs', 'data.workers', 'data.read_threads'),
  *('data.prefetch', 'data.cache', 'data.cache_dir'),
  # Paths of the data; their fingerprint ensures that the data are the same.
  *('data.path', 'data.files', 'data.eval_files', 'data.tokenizer_path'),
  *('data.label_table', 'data.folder', 'data.vocabulary'),
  *('data.data_dir', 'data.tfds_dir'),
)
# Fields that may change in a continuation with --allow_changed_config: they
# affect training from then on, but not the structure of the state.
CHANGEABLE = (
  'train.num_steps',
  'train.capacity_warmup_steps',
  'train.capacity_warmup_stages',
  'train.early_stop',
  'optimizer.learning_rate',
  'optimizer.warmup_steps',
  'optimizer.final_fraction',
  'optimizer.weight_decay',
  'optimizer.clip_norm',
  'optimizer.layer_decay',
  *(
    f'model.{part}routing.{name}'
    # Blocks may be routed in a part of the model.
    for part in ('', 'backbone.', 'language.', 'tower.', 'tower.backbone.')
    for name in ('capacity', 'capacity_decay', 'capacity_floor')
  ),
)
