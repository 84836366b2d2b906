"""Vision transformers: ViT, DeiT, LV-ViT and CLIP's, dense or routed."""

from collections import Counter
import dataclasses
import functools
import math
from typing import Any, Literal

from flax import linen as nn
import flax.struct
import jax
from jax.experimental import layout
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax import routing as routing_lib
from mod_jax.errors import require
from mod_jax.layers import dense
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.reduction import Reduction
from mod_jax.layers.routed import LayerOutput
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.slots import Slot
from mod_jax.layers.stack import Stack, StackConfig
from mod_jax.layers.stem import ConvStem, ConvStemConfig
from mod_jax.layers.token_info import TokenInfo, in_order
from mod_jax.models.protocol import StackedConfig, StackedOutput, check_encoder
from mod_jax_kernels.attention import choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(StackedConfig):
  """Sizes and options of a `ViT`; the defaults are a dense DeiT-S."""

  image_size: config_lib.Pixels = 224  # Side of images in pixels.
  patch_size: config_lib.Pixels = 16  # Side of patches in pixels.
  num_classes: config_lib.Count = 1000  # Logits of the head; 0 = no head.
  num_layers: config_lib.Unrolled = 12  # Blocks.
  width: config_lib.Width = 384  # Width of the features (D).
  num_heads: config_lib.Size = 6  # Attention heads (H).
  # Hidden width of the MLPs (F); None = 4D.
  mlp_dim: config_lib.Size | None = None
  feed_forward: Slot | None = None  # Replaces the MLP.
  activation: Literal['gelu', 'quick_gelu'] = 'gelu'  # Activation in MLPs.
  patch_bias: bool = True  # Bias of the patch embedding.
  # Whether there is a layer norm before the first block, too (CLIP).
  input_norm: bool = False
  qkv_bias: bool = True  # Biases of query, key and value.
  norm_epsilon: config_lib.Epsilon = 1e-6  # Epsilon of the layer norms.
  # Whether there is a distillation token with a second head, whose logits are
  # averaged with the class token's (DeiT, Touvron et al. 2021).
  distilled: bool = False
  # Whether the distillation token has a head. If not, as in Hugging Face's
  # DeiTForImageClassification, the logits are only the class token's.
  distillation_head: bool = True
  # Convolutional stem before the patches, as in LV-ViT (Jiang et al. 2021).
  stem: ConvStemConfig | None = None
  residual_scale: config_lib.Factor = 1.0  # Factor on updates; .5 in LV-ViT.
  # Whether there is LV-ViT's second head on the patches: half of the maximum of
  # its logits over the patches is added to the class token's.
  token_head: bool = False
  # Probability in training that an image skips the last block's updates; it
  # rises linearly from 0 at the first block.
  stochastic_depth: config_lib.BelowOne = 0.0
  reduction: Reduction | None = None  # Merging of tokens, as ToMe; None = none.
  routing: VisionRoutingConfig | None = None  # None = no routed blocks.
  experts: ExpertsConfig | None = None  # Mixtures of experts; None = none.
  adaptive: AdaptiveConfig | None = None  # Adaptive modules; None = none.
  lora: LoRAConfig | None = None  # Low-rank adapters; None = none.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Compute dtype.
  remat: stack_lib.Remat = 'none'  # What is saved for the backward pass.

  # Class constants, not fields.
  kind, noun = 'vision', 'a vision transformer'
  route_methods = ('amod', 'mod', 'dynamic', 'tome', 'evit', 'acm')

  def __post_init__(self):
    check = config_lib.validate(self)
    floor = self.image_size // self.patch_size * self.patch_size
    check(
      self.image_size == floor,
      f'a multiple of patch_size, such as {floor + self.patch_size}',
      *('image_size', 'patch_size'),
    )
    check(
      self.width % self.num_heads == 0,
      'num_heads to divide width',
      *('width', 'num_heads'),
    )
    check(
      self.stem is None or self.patch_size % self.stem.stride == 0,
      "a multiple of the convolutional stem's stride, which comes first",
      'patch_size',
    )
    check(
      self.num_classes or not (self.distilled or self.token_head),
      'at least one class for heads of other tokens',
      'num_classes',
    )
    for name in ('routing', 'experts', 'adaptive'):
      check(
        self.reduction is None or getattr(self, name) is None,
        f'{name}=None, since tokens that were merged are no patches of which'
        ' some are chosen; or no reduction',
        *('reduction', name),
      )
    _ = self.stack  # Raises if routing and so on do not fit the layers.

  @functools.cached_property
  def block(self) -> BlockConfig:
    return BlockConfig(
      attention=AttentionConfig.of_encoder(
        self.width, self.num_heads, qkv_bias=self.qkv_bias
      ),
      mlp=self.feed_forward
      or MLPConfig(
        width=self.width,
        hidden=self.mlp_dim or 4 * self.width,
        kind=self.activation,
        bias=True,
      ),
      norm='layer',
      norm_epsilon=self.norm_epsilon,
      residual_scale=self.residual_scale,
      dtype=self.dtype,
    )

  @functools.cached_property
  def stack(self) -> StackConfig:
    layers = self._layers(self.block, stochastic_depth=self.stochastic_depth)
    if self.reduction is not None:
      layers = self.reduction.adapt(layers, self.num_tokens, self.num_prefix)
    return StackConfig(layers=layers, remat=self.remat)

  @property
  def grid(self) -> int:
    """Patches along a side."""
    return self.image_size // self.patch_size

  @property
  def num_patches(self) -> int:
    return self.grid**2

  @property
  def num_prefix(self) -> int:
    """Number of tokens before the patches: class and distillation token."""
    return 1 + self.distilled

  @property
  def has_distillation_head(self) -> bool:
    return self.distilled and self.distillation_head

  @property
  def num_tokens(self) -> int:
    return self.num_prefix + self.num_patches

  def build(self, **kwargs) -> 'ViT':
    return ViT(self, Mode(**kwargs))

  def dense_twin(self) -> 'ViTConfig':
    """Returns the config without any parts; see `StackedConfig`."""
    return dataclasses.replace(super().dense_twin(), reduction=None)

  def isoflop_twin(self, num_layers: int | None = None) -> 'ViTConfig':
    """Returns a shallower dense config; by default the nearest in FLOPs."""
    if num_layers is not None:
      return dataclasses.replace(self.dense_twin(), num_layers=num_layers)
    depths = range(1, self.num_layers + 1)
    twins = [self.isoflop_twin(depth) for depth in depths]
    return min(twins, key=lambda twin: abs(_total(twin) - _total(self)))

  def example(self) -> jax.Array:
    return jnp.zeros((1, self.image_size, self.image_size, 3))

  def tokens_per_block(self) -> tuple[int, ...]:
    return self.stack.tokens_per_block(self.num_tokens)

  def patches_after(self, depth: int) -> int:
    """Returns how many patches remain after the first `depth` blocks."""
    return self.stack.lengths(self.num_tokens)[depth] - self.num_prefix

  def block_flops(self, layer: int, tokens: int) -> dict[str, int]:
    """Returns a block's forward FLOPs by part, for the tokens that reach it."""
    block = self.stack.layers[layer]
    # The second norm is of the tokens that a reduction after attention leaves.
    reached = block.tokens(tokens)
    norms = norm_flops(reached + block.block.left(reached), self.width)
    return dict(Counter(block.flops(tokens)) + Counter(norm=norms))

  def embed_flops(self) -> dict[str, int]:
    """Returns the FLOPs, by part, of embedding an image as tokens."""
    parts, channels, side = {}, 3, self.patch_size
    if self.stem is not None:
      parts = {'stem': self.stem.flops(self.image_size, self.image_size)}
      channels, side = self.stem.channels, side // self.stem.stride
    products = self.num_patches * channels * side**2 * self.width
    return parts | {'embed': 2 * products}

  def head_flops(self, patches: int) -> dict[str, int]:
    """Returns the FLOPs of the last norm and the heads on remaining patches."""
    heads = 1 + self.has_distillation_head
    heads += patches if self.token_head else 0
    return {
      'norm': norm_flops(self.num_prefix + patches, self.width),
      'head': 2 * heads * self.width * self.num_classes,
    }

  def flops_table(self) -> list[tuple[str, dict[str, int]]]:
    *lengths, left = self.stack.lengths(self.num_tokens)
    blocks = map(self.block_flops, range(self.num_layers), lengths)
    return [
      ('embed', self.embed_flops()),
      *zip(self.stack.names, blocks, strict=True),
      ('head', self.head_flops(left - self.num_prefix)),
    ]

  def row_prefixes(self, row):
    if row == 'embed':
      return ('stem/', 'patch/')
    return super().row_prefixes(row)


