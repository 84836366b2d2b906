"""Interfaces that the configs and outputs of all models share."""

import dataclasses
import operator
from typing import Any, ClassVar

from flax import linen as nn
import jax

from mod_jax.errors import require
from mod_jax.layers import stack
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.decisions import Routing
from mod_jax.layers.experts import Assigned, ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.routed import LayerConfig
from mod_jax.layers.routing_config import RoutingConfig


def shapes(config: 'StackedConfig') -> dict[str, Any]:
  """Returns the shapes of a model's variables, by collection."""

  def init():
    key = jax.random.key(0)
    rngs = {'params': key, 'routing': key}
    return config.build().init(rngs, config.example())

  return dict(nn.unbox(jax.eval_shape(init)))


class StackedConfig:
  """Base of the configs of all models, each of which has a `stack` of layers.

  Each is a frozen dataclass with `build(**mode)`, which returns the module and
  takes fields of `layers.mode.Mode`; `example()`, a minimal input to initialise
  it with; and `flops_table(*length)`, a list of (layer, forward FLOPs by part)
  for one input. `*length` is the number of tokens for language models, of
  frames for models of speech, and empty for models of pictures alone.
  `flops.published_macs` counts the parts `norm`; `flops.forward` does not.

  A model's parts are the attributes below, pruning and merging. Pruning decides
  which tokens remain, routing which of the remaining tokens a block processes,
  and adaptive modules how much each processed token costs.

  Attributes:
    kind: `Source.kind` of published weights of such a model.
    noun: what messages call such a model if it is dense, as 'a detector'.
    route_methods: methods by which `mod_jax.route` takes such a dense model.
    routing: how blocks are routed; None for a model without routed blocks.
    experts: which blocks have experts; None for none.
    adaptive: which modules are split into learners; None for none.
    lora: which maps have low-rank adapters; None for none.
  """

  kind: ClassVar[str]
  noun: ClassVar[str]
  route_methods: ClassVar[tuple[str, ...]]
  routing: RoutingConfig | None
  experts: ExpertsConfig | None
  adaptive: AdaptiveConfig | None
  lora: LoRAConfig | None

  def _layers(self, block, **kwargs) -> tuple[LayerConfig, ...]:
    """Returns the layers' configs: `block` with the model's parts added."""
    return stack.layer_configs(
      *(block, self.num_layers, self.routing),
      experts=self.experts,
      adaptive=self.adaptive,
      lora=self.lora,
      **kwargs,
    )

  @property
  def capacities(self) -> tuple[float | None, ...]:
    """Each block's capacity; None for a block that is not routed."""
    return self.stack.capacities

  @property
  def routed_blocks(self) -> list[int]:
    """Numbers of the routed blocks."""
    return [i for i, c in enumerate(self.capacities) if c is not None]

  @property
  def num_routed(self) -> int:
    return len(self.routed_blocks)

  def tokens_per_block(self, *length: int) -> tuple[int, ...]:
    """Returns how many of `length` tokens each block processes."""
    return self.stack.tokens_per_block(*length)

  def row_prefixes(self, row: str) -> tuple[str, ...]:
    """Returns prefixes of the names of parameters in a row of `flops_table`.

    `row` is the first word of the row's name. Parameters whose names have none
    of the prefixes of any row count as if they came before all rows.
    """
    if row.startswith('block_'):
      return self.stack.prefixes(int(row.removeprefix('block_')))
    # The prefix `head` also includes heads of other tokens: `head_tokens`.
    return ('head', 'norm/') if row == 'head' else (f'{row}/',)

  def dense_twin(self):
    """Returns the config of the same model without any parts."""
    return self.with_parts(routing=None, experts=None, adaptive=None, lora=None)

  def with_parts(self, **parts):
    """Returns the config with some parts replaced; None removes a part."""
    return dataclasses.replace(self, **parts)


def read_from(path: str) -> property:
  """Returns a property that reads a part's attribute, as 'backbone.lora'."""
  return property(operator.attrgetter(path))


def check_encoder(mode: Mode) -> None:
  """Raises UserError if the routing rule is the name of a causal rule."""
  rule = mode.routing.rule
  require(
    not isinstance(rule, str) or rule in ('top_k', 'never'),
    "'top_k', since an encoder sees its whole input, or 'never' to leave routed"
    ' blocks out',
    rule=rule,
  )


def check_no_class_token(routing: RoutingConfig | None) -> None:
  """Raises UserError if `keep_class_token` is set for a model without one."""
  require(
    routing is None or not routing.keep_class_token,
    'keep_class_token=False, since this model has no class token',
    **{'routing.keep_class_token': True},
  )


class StackedOutput:
  """Base of all models' outputs; `aux` has each layer's auxiliary results."""

  @property
  def routing(self) -> tuple[Routing, ...]:
    """Routing decisions of each routed layer, first to last."""
    return tuple(stack.collect(self.aux, 'router').values())

  @property
  def experts(self) -> tuple[Assigned, ...]:
    """Routing decisions of each layer of experts, first to last."""
    return tuple(stack.collect(self.aux, 'experts').values())
