"""Scores per token, by which a routed block chooses.

Of earlier blocks, a score sees only how much attention each token received.
`attention.Attention` computes this, and `stack.Group` passes it on.
"""

import abc
import dataclasses
from typing import Annotated, ClassVar, Literal

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.layers.token_info import TokenInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(config_lib.Validated, abc.ABC):
  """How the tokens of a routed block are scored.

  Subclasses must be frozen dataclasses, in any module. A saved config names the
  module, which must be imported before the config is read.

  Attributes:
    gate: gate to use if the config names none; see `routing.gate`.
    gates: whether the score can multiply the update at all.
    needs_attention: whether `run` needs the attention that the tokens received
      in the previous block, which then must be dense.
    attention: which attention `run` needs. `mean`: the mean over all tokens
      that attend; `last`: that of the prompt's last token, computed once,
      before the first routed block.
  """

  gate: ClassVar[str] = 'none'
  gates: ClassVar[bool] = True
  needs_attention: ClassVar[bool] = False
  attention: ClassVar[Literal['mean', 'last']] = 'mean'

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
      module: the routed layer, within whose compact method this is called. It
        gives access to the random stream `routing`, to submodules, and to
        variables of the collection `moving`, which training keeps for each
        layer. Update these only if `module.is_mutable_collection('moving')`
        and not `module.is_initializing()`.
      x_BLD: features.
      info: facts about the tokens.
      capacity: fraction of the tokens that the layer processes.
      attention_BL: attention received in the previous block; None if unknown.
    """

  @abc.abstractmethod
  def flops(self, length: int, width: int) -> int:
    """Returns the FLOPs of scoring a sequence of `length` tokens.

    Counts matrix and vector products only, 2 FLOPs per multiply-add.
    """

  def fixed(self, score_BL: jax.Array, capacity: float) -> jax.Array | None:
    """Returns mask_BL: the tokens that a fixed threshold chooses.

    Scores that depend on the tokens have no fixed threshold; they return None.
    """
    del score_BL, capacity
    return None


Activation = Literal['gelu', 'relu', 'silu', 'tanh']


class Router(nn.Module):
  """Computes a float32 score per token; the fields are those of `Learned`."""

  std: float
  normalized: bool = False
  bias: bool = False
  hidden: int = 0
  activation: Activation = 'gelu'

  @nn.compact
  def weights(self, width: int) -> dict[str, jax.Array]:
    """Returns the parameters by name, for features of this width."""
    weights, zeros = {}, nn.initializers.zeros

    def create(name, init, *shape):
      names = ('replicated',) * len(shape)
      init = nn.with_logical_partitioning(init, names)
      weights[name] = self.param(name, init, shape)

    if self.hidden:
      init = nn.initializers.lecun_normal()
      create('hidden_kernel', init, width, self.hidden)
      if self.bias:
        create('hidden_bias', zeros, self.hidden)
    create('kernel', nn.initializers.normal(self.std), self.hidden or width)
    if self.bias:
      create('bias', zeros)
    return weights

  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    weights = self.weights(x_BLD.shape[-1])
    x = x_BLD.astype(jnp.float32)
    if self.normalized:
      x = scale_to_unit(x)
    if self.hidden:
      # Keep accelerators from rounding to bfloat16: the forward pass and
      # decoding could then order nearly equal scores differently.
      x = jnp.matmul(x, weights['hidden_kernel'], precision='highest')
      if self.bias:
        x += weights['hidden_bias']
      x = getattr(nn, self.activation)(x)
    # Use no einsum: accelerators would round its operands to bfloat16.
    score_BL = jnp.sum(x * weights['kernel'], axis=-1)
    return score_BL + weights['bias'] if self.bias else score_BL


def scale_to_unit(x_BLD: jax.Array) -> jax.Array:
  """Scales each token's features to a mean square of 1."""
  return x_BLD * jax.lax.rsqrt(
    jnp.mean(x_BLD**2, axis=-1, keepdims=True) + 1e-6
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned(Score):
  """The output of a `Router`: Mixture-of-Depths (Raposo et al. 2024, § 3.4)."""

  gate = 'raw'

  # Standard deviation of the initial weights; at 0 all tokens start with the
  # same score.
  std: config_lib.Weight = 0.02
  # Whether each token's features are first scaled to a mean square of 1.
  normalized: bool = False
  bias: bool = False  # Biases of the maps; the paper has none.
  # Units of the hidden layer; 0 = a linear router.
  hidden: Annotated[int, config_lib.Range(ge=0, le=2**20)] = 0
  activation: Activation = 'gelu'  # Activation of the hidden layer.
  # Whether all routed blocks share one router (γ-MoD, Luo et al. 2024). The
  # `Stack` creates it and passes it to its layers.
  shared: bool = False

  def router(self, **kwargs) -> Router:
    """Returns the module; `kwargs` are its `name` and `parent`, if any."""
    return Router(
      *(self.std, self.normalized, self.bias, self.hidden, self.activation),
      **kwargs,
    )

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return self.router(name='router')(x_BLD)

  def flops(self, length, width):
    if not self.hidden:
      return 2 * length * width
    return 2 * length * self.hidden * (width + 1)


class _Free(Score):
  """A score that costs no FLOPs."""

  def flops(self, length, width):
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian(_Free):
  """Samples from N(0, 1): the paper's stochastic routing, a control."""

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
  """The attention that a token received in the previous block.

  A-MoD (Gadhikar et al. 2024, Eq. 4): it has no parameters, and does not
  multiply the update unless the config names a gate.
  """

  needs_attention = True

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return attention_BL


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastAttention(Attention):
  """The attention of the prompt's last token (FastV, Chen et al. 2024).

  All routed blocks choose by the attention in the block before the first routed
  one. They must choose among image tokens only, which precede the prompt's last
  token, hence the choice does not depend on the last answer.
  """

  attention = 'last'


# Scores by the names that configs and command lines use. The fields `score` in
# `routing_config.py` list these names, too.
SCORES = {
  'learned': Learned,
  'gaussian': Gaussian,
  'stride': Stride,
  'attention': Attention,
  'last_attention': LastAttention,
}
