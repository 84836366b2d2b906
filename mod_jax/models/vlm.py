"""Vision-language models: a language model that reads pictures (LLaVA 1.5).

A vision tower encodes each picture, a projector maps the features of patches to
the width of the language model, and the results replace the embeddings of
placeholders in the text (Liu et al. 2023). `place_images` makes such rows.
"""

from collections.abc import Sequence
import dataclasses
from typing import Annotated, Any

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax.errors import require
from mod_jax.layers import dense
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.token_info import IMAGE, KINDS
from mod_jax.models import lm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig, LMOutput
from mod_jax.models.protocol import StackedConfig, read_from
from mod_jax.models.vit import ViTConfig

# p-MoD (Zhang et al. 2024).
P_MOD = MoDConfig(
  # The paper's formula for any depth; in the released code, 32 is hard-coded.
  capacity_schedule='shifted_cosine',
  period=1,
  offset=0,
  kinds=('image',),
  # The gate scales the whole update of the chosen tokens. In the released code
  # it scales their feed-forward update alone, and features of skipped tokens.
  gate='alpha_tanh',
  gate_alpha=0.2,
  router_bias=True,
  router_std=0.0,
  router_loss=0.0,
)
# γ-MoD (Luo et al. 2024), for the layers of `gamma_layers` or any others.
GAMMA_MOD = MoDConfig(
  capacity=0.5,
  # Blocks choose among the tokens of the image and of the text around the
  # questions, and always process questions and answers. The released code
  # instead assumes that the first 1,059 positions are image and instructions.
  kinds=('image', 'text'),
  # The paper's softmax of two logits is the sigmoid of their difference.
  gate='sigmoid',
  shared_router=True,
  # Weight of the cross-entropy against the choice of top-k. We take its mean
  # over layers, the released code the sum.
  router_loss=0.01,
)
# Parts that only the language model may have.
_OF_LANGUAGE = ('experts', 'adaptive', 'lora')
# Default kinds of tokens: of those in a prompt, and of those after the prompt.
_DEFAULT, _ADDED = KINDS.index('question'), KINDS.index('answer')


