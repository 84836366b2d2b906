"""Which tokens a routed block processes, given their scores."""

import abc
import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp

from mod_jax import config as config_lib

if TYPE_CHECKING:
  from mod_jax.layers.routed import Routing
  from mod_jax.layers.scores import Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(abc.ABC):
  """A causal choice: each token's depends on none that comes later.

  A subclass is a frozen dataclass, and may live anywhere. The rules here choose
  tokens whose number is NaN: it then shows in the output, where a block that is
  passed by would leave no trace.

  Attributes:
    num_slots: how many slots a sequence has at most; None for as many as the
      mode says.
  """

  num_slots: ClassVar[int | None] = None

  def __post_init__(self):
    config_lib.validate(self)

  @property
  def name(self) -> str:
    """The name of the rule in metrics."""
    return type(self).__name__.lower()

  @abc.abstractmethod
  def wants(
    self, routed: 'Routing', score: 'Score', capacity: float
  ) -> jax.Array:
    """Returns mask_BL: the tokens that are to be processed, padding or not.

    Args:
      routed: the scores, and what else is known of the tokens.
      score: what they were scored by.
      capacity: fraction of the tokens that the layer processes.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positive(Rule):
  """Chooses by a score above 0, which is what the auxiliary loss trains."""

  def wants(self, routed, score, capacity):
    return ~(routed.score_BL <= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted(Rule):
  """Chooses by a logit of the predictor above 0."""

  def wants(self, routed, score, capacity):
    return ~(routed.predictor_BL <= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold(Rule):
  """Chooses by a score of at least the moving average of the k-th best."""

  def wants(self, routed, score, capacity):
    return ~(routed.score_BL < routed.threshold_B[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(Rule):
  """Chooses by a fixed threshold; for scores that do not look at the tokens."""

  def wants(self, routed, score, capacity):
    return score.fixed(routed.score_BL, capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Never(Rule):
  """Chooses no token, which shows what the routed blocks are worth."""

  num_slots = 1

  def wants(self, routed, score, capacity):
    return jnp.zeros(routed.score_BL.shape, bool)


# Rules under the names that modes and command lines use. `top_k` is not among
# them: it sees the whole sequence, and cannot choose one token after another.
RULES = {
  'router': Positive(),
  'predictor': Predicted(),
  'threshold': Threshold(),
  'fixed': Fixed(),
  'never': Never(),
}
