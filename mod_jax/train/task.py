"""What the training loop needs to know of what is trained."""

import abc
from collections.abc import Hashable
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

Pairs = dict[str, tuple[Any, Any]]  # Metrics as (total, weight).


class Task(abc.ABC):
  """How a batch becomes a loss, metrics and pictures.

  The loop gives every task the rest: sharding, accumulation, checkpoints,
  resuming, the stop at a NaN, progress, logs. A task is hashable by identity
  and holds no arrays that training changes.
  """

  @abc.abstractmethod
  def init(self, key) -> dict[str, Any]:
    """Returns the variables of the model, boxed by logical axes, by name."""

  @abc.abstractmethod
  def train_iterator(self, *, shard_index: int, shard_count: int):
    """Returns this host's endless, checkpointable Grain iterator of batches."""

  @abc.abstractmethod
  def stage(self, step: int) -> Hashable:
    """Returns the static choices of a step: each compiles its own program."""

  @abc.abstractmethod
  def loss(self, params, mutables, batch, rng, stage) -> tuple[Any, Any]:
    """Returns (scalar, (pairs, mutables)): a pure function of its arguments.

    `pairs['loss']` is the main loss; its weight is the number of things that
    the scalar is a mean over, by which microbatches are added.
    """

  @abc.abstractmethod
  def evaluate(self, params, mutables, mesh) -> dict[str, float]:
    """Returns held-out metrics."""

  @abc.abstractmethod
  def pictures(self, params, mutables) -> dict[str, Figure]:
    """Returns figures of what the model does, by file name without suffix."""

  @abc.abstractmethod
  def summary(self, metrics: dict[str, float]) -> str:
    """Returns held-out metrics as a table for people."""

  def finish(self, params, mutables) -> Iterable[str]:
    """Yields texts to show, and to keep, at the end of a run."""
    return ()

  @abc.abstractmethod
  def flops_per_step(self, stage) -> float:
    """Returns the model's FLOPs of a training step on the whole batch."""

  @property
  @abc.abstractmethod
  def tokens_per_step(self) -> int:
    """How many tokens (or images) a step consumes on all hosts together."""