def norm_flops(tokens: int, width: int) -> int:
  """Returns a layer norm's FLOPs; published tables count 5 MACs an element."""
  return 2 * 5 * tokens * width


def _total(config) -> int:
  return sum(sum(parts.values()) for _, parts in config.flops_table())


@flax.struct.dataclass
class ViTOutput(StackedOutput):
  """What a forward pass returns.

  Attributes:
    logits_BV: float32 logits of the classes; None without a head.
    features_BLD: the tokens after the last norm, the class token first.
    aux: aux of each layer, by kind; see `stack.collect`.
  """

  logits_BV: jax.Array | None
  features_BLD: jax.Array
  aux: tuple[dict[str, Any], ...] = ()

  @property
  def places(self) -> dict[str, jax.Array]:
    """Where the image's tokens are after each block that leaves fewer tokens.

    The keys are names of blocks, the values int32 place_BL: the index of the
    token that contains the image's token, among the tokens after the block. The
    last block's value has indices into `features_BLD`.
    """
    maps = stack_lib.collect(self.aux, 'merged_into')
    traced = routing_lib.trace(maps.values())
    return dict(zip(maps, traced, strict=True))


class ViT(nn.Module):
  """Maps images to class logits.

  Collections: `params`; with a convolutional stem also `batch_stats` (make it
  mutable to train). Rng streams: `params`; `stochastic_depth` in training, if
  configured; `routing` for Gaussian scores; `gumbel` to sample choices of
  learners.
  """

  config: ViTConfig
  mode: Mode = Mode()  # The routing rule must be `top_k` or `never`.
  # Blocks that put the class token's attention to each token into their aux.
  scored: tuple[int, ...] = ()

  def setup(self):
    config = self.config
    check_encoder(self.mode)
    if config.stem is not None:
      self.stem = ConvStem(
        config.stem, train=self.mode.train, dtype=config.dtype
      )
    self.patch = dense.Linear(
      (config.width,),
      ('replicated', 'embed'),
      bias=config.patch_bias,
      dtype=config.dtype,
    )

    def token(name, *lengths):
      init = nn.with_logical_partitioning(
        nn.initializers.truncated_normal(0.02),
        (*('length',) * len(lengths), 'embed'),
      )
      return self.param(name, init, (*lengths, config.width))

    prefix = [token('class_token')]
    if config.distilled:
      prefix.append(token('distillation_token'))
    self.prefix_PD = prefix
    self.position_LD = token('position', config.num_tokens)
    layers = list(config.stack.layers)
    for i in self.scored:
      layers[i] = dataclasses.replace(layers[i], attention_score='first')
    stack = dataclasses.replace(config.stack, layers=tuple(layers))
    self.stack = Stack(stack, self.mode)
    nn.share_scope(self, self.stack)
    self.norm = dense.layer_norm(config.norm_epsilon, config.dtype, None)
    if config.input_norm:
      self.input_norm = dense.layer_norm(
        config.norm_epsilon, config.dtype, None
      )

    def head():
      return dense.Linear(
        (config.num_classes,),
        ('embed', 'replicated'),
        bias=True,
        dtype=config.dtype,
        out_dtype='float32',
      )

    if config.num_classes:
      self.head = head()
    if config.has_distillation_head:
      self.head_distilled = head()
    if config.token_head:
      self.head_tokens = head()

  def __call__(self, images_BHWC: jax.Array) -> ViTOutput:
    """Returns logits, the tokens after the last norm, and each layer's `aux`.

    `images_BHWC` are normalised, of the config's size and three channels.
    """
    x_BLD = self.embed(images_BHWC)
    output = self.stack(x_BLD, in_order(x_BLD))
    logits_BV, x_BLD = self.classify(output.x_BLD)
    return ViTOutput(logits_BV, x_BLD, output.aux)

  def features(self, images_BHWC: jax.Array, depth: int) -> jax.Array:
    """Returns x_BLD after the first `depth` blocks, without the last norm."""
    if self.is_initializing():  # Creates the parameters of later layers too.
      self(images_BHWC)
    x_BLD = self.embed(images_BHWC)
    return self.stack(x_BLD, in_order(x_BLD), depth=depth).x_BLD

  def step(
    self,
    layer: int,
    x_BLD: jax.Array,
    attention_BL: jax.Array | None = None,
    info: TokenInfo | None = None,
  ) -> LayerOutput:
    """Runs one layer; `info=None` means all tokens of an image, in order.

    `attention_BL` is `aux['attention']` of the previous layer, if it has any.
    """
    info = in_order(x_BLD) if info is None else info
    return self.stack.step(layer, x_BLD, info, attention_BL)

  def embed(self, images_BHWC: jax.Array) -> jax.Array:
    """Returns x_BLD: class token, then patches row by row, with positions."""
    config = self.config
    size, patch = config.image_size, config.patch_size
    require(
      images_BHWC.shape[1:] == (size, size, 3),
      f'[batch, {size}, {size}, 3]; resize them, or build a model of another'
      ' image_size',
      **{'images.shape': images_BHWC.shape},
    )
    x_BHWC = images_BHWC.astype(config.dtype)
    if config.stem is not None:
      x_BHWC, patch = self.stem(x_BHWC), patch // config.stem.stride
    patches_BND = self.patch(split_patches(x_BHWC, patch))
    batch, _, width = patches_BND.shape
    prefix_BPD = jnp.broadcast_to(
      jnp.stack(self.prefix_PD), (batch, config.num_prefix, width)
    )
    # Cast last, so that gradients of the prefix and positions are float32 sums.
    x_BLD = jnp.concatenate([prefix_BPD, patches_BND], axis=1)
    x_BLD = (x_BLD + self.position_LD).astype(config.dtype)
    if config.input_norm:
      x_BLD = self.input_norm(x_BLD)
    if choice.platform() == 'cuda':
      # Without this, XLA may lay out a large batch with its images innermost,
      # and then transpose all features in each block of a training step.
      in_order = layout.Layout(major_to_minor=(0, 1, 2))
      x_BLD = layout.with_layout_constraint(x_BLD, in_order)
    return parallel.constrain(x_BLD, 'batch', 'length', 'act_embed')

  def classify(
    self, x_BLD: jax.Array, keep_BN: jax.Array | None = None
  ) -> tuple[jax.Array | None, jax.Array]:
    """Returns logits_BV, or None without a head, and the normalised tokens.

    Any number of patches may remain. `keep_BN` is 0 for patches to ignore; None
    ignores no patch.
    """
    config = self.config
    x_BLD = self.norm(x_BLD)
    if not config.num_classes:
      return None, x_BLD
    logits_BV = self.head(x_BLD[:, 0])
    if config.has_distillation_head:
      logits_BV = (logits_BV + self.head_distilled(x_BLD[:, 1])) / 2
    if config.token_head and x_BLD.shape[1] > config.num_prefix:
      logits_BNV = self.head_tokens(x_BLD[:, config.num_prefix :])
      if keep_BN is None:
        max_BV = logits_BNV.max(axis=1)
      else:
        kept_BN1 = keep_BN[..., None] > 0
        max_BV = jnp.where(kept_BN1, logits_BNV, -jnp.inf).max(axis=1)
        max_BV = jnp.where(kept_BN1.any(axis=1), max_BV, 0.0)
      logits_BV += 0.5 * max_BV
    return logits_BV, x_BLD


