"""A number per token, by which a routed block chooses."""

import abc
import dataclasses
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(abc.ABC):
  """How the tokens of a routed block are scored.

  A subclass is a frozen dataclass. It may live anywhere: configs that are saved
  name its module.

  Attributes:
    gate: how the score weighs the update where the config names no gate.
    gates: whether it can weigh the update at all.
    needs_attention: whether it is made of the attention that the tokens
      received in the block before, which then has to be dense.
  """

  gate: ClassVar[str] = 'none'
  gates: ClassVar[bool] = True
  needs_attention: ClassVar[bool] = False

  def __post_init__(self):
    config_lib.validate(self)

  @abc.abstractmethod
  def run(
    self,
    module: nn.Module,
    x_BLD: jax.Array,
    info: TokenInfo,
    capacity: float,
    attention_BL: jax.Array | None,
  ) -> jax.Array:
    """Returns float32 score_BL.

    Args:
      module: the routed layer, within whose compact method this is called: for
        its random stream `routing`, its submodules, and its variables of the
        collection `moving`, which training keeps, one for each scanned layer.
        Change those only where `module.is_mutable_collection('moving')` and
        not `module.is_initializing()`.
      x_BLD: features.
      info: facts about the tokens.
      capacity: fraction of the tokens that the layer processes.
      attention_BL: attention received in the block before; None if unknown.
    """

  def flops(self, length: int, width: int) -> int:
    """Returns the FLOPs of scoring a sequence of so many tokens."""
    del length, width
    return 0

  def fixed(self, score_BL: jax.Array, capacity: float) -> jax.Array | None:
    """Returns which tokens a fixed threshold chooses, one by one.

    For scores that do not look at the tokens, and are causal by themselves;
    None for the others.
    """
    del score_BL, capacity
    return None


class Router(nn.Module):
  """A score per token: a raw linear projection in float32, without a bias.

  Attributes:
    std: of the initial weights.
    normalized: whether it sees each token's features scaled to a mean square of
      1; in the paper it sees them as they are.
  """

  std: float
  normalized: bool = False

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    x_BLD = x_BLD.astype(jnp.float32)
    if self.normalized:
      x_BLD = scale_to_unit(x_BLD)
    kernel_D = self.param(
      'kernel',
      nn.with_logical_partitioning(
        nn.initializers.normal(self.std), ('replicated',)
      ),
      (x_BLD.shape[-1],),
    )
    # Not an einsum, which accelerators round to bfloat16: a router must not.
    return jnp.sum(x_BLD * kernel_D, axis=-1)


def scale_to_unit(x_BLD: jax.Array) -> jax.Array:
  """Returns each token's features at a mean square of 1, without parameters."""
  return x_BLD * jax.lax.rsqrt(
    jnp.mean(x_BLD**2, axis=-1, keepdims=True) + 1e-6
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned(Score):
  """A `Router`: Mixture-of-Depths (Raposo et al. 2024, section 3.4)."""

  gate = 'raw'

  # Standard deviation of the initial weights; with 0 all tokens begin with the
  # same score.
  std: config_lib.Weight = 0.02
  normalized: bool = False  # See `Router`.

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return Router(self.std, self.normalized, name='router')(x_BLD)

  def flops(self, length, width):
    return 2 * length * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian(Score):
  """Draws from N(0, 1): the paper's stochastic routing, a control."""

  gates = False

  def run(self, module, x_BLD, info, capacity, attention_BL):
    key = module.make_rng('routing')
    return routing.gaussian_scores(key, x_BLD.shape[:2])

  def fixed(self, score_BL, capacity):
    return score_BL > routing.gaussian_threshold(capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stride(Score):
  """A fixed pattern of positions, evenly spread: a control."""

  gates = False

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return routing.stride_scores(info.position_BL, capacity)

  def fixed(self, score_BL, capacity):
    return score_BL > 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Score):
  """The attention that a token received in the block before.

  A-MoD (Gadhikar et al. 2024, Eq. 4): no parameters, and no factor on the
  update unless a gate is named.
  """

  needs_attention = True

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return attention_BL


# Scores under the names that configs and command lines use.
SCORES = {
  'learned': Learned,
  'gaussian': Gaussian,
  'stride': Stride,
  'attention': Attention,
}
