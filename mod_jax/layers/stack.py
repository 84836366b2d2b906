"""A stack of layers: which are routed, scanned, and recomputed in training."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from typing import Any, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import parallel
from mod_jax.errors import require
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.cache import KVCache
from mod_jax.layers.decisions import SELECTION_NAME
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig, LayerOutput
from mod_jax.layers.routing_config import RoutingConfig
from mod_jax.layers.scores import Learned, Router
from mod_jax.layers.token_info import TokenInfo
from mod_jax_kernels.attention import RESIDUALS

# What is saved for the backward pass, from most memory to least. `none`:
# everything; `dots`: results of matmuls and of TPUs' attention kernel;
# `attention`: each layer's input and that kernel's results; `full`: each
# layer's input. Routing choices are always saved.
Remat = Literal['none', 'dots', 'attention', 'full']


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
  """The layers of a model, first to last, and how they are run.

  Attributes:
    layers: configs of the layers.
    remat: what is saved for the backward pass.
    period: number of layers in the repeating group, for `scan`.
    scan: whether to compile one group and loop over the groups.
  """

  layers: tuple[LayerConfig, ...]
  remat: Remat = 'none'
  period: int = 1
  scan: bool = False

  def __post_init__(self):
    if not self.scan:
      return
    require(
      len(self.layers) % self.period == 0,
      'a multiple of the routing period, or scan_layers=False',
      num_layers=len(self.layers),
      period=self.period,
    )
    for i, layer in enumerate(self.layers):
      require(
        layer == self.layers[i % self.period],
        f'the block to be like block {i % self.period}, as groups of'
        f' {self.period} are scanned: set scan_layers=False, or give all groups'
        ' the same routing (first, layers), capacity, adaptive modules and'
        ' adapters',
        block=i,
      )

  @property
  def capacities(self) -> tuple[float | None, ...]:
    """Each layer's capacity; None for a layer that is not routed."""
    return tuple(layer.capacity for layer in self.layers)

  @property
  def shared_router(self) -> Router | None:
    """The router that all routed layers share; None if each has its own."""
    for layer in self.layers:
      scorer = None if layer.routing is None else layer.routing.scorer
      if isinstance(scorer, Learned) and scorer.shared:
        return scorer.router()
    return None

  @property
  def names(self) -> tuple[str, ...]:
    """Each layer's name in tables; its first word is `block_<i>`."""
    return tuple(
      f'block_{i}' if layer.routing is None else f'block_{i} (routed)'
      for i, layer in enumerate(self.layers)
    )

  def lengths(self, length: int) -> tuple[int, ...]:
    """Returns how many tokens reach each layer and, last, how many are left."""
    lengths = [length]
    for layer in self.layers:
      lengths.append(layer.block.left(lengths[-1]))
    return tuple(lengths)

  def tokens_per_block(
    self, length: int, image_places: int = 0
  ) -> tuple[int, ...]:
    """Returns how many slots of a sequence each block processes in training."""
    return tuple(
      layer.tokens(left, image_places)
      for layer, left in zip(self.layers, self.lengths(length), strict=False)
    )

  def flops_table(
    self, length: int, **kwargs
  ) -> list[tuple[str, dict[str, int]]]:
    """Returns (name, forward FLOPs by part) of each layer, for one sequence.

    `kwargs` are keywords of `LayerConfig.flops`.
    """
    return [
      (name, layer.flops(left, **kwargs))
      for name, layer, left in zip(
        *(self.names, self.layers, self.lengths(length)), strict=False
      )
    ]

  def prefixes(self, layer: int) -> tuple[str, ...]:
    """Returns the prefixes of the names of a layer's parameters.

    All scanned layers have the same prefixes. A router that layers share counts
    as a part of the first routed layer.
    """
    if self.scan:
      return ('layers/', 'router/')
    routed = [i for i, c in enumerate(self.capacities) if c is not None]
    return (f'block_{layer}/', *('router/',) * (routed[:1] == [layer]))

  def caches(
    self,
    batch: int,
    length: int,
    mode: RoutingMode,
    length_B: jax.Array | None = None,
    image_places: int = 0,
  ) -> Any:
    """Returns empty caches for at most `length` tokens, fewer in routed layers.

    `length_B` is the final number of tokens of each sequence, which determines
    its slots under `overflow='drop'`; None = `length`. `image_places` is the
    sum of `TokenInfo.image_places` over all calls that fill the caches.
    """

    def layer_cache(layer):
      attention = layer.block.attention
      slots, limit_B, drops = length, None, False
      if layer.routing is not None:
        drops = mode.overflow == 'drop' and layer.routing.kinds is None
      if layer.caches_chosen:
        slots = layer.num_slots(mode, length, image_places)
      if drops:
        count_B = jnp.full(batch, length) if length_B is None else length_B
        limit_B = mode.row_slots(layer.capacity, length, count_B)
      return KVCache.empty(
        batch,
        slots,
        attention.num_kv_heads,
        attention.head_dim,
        layer.block.dtype,
        limit_B,
        counts_entered=drops and not layer.caches_chosen,
      )

    caches = tuple(map(layer_cache, self.layers))
    if not self.scan:
      return caches
    return tuple(
      jax.tree.map(_together, *caches[j :: self.period])
      for j in range(self.period)
    )


