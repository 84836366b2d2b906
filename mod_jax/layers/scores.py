"""A number per token, by which a routed block chooses."""

import abc
import dataclasses
from typing import Annotated, ClassVar, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(abc.ABC):
  """How the tokens of a routed block are scored.

  A subclass is a frozen dataclass. It may live anywhere: configs that are saved
  name its module, which must be imported before they are read.

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

  @abc.abstractmethod
  def flops(self, length: int, width: int) -> int:
    """Returns the FLOPs of scoring a sequence of so many tokens.

    Products of matrices and vectors count, 2 for each multiply-add; a score
    without any has 0.
    """

  def fixed(self, score_BL: jax.Array, capacity: float) -> jax.Array | None:
    """Returns which tokens a fixed threshold chooses, one by one.

    For scores that do not look at the tokens, and are causal by themselves;
    None for the others.
    """
    del score_BL, capacity
    return None


Activation = Literal['gelu', 'relu', 'silu', 'tanh']


@flax.struct.dataclass
class RouterWeights:
  """A router's parameters, which any number of blocks may be given.

  Attributes:
    kernel: [D], or [F] of a router with a hidden layer.
    bias: scalar; None for none.
    hidden_kernel: [D, F] of the hidden layer; None for no such layer.
    hidden_bias: [F]; None for none.
    activation: of the hidden layer.
    normalized: whether each token's features are scaled to a mean square of 1.
  """

  kernel: jax.Array
  bias: jax.Array | None
  hidden_kernel: jax.Array | None
  hidden_bias: jax.Array | None
  activation: str = flax.struct.field(pytree_node=False)
  normalized: bool = flax.struct.field(pytree_node=False)

  def score(self, x_BLD: jax.Array) -> jax.Array:
    """Returns score_BL of features, all in float32."""
    x = x_BLD.astype(jnp.float32)
    if self.normalized:
      x = scale_to_unit(x)
    if self.hidden_kernel is not None:
      # Accelerators must not round this to bfloat16, or forward pass and
      # decoding would disagree about scores near each other.
      x = jnp.matmul(x, self.hidden_kernel, precision='highest')
      if self.hidden_bias is not None:
        x += self.hidden_bias
      x = getattr(nn, self.activation)(x)
    # Not an einsum, which accelerators round to bfloat16: a router must not.
    score_BL = jnp.sum(x * self.kernel, axis=-1)
    return score_BL if self.bias is None else score_BL + self.bias


class Router(nn.Module):
  """A score per token, in float32: a linear map, or one with a hidden layer.

  Attributes:
    std: of the initial weights of the last map.
    normalized: whether it sees each token's features scaled to a mean square of
      1; in the paper it sees them as they are.
    bias: whether the maps have biases; the paper's has none.
    hidden: units of a hidden layer; 0 for none.
    activation: of that layer.
  """

  std: float
  normalized: bool = False
  bias: bool = False
  hidden: int = 0
  activation: Activation = 'gelu'

  @nn.compact
  def weights(self, width: int) -> RouterWeights:
    """Returns the parameters for features of this width."""

    def param(name, init, *shape):
      names = ('replicated',) * len(shape)
      return self.param(name, nn.with_logical_partitioning(init, names), shape)

    zeros = nn.initializers.zeros
    hidden_kernel = hidden_bias = None
    if self.hidden:
      init = nn.initializers.lecun_normal()
      hidden_kernel = param('hidden_kernel', init, width, self.hidden)
      if self.bias:
        hidden_bias = param('hidden_bias', zeros, self.hidden)
    return RouterWeights(
      param('kernel', nn.initializers.normal(self.std), self.hidden or width),
      param('bias', zeros) if self.bias else None,
      hidden_kernel,
      hidden_bias,
      self.activation,
      self.normalized,
    )

  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    return self.weights(x_BLD.shape[-1]).score(x_BLD)


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
  bias: bool = False  # See `Router`, also for the next two.
  # Units of a hidden layer; 0 = none.
  hidden: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  activation: Activation = 'gelu'  # Of that layer.
  # Whether all routed blocks have one router in common (γ-MoD, Luo et al.
  # 2024), whose gradients add up. A `Stack` makes it, and hands it to them.
  shared: bool = False

  def router(self, name: str | None = None) -> Router:
    """Returns the module; in a linen `setup` it needs no name."""
    return Router(
      *(self.std, self.normalized, self.bias, self.hidden, self.activation),
      name=name,
    )

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return self.router('router')(x_BLD)

  def flops(self, length, width):
    if not self.hidden:
      return 2 * length * width
    return 2 * length * self.hidden * (width + 1)


class _Free(Score):
  """A score that takes no products."""

  def flops(self, length, width):
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian(_Free):
  """Draws from N(0, 1): the paper's stochastic routing, a control."""

  gates = False

  def run(self, module, x_BLD, info, capacity, attention_BL):
    key = module.make_rng('routing')
    return routing.gaussian_scores(key, x_BLD.shape[:2])

  def fixed(self, score_BL, capacity):
    return score_BL > routing.gaussian_threshold(capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stride(_Free):
  """A fixed pattern of positions, evenly spread: a control."""

  gates = False

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return routing.stride_scores(info.position_BL, capacity)

  def fixed(self, score_BL, capacity):
    return score_BL > 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(_Free):
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
