"""A decoder-only language model of the Llama kind, dense or with MoD."""

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax import errors, losses, parallel, trees
from mod_jax.errors import require
from mod_jax.layers import dense, token_info, vocabulary
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.dense import LinearConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import AdaptedConfig, LoRAConfig, linear_maps
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.quantized import Quantized
from mod_jax.layers.rope import RopeScaling
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.slots import Slot
from mod_jax.layers.stack import Stack, StackConfig
from mod_jax.losses.sums import Pair
from mod_jax.models.protocol import StackedConfig, StackedOutput

_TOKENS = 64  # Number of targets whose logits are computed at a time.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMConfig(StackedConfig):
  """Sizes and options of a `LanguageModel`, which by default has MoD."""

  vocab_size: config_lib.Size = 256  # Ids of the tokenizer (V).
  num_layers: config_lib.Unrolled = 4  # Blocks.
  width: config_lib.Width = 192  # Width of the features (D).
  num_heads: config_lib.Size = 6  # Query heads (H).
  # Heads of keys and values (G), a divisor of H; None = H.
  num_kv_heads: config_lib.Size | None = None
  # Channels of a head (C); None = width / num_heads.
  head_dim: config_lib.Size | None = None
  # Kind of the MLPs' hidden layer.
  mlp: Literal['swiglu', 'gelu', 'gelu_tanh'] = 'swiglu'
  # Hidden width of the MLPs (F); None = 4D or, with `swiglu`, 8D/3 rounded up
  # to a multiple of 32.
  mlp_dim: config_lib.Size | None = None
  feed_forward: Slot | None = None  # Replaces the MLP.
  tied_head: bool = True  # Whether the output head is the embedding.
  # Base of the wavelengths of the rotary embedding.
  rope_theta: Annotated[float, config_lib.Range(gt=1)] = 10_000.0
  rope_scaling: RopeScaling | None = None  # Scaling of wavelengths.
  # Most tokens to which a token attends, itself included; None = no limit.
  window: config_lib.Size | None = None
  qkv_bias: bool = False  # Biases of query, key and value.
  # Whether each head's queries and keys are RMS-normalised before the rotation.
  qk_norm: bool = False
  norm_epsilon: config_lib.Epsilon = 1e-6  # Epsilon of the RMS norms.
  routing: MoDConfig | None = MoDConfig()  # None = no routed blocks.
  experts: ExpertsConfig | None = None  # Mixtures of experts; None = none.
  adaptive: AdaptiveConfig | None = None  # Adaptive modules; None = none.
  lora: LoRAConfig | None = None  # Low-rank adapters; None = none.
  # Number of blocks after which the head is also trained, so that these blocks
  # can draft tokens in speculative decoding; 0 = no early exit.
  early_exit: config_lib.Count = 0
  early_loss: config_lib.Weight = 0.3  # Loss weight of the early exit.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Compute dtype.
  scan_layers: bool = False  # Compile one group of blocks and loop over it.
  remat: stack_lib.Remat = 'none'  # What is saved for the backward pass.
  # Attention backend for whole sequences; None chooses by platform.
  attention: Literal['xla', 'cudnn', 'splash'] | None = None

  # Class constants, not fields.
  kind, noun = 'language', 'a language model'
  route_methods = ('mod', 'acm')

  def __post_init__(self):
    check = config_lib.validate(self)
    check(
      self.head_dim is not None or self.width % self.num_heads == 0,
      'num_heads to divide width, or a head_dim',
      *('width', 'num_heads'),
    )
    channels = self.block.attention.head_dim
    require(
      channels % 2 == 0,
      'an even number, for the rotary embedding',
      head_dim=channels,
    )
    check(
      self.attention != 'splash' or self.window is None,
      'window=None, which this backend does not take, or another attention',
      *('attention', 'window'),
    )
    require(
      self.attention != 'cudnn'
      or (self.dtype == 'bfloat16' and channels % 8 == 0 and channels <= 256),
      "dtype='bfloat16' and multiples of 8 channels up to 256, or another"
      ' attention',
      attention=self.attention,
      dtype=self.dtype,
      head_dim=channels,
    )
    check(
      self.early_exit < self.num_layers,
      'early_exit < num_layers, or 0 for no early exit',
      *('early_exit', 'num_layers'),
    )
    check(
      not (self.early_exit and self.scan_layers),
      'early_exit=0 or scan_layers=False, since the block before the exit'
      ' differs from the others',
      *('early_exit', 'scan_layers'),
    )
    require(
      self.routing is None
      or self.routing.train_rule == 'top_k'
      or self.experts is None
      or self.experts.choice == 'token',
      "train_rule='top_k', under which experts learn when to choose, or"
      " experts.choice='token'",
      **{'routing.train_rule': self.routing and self.routing.train_rule},
    )
    _ = self.stack  # Raises if routing and so on do not fit the layers.

  @functools.cached_property
  def block(self) -> BlockConfig:
    out_scale = (2 * self.num_layers) ** -0.5
    if self.mlp_dim is not None:
      hidden = self.mlp_dim
    elif self.mlp == 'swiglu':
      hidden = -(-8 * self.width // 96) * 32
    else:
      hidden = 4 * self.width
    return BlockConfig(
      attention=AttentionConfig(
        width=self.width,
        num_heads=self.num_heads,
        num_kv_heads=self.num_kv_heads or self.num_heads,
        head_dim=self.head_dim or self.width // self.num_heads,
        rope_theta=self.rope_theta,
        rope_scaling=self.rope_scaling,
        window=self.window,
        qk_norm=self.norm_epsilon if self.qk_norm else None,
        qkv_bias=self.qkv_bias,
        out_scale=out_scale,
        implementation=self.attention,
      ),
      mlp=self.feed_forward
      or MLPConfig(
        width=self.width, hidden=hidden, kind=self.mlp, out_scale=out_scale
      ),
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
    )

  @functools.cached_property
  def stack(self) -> StackConfig:
    return StackConfig(
      layers=tuple(
        dataclasses.replace(layer, tells_features=i + 1 == self.early_exit)
        for i, layer in enumerate(self._layers(self.block))
      ),
      remat=self.remat,
      period=math.lcm(
        self.routing.period if self.routing else 1,
        self.experts.period if self.experts else 1,
      ),
      scan=self.scan_layers,
    )

  @property
  def rules(self) -> tuple[str, ...]:
    """Names of the routing rules that this config's training makes usable.

    `top_k` is the first, and the only one if no causal rule is trained. Empty
    if no choice depends on later tokens: then rules have no effect.
    """
    if self.num_routed and self.routing.kinds is None:
      causal = self.routing.causal_rules
    elif self.experts is not None and self.experts.choice == 'expert':
      causal = ('threshold',)
    else:
      return ()
    if self.experts is not None and not self.experts.causal:
      causal = ()
    return ('top_k', *causal)

  @property
  def decoding_mode(self) -> RoutingMode:
    """The mode for generation, with the first causal rule of `rules`.

    This rule chose tokens in training, unless top-k did. If `rules` is empty,
    returns the default mode. Raises UserError if `rules` has only `top_k`.
    """
    if not self.rules:
      return RoutingMode()
    if len(self.rules) == 1:
      raise errors.UserError(self.cannot_sample)
    return self.routing_mode(self.rules[1])

  @property
  def cannot_sample(self) -> str:
    """Message of the error for sampling from a model without a causal rule."""
    routing = self.routing
    if self.num_routed and routing.kinds is None and not routing.causal_rules:
      return routing.cannot_sample
    return (
      'The experts of this model choose among all tokens of a sequence and were'
      ' trained for no causal rule, so it cannot sample: set'
      ' model.experts.threshold_decay.'
    )

  def routing_mode(self, rule: str, **kwargs) -> RoutingMode:
    """Returns a `RoutingMode` with the named rule; keywords are its fields."""
    if self.routing is None:
      return RoutingMode(rule=rule, **kwargs)
    return self.routing.mode(rule, **kwargs)

  def unrolled(self, variables) -> tuple['LMConfig', dict[str, Any]]:
    """Like the function `unrolled`, for all variables by collection."""
    return dataclasses.replace(self, scan_layers=False), {
      name: stack_lib.unrolled(self.stack, collection)
      for name, collection in variables.items()
    }

  def build(self, **kwargs) -> 'LanguageModel':
    return LanguageModel(self, Mode(**kwargs))

  def example(self) -> jax.Array:
    return jnp.zeros((1, 2), jnp.int32)

  def flops_table(
    self, length: int, **kwargs
  ) -> list[tuple[str, dict[str, int]]]:
    return [
      *self.stack.flops_table(length, **kwargs),
      ('head', {'head': 2 * length * self.width * self.vocab_size}),
    ]

  def row_prefixes(self, row):
    reads = row == 'block_0' or row == 'head' and self.tied_head
    return super().row_prefixes(row) + ('embedding',) * reads


@flax.struct.dataclass
class LMCache:
  """State of generation between calls of the model.

  Attributes:
    blocks: a KVCache per block, stacked if the layers are scanned.
    length_B: int32 number of tokens so far, padding not counted.
  """

  blocks: Any
  length_B: jax.Array

  def before(self, length_B: jax.Array) -> 'LMCache':
    """Returns the cache as it was after each row's first `length_B` tokens."""
    blocks = tuple(block.before(length_B) for block in self.blocks)
    return LMCache(blocks, length_B)

  @classmethod
  def empty(
    cls,
    config: LMConfig,
    batch: int,
    length: int,
    mode: RoutingMode,
    length_B: jax.Array | None = None,
    image_places: int = 0,
  ) -> 'LMCache':
    """Returns a cache without tokens; arguments as in `StackConfig.caches`."""
    caches = config.stack.caches(batch, length, mode, length_B, image_places)
    return cls(caches, jnp.zeros(batch, jnp.int32))


@flax.struct.dataclass
class LMOutput(StackedOutput):
  """What a forward pass returns.

  Attributes:
    logits_BLV: float32 logits of the next token; None if targets were passed,
      to save the memory of all logits at once.
    aux: aux of each layer, by kind; see `stack.collect`.
    cache: the cache with the tokens added; None if none was passed.
    loss: the sum over targets of cross-entropy in nats times loss weight, and
      the sum of the loss weights; None without targets.
    early_loss: the same two sums for the head after the first `early_exit`
      blocks; None unless in training, with an early exit and targets.
    right_BL: whether each target is the likeliest token; None in training and
      without targets.
  """

  logits_BLV: jax.Array | None
  aux: tuple[dict[str, Any], ...] = ()
  cache: LMCache | None = None
  loss: Pair | None = None
  early_loss: Pair | None = None
  right_BL: jax.Array | None = None


class LanguageModel(nn.Module):
  """Maps tokens to next-token logits or, given targets, to the loss.

  Collections: `params`; with `threshold_decay` also `moving`, the moving
  averages of thresholds (make it mutable to train them).
  Rng streams: `params`; `routing` for Gaussian scores; `gumbel` to sample
  choices of learners.
  """

  config: LMConfig
  mode: Mode = Mode()

  @nn.compact
  def __call__(
    self,
    tokens_BL: jax.Array,
    *,
    valid_BL: jax.Array | None = None,
    segment_BL: jax.Array | None = None,
    mode: RoutingMode | str | None = None,
    cache: LMCache | None = None,
    targets_BL: jax.Array | None = None,
    weights_BL: jax.Array | None = None,
    depth: int | None = None,
    prompt: bool = False,
    kind_BL: jax.Array | None = None,
    features_BND: jax.Array | None = None,
  ) -> LMOutput:
    """Returns the logits or the loss, with each layer's aux and the new cache.

    Args:
      tokens_BL: int token ids.
      valid_BL: False for padding, left or right; None if no row has padding.
      segment_BL: document numbers of packed rows; tokens see only their own
        document.
      mode: how routed blocks choose tokens: a string is the name of a rule, and
        None means the module's mode. The argument must be static:
        `jax.jit(model.apply, static_argnames='mode')`.
      cache: keys and values of earlier tokens; None for whole sequences.
      targets_BL: int token ids to predict; if given, the output has the loss
        instead of logits.
      weights_BL: loss weight of each target; None for 1.
      depth: number of blocks to run before the head; None for all.
      prompt: whether the tokens are a prompt. If True, returns logits only for
        each row's last real token: the logits of all tokens can take more
        memory than the model.
      kind_BL: each token's index into `token_info.KINDS`; None if tokens have
        no kinds.
      features_BND: features that replace the embeddings of a row's tokens of
        the kind `image`, in order. A row has at most N such tokens and at most
        L - N others. None without images.
    """
    config = self.config
    mode = config.routing_mode(mode) if isinstance(mode, str) else mode
    mode = self.mode.routing if mode is None else mode
    check_tokens(
      *(config, tokens_BL, valid_BL, segment_BL, targets_BL, weights_BL)
    )
    _check_mode(config, mode, tokens_BL, segment_BL, cache)
    embedding_VD = self.param(
      'embedding',
      nn.with_logical_partitioning(
        nn.initializers.normal(config.width**-0.5), ('vocab', 'embed')
      ),
      (config.vocab_size, config.width),
    )
    # Cast after the look-up, so that the table's gradient is a float32 sum over
    # tokens; a bfloat16 sum would stop growing for the most common tokens.
    x_BLD = embedding_VD[tokens_BL].astype(config.dtype)
    info = token_info.in_order(
      tokens_BL, valid_BL, segment_BL=segment_BL, kind_BL=kind_BL
    )
    if cache is not None:
      position_BL = info.position_BL + cache.length_B[:, None]
      info = info.replace(position_BL=position_BL)
    if features_BND is not None:
      info = info.replace(image_places=features_BND.shape[1])
      x_BLD = _with_images(x_BLD, features_BND, info)
    x_BLD = parallel.constrain(x_BLD, 'batch', 'length', 'act_embed')

    stack = Stack(config.stack, dataclasses.replace(self.mode, routing=mode))
    nn.share_scope(self, stack)
    output = stack(x_BLD, info, None if cache is None else cache.blocks, depth)

    norm = dense.rms_norm(config.norm_epsilon, config.dtype, 'norm')
    x_BLD = norm(output.x_BLD)
    early_features = stack_lib.collect(output.aux, 'features')
    kernel = embedding_VD
    if not config.tied_head:
      kernel = _Head((config.width, config.vocab_size), name='head')()
    # Do not transpose a table [V, D]: loops over tokens would copy it.
    is_table = config.tied_head or isinstance(kernel, Quantized)
    axes = 'VD' if is_table else 'DV'
    logits_BLV = loss = early_loss = right_BL = None
    if prompt:
      x_BLD = _last(x_BLD, valid_BL)
    if targets_BL is None:
      logits_BLV = dense.einsum(f'BLD,{axes}->BLV', x_BLD, kernel, 'float32')
      logits_BLV = parallel.constrain(
        logits_BLV, 'batch', 'length', 'act_vocab'
      )
    else:
      if weights_BL is None:
        weights_BL = jnp.ones(targets_BL.shape, jnp.float32)
      kernel_DV = kernel.T if is_table else kernel
      loss = losses.head_loss(x_BLD, kernel_DV, targets_BL, weights_BL)
      if not self.mode.train:
        right_BL = _right(x_BLD, f'D,{axes}->V', kernel, targets_BL)
      for early_BLD in early_features.values():
        early_loss = losses.head_loss(
          norm(early_BLD), kernel_DV, targets_BL, weights_BL
        )
    if cache is not None:
      count_B = tokens_BL.shape[1]
      if valid_BL is not None:
        count_B = valid_BL.sum(axis=-1, dtype=jnp.int32)
      cache = LMCache(output.caches, cache.length_B + count_B)
    return LMOutput(logits_BLV, output.aux, cache, loss, early_loss, right_BL)


def _with_images(x_BLD, features_BND, info: token_info.TokenInfo):
  """Returns x_BLD with features_BND in place of tokens of the kind `image`."""
  is_image_BL = info.of_kinds(('image',))
  index_BL = jnp.cumsum(is_image_BL, axis=-1, dtype=jnp.int32) - 1
  index_BL = jnp.clip(index_BL, 0, features_BND.shape[1] - 1)
  image_BLD = jnp.take_along_axis(features_BND, index_BL[..., None], axis=1)
  return jnp.where(is_image_BL[..., None], image_BLD.astype(x_BLD.dtype), x_BLD)


def _last(x_BLD, valid_BL):
  """Returns the features of each row's last valid token, with L = 1."""
  if valid_BL is None:
    return x_BLD[:, -1:]
  last_B = valid_BL.shape[1] - 1 - valid_BL[:, ::-1].argmax(axis=-1)
  return jnp.take_along_axis(x_BLD, last_B[:, None, None], axis=1)


def _right(x_BLD, spec, kernel, targets_BL):
  """Returns `LMOutput.right_BL`, from the logits of few tokens at a time.

  `spec` is the einsum of the features of one token and `kernel`.
  """

  def is_likeliest(features_and_target):
    x_D, target = features_and_target
    logits_V = dense.einsum(spec, x_D, kernel, 'float32')
    return vocabulary.argmax(logits_V) == target

  x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
  right_T = jax.lax.map(
    is_likeliest, (x_TD, targets_BL.flatten()), batch_size=_TOKENS
  )
  return right_T.reshape(targets_BL.shape)


class _Head(nn.Module):
  """Parameter `kernel` of an untied head, named as in a `dense.Linear`."""

  shape: tuple[int, int]

  @nn.compact
  def __call__(self) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')
    return dense.matrix(self, init, ('embed', 'vocab'), self.shape)


def check_tokens(
  config: LMConfig,
  tokens_BL,
  valid_BL=None,
  segment_BL=None,
  targets_BL=None,
  weights_BL=None,
) -> None:
  """Raises UserError for arrays that the language model cannot read.

  The range of the ids is checked only outside of `jax.jit`, where values are
  known, and only of arrays that this host has as a whole.
  """
  others = {'valid': valid_BL, 'segment': segment_BL, 'targets': targets_BL}
  others |= {'weights': weights_BL}
  arrays = {name: x for name, x in others.items() if x is not None}
  for name, x in {'tokens': tokens_BL, **arrays}.items():
    require(
      isinstance(x, (jax.Array, np.ndarray)),
      'an array of shape [B, L]: pass jnp.asarray(…), and for rows of several'
      ' lengths what mod_jax.sampling.pad_prompts makes of them',
      **{name: type(x).__name__},
    )
    require(
      x.shape == tokens_BL.shape,
      f'the shape of tokens, {tokens_BL.shape}',
      **{f'{name}.shape': x.shape},
    )
  shown = {'tokens.shape': tokens_BL.shape, 'dtype': str(tokens_BL.dtype)}
  require(
    tokens_BL.ndim == 2
    and tokens_BL.size
    and jnp.issubdtype(tokens_BL.dtype, jnp.integer),
    'integers [B, L], at least one in each row: the ids of a tokenizer;'
    ' tokens[None] makes a batch of a single row',
    **shown,
  )
  if any(
    isinstance(x, jax.core.Tracer) or not getattr(x, 'is_fully_addressable', 1)
    for x in (tokens_BL, valid_BL)
  ):
    return
  ids = np.asarray(tokens_BL)
  if valid_BL is not None:
    ids = ids[np.asarray(valid_BL, bool)]  # Padding may hold anything.
  low, high = (ids.min(), ids.max()) if ids.size else (0, 0)
  require(
    0 <= low <= high < config.vocab_size,
    f"ids from 0 to {config.vocab_size - 1}, of the model's own tokenizer",
    **{'token ids': f'{low}..{high}', 'vocab_size': config.vocab_size},
  )


def _check_mode(config, mode, tokens_BL, segment_BL, cache):
  require(
    cache is None or segment_BL is None,
    'one document per row in generation, without segment_BL',
    cache=True,
    segment_BL=True,
  )
  if config.routing is not None and config.routing.per_sequence:
    if cache is not None:
      raise errors.UserError(config.cannot_sample)
    require(
      segment_BL is None,
      'one document per row (data.segments=False), since a row would enter by'
      ' the mean score of all its documents',
      per_sequence=True,
    )
  if config.rules and isinstance(mode.rule, str):
    rules = (*config.rules, 'never')
    if cache is not None and tokens_BL.shape[1] == 1:
      rules = rules[1:]
    require(
      mode.rule in rules,
      f'one of {", ".join(rules)}, as this model was trained; top_k sees the'
      ' whole sequence',
      rule=mode.rule,
    )


def unrolled(config: LMConfig, params):
  """Returns config and parameters with separate layers `block_<i>`.

  Scanned layers, whose parameters are stacked under `layers`, are unstacked.
  """
  unscanned = dataclasses.replace(config, scan_layers=False)
  return unscanned, stack_lib.unrolled(config.stack, params)


def matrices(config: LMConfig) -> dict[str, tuple[int, ...]]:
  """Returns the input axes of the matrices that may be stored as int8, by name.

  These matrices are the embedding, the kernel of an untied head, and the
  kernels of linear maps in the blocks, except in experts and learners. Raises
  UserError if the model is not a language model.
  """
  require(
    isinstance(config, LMConfig),
    "a language model; others take dtype='bfloat16'",
    dtype='int8',
    model=type(config).__name__,
  )
  axes = {'embedding': (1,), 'head/kernel': (0,)}
  # Parameters of scanned layers have a leading axis of groups.
  layers, shift, prefix = config.stack.layers, 0, ''
  if config.scan_layers:
    layers, shift, prefix = layers[: config.stack.period], 1, 'layers/'
  for i, layer in enumerate(layers):
    for slot_name, slot in layer.block.slots.items():
      if not isinstance(slot, MLPConfig | LinearConfig | AdaptedConfig):
        continue
      maps = linear_maps(f'{prefix}block_{i}/{slot_name}', slot)
      for name, linear in maps.items():
        base = getattr(linear, 'base', linear)
        inputs = range(shift, shift + len(base.inputs))
        axes[f'{name}/kernel'] = tuple(inputs)
  return axes


def merge(
  config: LMConfig,
  of: LMConfig,
  fresh,
  source,
  *,
  collections: bool = False,
  **kwargs,
):
  """Like `trees.merge`, for models that may differ in how layers are scanned.

  `fresh` is a collection of the model `config`, and `source` one of the model
  `of`. With `collections`, both are dictionaries of collections. `kwargs` are
  those of `trees.merge`. The result is arranged like `fresh`.
  """

  def layout(config):
    return config.scan_layers and config.stack.period

  def convert(how, stack, tree):
    if collections:
      return {name: how(stack, collection) for name, collection in tree.items()}
    return how(stack, tree)

  if layout(config) == layout(of):
    return trees.merge(fresh, source, **kwargs)
  merged = trees.merge(
    convert(stack_lib.unrolled, config.stack, fresh),
    # Convert to NumPy first, so that each stacked array is read only once.
    convert(stack_lib.unrolled, of.stack, jax.tree.map(np.asarray, source)),
    **kwargs,
  )
  if config.scan_layers:
    merged = convert(stack_lib.scanned, config.stack, merged)
  return merged


def scanned(config: LMConfig, params):
  """Returns config and parameters with scanned layers; inverts `unrolled`."""
  config = dataclasses.replace(config, scan_layers=True)
  return config, stack_lib.scanned(config.stack, params)
