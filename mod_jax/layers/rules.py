"""Causal rules, which decide token by token whether a block processes it.

`RoutingMode.rule` names the rule of a call, and `routed.Layer` applies it.
`MoDConfig.causal_rules` says which rules a training makes usable. `Routing` is
the record of a block's decisions, by top-k or by a rule.
"""

import abc
import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.layers.scores import Score

# Checkpoint name of the chosen indices. Rematerialisation saves them, because a
# recomputed top-k may choose other tokens.
SELECTION_NAME = 'mod_selection'


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
    top_k_BL: whether top-k would choose the token; None when decoding.
    kth_B: float32 lowest score among `top_k_BL`; None when decoding.
    candidate_BL: tokens among which the block chooses, while all other tokens
      enter; None if it chooses among all tokens.
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
  candidate_BL: jax.Array | None = None


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
