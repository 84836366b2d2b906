"""Causal rules, which decide token by token whether a block processes it.

`RoutingMode.rule` names the rule of a call, and `routed.Layer` applies it.
`MoDConfig.causal_rules` says which rules a training makes usable.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.layers.decisions import Routing
from mod_jax.layers.scores import Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(config_lib.Validated, abc.ABC):
  """A causal rule: the choice of a token does not depend on later tokens.

  Subclasses must be frozen dataclasses and may live in any module. The rules
  here choose tokens whose score is NaN, so that the NaN shows in the output;
  skipping the block would hide the NaN.

  Attributes:
    num_slots: number of slots per sequence; None if `RoutingMode` computes it.
  """

  num_slots: ClassVar[int | None] = None

  @property
  def name(self) -> str:
    """The name of the rule in metrics."""
    return type(self).__name__.lower()

  @abc.abstractmethod
  def wants(self, routed: Routing, score: Score, capacity: float) -> jax.Array:
    """Returns mask_BL: the tokens to process, with any value at padding.

    Args:
      routed: scores, predictor logits and thresholds of the tokens.
      score: config of the score.
      capacity: fraction of the tokens that the layer processes.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positive(Rule):
  """Chooses tokens with scores above 0.

  An auxiliary loss or the balance loss trains the scores for this rule.
  """

  def wants(self, routed, score, capacity):
    return ~(routed.score_BL <= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted(Rule):
  """Chooses tokens whose predictor logit is above 0."""

  def wants(self, routed, score, capacity):
    return ~(routed.predictor_BL <= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold(Rule):
  """Chooses tokens that score at least the moving average of the k-th best."""

  def wants(self, routed, score, capacity):
    return ~(routed.score_BL < routed.threshold_B[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(Rule):
  """Chooses by a fixed threshold, for scores that ignore the tokens."""

  def wants(self, routed, score, capacity):
    return score.fixed(routed.score_BL, capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Never(Rule):
  """Chooses no token; an ablation of the routed blocks."""

  num_slots = 1

  def wants(self, routed, score, capacity):
    return jnp.zeros(routed.score_BL.shape, bool)


# Rules by the names that modes and command lines use. `top_k` is missing
# because it is not causal.
RULES = {
  'router': Positive(),
  'predictor': Predicted(),
  'threshold': Threshold(),
  'fixed': Fixed(),
  'never': Never(),
}