def layer_configs(
  block: BlockConfig,
  num_layers: int,
  routing: RoutingConfig | None = None,
  *,
  experts: ExpertsConfig | None = None,
  adaptive: AdaptiveConfig | None = None,
  lora: LoRAConfig | None = None,
  stochastic_depth: float = 0.0,
  source_routing: RoutingConfig | None = None,
) -> tuple[LayerConfig, ...]:
  """Returns the layers of a model that uses one block config throughout.

  The drop rate rises linearly from 0 at the first layer to `stochastic_depth`
  at the last. Layers that `source_routing` selects read a part of the source.
  """
  blocks = [block] * num_layers
  if experts is not None:
    experts.check(block, num_layers)
    blocks = [experts.adapt(i, block) for i in range(num_layers)]
  if adaptive is not None:
    adaptive.check(block, num_layers)
    blocks = [adaptive.adapt(i, block) for i, block in enumerate(blocks)]
  if lora is not None:
    blocks = lora.adapt(blocks)
  given = (routing, source_routing)
  of_tokens, of_source = (
    [None] * num_layers if x is None else x.capacities(num_layers)
    for x in given
  )
  scored = {}
  for x in given:
    if x is not None and x.scorer.needs_attention:
      scored |= _scored_layers(x, num_layers)
  return tuple(
    LayerConfig(
      block=block,
      routing=None if of_tokens[i] is None else routing,
      capacity=of_tokens[i],
      attention_score=scored.get(i),
      source_routing=None if of_source[i] is None else source_routing,
      source_capacity=of_source[i],
      drop_rate=stochastic_depth * i / max(1, num_layers - 1),
    )
    for i, block in enumerate(blocks)
  )


def _scored_layers(routing: RoutingConfig, num_layers: int) -> dict[int, str]:
  """Returns, by layer index, the kind of attention score that a layer computes.

  Routed layers choose by these scores of an earlier layer.
  """
  kind = routing.scorer.attention
  capacities = routing.capacities(num_layers)
  routed = [i for i, capacity in enumerate(capacities) if capacity is not None]
  if kind == 'last':
    routed = routed[:1]
    require(
      routed[0] > 0,
      'a block before the first routed one, whose attention it chooses by: set'
      ' first or layers',
      **{'routing by attention, block': 0},
    )
  return dict.fromkeys((i - 1 for i in routed), kind)


def remat(module: type[nn.Module], kind: Remat, *, scanned: bool = False):
  """Returns the module class with gradient checkpointing, unless kind='none'.

  Routing choices are always saved: a recomputed top-k may choose other tokens.
  """
  if kind == 'none':
    return module
  policies = jax.checkpoint_policies
  names = [SELECTION_NAME]
  if kind != 'full':
    names.append(RESIDUALS)
  policy = policies.save_only_these_names(*names)
  if kind == 'dots':
    policy = policies.save_from_both_policies(
      policy, policies.dots_with_no_batch_dims_saveable
    )
  return nn.remat(module, policy=policy, prevent_cse=not scanned)


@flax.struct.dataclass
class StackOutput:
  """What a stack returns.

  Attributes:
    x_BLD: the features after the last layer.
    aux: `LayerOutput.aux` of each layer.
    caches: the caches with the tokens added; None if the stack was given none.
  """

  x_BLD: jax.Array
  aux: tuple[dict[str, Any], ...] = ()
  caches: Any = None


def _run(block, *args) -> LayerOutput:
  return block(*args)


# For generation, which compiles many shapes: `nn.jit` traces layers of equal
# config and shapes once. Tracing takes most of the time before XLA starts.
_run_alike = nn.jit(_run)


class Group(nn.Module):
  """Layers `block_0`, `block_1`, …: a whole stack, or the body of a scan."""

  layers: tuple[LayerConfig, ...]
  remat: Remat
  mode: Mode
  scanned: bool = False

  def setup(self):
    layer = remat(Layer, self.remat, scanned=self.scanned)
    self.block = [layer(config, self.mode) for config in self.layers]

  def step(
    self,
    layer: int,
    x_BLD: jax.Array,
    info: TokenInfo,
    attention_BL: jax.Array | None = None,
    cache: KVCache | None = None,
    router: dict[str, jax.Array] | None = None,
  ) -> LayerOutput:
    """Runs the layer of index `layer`; for the arguments see `Layer`."""
    run = _run if cache is None else _run_alike
    output = run(self.block[layer], x_BLD, info, cache, attention_BL, router)
    return output.replace(
      x_BLD=parallel.constrain(output.x_BLD, 'batch', 'length', 'act_embed')
    )

  def __call__(self, x_BLD, caches, info, router, depth=None):
    """Returns x_BLD and (each layer's aux, the new caches or None).

    With `depth`, runs only the first `depth` layers, and returns the caches of
    later layers unchanged.
    """
    depth = len(self.layers) if depth is None else depth
    auxes, new_caches, attention_BL = [], [], None
    for i in range(depth):
      cache = None if caches is None else caches[i]
      output = self.step(i, x_BLD, info, attention_BL, cache, router)
      x_BLD = output.x_BLD
      attention_BL = output.aux.get('attention', attention_BL)
      info = info if output.info is None else output.info
      aux = output.aux
      if info.source is not None:
        attention_BS = aux.get('source_attention')
        source = info.source.replace(attention_BS=attention_BS)
        info = info.replace(source=source)
      if self.mode.train and self.layers[i].tells_features:
        aux = aux | {'features': x_BLD}
      auxes.append(aux)
      new_caches.append(output.cache)
    if caches is not None:
      caches = (*new_caches, *caches[depth:])
    return x_BLD, (tuple(auxes), caches)


