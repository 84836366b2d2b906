"""DETR: object detection by a transformer, dense, with MoD or with A-MoD.

Carion et al. 2020. Encoder and decoder are stacks of post-norm blocks. A routed
decoder layer chooses queries, and the encoder's outputs that they attend to.
"""

from collections import Counter
import dataclasses
import functools
import math
from typing import Any, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax.errors import require
from mod_jax.layers import dense
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.resnet import ResNet, ResNetConfig, halved
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.scores import Learned
from mod_jax.layers.stack import Stack, StackConfig
from mod_jax.layers.stem import ConvStem, ConvStemConfig
from mod_jax.layers.token_info import Source
from mod_jax.models.protocol import (
  StackedConfig,
  StackedOutput,
  check_encoder,
  check_no_class_token,
)
from mod_jax.models.vit import norm_flops

# Number of linear layers in the box head.
_BOX_LAYERS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DETRConfig(StackedConfig):
  """Sizes and options of a `DETR`; the defaults are those of DETR-R50."""

  # Height and width in pixels to which all pictures are padded.
  image_size: tuple[config_lib.Pixels, config_lib.Pixels] = (800, 1066)
  num_classes: config_lib.Size = 91  # Without the class "no object".
  num_queries: config_lib.Size = 100  # Most objects in a picture (Q).
  # Network that turns pictures into grids of features.
  backbone: ResNetConfig | ConvStemConfig = ResNetConfig()
  # Side of the squares of the backbone's features that become one token each.
  patch_size: config_lib.Pixels = 1
  # Whether positions are also added to the tokens themselves, as by the listing
  # in Carion et al. 2020, A.6, and not only to queries and keys. Features of a
  # shallow backbone do not depend on their position; without this option, the
  # values of the attention then do not either.
  place_tokens: bool = False
  # Temperature of the position embeddings: the longest period of their sines is
  # almost this number of pictures. DETR's 10,000 is a number for texts; with
  # 20, more channels distinguish positions (Liu et al. 2022, DAB-DETR).
  place_temperature: config_lib.Positive = 10_000.0
  num_layers: config_lib.Unrolled = 6  # Blocks of the encoder.
  num_decoder_layers: config_lib.Unrolled = 6  # Blocks of the decoder.
  width: config_lib.Width = 256  # Width of the tokens (D).
  num_heads: config_lib.Size = 8  # Attention heads (H).
  mlp_dim: config_lib.Size = 2048  # Hidden width of the MLPs (F).
  dropout: config_lib.BelowOne = 0.1  # Dropout rate of updates in training.
  norm_epsilon: config_lib.Epsilon = 1e-5  # Epsilon of the layer norms.
  # Loss weight of the classes; the L1 and GIoU terms of the boxes have the loss
  # weights 5 and 2. The matching of predictions to objects ignores this field.
  class_weight: config_lib.Weight = 1.0
  # Routed blocks of encoder and decoder; None = none.
  routing: VisionRoutingConfig | None = None
  # Which tokens are routed: those of the encoder, the decoder's queries, and
  # `memory`: of the encoder's outputs, each decoder layer then reads only some.
  # The first decoder layer's input is zero, so its attention between queries is
  # the same for all pictures. A-MoD scores tokens by the previous layer's
  # attention, so the second layer chooses the same queries for all pictures.
  routed: tuple[Literal['encoder', 'queries', 'memory'], ...] = (
    *('encoder', 'queries', 'memory'),
  )
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Compute dtype.
  remat: stack_lib.Remat = 'none'  # What is saved for the backward pass.

  # Class constants, not fields.
  kind, noun = 'detector', 'a detector'
  route_methods = ('amod', 'mod')
  experts = None
  adaptive = None
  lora = None

  def __post_init__(self):
    check = config_lib.validate(self)
    check(
      self.width % self.num_heads == 0,
      'num_heads to divide width',
      *('width', 'num_heads'),
    )
    check(
      self.width % 4 == 0,
      'a multiple of 4, for sines and cosines of row and column',
      'width',
    )
    check(self.routed, 'at least one part', 'routed')
    check_no_class_token(self.routing)
    if self.routing is not None and 'memory' in self.routed:
      scorer = self.routing.scorer
      for name, is_set in (
        ('shared_router', isinstance(scorer, Learned) and scorer.shared),
        ('per_sequence', self.routing.per_sequence),
      ):
        require(
          not is_set,
          f"{name}=False, or routed=('encoder', 'queries'), since each decoder"
          ' layer chooses tokens of the memory for itself',
          **{f'routing.{name}': is_set, 'routed': self.routed},
        )
    rows, columns = self.grid
    check(
      min(rows, columns) >= 1,
      f'at least {self.patch_size} features each way',
      *('image_size', 'patch_size'),
    )
    _ = self.encoder, self.decoder  # Raises if the routing does not fit.

  @property
  def stride(self) -> int:
    """Pixels between the centres of neighbouring tokens."""
    return self.backbone.stride * self.patch_size

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of tokens of a picture."""
    sides = self.image_size
    for _ in range(round(math.log2(self.backbone.stride))):
      sides = tuple(map(halved, sides))
    return tuple(side // self.patch_size for side in sides)

  @property
  def num_tokens(self) -> int:
    """Tokens of the encoder, padding included."""
    return math.prod(self.grid)

  def _block(self, *, decoder: bool) -> BlockConfig:
    attention = AttentionConfig.of_encoder(self.width, self.num_heads)
    return BlockConfig(
      attention=attention,
      cross_attention=attention if decoder else None,
      mlp=MLPConfig(
        width=self.width, hidden=self.mlp_dim, kind='relu', bias=True
      ),
      norm='layer',
      norm_place='post',
      norm_epsilon=self.norm_epsilon,
      dropout=self.dropout,
      dtype=self.dtype,
    )

  def _routing(self, part: str) -> VisionRoutingConfig | None:
    return self.routing if part in self.routed else None

  @functools.cached_property
  def encoder(self) -> StackConfig:
    layers = stack_lib.layer_configs(
      *(self._block(decoder=False), self.num_layers, self._routing('encoder'))
    )
    return StackConfig(layers=layers, remat=self.remat)

  @functools.cached_property
  def decoder(self) -> StackConfig:
    """The layers of the decoder; in training, each has features in its aux."""
    layers = stack_lib.layer_configs(
      self._block(decoder=True),
      self.num_decoder_layers,
      self._routing('queries'),
      source_routing=self._routing('memory'),
    )
    layers = tuple(
      dataclasses.replace(layer, tells_features=True) for layer in layers
    )
    return StackConfig(layers=layers, remat=self.remat)

  @property
  def stack(self) -> StackConfig:
    """The encoder's layers, for code that reads a model's dtype and remat."""
    return self.encoder

  @property
  def capacities(self) -> tuple[float | None, ...]:
    """Each block's capacity, the encoder's first; None if it is not routed."""
    return self.encoder.capacities + self.decoder.capacities

  def with_parts(self, **parts):
    """Returns the config with `routing` replaced; ignores other parts."""
    return dataclasses.replace(self, routing=parts.get('routing', self.routing))

  def build(self, **kwargs) -> 'DETR':
    return DETR(self, Mode(**kwargs))

  def example(self) -> jax.Array:
    return jnp.zeros((1, *self.image_size, 3))

  def tokens_per_block(self) -> tuple[int, ...]:
    """Returns how many tokens or, in the decoder, queries each block takes."""
    return self.encoder.tokens_per_block(
      self.num_tokens
    ) + self.decoder.tokens_per_block(self.num_queries)

  def flops_table(self) -> list[tuple[str, dict[str, int]]]:
    tokens, queries = self.num_tokens, self.num_queries

    def rows(prefix, stack, length, norms, **kwargs):
      table = stack.flops_table(length, **kwargs)
      for layer, (name, parts) in zip(stack.layers, table, strict=True):
        count = norms * norm_flops(layer.tokens(length), self.width)
        yield f'{prefix}/{name}', dict(Counter(parts) + Counter(norm=count))

    channels = self.backbone.channels
    project = 2 * tokens * channels * self.patch_size**2 * self.width
    boxes = (_BOX_LAYERS - 1) * self.width + 4
    return [
      ('backbone', {'backbone': self.backbone.flops(*self.image_size)}),
      ('embed', {'embed': project}),
      *rows('encoder', self.encoder, tokens, 2),
      *rows('decoder', self.decoder, queries, 3, source_tokens=tokens),
      (
        'head',
        {
          'norm': norm_flops(queries, self.width),
          'head': 2 * queries * self.width * (self.num_classes + 1 + boxes),
        },
      ),
    ]

  def row_prefixes(self, row):
    if '/block_' in row:
      stack, layer = row.split('/block_')
      names = getattr(self, stack).prefixes(int(layer))
      queries = ('queries',) * (row == 'decoder/block_0')
      return (*(f'{stack}/{name}' for name in names), *queries)
    rows = {'embed': ('project/',), 'head': ('norm/', 'classes/', 'box_')}
    return rows.get(row, (f'{row}/',))


@flax.struct.dataclass
class DETROutput(StackedOutput):
  """What a forward pass returns.

  Attributes:
    logits_BQV: float32 logits of the classes, "no object" last.
    boxes_BQ4: float32 centre x, centre y, width and height of each object, as
      fractions of the picture without its padding.
    aux: aux of each layer by kind, the encoder's first; see `stack.collect`.
    earlier: in training (logits_BNQV, boxes_BNQ4) of the N decoder layers
      before the last; None if there are none, and outside of training.
  """

  logits_BQV: jax.Array
  boxes_BQ4: jax.Array
  aux: tuple[dict[str, Any], ...] = ()
  earlier: tuple[jax.Array, jax.Array] | None = None


class DETR(nn.Module):
  """Maps pictures to objects: classes and boxes.

  Collections: `params`; `batch_stats` of the backbone (make it mutable to train
  a convolutional stem). Rng streams: `params`; `stochastic_depth` in training
  for dropout; `routing` for Gaussian scores.
  """

  config: DETRConfig
  mode: Mode = Mode()  # The routing rule must be `top_k` or `never`.

  def setup(self):
    config = self.config
    check_encoder(self.mode)
    if isinstance(config.backbone, ResNetConfig):
      self.backbone = ResNet(config.backbone, dtype=config.dtype)
    else:
      self.backbone = ConvStem(
        config.backbone, train=self.mode.train, dtype=config.dtype
      )
    side = config.patch_size
    self.project = nn.Conv(
      *(config.width, (side, side), side),
      padding='VALID',
      dtype=config.dtype,
    )
    self.queries_QD = self.param(
      'queries',
      nn.with_logical_partitioning(
        nn.initializers.normal(1.0), ('length', 'embed')
      ),
      (config.num_queries, config.width),
    )
    self.encoder = Stack(config.encoder, self.mode)
    self.decoder = Stack(config.decoder, self.mode)
    self.norm = dense.layer_norm(config.norm_epsilon, config.dtype, None)

    def linear(features, axis, out_dtype=None):
      return dense.Linear(
        (features,),
        ('embed', axis),
        bias=True,
        dtype=config.dtype,
        out_dtype=out_dtype,
      )

    self.classes = linear(config.num_classes + 1, 'replicated', 'float32')
    self.box = [linear(config.width, 'mlp') for _ in range(_BOX_LAYERS - 1)] + [
      linear(4, 'replicated', 'float32')
    ]

  def __call__(
    self, images_BHWC: jax.Array, size_B2: jax.Array | None = None
  ) -> DETROutput:
    """Returns classes and boxes of `num_queries` objects, and the aux.

    Args:
      images_BHWC: normalised pictures, padded below and on the right to a
        common size, which may differ from the config's.
      size_B2: int32 height and width of each picture without its padding; None
        if no picture has padding.
    """
    require(
      images_BHWC.ndim == 4 and images_BHWC.shape[-1] == 3,
      '[batch, height, width, 3]',
      **{'images.shape': images_BHWC.shape},
    )
    x_BHWC = self.backbone(images_BHWC.astype(self.config.dtype))
    return self.detect(self.project(x_BHWC), size_B2, images_BHWC.shape[1:3])

  def detect(
    self,
    x_BHWD: jax.Array,
    size_B2: jax.Array | None,
    image: tuple[int, int],
  ) -> DETROutput:
    """Returns the output for a grid of tokens.

    `image` is the height and width of the padded pictures in pixels. `size_B2`
    is as in `__call__`.
    """
    batch, rows, columns, width = x_BHWD.shape
    x_BLD = x_BHWD.reshape(batch, rows * columns, width)
    valid_BHW = jnp.ones((batch, rows, columns), bool)
    if size_B2 is not None:
      valid_BHW = valid_tokens(size_B2, image, (rows, columns))
    place_BHWD = sine_places(valid_BHW, width, self.config.place_temperature)
    place_BLD = place_BHWD.reshape(x_BLD.shape)
    valid_BL = None
    if size_B2 is not None:
      valid_BL = valid_BHW.reshape(batch, -1)
    place_BLD = place_BLD.astype(x_BLD.dtype)
    if self.config.place_tokens:
      x_BLD = x_BLD + place_BLD
    memory = Source(x_BLD, valid_BL, place_BLD)
    encoded = self.encoder(x_BLD, memory.info)
    memory = memory.replace(x_BSD=encoded.x_BLD)
    place_BQD = jnp.broadcast_to(
      self.queries_QD.astype(x_BLD.dtype), (batch, *self.queries_QD.shape)
    )
    content = Source(jnp.zeros_like(place_BQD), None, place_BQD)
    decoded = self.decoder(content.x_BSD, content.info.replace(source=memory))
    logits_BQV, boxes_BQ4 = self._heads(decoded.x_BLD)
    earlier = None
    if self.mode.train:
      features = [aux['features'] for aux in decoded.aux[:-1]]
      if features:
        earlier = self._heads(jnp.stack(features, axis=1))
    return DETROutput(logits_BQV, boxes_BQ4, encoded.aux + decoded.aux, earlier)

  def _heads(self, x):
    """Returns logits and boxes of decoder features [..., Q, D]."""
    x = self.norm(x)
    y = x
    for layer in self.box[:-1]:
      y = nn.relu(layer(y))
    return self.classes(x), nn.sigmoid(self.box[-1](y))


def valid_tokens(
  size_B2: jax.Array, image: tuple[int, int], grid: tuple[int, int]
) -> jax.Array:
  """Returns mask_BHW: whether the first pixel of a token is in the picture.

  This is nearest-neighbour interpolation of a mask of pixels, as in DETR.
  """
  rows_H, columns_W = (
    jnp.arange(tokens) * pixels // tokens
    for tokens, pixels in zip(grid, image, strict=True)
  )
  return (rows_H[:, None] < size_B2[:, :1, None]) & (
    columns_W < size_B2[:, 1:, None]
  )


def sine_places(
  valid_BHW: jax.Array, width: int, temperature: float
) -> jax.Array:
  """Returns place_BHWD, float32: sines and cosines of row, then of column.

  Rows and columns of real tokens are numbered from 1, and scaled so that the
  last number is 2π (Carion et al. 2020, supplement A.4).
  """
  places = []
  frequency_F = temperature ** (-4 * jnp.arange(width // 4) / width)
  for axis in (1, 2):
    count_BHW = jnp.cumsum(valid_BHW, axis=axis, dtype=jnp.float32)
    last = jnp.take(count_BHW, jnp.array([-1]), axis=axis)
    angle_BHW = count_BHW / (last + 1e-6) * 2 * jnp.pi
    angle_BHWF = angle_BHW[..., None] * frequency_F
    pair = jnp.stack([jnp.sin(angle_BHWF), jnp.cos(angle_BHWF)], axis=-1)
    places.append(pair.reshape(*valid_BHW.shape, width // 2))
  return jnp.concatenate(places, axis=-1)
