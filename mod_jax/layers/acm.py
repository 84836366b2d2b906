"""Adaptive computation modules: each token runs as many learners as it needs.

Wójcik et al. 2023: `h(z, k) = Σ_{n≤k} s_n(z)`. Each learner s_n is a small
two-layer network; a gate chooses k for each token.
"""

import dataclasses
import functools
import math
import re
from typing import Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax import errors, parallel
from mod_jax.errors import require
from mod_jax.layers import dense, lora, mlp
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.experts import ExpertMLPConfig
from mod_jax.layers.slots import Slot
import mod_jax_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ACMConfig(Slot):
  """Sizes of an adaptive module that replaces a dense one."""

  inputs: config_lib.Size  # D, input features, heads flattened.
  outputs: config_lib.Size  # Output features, heads flattened.
  hidden: config_lib.Size  # F, hidden units of each learner.
  num_learners: config_lib.Unrolled = 4  # Learners of each module (N).
  min_learners: Literal[0, 1] = 0  # Fewest learners that the gate may choose.
  activation: Literal['gelu', 'linear'] = 'gelu'  # Activation of learners.
  # Temperature of the gate's softmax and Gumbel-softmax.
  temperature: config_lib.Temperature = 0.8
  # Sizes of the output axes; () = the single axis `outputs`.
  output_shape: tuple[config_lib.Size, ...] = ()
  # Replacements of the linear maps of each learner by name: `up`, `down`.
  slots: tuple[tuple[str, Slot], ...] = ()

  def run(self, x, info, *, name, dtype, mode):
    # A distinct name, so that no dense checkpoint loads here by accident.
    module = ACM(
      *(self, mode.learners, mode.noise), dtype=dtype, name=f'{name}_acm'
    )
    y_BLD, choice = module(x.reshape(*x.shape[:2], -1))
    choice = choice.replace(valid_BL=info.valid_BL, index_BL=info.index_BL)
    shape = self.output_shape or (self.outputs,)
    return y_BLD.reshape(*x.shape[:2], *shape), {'adaptive': choice}

  def flops(self, tokens):
    """Returns forward FLOPs by part, with all learners.

    Adapters are not counted: they are added to the kernels once per batch.
    """
    return {
      'learners': tokens * self.num_learners * self.learner_flops,
      'gate': tokens * self.gate_flops,
    }

  def weight_flops(self, name, tokens):
    name = f'{name}_acm'
    counts = {f'{name}/gate': tokens * self.gate_flops}
    for map_name, slot in self.maps.items():
      flops = lora.stacked_flops(
        slot, f'{name}/{map_name}', tokens * self.num_learners
      )
      counts |= flops
    return counts

  @property
  def num_params(self):
    gate = self.gate_hidden * (self.inputs + 1 + self.num_choices)
    learner = self.hidden + sum(slot.num_params for slot in self.maps.values())
    return self.num_learners * learner + gate + self.num_choices

  @functools.cached_property
  def maps(self):
    up = dense.LinearConfig(
      inputs=(self.inputs,), outputs=(self.hidden,), axes=('embed', 'mlp')
    )
    down = dense.LinearConfig(
      inputs=(self.hidden,), outputs=(self.outputs,), axes=('mlp', 'embed')
    )
    return {'up': up, 'down': down} | dict(self.slots)

  @property
  def num_choices(self) -> int:
    """M, the number of learner counts that the gate chooses among."""
    return self.num_learners + 1 - self.min_learners

  @property
  def learner_flops(self) -> int:
    """FLOPs of one learner on one token."""
    return 2 * self.hidden * (self.inputs + self.outputs)

  @property
  def gate_hidden(self) -> int:
    """Hidden units of a gate that costs one percent of all learners."""
    cost = self.num_learners * self.learner_flops / 100
    # A single unit could hardly distinguish the choices.
    return max(2, int(cost / (2 * (self.inputs + self.num_choices))))

  @property
  def gate_flops(self) -> int:
    """FLOPs of the gate on one token."""
    return 2 * self.gate_hidden * (self.inputs + self.num_choices)


