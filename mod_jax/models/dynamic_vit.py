"""DynamicViT (Rao et al. 2021): image tokens are dropped stage by stage.

Routed blocks of the backbone choose among the remaining tokens, and its
adaptive modules process only these.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.errors import require
from mod_jax.layers import dense
from mod_jax.layers.mode import Mode
from mod_jax.layers.token_info import in_order
from mod_jax.models import vit
from mod_jax.models.protocol import StackedConfig, StackedOutput, read_from
from mod_jax.models.vit import ViTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicViTConfig(StackedConfig):
  """A backbone, and where and how many of its patches are dropped."""

  backbone: ViTConfig = ViTConfig()  # The model without dropping.
  # Blocks before which patches are dropped.
  stages: tuple[config_lib.Layer, ...] = (3, 6, 9)
  # ρ: the fraction of the remaining patches that each stage keeps; or, for each
  # stage, the fraction of all patches that remain after it.
  keep: config_lib.Fraction | tuple[config_lib.Fraction, ...] = 0.7
  # How patches are scored. `predicted`: by prediction heads. For ablations (the
  # paper's Table 4), `static`: by one learned pattern for all images; `random`;
  # `class_attention`: by the class token's attention in the previous block;
  # `structural`: no score, but averages of 2×2 patches.
  score: Literal[
    'predicted', 'static', 'random', 'class_attention', 'structural'
  ] = 'predicted'
  # Temperature of the Gumbel-softmax in training.
  temperature: config_lib.Temperature = 1.0

  kind, noun = ViTConfig.kind, ViTConfig.noun
  route_methods = ()  # It is not dense.
  # The backbone's attributes; capacities are fractions of the remaining tokens.
  routing = read_from('backbone.routing')
  experts = read_from('backbone.experts')
  adaptive = read_from('backbone.adaptive')
  lora = read_from('backbone.lora')
  stack = read_from('backbone.stack')
  num_classes = read_from('backbone.num_classes')
  image_size = read_from('backbone.image_size')
  num_tokens = read_from('backbone.num_tokens')

  def __post_init__(self):
    check = config_lib.validate(self)
    layers = self.backbone.num_layers
    check(
      self.stages
      and list(self.stages) == sorted(set(self.stages))
      and self.stages[-1] < layers,
      f'ascending numbers of blocks from 0 to {layers - 1}',
      'stages',
    )
    keep = self.keep
    check(
      not isinstance(keep, tuple)
      or (
        len(keep) == len(self.stages)
        and list(keep) == sorted(keep, reverse=True)
      ),
      'a single number, or a fraction for each stage, none larger than the one'
      ' before',
      *('keep', 'stages'),
    )
    for name in ('routing', 'adaptive'):
      check(
        self.score != 'structural' or getattr(self, name) is None,
        f'backbone.{name}=None, since pooled patches need a dense backbone, or'
        ' another score',
        'score',
      )
    check(
      self.backbone.reduction is None,
      'backbone.reduction=None, since patches of which some were merged cannot'
      ' be dropped',
      'stages',
    )
    # Attention in the block before can only score the tokens of that block.
    routed = [c is not None for c in self.capacities]
    by_class = self.score == 'class_attention'
    for stage in self.stages:
      check(
        not (routed[stage] and self.routing.scorer.needs_attention),
        f'stages without {stage}, as that block is routed by the attention in'
        ' the one before, so that no patch may be dropped in between',
        'stages',
      )
      check(
        not by_class or (stage > 0 and not routed[stage - 1]),
        f'stages without {stage}, as this score is the attention in the block'
        ' before, which must be there and not be routed; or another score',
        *('stages', 'score'),
      )

  @property
  def learned(self) -> bool:
    """Whether the score is learned; if so, training masks dropped patches."""
    return self.score in ('predicted', 'static')

  @property
  def targets(self) -> tuple[float, ...]:
    """Target fraction of all patches that remain after each stage."""
    if self.score == 'structural':
      return tuple(n / self.backbone.num_patches for n in self.kept)
    if isinstance(self.keep, tuple):
      return self.keep
    return tuple(self.keep ** (s + 1) for s in range(len(self.stages)))

  @functools.cached_property
  def kept(self) -> tuple[int, ...]:
    """Number of patches that remain after each stage, in inference."""
    if self.score == 'structural':
      sides = [self.backbone.grid]
      for _ in self.stages:
        sides.append(-(-sides[-1] // 2))
      return tuple(side**2 for side in sides[1:])
    # Round to nine decimals first, so that 0.7 · 10 gives 7 patches.
    return tuple(
      max(1, math.floor(round(self.backbone.num_patches * target, 9)))
      for target in self.targets
    )

  def build(self, **kwargs) -> 'DynamicViT':
    return DynamicViT(self, Mode(**kwargs))

  def dense_twin(self) -> ViTConfig:
    """Returns the dense backbone, which drops nothing."""
    return self.backbone.dense_twin()

  def with_parts(self, **parts):
    return dataclasses.replace(self, backbone=self.backbone.with_parts(**parts))

  def example(self) -> jax.Array:
    return self.backbone.example()

  @property
  def masked(self) -> 'DynamicViTConfig':
    """The config whose forward pass has the FLOPs of a pass in training.

    If the score is learned, all patches remain, since training only masks the
    dropped ones (but see `Mode.masks`).
    """
    return dataclasses.replace(self, keep=1.0) if self.learned else self

  def patches_after(self, depth: int) -> int:
    """Returns how many patches remain after the first `depth` blocks."""
    counts = [
      n
      for n, stage in zip(self.kept, self.stages, strict=True)
      if stage < depth
    ]
    return counts[-1] if counts else self.backbone.num_patches

  def _tokens_left(self) -> tuple[int, ...]:
    """Returns how many of an image's tokens reach each block."""
    prefix, layers = self.backbone.num_prefix, self.backbone.num_layers
    return tuple(prefix + self.patches_after(i + 1) for i in range(layers))

  def tokens_per_block(self) -> tuple[int, ...]:
    return tuple(
      layer.tokens(tokens)
      for layer, tokens in zip(
        self.stack.layers, self._tokens_left(), strict=True
      )
    )

  def flops_table(self) -> list[tuple[str, dict[str, int]]]:
    """See `StackedConfig`; the FLOPs are those in inference."""
    backbone = self.backbone
    rows = [('embed', backbone.embed_flops())]
    for i, tokens in enumerate(self._tokens_left()):
      if i in self.stages and self.score == 'predicted':
        patches = self.patches_after(i)
        parts = {
          'norm': vit.norm_flops(patches, backbone.width),
          'prediction': self.prediction_flops(patches),
        }
        rows.append((f'prediction_{self.stages.index(i)}', parts))
      rows.append((self.stack.names[i], backbone.block_flops(i, tokens)))
    rows.append(('head', backbone.head_flops(self.kept[-1])))
    return rows

  def row_prefixes(self, row):
    return self.backbone.row_prefixes(row)

  def prediction_flops(self, patches: int) -> int:
    """Returns a prediction head's forward FLOPs on this number of patches."""
    sizes = PredictionHead.sizes(self.backbone.width)
    return 2 * patches * sum(a * b for a, b in sizes)