def split_patches(image_BHWC: jax.Array, size: int) -> jax.Array:
  """Returns patches_BNP: pixels of each patch, by row, column and channel."""
  batch, height, width, channels = image_BHWC.shape
  rows, columns = height // size, width // size
  x = image_BHWC.reshape(batch, rows, size, columns, size, channels)
  x = x.transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(batch, rows * columns, size * size * channels)


def resize_positions(
  position_LD: jax.Array, prefix: int, grid: int
) -> jax.Array:
  """Resizes position embeddings to `grid` patches a side, bicubically.

  The embeddings of the first `prefix` tokens are not changed. Raises UserError
  if the others form no square.
  """
  patches = position_LD.shape[0] - prefix
  old_grid = math.isqrt(max(patches, 0))
  require(
    old_grid and old_grid**2 == patches,
    f'a square number of position embeddings after the first {prefix}',
    embeddings=position_LD.shape[0],
  )
  if old_grid == grid:
    return position_LD
  square = position_LD[prefix:].reshape(old_grid, old_grid, -1)
  square = jax.image.resize(
    square, (grid, grid, square.shape[-1]), 'cubic', antialias=True
  )
  return jnp.concatenate(
    [position_LD[:prefix], square.reshape(grid**2, -1)], axis=0
  )


# Sizes by the names that papers, configs and command lines use: ViT
# (Dosovitskiy et al. 2021), DeiT (Touvron et al. 2021) and LV-ViT (Jiang et al.
# 2021), with patches of 16 pixels. Keywords override any field.
deit_tiny = functools.partial(ViTConfig, width=192, num_heads=3)
deit_small = functools.partial(ViTConfig, width=384, num_heads=6)
vit_base = functools.partial(ViTConfig, width=768, num_heads=12)
vit_large = functools.partial(
  ViTConfig, num_layers=24, width=1024, num_heads=16
)
_lvvit = functools.partial(
  ViTConfig,
  stem=ConvStemConfig(),
  residual_scale=0.5,
  token_head=True,
  qkv_bias=False,
  norm_epsilon=1e-5,
)
lvvit_small = functools.partial(
  _lvvit, num_layers=16, width=384, num_heads=6, mlp_dim=1152
)
lvvit_medium = functools.partial(
  _lvvit, num_layers=20, width=512, num_heads=8, mlp_dim=1536
)

BACKBONES = {
  'deit_tiny': deit_tiny,
  'deit_small': deit_small,
  'vit_base': vit_base,
  'vit_large': vit_large,
  'lvvit_small': lvvit_small,
  'lvvit_medium': lvvit_medium,
}