class Stack(nn.Module):
  """Runs the layers, named `block_<i>` in a model that shares its scope.

  Scanned layers have their parameters in `layers/block_<j>`, one for each
  position in the period, with a leading axis over the groups. A router that all
  routed layers share has its parameters in `router`.
  """

  config: StackConfig
  mode: Mode = Mode()

  def setup(self):
    config = self.config
    self.router = config.shared_router
    if not config.scan:
      self.group = Group(config.layers, config.remat, self.mode)
      nn.share_scope(self, self.group)
      return
    scanned = nn.scan(
      Group,
      variable_axes={'params': 0, 'moving': 0},
      split_rngs={
        name: True
        for name in ('params', 'routing', 'gumbel', 'stochastic_depth')
      },
      in_axes=(0, nn.broadcast, nn.broadcast),
      length=len(config.layers) // config.period,
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    self.layers = scanned(
      config.layers[: config.period], config.remat, self.mode, scanned=True
    )

  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    caches: Any = None,
    depth: int | None = None,
  ) -> StackOutput:
    """Returns the features, each layer's aux, and the caches.

    `caches` hold the tokens so far, as `StackConfig.caches` or the last call
    returned them; None for whole sequences. `depth` is the number of layers to
    run; None for all layers. Raises UserError if scanned layers have a `depth`.
    """
    router = self._shared(x_BLD)
    if not self.config.scan:
      x_BLD, (auxes, caches) = self.group(x_BLD, caches, info, router, depth)
      return StackOutput(x_BLD, auxes, caches)
    require(
      depth is None,
      'None: scanned layers run all together; use what models.lm.unrolled'
      ' returns',
      depth=depth,
    )
    x_BLD, (stacked, caches) = self.layers(x_BLD, caches, info, router)
    groups = len(self.config.layers) // self.config.period
    auxes = tuple(
      jax.tree.map(lambda x, i=i: x[i], aux)
      for i in range(groups)
      for aux in stacked
    )
    return StackOutput(x_BLD, auxes, caches)

  def step(self, layer: int, x_BLD, *args, **kwargs) -> LayerOutput:
    """Runs one layer of an unscanned stack; arguments as in `Group.step`."""
    router = self._shared(x_BLD)
    return self.group.step(layer, x_BLD, *args, router=router, **kwargs)

  def _shared(self, x_BLD) -> dict[str, jax.Array] | None:
    """Returns the parameters of the router that layers share, or None."""
    return self.router and self.router.weights(x_BLD.shape[-1])


def collect(auxes: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
  """Returns the aux of one kind from all layers, by the name of its origin.

  A name is such as `block_1`, or `block_1/mlp` if a module slot returned the
  aux. Kinds are those of `LayerOutput.aux`.
  """
  by_name = {}
  for i, aux in enumerate(auxes):
    value = aux.get(kind)
    if isinstance(value, Mapping):
      by_name |= {f'block_{i}/{name}': x for name, x in value.items()}
    elif value is not None:
      by_name[f'block_{i}'] = value
  return by_name


def unrolled(config: StackConfig, variables):
  """Unstacks `layers` of an unboxed collection to `block_<i>`, in a copy."""
  if 'layers' not in variables:
    return variables
  variables = dict(variables)
  layers = variables.pop('layers')
  for i in range(len(config.layers)):
    group, j = divmod(i, config.period)
    if f'block_{j}' in layers:
      variables[f'block_{i}'] = jax.tree.map(
        functools.partial(_layer, i=group), layers[f'block_{j}']
      )
  return variables


def _layer(x, i):
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  return x[i]


def _together(*x):
  if isinstance(x[0], jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype)
  return jnp.stack(x)


def scanned(config: StackConfig, variables):
  """Inverts `unrolled`: stacks `block_<i>` to `layers`, for a scan."""
  if 'layers' in variables:
    return variables
  variables = dict(variables)
  count = len(config.layers)
  blocks = {
    i: variables.pop(f'block_{i}')
    for i in range(count)
    if f'block_{i}' in variables
  }
  layers = {
    f'block_{j}': jax.tree.map(
      _together,
      *(blocks[i] for i in range(j, count, config.period)),
    )
    for j in range(config.period)
    if j in blocks
  }
  return variables | ({'layers': layers} if layers else {})