def equal_stages(num_layers: int, count: int = 3) -> tuple[int, ...]:
  """Returns `count` equally spaced blocks before which to drop patches.

  In a model of few blocks, the result has fewer numbers, without repetition.
  """
  stages = {i * num_layers // (count + 1) for i in range(1, count + 1)}
  return tuple(sorted(stages))


@flax.struct.dataclass
class DynamicViTOutput(StackedOutput):
  """What a forward pass returns. S stages, N patches.

  Attributes:
    logits_BV: float32 logits of the classes; None without a head.
    features_BLD: the remaining tokens after the last norm, the class token
      first; all tokens if dropped patches are only masked.
    keep_SBN: float32, 1 for patches kept after each stage; differentiable
      (straight-through) if dropped patches are only masked. Empty for
      `structural`.
    probability_SBN: float32 probability of keeping each remaining patch, by a
      learned score; 0 for patches already dropped. None for other scores.
    aux: aux of each layer, by kind, for the tokens that reached the layer; see
      `stack.collect`.
  """

  logits_BV: jax.Array
  features_BLD: jax.Array
  keep_SBN: jax.Array
  probability_SBN: jax.Array | None = None
  aux: tuple[dict[str, Any], ...] = ()


class PredictionHead(nn.Module):
  """Computes log-probabilities of keeping and dropping each patch.

  They depend on one half of the patch's embedding, and on the mean of the other
  half over all kept patches (Rao et al. 2021, section 3.2).
  """

  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @staticmethod
  def sizes(width: int) -> tuple[tuple[int, int], ...]:
    """Returns the input and output widths of the linear maps."""
    return (
      (width, width),
      (width, width // 2),
      (width // 2, width // 4),
      (width // 4, 2),
    )

  @nn.compact
  def __call__(self, x_BND: jax.Array, keep_BN: jax.Array) -> jax.Array:
    """Returns float32 log-probabilities [B, N, 2] of keeping and dropping.

    `keep_BN` is 1 for the patches that were kept so far.
    """
    width = x_BND.shape[-1]

    def linear(i, x, out_dtype=None):
      return dense.Linear(
        self.sizes(width)[i][1:],
        ('replicated', 'replicated'),
        bias=True,
        dtype=self.dtype,
        out_dtype=out_dtype,
        name=f'linear_{i}',
      )(x)

    x_BND = dense.layer_norm(1e-5, self.dtype, 'norm')(x_BND)
    x_BND = nn.gelu(linear(0, x_BND), approximate=False)
    local_BNF, global_BNF = jnp.split(x_BND, [width // 2], axis=-1)
    keep_BN1 = keep_BN[..., None].astype(jnp.float32)
    total_B1F = (global_BNF * keep_BN1).sum(axis=1, keepdims=True)
    # If no patch is kept, the mean is 0 instead of NaN.
    count_B11 = jnp.maximum(keep_BN1.sum(axis=1, keepdims=True), 1e-6)
    mean_BNF = jnp.broadcast_to(total_B1F / count_B11, global_BNF.shape)
    # Cast only here, so that the gradient of the mean is a float32 sum.
    x_BND = jnp.concatenate(
      [local_BNF, mean_BNF.astype(local_BNF.dtype)], axis=-1
    )
    x_BND = nn.gelu(linear(1, x_BND), approximate=False)
    x_BND = nn.gelu(linear(2, x_BND), approximate=False)
    # Without rounding to bfloat16: many patches would tie.
    return jax.nn.log_softmax(linear(3, x_BND, 'float32'), axis=-1)


class DynamicViT(nn.Module):
  """Maps images to class logits, dropping patches stage by stage.

  The parameters are the backbone's plus `prediction_<stage>` or
  `pattern_<stage>`, so dense checkpoints load. In training, learned scores
  decide by hard Gumbel-softmax and dropped patches are masked, so that
  gradients reach the decision. Dropped patches are removed in inference, with
  scores that are not learned, and with `Mode(masks=False)`.

  Rng streams: `params`; `gumbel` to sample masks; `routing` for random scores;
  `stochastic_depth` as in `ViT`.
  """

  config: DynamicViTConfig
  mode: Mode = Mode()

  def setup(self):
    config = self.config
    scored = ()
    if config.score == 'class_attention':
      scored = tuple(i - 1 for i in config.stages)
    self.backbone = vit.ViT(config.backbone, self.mode, scored)
    nn.share_scope(self, self.backbone)
    if config.score == 'predicted':
      self.prediction = [
        PredictionHead(dtype=config.backbone.dtype) for _ in config.stages
      ]
    elif config.score == 'static':
      # Start near even odds, so that the Gumbel noise explores.
      init = nn.with_logical_partitioning(
        nn.initializers.normal(0.01), ('length', 'replicated')
      )
      shape = (config.backbone.num_patches, 2)
      self.pattern_SN2 = [
        self.param(f'pattern_{s}', init, shape)
        for s in range(len(config.stages))
      ]

  def __call__(
    self, images_BHWC: jax.Array, decisions_SBN: jax.Array | None = None
  ) -> DynamicViTOutput:
    """Returns logits, features and the kept patches.

    `images_BHWC` are normalised, of the config's size and three channels.
    `decisions_SBN` is 1 for patches to keep after each stage; all other patches
    are masked, as in training. With None, the scores decide.
    """
    if decisions_SBN is not None:
      self._check(decisions_SBN, images_BHWC.shape[0])
    depth = self.config.backbone.num_layers
    x_BLD, keep_BN, output = self._blocks(images_BHWC, depth, decisions_SBN)
    logits_BV, x_BLD = self.backbone.classify(x_BLD, keep_BN)
    return output.replace(logits_BV=logits_BV, features_BLD=x_BLD)

  def features(
    self, images_BHWC: jax.Array, depth: int
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns x_BKD, the K patches that remain after the first `depth` blocks.

    If dropped patches are only masked, K is the same as if they were removed:
    kept patches are chosen first, by probability, and the features of a chosen
    patch that is not kept are 0. The second output is
    `DynamicViTOutput.keep_SBN` if dropped patches are masked, and else None.
    """
    if self.is_initializing():  # Creates the parameters of later layers too.
      self(images_BHWC)
    x_BLD, keep_BN, output = self._blocks(images_BHWC, depth)
    x_BND = x_BLD[:, self.config.backbone.num_prefix :]
    if keep_BN is None:
      return x_BND, None
    # Probabilities are at most 1, so all kept patches precede the others.
    order_BN = 2 * keep_BN + output.probability_SBN[-1]
    left = self.config.patches_after(depth)
    index_BK = routing.select_top_k(order_BN, left).index_BK
    # The product with keep_BN gives decisions a straight-through gradient.
    x_BKD = routing.gather_tokens(
      x_BND * keep_BN[..., None].astype(x_BND.dtype), index_BK
    )
    return x_BKD, output.keep_SBN

  def _blocks(self, images_BHWC, depth, decisions_SBN=None):
    """Runs the first `depth` blocks.

    Returns the tokens, a mask of the kept patches (None if dropped patches are
    removed) and the output without logits and features.
    """
    config = self.config
    masked = decisions_SBN is not None or (
      self.mode.train and self.mode.masks and config.learned
    )
    x_BLD = self.backbone.embed(images_BHWC)
    prefix = config.backbone.num_prefix
    batch, length, _ = x_BLD.shape
    patches = length - prefix
    info = in_order(x_BLD)
    # Original index of each patch in x, and whether it is kept.
    index_BN = jnp.broadcast_to(jnp.arange(patches), (batch, patches))
    keep_BN = jnp.ones((batch, patches), jnp.float32)
    kept, probabilities, auxes, attention_BL = [], [], [], None

    for i in range(depth):
      if i in config.stages and config.score == 'structural':
        x_BND = _pool(x_BLD[:, prefix:])
        x_BLD = jnp.concatenate([x_BLD[:, :prefix], x_BND], axis=1)
        info = in_order(x_BLD)
      elif i in config.stages:
        stage = config.stages.index(i)
        x_BND = x_BLD[:, prefix:]
        log_BN2 = self._log_probability(stage, x_BND, keep_BN, index_BN)
        if log_BN2 is not None:
          probability_BN = jnp.exp(log_BN2[..., 0]) * keep_BN
          probabilities.append(_spread(probability_BN, index_BN, patches))
        if masked:
          if decisions_SBN is None:
            keep_BN *= self._draw(log_BN2)
          else:
            keep_BN *= decisions_SBN[stage].astype(jnp.float32)
          keep_BL = jnp.pad(keep_BN, ((0, 0), (prefix, 0)), constant_values=1.0)
          info = info.dropped(keep_BL)
        else:
          score_BN = self._score(log_BN2, attention_BL, index_BN)
          index_BK = routing.select_top_k(score_BN, config.kept[stage]).index_BK
          prefix_BP = jnp.broadcast_to(
            jnp.arange(prefix, dtype=index_BK.dtype), (batch, prefix)
          )
          tokens_BK = jnp.concatenate([prefix_BP, prefix + index_BK], axis=1)
          x_BLD = routing.gather_tokens(x_BLD, tokens_BK)
          info = info.gather(routing.Selection(tokens_BK))
          index_BN = jnp.take_along_axis(index_BN, index_BK, axis=1)
          keep_BN = jnp.ones(index_BN.shape, jnp.float32)
        kept.append(_spread(keep_BN, index_BN, patches))
      output = self.backbone.step(i, x_BLD, attention_BL, info)
      x_BLD, attention_BL = output.x_BLD, output.aux.get('attention')
      auxes.append(output.aux)
    output = DynamicViTOutput(
      None,
      None,
      jnp.stack(kept) if kept else jnp.zeros((0, batch, patches)),
      jnp.stack(probabilities) if probabilities else None,
      tuple(auxes),
    )
    return x_BLD, keep_BN if masked else None, output

  def _check(self, decisions_SBN, batch):
    config = self.config
    shape = (len(config.stages), batch, config.backbone.num_patches)
    require(
      config.score != 'structural' and decisions_SBN.shape == shape,
      f'one for each stage, image and patch {shape}, and a score that decides',
      **{'decisions.shape': decisions_SBN.shape, 'score': config.score},
    )

  def _log_probability(self, stage, x_BND, keep_BN, index_BN):
    """Returns log-probabilities of keep and drop; None if not learned."""
    match self.config.score:
      case 'predicted':
        return self.prediction[stage](x_BND, keep_BN)
      case 'static':
        log_N2 = jax.nn.log_softmax(self.pattern_SN2[stage], axis=-1)
        return log_N2[index_BN]
    return None

  def _draw(self, log_BN2):
    """Samples decisions, 1 to keep, with soft gradients (Jang et al. 2017)."""
    noise = jax.random.gumbel(self.make_rng('gumbel'), log_BN2.shape)
    soft_BN2 = jax.nn.softmax((log_BN2 + noise) / self.config.temperature)
    soft_BN = soft_BN2[..., 0]
    hard_BN = (soft_BN >= 0.5).astype(jnp.float32)
    # The parentheses make the sum exactly 0 or 1.
    return hard_BN + (soft_BN - jax.lax.stop_gradient(soft_BN))

  def _score(self, log_BN2, attention_BL, index_BN):
    """Returns a score of each patch; the patches of largest score are kept."""
    match self.config.score:
      case 'random':
        return routing.gaussian_scores(self.make_rng('routing'), index_BN.shape)
      case 'class_attention':
        return attention_BL[:, self.config.backbone.num_prefix :]
    # Log-odds, because probabilities near 1 would tie in float32.
    return log_BN2[..., 0] - log_BN2[..., 1]


def _pool(x_BND: jax.Array) -> jax.Array:
  """Returns means of 2×2 patches, or of fewer at the edges of an odd grid."""
  batch, patches, width = x_BND.shape
  side = math.isqrt(patches)
  x_BHWD = x_BND.reshape(batch, side, side, width)
  x_BHWD = nn.avg_pool(
    x_BHWD,
    (2, 2),
    strides=(2, 2),
    padding=((0, side % 2), (0, side % 2)),
    count_include_pad=False,
  )
  return x_BHWD.reshape(batch, -1, width)


def _spread(value_BK, index_BK, length):
  """Returns value_BN: each value at its patch `index_BK`, 0 elsewhere."""
  zeros_BN = jnp.zeros((value_BK.shape[0], length), value_BK.dtype)
  return routing.scatter_add_tokens(zeros_BN, index_BK, value_BK)
