"""What the training loop needs to know of what is trained."""

import abc
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
import dataclasses
import typing
from typing import Any

from mod_jax import viz
from mod_jax.errors import UserError
from mod_jax.losses import sums
from mod_jax.losses.sums import MetricSums, Pair

if typing.TYPE_CHECKING:  # It takes long to import.
  from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """What a study of a trained model found.

  Attributes:
    text: a table or a few sentences for people.
    metrics: numbers (or lists of them) by name, kept as JSON.
    figures: pictures by file name without suffix.
  """

  text: str
  metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
  figures: dict[str, 'Figure'] = dataclasses.field(default_factory=dict)


class Task(abc.ABC):
  """How a batch becomes a loss, metrics and pictures.

  The loop gives every task the rest: sharding, gradient accumulation, averages,
  checkpoints, resuming, the stop at a NaN, progress, logs. A task is hashable
  by identity and holds no arrays that training changes.
  """

  # What a batch is counted in.
  unit: str = 'tokens'
  # Of the matrix products, on which it depends how many a device can do.
  dtype: str = 'float32'

  # Not abstract, because many tasks have nothing to look at.
  def check(self) -> None:  # noqa: B027
    """Looks at what the data are; called before a run is begun or read.

    Making a task looks at nothing but its config.

    Raises:
      UserError: the data are not there, or the model does not fit them.
    """

  @abc.abstractmethod
  def init(self, key) -> dict[str, Any]:
    """Returns the variables of the model, boxed by logical axes, by name."""

  def start(self, params, model_state, init: str) -> tuple[Any, Any]:
    """Returns what a fresh run starts from instead of random weights.

    Args:
      params: the fresh parameters.
      model_state: the other fresh collections.
      init: where the weights lie, `config.init`.

    Returns:
      Both again, in the same structures.

    Raises:
      UserError: there are no weights, or they do not fit.
    """
    raise UserError(
      f'init={init}: this task starts from nothing but fresh weights; set init'
      ' to None.'
    )

  def teacher(self, mesh) -> Any:
    """Returns arrays that training uses and never changes, or None.

    Such as a teacher's parameters. The loop asks once and puts a copy on every
    device, unless they are placed on the mesh already. They are part of no
    checkpoint.
    """
    del mesh

  def files(self) -> Mapping[str, str]:
    """Returns what the run made for itself and needs again, by file name.

    Such as a tokenizer that was learned from the training files. The loop
    keeps the texts in the run's directory, for continuations and evaluation.
    """
    return {}

  @abc.abstractmethod
  def train_iterator(self, *, shard_index: int, shard_count: int):
    """Returns this host's endless iterator over its part of the batches.

    `get_state()` returns a JSON object, the same on every host, and
    `set_state()` goes on from it, with any number of hosts.
    """

  def data_summary(self) -> str:
    """Returns a line on how many data there are and of what, or ''."""
    return ''

  def beginning(self, params, model_state, mesh) -> str:
    """Returns a line on what a run from `config.init` begins with, or ''."""
    del params, model_state, mesh
    return ''

  def batch_shapes(self) -> dict[str, Any] | None:
    """Returns shapes and dtypes of a training batch, without reading any data.

    None if this task does not tell: then its step cannot be compiled ahead, and
    what only the first step shows to be wrong is refused when a run has begun.
    """
    return None

  @abc.abstractmethod
  def data_fingerprint(self) -> dict[str, Any]:
    """Returns what identifies the data, as `data.fingerprint` makes it.

    It is kept with every checkpoint: a run does not go on over other data.
    """

  @abc.abstractmethod
  def static_args(self, step: int) -> Hashable:
    """Returns the static choices of a step: each compiles its own program."""

  @abc.abstractmethod
  def losses(
    self, params, model_state, batch, rng, static_args, teacher=None
  ) -> tuple[Sequence[Pair], Any]:
    """Returns (losses, (metric_sums, model_state)): a pure function.

    What is trained is the sum of all `total / weight`. No gradient passes the
    weights, the numbers of things that the losses are means over: of a batch
    that is processed in parts they are added up before anything else, which is
    another forward pass where they depend on more than the batch.
    `metric_sums['loss']` is the main loss. `teacher` is what the method of that
    name returned.
    """

  def loss(self, *args, **kwargs) -> tuple[Any, Any]:
    """Returns what `losses` does, with the losses' sum of a whole batch."""
    losses, told = self.losses(*args, **kwargs)
    return sums.sum_of_means(losses), told

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

    Args:
      batch_size: rows of this host's part.
      num_batches: how many, spread over all; None for all.
      shard_index: number of this host.
      shard_count: of hosts.
    """

  def eval_modes(self, *, more: bool = False) -> Mapping[str, Hashable]:
    """Returns how held-out batches are gone through, by prefix of the metrics.

    Args:
      more: returns instead the modes that only `eval.py` reports.
    """
    return {} if more else {'': None}

  @abc.abstractmethod
  def eval_step(
    self, params, model_state, batch, key, mode: Hashable
  ) -> MetricSums:
    """Returns the sums of a held-out batch: a pure function, compiled by mode.

    Args:
      params: parameters.
      model_state: other collections.
      batch: of `eval_batches`.
      key: for what is random in a forward pass; another one for each batch.
      mode: one of `eval_modes`, static.
    """

  def finish_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
    """Returns held-out metrics with what follows from them, by full name."""
    return metrics

  def main_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the few held-out metrics that fit on one line."""
    main = ('loss', 'accuracy', 'top1', 'top5')
    return {k: v for k, v in metrics.items() if k.split('/')[-1] in main}

  @abc.abstractmethod
  def pictures(self, params, model_state) -> dict[str, 'Figure']:
    """Returns figures of what the model does, by file name without suffix."""

  def curves(self, records: Iterable[Mapping[str, Any]]) -> dict[str, 'Figure']:
    """Returns figures of a run's metrics, by file name without suffix."""
    return {'curves': viz.loss_curves(records, title='Loss over training')}

  @abc.abstractmethod
  def summary(self, metrics: dict[str, float]) -> str:
    """Returns held-out metrics as a table for people."""

  def studies(self) -> dict[str, Callable[..., Study]]:
    """Returns longer looks at a trained model, by name.

    Each is called with (params, model_state, mesh), on demand only.
    """
    return {}

  def finish(self, params, model_state) -> Iterable[str]:
    """Yields texts to show, and to keep, at the end of a run."""
    return ()

  @abc.abstractmethod
  def flops_per_step(self, static_args) -> float:
    """Returns the model's FLOPs of a training step on the whole batch."""

  def flops_report(self) -> str:
    """Returns what the model costs, as a table for people."""
    flops = self.flops_per_step(self.static_args(0))
    return f'FLOPs of the first training step: {flops:.6g}'

  @property
  @abc.abstractmethod
  def tokens_per_step(self) -> int:
    """How many tokens (or images) a step consumes on all hosts together."""
