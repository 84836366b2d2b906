"""Data, losses, metrics and pictures of one kind of input."""

import abc
from collections.abc import Callable, Iterable, Mapping
import typing
from typing import Any

from mod_jax import viz
from mod_jax.layers.mode import Mode
from mod_jax.losses.sums import MetricSums, Pair
from mod_jax.models import protocol
from mod_jax.train.task import Study

if typing.TYPE_CHECKING:  # Slow to import.
  from matplotlib.figure import Figure


class Modality(abc.ABC):
  """Data, head, metrics and pictures of one kind of input.

  Methods without a docstring are documented in `train.task.Task`. The argument
  `task` is the `plain.Plain` that uses the modality.

  Attributes:
    config: the experiment.
    unit: the unit of `tokens_per_step`.
    row: name of the rows of a batch, in the plural.
    length: arguments of a model's `flops_table`: the tokens of a sequence, or
      none if the model's config determines them.
    columns: held-out metrics in the summary table.
    main: held-out metrics to show on one line.
    may_be_new: names, as regular expressions matched whole, that may be missing
      from weights to start from.
    may_be_dropped: names that only those weights may have.
  """

  unit: str
  row: str
  columns: tuple[str, ...]
  main: tuple[str, ...] = ('loss', 'accuracy')
  length: tuple[int, ...] = ()
  may_be_new: tuple[str, ...] = ()
  may_be_dropped: tuple[str, ...] = ()

  def __init__(self, config):
    """Keeps the config; reads no data."""
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
    """Returns the number of rows in the training data."""

  @abc.abstractmethod
  def batch_shapes(self) -> dict[str, Any]: ...

  @abc.abstractmethod
  def eval_batches(self, **kwargs): ...

  @abc.abstractmethod
  def data_fingerprint(self) -> dict[str, Any]: ...

  @property
  @abc.abstractmethod
  def tokens_per_step(self) -> int: ...

  # Model inputs, losses and metrics of a batch.

  @abc.abstractmethod
  def inputs(self, batch, *, train: bool) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments and keyword arguments of the model."""

  @abc.abstractmethod
  def loss(self, output, batch) -> tuple[Any, Any]:
    """Returns the loss of a training batch: (total, weight)."""

  def more_losses(self, output) -> tuple[list[Pair], MetricSums]:
    """Returns losses to add to `loss`, and sums to report."""
    del output
    return [], {}

  @abc.abstractmethod
  def eval_sums(self, output, batch, mode: Mode) -> MetricSums:
    """Returns the metric sums of a held-out batch, including `loss`."""

  @abc.abstractmethod
  def token_weights(self, batch):
    """Returns weight_BL: 1 for tokens of a held-out batch, 0 for padding.

    L is 1 if all tokens of a row have the same weight.
    """

  def modes(self, *, more: bool = False) -> dict[str, Mode]:
    """Returns the modes of evaluation, by prefix, as `Task.eval_modes`."""
    return {} if more else {'': Mode()}

  def finish_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
    return metrics

  # Weights to start from.

  @abc.abstractmethod
  def load_weights(
    self, init: str, model, params, model_state, *, whole=False, **kwargs
  ) -> tuple[Any, Any]:
    """Returns a model's variables with values from the weights at `init`.

    Args:
      init: path of the weights.
      model: config of the model.
      params: its initialised parameters; shapes suffice for those to replace.
      model_state: its other initialised collections, or shapes.
      whole: whether all weights must come from `init`, as for a teacher, which
        is not trained.
      **kwargs: `new` and `dropped`, names that may be missing from the weights,
        and that only they may have, as in `trees.merge`.
    """

  def load_teacher(self, init: str, dense, **kwargs) -> dict[str, Any]:
    """Returns the variables of a dense model that is not trained.

    Args:
      init: path of the weights.
      dense: config of the model.
      **kwargs: `new` and `dropped`, as for `load_weights`.

    Raises:
      UserError: there are no such weights, or some are missing.
    """
    state = protocol.shapes(dense)
    params, model_state = self.load_weights(
      init, dense, state.pop('params'), state, whole=True, **kwargs
    )
    return {'params': params, **model_state}

  # Reports.

  @abc.abstractmethod
  def summary(self, task, metrics: Mapping[str, float]) -> str: ...

  def main_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k.split('/')[-1] in self.main}

  def curves(self, records) -> 'Figure':
    """Returns the figure of the losses in a run's records."""
    return viz.loss_curves(records, title='Loss over training')

  @abc.abstractmethod
  def pictures(self, task, params, model_state) -> dict[str, 'Figure']:
    """Returns pictures of the trained model, routing and experts included."""

  @abc.abstractmethod
  def load_pictures(self, task, params, model_state) -> dict[str, 'Figure']:
    """Returns pictures of an adaptive model's compute by token and row."""

  def studies(self, task) -> dict[str, Callable[..., Study]]:
    return {}

  def texts(self, task, params, model_state) -> Iterable[str]:
    """Yields texts to show at the end of a run."""
    return ()
