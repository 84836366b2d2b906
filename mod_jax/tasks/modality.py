"""What a model reads and is evaluated by, whatever method trains it."""

import abc
from collections.abc import Callable, Iterable, Mapping
import typing
from typing import Any

from mod_jax import viz
from mod_jax.layers.mode import Mode
from mod_jax.losses.sums import MetricSums, Pair
from mod_jax.tasks import warm_start
from mod_jax.train.task import Study

if typing.TYPE_CHECKING:  # It takes long to import.
  from matplotlib.figure import Figure


class Modality(abc.ABC):
  """Data, head, metrics and pictures of one kind of input.

  Methods without a docstring are those of `train.task.Task`. A `task` that they
  are given is the `plain.Plain` that uses them.

  Attributes:
    config: the experiment.
    unit: what a batch is counted in.
    row: what a row of a batch is, in the plural.
    length: what a model's `flops_table` is called with: tokens of a sequence,
      or nothing where the model itself knows.
    columns: held-out metrics that a table shows.
    main: held-out metrics that fit on one line.
    may_be_new: names, as regular expressions matched whole, that may be missing
      from weights to start from.
    may_be_dropped: names that may be left over from them.
  """

  unit: str
  row: str
  columns: tuple[str, ...]
  main: tuple[str, ...] = ('loss', 'accuracy')
  length: tuple[int, ...] = ()
  may_be_new: tuple[str, ...] = ()
  may_be_dropped: tuple[str, ...] = ()

  def __init__(self, config):
    """Keeps the config; reads nothing."""
    self.config = config

  # Data.

  @abc.abstractmethod
  def check(self) -> None: ...

  def files(self) -> Mapping[str, str]:
    return {}

  @abc.abstractmethod
  def train_iterator(self, *, shard_index: int, shard_count: int): ...

  def data_summary(self) -> str:
    return ''

  @abc.abstractmethod
  def rows_per_epoch(self) -> int:
    """Returns how many rows of a batch the training data are."""

  @abc.abstractmethod
  def batch_shapes(self) -> dict[str, Any]: ...

  @abc.abstractmethod
  def eval_batches(self, **kwargs): ...

  @abc.abstractmethod
  def data_fingerprint(self) -> dict[str, Any]: ...

  @property
  @abc.abstractmethod
  def tokens_per_step(self) -> int: ...

  # Between a batch and a model.

  @abc.abstractmethod
  def inputs(self, batch, *, train: bool) -> tuple[tuple, dict[str, Any]]:
    """Returns what a model is called with: arguments and keywords."""

  @abc.abstractmethod
  def loss(self, output, batch) -> tuple[Any, Any]:
    """Returns the loss of a training batch: (total, weight)."""

  def more_losses(self, output) -> tuple[list[Pair], MetricSums]:
    """Returns losses to add to that one, and the sums to report."""
    del output
    return [], {}

  @abc.abstractmethod
  def eval_sums(self, output, batch, mode: Mode) -> MetricSums:
    """Returns the sums of a held-out batch, `loss` among them."""

  @abc.abstractmethod
  def token_weights(self, batch):
    """Returns weight_BL: 1 for tokens of a held-out batch, 0 for padding.

    L is 1 where all tokens of a row are alike.
    """

  def modes(self, *, more: bool = False) -> dict[str, Mode]:
    """Returns how a model is evaluated, by prefix; see `Task.eval_modes`."""
    return {} if more else {'': Mode()}

  def finish_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
    return metrics

  # Weights to start from.

  @abc.abstractmethod
  def load_weights(
    self, init: str, model, params, model_state, *, whole=False, **kwargs
  ) -> tuple[Any, Any]:
    """Returns fresh variables with somebody's weights in them.

    Args:
      init: where they lie.
      model: config of the model that they are for.
      params: its fresh parameters; shapes will do for those that are found.
      model_state: its other fresh collections, likewise.
      whole: whether the model is not trained further, so that nothing of it
        may stay fresh that only training could use.
      **kwargs: `new` and `dropped`, as of `trees.merge`.
    """

  def load_teacher(self, init: str, dense, **kwargs) -> dict[str, Any]:
    """Returns the variables of a dense model that is not trained further.

    Arguments are as of `load_weights`; `dense` is the model's config.

    Raises:
      UserError: no such weights, or not all of the model's.
    """
    fresh = warm_start.variable_shapes(dense)
    params, model_state = self.load_weights(
      init, dense, *fresh, whole=True, **kwargs
    )
    return {'params': params, **model_state}

  # What people look at.

  @abc.abstractmethod
  def summary(self, task, metrics: Mapping[str, float]) -> str: ...

  def main_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k.split('/')[-1] in self.main}

  def curves(self, records) -> 'Figure':
    """Returns the picture of the losses in a run's records."""
    return viz.loss_curves(records, title='Loss over training')

  @abc.abstractmethod
  def pictures(self, task, params, model_state) -> dict[str, 'Figure']:
    """Returns pictures of a model that is dense, routed or has experts."""

  @abc.abstractmethod
  def load_pictures(self, task, params, model_state) -> dict[str, 'Figure']:
    """Returns pictures of where an adaptive model's compute goes."""

  def studies(self, task) -> dict[str, Callable[..., Study]]:
    return {}

  def texts(self, task, params, model_state) -> Iterable[str]:
    """Yields texts to show at the end of a run."""
    return ()
