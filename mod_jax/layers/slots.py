"""Interface of the replaceable parts of a block: feed-forward, projections."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax

from mod_jax import config as config_lib
from mod_jax.layers.mode import Mode
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot(config_lib.Validated, abc.ABC):
  """Config of a module that maps each token's features to features.

  Subclasses must be frozen dataclasses. They may live in any module, but saved
  configs refer to it, so import it before reading them.

  Attributes:
    tells: whether `run` returns aux besides the features.
  """

  tells: ClassVar[bool] = True

  @abc.abstractmethod
  def run(
    self,
    x: jax.Array,
    info: TokenInfo,
    *,
    name: str,
    dtype: str,
    mode: Mode,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Creates the module within the calling compact method, and calls it.

    Args:
      x: features [B, L, …].
      info: facts about these tokens.
      name: name of the module and so of its parameters.
      dtype: compute dtype.
      mode: how the model runs.

    Returns:
      y [B, L, …], and aux by kind, which losses, metrics and pictures read by
      `stack.collect`. The kinds `router`, `attention`, `adaptive`, `experts`,
      `features`, `captured` and `merged_into` are reserved. Other kinds are
      up to the task's loss: see `Task.loss`, and `tasks/adaptive.py` for one
      that reads aux.
    """

  @abc.abstractmethod
  def flops(self, tokens: int) -> dict[str, int]:
    """Returns forward FLOPs by part for this number of tokens."""

  @property
  @abc.abstractmethod
  def num_params(self) -> int:
    """Number of parameters."""

  @property
  def maps(self) -> dict[str, 'Slot']:
    """The slots of dense maps within this one, by name; may be adapted."""
    return {}

  def with_maps(self, maps: dict[str, 'Slot']) -> 'Slot':
    """Returns the slot with some of its `maps` replaced, by its `slots`."""
    return dataclasses.replace(self, slots=self.slots + tuple(maps.items()))

  def weight_flops(self, name: str, tokens: int) -> dict[str, int]:
    """Returns the forward FLOPs of products with weights, by parameter.

    The gradient of a weight takes as many, unless the weight is frozen. `name`
    is that of the slot. A slot that does not tell its parameters apart is a
    single one of that name.
    """
    return {name: sum(self.flops(tokens).values())}
