"""Mixture-of-Depths: a block that runs on the chosen tokens only.

Raposo et al. 2024, Eq. 1: `x' = x + r · f(x̃)` for the k tokens with the
largest r, and `x' = x` for all other tokens. `LayerConfig` also counts a
layer's FLOPs.
"""

from collections import Counter
import dataclasses
from typing import Any

from flax import linen as nn
import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from mod_jax import routing
from mod_jax.errors import require
from mod_jax.layers import rules, scores
from mod_jax.layers.attention import AttentionScore
from mod_jax.layers.block import Block, BlockConfig
from mod_jax.layers.cache import KVCache
from mod_jax.layers.decisions import SELECTION_NAME, Routing
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routing_config import RoutingConfig
from mod_jax.layers.token_info import Source, TokenInfo

# In generation, a block skips rows without a chosen token if rows have at most
# this many tokens. Nearly every longer row has a chosen token.
_SHORT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
  """One layer of a stack: a block and, optionally, its routing.

  Attributes:
    block: config of the block.
    routing: how tokens are chosen; None for a dense layer.
    capacity: fraction of tokens that a routed layer processes.
    attention_score: kind of score in `aux['attention']`, see
      `attention.AttentionScore`; None for no score.
    source_routing: how cross-attention chooses the source tokens that it reads;
      None if it reads all of them.
    source_capacity: fraction of source tokens that `source_routing` chooses.
    drop_rate: rate of stochastic depth in training.
    tells_features: whether training puts the layer's output into
      `aux['features']`.
  """

  block: BlockConfig
  routing: RoutingConfig | None = None
  capacity: float | None = None
  attention_score: AttentionScore | None = None
  source_routing: RoutingConfig | None = None
  source_capacity: float | None = None
  drop_rate: float = 0.0
  tells_features: bool = False

  @property
  def caches_chosen(self) -> bool:
    """Whether only chosen tokens are cached, because attention is routed."""
    return self.routing is not None and self.routing.part != 'mlp'

  def tokens(self, length: int, image_places: int = 0) -> int:
    """Returns how many slots of a sequence the block computes in training.

    A dense layer has `length` slots. Empty slots, which causal rules and
    `per_sequence` routing leave, count. For `image_places` see `TokenInfo`.
    """
    if self.routing is None or self.routing.per_sequence:
      return length
    return self.num_slots(self.routing.train_mode, length, image_places)

  def num_slots(
    self, mode: RoutingMode, length: int, image_places: int = 0
  ) -> int:
    """Returns how many slots a routed block has for a sequence."""
    kinds = self.routing.kinds
    if kinds is None:
      return mode.num_slots(self.capacity, length)
    # Every place that is not reserved for images may hold a token that enters.
    places = min(image_places, length) if 'image' in kinds else 0
    if not places:
      return length
    return length - places + routing.num_chosen(self.capacity, places)

  def flops(
    self, length: int, *, image_places: int = 0, **kwargs
  ) -> dict[str, int]:
    """Returns forward FLOPs by part for a sequence of this length.

    The router scores all tokens. The block processes its slots in training (see
    `tokens`). `kwargs` are keywords of `BlockConfig.flops`.
    """
    width, routing_parts = self.block.attention.width, Counter()
    if self.source_routing is not None:
      source = kwargs['source_tokens']
      kwargs |= {'source_tokens': self.source_tokens(source)}
      scorer = self.source_routing.scorer
      routing_parts['router'] += scorer.flops(source, width)
    tokens = self.tokens(length, image_places)
    parts = self.block.flops(*self.halves(tokens, length), of=length, **kwargs)
    if self.routing is not None:
      hidden = self.routing.predictor_width
      routing_parts['router'] += self.routing.scorer.flops(length, width)
      if self.routing.has_predictor:
        routing_parts['predictor'] = 2 * length * hidden * (width + 1)
    # Add up equal names: a block with experts also has a part `router`.
    return dict(Counter(parts) + routing_parts)

  def halves(self, tokens: int, length: int) -> tuple[int, int]:
    """Returns how many tokens the attention and the feed-forward part process.

    Args:
      tokens: number of tokens that the routed part of the block processes.
      length: number of tokens of the sequence, which the other part processes.
    """
    part = 'block' if self.routing is None else self.routing.part
    return (
      length if part == 'mlp' else tokens,
      length if part == 'attention' else self.block.left(tokens),
    )

  def source_tokens(self, length: int) -> int:
    """Returns how many tokens cross-attention reads of a source of `length`."""
    if self.source_routing is None:
      return length
    return routing.num_chosen(self.source_capacity, length)