def ffn_config(width: int, hidden: int, **kwargs) -> ACMConfig:
  """Returns an adaptive FFN; all its learners cost as much as a dense FFN.

  By default the gate may choose no learners. `hidden` is the dense FFN's number
  of hidden units, which the number of learners must divide (else UserError).
  `kwargs` are fields of `ACMConfig`.
  """
  learners = kwargs.get('num_learners', ACMConfig.num_learners)
  require(
    hidden % learners == 0,
    'learners that divide the hidden units',
    num_learners=learners,
    hidden=hidden,
  )
  return ACMConfig(
    inputs=width, outputs=width, hidden=hidden // learners, **kwargs
  )


def projection_config(inputs: int, outputs: int, **kwargs) -> ACMConfig:
  """Returns an adaptive projection; all learners cost as much as a dense one.

  At least one learner runs. `kwargs` are fields of `ACMConfig`.
  """
  learners = kwargs.get('num_learners', ACMConfig.num_learners)
  # Match the parameters: the dense map has inputs · outputs + outputs, and a
  # learner F · (inputs + outputs) + F.
  hidden = round(
    (inputs * outputs + outputs) / ((inputs + outputs + 1) * learners)
  )
  require(
    hidden,
    'fewer learners, each of which needs a hidden unit',
    num_learners=learners,
    inputs=inputs,
    outputs=outputs,
  )
  sizes = {'inputs': inputs, 'outputs': outputs, 'hidden': hidden}
  return ACMConfig(**sizes, min_learners=1, **kwargs)


@flax.struct.dataclass
class Choice:
  """Choices of a gate, out of M learner counts: `min_learners`, …, N.

  Attributes:
    learners_BL: int32 number of learners of each token.
    logits_BLM: float32 logits of the choices; None if `Learners` is a number.
    one_hot_BLM: the choice, with the gradient of a softmax (straight-through);
      None outside of training.
    valid_BL: False for padding, empty slots and dropped tokens; None if all
      tokens are valid.
    index_BL: int32 positions of these tokens in the row that the model was
      called with; None if all tokens of that row are present, in order.
  """

  learners_BL: jax.Array
  logits_BLM: jax.Array | None = None
  one_hot_BLM: jax.Array | None = None
  valid_BL: jax.Array | None = None
  index_BL: jax.Array | None = None


FFNS = r'block_\d+/mlp'
PROJECTIONS = r'block_\d+/attention/(query|key|value|out)'

# How a module runs: `gated` runs as many learners as its gate says; `train`
# runs all, weighted by a differentiable sample of the gate's choice; an integer
# k runs the first k; `all` returns h(z, k) for every k.
Learners = Literal['gated', 'train', 'all'] | int


