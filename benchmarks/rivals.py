"""Rival methods as somebody else would add them: from public names only.

Each is a score, a selection or a way to process of its own: A-ViT halts tokens,
MoEfication runs some of a feed-forward's neurons, and Zero Time Waste lets
pictures leave early.
"""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from mod_jax import config as config_lib
from mod_jax import flops, routing
from mod_jax.layers.mode import Mode
from mod_jax.layers.slots import Slot
from mod_jax.layers.token_info import in_order
from mod_jax.models import vit
from mod_jax.models.vit import ViTConfig
import mod_jax_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class AViTConfig:
  """A vision transformer whose tokens halt: A-ViT (Yin et al. 2022)."""

  backbone: ViTConfig
  gamma: float = 10.0  # γ and β of the halting score σ(γ · x₀ - β).
  beta: float = 30.0
  epsilon: float = 0.01  # A token halts where its scores sum to 1 - ε.
  # Slots for the tokens that still run, for each block; None to mask halted
  # tokens instead of removing them, as in training.
  slots: tuple[int, ...] | None = None

  def build(self, **mode) -> 'AViT':
    return AViT(self, Mode(**mode))

  def block_flops(self) -> int:
    """Returns the forward FLOPs of all blocks with the slots, without norms."""
    slots = self.slots or (self.backbone.num_tokens,) * self.backbone.num_layers
    blocks = map(self.backbone.block_flops, range(len(slots)), slots)
    return sum(map(flops.products, blocks))


@flax.struct.dataclass
class AViTOutput:
  """What a forward pass returns. I blocks.

  Attributes:
    logits_BV: logits of the halting-weighted sum of the class token.
    ponder_BL: blocks that each token ran, and the rest of its halting score.
      Only of the tokens that are left, if halted ones are removed.
    halting_I: mean halting score of each block.
    running_BI: tokens that reach each block.
    overflow_B: running tokens that found no slot.
  """

  logits_BV: jax.Array
  ponder_BL: jax.Array
  halting_I: jax.Array
  running_BI: jax.Array
  overflow_B: jax.Array


@flax.struct.dataclass
class _Halting:
  """State of the tokens that are present."""

  x_BLD: jax.Array
  total_BL: jax.Array  # Halting scores so far.
  ponder_BL: jax.Array
  running_BL: jax.Array


class AViT(nn.Module):
  """Score: channel 0. Select: the running tokens. Combine: a weighted sum.

  A halted token stays as it is and is no key. The head sees the class token's
  features after each block, weighted by its halting scores, which sum to 1.
  """

  config: AViTConfig
  mode: Mode = Mode()

  def setup(self):
    self.backbone = vit.ViT(self.config.backbone, self.mode)
    nn.share_scope(self, self.backbone)

  def __call__(self, images_BHWC: jax.Array) -> AViTOutput:
    config = self.config
    x_BLD = self.backbone.embed(images_BHWC)
    info = in_order(x_BLD)
    info = info.replace(index_BL=info.position_BL)
    zeros_BL = jnp.zeros(x_BLD.shape[:2])
    state = _Halting(x_BLD, zeros_BL, zeros_BL, zeros_BL == 0)
    out_BD = jnp.zeros_like(x_BLD[:, 0])
    overflow_B = jnp.zeros(len(x_BLD), jnp.int32)
    halting, counts = [], []
    for i in range(config.backbone.num_layers):
      counts.append(state.running_BL.sum(axis=-1))
      if config.slots is not None:
        chosen = routing.select_decided(state.running_BL, config.slots[i])
        index_BK = chosen.index_BK
        state = jax.tree.map(
          lambda x, index=index_BK: routing.gather_tokens(x, index), state
        )
        state = state.replace(running_BL=chosen.valid_BK)
        info = info.gather(chosen)
        overflow_B += counts[-1] - chosen.valid_BK.sum(axis=-1)
      info = info.replace(valid_BL=state.running_BL)
      last = i == config.backbone.num_layers - 1
      x_BLD = self.backbone.step(i, state.x_BLD, info=info).x_BLD
      state, weight_BL, score_BL = self._halt(state, x_BLD, last)
      is_class_BL = info.index_BL == 0
      out_BD += jnp.einsum(
        'BL,BLD->BD', jnp.where(is_class_BL, weight_BL, 0), state.x_BLD
      )
      ran_BL = info.valid_BL
      count = jnp.maximum(ran_BL.sum(), 1)  # Perhaps all have halted.
      halting.append(jnp.sum(score_BL, where=ran_BL) / count)
    logits_BV, _ = self.backbone.classify(out_BD[:, None])
    return AViTOutput(
      logits_BV,
      state.ponder_BL,
      jnp.stack(halting),
      jnp.stack(counts, axis=1),
      overflow_B,
    )

  def _halt(self, state, x_BLD, last):
    """Returns the state after a block, weight_BL in the sum, and score_BL."""
    config, running_BL = self.config, state.running_BL
    x_BLD = jnp.where(running_BL[..., None], x_BLD, state.x_BLD)
    score_BL = nn.sigmoid(config.gamma * x_BLD[..., 0] - config.beta)
    score_BL = jnp.ones_like(score_BL) if last else score_BL
    total_BL = state.total_BL + jnp.where(running_BL, score_BL, 0)
    halts_BL = running_BL & (total_BL >= 1 - config.epsilon)
    rest_BL = 1 - state.total_BL
    weight_BL = jnp.where(halts_BL, rest_BL, score_BL)
    weight_BL = jnp.where(running_BL, weight_BL, 0)
    ponder_BL = state.ponder_BL + running_BL
    ponder_BL += jnp.where(halts_BL, rest_BL, 0)
    after = _Halting(x_BLD, total_BL, ponder_BL, running_BL & ~halts_BL)
    return after, weight_BL, score_BL


