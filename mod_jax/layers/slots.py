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

  Subclasses must be frozen dataclasses, in any module. A saved config names the
  module, which must be imported before the config is read.

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
      y [B, L, …], and further results (aux) by kind, which losses, metrics and
      pictures get from `stack.collect`. The kinds `router`, `attention`,
      `adaptive`, `experts`, `features`, `captured` and `merged_into` are
      reserved. A task's losses may use any other kind: see `Method.losses` in
      `train/task.py`, and `tasks/adaptive.py` for an example that reads aux.
    """

  @abc.abstractmethod
  def flops(self, tokens: int) -> dict[str, int]:
    """Returns forward FLOPs by part for this number of tokens."""

  @property
  @abc.abstractmethod
  def num_params(self) -> int:
    """How many parameters `run` creates, including those of adapters."""

  @property
  def maps(self) -> dict[str, 'Slot']:
    """Slots of the linear maps in this slot, by name; LoRA may adapt them."""
    return {}

  def with_maps(self, maps: dict[str, 'Slot']) -> 'Slot':
    """Returns the slot with maps of these names replaced (in field `slots`)."""
    return dataclasses.replace(self, slots=self.slots + tuple(maps.items()))

  def weight_flops(self, name: str, tokens: int) -> dict[str, int]:
    """Returns the forward FLOPs of products with weights, by parameter name.

    The gradient of a weight takes as many FLOPs, unless the weight is frozen.
    `name` is the name of the slot; by default all FLOPs count under that name.
    """
    return {name: sum(self.flops(tokens).values())}