class ACM(nn.Module):
  """Learners and their gate.

  Rng streams: `params`; `gumbel` in mode `train` with `noise`.
  """

  config: ACMConfig
  dtype: str = dataclasses.field(default='float32', kw_only=True)
  mode: Learners = 'gated'
  noise: bool = True  # Whether `train` samples its choices or takes the best.

  def setup(self):
    config = self.config
    learners, hidden = config.num_learners, config.hidden

    def stacked(name, inputs, outputs, axes, scale):
      # The fan-in is that of one learner.
      init = nn.initializers.variance_scaling(
        scale, 'fan_in', 'truncated_normal', in_axis=1, out_axis=2, batch_axis=0
      )
      return self.param(
        name,
        nn.with_logical_partitioning(init, axes),
        (learners, inputs, outputs),
      )

    self.up_NDF = stacked(
      'up', config.inputs, hidden, ('replicated', 'embed', 'mlp'), 1.0
    )
    # Scaled so that the sum over learners has a dense layer's variance.
    self.down_NFD = stacked(
      *('down', hidden, config.outputs, ('replicated', 'mlp', 'embed')),
      1.0 / learners,
    )
    self.bias_NF = self.param(
      'bias',
      nn.with_logical_partitioning(
        nn.initializers.zeros, ('replicated', 'mlp')
      ),
      (learners, hidden),
    )
    self.gate = Gate(config)

    self.up_NDF, self.down_NFD = (
      lora.adapted(config.maps[name], kernel_NIO, 'replicated', name)
      for name, kernel_NIO in (('up', self.up_NDF), ('down', self.down_NFD))
    )

  def __call__(self, z_BLD: jax.Array) -> tuple[jax.Array, Choice]:
    """Returns y_BLD and the choice; in mode `all` y_KBLD for k = 0, …, N."""
    config, mode = self.config, self.mode
    if isinstance(mode, int):
      require(
        0 <= mode <= config.num_learners,
        f'0 to {config.num_learners}',
        learners=mode,
      )
      learners_BL = jnp.full(z_BLD.shape[:2], mode, jnp.int32)
      return self._sum(z_BLD, learners=mode), Choice(learners_BL)
    logits_BLM = self.gate(z_BLD)
    chosen_BL = config.min_learners + logits_BLM.argmax(axis=-1)
    choice = Choice(chosen_BL.astype(jnp.int32), logits_BLM)
    match mode:
      case 'all':
        # Add in a loop: `cumsum` takes forty times as long on CPUs.
        sums = [jnp.zeros((*z_BLD.shape[:2], config.outputs), self.dtype)]
        for y_BLD in self._each(z_BLD):
          sums.append(sums[-1] + y_BLD)
        return jnp.stack(sums), choice
      case 'train':
        drawn_BLM = logits_BLM
        if self.noise:
          key = self.make_rng('gumbel')
          drawn_BLM += jax.random.gumbel(key, logits_BLM.shape)
        soft_BLM = jax.nn.softmax(drawn_BLM / config.temperature)
        hard_BLM = jax.nn.one_hot(soft_BLM.argmax(axis=-1), config.num_choices)
        # The parentheses make the sum exactly 0 or 1.
        one_hot_BLM = hard_BLM + (soft_BLM - jax.lax.stop_gradient(soft_BLM))
        choice = choice.replace(
          learners_BL=config.min_learners
          + soft_BLM.argmax(axis=-1).astype(jnp.int32),
          one_hot_BLM=one_hot_BLM,
        )
        return self._sum(z_BLD, runs_BLN=runs(one_hot_BLM, config)), choice
    return self._chosen(z_BLD, choice.learners_BL), choice

  def _chosen(self, z_BLD, learners_BL):
    """Returns y_BLD: the sum of each token's first `learners_BL` learners."""
    config = self.config

    def run(z_BLD, up_NDF, bias_NF, down_NFD, learners_BL):
      batch, length, width = z_BLD.shape
      y_TD = mod_jax_kernels.acm_mlp(
        z_BLD.reshape(-1, width),
        up_NDF,
        bias_NF,
        down_NFD,
        learners_BL.reshape(-1),
        activation=config.activation,
      )
      y_BLD = y_TD.reshape(batch, length, config.outputs)
      return (parallel.sum_over(y_BLD, 'mlp'),)  # Hidden units are sharded.

    weight_axes = (
      (None, None, 'mlp'),
      (None, 'mlp'),
      (None, 'mlp', None),
    )
    token_axes = ('batch', 'length', None)
    (y_BLD,) = parallel.per_device(
      run, (token_axes, *weight_axes, ('batch', 'length')), (token_axes,)
    )(
      z_BLD.astype(self.dtype),
      # `acm_mlp` casts these to the dtype of z. Casting them before
      # `per_device` would make the sum of gradients over devices bfloat16.
      *(self.up_NDF, self.bias_NF, self.down_NFD),
      learners_BL,
    )
    return y_BLD

  def _each(self, z_BLD):
    """Returns y_NBLD, the output of each learner."""
    hidden_NBLF = self._hidden(
      'BLD,NDF->NBLF', z_BLD, self.up_NDF, self.bias_NF[:, None, None]
    )
    return dense.einsum('NBLF,NFD->NBLD', hidden_NBLF, self.down_NFD)

  def _sum(self, z_BLD, *, learners=None, runs_BLN=None):
    """Returns the sum of the first `learners`, with the weights `runs_BLN`."""
    if learners == 0:
      return jnp.zeros((*z_BLD.shape[:2], self.config.outputs), self.dtype)
    hidden_BLNF = self._hidden(
      'BLD,NDF->BLNF', z_BLD, self.up_NDF[:learners], self.bias_NF[:learners]
    )
    if runs_BLN is not None:
      # Weight before the second product, which also sums over learners: doing
      # it afterwards would need every learner's separate output.
      hidden_BLNF = hidden_BLNF * runs_BLN[..., None]
      hidden_BLNF = hidden_BLNF.astype(self.dtype)
    return dense.einsum('BLNF,NFD->BLD', hidden_BLNF, self.down_NFD[:learners])

  def _hidden(self, spec, z_BLD, up_NDF, bias):
    hidden = dense.einsum(spec, z_BLD.astype(self.dtype), up_NDF)
    # Cast after adding, so that the bias gets a float32 gradient.
    hidden = (hidden + bias).astype(self.dtype)
    if self.config.activation == 'gelu':
      hidden = mlp.gelu(hidden)
    return hidden