def halting_loss(
  output: AViTOutput, ponder: float, spread: float, depth: float
) -> jax.Array:
  """Returns what A-ViT adds to the cross-entropy.

  Args:
    output: that of a pass with masks.
    ponder: α_p, weight of the mean number of blocks.
    spread: α_d, weight of the divergence of the blocks' halting scores from a
      Gaussian.
    depth: the block, counted from 1, around which that Gaussian is.
  """
  block_I = jnp.arange(1, len(output.halting_I) + 1)
  target_I = jax.nn.softmax(-((block_I - depth) ** 2) / 2)
  halting_I = output.halting_I / output.halting_I.sum()
  divergence = target_I @ (jnp.log(target_I) - jnp.log(halting_I + 1e-8))
  return ponder * output.ponder_BL.mean() + spread * divergence


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEfied(Slot):
  """A ReLU feed-forward in experts: MoEfication (Zhang et al. 2022).

  Score: a router of two maps. Select: k experts of each token. Process: by
  groups. Combine: the sum, without weights.
  """

  width: config_lib.Size
  hidden: config_lib.Size  # Neurons of all experts.
  num_experts: config_lib.Size
  k: config_lib.Size  # Experts of a token.
  router: config_lib.Size = 128  # Hidden units of the router.

  def run(self, x, info, *, name, dtype, mode):
    return MoEfiedMLP(self, dtype, name=name)(x)

  def flops(self, tokens):
    units = self.k * self.hidden // self.num_experts
    router = self.router * (self.width + self.num_experts)
    return {
      'mlp': 4 * tokens * self.width * units,
      'router': 2 * tokens * router,
    }

  @property
  def num_params(self):
    router = self.router * (self.width + self.num_experts)
    mlp = 2 * self.width * self.hidden + self.hidden + self.width
    return mlp + router


class MoEfiedMLP(nn.Module):
  config: MoEfied
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x_BLD):
    """Returns the update, and score_BLE of the experts with their input."""
    config = self.config
    experts, each = config.num_experts, config.hidden // config.num_experts

    def param(name, init, *shape_and_axes):
      shape, axes = zip(*shape_and_axes, strict=True)
      return self.param(name, nn.with_logical_partitioning(init, axes), shape)

    lecun = nn.initializers.lecun_normal(batch_axis=0)
    zeros = nn.initializers.zeros
    e, d, f = (experts, 'experts'), (config.width, 'embed'), (each, 'mlp')
    up_EDF, down_EFD = (
      param('up', lecun, e, d, f),
      param('down', lecun, e, f, d),
    )
    up_EF, down_D = param('up_bias', zeros, e, f), param('down_bias', zeros, d)
    # Routers learn from the features, which do not learn from them.
    seen_BLD = jax.lax.stop_gradient(x_BLD)
    unit_BLD = seen_BLD / (
      jnp.linalg.norm(seen_BLD, axis=-1, keepdims=True) + 1e-6
    )
    score_BLE = unit_BLD
    for i, size in enumerate((config.router, experts)):
      kernel = nn.with_logical_partitioning(
        nn.initializers.lecun_normal(), ('replicated', 'replicated')
      )
      layer = nn.Dense(size, use_bias=False, kernel_init=kernel, name=f'r{i}')
      score_BLE = layer(score_BLE if i == 0 else nn.tanh(score_BLE))
    expert_A = jax.lax.top_k(score_BLE, config.k)[1].reshape(-1)
    order_A = jnp.argsort(expert_A, stable=True)
    token_A, group_A = order_A // config.k, expert_A[order_A]
    size_E = jnp.bincount(expert_A, length=experts).astype(jnp.int32)
    x_TD = x_BLD.reshape(-1, config.width).astype(self.dtype)
    hidden_AF = mod_jax_kernels.grouped_dot(x_TD[token_A], up_EDF, size_E)
    hidden_AF = nn.relu(hidden_AF + up_EF[group_A]).astype(self.dtype)
    y_AD = mod_jax_kernels.grouped_dot(hidden_AF, down_EFD, size_E)
    y_TD = jnp.zeros(x_TD.shape, jnp.float32).at[token_A].add(y_AD) + down_D
    y_BLD = y_TD.reshape(x_BLD.shape).astype(self.dtype)
    return y_BLD, {'moefied': (score_BLE, x_BLD)}


