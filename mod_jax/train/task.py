"""The interface between the training loop and what it trains."""

import abc
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
import dataclasses
import re
import typing
from typing import Any

from mod_jax import config as config_lib
from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.losses import sums
from mod_jax.losses.sums import MetricSums, Pair
from mod_jax.runs import workdir as workdir_lib

if typing.TYPE_CHECKING:  # Slow to import.
  from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The results of a study of a trained model.

  Attributes:
    text: a table or a few sentences to print.
    metrics: numbers (or lists of them) by name, kept as JSON.
    figures: pictures by file name without suffix.
    files: texts, such as tables, by file name.
  """

  text: str
  metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
  files: dict[str, str] = dataclasses.field(default_factory=dict)
  figures: dict[str, 'Figure'] = dataclasses.field(default_factory=dict)


class Data(abc.ABC):
  """The batches of a task, and facts about them that the loop needs.

  Attributes:
    unit: what `tokens_per_step` counts, in the plural.
    main: names of the held-out metrics that are shown on one line.
    rising: regular expressions of the names, without a mode's prefix, of
      held-out metrics of which more is better.
    falling: the same for held-out metrics of which less is better.
  """

  unit: str = 'tokens'
  main: tuple[str, ...] = ('loss', 'accuracy', 'top1', 'top5')
  rising: tuple[str, ...] = ('accuracy', 'top1', 'top5')
  falling: tuple[str, ...] = ('loss',)

  def check(self) -> None:  # noqa: B027 (Not all data need it.)
    """Checks the data; called before a run is begun or loaded.

    Constructors, in contrast, must not read any data.

    Raises:
      UserError: data are missing, or the model does not fit them.
    """

  def files(self) -> Mapping[str, str]:
    """Returns texts to keep in the run's directory, by file name.

    Continued runs and evaluations need them: for example, a tokenizer that was
    learned from the training files.
    """
    return {}

  @abc.abstractmethod
  def train_iterator(self, *, shard_index: int, shard_count: int):
    """Returns this host's endless iterator over its part of the batches.

    The iterator's `get_state()` returns a JSON object, the same on every host;
    `set_state()` continues from that object, with any number of hosts.
    """

  @abc.abstractmethod
  def eval_batches(
    self,
    *,
    batch_size: int,
    num_batches: int | None,
    shard_index: int = 0,
    shard_count: int = 1,
  ):
    """Returns this host's iterable over its part of held-out batches.

    `batch_size` is the number of rows of this part. `num_batches` batches are
    spread over the held-out data; None takes all data.
    """

  @abc.abstractmethod
  def data_fingerprint(self) -> dict[str, Any]:
    """Returns the fingerprint of the data, as made by `data.fingerprint`.

    It is saved with every checkpoint, and a run refuses to continue on other
    data.
    """

  def data_summary(self) -> str:
    """Returns a line on the kind and amount of the data; '' for no line."""
    return ''

  def batch_shapes(self) -> dict[str, Any] | None:
    """Returns shapes and dtypes of a training batch, without reading any data.

    Returns None if they are unknown: then the step cannot be traced ahead, and
    its errors only show after a run has begun.
    """
    return None

  @property
  @abc.abstractmethod
  def tokens_per_step(self) -> int | None:
    """Tokens (or images) of a step on all hosts together.

    None if batches differ in size: then tokens and FLOPs per second are hidden.
    """


class Method(abc.ABC):
  """A training method: how a batch becomes a loss, metrics and pictures.

  The loop does the rest: sharding, gradient accumulation, moving averages,
  checkpoints, resuming, the stop at a NaN, progress, logs. A method is hashable
  by identity and holds no arrays that training changes.

  Attributes:
    config: config of the run.
    modality: the data to train and evaluate on.
    dtype: dtype of matrix products, which determines a device's peak FLOP/s.
  """

  config: Any
  modality: Data
  dtype: str = 'float32'

  @abc.abstractmethod
  def init(self, key) -> dict[str, Any]:
    """Returns the model's variables by collection, in boxes of logical axes."""

  def check_init(self, init: str) -> None:
    """Checks what `config.init` is, and reads no weights.

    The loop calls this before it compiles anything, and `start` after that.

    Raises:
      UserError: there is nothing at `init`, or another kind of model.
    """
    workdir_lib.find(init)

  def start(self, params, model_state, init: str) -> tuple[Any, Any]:
    """Returns params and model_state with the weights at `config.init`.

    The arguments are initialised variables; the results have their structure.

    Raises:
      UserError: there are no weights at `init`, or they do not fit.
    """
    raise UserError(
      f'init={init}: this task starts from nothing but fresh weights; set init'
      ' to None.'
    )

  def beginning(self, params, model_state, mesh) -> str:
    """Returns a line on how good the weights of `config.init` are, or ''."""
    del params, model_state, mesh
    return ''

  def teacher(self, mesh) -> Any:
    """Returns constant arrays that the losses need, or None.

    They are, for example, the parameters of a teacher. The loop calls this once
    and replicates the arrays over the mesh. Checkpoints do not hold them.
    """
    del mesh

  @abc.abstractmethod
  def static_args(self, step: int) -> Hashable:
    """Returns a step's static arguments; each value compiles a new program."""

  @abc.abstractmethod
  def losses(
    self, params, model_state, batch, rng, static_args, teacher=None
  ) -> tuple[Sequence[Pair], Any]:
    """Returns (losses, (metric_sums, model_state)); a pure function.

    Each loss is a pair (total, weight); the objective is the sum of all
    quotients `total / weight`. A weight is the number of items that the loss is
    a mean over, and passes no gradient. With gradient accumulation, the weights
    of all microbatches are summed first; if weights depend on more than the
    batch, that takes another forward pass. `metric_sums['loss']` is the main
    loss. `teacher` is the result of the method `teacher`.
    """

  def loss(self, *args, **kwargs) -> tuple[Any, Any]:
    """Returns the objective of a whole batch, and the second of `losses`."""
    losses, aux = self.losses(*args, **kwargs)
    return sums.sum_of_means(losses), aux

  def eval_modes(self, *, more: bool = False) -> Mapping[str, Hashable]:
    """Returns the modes of evaluation, by prefix of their metrics.

    With `more`, returns instead the modes that only `eval.py` reports.
    """
    return {} if more else {'': None}

  def direction(self, metric: str) -> int:
    """Returns 1 if more of a held-out metric is better, -1 if less is.

    Raises:
      UserError: no metric in `rising` or `falling` has this name in any mode.
    """
    known = {
      prefix + name: (f'{re.escape(prefix)}({name})', sign)
      for prefix in self.eval_modes()
      for sign, names in (
        (-1, self.modality.falling),
        (1, self.modality.rising),
      )
      for name in names
    }
    for pattern, sign in known.values():
      if re.fullmatch(pattern, metric):
        return sign
    raise UserError(
      f'checkpoint.best={metric!r}: nothing says whether more of it is better;'
      f' choose one of {", ".join(known)}.{config_lib.nearest(metric, known)}'
    )

  @abc.abstractmethod
  def eval_step(
    self, params, model_state, batch, key, mode: Hashable
  ) -> MetricSums:
    """Returns the metric sums of a held-out batch; a pure function.

    It is compiled for each mode. `key` is for randomness in the forward pass,
    and differs between batches.
    """

  def finish_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
    """Adds derived metrics to held-out metrics, whose names have prefixes."""
    return metrics

  def main_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the few held-out metrics that fit on one line."""
    main = self.modality.main
    return {k: v for k, v in metrics.items() if k.split('/')[-1] in main}

  @abc.abstractmethod
  def summary(self, metrics: dict[str, float]) -> str:
    """Returns held-out metrics as a table to print."""

  @abc.abstractmethod
  def pictures(self, params, model_state) -> dict[str, 'Figure']:
    """Returns figures of the trained model, by file name without suffix."""

  def curves(self, records: Iterable[Mapping[str, Any]]) -> dict[str, 'Figure']:
    """Returns figures of a run's metrics, by file name without suffix."""
    return {'curves': viz.loss_curves(records, title='Loss over training')}

  def studies(self) -> dict[str, Callable[..., Study]]:
    """Returns the studies of a trained model, by name.

    Each is called with (params, model_state, mesh), only on request.
    """
    return {}

  def finish(self, params, model_state) -> Iterable[str]:
    """Returns texts to print and save at the end of a run."""
    return ()

  @abc.abstractmethod
  def flops_per_step(self, static_args) -> float:
    """Returns the model's FLOPs of a training step on the whole batch."""

  def flops_report(self) -> str:
    """Returns the cost of the model as a table to print."""
    flops = self.flops_per_step(self.static_args(0))
    return f'FLOPs of the first training step: {flops:.6g}'


class Task(Method, Data):
  """A method and its data in one class: a base class for custom tasks."""

  @property
  def modality(self) -> Data:
    return self