def gamma_layers(num_layers: int) -> tuple[int, ...]:
  """Returns the blocks that γ-MoD routes: all but the first three and the last.

  The released script routes these too: it prints the ranks of attention maps
  (`--study=arank`) but does not use them.
  """
  return tuple(range(3, num_layers - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VLMConfig(StackedConfig):
  """A tower and a language model; `routing` etc. are the language model's."""

  # Encodes pictures; has no experts, learners or adapters. Patches that a
  # DynamicViT drops do not reach the language model.
  tower: ViTConfig | DynamicViTConfig = ViTConfig(num_classes=0)
  language: LMConfig = LMConfig()  # Reads pictures and text.
  # Token id of the placeholder for a picture, or for each of its patches.
  image_token: config_lib.Count = 0
  # Which features of the tower are used: an index into a list of the inputs of
  # all blocks, then the last block's output. The class token is left out.
  feature_layer: Annotated[int, config_lib.Range(ge=-256, le=256)] = -2
  # Side of the squares of patches whose mean is one token of the picture.
  pooling: config_lib.Size = 1

  # Class constants, not fields.
  kind, noun = 'vlm', 'a model that sees and reads'
  route_methods = ('pmod', 'gamma')

  def __post_init__(self):
    check = config_lib.validate(self)
    check(
      self.image_token < self.language.vocab_size,
      f"an id below the language model's {self.language.vocab_size}",
      'image_token',
    )
    require(
      not self.language.early_exit,
      '0, since no early exit is trained with pictures',
      **{'language.early_exit': self.language.early_exit},
    )
    routing = self.tower.routing
    for name, value, neutral in (
      *((name, getattr(self.tower, name), None) for name in _OF_LANGUAGE),
      ('routing.balance_loss', routing and routing.balance_loss, 0),
    ):
      require(
        not value,
        f'{neutral}, since losses and adapters are those of the language model'
        ' alone',
        **{f'tower.{name}': value},
      )
    depth = self.vit.num_layers
    check(
      -depth <= self.feature_layer <= depth and self.feature_layer != 0,
      f'1 to {depth}, or -{depth} to -1, for a tower of {depth} blocks',
      'feature_layer',
    )
    if isinstance(self.tower, DynamicViTConfig):
      last = self.tower.stages[-1]
      check(
        self.tower_depth > last,
        f'one behind the first {last} blocks, where patches are dropped last',
        'feature_layer',
      )
    check(
      self.pooling == 1 or self.has_grid,
      '1, since the tokens that the tower leaves are in no squares',
      'pooling',
    )
    check(
      self.vit.grid % self.pooling == 0,
      f'a divisor of {self.vit.grid}, the patches along a side',
      'pooling',
    )

  @property
  def tower_depth(self) -> int:
    """Number of the tower's blocks that run."""
    return self.feature_layer % (self.vit.num_layers + 1)

  @property
  def vit(self) -> ViTConfig:
    """The tower, or its backbone if the tower is a DynamicViT."""
    tower = self.tower
    return tower.backbone if isinstance(tower, DynamicViTConfig) else tower

  @property
  def has_grid(self) -> bool:
    """Whether the tower keeps all patches; if so, they form a square grid."""
    return self.tower.patches_after(self.tower_depth) == self.vit.num_patches

  @property
  def grid(self) -> int:
    """Number of a picture's tokens along a side, if `has_grid`."""
    return self.vit.grid // self.pooling

  @property
  def num_patches(self) -> int:
    """Number of a picture's tokens: patches that the tower keeps, pooled."""
    return self.tower.patches_after(self.tower_depth) // self.pooling**2

  image_size = read_from('tower.image_size')
  stack = read_from('language.stack')
  routing = read_from('language.routing')
  experts = read_from('language.experts')
  adaptive = read_from('language.adaptive')
  lora = read_from('language.lora')
  vocab_size = read_from('language.vocab_size')
  num_layers = read_from('language.num_layers')
  rules = read_from('language.rules')
  decoding_mode = read_from('language.decoding_mode')
  cannot_sample = read_from('language.cannot_sample')
  early_exit = read_from('language.early_exit')  # 0, as there is none.
  routing_mode = read_from('language.routing_mode')

  def with_parts(self, **parts) -> 'VLMConfig':
    """Returns the config with parts of the language model replaced."""
    return dataclasses.replace(self, language=self.language.with_parts(**parts))

  def dense_twin(self) -> 'VLMConfig':
    """Returns the config without any parts, also without those of the tower."""
    tower = self.tower.dense_twin()
    return dataclasses.replace(super().dense_twin(), tower=tower)

  def unrolled(self, variables) -> tuple['VLMConfig', dict[str, Any]]:
    """Like `LMConfig.unrolled`: unrolls the layers of the language model."""
    named = {n: tree.get('language', {}) for n, tree in variables.items()}
    language, named = self.language.unrolled(named)
    return dataclasses.replace(self, language=language), {
      name: {**tree, 'language': named[name]}
      for name, tree in variables.items()
    }

  def build(self, **kwargs) -> 'VLM':
    return VLM(self, Mode(**kwargs))

  def example(self) -> jax.Array:
    # Not the placeholder: to initialise, the model itself makes a picture.
    other = (self.image_token + 1) % self.language.vocab_size
    return jnp.full_like(self.language.example(), other)

  def tokens_per_block(self, length: int, images: int = 1) -> tuple[int, ...]:
    """Returns how many of a row's tokens each block processes.

    `length` includes the tokens of its `images` pictures.
    """
    return self.stack.tokens_per_block(length, images * self.num_patches)

  def flops_table(
    self, length: int, images: int = 1, *, train: bool = False, **kwargs
  ) -> list[tuple[str, dict[str, int]]]:
    """Returns (layer, forward FLOPs by part) for a row of tokens.

    `length` includes the tokens of its `images` pictures. With `train`, counts
    a pass in training, where a DynamicViT only masks the patches it drops.
    """
    tower = self.tower
    if train and isinstance(tower, DynamicViTConfig):
      tower = tower.masked
    seen, last = {}, f'block_{self.tower_depth - 1}'
    for row, parts in tower.flops_table():
      for name, count in parts.items():
        seen[name] = seen.get(name, 0) + images * count
      if row.split()[0] == last:
        break
    width, patches = self.language.width, images * self.num_patches
    projector = 2 * patches * width * (self.vit.width + width)
    of_language = self.language.flops_table(
      length, image_places=patches, **kwargs
    )
    return [
      ('tower', seen),
      ('projector', {'projector': projector}),
      *((f'language/{name}', parts) for name, parts in of_language),
    ]

  def row_prefixes(self, row):
    inner = row.removeprefix('language/')
    if inner == row:
      return (f'{row}/',)
    return tuple(f'language/{x}' for x in self.language.row_prefixes(inner))


class Projector(nn.Module):
  """Maps x_BND to the width `width`: linear map, exact GELU, linear map."""

  width: int
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x_BND: jax.Array) -> jax.Array:
    def linear(name):
      return dense.Linear(
        (self.width,),
        ('replicated', 'embed'),
        bias=True,
        dtype=self.dtype,
        name=name,
      )

    hidden_BND = nn.gelu(linear('linear_1')(x_BND), approximate=False)
    return linear('linear_2')(hidden_BND)


@flax.struct.dataclass
class VLMOutput(LMOutput):
  """The output of the language model, and which patches the tower keeps.

  Attributes:
    keep_STN: 1 for the patches of T pictures that are kept after each of S
      stages, as in `DynamicViTOutput.keep_SBN`; None unless the tower is a
      DynamicViT that only masks the patches it drops.
  """

  keep_STN: jax.Array | None = None


class VLM(nn.Module):
  """Maps tokens and pictures to next-token logits or, given targets, the loss.

  Collections and rng streams are those of `LanguageModel` and of the tower.
  """

  config: VLMConfig
  mode: Mode = Mode()  # Its `routing` is for the language model.

  def setup(self):
    config = self.config
    mode = dataclasses.replace(self.mode, routing=RoutingMode())
    self.tower = config.tower.build(**vars(mode))
    self.projector = Projector(
      config.language.width, dtype=config.language.dtype
    )
    self.language = lm.LanguageModel(config.language, self.mode)

  def __call__(
    self,
    tokens_BL: jax.Array,
    images_BIHWC: jax.Array | None = None,
    *,
    kind_BL: jax.Array | None = None,
    valid_BL: jax.Array | None = None,
    cache: lm.LMCache | None = None,
    prompt: bool = False,
    **kwargs,
  ) -> VLMOutput:
    """Returns the output of `LanguageModel` for text with pictures.

    Args:
      tokens_BL: int token ids, with `image_token` for each patch of a picture.
        In decoding (with a cache, without pictures and `prompt`), `image_token`
        is a token like any other.
      images_BIHWC: float, normalised for the tower: up to I pictures of each
        row, in order; values after them are ignored. None if no row has any.
        Where blocks choose among image tokens, a row has at most L - I · N
        other tokens, for N patches of a picture; see `place_images`.
      kind_BL: int32 index into `token_info.KINDS` of each token that is not of
        a picture; None means `question`, or `answer` for tokens after a prompt
        (with a cache, without `prompt`).
      valid_BL: False for padding, left or right; None if no row has padding.
      cache: keys and values of earlier tokens, pictures included.
      prompt: as for `LanguageModel`.
      **kwargs: as for `LanguageModel`.
    """
    config, size = self.config, self.config.image_size
    is_prompt = cache is None or prompt
    # Tokens that the model generated are no placeholders, whatever their ids.
    has_placeholders = is_prompt or images_BIHWC is not None
    if has_placeholders:
      check_images(config, tokens_BL, images_BIHWC, valid_BL)
    if self.is_initializing() and images_BIHWC is None:
      images_BIHWC = jnp.zeros((len(tokens_BL), 1, size, size, 3))
    features_BND = keep_STN = None
    if images_BIHWC is not None and images_BIHWC.shape[1]:
      features_BND, keep_STN = self.look(images_BIHWC)
    if kind_BL is None:
      kind = _DEFAULT if is_prompt else _ADDED
      kind_BL = jnp.full(tokens_BL.shape, kind, jnp.int32)
    if has_placeholders:
      kind_BL = jnp.where(tokens_BL == config.image_token, IMAGE, kind_BL)
    output = self.language(
      tokens_BL,
      kind_BL=kind_BL,
      features_BND=features_BND,
      valid_BL=valid_BL,
      cache=cache,
      prompt=prompt,
      **kwargs,
    )
    return VLMOutput(**vars(output), keep_STN=keep_STN)

  def look(self, images_BIHWC: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns features_BND, the N tokens of all pictures in a row.

    The second output is `VLMOutput.keep_STN`.
    """
    config, keep_STN = self.config, None
    images_THWC = images_BIHWC.reshape(-1, *images_BIHWC.shape[2:])
    if isinstance(config.tower, DynamicViTConfig):
      x_TND, keep_STN = self.tower.features(images_THWC, config.tower_depth)
    else:
      x_TLD = self.tower.features(images_THWC, config.tower_depth)
      x_TND = x_TLD[:, config.vit.num_prefix :]
    if config.pooling > 1:
      count, side = config.grid, config.pooling
      shape = (len(x_TND), *(count, side) * 2, x_TND.shape[-1])
      x_TND = x_TND.reshape(shape).mean(axis=(2, 4))
      x_TND = x_TND.reshape(len(x_TND), config.num_patches, -1)
    x_TND = self.projector(x_TND)
    return x_TND.reshape(len(images_BIHWC), -1, x_TND.shape[-1]), keep_STN


def check_images(config: VLMConfig, tokens_BL, images_BIHWC, valid_BL):
  """Raises UserError for pictures that do not fit the tokens.

  Numbers of placeholders are checked only outside of `jax.jit`, where the
  values of tokens are known.
  """
  size, count = config.image_size, 0
  if images_BIHWC is not None:
    shape = images_BIHWC.shape
    require(
      len(shape) == 5
      and shape[0] == tokens_BL.shape[0]
      and shape[2:] == (size, size, 3),
      f'[{tokens_BL.shape[0]}, pictures of a row, {size}, {size}, 3], as'
      ' mod_jax.models.vlm.place_images makes it',
      **{'images.shape': shape},
    )
    count = shape[1]
  if any(isinstance(x, jax.core.Tracer) for x in (tokens_BL, valid_BL)):
    return
  real_BL = np.ones(tokens_BL.shape, bool)
  if valid_BL is not None:
    real_BL = np.asarray(valid_BL, bool)
  is_image_BL = real_BL & (np.asarray(tokens_BL) == config.image_token)
  patches = config.num_patches
  for row, placed in enumerate(is_image_BL.sum(axis=-1).tolist()):
    require(
      placed % patches == 0 and placed <= count * patches,
      f'{patches} for each picture of the row, and {count} pictures at most:'
      ' give the row its pictures, or leave the placeholders out; see'
      ' mod_jax.models.vlm.place_images',
      **{f'placeholders of row {row}': placed},
    )
  if config.num_routed and config.routing.kinds is not None:
    others = int((real_BL & ~is_image_BL).sum(axis=-1).max())
    room = max(tokens_BL.shape[1] - count * patches, 0)
    require(
      others <= room,
      f'at most {room}, since places are kept for {count} pictures in each row:'
      ' pad the rows to a greater length',
      **{'tokens of text': others},
    )


@flax.struct.dataclass
class Placed:
  """Rows of text with pictures, as `VLM` takes them.

  Attributes:
    tokens_BL: int32 ids, with a placeholder for each patch.
    valid_BL: False for padding.
    kind_BL: int32 index into `token_info.KINDS`.
    images_BIHWC: float32; zeros where a row has fewer pictures than others.
      None if no row has any.
  """

  tokens_BL: np.ndarray
  valid_BL: np.ndarray
  kind_BL: np.ndarray
  images_BIHWC: np.ndarray | None

  @property
  def inputs(self):
    """(args, kwargs) for a call of the `VLM`."""
    return (self.tokens_BL, self.images_BIHWC), {
      'kind_BL': self.kind_BL,
      'valid_BL': self.valid_BL,
    }


def place_images(
  config: VLMConfig,
  rows: Sequence[Sequence[int]],
  images: Sequence[Sequence[np.ndarray]],
  kinds: Sequence[Sequence[int]] | None = None,
  *,
  text: int | None = None,
  count: int | None = None,
  side: str = 'right',
) -> Placed:
  """Replaces each picture's placeholder by `config.num_patches` placeholders.

  All rows are padded to the length of `count` pictures and `text` other tokens.

  Args:
    config: config of the model.
    rows: token ids of each row, with one `config.image_token` for each picture.
    images: the pictures of each row, first to last, [H, W, 3] as the tower
      takes them.
    kinds: index into `token_info.KINDS` of each token of `rows`; None for
      `question`.
    text: number of tokens besides pictures for which a row has room; None for
      the largest number in any row.
    count: number of pictures for which a row has room; None for the largest
      number in any row.
    side: side of the padding, 'left' or 'right'.

  Raises:
    UserError: a row has more or fewer pictures than placeholders, or is longer
      than `text` or `count` allow.
  """
  patches = config.num_patches
  require(
    len(rows) == len(images),
    'the pictures of each row; an empty list for none',
    rows=len(rows),
    images=len(images),
  )
  placed_B = [list(row).count(config.image_token) for row in rows]
  for row, (placed, shown) in enumerate(
    zip(placed_B, map(len, images), strict=True)
  ):
    require(
      placed == shown,
      f'as many placeholders (token {config.image_token}) as pictures in each'
      f' row: row {row} has {shown} pictures',
      placeholders=placed,
    )
  most = max(placed_B, default=0)
  longest = max(
    (len(row) - n for row, n in zip(rows, placed_B, strict=True)), default=0
  )
  count = most if count is None else count
  text = longest if text is None else text
  require(most <= count, f'at most {count}', **{'pictures of a row': most})
  require(
    longest <= text,
    f'at most {text}: shorten the row, or make room for more',
    **{'tokens of text in a row': longest},
  )
  length, size = count * patches + text, config.image_size
  tokens_BL = np.zeros((len(rows), length), np.int32)
  kind_BL = np.full((len(rows), length), _DEFAULT, np.int32)
  valid_BL = np.zeros((len(rows), length), bool)
  images_BIHWC = np.zeros((len(rows), count, size, size, 3), np.float32)
  for i, row in enumerate(rows):
    token_T = np.asarray(row, np.int32)
    times_T = np.where(token_T == config.image_token, patches, 1)
    token_L = np.repeat(token_T, times_T)
    start = length - len(token_L) if side == 'left' else 0
    place = np.s_[i, start : start + len(token_L)]
    tokens_BL[place], valid_BL[place] = token_L, True
    if kinds is not None:
      kind_BL[place] = np.repeat(np.asarray(kinds[i], np.int32), times_T)
    for j, image in enumerate(images[i]):
      require(
        np.shape(image) == (size, size, 3),
        f'[{size}, {size}, 3], as the tower takes them: run.preprocess makes'
        ' them of pictures',
        **{'image.shape': np.shape(image)},
      )
      images_BIHWC[i, j] = image
  kind_BL[tokens_BL == config.image_token] = IMAGE
  return Placed(tokens_BL, valid_BL, kind_BL, images_BIHWC if count else None)
