"""Mixture of experts: each token runs a few of several feed-forwards.

Token choice (Shazeer et al. 2017; Fedus et al. 2021): each token takes the K
experts with the largest logits. Expert choice (Zhou et al. 2022): each expert
takes the tokens with the largest probabilities for it.

With no-op experts, the model is an integrated Mixture-of-Depths-and-Experts
(Raposo et al. 2024, section 4.3): tokens that choose a no-op skip the
feed-forward. With experts in a routed block, it is a staged one.
"""

import dataclasses
import math
from typing import Literal

from flax import linen as nn
import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import parallel, routing
from mod_jax.errors import require
from mod_jax.layers import dense, lora
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.decisions import SELECTION_NAME
from mod_jax.layers.mlp import MLPConfig, hidden_units
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import TokenInfo
import mod_jax_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
  """Which blocks have experts, how many, and who chooses whom."""

  num_experts: config_lib.Unrolled = 8  # Number of experts (E).
  # K, number of choices of each token. Must be 1 for expert choice, where a
  # token may have any number of experts; their mean is `capacity_factor` times
  # `compute_share`.
  per_token: config_lib.Unrolled = 1
  # Who chooses. Experts choose among all tokens of a sequence, which is not
  # causal; see `threshold_decay`.
  choice: Literal['token', 'expert'] = 'token'
  # Z, no-op choices beside the experts; more than 0 is an integrated
  # Mixture-of-Depths-and-Experts.
  num_nulls: config_lib.Count = 0
  # Target fraction of the choices that are experts; None = E / (E + Z).
  compute_share: config_lib.Proper | None = None
  # Slots of each expert in a sequence, relative to the tokens it would have at
  # perfect balance. For token choice it applies in training only, where tokens
  # without a slot are dropped; None = a slot for every token.
  capacity_factor: config_lib.Positive | None = 1.25
  # Hidden units of each expert; None = those of the dense feed-forward.
  hidden: config_lib.Size | None = None
  period: config_lib.Unrolled = 1  # One block in every `period` has experts.
  offset: config_lib.Layer = 0  # Index of the block with experts in a period.
  # Standard deviation of the router's initial weights.
  router_std: config_lib.Weight = 0.02
  # Weight of the balance loss (Fedus et al. 2021, Eq. 4), for token choice.
  balance_loss: config_lib.Weight = 0.01
  # Weight of the mean squared log-sum-exp of logits (Zoph et al. 2022, Eq. 5).
  z_loss: config_lib.Weight = 0.001
  # For expert choice: decay of the causal rule's threshold, a moving average of
  # the lowest probability among an expert's chosen tokens; 0 = no causal rule.
  threshold_decay: config_lib.Decay = 0.0

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.offset < self.period, 'offset < period', 'offset', 'period')
    check(
      self.per_token <= self.num_experts,
      'per_token <= num_experts',
      *('per_token', 'num_experts'),
    )
    check(
      self.compute_share is None or self.num_nulls,
      'num_nulls=1, without which all choices are experts, or'
      ' compute_share=None',
      *('compute_share', 'num_nulls'),
    )
    # A token chooses a no-op once at most, so no more can skip an expert.
    nulls = math.ceil(round((1 - self.share) * self.per_token, 9))
    check(
      self.num_nulls >= nulls,
      f'num_nulls of at least {nulls}, (1 - compute_share) · per_token, since a'
      ' token chooses each no-op only once',
      *('compute_share', 'per_token', 'num_nulls'),
    )
    if self.choice == 'expert':
      check(
        self.per_token == 1,
        'per_token=1, since each expert chooses by capacity_factor',
        *('per_token', 'choice'),
      )
      check(
        self.capacity_factor is not None,
        'a capacity_factor by which experts choose; that of the paper is 2',
        *('capacity_factor', 'choice'),
      )
    else:
      check(
        not self.threshold_decay,
        "threshold_decay=0, or choice='expert', which has a threshold",
        *('threshold_decay', 'choice'),
      )

  @property
  def share(self) -> float:
    """ρ, the target fraction of the choices that are experts."""
    if self.compute_share is not None:
      return self.compute_share
    return self.num_experts / (self.num_experts + self.num_nulls)

  @property
  def targets(self) -> tuple[float, ...]:
    """Target fraction of the choices: of each expert, then of each no-op."""
    nulls = self.num_nulls
    return (self.share / self.num_experts,) * self.num_experts + (
      (1 - self.share) / max(nulls, 1),
    ) * nulls

  @property
  def causal(self) -> bool:
    """Whether experts can run such that no choice depends on later tokens."""
    return self.choice == 'token' or self.threshold_decay > 0

  def slots_per_expert(self, tokens: int) -> int:
    """Returns how many slots each expert has for a sequence of `tokens` tokens.

    Without a `capacity_factor`, there is a slot for every token. Token choice
    rounds up. Expert choice rounds down, to at least 1; each expert chooses as
    many tokens as it has slots.
    """
    if self.capacity_factor is None:
      return tokens
    factor = self.capacity_factor * self.share * self.per_token
    balanced = round(factor * tokens / self.num_experts, 9)
    slots = (
      math.ceil(balanced) if self.choice == 'token' else max(1, int(balanced))
    )
    return min(slots, tokens)

  def check(self, block: BlockConfig, num_layers: int) -> None:
    """Raises UserError if no block of the model can have experts."""
    require(
      isinstance(block.mlp, MLPConfig),
      'experts or another feed_forward, since experts are several plain ones',
      experts=self.num_experts,
      feed_forward=type(block.mlp).__name__,
    )
    require(
      self.offset < num_layers,
      'experts.offset < num_layers, or experts=None',
      **{'experts.offset': self.offset, 'num_layers': num_layers},
    )

  def adapt(self, layer: int, block: BlockConfig) -> BlockConfig:
    """Returns the block of this layer, with experts if the layer has them."""
    if layer % self.period != self.offset:
      return block
    mlp = block.mlp
    if self.hidden is not None:
      mlp = dataclasses.replace(mlp, hidden=self.hidden)
    return block.with_slots({'mlp': ExpertMLPConfig(mlp=mlp, experts=self)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMLPConfig(Slot):
  """Experts in place of a feed-forward."""

  mlp: MLPConfig  # Sizes of each expert.
  experts: ExpertsConfig

  def run(self, x, info, *, name, dtype, mode):
    # A distinct name, so that no dense checkpoint loads here by accident.
    module = ExpertMLP(self, mode, dtype=dtype, name=f'{name}_experts')
    y_BLD, assigned = module(x, info)
    return y_BLD, {'experts': assigned}

  def flops(self, tokens):
    """Returns forward FLOPs by part, including those of empty slots.

    Low-rank adapters cost nothing here: they are added to the kernels once per
    batch, whatever its tokens.
    """
    config = self.experts
    # Without a slot limit, only choices of experts cost FLOPs, not no-ops.
    run = round(tokens * config.per_token * config.share)
    if config.capacity_factor is not None:
      run = config.num_experts * config.slots_per_expert(tokens)
    router = 2 * tokens * self.mlp.width * self.num_choices
    return {'experts': self.mlp.flops(run)['mlp'], 'router': router}

  @property
  def num_params(self):
    router = self.mlp.width * self.num_choices
    return self.experts.num_experts * self.mlp.num_params + router

  def weight_flops(self, name, tokens):
    name, parts = f'{name}_experts', self.flops(tokens)
    run = parts['experts'] // self.mlp.flops(1)['mlp']  # Tokens of all experts.
    counts = {f'{name}/router/kernel': parts['router']}
    for map_name, slot in self.maps.items():
      counts |= lora.stacked_flops(slot, f'{name}/{map_name}', run)
    return counts

  @property
  def maps(self):
    return self.mlp.maps

  def with_maps(self, maps):
    return dataclasses.replace(self, mlp=self.mlp.with_maps(maps))

  @property
  def num_choices(self) -> int:
    """Number of experts and no-ops that a token can choose."""
    return self.experts.num_experts + self.experts.num_nulls


@flax.struct.dataclass
class Assigned:
  """Routing decisions of a layer. X = E + Z choices: E experts, then Z no-ops.

  Attributes:
    logits_BLX: float32 logits of the choices.
    wanted_BLX: whether the token chose the expert or no-op (or, in expert
      choice, the expert chose the token); False for invalid tokens.
    ran_BLE: whether the chosen expert had a slot for the token.
    valid_BL: False for padding and empty slots.
    index_BL: int32 positions of these tokens in the row that the model was
      called with; None if all tokens of that row are present, in order.
  """

  logits_BLX: jax.Array
  wanted_BLX: jax.Array
  ran_BLE: jax.Array
  valid_BL: jax.Array
  index_BL: jax.Array | None = None


class ExpertMLP(nn.Module):
  """A router and its experts.

  Collections: `params`; with `threshold_decay` also `moving`, the moving
  averages of the lowest probabilities that the experts chose.
  """

  config: ExpertMLPConfig
  mode: Mode = Mode()
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, info: TokenInfo
  ) -> tuple[jax.Array, Assigned]:
    """Returns the update and the routing decisions.

    Tokens that `info.valid_BL` excludes take no slot and get a zero update.
    """
    config = self.config.experts
    experts, length = config.num_experts, x_BLD.shape[1]
    valid_BL = info.valid_BL
    if valid_BL is None:
      valid_BL = jnp.ones(x_BLD.shape[:2], bool)
    count_B = info.count_B
    if count_B is None:
      count_B = valid_BL.sum(axis=-1)
    router = nn.Dense(
      self.config.num_choices,
      use_bias=False,
      # Keep accelerators from rounding to bfloat16: the forward pass and
      # decoding could then order nearly equal logits differently.
      precision='highest',
      kernel_init=nn.with_logical_partitioning(
        nn.initializers.normal(config.router_std), ('replicated', 'replicated')
      ),
      name='router',
    )
    logits_BLX = router(x_BLD.astype(jnp.float32))
    weight_BLX = nn.softmax(logits_BLX)
    chosen_BLKX = None
    if config.choice == 'token':
      chosen_BLKX = self._tokens_choose(logits_BLX)
      wanted_BLX = chosen_BLKX.any(axis=2) & valid_BL[..., None]
      weight_BLX = self._normalized(weight_BLX, wanted_BLX)
    else:
      wanted_BLX = self._experts_choose(weight_BLX, valid_BL, count_B)
    ran_BLE = wanted_BLX[..., :experts]
    weight_BLE = jnp.where(ran_BLE, weight_BLX[..., :experts], 0)
    weight_BLJ = _of_choices(weight_BLE, chosen_BLKX, 0)
    weights = {name: self._weights(name) for name in self.config.maps}
    slots = self._slots_per_expert(length)
    if slots is None:
      expert_BLE = jnp.where(ran_BLE, jnp.arange(experts), experts)
      expert_BLJ = _of_choices(expert_BLE, chosen_BLKX, experts)
      y_BLD = self._all(x_BLD, expert_BLJ, weight_BLJ, weights)
    else:
      limit_B = None if info.valid_BL is None else self._limit(length, count_B)
      slot_BLE = routing.give_slots(ran_BLE, slots, limit_B)
      ran_BLE = slot_BLE < experts * slots
      slot_BLJ = _of_choices(slot_BLE, chosen_BLKX, experts * slots)
      y_BLD = self._in_slots(x_BLD, slot_BLJ, slots, weight_BLJ, weights)
    assigned = Assigned(
      logits_BLX, wanted_BLX, ran_BLE, valid_BL, info.index_BL
    )
    return y_BLD, assigned

  def _weights(self, name) -> tuple[jax.Array, jax.Array | None]:
    """Returns a linear map's kernel_EIO, with adapters, and bias_EO or None."""
    slot, experts = self.config.maps[name], self.config.experts.num_experts
    plain = getattr(slot, 'base', slot)
    kernel_EIO, bias_EO = dense.Kernels(plain, experts, 'experts', name=name)()
    return lora.adapted(slot, kernel_EIO, 'experts', name), bias_EO

  def _axes(self, name) -> tuple[str, str]:
    """Returns the logical axes of a linear map's kernel in a single expert."""
    slot = self.config.maps[name]
    return getattr(slot, 'base', slot).axes

  def _limit(self, length, count_B) -> jax.Array:
    """Returns limit_B: the slots of each expert for a row of `count_B` tokens.

    Padding must not influence a row's choices, nor must the number of tokens
    that a routed block chose, which may depend on later tokens: see
    `TokenInfo.gather`.
    """
    return routing.for_lengths(
      self.config.experts.slots_per_expert, length, count_B
    )

  def _slots_per_expert(self, length) -> int | None:
    """Returns how many slots an expert has in this call; None for no limit."""
    config = self.config.experts
    if config.choice == 'expert':
      unlimited = self.mode.routing.causal_rule is not None
    else:
      unlimited = config.capacity_factor is None or not self.mode.train
    return None if unlimited else config.slots_per_expert(length)

  def _tokens_choose(self, logits_BLX):
    """Returns chosen_BLKX: each token's choices as one-hots, best first."""
    logits_BLX, chosen = jax.lax.stop_gradient(logits_BLX), []
    # Repeat argmax: for few choices top_k is many times slower on CPUs.
    for _ in range(self.config.experts.per_token):
      index_BL = checkpoint_name(logits_BLX.argmax(axis=-1), SELECTION_NAME)
      chosen.append(jax.nn.one_hot(index_BL, logits_BLX.shape[-1], dtype=bool))
      logits_BLX = jnp.where(chosen[-1], -jnp.inf, logits_BLX)
    return jnp.stack(chosen, axis=2)

  def _normalized(self, weight_BLX, wanted_BLX):
    """Divides a token's weights by the sum of the weights that it chose.

    In two cases the weights are returned as they are. With no-ops, the division
    would cancel the probability of a no-op that the token did not choose, which
    would then get no gradient. With a single choice per token, every chosen
    weight would be 1.
    """
    config = self.config.experts
    if config.per_token == 1 or config.num_nulls:
      return weight_BLX
    total_BL1 = jnp.where(wanted_BLX, weight_BLX, 0).sum(-1, keepdims=True)
    return weight_BLX / jnp.where(total_BL1 > 0, total_BL1, 1)

  def _experts_choose(self, weight_BLX, valid_BL, count_B):
    """Returns wanted_BLX, the experts' choices; updates thresholds in training.

    Raises UserError if the routing rule is causal but there are no thresholds.
    """
    config = self.config.experts
    batch, length, choices = weight_BLX.shape
    experts = config.num_experts
    weight_BLE = weight_BLX[..., :experts]
    updates = self.is_mutable_collection('moving')
    moving = None
    if config.threshold_decay and (
      updates or self.has_variable('moving', 'threshold')
    ):
      moving = self.variable(
        'moving', 'threshold', routing.MovingThreshold.zeros, (experts,)
      )
    if self.mode.routing.causal_rule is not None:
      require(
        moving is not None,
        "experts.threshold_decay above 0 and the 'moving' collection beside"
        " 'params', since experts choose by averages of training",
        **{'causal rule': self.mode.routing.rule},
      )
      # Negated, so that NaN is chosen and shows in the output.
      chosen_BLE = ~(weight_BLE < moving.value.value())
    else:
      score_QL = jnp.moveaxis(weight_BLE, -1, 1).reshape(-1, length)
      selection = routing.select_top_k(
        score_QL,
        config.slots_per_expert(length),
        jnp.repeat(valid_BL, experts, axis=0),
        jnp.repeat(self._limit(length, count_B), experts),
      )
      selection = checkpoint_name(selection, SELECTION_NAME)
      chosen_QL = routing.mark_tokens(selection, length)
      chosen_BLE = jnp.moveaxis(chosen_QL.reshape(batch, -1, length), 1, -1)
      if updates and moving is not None and not self.is_initializing():
        lowest_BE = jnp.where(chosen_BLE, weight_BLE, jnp.inf).min(axis=1)
        lowest_E = routing.mean_of_rows(lowest_BE)
        moving.value = moving.value.update(lowest_E, config.threshold_decay)
    chosen_BLE &= valid_BL[..., None]
    nulls = ((0, 0), (0, 0), (0, choices - experts))
    return jnp.pad(chosen_BLE, nulls)

  def _in_slots(self, x_BLD, slot_BLJ, slots, weight_BLJ, weights):
    """Returns the update; a linear map runs on all experts' slots at once."""
    batch, length, width = x_BLD.shape
    experts, per_token = self.config.experts.num_experts, slot_BLJ.shape[-1]
    slot_BA = slot_BLJ.reshape(batch, -1)
    assignment_BS = routing.inverse(slot_BA, experts * slots)
    x_BSD = routing.take(x_BLD, assignment_BS // per_token, slot_BLJ)
    x_EBCD = jnp.swapaxes(x_BSD.reshape(batch, experts, slots, width), 0, 1)
    # All-to-all: if experts are sharded, tokens are sent to their devices here.
    to_experts = ('experts', 'expert_batch', None, 'act_embed')
    x_EBCD = parallel.constrain(x_EBCD, *to_experts)

    def product(name, x_EBCD):
      axes = self._axes(name)
      kernel_EDF, bias_EF = weights[name]
      y_EBCF = dense.einsum(
        'EBCD,EDF->EBCF', x_EBCD, kernel_EDF, axes=('experts', *axes)
      )
      if bias_EF is not None:
        y_EBCF = (y_EBCF + bias_EF[:, None, None]).astype(y_EBCF.dtype)
      out_axis = f'act_{axes[-1]}'
      return parallel.constrain(
        y_EBCF, 'experts', 'expert_batch', None, out_axis
      )

    y_EBCD = self._run(product, x_EBCD)
    y_BSD = jnp.swapaxes(y_EBCD, 0, 1).reshape(batch, -1, width)
    y_BSD = parallel.constrain(y_BSD, 'batch', None, 'act_embed')
    y_BAD = routing.take(y_BSD, slot_BA, assignment_BS[..., None])
    y_BLJD = y_BAD.reshape(batch, length, per_token, width)
    return _weighted(y_BLJD, weight_BLJ).astype(x_BLD.dtype)

  def _all(self, x_BLD, expert_BLJ, weight_BLJ, weights):
    """Returns the update without slot limits.

    `expert_BLJ` is the index of each choice's expert, or E for no expert.
    """

    def run(x_BLD, expert_BLJ, weight_BLJ, *arrays):
      of_maps = zip(arrays[::2], arrays[1::2], strict=True)
      local = dict(zip(weights, of_maps, strict=True))
      # Each device holds some experts, and the tokens of all devices among
      # which the experts are split.
      num_local = local['down'][0].shape[0]
      local_BLJ = expert_BLJ - num_local * parallel.index_of('experts')
      is_local_BLJ = (local_BLJ >= 0) & (local_BLJ < num_local)
      group_A = jnp.where(is_local_BLJ, local_BLJ, num_local).reshape(-1)
      per_token = local_BLJ.shape[-1]
      order_A = jnp.argsort(group_A, stable=True)
      place_TJ = jnp.argsort(order_A).astype(jnp.int32).reshape(-1, per_token)
      size_E = jnp.bincount(group_A, length=num_local + 1)[:num_local].astype(
        jnp.int32
      )
      x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
      x_AD = routing.take(
        x_TD[None], order_A[None] // per_token, place_TJ[None]
      )[0]

      def product(name, x_AD):
        kernel_EDF, bias_EF = local[name]
        y_AF = mod_jax_kernels.grouped_dot(x_AD, kernel_EDF, size_E)
        if bias_EF is None:
          return y_AF
        if name == 'down':  # Add it once: `sum_over` below adds the shards.
          bias_EF = jnp.where(parallel.index_of('mlp') == 0, bias_EF, 0)
        bias_AF = bias_EF.at[group_A[order_A]].get(mode='fill', fill_value=0)
        return (y_AF + bias_AF).astype(y_AF.dtype)

      y_AD = self._run(product, x_AD)
      y_TJD = routing.take(
        y_AD[None], place_TJ.reshape(1, -1), order_A[None, :, None]
      ).reshape(*place_TJ.shape, -1)
      y_TD = _weighted(y_TJD, weight_BLJ.reshape(place_TJ.shape))
      y_TD = parallel.sum_over(parallel.sum_over(y_TD, 'mlp'), 'experts')
      return (y_TD.reshape(x_BLD.shape).astype(x_BLD.dtype),)

    token_axes = ('expert_batch', 'length', None)
    inputs, arrays = [token_axes] * 3, []
    for name, kernel_and_bias in weights.items():
      axes = [axis if axis == 'mlp' else None for axis in self._axes(name)]
      inputs += [('experts', *axes), ('experts', axes[-1])]
      arrays += kernel_and_bias
    (y_BLD,) = parallel.per_device(run, inputs, (token_axes,))(
      x_BLD, expert_BLJ, weight_BLJ, *arrays
    )
    return parallel.constrain(y_BLD, 'batch', 'length', 'act_embed')

  def _run(self, product, x):
    """Returns the experts' outputs; `product` applies a linear map by name."""
    x = x.astype(self.dtype)
    hidden = hidden_units(self.config.mlp.kind, lambda name: product(name, x))
    return product('down', hidden)


def _of_choices(value_BLE, chosen_BLKX, nobody):
  """Returns value_BLJ: the values of each token's choices.

  In token choice, J = K, and `nobody` is the value of a no-op. In expert
  choice, `chosen_BLKX` is None, J = E, and the result is `value_BLE`.
  """
  if chosen_BLKX is None:
    return value_BLE
  nulls = chosen_BLKX.shape[-1] - value_BLE.shape[-1]
  value_BLX = jnp.pad(
    value_BLE, ((0, 0), (0, 0), (0, nulls)), constant_values=nobody
  )
  return jnp.where(chosen_BLKX, value_BLX[:, :, None], 0).sum(axis=-1)


def _weighted(y, weight):
  """Returns the sum of y over the last axis of `weight`, weighted, in float32.

  An einsum would be slow on CPUs for so few terms, and accelerators would round
  its operands to bfloat16.
  """
  return (y * weight[..., None]).sum(axis=-2)
