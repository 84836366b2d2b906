"""ResNet's features: bottlenecks with frozen batch normalisation."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import config as config_lib

EXPANSION = 4  # Ratio of a bottleneck's output channels to its inner channels.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
  """Sizes of a ResNet (He et al. 2016) without its head; default: ResNet-50.

  The stride is in the 3×3 convolution, as in torchvision and timm.
  """

  stem: config_lib.Width = 64  # Channels of the 7×7 convolution.
  depths: tuple[config_lib.Size, ...] = (3, 4, 6, 3)  # Blocks of each stage.
  # Channels within the blocks of each stage; four times as many come out.
  widths: tuple[config_lib.Size, ...] = (64, 128, 256, 512)

  def __post_init__(self):
    check = config_lib.validate(self)
    check(
      self.depths and len(self.depths) == len(self.widths),
      'as many widths as depths, at least one',
      *('depths', 'widths'),
    )

  @property
  def stride(self) -> int:
    """Pixels between neighbouring features."""
    return 2 ** (len(self.depths) + 1)

  @property
  def channels(self) -> int:
    """Channels of the features."""
    return EXPANSION * self.widths[-1]

  def flops(self, height: int, width: int) -> int:
    """Returns the convolutions' FLOPs for a picture of this size in pixels."""
    height, width = halved(height), halved(width)
    total = 7**2 * 3 * self.stem * height * width
    height, width = halved(height), halved(width)
    inputs = self.stem
    for stage, (depth, inner) in enumerate(
      zip(self.depths, self.widths, strict=True)
    ):
      outputs = EXPANSION * inner
      for i in range(depth):
        total += inputs * inner * height * width
        if i == 0 and stage > 0:
          height, width = halved(height), halved(width)
        area = height * width
        total += (9 * inner * inner + inner * outputs) * area
        if i == 0:
          total += inputs * outputs * area
        inputs = outputs
    return 2 * total


def halved(side: int) -> int:
  """Returns the side after a convolution of stride 2 that pads evenly."""
  return (side + 1) // 2


class FrozenNorm(nn.Module):
  """BatchNorm with fixed statistics, scale and shift.

  All four arrays are in the collection `batch_stats`, which is not trained.
  """

  epsilon: float = 1e-5
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    shape = x_BHWC.shape[-1:]
    scale_C, bias_C, mean_C, var_C = (
      self.variable('batch_stats', name, getattr(jnp, init), shape).value
      for name, init in (
        *(('scale', 'ones'), ('bias', 'zeros')),
        *(('mean', 'zeros'), ('var', 'ones')),
      )
    )
    factor_C = scale_C * jax.lax.rsqrt(var_C + self.epsilon)
    shift_C = bias_C - mean_C * factor_C
    # Round only the result: the two terms may be large and nearly cancel.
    return (x_BHWC * factor_C + shift_C).astype(self.dtype)


class ResNet(nn.Module):
  """Maps image_BHWC to x_BHWC, at 1/`config.stride` of the height and width.

  Collections: `params`, the convolutions; `batch_stats`, the frozen norms.
  """

  config: ResNetConfig
  dtype: str = dataclasses.field(default='float32', kw_only=True)

  @nn.compact
  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    def convolved(x, name, channels, side, stride=1):
      x = nn.Conv(
        *(channels, (side, side), stride),
        # Explicit: 'SAME' would pad a strided convolution unevenly.
        padding=side // 2,
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        dtype=self.dtype,
        name=f'{name}_conv',
      )(x)
      return FrozenNorm(dtype=self.dtype, name=f'{name}_norm')(x)

    x = nn.relu(convolved(x_BHWC, 'stem', self.config.stem, 7, 2))
    x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
    for stage, (depth, inner) in enumerate(
      zip(self.config.depths, self.config.widths, strict=True)
    ):
      for i in range(depth):
        name = f'stage_{stage}_{i}'
        stride = 2 if i == 0 and stage > 0 else 1
        y = nn.relu(convolved(x, f'{name}_0', inner, 1))
        y = nn.relu(convolved(y, f'{name}_1', inner, 3, stride))
        y = convolved(y, f'{name}_2', EXPANSION * inner, 1)
        if i == 0:
          x = convolved(x, f'{name}_short', EXPANSION * inner, 1, stride)
        x = nn.relu(x + y)
    return x
