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

# When generating, pieces of up to so many tokens are processed row by row, and
# a row is passed by if none of them is chosen; of longer ones hardly any is.
_SHORT = 16

# Chosen indices carry this name, so that rematerialisation can keep them: a
# top-k computed again may choose other tokens.
SELECTION_NAME = 'mod_selection'

# Fields of a routing whose model begins as the dense one with whose weights it
# starts, for as long as all tokens are processed: scores near 0, whatever the
# norm of the features is, which in pretrained models is large, and a gate that
# is 1 there. They are not 0 exactly, which would have every token tie, and the
# first of a sequence chosen.
LIKE_DENSE = {
  'gate': 'one_plus_tanh',
  'router_norm': True,
  'router_std': 2e-4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
  """Which blocks are routed, on how many tokens, and how they are chosen."""

  # Fraction of tokens that a routed block processes: one for all blocks, or one
  # for each, in the order of `layers` or else of depth.
  capacity: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.125
  # Capacity of the last routed layer, as a fraction of the first one's.
  capacity_decay: Annotated[float, config_lib.Range(ge=1e-3, le=1e3)] = 1.0
  # `shifted_cosine` lets the capacity fall with depth along half a cosine, in
  # place of `capacity`, and leaves blocks dense where it is high: p-MoD.
  capacity_schedule: Literal['constant', 'shifted_cosine'] = 'constant'
  # No routed layer goes below this capacity; a warm-up lowers it in stages.
  capacity_floor: config_lib.Probability = 0.0
  period: config_lib.Unrolled = 2  # One block in so many is routed.
  offset: config_lib.Layer = 1  # The first routed block, counted from 0.
  first: config_lib.Layer = 0  # No block before this one is routed.
  # The routed blocks, counted from 0; None leaves it to the three above.
  layers: tuple[config_lib.Layer, ...] | None = None
  # What tokens are chosen by: a learned router, or a control that does not look
  # at them; any other by its config.
  score: Literal['learned', 'gaussian', 'stride'] | Score = 'learned'
  # How a score weighs the update; None leaves it to the score. Scores that do
  # not look at the tokens never weigh it.
  gate: (
    Literal['raw', 'sigmoid', 'alpha_sigmoid', 'one_plus_tanh', 'none'] | None
  ) = None
  gate_alpha: config_lib.Factor = 2.0  # The factor of the gate alpha_sigmoid.
  # Standard deviation of the initial weights of the score `learned`; with 0 all
  # tokens begin with the same score.
  router_std: config_lib.Weight = 0.02
  # Whether that router sees features scaled to a mean square of 1.
  router_norm: bool = False
  router_bias: bool = False  # Whether it has biases; the paper's has none.
  # Units of its hidden layer; 0 = none, a linear map.
  router_width: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  router_activation: scores.Activation = 'gelu'  # Of that layer.
  # Whether all routed blocks have one router in common: γ-MoD.
  shared_router: bool = False
  # What becomes of a token x with weight w and update f: `add` gives x + w·f to
  # the chosen ones, and x to others; `weigh_bypass` gives others (1 - w)·x;
  # `replace` gives w·(x + f) to the chosen ones.
  combine: Literal['add', 'weigh_bypass', 'replace'] = 'add'
  # Whether a sequence enters as a whole: where the mean score of its tokens is
  # above 0. It cannot sample, since the choice depends on the whole text;
  # gradients need the module that `build(train=True)` returns.
  per_sequence: bool = False
  # Weight of the loss that pulls the share that wants in towards the capacity,
  # where tokens or sequences decide for themselves; 0 = none.
  balance_loss: config_lib.Weight = 0.0

  # Constants here; `MoDConfig` or `VisionRoutingConfig` makes fields of them.
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
    wrong = [
      f'{name}={getattr(self, name)!r}'
      for name, only in (
        ('train_rule', 'top_k'),
        ('router_loss', 0),
        ('predictor_width', 0),
        ('threshold_decay', 0),
        ('keep_class_token', False),
      )
      if getattr(self, name) != only
    ]
    if wrong:
      raise errors.UserError(
        f'per_sequence=True and {", ".join(wrong)}: that is for choices among'
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
    """Whether there is a predictor; scores that ignore tokens need none."""
    return self.predictor_width > 0 and self.scorer.gates

  @property
  def gate_kind(self) -> str:
    """The gate, that of the score where none is named."""
    if not self.scorer.gates:
      return 'none'
    return self.scorer.gate if self.gate is None else self.gate

  @property
  def causal_rules(self) -> tuple[str, ...]:
    """Names of the causal rules that this config's training makes usable."""
    return ()

  @property
  def cannot_sample(self) -> str:
    """Why a model without causal rules cannot sample: a sentence."""
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
    """How training chooses."""
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
      UserError: a block that the model does not have or that is named twice,
        or none routed.
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
    # A decay follows depth, but a list of capacities the order of `layers`.
    given = isinstance(self.capacity, tuple) and self.layers is not None
    named = dict(zip(self.layers if given else routed, values, strict=True))
    if self.capacity_schedule == 'shifted_cosine':
      ratios = routing.shifted_cosine(num_layers)
      named = {i: ratios[i] for i in routed if ratios[i] is not None}
      if not named:
        raise errors.UserError(
          "capacity_schedule='shifted_cosine' leaves the routed blocks of"
          f' num_layers={num_layers} dense: route deeper ones, or all'
          ' (period=1, offset=0).'
        )
    return tuple(
      max(named[i], self.capacity_floor) if i in named else None
      for i in range(num_layers)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoDConfig(RoutingConfig):
  """Mixture-of-Depths in a language model, with what makes it causal."""

  # What a causal rule needs at training; see `causal_rules`.
  # Weight of the auxiliary BCE; 0 = none.
  router_loss: config_lib.Weight = 0.01
  # Hidden units of the predictor; 0 = none.
  predictor_width: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  # Decay of the moving threshold, applied once per microbatch; 0 disables it.
  threshold_decay: config_lib.Decay = 0.0
  # How training chooses: by top-k, or by the causal rule that will be used
  # after it.
  train_rule: RuleName | Rule = 'top_k'
  # Slots of a block that is trained by a causal rule, over its capacity.
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

    `router`: score above 0 (what the auxiliary loss trains, or the balance
    loss); `predictor`: its logit above 0; `threshold`: score at least the
    moving average of the k-th best; `fixed`: for scores that do not look at the
    tokens. The first one is that which training chose by, if any.
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
    own = self.train_rule
    if isinstance(own, Rule):
      own = own.name
      trained[own] = True
    usable = [rule for rule, yes in trained.items() if yes]
    return tuple(sorted(usable, key=lambda rule: rule != own))

  def mode(self, rule: str, **kwargs) -> RoutingMode:
    """Returns the mode of a rule by name; keywords are other fields of it."""
    own = self.train_rule
    if isinstance(own, Rule) and own.name == rule:
      return RoutingMode(rule=own, **kwargs)
    return RoutingMode(rule=rule, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionRoutingConfig(RoutingConfig):
  """Routing in a vision transformer: MoD, or A-MoD by attention.

  The score `attention` is the mean attention that a token receives in the block
  before (A-MoD, Gadhikar et al. 2024): no parameters, and no factor on the
  update. `gate='raw'` multiplies the update by the score, for the ablation.
  """

  capacity: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.5
  score: Literal['attention', 'learned', 'gaussian', 'stride'] | Score = (
    'attention'
  )
  keep_class_token: bool = False  # It is always one of the k.

  def capacities(self, num_layers: int) -> tuple[float | None, ...]:
    """As `RoutingConfig.capacities`.

    Raises:
      UserError: also for a block routed by an attention map that the block
        before does not have.
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
  """What a routed block tells: for losses, metrics and pictures.

  Attributes:
    score_BL: float32 scores.
    weight_BL: float32 factors on the update, were the token chosen.
    chosen_BL: the tokens that were processed.
    overflow_B: int32 tokens that the rule chose and that found no slot.
    capacity: scalar, the fraction of tokens that the block is to process.
    predictor_BL: float32 logits of the predictor, or None.
    threshold_B: float32, the moving average of the k-th best score before this
      call, the same for all rows; None where there is none.
    top_k_BL: what top-k chooses by these scores; None when decoding.
    kth_B: float32, the lowest score among `top_k_BL`; None when decoding.
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
  """One layer of a stack: a block, and how it is routed if it is.

  Attributes:
    block: what is run.
    routing: says how tokens are chosen; None for a dense layer.
    capacity: fraction of tokens that a routed layer processes.
    attention_score: which attention score goes to `aux['attention']`; or None.
    drop_rate: of stochastic depth, when training.
    tells_features: whether the features after it go to `aux['features']` when
      training.
  """

  block: BlockConfig
  routing: RoutingConfig | None = None
  capacity: float | None = None
  attention_score: AttentionScore | None = None
  drop_rate: float = 0.0
  tells_features: bool = False

  def tokens(self, length: int) -> int:
    """Returns how many of a sequence's tokens the block has slots for.

    In training, where all slots are computed. By top-k they are filled; where
    tokens or sequences decide for themselves, some stay empty.
    """
    if self.routing is None or self.routing.per_sequence:
      return length
    return self.routing.train_mode.slots(self.capacity, length)

  def flops(self, length: int, **kwargs) -> dict[str, int]:
    """Returns forward FLOPs by part: routing on all tokens, the rest on k."""
    parts = self.block.flops(self.tokens(length), of=length, **kwargs)
    if self.routing is None:
      return parts
    width, hidden = self.block.attention.width, self.routing.predictor_width
    routing_parts = {'router': self.routing.scorer.flops(length, width)}
    if self.routing.has_predictor:
      routing_parts['predictor'] = 2 * length * hidden * (width + 1)
    # Added, since what stands in the block may have parts of the same names.
    return dict(Counter(parts) + Counter(routing_parts))


@flax.struct.dataclass
class LayerOutput:
  """What a layer returns.

  Attributes:
    x_BLD: the features after it.
    cache: the cache with the tokens added; None without one.
    aux: as of `BlockOutput`; and `router`, a `Routing`, of a routed layer.
  """

  x_BLD: jax.Array
  cache: KVCache | None = None
  aux: dict[str, Any] = flax.struct.field(default_factory=dict)


class Predictor(nn.Module):
  """Guesses from one token alone whether top-k will choose it.

  It reads a copy of the features that no gradient passes, so training it
  leaves the language model untouched (Raposo et al. 2024, section 3.5).
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
  """A block and its residual connection; routed, where its config says so.

  A routed one: score, select, process, combine. Its parameters are those of
  the dense block and, beside them, what routes: a dense checkpoint fits as it
  is.

  Collections: `params`; and `moving`, the moving average of the k-th best
  score, where `routing.threshold_decay` asks for it (make it mutable to train
  it). Rng streams: `routing` for Gaussian scores; those of the block.
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

    `cache` holds this block's keys and values, when generating. `score_BL` is
    the attention that the tokens received in the block before, for scores that
    need it. `router` is what all routed layers of a stack have in common; None
    where each has its own.
    """
    config = self.config
    block = Block(
      *(config.block, config.attention_score, config.drop_rate, self.mode),
      name='process',
    )
    nn.share_scope(self, block)
    if config.routing is None:
      done = block(x_BLD, info, cache)
      return LayerOutput(x_BLD + done.update_BLD, done.cache, done.aux)

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
    wanted_BL = self._decide(routed, top, info)

    if cache is None:
      selection, count_B = top, None
      if mode.causal_rule is not None:
        slots = mode.slots(capacity, length)
        count_B = jnp.full(len(x_BLD), slots)
        if info.valid_BL is not None:
          count_B = info.valid_BL.sum(axis=-1)
          count_B = mode.row_slots(capacity, length, count_B)
        selection = routing.select_decided(wanted_BL, slots, count_B)
        selection = checkpoint_name(selection, SELECTION_NAME)
      chosen_BL = routing.mark_tokens(selection, length)
      # The loop over rows passes no gradient back, makes no parameters, and
      # keeps nothing of what experts and adaptive modules tell.
      hides = self.mode.train or self.is_initializing() or mode.chunk == 0
      hides |= any(slot.tells for slot in config.block.slots.values())
      if config.routing.per_sequence and not hides:
        done = self._run_rows(block, x_BLD, info, routed, chosen_BL, None)
      else:
        done = self._run(block, x_BLD, info, routed, selection, None, count_B)
    else:
      chosen_BL = cache.room(wanted_BL)
      if length <= _SHORT and mode.chunk != 0:
        done = self._run_rows(block, x_BLD, info, routed, chosen_BL, cache)
      else:
        selection = routing.select_decided(chosen_BL, cache.slots)
        done = self._run(block, x_BLD, info, routed, selection, cache)
    overflow_B = (wanted_BL & ~chosen_BL).sum(axis=-1, dtype=jnp.int32)
    routed = routed.replace(chosen_BL=chosen_BL, overflow_B=overflow_B)
    done = done.replace(aux=done.aux | {'router': routed})
    if config.routing.combine == 'weigh_bypass':
      left_BL = jnp.where(chosen_BL, 1, 1 - routed.weight_BL)
      y_BLD = (done.x_BLD * left_BL[..., None]).astype(x_BLD.dtype)
      done = done.replace(x_BLD=y_BLD)
    return done

  def _threshold(self, routed: Routing) -> jax.Array | None:
    """Returns the moving average before this call, and then moves it on."""
    decay = self.config.routing.threshold_decay
    kept = self.has_variable('moving', 'threshold')
    if not decay or not (kept or self.is_mutable_collection('moving')):
      if isinstance(self.mode.routing.causal_rule, rules.Threshold):
        raise errors.UserError(
          "rule='threshold' needs the moving averages of training: pass the"
          " 'moving' collection beside 'params'."
        )
      return None
    moving = self.variable('moving', 'threshold', routing.MovingThreshold.zeros)
    before = moving.value
    trains = self.is_mutable_collection('moving') and not self.is_initializing()
    if trains and routed.kth_B is not None:
      moving.value = before.update(routing.mean_of_rows(routed.kth_B), decay)
    return jnp.broadcast_to(before.value(), routed.score_BL.shape[:1])

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
    """Chooses with all tokens in sight."""
    capacity = self.config.capacity
    if self.config.routing.per_sequence:
      # Their share only comes to the capacity by the balance loss. But 1, with
      # which a warm-up begins, means all of them.
      enters_BL = ~(score_BL <= 0) | (capacity >= 1)  # NaN: see `rules.Rule`.
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
    wanted_BL = rule.wants(routed, config.routing.scorer, config.capacity)
    if self.mode.train and config.capacity >= 1:  # As in `_top_k`.
      wanted_BL = jnp.ones_like(wanted_BL)
    return wanted_BL if info.valid_BL is None else wanted_BL & info.valid_BL

  def _run(
    self, block, x_BLD, info, routed, selection, cache, count_B=None
  ) -> LayerOutput:
    """Gathers the selected tokens, processes them, adds the update."""
    index_BK, valid_BK = selection.index_BK, selection.valid_BK
    x_BKD = routing.gather_tokens(x_BLD, index_BK)
    done = block(x_BKD, info.gather(selection, count_B), cache)
    weight_BK = routing.gather_tokens(routed.weight_BL, index_BK)
    update_BKD = self._weigh(x_BKD, done.update_BLD, weight_BK, valid_BK)
    x_BLD = routing.scatter_add_tokens(x_BLD, index_BK, update_BKD)
    return LayerOutput(x_BLD, done.cache, done.aux)

  def _run_rows(
    self, block, x_BLD, info, routed, chosen_BL, cache
  ) -> LayerOutput:
    """Processes the rows that have chosen tokens, a few rows at a time.

    Static shapes, any number of routed rows, and no work where there are
    none: the rows with a chosen token come first, and a loop takes chunks of
    them. Their other tokens are computed along, and leave no trace. For a few
    tokens of each row, and for sequences that enter as a whole.
    """
    batch, length, _ = x_BLD.shape
    share = self.config.capacity
    if not self.config.routing.per_sequence:
      share = 1 - (1 - share) ** length
    chunk = self.mode.routing.rows_at_a_time(share, batch)
    routed_B = chosen_BL.any(axis=-1)
    first_B = jnp.argsort(~routed_B, stable=True)
    count = routed_B.sum(dtype=jnp.int32)
    # The last chunk is filled up with a row number beyond the batch, which is
    # clipped in reading and dropped in writing.
    rows_P = jnp.pad(first_B, (0, -batch % chunk), constant_values=batch)
    weight_BL = routed.weight_BL

    def more(_, carry):
      return carry[0] < count

    def step(block, carry):
      start, x_BLD, cache = carry
      rows_R = jax.lax.dynamic_slice(rows_P, (start,), (chunk,))
      valid_RL = (start + jnp.arange(chunk) < count)[:, None]
      valid_RL &= chosen_BL.at[rows_R].get(mode='clip')
      x_RLD = x_BLD.at[rows_R].get(mode='clip')
      done = block(x_RLD, info.rows(rows_R, valid_RL), cache, rows_R)
      weight_RL = weight_BL.at[rows_R].get(mode='clip')
      update_RLD = self._weigh(x_RLD, done.update_BLD, weight_RL, valid_RL)
      x_BLD = x_BLD.at[rows_R].add(update_RLD.astype(x_BLD.dtype), mode='drop')
      return start + chunk, x_BLD, done.cache

    carry = (jnp.zeros((), jnp.int32), x_BLD, cache)
    _, x_BLD, cache = nn.while_loop(
      more, step, block, carry, broadcast_variables=('params', 'moving')
    )
    return LayerOutput(x_BLD, cache)

  def _weigh(self, x_BKD, update_BKD, weight_BK, valid_BK):
    """Returns what is added to the chosen tokens, in float32.

    Updates are scaled by the gate, and empty slots get exact zeros.
    """
    weight_BK1 = weight_BK[..., None]
    update_BKD = update_BKD * weight_BK1
    if self.config.routing.combine == 'replace':
      # To x is added what makes it w·(x + f).
      update_BKD += (weight_BK1 - 1) * x_BKD
    if valid_BK is not None:
      update_BKD = jnp.where(valid_BK[..., None], update_BKD, 0)
    return update_BKD


def _mean_of_row(score_BL, valid_BL):
  """Returns each row's mean over real tokens, at all of them; 0 if it has none.

  No float of a padded row may be NaN, or the gradient of all would be.
  """
  if valid_BL is None:
    valid_BL = jnp.ones(score_BL.shape, bool)
  total_B1 = jnp.where(valid_BL, score_BL, 0).sum(axis=-1, keepdims=True)
  count_B1 = jnp.maximum(valid_BL.sum(axis=-1, keepdims=True), 1)
  return jnp.broadcast_to(total_B1 / count_B1, score_BL.shape)


def _last_score(score_BL, top: routing.Selection):
  """Returns the least score of each row's chosen tokens; inf if it has none."""
  score_BK = jnp.take_along_axis(score_BL, top.index_BK, axis=-1)
  if top.valid_BK is not None:
    score_BK = jnp.where(top.valid_BK, score_BK, jnp.inf)
  return score_BK.min(axis=-1)