def split_neurons(
  up_DF: np.ndarray, num_experts: int, rounds: int = 20
) -> np.ndarray:
  """Returns neuron_EF: the neurons of each expert, all of equal size.

  Balanced k-means over the neurons' input weights, scaled to unit length: each
  round assigns them to as many places near each centre, at the least cost.
  """
  row_FD = up_DF.T / np.linalg.norm(up_DF, axis=0)[:, None]
  each = len(row_FD) // num_experts
  centre_ED = [row_FD[0]]
  for _ in range(num_experts - 1):  # The farthest from all centres so far.
    near_F = (row_FD @ np.stack(centre_ED).T).max(axis=1)
    centre_ED.append(row_FD[near_F.argmin()])
  centre_ED = np.stack(centre_ED)
  for _ in range(rounds):
    cost_FP = np.repeat(-row_FD @ centre_ED.T, each, axis=1)
    _, place_F = optimize.linear_sum_assignment(cost_FP)
    neuron_EF = np.argsort(place_F).reshape(num_experts, each)
    centre_ED = row_FD[neuron_EF].mean(axis=1)
  return neuron_EF


def moefied_params(
  mlp: dict[str, Any], neuron_EF: np.ndarray
) -> dict[str, Any]:
  """Returns a ReLU feed-forward's parameters, as experts; without a router."""
  up_DEF = mlp['up']['kernel'][:, neuron_EF]
  return {
    'up': jnp.moveaxis(up_DEF, 1, 0),
    'up_bias': mlp['up']['bias'][neuron_EF],
    'down': mlp['down']['kernel'][neuron_EF],
    'down_bias': mlp['down']['bias'],
  }


def router_loss(
  score_BLE: jax.Array, x_BLD: jax.Array, params: dict[str, Any]
) -> jax.Array:
  """Returns the cross-entropy of the scores with how active each expert is."""
  hidden_BLEF = jnp.einsum('BLD,EDF->BLEF', x_BLD, params['up'])
  hidden_BLEF = nn.relu(hidden_BLEF + params['up_bias'])
  active_BLE = hidden_BLEF.sum(axis=-1)
  target_BLE = jax.lax.stop_gradient(active_BLE / active_BLE.max())
  loss_BLE = jax.nn.softplus(score_BLE) - target_BLE * score_BLE
  return loss_BLE.mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZTWConfig:
  """A backbone with exits: Zero Time Waste (Wołczyk et al. 2021)."""

  backbone: ViTConfig
  hidden: config_lib.Size = 32  # Hidden units of a head.

  def build(self, **mode) -> 'ZTW':
    return ZTW(self, Mode(**mode))

  def exit_flops(self) -> list[int]:
    """Returns the forward FLOPs of a picture that leaves after each block."""
    model = self.backbone
    classes, last = model.num_classes, model.num_layers - 1
    blocks = [
      flops.products(model.block_flops(i, model.num_tokens))
      for i in range(model.num_layers)
    ]
    total, after = flops.forward(model) - sum(blocks), []
    total -= 2 * model.width * classes  # Only the last exit runs this head.
    for i, block in enumerate(blocks):
      joined = self.hidden + (classes if i else 0)
      head = model.width * self.hidden + (joined + i + 1) * classes
      total += block + 2 * (model.width * classes if i == last else head)
      after.append(total)
    return after


