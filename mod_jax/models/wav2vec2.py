"""Wav2Vec2 for speech recognition by CTC, dense, routed or adaptive.

Baevski et al. 2020; XLS-R is Babu et al. 2022.
"""

import dataclasses
import functools
from typing import Any, Literal

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.layers import dense
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.stack import Stack, StackConfig
from mod_jax.layers.token_info import in_order
from mod_jax.models.protocol import (
  StackedConfig,
  StackedOutput,
  check_encoder,
  check_no_class_token,
)

# Pattern of the parameters that are frozen when a pretrained model is tuned.
CONVOLUTIONS = r'^conv_(norm_)?\d+/'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wav2Vec2Config(StackedConfig):
  """Sizes and options of a `Wav2Vec2`; the defaults are the base model."""

  # `group`: the first convolution is followed by a norm of each channel over
  # time, convolutions have no biases, and layers are post-norm. `layer`: every
  # convolution is followed by a layer norm, and layers are pre-norm.
  variant: Literal['group', 'layer'] = 'group'
  vocab_size: config_lib.Size = 32  # Characters, the blank included (V).
  num_layers: config_lib.Unrolled = 12  # Blocks.
  width: config_lib.Width = 768  # Width of the features (D).
  num_heads: config_lib.Size = 12  # Attention heads (H).
  mlp_dim: config_lib.Size = 3072  # Hidden width of the MLPs (F).
  # Channels of the convolutions over the waveform.
  conv_dims: tuple[config_lib.Size, ...] = (512,) * 7
  # Kernel sizes of these convolutions. The first counts samples; each later one
  # counts outputs of the convolution before it.
  conv_kernels: tuple[config_lib.Size, ...] = (10, 3, 3, 3, 3, 2, 2)
  # Strides of these convolutions, in the same units.
  conv_strides: tuple[config_lib.Size, ...] = (5, 2, 2, 2, 2, 2, 2)
  # Kernel size, in frames, of the convolution that gives positions.
  position_kernel: config_lib.Size = 128
  position_groups: config_lib.Size = 16  # Channel groups of that convolution.
  norm_epsilon: config_lib.Epsilon = 1e-5  # Epsilon of all norms.
  routing: VisionRoutingConfig | None = None  # None = no routed blocks.
  experts: ExpertsConfig | None = None  # Mixtures of experts; None = none.
  adaptive: AdaptiveConfig | None = None  # Adaptive modules; None = none.
  lora: LoRAConfig | None = None  # Low-rank adapters; None = none.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Compute dtype.
  remat: stack_lib.Remat = 'none'  # What is saved for the backward pass.

  # Class constants, not fields.
  kind, noun = 'speech', 'a model of speech'
  route_methods = ('amod', 'mod', 'acm')

  def __post_init__(self):
    check = config_lib.validate(self)
    for name, divisor in (
      ('num_heads', self.num_heads),
      ('position_groups', self.position_groups),
    ):
      check(self.width % divisor == 0, f'{name} to divide width', name, 'width')
    convolutions = ('conv_dims', 'conv_kernels', 'conv_strides')
    lengths = {len(getattr(self, name)) for name in convolutions}
    check(
      len(lengths) == 1 and 0 not in lengths,
      'one number of each for every convolution',
      *convolutions,
    )
    check_no_class_token(self.routing)
    _ = self.stack  # Raises if routing and so on do not fit the layers.

  @functools.cached_property
  def stack(self) -> StackConfig:
    block = BlockConfig(
      attention=AttentionConfig.of_encoder(self.width, self.num_heads),
      mlp=MLPConfig(
        width=self.width, hidden=self.mlp_dim, kind='gelu', bias=True
      ),
      norm='layer',
      norm_place='pre' if self.variant == 'layer' else 'post',
      norm_epsilon=self.norm_epsilon,
      dtype=self.dtype,
    )
    return StackConfig(layers=self._layers(block), remat=self.remat)

  def frames(self, samples):
    """Returns the number of frames for a number, or an array, of samples.

    The result is below 1 if there are too few samples for a frame.
    """
    for kernel, stride in zip(
      self.conv_kernels, self.conv_strides, strict=True
    ):
      samples = (samples - kernel) // stride + 1
    return samples

  def samples(self, frames: int) -> int:
    """Returns the least number of samples that gives a number of frames."""
    return self._lengths(frames)[0]

  def _lengths(self, frames: int) -> list[int]:
    """Returns the least numbers of samples, then of each convolution's outputs.

    The last convolution's outputs are the given number of frames.
    """
    lengths = [frames]
    for kernel, stride in zip(
      self.conv_kernels[::-1], self.conv_strides[::-1], strict=True
    ):
      lengths.insert(0, (lengths[0] - 1) * stride + kernel)
    return lengths

  def build(self, **kwargs) -> 'Wav2Vec2':
    return Wav2Vec2(self, Mode(**kwargs))

  def example(self) -> jax.Array:
    return jnp.zeros((1, self.samples(2)))

  def flops_table(self, length: int) -> list[tuple[str, dict[str, int]]]:
    """Returns (layer, forward FLOPs by part) for `length` frames.

    Only the samples that these frames need are counted.
    """
    _, *lengths = self._lengths(length)
    inputs = (1, *self.conv_dims[:-1])
    convolutions = [
      2 * outputs * kernel * before * after
      for outputs, kernel, before, after in zip(
        *(lengths, self.conv_kernels, inputs, self.conv_dims), strict=True
      )
    ]
    positions = self.position_kernel * self.width**2 // self.position_groups
    return [
      ('convolutions', {'conv': sum(convolutions)}),
      (
        'embed',
        {
          'embed': 2 * length * self.conv_dims[-1] * self.width,
          'conv': 2 * length * positions,
        },
      ),
      *self.stack.flops_table(length),
      ('head', {'head': 2 * length * self.width * self.vocab_size}),
    ]

  def row_prefixes(self, row):
    rows = {
      'convolutions': ('conv_',),
      'embed': ('feature_norm/', 'project/', 'mask_', 'position_conv/'),
      'head': ('head/',),
    }
    # The norm is before the layers if they are post-norm, and else after them.
    rows['embed' if self.variant == 'group' else 'head'] += ('norm/',)
    return rows.get(row) or super().row_prefixes(row)


