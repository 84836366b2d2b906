"""What may stand in a place of a block: a feed-forward, a projection."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax

from mod_jax import config as config_lib
from mod_jax.layers.mode import Mode
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot(abc.ABC):
  """Features of each token in, features out: its sizes, and how it is run.

  A subclass is a frozen dataclass. It may live anywhere: configs that are saved
  name its module, which must be imported before they are read.

  Attributes:
    tells: whether `run` returns further results than the features.
  """

  tells: ClassVar[bool] = True

  def __post_init__(self):
    config_lib.validate(self)

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
    """Makes the module within the calling compact one, and calls it.

    Args:
      x: features [B, L, …].
      info: facts about these tokens.
      name: of the module, and so of its parameters.
      dtype: of the computation.
      mode: how the model runs.

    Returns:
      y [B, L, …], and further results by kind, for losses, metrics and pictures
      to read by `stack.collect`. The kinds `router`, `attention`, `adaptive`,
      `experts`, `features` and `captured` are taken. A task decides what its
      loss does with any other kind: see `Task.loss`, and `tasks/adaptive.py`
      for one that reads aux.
    """

  @abc.abstractmethod
  def flops(self, tokens: int) -> dict[str, int]:
    """Returns forward FLOPs by part, over so many tokens."""

  @property
  @abc.abstractmethod
  def num_params(self) -> int:
    """How many parameters it has."""