@flax.struct.dataclass
class LayerOutput:
  """What a layer returns.

  Attributes:
    x_BLD: output features.
    cache: the cache with the tokens added; None if the layer was given none.
    aux: further results by kind, see `BlockOutput`. A routed layer adds
      `router`, and a layer with `source_routing` adds `source_router`; each is
      a `Routing`.
    info: facts about the remaining tokens if the block reduced their number;
      else None.
  """

  x_BLD: jax.Array
  cache: KVCache | None = None
  aux: dict[str, Any] = flax.struct.field(default_factory=dict)
  info: TokenInfo | None = None


class Predictor(nn.Module):
  """Predicts from one token alone whether top-k will choose the token.

  Returns float32 logit_BL; above 0 it means yes. No gradient passes to the
  input, so training the predictor does not change the language model (Raposo et
  al. 2024, section 3.5).
  """

  hidden: int

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    # Scale the features, which grow with depth: the logits should not grow.
    x_BLD = jax.lax.stop_gradient(x_BLD).astype(jnp.float32)
    x_BLD = scores.scale_to_unit(x_BLD)

    def linear(features, name):
      return nn.Dense(
        features,
        # Keep accelerators from rounding to bfloat16: the forward pass and
        # decoding could then disagree about the sign of logits near 0.
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


class SourceChoice(nn.Module):
  """Chooses which tokens of a source this layer's cross-attention reads.

  Later layers choose among all tokens of the source again. The features of
  chosen tokens are multiplied by the gate, through which a learned router gets
  its gradient.
  """

  config: RoutingConfig
  capacity: float

  @nn.compact
  def __call__(self, source: Source) -> tuple[Source, Routing]:
    config, info = self.config, source.info
    score_BS = config.scorer.run(
      self, source.x_BSD, info, self.capacity, source.attention_BS
    )
    selection = _best(score_BS, self.capacity, info.valid_BL)
    weight_BS = routing.gate(config.gate_kind, score_BS, config.gate_alpha)
    x_BSD = source.x_BSD * weight_BS[..., None].astype(source.x_BSD.dtype)
    chosen = source.replace(x_BSD=x_BSD).gather(selection)
    return chosen, Routing(
      score_BL=score_BS,
      weight_BL=weight_BS,
      chosen_BL=routing.mark_tokens(selection, score_BS.shape[1]),
      overflow_B=jnp.zeros(len(score_BS), jnp.int32),
      capacity=jnp.float32(self.capacity),
    )


def _best_beside(score_BL, capacity: float, candidate_BL, valid_BL, slots):
  """Selects the top-k candidates, and all real tokens that are no candidates.

  k is the capacity times the row's number of candidates. Returns the selection
  and unplaced_B: how many tokens of a row find no place in `slots` slots.
  """
  if valid_BL is None:
    valid_BL = jnp.ones(score_BL.shape, bool)
  count_B = routing.for_lengths(
    lambda n: n and routing.num_chosen(capacity, n),
    score_BL.shape[1],
    candidate_BL.sum(axis=-1),
  )
  count_B += (valid_BL & ~candidate_BL).sum(axis=-1)
  score_BL = jnp.where(candidate_BL, score_BL, jnp.inf)
  selection = routing.select_top_k(score_BL, slots, valid_BL, count_B)
  return (
    checkpoint_name(selection, SELECTION_NAME),
    jnp.maximum(count_B - slots, 0).astype(jnp.int32),
  )


def _best(score_BL, capacity: float, valid_BL) -> routing.Selection:
  """Returns the top-k tokens; k is capacity · number of a row's real tokens."""
  length = score_BL.shape[1]
  count_B = None
  if valid_BL is not None:
    count_B = routing.for_lengths(
      lambda n: routing.num_chosen(capacity, n), length, valid_BL.sum(axis=-1)
    )
  k = routing.num_chosen(capacity, length)
  selection = routing.select_top_k(score_BL, k, valid_BL, count_B)
  return checkpoint_name(selection, SELECTION_NAME)


class Layer(nn.Module):
  """A block with its residual connection, routed if the config says so.

  A routed layer scores the tokens, selects some, runs the block on these, and
  adds the gated updates. Its parameters are those of the dense block, under the
  same names, and those of the router and predictor.

  Collections: `params`; with `routing.threshold_decay` also `moving`, the
  moving average of the k-th best score (make it mutable in training).
  Rng streams: `routing` for Gaussian scores; the streams of `Block`.
  """

  config: LayerConfig
  mode: Mode = Mode()

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    info: TokenInfo,
    cache: KVCache | None = None,
    attention_BL: jax.Array | None = None,
    router: dict[str, jax.Array] | None = None,
  ) -> LayerOutput:
    """Returns the features after the layer, the cache and the aux.

    `cache` holds the earlier tokens; None for whole sequences. `attention_BL`
    is the attention that the tokens received in the previous block, for scores
    that need it. `router` holds the parameters of the router that all routed
    layers share; None if each layer has its own router.
    """
    config = self.config
    part = 'block' if config.routing is None else config.routing.part

    def block_of(part, name):
      block = Block(
        *(config.block, config.attention_score, config.drop_rate, self.mode),
        part=part,
        name=name,
      )
      nn.share_scope(self, block)
      return block

    block = block_of(part, 'process')
    source_aux = {}
    if config.source_routing is not None:
      choice = SourceChoice(
        config.source_routing, config.source_capacity, name='source'
      )
      source, source_aux['source_router'] = choice(info.source)
      info = info.replace(source=source)
    if config.routing is None:
      output = block(x_BLD, info, cache)
      reduced, info = output.reduced, None
      if reduced is not None:
        x_BLD, info = reduced.x_BKD, reduced.info
      x_BLD = x_BLD + output.update_BLD
      return LayerOutput(x_BLD, output.cache, output.aux | source_aux, info)

    given = (attention_BL, router)
    if part == 'block':
      output = self._route(block, x_BLD, info, cache, *given)
      return output.replace(aux=output.aux | source_aux)
    rest = block_of('mlp' if part == 'attention' else 'attention', 'rest')
    if part == 'attention':
      first = self._route(block, x_BLD, info, cache, *given)
      second = rest(first.x_BLD, info)
      x_BLD, cache = first.x_BLD + second.update_BLD, first.cache
    else:
      first = rest(x_BLD, info, cache)
      x_BLD = x_BLD + first.update_BLD
      second = self._route(block, x_BLD, info, first.cache, *given)
      x_BLD, cache = second.x_BLD, second.cache
    aux = dict(first.aux)
    for kind, value in second.aux.items():
      aux[kind] = aux[kind] | value if kind in aux else value
    return LayerOutput(x_BLD, cache, aux | source_aux)

  def _route(
    self, block, x_BLD, info, cache, attention_BL, router
  ) -> LayerOutput:
    """Runs the block, or its routed half, on the chosen tokens.

    If only the feed-forward is routed, `cache` already has these tokens.
    """
    config, decodes = self.config, cache is not None
    length = x_BLD.shape[1]
    mode, capacity = self.mode.routing, config.capacity
    by_kind = config.routing.kinds is not None
    rule = None if by_kind else mode.causal_rule
    routed = self._score(x_BLD, info, attention_BL, router)
    top, unplaced_B = None, 0
    if by_kind:
      slots = config.num_slots(mode, length, info.image_places)
      top, unplaced_B = _best_beside(
        *(routed.score_BL, capacity, routed.candidate_BL, info.valid_BL, slots)
      )
    elif not decodes or rule is None:
      top = self._top_k(routed.score_BL, info)
    if not decodes:
      routed = routed.replace(
        top_k_BL=routing.mark_tokens(top, length),
        kth_B=_kth_score(routed.score_BL, top),
      )
    threshold_B = self._read_and_update_threshold(rule, routed)
    routed = routed.replace(threshold_B=threshold_B)
    requested_BL = self._decide(rule, routed, top, info)

    if not decodes:
      selection, count_B = top, None
      if rule is not None:
        slots = mode.num_slots(capacity, length)
        count_B = jnp.full(x_BLD.shape[0], slots)
        if info.valid_BL is not None:
          count_B = info.valid_BL.sum(axis=-1)
          count_B = mode.row_slots(capacity, length, count_B)
        selection = routing.select_decided(requested_BL, slots, count_B)
        selection = checkpoint_name(selection, SELECTION_NAME)
      chosen_BL = routing.mark_tokens(selection, length)
      # The loop in `_run_rows` is not differentiable, cannot create parameters
      # and drops the aux of experts and adaptive modules.
      needs_full_pass = (
        self.mode.train or self.is_initializing() or mode.chunk == 0
      )
      needs_full_pass |= any(slot.tells for slot in config.block.slots.values())
      if config.routing.per_sequence and not needs_full_pass:
        output = self._run_rows(block, x_BLD, info, routed, chosen_BL, None)
      else:
        output = self._run(block, x_BLD, info, routed, selection, None, count_B)
    else:
      # If only the feed-forward is routed, the block does not write to the
      # cache, but the cache may count the tokens that enter (`entered_BS`).
      own = cache if config.caches_chosen else None
      chosen_BL = requested_BL
      if own is not None or cache.entered_BS is not None:
        chosen_BL = cache.room(requested_BL)
      # Skip the sequences of the batch that have no chosen token, unless
      # `takes_all_rows` finds that masking them is cheaper, or nearly every
      # sequence has a chosen token, as in long inputs or with `kinds`.
      share, batch = self._share_of_rows(length), len(x_BLD)
      masked = mode.takes_all_rows(share, batch)
      if length <= _SHORT and not masked and not by_kind:
        output = self._run_rows(block, x_BLD, info, routed, chosen_BL, own)
      else:
        slots = length if own is None else own.num_slots
        if top is not None:
          slots = min(slots, top.index_BK.shape[1])
        selection = routing.select_decided(chosen_BL, slots)
        output = self._run(block, x_BLD, info, routed, selection, own)
      if own is None:
        cache = cache.enter(info.position_BL, chosen_BL)
        output = output.replace(cache=cache)
    overflow_B = (requested_BL & ~chosen_BL).sum(axis=-1, dtype=jnp.int32)
    overflow_B += unplaced_B
    routed = routed.replace(chosen_BL=chosen_BL, overflow_B=overflow_B)
    output = output.replace(aux=output.aux | {'router': routed})
    if config.routing.combine == 'weigh_bypass':
      passes_BL = ~chosen_BL
      if routed.candidate_BL is not None:
        passes_BL &= routed.candidate_BL
      factor_BL = jnp.where(passes_BL, 1 - routed.weight_BL, 1)
      y_BLD = (output.x_BLD * factor_BL[..., None]).astype(x_BLD.dtype)
      output = output.replace(x_BLD=y_BLD)
    return output

  def _read_and_update_threshold(self, rule, routed) -> jax.Array | None:
    """Returns each row's average before this call, or None, and updates it.

    Only the rule `threshold` needs an average, and raises UserError without it.
    """
    decay = self.config.routing.threshold_decay
    stored = self.has_variable('moving', 'threshold')
    if not decay or not (stored or self.is_mutable_collection('moving')):
      require(
        not isinstance(rule, rules.Threshold),
        "the 'moving' collection beside 'params', with averages of training",
        rule='threshold',
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
      shared = config.scorer.router(parent=None)
      score_BL = shared.apply({'params': router}, x_BLD)
    else:
      score_BL = config.scorer.run(self, x_BLD, info, capacity, attention_BL)
      # Users may add scores. One of [batch, 1] would choose a single token.
      require(
        score_BL.shape == (batch, length),
        f'[batch, length] = {(batch, length)}, a number for each token',
        **{f'{type(config.scorer).__name__}.run(…).shape': score_BL.shape},
      )
    if config.per_sequence:
      score_BL = _mean_of_row(score_BL, info.valid_BL)
    predictor_BL = None
    if config.has_predictor:
      predictor = Predictor(config.predictor_width, name='predictor')
      predictor_BL = predictor(x_BLD)
    weight_BL = routing.gate(config.gate_kind, score_BL, config.gate_alpha)
    candidate_BL = None
    if config.kinds is not None:
      candidate_BL = info.of_kinds(config.kinds)
      weight_BL = jnp.where(candidate_BL, weight_BL, 1)
    return Routing(
      score_BL=score_BL,
      weight_BL=weight_BL,
      chosen_BL=jnp.zeros((batch, length), bool),
      overflow_B=jnp.zeros(batch, jnp.int32),
      capacity=jnp.float32(capacity),
      predictor_BL=predictor_BL,
      candidate_BL=candidate_BL,
    )

  def _top_k(self, score_BL, info) -> routing.Selection:
    """Selects tokens, or sequences, by scores of all tokens: not causally."""
    capacity = self.config.capacity
    if self.config.routing.per_sequence:
      # Only the balance loss ties the fraction of sequences that enter to the
      # capacity. At a capacity of 1, as at the start of a warm-up, all enter.
      enters_BL = ~(score_BL <= 0) | (capacity >= 1)  # NaN enters.
      if info.valid_BL is not None:
        enters_BL &= info.valid_BL
      selection = routing.select_decided(enters_BL, score_BL.shape[1])
      return checkpoint_name(selection, SELECTION_NAME)
    if self.config.routing.keep_class_token:
      score_BL = score_BL.at[:, 0].set(jnp.inf)
    return _best(score_BL, capacity, info.valid_BL)

  def _decide(self, rule, routed: Routing, top, info) -> jax.Array:
    """Returns mask_BL: real tokens that `rule` chooses; `top` if rule=None."""
    if rule is None:
      return routing.mark_tokens(top, routed.score_BL.shape[1])
    config = self.config
    requested_BL = rule.wants(routed, config.routing.scorer, config.capacity)
    # Choose all tokens at a capacity of 1, whatever their scores: a model that
    # was just routed, or whose warm-up begins, must compute the dense result.
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
    """Processes only rows that have chosen tokens, a few at a time.

    Rows with a chosen token are sorted to the front, and a loop with static
    shapes processes chunks of them. Updates of other tokens are discarded.
    """
    batch, length, _ = x_BLD.shape
    share = self._share_of_rows(length)
    chunk = self.mode.routing.rows_at_a_time(share, batch)
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

  def _share_of_rows(self, length: int) -> float:
    """Returns the expected fraction of rows that have a chosen token."""
    capacity = self.config.capacity
    if self.config.routing.per_sequence:
      return capacity
    return 1 - (1 - capacity) ** length

  def _weigh(self, x_BKD, update_BKD, weight_BK, valid_BK):
    """Returns the gated updates in float32, with exact zeros in empty slots."""
    weight_BK1 = weight_BK[..., None]
    update_BKD = update_BKD * weight_BK1
    if self.config.routing.combine == 'replace':
      # Then x + update = w·(x + f).
      update_BKD += (weight_BK1 - 1) * x_BKD
    if valid_BK is not None:
      update_BKD = jnp.where(valid_BK[..., None], update_BKD, 0)
    return update_BKD


def _mean_of_row(score_BL, valid_BL):
  """Replaces scores by the mean score of a row's real tokens (0 if none)."""
  if valid_BL is None:
    valid_BL = jnp.ones(score_BL.shape, bool)
  total_B1 = jnp.where(valid_BL, score_BL, 0).sum(axis=-1, keepdims=True)
  count_B1 = jnp.maximum(valid_BL.sum(axis=-1, keepdims=True), 1)
  return jnp.broadcast_to(total_B1 / count_B1, score_BL.shape)


def _kth_score(score_BL, top: routing.Selection):
  """Returns each row's lowest score of a chosen token; inf if there is none."""
  score_BK = jnp.take_along_axis(score_BL, top.index_BK, axis=-1)
  if top.valid_BK is not None:
    score_BK = jnp.where(top.valid_BK, score_BK, jnp.inf)
  return score_BK.min(axis=-1)