@flax.struct.dataclass
class Wav2Vec2Output(StackedOutput):
  """What a forward pass returns.

  Attributes:
    logits_BLV: float32 logits of the characters and the blank, for each frame.
    features_BLD: the frames after the last layer and, in the variant `layer`,
      after the norm that follows it.
    aux: aux of each layer, by kind; see `stack.collect`.
  """

  logits_BLV: jax.Array
  features_BLD: jax.Array
  aux: tuple[dict[str, Any], ...] = ()


class Wav2Vec2(nn.Module):
  """Maps recordings to logits of characters, about 50 frames a second.

  In the variant `layer`, padding that is masked does not change a row's logits.
  In `group` it does, as in the published models: the first norm is over all
  frames, padding included.

  Rng streams: `params`; `routing` for Gaussian scores; `gumbel` to sample
  choices of learners.
  """

  config: Wav2Vec2Config
  mode: Mode = Mode()

  def setup(self):
    config = self.config
    check_encoder(self.mode)
    by_layer = config.variant == 'layer'

    def norm():
      return dense.layer_norm(config.norm_epsilon, config.dtype, None)

    self.conv = [
      nn.Conv(
        channels,
        (kernel,),
        strides=stride,
        padding='VALID',
        use_bias=by_layer,
        dtype=config.dtype,
      )
      for channels, kernel, stride in zip(
        *(config.conv_dims, config.conv_kernels, config.conv_strides),
        strict=True,
      )
    ]
    if by_layer:
      self.conv_norm = [norm() for _ in config.conv_dims]
    else:
      self.conv_norm = [_ChannelNorm(config.norm_epsilon)]
    self.feature_norm = norm()
    self.project = dense.Linear(
      (config.width,), ('replicated', 'embed'), bias=True, dtype=config.dtype
    )
    # Replaces the features of frames that are masked in training.
    self.mask_embedding = self.param(
      'mask_embedding',
      nn.with_logical_partitioning(nn.initializers.uniform(1.0), ('embed',)),
      (config.width,),
    )
    self.position_conv = nn.Conv(
      config.width,
      (config.position_kernel,),
      padding=[(config.position_kernel // 2,) * 2],
      feature_group_count=config.position_groups,
      conv_general_dilated=_conv_of_rows,
      dtype=config.dtype,
    )
    self.stack = Stack(config.stack, self.mode)
    nn.share_scope(self, self.stack)
    self.norm = norm()
    self.head = dense.Linear(
      (config.vocab_size,),
      ('embed', 'replicated'),
      bias=True,
      dtype=config.dtype,
      out_dtype='float32',
    )

  def __call__(
    self,
    wave_BT: jax.Array,
    valid_BL: jax.Array | None = None,
    masked_BL: jax.Array | None = None,
  ) -> Wav2Vec2Output:
    """Returns logits, features and each layer's aux.

    Args:
      wave_BT: samples of mean 0 and variance 1, with zeros as padding.
      valid_BL: False for frames of padding, to which no frame then attends;
        None if there is no padding, or frames may attend to the padding.
      masked_BL: True for frames that SpecAugment hides (Park et al. 2019).
    """
    config = self.config
    x_BLC = wave_BT[..., None].astype(config.dtype)
    for i, conv in enumerate(self.conv):
      x_BLC = conv(x_BLC)
      if config.variant == 'layer':
        x_BLC = self.conv_norm[i](x_BLC)
      elif not i:
        kernel_KC = conv.variables['params']['kernel'][:, 0]
        stride = config.conv_strides[0]
        x_BLC = self.conv_norm[0](x_BLC, wave_BT, kernel_KC, stride)
      x_BLC = nn.gelu(x_BLC, approximate=False)
    x_BLD = self.project(self.feature_norm(x_BLC))
    if masked_BL is not None:
      mask_D = self.mask_embedding.astype(x_BLD.dtype)
      x_BLD = jnp.where(masked_BL[..., None], mask_D, x_BLD)
    if valid_BL is not None:
      x_BLD = jnp.where(valid_BL[..., None], x_BLD, 0)
    place_BLD = self.position_conv(x_BLD)[:, : x_BLD.shape[1]]
    x_BLD += nn.gelu(place_BLD, approximate=False)
    x_BLD = parallel.constrain(x_BLD, 'batch', 'length', 'act_embed')
    if config.variant == 'group':
      x_BLD = self.norm(x_BLD)
    output = self.stack(x_BLD, in_order(x_BLD, valid_BL))
    x_BLD = output.x_BLD
    if config.variant == 'layer':
      x_BLD = self.norm(x_BLD)
    return Wav2Vec2Output(self.head(x_BLD), x_BLD, output.aux)


class _ChannelNorm(nn.Module):
  """Normalises each channel of a convolved waveform over time.

  The convolution's output is much larger than the waveform, and is a linear
  function of the waveform's windows. Hence the channels' means and variances
  follow from the windows' mean and covariance, without a pass over the output.
  """

  epsilon: float

  @nn.compact
  def __call__(self, x_BLC, wave_BT, kernel_KC, stride):
    """Normalises x_BLC, which is wave_BT convolved without a bias."""
    (length, channels), taps = x_BLC.shape[1:], len(kernel_KC)
    scale_C = self.param('scale', nn.initializers.ones, (channels,))
    bias_C = self.param('bias', nn.initializers.zeros, (channels,))
    wave_BT, kernel_KC = (a.astype(jnp.float32) for a in (wave_BT, kernel_KC))
    last = (length - 1) * stride + 1
    window_BKL = jnp.stack(
      [wave_BT[:, k : k + last : stride] for k in range(taps)], axis=1
    )
    mean_BK = window_BKL.mean(axis=-1)
    window_BKL -= mean_BK[..., None]
    # Multiply in full precision: neighbouring samples are nearly equal, so the
    # variance of a high-pass channel is a small difference of large terms.
    product = functools.partial(jnp.einsum, precision='highest')
    covariance_BKJ = product('BKL,BJL->BKJ', window_BKL, window_BKL) / length
    variance_BC = product('BKJ,KC,JC->BC', covariance_BKJ, *(kernel_KC,) * 2)
    factor_BC = scale_C * jax.lax.rsqrt(variance_BC + self.epsilon)
    shift_BC = bias_C - product('BK,KC->BC', mean_BK, kernel_KC) * factor_BC
    y_BLC = x_BLC * factor_BC[:, None] + shift_BC[:, None]
    return y_BLC.astype(x_BLC.dtype)


def _conv_of_rows(x_BLD, kernel, *args, **kwargs):
  """Like `jax.lax.conv_general_dilated`; each device convolves its own rows.

  If the compiler (XLA of jax 0.11.2) shards a grouped convolution, its kernel's
  gradient is wrong on a mesh of which only some axes split the rows.
  """

  def conv(x_BLD, kernel):
    return (jax.lax.conv_general_dilated(x_BLD, kernel, *args, **kwargs),)

  rows = ('batch', 'length', 'act_embed')
  kernel_axes = ('replicated',) * kernel.ndim
  run = parallel.per_device(conv, inputs=(rows, kernel_axes), outputs=(rows,))
  return run(x_BLD, kernel)[0]


# Sizes by the names that papers use. Keywords override any field.
base = functools.partial(Wav2Vec2Config)
large = functools.partial(
  Wav2Vec2Config, width=1024, num_layers=24, num_heads=16, mlp_dim=4096
)
xlsr_300m = functools.partial(large, variant='layer')
