"""Mixture-of-Depths: a block that runs on the chosen tokens only.

Raposo et al. 2024, Eq. 1: `x' = x + r · f(x̃)` for the k tokens with the
largest r, `x' = x` for the rest.
"""

from collections import Counter
import dataclasses
import functools
from typing import Annotated, Any, Literal

from flax import linen as nn
import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import errors, routing
from mod_jax.layers import rules, scores
from mod_jax.layers.attention import Score as AttentionScore
from mod_jax.layers.block import Block, BlockConfig
from mod_jax.layers.cache import KVCache
from mod_jax.layers.mode import Mode, RoutingMode, RuleName
from mod_jax.layers.rules import Rule
from mod_jax.layers.scores import RouterWeights, Score
from mod_jax.layers.token_info import TokenInfo

# In generation, inputs of at most this length skip rows without a chosen token.
# In longer inputs nearly every row has one.
_SHORT = 16

# Checkpoint name of the chosen indices. Rematerialisation saves them, because a
# recomputed top-k may choose other tokens.
SELECTION_NAME = 'mod_selection'

# `RoutingConfig` fields with which a model that starts from dense weights
# computes what the dense one does while all tokens are processed: the gate is 1
# at score 0, and the scores are near 0. The norm keeps them so although
# pretrained features are large; the nonzero std avoids ties, which top-k would
# break in favour of early tokens.
LIKE_DENSE = {
  'gate': 'one_plus_tanh',
  'router_norm': True,
  'router_std': 2e-4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
  """Which blocks are routed, on how many tokens, and how they are chosen."""

  # Fraction of tokens that a routed block processes: one number for all routed
  # blocks, or a list in the order of `layers` (by depth if that is None).
  capacity: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.125
  # Capacity of the last routed layer, as a fraction of the first one's.
  capacity_decay: Annotated[float, config_lib.Range(ge=1e-3, le=1e3)] = 1.0
  # `shifted_cosine` replaces `capacity` by half a cosine that falls with depth,
  # and keeps blocks dense where it is high (p-MoD).
  capacity_schedule: Literal['constant', 'shifted_cosine'] = 'constant'
  # Lower bound of each routed block's capacity; a warm-up lowers it in stages.
  capacity_floor: config_lib.Probability = 0.0
  period: config_lib.Unrolled = 2  # One block in every `period` is routed.
  offset: config_lib.Layer = 1  # Index of the routed block within a period.
  first: config_lib.Layer = 0  # No block before this one is routed.
  # Indices of the routed blocks, counted from 0; None = those that `period`,
  # `offset` and `first` select.
  layers: tuple[config_lib.Layer, ...] | None = None
  # Score by which tokens are chosen: a learned router, a control that ignores
  # the tokens (`gaussian`, `stride`), or the config of another score.
  score: Literal['learned', 'gaussian', 'stride'] | Score = 'learned'
  # Function of the score that multiplies the update; None = the default of the
  # score. Scores that ignore the tokens never multiply it.
  gate: (
    Literal['raw', 'sigmoid', 'alpha_sigmoid', 'one_plus_tanh', 'none'] | None
  ) = None
  gate_alpha: config_lib.Factor = 2.0  # Factor of the gate `alpha_sigmoid`.
  # Standard deviation of the learned router's initial weights; at 0 all tokens
  # start with the same score.
  router_std: config_lib.Weight = 0.02
  # Whether the learned router sees features scaled to a mean square of 1.
  router_norm: bool = False
  router_bias: bool = False  # Biases in the learned router; the paper has none.
  # Units of the learned router's hidden layer; 0 = a linear router.
  router_width: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  # Activation of that hidden layer.
  router_activation: scores.Activation = 'gelu'
  # Whether all routed blocks share one router (γ-MoD).
  shared_router: bool = False
  # Output for a token x with weight w and update f. `add`: x + w·f if chosen,
  # else x. `weigh_bypass`: x + w·f if chosen, else (1 - w)·x. `replace`:
  # w·(x + f) if chosen, else x.
  combine: Literal['add', 'weigh_bypass', 'replace'] = 'add'
  # Whether a block processes all tokens of a sequence or none, by whether their
  # mean score is above 0. Such a model cannot sample, since the choice depends
  # on the whole text; gradients need the module from `build(train=True)`.
  per_sequence: bool = False
  # Weight of the loss that pulls the fraction of tokens or sequences that want
  # to be processed towards the capacity; 0 = none. Not for top-k.
  balance_loss: config_lib.Weight = 0.0

  # Class constants, not fields; subclasses turn some of them into fields.
  router_loss = 0.0
  predictor_width = 0
  threshold_decay = 0.0
  keep_class_token = False
  train_rule = 'top_k'
  train_slack = 1.25

  def __post_init__(self):
    config_lib.validate(self)
    if not 0 <= self.offset < self.period:
      raise errors.UserError(
        f'offset={self.offset}: expected 0 <= offset < period={self.period}.'
      )
    if isinstance(self.scorer, scores.Learned) and self.gate == 'none':
      raise errors.UserError(
        "gate='none' leaves a learned router without a gradient: choose another"
        ' gate, or a score that is not learned.'
      )
    self._check_router()
    self._check_combine()
    if isinstance(self.capacity, tuple) and self.capacity_decay != 1:
      raise errors.UserError(
        f'capacity={self.capacity} says the capacity of every routed block, and'
        f' capacity_decay={self.capacity_decay} another: leave it at 1, or give'
        ' a single capacity.'
      )
    if self.capacity_schedule != 'constant' and (
      isinstance(self.capacity, tuple) or self.capacity_decay != 1
    ):
      raise errors.UserError(
        f'capacity_schedule={self.capacity_schedule!r} says the capacity of'
        ' every block: give no list as capacity, and leave capacity_decay at 1.'
      )
    if self.per_sequence:
      self._check_per_sequence()
    elif self.balance_loss and self.train_rule != 'router':
      raise errors.UserError(
        f'balance_loss={self.balance_loss}: top-k keeps to the capacity by'
        " itself; set train_rule='router' for tokens that decide for"
        ' themselves, per_sequence=True for sequences, or balance_loss=0.'
      )

  def _check_router(self):
    for name in ('router_bias', 'router_width', 'shared_router'):
      if getattr(self, name) and self.score != 'learned':
        raise errors.UserError(
          f'{name}={getattr(self, name)} and score={self.score!r}: it is for'
          " score='learned'; a score that is an object has fields of its own."
        )

  def _check_combine(self):
    if self.combine != 'add' and self.gate_kind == 'none':
      raise errors.UserError(
        f'combine={self.combine!r} and a score without a weight: name a gate,'
        " or set combine='add'."
      )
    if self.combine == 'weigh_bypass' and self.gate_kind != 'sigmoid':
      raise errors.UserError(
        f"combine='weigh_bypass' and gate={self.gate_kind!r}: the two paths"
        " share a weight between 0 and 1, so set gate='sigmoid'."
      )

  def _check_per_sequence(self):
    clash = [
      f'{name}={getattr(self, name)!r}'
      for name, required in (
        ('train_rule', 'top_k'),
        ('router_loss', 0),
        ('predictor_width', 0),
        ('threshold_decay', 0),
        ('keep_class_token', False),
      )
      if getattr(self, name) != required
    ]
    if clash:
      raise errors.UserError(
        f'per_sequence=True and {", ".join(clash)}: that is for choices among'
        ' the tokens of a sequence; set numbers to 0, and the others to their'
        ' defaults.'
      )
    if not isinstance(self.scorer, scores.Learned) or not self.balance_loss:
      raise errors.UserError(
        f'per_sequence=True, score={self.score!r} and'
        f' balance_loss={self.balance_loss}: a sequence enters by a learned'
        " score, and the loss alone keeps to the capacity; set score='learned'"
        ' and balance_loss, to .01 for example.'
      )

  @functools.cached_property
  def scorer(self) -> Score:
    """The score as an object."""
    if isinstance(self.score, Score):
      return self.score
    if self.score == 'learned':
      return scores.Learned(
        std=self.router_std,
        normalized=self.router_norm,
        bias=self.router_bias,
        hidden=self.router_width,
        activation=self.router_activation,
        shared=self.shared_router,
      )
    return scores.SCORES[self.score]()

  @property
  def has_predictor(self) -> bool:
    """Whether there is a predictor; scores without a gate need none."""
    return self.predictor_width > 0 and self.scorer.gates

  @property
  def gate_kind(self) -> str:
    """Name of the gate: `gate`, or the score's default if that is None."""
    if not self.scorer.gates:
      return 'none'
    return self.scorer.gate if self.gate is None else self.gate

  @property
  def causal_rules(self) -> tuple[str, ...]:
    """Names of the causal rules that this config's training makes usable."""
    return ()

  @property
  def cannot_sample(self) -> str:
    """Error message for sampling from a model without causal rules."""
    if self.per_sequence:
      return (
        'per_sequence=True decides by the whole text whether a sequence enters'
        ' a block, and text that is still to be written has no such score: this'
        ' model can be trained and evaluated, but cannot sample.'
      )
    return (
      'This model was trained for no causal rule, so it cannot sample: set'
      ' model.routing.router_loss, predictor_width or threshold_decay.'
    )

  @property
  def train_mode(self) -> RoutingMode:
    """Routing mode of training."""
    return RoutingMode(
      rule=self.train_rule, overflow='drop', slack=self.train_slack
    )

  def is_routed(self, layer: int) -> bool:
    if self.layers is not None:
      return layer in self.layers
    return layer >= self.first and layer % self.period == self.offset

  def capacities(self, num_layers: int) -> tuple[float | None, ...]:
    """Returns each block's capacity; None for a block that is not routed.

    Raises:
      UserError: `layers` names a block twice or one that the model does not
        have, or no block is routed.
    """
    if self.layers is not None and len(set(self.layers)) < len(self.layers):
      raise errors.UserError(
        f'routing.layers={self.layers} names a block twice: name each once.'
      )
    if self.layers is not None and not all(
      0 <= layer < num_layers for layer in self.layers
    ):
      raise errors.UserError(
        f'routing.layers={self.layers}: expected blocks between 0 and'
        f' {num_layers - 1}, since num_layers={num_layers}.'
      )
    routed = [i for i in range(num_layers) if self.is_routed(i)]
    if not routed:
      raise errors.UserError(
        f'routing leaves none of num_layers={num_layers} blocks routed: change'
        ' its offset, first or layers, add blocks, or set routing=None for a'
        ' dense model.'
      )
    values = routing.layer_capacities(
      self.capacity, len(routed), decay=self.capacity_decay
    )
    # A list follows the order of `layers`, `capacity_decay` the depth.
    listed = isinstance(self.capacity, tuple) and self.layers is not None
    by_layer = dict(zip(self.layers if listed else routed, values, strict=True))
    if self.capacity_schedule == 'shifted_cosine':
      ratios = routing.shifted_cosine(num_layers)
      by_layer = {i: ratios[i] for i in routed if ratios[i] is not None}
      if not by_layer:
        raise errors.UserError(
          "capacity_schedule='shifted_cosine' leaves the routed blocks of"
          f' num_layers={num_layers} dense: route deeper ones, or all'
          ' (period=1, offset=0).'
        )
    return tuple(
      max(by_layer[i], self.capacity_floor) if i in by_layer else None
      for i in range(num_layers)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoDConfig(RoutingConfig):
  """Mixture-of-Depths in a language model, with options for causal rules."""

  # Weight of the auxiliary BCE loss that trains the rule `router`; 0 = none.
  router_loss: config_lib.Weight = 0.01
  # Hidden units of the predictor, for the rule `predictor`; 0 = no predictor.
  predictor_width: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  # Decay, per microbatch, of the moving threshold, for the rule `threshold`; 0
  # disables it.
  threshold_decay: config_lib.Decay = 0.0
  # Rule that chooses tokens in training: top-k, or the causal rule that will be
  # used afterwards.
  train_rule: RuleName | Rule = 'top_k'
  # Slots of a block trained by a causal rule, as a multiple of its capacity.
  train_slack: Annotated[float, config_lib.Range(ge=1)] = 1.25

  def __post_init__(self):
    super().__post_init__()
    if self.scorer.needs_attention:
      raise errors.UserError(
        f'score={self.score!r}: the attention that a token receives comes from'
        ' later ones, too, which a language model must not see; choose another'
        ' score.'
      )
    rules_by_name = ('top_k', *self.causal_rules)
    if isinstance(self.train_rule, str) and (
      self.train_rule not in rules_by_name
    ):
      raise errors.UserError(
        f'train_rule={self.train_rule!r}: with these losses and thresholds the'
        f' choices are {", ".join(rules_by_name)}; set what the rule needs'
        ' (router_loss or balance_loss, predictor_width, threshold_decay), or'
        ' another rule.'
      )

  @property
  def causal_rules(self) -> tuple[str, ...]:
    """Names of the causal rules that this config's training makes usable.

    `router`: score above 0, as trained by the auxiliary or the balance loss;
    `predictor`: the predictor's logit above 0; `threshold`: score at least the
    moving average of the k-th best; `fixed`: for scores that ignore the tokens.
    The rule that chose tokens in training, if any, comes first.
    """
    if self.per_sequence:
      return ()
    trained = {
      'router': self.router_loss > 0 or self.balance_loss > 0,
      'predictor': self.predictor_width > 0,
      'threshold': self.threshold_decay > 0,
    }
    if not self.scorer.gates:
      trained = {'fixed': True}
    train_rule = self.train_rule
    if isinstance(train_rule, Rule):
      train_rule = train_rule.name
      trained[train_rule] = True
    usable = [rule for rule, is_trained in trained.items() if is_trained]
    return tuple(sorted(usable, key=lambda rule: rule != train_rule))

  def mode(self, rule: str, **kwargs) -> RoutingMode:
    """Returns the mode of a rule by name; keywords are other fields of it."""
    train_rule = self.train_rule
    if isinstance(train_rule, Rule) and train_rule.name == rule:
      return RoutingMode(rule=train_rule, **kwargs)
    return RoutingMode(rule=rule, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionRoutingConfig(RoutingConfig):
  """Routing in a vision transformer: MoD, or A-MoD by attention.

  The score `attention` is the mean attention that a token receives in the
  previous block (A-MoD, Gadhikar et al. 2024). It has no parameters and does
  not multiply the update; `gate='raw'` does so, for the paper's ablation.
  """

  capacity: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.5
  score: Literal['attention', 'learned', 'gaussian', 'stride'] | Score = (
    'attention'
  )
  keep_class_token: bool = False  # Always choose the class token.

  def capacities(self, num_layers: int) -> tuple[float | None, ...]:
    """Returns each block's capacity; None for a block that is not routed.

    Raises:
      UserError: as in `RoutingConfig.capacities`; or a block is routed by
        attention and the previous block has no attention map of all tokens.
    """
    capacities = super().capacities(num_layers)
    if self.scorer.needs_attention:
      for i, capacity in enumerate(capacities):
        if capacity is None:
          continue
        if i == 0 or capacities[i - 1] is not None:
          reason = (
            'has no block before it'
            if i == 0
            else f'comes after block {i - 1}, which is routed itself'
          )
          raise errors.UserError(
            f'routing by attention: block {i} {reason}, so there is no'
            ' attention map of all tokens to route by; choose other blocks (the'
            " default, every other one, is fine) or score='learned'."
          )
    return capacities


@flax.struct.dataclass
class Routing:
  """Routing decisions of one block, for losses, metrics and pictures.

  Attributes:
    score_BL: float32 scores.
    weight_BL: float32 factors on the update of a token if it is chosen.
    chosen_BL: whether the token was processed.
    overflow_B: int32 number of tokens that the rule chose but that got no slot.
    capacity: scalar, the fraction of tokens that the block should process.
    predictor_BL: float32 logits of the predictor, or None.
    threshold_B: float32 moving average of the k-th best score before this call,
      the same for all rows; None if the block keeps no average.
    top_k_BL: whether top-k chooses the token; None when decoding.
    kth_B: float32 lowest score among `top_k_BL`; None when decoding.
  """

  score_BL: jax.Array
  weight_BL: jax.Array
  chosen_BL: jax.Array
  overflow_B: jax.Array
  capacity: jax.Array
  predictor_BL: jax.Array | None = None
  threshold_B: jax.Array | None = None
  top_k_BL: jax.Array | None = None
  kth_B: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
  """One layer of a stack: a block and, optionally, its routing.

  Attributes:
    block: config of the block.
    routing: how tokens are chosen; None for a dense layer.
    capacity: fraction of tokens that a routed layer processes.
    attention_score: attention score to put into `aux['attention']`; or None.
    drop_rate: rate of stochastic depth in training.
    tells_features: whether training puts the layer's output into
      `aux['features']`.
  """

  block: BlockConfig
  routing: RoutingConfig | None = None
  capacity: float | None = None
  attention_score: AttentionScore | None = None
  drop_rate: float = 0.0
  tells_features: bool = False

  def tokens(self, length: int) -> int:
    """Returns the block's slots in training for a sequence of this length.

    All of them are computed. Top-k fills them all; if tokens or sequences
    decide for themselves, some stay empty.
    """
    if self.routing is None or self.routing.per_sequence:
      return length
    return self.routing.train_mode.slots(self.capacity, length)

  def flops(self, length: int, **kwargs) -> dict[str, int]:
    """Returns forward FLOPs by part: router on all tokens, block on k."""
    parts = self.block.flops(self.tokens(length), of=length, **kwargs)
    if self.routing is None:
      return parts
    width, hidden = self.block.attention.width, self.routing.predictor_width
    routing_parts = {'router': self.routing.scorer.flops(length, width)}
    if self.routing.has_predictor:
      routing_parts['predictor'] = 2 * length * hidden * (width + 1)
    # Sum: parts of the block may have the same names, such as `router`.
    return dict(Counter(parts) + Counter(routing_parts))


@flax.struct.dataclass
class LayerOutput:
  """What a layer returns.

  Attributes:
    x_BLD: output features.
    cache: the cache with the tokens added; None without a cache.
    aux: that of `BlockOutput`; a routed layer adds `router`, a `Routing`.
  """

  x_BLD: jax.Array
  cache: KVCache | None = None
  aux: dict[str, Any] = flax.struct.field(default_factory=dict)


class Predictor(nn.Module):
  """Predicts from one token alone whether top-k will choose it.

  It stops gradients to its input, so training it does not change the language
  model (Raposo et al. 2024, section 3.5).
  """

  hidden: int

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    # Features grow with depth, but the logits should not.
    x_BLD = jax.lax.stop_gradient(x_BLD).astype(jnp.float32)
    x_BLD = scores.scale_to_unit(x_BLD)

    def linear(features, name):
      return nn.Dense(
        features,
        # Accelerators must not round this to bfloat16, or forward pass and
        # decoding would disagree about logits near 0.
        precision='highest',
        kernel_init=nn.with_logical_partitioning(
          nn.initializers.lecun_normal(), ('replicated', 'replicated')
        ),
        bias_init=nn.with_logical_partitioning(
          nn.initializers.zeros, ('replicated',)
        ),
        name=name,
      )

    hidden_BLF = nn.gelu(linear(self.hidden, 'hidden')(x_BLD))
    return linear(1, 'logit')(hidden_BLF)[..., 0]


class Layer(nn.Module):
  """A block with its residual connection, routed if the config says so.

  A routed layer scores, selects, processes and combines. Its parameters are
  those of the dense block plus the router's, so dense checkpoints load.

  Collections: `params`; with `routing.threshold_decay` also `moving`, the
  moving average of the k-th best score (make it mutable to train it).
  Rng streams: `routing` for Gaussian scores; those of the block.
  """

  config: LayerConfig
  mode: Mode = Mode()

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    score_BL: jax.Array | None = None,
    router: RouterWeights | None = None,
  ) -> LayerOutput:
    """Returns the features after the layer, the cache and the aux.

    `cache` holds this block's keys and values in generation. `score_BL` is the
    attention that the tokens received in the previous block, for scores that
    need it. `router` is the router that all routed layers of a stack share;
    None if each has its own.
    """
    config = self.config
    block = Block(
      *(config.block, config.attention_score, config.drop_rate, self.mode),
      name='process',
    )
    nn.share_scope(self, block)
    if config.routing is None:
      output = block(x_BLD, info, cache)
      return LayerOutput(x_BLD + output.update_BLD, output.cache, output.aux)

    length = x_BLD.shape[1]
    mode, capacity = self.mode.routing, config.capacity
    routed = self._score(x_BLD, info, score_BL, router)
    top = None
    if cache is None or mode.causal_rule is None:
      top = self._top_k(routed.score_BL, info)
    if cache is None:
      routed = routed.replace(
        top_k_BL=routing.mark_tokens(top, length),
        kth_B=_last_score(routed.score_BL, top),
      )
    routed = routed.replace(threshold_B=self._threshold(routed))
    requested_BL = self._decide(routed, top, info)

    if cache is None:
      selection, count_B = top, None
      if mode.causal_rule is not None:
        slots = mode.slots(capacity, length)
        count_B = jnp.full(x_BLD.shape[0], slots)
        if info.valid_BL is not None:
          count_B = info.valid_BL.sum(axis=-1)
          count_B = mode.row_slots(capacity, length, count_B)
        selection = routing.select_decided(requested_BL, slots, count_B)
        selection = checkpoint_name(selection, SELECTION_NAME)
      chosen_BL = routing.mark_tokens(selection, length)
      # The loop over rows is not differentiable, cannot create parameters and
      # drops the aux of experts and adaptive modules.
      needs_full_pass = (
        self.mode.train or self.is_initializing() or mode.chunk == 0
      )
      needs_full_pass |= any(slot.tells for slot in config.block.slots.values())
      if config.routing.per_sequence and not needs_full_pass:
        output = self._run_rows(block, x_BLD, info, routed, chosen_BL, None)
      else:
        output = self._run(block, x_BLD, info, routed, selection, None, count_B)
    else:
      chosen_BL = cache.room(requested_BL)
      if length <= _SHORT and mode.chunk != 0:
        output = self._run_rows(block, x_BLD, info, routed, chosen_BL, cache)
      else:
        selection = routing.select_decided(chosen_BL, cache.slots)
        output = self._run(block, x_BLD, info, routed, selection, cache)
    overflow_B = (requested_BL & ~chosen_BL).sum(axis=-1, dtype=jnp.int32)
    routed = routed.replace(chosen_BL=chosen_BL, overflow_B=overflow_B)
    output = output.replace(aux=output.aux | {'router': routed})
    if config.routing.combine == 'weigh_bypass':
      factor_BL = jnp.where(chosen_BL, 1, 1 - routed.weight_BL)
      y_BLD = (output.x_BLD * factor_BL[..., None]).astype(x_BLD.dtype)
      output = output.replace(x_BLD=y_BLD)
    return output

  def _threshold(self, routed: Routing) -> jax.Array | None:
    """Returns the moving average before this call, and updates it."""
    decay = self.config.routing.threshold_decay
    stored = self.has_variable('moving', 'threshold')
    if not decay or not (stored or self.is_mutable_collection('moving')):
      if isinstance(self.mode.routing.causal_rule, rules.Threshold):
        raise errors.UserError(
          "rule='threshold' needs the moving averages of training: pass the"
          " 'moving' collection beside 'params'."
        )
      return None
    moving = self.variable('moving', 'threshold', routing.MovingThreshold.zeros)
    previous = moving.value
    updates = (
      self.is_mutable_collection('moving') and not self.is_initializing()
    )
    if updates and routed.kth_B is not None:
      moving.value = previous.update(routing.mean_of_rows(routed.kth_B), decay)
    return jnp.broadcast_to(previous.value(), routed.score_BL.shape[:1])

  def _score(self, x_BLD, info, attention_BL, router) -> Routing:
    config, capacity = self.config.routing, self.config.capacity
    batch, length, _ = x_BLD.shape
    if router is not None:
      score_BL = router.score(x_BLD)
    else:
      score_BL = config.scorer.run(self, x_BLD, info, capacity, attention_BL)
    if config.per_sequence:
      score_BL = _mean_of_row(score_BL, info.valid_BL)
    predictor_BL = None
    if config.has_predictor:
      predictor = Predictor(config.predictor_width, name='predictor')
      predictor_BL = predictor(x_BLD)
    return Routing(
      score_BL=score_BL,
      weight_BL=routing.gate(config.gate_kind, score_BL, config.gate_alpha),
      chosen_BL=jnp.zeros((batch, length), bool),
      overflow_B=jnp.zeros(batch, jnp.int32),
      capacity=jnp.float32(capacity),
      predictor_BL=predictor_BL,
    )

  def _top_k(self, score_BL, info) -> routing.Selection:
    """Selects tokens by scores of the whole sequence, without a causal rule."""
    capacity = self.config.capacity
    if self.config.routing.per_sequence:
      # Only the balance loss ties their fraction to the capacity. A capacity of
      # 1, with which a warm-up begins, must still mean all sequences.
      enters_BL = ~(score_BL <= 0) | (capacity >= 1)  # NaN enters.
      if info.valid_BL is not None:
        enters_BL &= info.valid_BL
      selection = routing.select_decided(enters_BL, score_BL.shape[1])
      return checkpoint_name(selection, SELECTION_NAME)
    k = routing.num_chosen(capacity, score_BL.shape[1])
    count_B = None
    if info.valid_BL is not None:
      count_B = routing.for_lengths(
        lambda n: routing.num_chosen(capacity, n),
        score_BL.shape[1],
        info.valid_BL.sum(axis=-1),
      )
    if self.config.routing.keep_class_token:
      score_BL = score_BL.at[:, 0].set(jnp.inf)
    selection = routing.select_top_k(score_BL, k, info.valid_BL, count_B)
    return checkpoint_name(selection, SELECTION_NAME)

  def _decide(self, routed: Routing, top, info) -> jax.Array:
    """Returns which real tokens the rule wants to be processed."""
    rule = self.mode.routing.causal_rule
    if rule is None:
      return routing.mark_tokens(top, routed.score_BL.shape[1])
    config = self.config
    requested_BL = rule.wants(routed, config.routing.scorer, config.capacity)
    # All tokens, whatever scores say that are not trained yet: a model that was
    # just routed, or whose warm-up begins, computes what its dense twin does.
    if config.capacity >= 1 and not isinstance(rule, rules.Never):
      requested_BL = jnp.ones_like(requested_BL)
    return (
      requested_BL if info.valid_BL is None else requested_BL & info.valid_BL
    )

  def _run(
    self, block, x_BLD, info, routed, selection, cache, count_B=None
  ) -> LayerOutput:
    """Gathers the selected tokens, processes them and adds their updates."""
    index_BK, valid_BK = selection.index_BK, selection.valid_BK
    x_BKD = routing.gather_tokens(x_BLD, index_BK)
    output = block(x_BKD, info.gather(selection, count_B), cache)
    weight_BK = routing.gather_tokens(routed.weight_BL, index_BK)
    update_BKD = self._weigh(x_BKD, output.update_BLD, weight_BK, valid_BK)
    x_BLD = routing.scatter_add_tokens(x_BLD, index_BK, update_BKD)
    return LayerOutput(x_BLD, output.cache, output.aux)

  def _run_rows(
    self, block, x_BLD, info, routed, chosen_BL, cache
  ) -> LayerOutput:
    """Processes the rows that have chosen tokens, a few rows at a time.

    Keeps shapes static and skips rows without a chosen token: rows are sorted
    so that those with one come first, and a loop processes chunks of them.
    Their other tokens are computed too, and their updates discarded. For short
    inputs, and for routing of whole sequences.
    """
    batch, length, _ = x_BLD.shape
    fraction = self.config.capacity
    if not self.config.routing.per_sequence:
      fraction = 1 - (1 - fraction) ** length
    chunk = self.mode.routing.rows_at_a_time(fraction, batch)
    routed_B = chosen_BL.any(axis=-1)
    first_B = jnp.argsort(~routed_B, stable=True)
    count = routed_B.sum(dtype=jnp.int32)
    # The last chunk is padded with a row index beyond the batch; gathers clip
    # it, and scatters drop it.
    rows_P = jnp.pad(first_B, (0, -batch % chunk), constant_values=batch)
    weight_BL = routed.weight_BL

    def has_rows_left(_, carry):
      return carry[0] < count

    def step(block, carry):
      start, x_BLD, cache = carry
      rows_R = jax.lax.dynamic_slice(rows_P, (start,), (chunk,))
      valid_RL = (start + jnp.arange(chunk) < count)[:, None]
      valid_RL &= chosen_BL.at[rows_R].get(mode='clip')
      x_RLD = x_BLD.at[rows_R].get(mode='clip')
      output = block(x_RLD, info.rows(rows_R, valid_RL), cache, rows_R)
      weight_RL = weight_BL.at[rows_R].get(mode='clip')
      update_RLD = self._weigh(x_RLD, output.update_BLD, weight_RL, valid_RL)
      x_BLD = x_BLD.at[rows_R].add(update_RLD.astype(x_BLD.dtype), mode='drop')
      return start + chunk, x_BLD, output.cache

    carry = (jnp.zeros((), jnp.int32), x_BLD, cache)
    _, x_BLD, cache = nn.while_loop(
      has_rows_left,
      step,
      block,
      carry,
      broadcast_variables=('params', 'moving'),
    )
    return LayerOutput(x_BLD, cache)

  def _weigh(self, x_BKD, update_BKD, weight_BK, valid_BK):
    """Returns the gated updates in float32, with exact zeros in empty slots."""
    weight_BK1 = weight_BK[..., None]
    update_BKD = update_BKD * weight_BK1
    if self.config.routing.combine == 'replace':
      # x + update = w·(x + f).
      update_BKD += (weight_BK1 - 1) * x_BKD
    if valid_BK is not None:
      update_BKD = jnp.where(valid_BK[..., None], update_BKD, 0)
    return update_BKD


def _mean_of_row(score_BL, valid_BL):
  """Returns each row's mean over real tokens, broadcast to all of its tokens.

  It is 0 in rows without real tokens: NaN would spread to all gradients.
  """
  if valid_BL is None:
    valid_BL = jnp.ones(score_BL.shape, bool)
  total_B1 = jnp.where(valid_BL, score_BL, 0).sum(axis=-1, keepdims=True)
  count_B1 = jnp.maximum(valid_BL.sum(axis=-1, keepdims=True), 1)
  return jnp.broadcast_to(total_B1 / count_B1, score_BL.shape)


def _last_score(score_BL, top: routing.Selection):
  """Returns the lowest score of each row's chosen tokens; inf without any."""
  score_BK = jnp.take_along_axis(score_BL, top.index_BK, axis=-1)
  if top.valid_BK is not None:
    score_BK = jnp.where(top.valid_BK, score_BK, jnp.inf)
  return score_BK.min(axis=-1)
