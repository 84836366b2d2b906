"""How a model runs at one call: static choices, each a program of its own."""

import dataclasses
import math
from typing import Annotated, Literal

import jax

from mod_jax import config as config_lib
from mod_jax import errors, routing
from mod_jax.layers.rules import RULES, Rule

RuleName = Literal[
  'top_k', 'router', 'predictor', 'threshold', 'fixed', 'never'
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingMode:
  """How a routed block chooses at this call: a static argument.

  Attributes:
    rule: `top_k`, which sees the whole sequence; or a causal rule, by its name
      in `rules.RULES` or as an object.
    overflow: under a causal rule, `exact` has a slot for every token; `drop`
      has slots for `slack · capacity` of the length, gives them out in order of
      position, and skips the tokens that get none. The length is a row's own,
      without padding; when generating, that of its prompt and of all new tokens
      together.
    slack: number of slots divided by the expected number, for `drop`.
    chunk: when decoding, and where sequences enter as a whole outside of
      training, how many of the routed rows are processed at a time;
      None for what suits the batch, see `rows_at_a_time`; 0 processes all rows
      and masks: the reference.
  """

  rule: RuleName | Rule = 'top_k'
  overflow: Literal['exact', 'drop'] = 'exact'
  slack: Annotated[float, config_lib.Range(ge=1)] = 1.25
  chunk: config_lib.Count | None = None

  def __post_init__(self):
    config_lib.validate(self)

  @property
  def causal_rule(self) -> Rule | None:
    """The rule as an object; None for top-k, which is not causal."""
    if isinstance(self.rule, Rule):
      return self.rule
    return RULES.get(self.rule)

  def slots(self, capacity: float, length: int) -> int:
    """Returns how many tokens of a sequence a routed block has room for."""
    rule = self.causal_rule
    if rule is None:
      return routing.num_chosen(capacity, length)
    if rule.num_slots is not None:
      return rule.num_slots
    if self.overflow == 'exact':
      return length
    return min(length, math.ceil(round(self.slack * capacity * length, 9)))

  def rows_at_a_time(self, capacity: float, batch: int) -> int:
    """Returns how many routed rows of a batch are processed at a time.

    By default as many as rarely need a second turn, which would read the
    block's weights again: the expected number and two standard deviations, as
    a power of two.
    """
    if self.chunk is not None:
      return min(self.chunk, batch)
    mean = capacity * batch
    enough = math.ceil(mean + 2 * math.sqrt(mean))
    return min(1 << (enough - 1).bit_length(), batch)

  def row_slots(
    self, capacity: float, length: int, length_B: jax.Array
  ) -> jax.Array:
    """Returns `slots` for rows of `length_B` tokens each, at most `length`."""
    return routing.for_lengths(
      lambda n: self.slots(capacity, n), length, length_B
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
  """How all parts of a model run.

  Attributes:
    routing: how routed blocks choose.
    learners: how adaptive modules run: `gated` runs as many learners as the
      gate says; `train` runs all, weighed by a choice that gradients reach; an
      integer k runs the first k.
    noise: whether `train` draws its choice at random, or takes the best.
    train: whether sequences go without some blocks (stochastic depth).
    masks: whether training masks the tokens that learnt scores drop, so that
      gradients reach the scores; or removes them, as inference does.
  """

  routing: RoutingMode = RoutingMode()
  learners: Literal['gated', 'train'] | int = 'gated'
  noise: bool = True
  train: bool = False
  masks: bool = True

  def __post_init__(self):
    if self.learners not in ('gated', 'train') and (
      not isinstance(self.learners, int) or self.learners < 0
    ):
      raise errors.UserError(
        f"learners={self.learners!r}: expected 'gated', 'train' or a number of"
        ' learners.'
      )
