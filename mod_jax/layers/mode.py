"""How a model runs in one call: static arguments, so new values recompile."""

import dataclasses
import math
from typing import Annotated, Literal

import jax

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.layers.rules import RULES, Rule

RuleName = Literal[
  'top_k', 'router', 'predictor', 'threshold', 'fixed', 'never'
]

# Part of a block that is routed, or run: the whole block or one of its halves.
Part = Literal['block', 'attention', 'mlp']


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingMode(config_lib.Validated):
  """How a routed block chooses tokens in this call; a static argument.

  Attributes:
    rule: `top_k`, which sees the whole sequence; or a causal rule, by its name
      in `rules.RULES` or as an object.
    overflow: number of slots under a causal rule. `exact` has one per token;
      `drop` has `slack · capacity` of the length, assigns them in order of
      position, and skips the tokens that get none. The length excludes padding;
      in generation it is that of the prompt and all new tokens together.
    slack: for `drop`, the number of slots divided by the expected number of
      chosen tokens.
    chunk: number of routed rows (sequences with a chosen token) processed at a
      time in decoding, and in inference with `per_sequence` routing. None
      chooses by the batch size, see `rows_at_a_time` and `takes_all_rows`. 0
      processes all rows, and masks those that are not routed.
  """

  rule: RuleName | Rule = 'top_k'
  overflow: Literal['exact', 'drop'] = 'exact'
  slack: Annotated[float, config_lib.Range(ge=1)] = 1.25
  chunk: config_lib.Count | None = None

  @property
  def causal_rule(self) -> Rule | None:
    """The rule as an object; None for top-k, which is not causal."""
    if isinstance(self.rule, Rule):
      return self.rule
    return RULES.get(self.rule)

  def num_slots(self, capacity: float, length: int) -> int:
    """Returns how many slots a routed block has for a sequence."""
    rule = self.causal_rule
    if rule is None:
      return routing.num_chosen(capacity, length)
    if rule.num_slots is not None:
      return rule.num_slots
    if self.overflow == 'exact':
      return length
    return min(length, math.ceil(round(self.slack * capacity * length, 9)))

  def rows_at_a_time(self, share: float, batch: int) -> int:
    """Returns how many routed rows of a batch are processed at a time.

    `share` is the fraction of rows that are expected to be routed. The default
    is their expected number plus two standard deviations, rounded up to a power
    of two. More rows need a second iteration, which reads the block's weights
    again.
    """
    if self.chunk is not None:
      return min(self.chunk, batch)
    mean = share * batch
    rows = math.ceil(mean + 2 * math.sqrt(mean))
    return min(1 << (rows - 1).bit_length(), batch)

  def takes_all_rows(self, share: float, batch: int) -> bool:
    """Returns whether to process all rows of a batch and mask some of them.

    By default this is True if `rows_at_a_time` is the whole batch, and some row
    is almost certainly routed: masking saves copies of rows and caches. `share`
    is as in `rows_at_a_time`.
    """
    if self.chunk is not None:
      return self.chunk == 0
    rows = self.rows_at_a_time(share, batch)
    return rows == batch and share * batch >= 4

  def row_slots(
    self, capacity: float, length: int, length_B: jax.Array
  ) -> jax.Array:
    """Returns `num_slots` of rows, which have `length_B` <= `length` tokens."""
    return routing.for_lengths(
      lambda n: self.num_slots(capacity, n), length, length_B
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode(config_lib.Validated):
  """How all parts of a model run.

  Attributes:
    routing: how routed blocks choose tokens.
    learners: how adaptive modules run: `gated` runs as many learners as the
      gate says; `train` runs all, weighted by a differentiable choice; an
      integer k runs the first k.
    noise: whether `learners='train'` samples the number of learners; otherwise
      it takes the most probable one.
    train: whether this is a training step. Only a training step has dropout and
      stochastic depth, batch statistics, slot limits for token-choice experts,
      and `aux['features']` for an early exit.
    masks: whether a DynamicViT in training masks the tokens that learned scores
      drop, so that gradients reach the scores; if not, it removes them.
  """

  routing: RoutingMode = RoutingMode()
  learners: Literal['gated', 'train'] | config_lib.Count = 'gated'
  noise: bool = True
  train: bool = False
  masks: bool = True
