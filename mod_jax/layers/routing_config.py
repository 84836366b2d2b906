"""Which blocks are routed, and how many tokens they choose by which scores."""

import dataclasses
import functools
from typing import Annotated, Literal

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.errors import require
from mod_jax.layers import scores
from mod_jax.layers.mode import Part, RoutingMode, RuleName
from mod_jax.layers.rules import Rule
from mod_jax.layers.scores import Score

# `RoutingConfig` fields for a model that starts from dense weights. While all
# tokens are processed, its outputs are nearly those of the dense model: the
# gate is 1 at score 0, and the scores are near 0. `router_norm` keeps the
# scores near 0 although pretrained features are large. A nonzero std avoids
# equal scores, of which top-k would choose those of early tokens.
LIKE_DENSE = {
  'gate': 'one_plus_tanh',
  'router_norm': True,
  'router_std': 2e-4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig:
  """Which blocks are routed; how many tokens they choose, by which scores."""

  # Fraction of tokens that a routed block processes: one number for all routed
  # blocks, or a list in the order of `layers` (by depth if that is None).
  capacity: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.125
  # Capacity of the last routed layer, as a fraction of the first one's.
  capacity_decay: Annotated[float, config_lib.Range(ge=1e-3, le=1e3)] = 1.0
  # `shifted_cosine` replaces `capacity` by a cosine that falls from 1 to 0 with
  # depth; blocks above .85 are dense, and none is below .15 (p-MoD).
  capacity_schedule: Literal['constant', 'shifted_cosine'] = 'constant'
  # Lower bound of each routed block's capacity; a warm-up lowers it in stages.
  capacity_floor: config_lib.Probability = 0.0
  period: config_lib.Unrolled = 2  # One block in every `period` is routed.
  offset: config_lib.Layer = 1  # Index of the routed block within a period.
  first: config_lib.Layer = 0  # No block before this one is routed.
  # Indices of the routed blocks, counted from 0; None = those that `period`,
  # `offset` and `first` select.
  layers: tuple[config_lib.Layer, ...] | None = None
  # Score by which tokens are chosen: a learned router's output (`learned`), a
  # control that ignores the tokens (`gaussian`, `stride`), the attention that
  # the prompt's last token gives to image tokens (`last_attention`), or the
  # config of another score.
  score: Literal['learned', 'gaussian', 'stride', 'last_attention'] | Score = (
    'learned'
  )
  # Function of the score that multiplies the update; None = the default of the
  # score. Scores that ignore the tokens never multiply it.
  gate: Literal[routing.GATES] | None = None
  # Factor α in the gates `alpha_sigmoid`, α · sigmoid, and `alpha_tanh`,
  # 1 + α · tanh.
  gate_alpha: config_lib.Factor = 2.0
  # Kinds of token, of `token_info.KINDS`, among which a block chooses; None =
  # all tokens. Capacity is the fraction of these kinds that is chosen. Tokens
  # of other kinds, such as those that a model generates, always enter, with
  # weight 1. The choice is by top-k, whatever the routing rule: in generation
  # all tokens of these kinds are in the prompt. In training with several
  # questions in a row, the choice also depends on the later ones. Only tokens
  # of text with pictures (`VLMConfig`) have kinds.
  kinds: tuple[Literal['image', 'text', 'question'], ...] | None = None
  # Standard deviation of the learned router's initial weights; at 0 all tokens
  # start with the same score.
  router_std: config_lib.Weight = 0.02
  # Whether the learned router sees features scaled to a mean square of 1.
  router_norm: bool = False
  router_bias: bool = False  # Biases in the learned router; MoD's has none.
  # Units of the learned router's hidden layer; 0 = a linear router.
  router_width: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  # Activation of the learned router's hidden layer.
  router_activation: scores.Activation = 'gelu'
  # Whether all routed blocks share one router (γ-MoD).
  shared_router: bool = False
  # Output for a token x with weight w and update f. `add`: x + w·f if chosen,
  # else x. `weigh_bypass`: x + w·f if chosen, else (1 - w)·x. `replace`:
  # w·(x + f) if chosen, else x.
  combine: Literal['add', 'weigh_bypass', 'replace'] = 'add'
  # Whether a block processes all tokens of a sequence if their mean score is
  # above 0, and else none. Such a model cannot sample, since the choice depends
  # on the whole text. For gradients use the module of `build(train=True)`: any
  # other module may skip sequences by a loop that cannot be differentiated.
  per_sequence: bool = False
  # Weight of the loss that pulls the fraction of tokens (with `per_sequence`,
  # of sequences) that score above 0 towards the capacity; 0 = no such loss. It
  # must be 0 unless train_rule='router' or per_sequence=True, because top-k
  # chooses exactly the capacity anyway.
  balance_loss: config_lib.Weight = 0.0

  # Class constants, not fields; subclasses turn some of them into fields.
  router_loss = 0.0
  predictor_width = 0
  threshold_decay = 0.0
  keep_class_token = False
  train_rule = 'top_k'
  part = 'block'
  train_slack = 1.25

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.offset < self.period, 'offset < period', 'offset', 'period')
    learned = isinstance(self.scorer, scores.Learned)
    check(
      not learned or self.gate != 'none',
      'another gate, since a learned router gets its gradient through it',
      'gate',
    )
    for name in ('router_bias', 'router_width', 'shared_router'):
      check(
        not getattr(self, name) or self.score == 'learned',
        "score='learned', since a score that is an object has its own fields",
        *(name, 'score'),
      )
    check(
      self.combine == 'add' or self.gate_kind != 'none',
      "a gate to weigh by, or combine='add'",
      *('combine', 'score', 'gate'),
    )
    check(
      self.combine != 'weigh_bypass' or self.gate_kind == 'sigmoid',
      "gate='sigmoid', since the two paths share a weight between 0 and 1",
      *('combine', 'gate'),
    )
    ways = ('capacity', 'capacity_decay', 'capacity_schedule')
    check(
      isinstance(self.capacity, tuple)
      + (self.capacity_decay != 1)
      + (self.capacity_schedule != 'constant')
      < 2,
      'one way only to give blocks different capacities',
      *ways,
    )
    check(
      self.per_sequence or not self.balance_loss or self.train_rule == 'router',
      "balance_loss=0, as top-k keeps to the capacity, train_rule='router' or"
      ' per_sequence=True',
      *('balance_loss', 'train_rule'),
    )
    check(self.kinds != (), 'None for tokens of all kinds, or some', 'kinds')
    if self.kinds is not None:
      of_all = {'per_sequence': False, 'predictor_width': 0}
      of_all |= {'threshold_decay': 0, 'train_rule': 'top_k'}
      for name, neutral in of_all.items():
        check(
          getattr(self, name) == neutral,
          f'{name}={neutral!r}, since choices among given kinds of token are'
          ' by top-k',
          *('kinds', name),
        )
    if self.per_sequence:
      check(
        learned and self.balance_loss,
        "score='learned' and a balance_loss such as .01, by which sequences"
        ' enter and keep to the capacity',
        *('per_sequence', 'score', 'balance_loss'),
      )
      token_choice = {'train_rule': 'top_k', 'router_loss': 0}
      token_choice |= {'predictor_width': 0, 'threshold_decay': 0}
      for name, neutral in (token_choice | {'keep_class_token': False}).items():
        check(
          getattr(self, name) == neutral,
          f'{name}={neutral!r}, since it is for choices among tokens',
          *('per_sequence', name),
        )

  @functools.cached_property
  def scorer(self) -> Score:
    """The config of the score, also if `score` is only its name."""
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
    """Whether there is a predictor; scores that ignore the tokens need none."""
    return self.predictor_width > 0 and self.scorer.gates

  @property
  def gate_kind(self) -> str:
    """Name of the gate: `gate`, or the score's if None; `none` for no gate."""
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
    """The mode in training: `train_rule`, and slots by `train_slack`."""
    return RoutingMode(
      rule=self.train_rule, overflow='drop', slack=self.train_slack
    )

  def is_routed(self, layer: int) -> bool:
    if self.layers is not None:
      return layer in self.layers
    return layer >= self.first and layer % self.period == self.offset

  def capacities(self, num_layers: int) -> tuple[float | None, ...]:
    """Returns each block's capacity; None for a block that is not routed.

    Raises UserError if no block is routed, or `layers` has unsuitable indices.
    """
    layers = self.layers
    if layers is not None:
      require(
        len(set(layers)) == len(layers) and max(layers, default=0) < num_layers,
        f'different blocks from 0 to {num_layers - 1}',
        **{'routing.layers': layers},
      )
    routed = [i for i in range(num_layers) if self.is_routed(i)]
    require(
      routed,
      'routing to leave a routed block: change its offset, first or layers, add'
      ' blocks, or set routing=None for a dense model',
      num_layers=num_layers,
    )
    values = routing.layer_capacities(
      self.capacity, len(routed), decay=self.capacity_decay
    )
    # A list of capacities has the order of `layers`; otherwise the capacities
    # are in order of depth.
    listed = isinstance(self.capacity, tuple) and layers is not None
    by_layer = dict(zip(layers if listed else routed, values, strict=True))
    if self.capacity_schedule == 'shifted_cosine':
      ratios = routing.shifted_cosine(num_layers)
      by_layer = {i: ratios[i] for i in routed if ratios[i] is not None}
      require(
        by_layer,
        'routed blocks that the schedule does not leave dense: deeper ones, or'
        ' all (period=1, offset=0)',
        capacity_schedule=self.capacity_schedule,
        num_layers=num_layers,
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
  # Decay, per microbatch, of the moving threshold of the rule `threshold`; at 0
  # there is no threshold, and the rule cannot be used.
  threshold_decay: config_lib.Decay = 0.0
  # Rule that chooses tokens in training: top-k, or the causal rule that will be
  # used afterwards.
  train_rule: RuleName | Rule = 'top_k'
  # Part of a block that only the chosen tokens enter; all tokens enter the
  # rest. With `mlp`, the router reads the features after the attention.
  part: Part = 'block'
  # Most tokens of a block in training by a causal rule, as a multiple of its
  # capacity.
  train_slack: Annotated[float, config_lib.Range(ge=1)] = 1.25

  def __post_init__(self):
    super().__post_init__()
    check = functools.partial(config_lib.check, self)
    check(
      not self.scorer.needs_attention or self.scorer.attention == 'last',
      'a causal score: the attention to a token comes from later ones too',
      'score',
    )
    check(
      not self.scorer.needs_attention or self.kinds == ('image',),
      "kinds=('image',), since other tokens may follow the one that attends",
      *('kinds', 'score'),
    )
    rules = ('top_k', *self.causal_rules)
    check(
      not isinstance(self.train_rule, str) or self.train_rule in rules,
      f'one of {", ".join(rules)}, or what the rule needs (router_loss or'
      ' balance_loss, predictor_width, threshold_decay)',
      'train_rule',
    )

  @property
  def causal_rules(self) -> tuple[str, ...]:
    """Names of the causal rules that this config's training makes usable.

    `threshold`: score at least the moving average of the k-th best; `router`:
    score above 0, as trained by the auxiliary or the balance loss; `predictor`:
    the predictor's logit above 0; `fixed`: for scores that ignore the tokens.
    The first is the default of generation. It is the rule that chose tokens in
    training, if any; otherwise the first that is trained in the order above, in
    which `threshold` lost least in our runs (docs/methods/mod.md).
    """
    if self.per_sequence or self.kinds is not None:
      return ()
    trained = {
      'threshold': self.threshold_decay > 0,
      'router': self.router_loss > 0 or self.balance_loss > 0,
      'predictor': self.predictor_width > 0,
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
    """Returns the mode with the rule of this name; `kwargs`: other fields."""
    train_rule = self.train_rule
    if isinstance(train_rule, Rule) and train_rule.name == rule:
      return RoutingMode(rule=train_rule, **kwargs)
    return RoutingMode(rule=rule, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionRoutingConfig(RoutingConfig):
  """Routing in a vision transformer: MoD, or A-MoD by attention.

  The score `attention` is the mean attention that a token receives in the
  previous block (A-MoD, Gadhikar et al. 2024). It has no parameters and does
  not multiply the update, except with `gate='raw'`, an ablation of the paper.
  """

  capacity: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.5
  score: Literal['attention', 'learned', 'gaussian', 'stride'] | Score = (
    'attention'
  )
  keep_class_token: bool = False  # Always choose the class token.

  def __post_init__(self):
    super().__post_init__()
    check = functools.partial(config_lib.check, self)
    check(
      self.kinds is None,
      'None, since only the tokens of text with pictures (VLMConfig) have'
      ' kinds: leave it out',
      'kinds',
    )
    check(
      not self.scorer.needs_attention or self.scorer.attention == 'mean',
      "a score such as 'attention', since an encoder's input has no prompt"
      ' whose last token attends',
      'score',
    )

  def capacities(self, num_layers: int) -> tuple[float | None, ...]:
    """See `RoutingConfig`; attention scores need a dense block before."""
    capacities = super().capacities(num_layers)
    for i, capacity in enumerate(capacities):
      require(
        not (self.scorer.needs_attention and capacity is not None)
        or (i > 0 and capacities[i - 1] is None),
        'a block before it that is not routed, for an attention map of all'
        " tokens; choose other blocks (the default is fine) or score='learned'",
        **{'routing by attention, block': i},
      )
    return capacities