class ZTW(nn.Module):
  """Heads after all blocks but the last; the last one is the backbone's.

  Each head also reads the logits of the one before, and predicts by a weighted
  geometric mean of all heads so far. Gradients do not reach the backbone.
  """

  config: ZTWConfig
  mode: Mode = Mode()

  def setup(self):
    config = self.config.backbone
    self.backbone = vit.ViT(config, self.mode)
    nn.share_scope(self, self.backbone)
    exits = range(config.num_layers - 1)
    self.hidden = [nn.Dense(self.config.hidden) for _ in exits]
    self.logit_norm = [nn.LayerNorm() for _ in exits]
    self.exit = [nn.Dense(config.num_classes) for _ in exits]
    zeros, near = nn.initializers.zeros, nn.initializers.normal(0.01)
    self.weight = [self.param(f'weight_{i}', near, (i + 1,)) for i in exits]
    self.bias = [
      self.param(f'bias_{i}', zeros, (config.num_classes,)) for i in exits
    ]

  def __call__(self, images_BHWC: jax.Array) -> jax.Array:
    """Returns log_BIV: log-probabilities of all exits, of all pictures."""
    x_BLD = self.backbone.embed(images_BHWC)
    heads_BIV = jnp.zeros((len(x_BLD), 0, self.config.backbone.num_classes))
    logs = []
    for i in range(self.config.backbone.num_layers):
      x_BLD, heads_BIV, log_BV = self.step(i, x_BLD, heads_BIV)
      logs.append(log_BV)
    return jnp.stack(logs, axis=1)

  def embed(self, images_BHWC: jax.Array) -> jax.Array:
    return self.backbone.embed(images_BHWC)

  def step(self, i: int, x_BLD: jax.Array, heads_BIV: jax.Array):
    """Runs a block and its head.

    Returns x_BLD, heads_BIV with the head's logits added, and log_BV, the
    log-probabilities to leave by.
    """
    x_BLD = self.backbone.step(i, x_BLD).x_BLD
    if i == len(self.exit):
      logits_BV, _ = self.backbone.classify(x_BLD)
      return x_BLD, heads_BIV, jax.nn.log_softmax(logits_BV)
    hidden_BF = nn.gelu(self.hidden[i](jax.lax.stop_gradient(x_BLD[:, 0])))
    if i:
      before_BV = jax.lax.stop_gradient(heads_BIV[:, -1])
      joined = [hidden_BF, self.logit_norm[i](before_BV)]
      hidden_BF = jnp.concatenate(joined, axis=-1)
    logits_BV = self.exit[i](hidden_BF)
    heads_BIV = jnp.concatenate([heads_BIV, logits_BV[:, None]], axis=1)
    log_BIV = jax.nn.log_softmax(heads_BIV)
    weight_I = jnp.exp(self.weight[i]) / (i + 1)
    mean_BV = jnp.einsum('I,BIV->BV', weight_I, log_BIV) + self.bias[i]
    return x_BLD, heads_BIV, jax.nn.log_softmax(mean_BV)


@functools.partial(jax.jit, static_argnums=(0, 4))
def leave_early(
  config: ZTWConfig, variables, images_BHWC, threshold, chunk: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Classifies, and runs no block on pictures that have left.

  Args:
    config: the model.
    variables: its variables.
    images_BHWC: pictures.
    threshold: a picture leaves where a class is more probable than this.
    chunk: how many pictures a block processes at a time.

  Returns:
    log_BV and left_B, the block after which each picture left.
  """
  model, count = config.build(), config.backbone.num_layers
  x_BLD = model.apply(variables, images_BHWC, method='embed')
  batch = len(x_BLD)
  heads_BIV = jnp.zeros((batch, count, config.backbone.num_classes))
  log_BV = heads_BIV[:, 0]
  left_B = jnp.full(batch, count - 1)
  stays_B = jnp.ones(batch, bool)
  for i in range(count):
    num_stay = stays_B.sum()
    order_B = jnp.argsort(~stays_B, stable=True)  # Those that stay, first.
    order_B = jnp.pad(order_B, (0, chunk))

    def process(state, i=i, order_B=order_B, num_stay=num_stay):
      start, x_BLD, heads_BIV, log_BV = state
      rows_C = jax.lax.dynamic_slice(order_B, (start,), (chunk,))
      x_CLD, heads_CIV, log_CV = model.apply(
        variables, i, x_BLD[rows_C], heads_BIV[rows_C, :i], method='step'
      )
      heads_CIV = jnp.pad(heads_CIV, ((0, 0), (0, count), (0, 0)))[:, :count]
      stays_C = start + jnp.arange(chunk) < num_stay
      rows_C = jnp.where(stays_C, rows_C, batch)
      new = (x_CLD, heads_CIV, log_CV)
      old = (x_BLD, heads_BIV, log_BV)
      put = [
        x.at[rows_C].set(y, mode='drop') for x, y in zip(old, new, strict=True)
      ]
      return start + chunk, *put

    _, x_BLD, heads_BIV, log_BV = jax.lax.while_loop(
      lambda state, n=num_stay: state[0] < n,
      process,
      (0, x_BLD, heads_BIV, log_BV),
    )
    leaves_B = stays_B & (jnp.exp(log_BV).max(axis=-1) > threshold)
    left_B = jnp.where(leaves_B, i, left_B)
    stays_B &= ~leaves_B
  return log_BV, left_B