class Gate(nn.Module):
  """Two-layer network in float32: logits of a token's number of learners."""

  config: ACMConfig

  @nn.compact
  def __call__(self, z_BLD: jax.Array) -> jax.Array:
    def linear(features, name):
      return dense.Linear(
        (features,), ('replicated', 'replicated'), bias=True, name=name
      )

    # Keep accelerators from rounding to bfloat16: the forward pass and decoding
    # could then disagree about the largest logit.
    with jax.default_matmul_precision('highest'):
      hidden_BLF = linear(self.config.gate_hidden, 'hidden')(
        z_BLD.astype(jnp.float32)
      )
      hidden_BLF = mlp.gelu(hidden_BLF)
      return linear(self.config.num_choices, 'logits')(hidden_BLF)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
  """Which modules of a dense model are adaptive, and how."""

  # Regular expressions of the modules to replace; each must match a full name.
  replace: tuple[str, ...] = (FFNS, PROJECTIONS)
  num_learners: config_lib.Unrolled = 4  # Learners of each module (N).
  # Temperature of the gate's softmax and Gumbel-softmax.
  temperature: config_lib.Temperature = 0.8

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.replace, f'names of modules, such as {(FFNS,)}', 'replace')
    for pattern in self.replace:
      errors.require_pattern(pattern, 'replace')

  def check(self, block: BlockConfig, num_layers: int) -> None:
    """Raises UserError if a pattern matches no module of the model."""
    layers = range(num_layers)
    names = [f'block_{i}/{name}' for i in layers for name in block.slots]
    expected = 'modules such as block_0/mlp, block_0/attention/query'
    errors.require_matches(self.replace, names, expected, 'replace')

  def adapt(self, layer: int, block: BlockConfig) -> BlockConfig:
    """Returns the block of this layer with adaptive modules in its slots."""
    return block.with_slots(
      {
        name: self._module(name, slot, block.attention.width)
        for name, slot in block.slots.items()
        if any(
          re.fullmatch(pattern, f'block_{layer}/{name}')
          for pattern in self.replace
        )
      }
    )

  def _module(self, name: str, slot: Slot, width: int) -> ACMConfig:
    common = {
      'num_learners': self.num_learners,
      'temperature': self.temperature,
    }
    if name == 'mlp':
      require(
        not isinstance(slot, ExpertMLPConfig),
        f'projections alone, such as {(PROJECTIONS,)}, or experts=None',
        **{'adaptive.replace': self.replace},
      )
      # Hidden units of a feed-forward with two kernels that costs as much as
      # this one, which has three kernels if it is gated.
      hidden = sum(slot.flops(1).values()) // (4 * width)
      return ffn_config(width, hidden, **common)
    return projection_config(
      math.prod(slot.inputs),
      math.prod(slot.outputs),
      output_shape=slot.outputs,
      **common,
    )


def runs(choice_BLM: jax.Array, config: ACMConfig) -> jax.Array:
  """Returns runs_BLN, the weight of each learner: Σ_{k≥n} ν_k.

  `choice_BLM` holds the weights ν of the choices, one-hot or soft.
  """
  # Learner n, counted from 1, runs wherever k >= n.
  k_M = np.arange(config.min_learners, config.num_learners + 1)
  above_MN = k_M[:, None] >= np.arange(1, config.num_learners + 1)
  return choice_BLM @ above_MN.astype(choice_BLM.dtype)
