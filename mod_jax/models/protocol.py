"""What every model's config offers, whatever the model."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn

from mod_jax.layers import stack
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.experts import Assigned, ExpertsConfig
from mod_jax.layers.routed import Routing, RoutingConfig


@runtime_checkable
class ModelConfig(Protocol):
  """A frozen dataclass that builds a model, and counts what it costs.

  Methods with `*length` are called with the tokens of a sequence by language
  models, and with nothing by models of images, which know their size.

  A model's parts stand within each other: pruning says which tokens there are,
  routing which of them a block processes, adaptive modules how much each of
  those costs.

  Attributes:
    routing: how blocks are routed; None for a model without routed blocks.
    experts: which blocks have experts; None for none.
    adaptive: which modules are split into learners; None for none.
    capacities: each block's capacity; None for a block that is not routed.
  """

  routing: RoutingConfig | None
  experts: ExpertsConfig | None
  adaptive: AdaptiveConfig | None
  capacities: tuple[float | None, ...]

  def build(self, **mode: Any) -> nn.Module:
    """Returns the module; keywords are fields of `layers.mode.Mode`."""

  def dense_twin(self) -> 'ModelConfig':
    """Returns the same model with nothing conditional."""

  def with_parts(self, **parts: Any) -> 'ModelConfig':
    """Returns the model with another `routing` or `adaptive`, or without."""

  def example(self) -> Any:
    """Returns the least input that the model can be initialised with."""

  def tokens_per_block(self, *length: int) -> tuple[int, ...]:
    """Returns how many of a sequence's tokens each block processes."""

  def flops_table(self, *length: int) -> list[tuple[str, dict[str, int]]]:
    """Returns (layer, FLOPs by part) for one sequence or image, forward."""


class StackedConfig:
  """What configs share whose model is a stack of layers, `stack`."""

  @property
  def capacities(self) -> tuple[float | None, ...]:
    """Each block's capacity; None for a block that is not routed."""
    return self.stack.capacities

  @property
  def num_routed(self) -> int:
    return sum(capacity is not None for capacity in self.capacities)

  def dense_twin(self):
    """Returns the same model with every token in every plain block."""
    return self.with_parts(routing=None, experts=None, adaptive=None)

  def with_parts(self, **parts):
    """Returns the model with other parts, or without: `routing` and so on."""
    return dataclasses.replace(self, **parts)


class StackedOutput:
  """What the outputs of such models share; `aux` is each layer's."""

  @property
  def routing(self) -> tuple[Routing, ...]:
    """For each routed layer, first to last, what it chose."""
    return tuple(stack.collect(self.aux, 'router').values())

  @property
  def experts(self) -> tuple[Assigned, ...]:
    """For each layer of experts, first to last, what they were assigned."""
    return tuple(stack.collect(self.aux, 'experts').values())
